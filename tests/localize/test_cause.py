"""Who is to blame, and the sentence that says why."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from pytest_edgeq.localize.cause import blame
from pytest_edgeq.localize.mistakes import lossy
from pytest_edgeq.localize.rows import Diagnostics, LayerErrors
from pytest_edgeq.numerics.findings import (
    ACCUMULATED_LOSS,
    CLIPPED_INPUT,
    WRONG_QPARAMS,
    WRONG_RESULT,
    Finding,
    Harm,
    Place,
)
from pytest_edgeq.numerics.static_health import Calibration
from tests.localize.rows import culprit, row, wrong

SOUND = Diagnostics(
    scale=0.1,
    zero_point=0,
    code_range=(-128, 127),
    elements=4096,
    codes=(-120, 125),
    reference=(-12.1, 12.6),
    channel_noise=(1.0, 1.1, 0.9, 1.0, 1.2, 0.8),
    weight_maxima=(1.0, 0.8, 0.5),
    weight_granularity="per_channel",
    scheme="int8",
)


def judged(
    changes: dict[int, dict[str, Any]],
    evidence: dict[int, dict[str, Any]] | None = None,
    n: int = 8,
) -> LayerErrors:
    """Judge `n` layers of which some are changed."""
    given = evidence or {}
    return blame(
        [row(i, **({"local_sqnr_db": 40.0 + i % 3} | changes.get(i, {}))) for i in range(n)],
        [replace(SOUND, **given.get(i, {})) for i in range(n)],
    )


def test_a_sound_model_has_no_culprit() -> None:
    """Nothing stands out, and every verdict says so."""
    errors = judged({})
    assert errors.culprit is None
    assert errors.cause == "no single layer stands out: the error accumulates over 8 layers"
    assert {each.verdict for each in errors.rows} == {"sound"}
    # Three layers of any kind have no quartiles.
    assert judged({2: {"local_sqnr_db": 12.0}}, n=4).culprit is None
    # An op without a match was not measured.
    errors = judged({2: {"matched": False, "local_sqnr_db": None, "excess_lsb": None}})
    assert (errors.culprit, errors.rows[2].verdict) == (None, "unmatched")


FLOAT = {"dtypes": {"input": "float32", "weight": "float32", "output": "float32"}}
IN_FLOAT = {"scheme": "float", "scale": None, "zero_point": None, "code_range": None}


def sqnr(*values: float) -> dict[int, dict[str, Any]]:
    """Changes that give the first ops an SQNR."""
    return {i: {"local_sqnr_db": value} for i, value in enumerate(values)}


SCALE = wrong("its output: expected the reference's scale 0.1, got 0.2 (2 ×)", WRONG_QPARAMS)
FLOATS = {"excess_lsb": 150_000.0, "local_lsb_error": None}
FEW = {"scale": 0.02, "elements": 32, "beyond": (0.0, 8 / 32)}
CLOSE = {i: {"local_sqnr_db": 143.0, "dtypes": {"output": "float32"}} for i in range(8)}
CLOSE[3]["local_sqnr_db"] = 120.0
ALL_FLOAT = {i: IN_FLOAT for i in range(8)}

#: Changes and diagnostics of eight layers, and the index of the one to blame.
CULPRITS: dict[str, tuple[dict[int, Any], dict[int, Any], int | None]] = {
    "half a decibel among ideal layers": (sqnr(40, 40, 40, 40, 40, 39.5, 40, 40), {}, None),
    "no error at all moves no median": (sqnr(*[math.inf] * 3), {}, None),
    "NaN is the worst": ({5: {"local_sqnr_db": math.nan}}, {}, 5),
    "the worst of several": ({1: {"local_sqnr_db": 20.0}, 6: {"local_sqnr_db": 10.0}}, {}, 6),
    "hardly beyond rounding": ({1: {"excess_lsb": 0.01}}, {}, 1),
    "far beyond rounding elsewhere": ({1: {"excess_lsb": 0.01}, 6: {"excess_lsb": 90.0}}, {}, 6),
    "LSB and units of float32 differ": ({2: {"excess_lsb": 240.0}, 5: FLOATS}, {}, 2),
    "a weight before a scale": ({1: {"findings": (SCALE,)}, 5: {"findings": ("negated",)}}, {}, 5),
    "the first of two scales": ({1: {"findings": (SCALE,)}, 5: {"findings": (SCALE,)}}, {}, 1),
    "as many layers in float": (
        dict.fromkeys(range(4), FLOAT),
        dict.fromkeys(range(4), IN_FLOAT),
        None,
    ),
    "a kind that none else is": ({2: FLOAT | {"op": "TRANSPOSE_CONV"}}, {2: IN_FLOAT}, None),
    "no weights": ({2: {"op": "SOFTMAX", "dtypes": {"output": "float32"}}}, {2: IN_FLOAT}, None),
    "5 of 32 values beyond are chance": ({}, {1: FEW | {"beyond": (0.0, 5 / 32)}}, None),
    "8 of 32 are none": ({}, {1: FEW}, 1),
    "unless ranges are averaged": ({}, {1: FEW | {"averaged": 2}}, None),
    "15 of 16": ({}, {1: {"elements": 16, "beyond": (0.0, 15 / 16)}}, 1),
    "infinite in torch": (
        {3: {"local_sqnr_db": -math.inf}},
        {3: {"reference": (-math.inf, 1.0), "beyond": (0.1, 0.0)}},
        None,
    ),
    "values that a SELECT leaves out": (
        {2: {"local_sqnr_db": 9.0}},
        {2: {"beyond": (0.0, 0.4), "unused": True}},
        None,
    ),
    "what float32 rounds": (CLOSE, ALL_FLOAT, None),
    "what no bound explains": (
        {i: changes | {"excess_lsb": None} for i, changes in CLOSE.items()},
        ALL_FLOAT,
        3,
    ),
}


@pytest.mark.parametrize("known", CULPRITS)
def test_who_is_to_blame(known: str) -> None:
    """By index; None where nothing stands out."""
    changes, evidence, index = CULPRITS[known]
    found = judged(changes, evidence).culprit
    assert (None if found is None else found.index) == index


@pytest.mark.parametrize("excess", [1.0, 40.0, math.nan])
def test_what_is_beyond_rounding_is_to_blame(excess: float) -> None:
    """Before any loss; the first of several that are about as far off."""
    errors = judged({1: {"local_sqnr_db": 3.0}, 3: {"excess_lsb": excess}, 6: {"excess_lsb": 90.0}})
    assert culprit(errors).index == 3
    assert [each.verdict for each in errors.rows] == [
        *("sound", "quantization", "sound", "lowering"),
        *("sound", "sound", "lowering", "sound"),
    ]
    assert errors.cause.startswith("CONV_2D #3 (layer3): does not compute CONV_2D: ")
    assert errors.cause.endswith(" LSB beyond rounding on its own inputs")
    assert errors.finding.kind == WRONG_RESULT


TOO_WIDE = (
    "compare the values of the calibration samples, one of which may be an outlier, with those of "
    "the evaluated samples, which may be preprocessed otherwise"
)

LOSSY: dict[str, tuple[dict[str, Any], str]] = {
    "never calibrated": (
        {"scale": 1.0, "zero_point": 0},
        "its output was never calibrated (scale 1.0, zero point 0); the observer saw no sample; "
        "calibrate before converting",
    ),
    "zeros": (
        {"scale": 2.0**-12},
        "its range is [−0.0312, 0.031], next to nothing, where torch has [−12.1, 12.6]; "
        "calibrated on zeros",
    ),
    "clipped": (
        {"scale": 0.02, "beyond": (0.1, 0.13)},
        "its range [−2.56, 2.54] is too narrow: 23 % of torch's values lie beyond; "
        "calibrate with samples like those evaluated, preprocessed alike",
    ),
    "too wide": (
        {"scale": 10.0, "codes": (-1, 1)},
        "its range [−1.28e+03, 1.27e+03] is too wide: 3 of 256 levels are used, and the values "
        f"reach [−10, 10]; {TOO_WIDE}",
    ),
    "too wide for its own samples": (
        {"scale": 10.0, "codes": (-1, 1), "calibration": Calibration(3, 3)},
        "its range [−1.28e+03, 1.27e+03] is too wide: 3 of 256 levels are used, and the values "
        "reach [−10, 10]; the file was calibrated on all 3 samples evaluated, so they are not the "
        "cause: another calibration sample is an outlier (compare the greatest values of each), or "
        "the model's weights or code changed after the calibration",
    ),
    "too wide at the least scale": (
        {"scale": 2.0**-12, "codes": (-1, 1), "reference": (-0.0002, 0.0002)},
        "its range [−0.0312, 0.031] is too wide: 3 of 256 levels are used, and the values reach "
        "[−0.000244, 0.000244]; PT2E chooses no scale below 2⁻¹²; leave what is so small in float, "
        "or scale it up",
    ),
    "clipped on its own samples": (
        {"scale": 0.02, "beyond": (0.1, 0.13), "calibration": Calibration(1, 1)},
        "its range [−2.56, 2.54] is too narrow: 23 % of torch's values lie beyond; "
        "the file was calibrated on the one sample evaluated, so others will "
        "not widen it: the model's weights or code changed after the calibration",
    ),
    "averaged over its own samples": (
        {
            "scale": 0.02,
            "beyond": (0.1, 0.13),
            "averaged": 2,
            "calibration": Calibration(2, 2, True),
        },
        "its range [−2.56, 2.54] is too narrow: 23 % of torch's values lie beyond; "
        "the file was calibrated on all 2 samples evaluated, so others will "
        "not widen it: either a recipe averages the samples' ranges, which clips about half of the "
        "samples: if all are alike, pt2e_static_int8 keeps the least and the greatest value of "
        "all, or the model's weights or code changed after the calibration (then a file "
        "built anew has another range)",
    ),
    "uneven": (
        {"weight_granularity": "per_tensor", "weight_maxima": (4.0, 0.1, 2.0)},
        "one scale for all of its weights, whose channels differ by 40 ×: the least uses 3.2 of "
        "127 codes; quantize them per channel",
    ),
    "bias": (
        {"bias_limited": (3, 5)},
        "its bias is at the INT32 limit in channels 3, 5; weights near zero give a scale that the "
        "bias does not fit; give the layer's weights one scale, or leave it in float",
    ),
}


@pytest.mark.parametrize("known", LOSSY)
def test_known_causes_of_a_loss(known: str) -> None:
    """The sentence stands before the figures."""
    evidence, sentence = LOSSY[known]
    errors = judged({4: {"local_sqnr_db": 9.0}}, {4: evidence})
    symptom, _, reason = sentence.partition("; ")
    assert errors.cause == (
        f"CONV_2D #4 (layer4): {symptom}; 9.0 dB locally, where the median of 8 CONV_2D ops is "
        f"40.5 dB; {reason}"
    )
    # Three layers have no outlier, but a scale of 1.0 is no chance.
    few = judged({1: {"local_sqnr_db": 9.0}}, {1: evidence}, n=3)
    assert few.cause == f"CONV_2D #1 (layer1): {sentence}"
    assert culprit(few).verdict == "quantization"


@pytest.mark.parametrize(
    ("evidence", "sentence"),
    [
        ({"scale": 1.0}, "4 of 4 outputs were never calibrated (scale 1.0, zero point 0)"),
        (
            {"scale": 2.0**-12},
            "4 of 4 outputs have a range of next to nothing; calibrated on zeros",
        ),
        (
            {"beyond": (0.0, 0.2)},
            "4 of 4 outputs have too narrow a range; calibrate with samples like those evaluated, "
            "preprocessed alike",
        ),
        ({"codes": (-1, 4)}, f"4 of 4 outputs have too wide a range; {TOO_WIDE}"),
        (
            {"scale": 2.0**-12, "codes": (-1, 4), "reference": (-0.0002, 0.001)},
            "4 of 4 outputs have too wide a range; PT2E chooses no scale below 2⁻¹²; leave what is "
            "so small in float, or scale it up",
        ),
    ],
)
def test_what_ails_all_layers(evidence: dict[str, Any], sentence: str) -> None:
    """The calibration is to blame, not a layer."""
    errors = judged({}, {i: evidence for i in range(4)}, n=4)
    assert errors.culprit is None
    assert errors.cause == f"no single layer: {sentence}"


BEYOND = {"reference": (-12.8, 20.0), "beyond": (0.0, 0.02)}
"""By 0.29 of the range's width, in 2 % of the values."""


NOISE: dict[str, Any] = {"channel_noise": (*[1.0] * 19, 60.0)}
LOST = {"local_sqnr_db": 9.0}
MEDIAN = "9.0 dB locally, where the median of 8 CONV_2D ops is 40.5 dB"

#: Changes and diagnostics of eight layers, and the sentence without the module.
CAUSES: list[tuple[dict[int, Any], dict[int, Any], str]] = [
    # The changed weight is certain, whatever lies before it.
    (
        {2: {"excess_lsb": 0.4}, 5: {"findings": ("the weight's codes: 1 of 9 differs", "b")}},
        {},
        "CONV_2D #5: the weight's codes: 1 of 9 differs (and 1 more finding)",
    ),
    # Beyond three interquartile ranges and one bit.
    ({4: LOST}, {}, f"CONV_2D #4: it loses more than others of its kind: {MEDIAN}"),
    # Two linear layers have no quartiles.
    (
        {6: {"op": "FULLY_CONNECTED"}, 7: LOST | {"op": "FULLY_CONNECTED"}},
        {},
        "FULLY_CONNECTED #7: it loses more than others of its kind: "
        f"{MEDIAN.replace('CONV_2D', 'int8')}",
    ),
    # Though fewer values lie there than chance explains; others of its kind lose far less.
    (
        {4: LOST},
        {4: BEYOND},
        "CONV_2D #4: its range [−12.8, 12.7] is too narrow: 2 % of torch's values lie beyond; "
        f"{MEDIAN}; calibrate with samples like those evaluated, preprocessed alike",
    ),
    # A channel overflows only where torch's values say so.
    ({2: LOST}, {2: NOISE}, f"CONV_2D #2: channel 19 of 20 has 75.9 % of the error; {MEDIAN}"),
    (
        {2: LOST},
        {2: NOISE | {"beyond": (0.0, 0.03)}},
        "CONV_2D #2: channel 19 of 20 has 75.9 % of the error: it overflows, 3 % of torch's values "
        f"lie beyond the range [−12.8, 12.7]; {MEDIAN}",
    ),
    (
        {2: {"excess_lsb": 253.0}},
        {2: NOISE},
        "CONV_2D #2: does not compute CONV_2D: 253 LSB beyond rounding on its own inputs, and "
        "channel 19 of 20 has 75.9 % of the error",
    ),
    (
        {2: {"excess_lsb": 3.0}},
        {4: {"nonfinite": 12}, 5: {"nonfinite": 12}},
        "CONV_2D #4: 12 output values are NaN or infinite; the first op that has any",
    ),
]


@pytest.mark.parametrize(("changes", "evidence", "cause"), CAUSES)
def test_the_cause(changes: dict[int, Any], evidence: dict[int, Any], cause: str) -> None:
    """The op to blame, and why."""
    assert re.sub(r" \(layer\d\)", "", judged(changes, evidence).cause) == cause


def test_many_ranges_that_are_too_narrow_are_told_together() -> None:
    """One in eight is no chance; one alone is, and few ranges tell nothing."""
    errors = judged({}, {i: BEYOND for i in (1, 4)}, n=16)
    assert errors.culprit is None
    assert errors.cause == (
        "no single layer: 2 of 16 ranges are too narrow (values span 1.3 × as much, in the median "
        "of these); calibrate with samples like those evaluated, preprocessed alike, and on more"
    )
    loaded = judged({}, {i: BEYOND | {"averaged": 4} for i in (1, 4)}, n=16)
    assert loaded.cause == errors.cause  # it may be of any tool
    of_recipe = {"averaged": 4, "calibration": Calibration(averages=True)}
    averaged = judged({}, {i: BEYOND | of_recipe for i in (1, 4)}, n=16)
    assert averaged.cause.startswith(f"{errors.cause}; a recipe averages the samples' ranges")
    for few in (
        judged({}, {4: BEYOND}),
        judged({}, {i: BEYOND for i in (1, 4)}, n=17),
        judged({}, {i: BEYOND for i in (0, 1)}, n=4),
    ):
        assert few.finding.kind == ACCUMULATED_LOSS


def test_ranges_that_are_half_empty_are_told_together() -> None:
    """The emptiest is none to blame then; where others are full, it is."""
    quiet = {i: {"reference": (-2.0, 2.5)} for i in range(8)}
    wide = {4: {"codes": (-10, 12), "reference": (-1.0, 1.2)}}
    lost = {4: {"local_sqnr_db": 20.0}}
    for errors in (judged({}, quiet), judged(lost, quiet | wide)):
        assert errors.culprit is None
        assert errors.cause == (
            f"no single layer: values fill 18 % of their ranges, in the median of 8; {TOO_WIDE}"
        )
    alone = judged(lost, wide)
    assert alone.culprit is not None
    assert " is too wide: 23 of 256 levels are used" in alone.cause
    other = judged({4: {"excess_lsb": 40.0}}, quiet)
    assert other.culprit is not None


def test_layers_left_in_float_are_named_where_nothing_else_is() -> None:
    """By the first of them; a loss, a calibration that ails all, and a defect stand before."""
    errors = judged({2: FLOAT, 3: FLOAT}, {2: IN_FLOAT, 3: IN_FLOAT})
    assert culprit(errors).verdict == "sound"
    assert errors.cause == (
        "CONV_2D #2 (layer2): it computes in float32, as do 1 more, where 6 others with weights "
        "are int8; unless that is meant, the quantizer has no pattern for what torch calls here (a "
        "GRUCell, say), its annotation was dropped, or its config names another layer"
    )
    lost = judged({2: FLOAT, 5: {"local_sqnr_db": 9.0}}, {2: IN_FLOAT})
    assert culprit(lost).index == 5
    zeros = judged(
        {0: FLOAT}, {i: IN_FLOAT if i == 0 else {"scale": 2.0**-12} for i in range(4)}, n=4
    )
    assert zeros.cause.startswith("no single layer: 3 of 3 outputs have a range of next to nothing")


def test_a_range_that_cuts_off_all_is_told_of_few_values_of_a_rare_kind() -> None:
    """One value a sample, beside an average over the samples; more than others of their kind lose.

    An average of ranges may leave out two values of every sample, but not all that they say.
    """
    lost = {"op": "SUM", "local_sqnr_db": 0.1, "clipped": 1.0}
    cut = {"elements": 8, "averaged": 8, "beyond": (0.0, 1.0), "scheme": "int16"}
    outlier = {3: {"local_sqnr_db": 20.0}}
    errors = judged(outlier | {6: lost}, {6: cut}, n=12)
    assert (culprit(errors).index, culprit(errors).verdict) == (6, "quantization")
    assert " is too narrow: 100 % of torch's values lie beyond" in errors.cause
    left = judged(outlier | {6: lost | {"local_sqnr_db": 7.0}}, {6: cut}, n=12)
    assert culprit(left).index == 3


def test_the_one_layer_whose_range_costs_a_bit_more_than_any_other_is_to_blame() -> None:
    """Where all differ no quartile tells it, and an averaged range may cut off as many."""
    spread = {i: {"local_sqnr_db": 23.0 + 4 * i} for i in range(7)}
    last = {"op": "FULLY_CONNECTED", "local_sqnr_db": 6.5, "local_rmse_lsb": 80.0, "clipped": 0.4}
    cut = {"elements": 80, "averaged": 8, "beyond": (0.1, 0.1)}
    errors = judged(spread | {7: last}, {7: cut})
    assert (culprit(errors).index, culprit(errors).verdict) == (7, "quantization")
    assert "is too narrow: 20 % of torch's values lie beyond" in errors.cause
    assert "; 6.5 dB locally, where no other op has less than 23.0 dB; " in errors.cause
    for other in ({"local_rmse_lsb": 0.5}, {"local_sqnr_db": 17.5}):
        assert judged(spread | {7: last | other}, {7: cut}).culprit is None
    assert judged(spread | {7: last}, {7: {"beyond": (0.0, 0.0)}}).culprit is None


FAR = {"codes": (100, 125)}
DEAD = {"zero_point": -128, "codes": (-128, -128), "reference": (0.0, 0.0)}
POOL = {"op": "AVERAGE_POOL_2D", "dtypes": {"input": "int8", "output": "int8"}}


@pytest.mark.parametrize(
    ("changes", "evidence", "is_told"),
    [
        # The four scores of one sample need not use the range.
        ({}, {"elements": 4, "codes": (-1, 2), "beyond": (0.25, 0.0)}, False),
        # A mean of values is nearer to zero than they are, and shares their range.
        (POOL, {"codes": (-3, 3)}, False),
        ({}, {"codes": (-3, 3)}, True),
        # A range has 0 in it, however far the values lie from it.
        ({}, FAR | {"zero_point": -128}, False),
        ({}, FAR | {"zero_point": 110}, True),
        # What is zero in torch, too, says nothing; what is zero for want of codes is told.
        ({"cumulative_sqnr_db": math.inf}, DEAD, False),
        ({"cumulative_sqnr_db": 0.0}, DEAD, True),
    ],
)
def test_a_range_that_is_hardly_used(
    changes: dict[str, Any], evidence: dict[str, Any], is_told: bool
) -> None:
    """It is too wide, unless there is a reason."""
    found = lossy(row(0, **changes), replace(SOUND, **evidence))
    assert "too wide" in str(found) if is_told else found is None


def test_a_dequantize_loses_nothing_by_as_much_as_float32_rounds() -> None:
    """140 dB beside 147 are no loss; what is off by more is one."""
    rows = [row(i, op="DEQUANTIZE", local_lsb_error=None, local_sqnr_db=147.0) for i in range(5)]
    evidence = [replace(SOUND, scale=None, scheme="int8")] * 6
    near = row(5, op="DEQUANTIZE", local_lsb_error=None, local_sqnr_db=139.0)
    assert blame([*rows, near], evidence).culprit is None
    far = replace(near, local_sqnr_db=20.0, excess_lsb=9.0)
    assert culprit(blame([*rows, far], evidence)).index == 5


def test_the_most_harmful_defect_is_to_blame() -> None:
    """Not the first in execution order; of those within a bit of it the first one."""
    operand, mask = wrong("its operand has 4 scales"), wrong("the mask is lost")
    found = {1: {"findings": (operand,)}, 2: {"findings": (operand,)}, 5: {"findings": (mask,)}}
    harms = {1: Harm.decibels(2), 2: Harm.decibels(3), 5: Harm.decibels(30)}
    mask_op = found | {5: {"findings": (mask,), "op": "ADD"}}
    errors = judged(mask_op, {i: {"harm": harm} for i, harm in harms.items()})
    assert culprit(errors).index == 5
    assert [(each.place.op, len(each.evidence)) for each in errors.wrong] == [(5, 0), (1, 1)]
    alike = judged(found, {i: {"harm": Harm.decibels(27 + i)} for i in harms})
    assert culprit(alike).index == 1


def test_what_stands_behind_a_broken_op_is_no_loss() -> None:
    """Zeros leave most of a range unused, and nothing is lost in them; another op loses."""
    unused = {"codes": (-1, 1), "scale": 10.0}
    behind = {"local_sqnr_db": math.inf, "local_lsb_error": 0.0}
    errors = judged({1: {"excess_lsb": 90.0}, 2: behind}, {2: unused}, n=3)
    assert [each.verdict for each in errors.rows] == ["sound", "lowering", "sound"]
    near = judged({1: {"excess_lsb": 90.0}, 2: behind | {"local_sqnr_db": 5.0}}, {2: unused}, n=3)
    assert near.rows[2].verdict == "quantization"


def test_an_input_that_is_clipped_is_named() -> None:
    """The loss is all there; an op that computes wrongly is named all the same."""
    clipped = Finding(
        kind=CLIPPED_INPUT, place=Place("input", "x"), expected="[0, 1]", got="30 % outside"
    )
    rows = [row(i) for i in range(6)]
    errors = blame(rows, [SOUND] * 6, [clipped])
    assert errors.culprit is None
    assert errors.cause == "input 'x': expected [0, 1], got 30 % outside"
    wrong_op = blame([*rows, row(6, excess_lsb=50.0)], [SOUND] * 7, [clipped])
    assert culprit(wrong_op).index == 6
