"""`edgeq.check`: sound models pass, and all that is wrong with the others is listed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ai_edge_litert import schema_py_generated
from torch import nn

from fixtures.models import ConvBnRelu, net, normal, samples, seeded
from fixtures.tflite.writer import chain, one_op, pack, unpack
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.check.verdict import Verdict
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.localize.localizer import Localizer
from pytest_edgeq.localize.rows import LayerErrors
from pytest_edgeq.numerics.findings import (
    ACCUMULATED_LOSS,
    CLIPPED_INPUT,
    CLIPPED_OUTPUT,
    ERRORS_REGRESSED,
    FILE,
    LOSSY_EVERYWHERE,
    LOST_OUTPUT,
    NO_BASELINE,
    NOT_STORED,
    OP_DTYPES_CHANGED,
    OP_IN_FLOAT,
    OTHER_DATA,
    USELESS,
    Finding,
    Harm,
    Place,
)
from tests.checked import checked

UNREMEMBERED = "baselines were not checked"


def _two_heads() -> Any:
    """Two outputs of one shape."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        x = torch.relu(self.stem(x))
        return tuple(head(x) for head in self.heads)

    stem, *heads = nn.Conv2d(3, 8, 3, stride=2), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)
    return net(forward, "_TwoHeads", stem=stem, heads=nn.ModuleList(heads)).eval()


def _images(n: int, seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n):
        yield torch.randn(1, 3, 16, 16, generator=generator)


@pytest.fixture(scope="module")
def heads() -> QuantizedModel:
    """A sound model."""
    model, inputs = seeded(_two_heads), (next(_images(1, 0)),)
    return Edgeq().quantize(model, inputs, calibration=_images(32, 1))


def _findings(quantized: QuantizedModel, inputs: Any) -> str:
    """What the gate says; empty where it lets the model through."""
    text, told = checked(quantized, inputs)
    # Where there is a text, it says so itself.
    assert [each for each in told if UNREMEMBERED not in each] == []
    assert len(told) == (not text)
    assert not text or UNREMEMBERED in text
    return text


def test_a_sound_model_passes(heads: QuantizedModel) -> None:
    """Samples are read one at a time, from a buffer that the loader fills anew; torch stays."""
    assert isinstance(heads.float_model, nn.Module)
    before = {key: value.clone() for key, value in heads.float_model.state_dict().items()}
    buffer = torch.empty(1, 3, 16, 16)

    def loader() -> Iterator[torch.Tensor]:
        for image in _images(8, 2):
            buffer.copy_(image)
            yield buffer

    assert _findings(heads, loader()) == ""
    after = heads.float_model.state_dict()
    assert all(torch.equal(before[key], value) for key, value in after.items())


def test_the_warning_points_at_the_users_line(heads: QuantizedModel) -> None:
    """And says what was not done, and what it needs."""
    with pytest.warns(UserWarning, match=UNREMEMBERED) as told:
        Edgeq().check(heads, _images(2, 2))

    assert told[0].filename == __file__
    assert "outside a test nothing is remembered" in str(told[0].message)


def test_nan_of_torch_itself_is_the_first_finding() -> None:
    """No op is blamed for giving what torch gives."""
    x, y = ([{"dtype": "float32", "shape": (1, 8), "name": name}] for name in "xy")
    model = Edgeq().load(one_op("LOG", x, y), reference=torch.log)
    generator = torch.Generator().manual_seed(1)
    text = _findings(model, [torch.randn(1, 8, generator=generator) for _ in range(4)])
    assert re.match(
        r"health: nonfinite: output 'y': expected finite values, got \d+ NaN or infinite of "
        r"32 elements, and \d+ in the float reference itself\nfix: look at the model \(log, sqrt, "
        r"a division\) and at the samples first",
        text,
    ), text
    assert "the first op that has any" not in text


BASELINE = Place("baseline", "x.json")
X, Y = Place("input", "x"), Place("output", "y")
REGRESSED = Finding(
    kind=ERRORS_REGRESSED,
    place=BASELINE,
    headline="errors regressed: total: expected 30, got 20",
    harm=Harm.decibels(10),
    fix="undo it",
    command="if the change is meant: pytest",
)
LOST = Finding(kind=LOST_OUTPUT, place=Y, symptom="lost", harm=USELESS)
CHANGED = Finding(kind=OP_DTYPES_CHANGED, place=BASELINE, headline="ADD in float")
CLIPPED = Finding(
    kind=CLIPPED_INPUT,
    place=X,
    expected="[0, 1]",
    got="30 % outside",
    harm=Harm.share(3, 10),
    fix="calibrate with samples like those evaluated",
)
ERRORS = Finding(
    kind=NO_BASELINE,
    place=Place("baseline", "y.json"),
    symptom="errors",
    got="30 dB",
    command="to store it: pytest",
)
OPS = replace(ERRORS, place=BASELINE, symptom="op-dtype map", got="9 ops")
TOO_FEW = Finding(
    kind=NOT_STORED, place=BASELINE, headline="12 samples are too few: give at least 36"
)
LAYER = Finding(
    kind=LOSSY_EVERYWHERE, place=FILE, symptom="no single layer: 9 of 28 ranges are too narrow"
)


def _lines(*found: Finding, layer: Finding | None = None, unwritten: bool = False) -> list[str]:
    """Return the text of findings, with what the layers gave."""
    layers = None if layer is None else LayerErrors(rows=(), culprit=None, finding=layer)
    return Verdict([*found], layers=layers).text("Net", unwritten=unwritten).splitlines()


def test_missing_baselines_are_one_line_and_one_command() -> None:
    """Where errors of too few samples cannot be stored, the op-dtype map can."""
    assert _lines(OPS, ERRORS) == [
        "no baseline is stored yet: op-dtype map (9 ops), errors (30 dB)",
        "file: x.json, y.json",
        "update: to store it: pytest",
    ]
    assert _lines(OPS, TOO_FEW) == [
        "12 samples are too few: give at least 36 [1 of 2 findings on Net]",
        "file: x.json",
        "",
        "[2] no baseline is stored yet: op-dtype map (9 ops)",
        "    file: x.json",
        "    update: to store it: pytest",
    ]
    assert "update: to store it" not in "\n".join(_lines(OPS, replace(TOO_FEW, harm=USELESS)))


def test_what_changed_since_the_baselines_is_said_first_and_once() -> None:
    """Before the first line, whichever finding that is; then it is to be undone."""
    since = "strict_export: True → False"
    worse = replace(REGRESSED, since=(since, "weights: changed"))
    first, *others = _lines(replace(CHANGED, since=(since,)), worse)
    assert first == f"{since}, weights: changed; {REGRESSED.headline} [1 of 2 findings on Net]"
    assert not any(since in line or "weights: changed" in line for line in others)
    assert _lines(worse, CLIPPED)[1] == "fix: undo what changed since the baseline"
    assert f"fix: {CLIPPED.fix}" in _lines(REGRESSED, CLIPPED)


def test_what_may_have_changed_is_said_once() -> None:
    """By the errors, as their baseline knows more than that of the op dtypes; not of one alone."""
    gone = replace(
        CHANGED, unchanged=("options",), suspects=("the code", "weights"), harm=Harm.decibels(20)
    )
    worse = replace(
        REGRESSED,
        causes=("ranges moved",),
        unchanged=("options", "weights"),
        suspects=("the code",),
        fix="",
    )
    assert _lines(gone, worse) == [
        "ADD in float [1 of 2 findings on Net]",
        "cause: options, weights and versions are the baseline's: the code changed",
        "fix: look for what changed in the code, and undo it",
        "file: x.json",
        "",
        f"[2] {REGRESSED.headline}",
        "    cause: ranges moved",
        "    file: x.json",
        "    update: if the change is meant: pytest",
    ]
    assert _lines(gone)[1:3] == [
        "cause: options and versions are the baseline's: the code or weights changed",
        "fix: look for what changed in the code or weights, and undo it",
    ]


def test_other_evaluation_samples_explain_inputs_that_are_clipped() -> None:
    """Nothing is to be calibrated for samples that are not the baseline's."""
    other = Finding(kind=OTHER_DATA, place=BASELINE, headline="the evaluation samples are others")
    text = _lines(LOST, replace(CLIPPED, harm=Harm.share(9, 10)), other)
    assert text[0] == f"{other.headline} [1 of 3 findings on Net]"
    assert not any("calibrate" in line for line in text)
    assert any("calibrate" in line for line in _lines(LOST, CLIPPED))


def test_the_layer_to_blame_explains_errors_and_no_op_dtypes() -> None:
    """It is never the cause of an op that went."""
    blame = f"layer to blame: {LAYER.symptom}"
    worse = replace(REGRESSED, explained_by=(LAYER,))
    assert _lines(worse, layer=LAYER)[:2] == [REGRESSED.headline, blame]
    assert sum(blame in line for line in _lines(worse, LOST, layer=LAYER)) == 1
    assert blame not in _lines(REGRESSED, layer=LAYER)
    assert blame not in _lines(CHANGED, layer=LAYER)
    worse = replace(REGRESSED, explained_by=(CHANGED,))
    assert _lines(CHANGED, worse, layer=LAYER)[:6] == [
        "ADD in float [1 of 2 findings on Net]",
        "file: x.json",
        "",
        f"[2] {REGRESSED.headline}",
        "    cause: explained by [1]",
        "    file: x.json",
    ]


@pytest.mark.parametrize("kind", [ACCUMULATED_LOSS, OP_IN_FLOAT])
def test_that_no_layer_stands_out_is_not_said_beside_a_cause(kind: str) -> None:
    """Nor is a layer blamed that is kept in float."""
    layer = replace(LAYER, kind=kind)
    known = replace(LOST, causes=("calibrated on fewer samples",))
    for found in ([known], [CLIPPED, LOST]):
        assert not any("no single layer" in line for line in _lines(*found, layer=layer))
    alone = any("no single layer" in line for line in _lines(LOST, layer=layer))
    assert alone == (kind == ACCUMULATED_LOSS)


def test_a_cause_is_told_once() -> None:
    """What explains others is first, and they refer to it; nothing is to be accepted before."""
    worse = replace(REGRESSED, explained_by=(CLIPPED,), causes=("ranges moved",))
    output = replace(LOST, kind=CLIPPED_OUTPUT, harm=Harm.share(1, 10), fix=CLIPPED.fix)
    missing = replace(ERRORS, place=BASELINE)
    assert _lines(missing, worse, output, CLIPPED, unwritten=True) == [
        "input 'x': expected [0, 1], got 30 % outside [1 of 4 findings on Net]",
        "fix: calibrate with samples like those evaluated",
        "",
        f"[2] {REGRESSED.headline}",
        "    cause: ranges moved",
        "    cause: explained by [1]",
        "    file: x.json",
        "    update: once the other findings are fixed",
        "",
        "[3] output 'y': lost",
        "    cause: explained by [1]",
        "",
        "[4] no baseline is stored yet: errors; update it once the other findings are fixed",
        "    file: x.json",
        "",
        "no baseline was stored: a model must be sound first",
    ]


@pytest.mark.slow
def test_few_samples_are_told() -> None:
    """Of a calibration by two a warning, of one that is given again and again a finding."""
    few, more = list(samples(ConvBnRelu, 2)), list(samples(ConvBnRelu, 8))
    new = list(samples(ConvBnRelu, 2, seed=9))

    def told(calibration: Any, evaluation: Any) -> list[str]:
        quantized = Edgeq().quantize(
            seeded(ConvBnRelu), ConvBnRelu.sample_inputs(), calibration=calibration
        )
        text, caught = checked(quantized, evaluation)
        return text.splitlines() or caught

    assert any(
        line.endswith(
            ": calibrated on 2 different samples, of 8 given: ranges cut off what these do not "
            "reach; give dozens for PT2E, 100 or more for static recipes"
        )
        for line in told(few * 4, new)
    )
    assert len(told(more, new)) == 1
    [warning] = told(more, new[:1] * 4)
    assert warning.startswith(
        "edgeq.check: baselines were not checked: outside a test nothing is remembered; "
        "the 4 evaluation samples are one and the same: nothing"
    )
    assert told(few[:1] * 8, new)[0].startswith(
        "health: calibration_repeated: inputs: expected different calibration samples, got one, 8 "
    )


def test_calibration_samples_are_found(heads: QuantizedModel) -> None:
    """Two of those that were calibrated with, among others."""
    text = _findings(heads, [*_images(2, 1), *_images(6, 2)])

    assert text.startswith(
        "health: calibration_overlap: inputs: 2 of 8 evaluated samples were also used to calibrate"
    )


Change = Callable[[Any], None]


def _scale(model: Any, subgraph: int = 0) -> None:
    graph = model.subgraphs[subgraph]
    quantization = graph.tensors[graph.operators[-1].outputs[0]].quantization
    quantization.scale = np.asarray(quantization.scale) * np.float32(1.02)


def _zero_point(model: Any) -> None:
    tensor = model.subgraphs[0].tensors[model.subgraphs[0].operators[-1].outputs[0]]
    tensor.quantization.zeroPoint = np.asarray(tensor.quantization.zeroPoint) + 1


def _swapped(model: Any) -> None:
    [signature] = model.signatureDefs
    first, second = signature.outputs
    first.tensorIndex, second.tensorIndex = second.tensorIndex, first.tensorIndex


def _swapped_tensors(model: Any) -> None:
    """Under the same names in the same order."""
    _swapped(model)
    model.subgraphs[0].outputs = model.subgraphs[0].outputs[::-1].copy()


def _options_with(model: Any, name: str) -> Any:
    options = (op.builtinOptions for op in model.subgraphs[0].operators)
    return next(each for each in options if getattr(each, name, 0))


def _activation(model: Any) -> None:
    _options_with(model, "fusedActivationFunction").fusedActivationFunction = 0


def _padding(model: Any) -> None:
    """By the options only: the shapes in the file are as they were."""
    _options_with(model, "dilationWFactor").padding ^= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_scale, r"flow made: .*its output: expected the scale [\d.e-]+, got"),
        (_zero_point, r"flow made: .*its output: expected the zero point -?\d+, got"),
        (_swapped, r"flow made: outputs: expected output_0 .*; output_1 .*, got output_1 .*"),
        (
            _swapped_tensors,
            r"made: the output 'output_0': expected the output of \w+ #\d, "
            r"got the output of \w+ #\d",
        ),
        (_activation, r"flow made: CONV_2D .*: fused activation: expected RELU, got None"),
        (_padding, r"flow made: CONV_2D .*: padding: expected VALID, got SAME"),
    ],
)
def test_a_file_that_is_not_the_one_made_is_found(
    heads: QuantizedModel, change: Change, said: str
) -> None:
    """It is not what the flow made; what was put in its place before counts for nothing."""
    model = unpack(heads.tflite)
    change(model)
    other = heads.with_tflite(pack(model)).with_tflite(pack(model))

    text = _findings(other, _images(4, 2))

    assert any(re.search(said, line) for line in text.splitlines()), text


def test_the_same_file_written_anew_passes(heads: QuantizedModel) -> None:
    """Other bytes, the same model."""
    model = unpack(heads.tflite)
    model.description = "written anew"
    other = heads.with_tflite(pack(model))

    assert _findings(other, _images(8, 2)) == ""


def test_another_quantizers_file_is_found(heads: QuantizedModel) -> None:
    """A float file that claims to be the int8 one: which ops computed in what is told."""
    float_file = Edgeq().quantize(heads.float_model, (next(_images(1, 0)),), quantizer=None)  # type: ignore[arg-type] # it is a module

    text = _findings(heads.with_tflite(float_file.tflite), _images(4, 2))

    assert text.splitlines()[0].startswith("not the file that the ")
    assert "CONV_2D" in text
    assert "int8 → float" in text


def test_a_weight_that_is_another_is_found(heads: QuantizedModel) -> None:
    """One channel's largest weight negated: the layer is named."""
    model = unpack(heads.tflite)
    convolution = [op for op in heads.graph.ops if op.name == "CONV_2D"][-1]
    tensor = heads.graph.tensor(convolution, convolution.inputs[1])
    data = np.array(model.buffers[tensor.buffer].data).view(np.int8)
    data[np.abs(data.astype(int)).argmax()] *= -1
    model.buffers[tensor.buffer].data = data.view(np.uint8)

    text = _findings(heads.with_tflite(pack(model)), _images(4, 2))

    assert text.startswith(f"CONV_2D #{convolution.index} (heads."), text


def test_a_file_without_names_is_told_by_torchs_modules(heads: QuantizedModel) -> None:
    """The names of its tensors are gone; what it was matched with has one."""
    model = unpack(heads.tflite)
    for index, tensor in enumerate(model.subgraphs[0].tensors):
        tensor.name = f"t{index}".encode()
    reference = seeded(_two_heads)
    with torch.no_grad():
        reference.stem.weight[3] *= -1

    text = _findings(Edgeq().load(pack(model), reference=reference), _images(4, 2))

    assert re.match(r"CONV_2D #\d \(stem\): the weight's codes: ", text), text


def test_inputs_that_do_not_fit_the_file_are_told(heads: QuantizedModel) -> None:
    """A file of another model: what it takes is told, with all else that is wrong."""
    sides = [{"dtype": "float32", "shape": (1, 4), "name": name} for name in "abc"]
    other = one_op("ADD", sides[:2], sides[2:], "AddOptions")

    text = _findings(heads.with_tflite(other), _images(4, 2))

    assert text.startswith("not the file that the")
    assert "the file has the inputs ['a', 'b']" in text


def test_a_file_that_no_runtime_runs_is_found(heads: QuantizedModel) -> None:
    """An output that no op computes: each runtime says so, and nothing else breaks."""
    model = unpack(heads.tflite)
    model.subgraphs[0].operators.pop()

    text = _findings(heads.with_tflite(pack(model)), _images(4, 2))

    assert text.startswith("not the file that the")
    told = [line for line in text.splitlines() if "cannot" in line]
    assert re.match(r"\[2\] the xnnpack and builtin runtimes cannot ", told[0]), told
    # CompiledModel has its own words.
    assert all("compiled" in line for line in told[1:])


def _one_off(path: Path, signature: str | None) -> Any:
    """Run a file, each code one too high."""
    from ai_edge_litert.interpreter import Interpreter

    run = Interpreter(str(path)).get_signature_runner(signature)
    return lambda inputs: {
        name: np.minimum(value, 126) + np.int8(1) for name, value in run(**inputs).items()
    }


def test_a_runtime_that_gives_something_else_is_found(heads: QuantizedModel) -> None:
    """One of one's own, one step off in every code."""
    edgeq = Edgeq(runtimes={"board": _one_off})
    model = edgeq.load(heads.tflite, reference=heads.float_model)

    first, why, *_ = _findings(model, _images(4, 2)).splitlines()

    count = len(heads.graph.ops)
    assert first.startswith(
        f"runtimes 'board' and 'builtin': all {count} ops differ when run alone: "
    )
    assert why.startswith("cause: not the kernels but the runtime's buffers are wrong: ")


def test_all_is_listed_the_most_telling_first(heads: QuantizedModel) -> None:
    """What the file is not, which explains the rest; samples met again do no known harm."""
    model = unpack(heads.tflite)
    _activation(model)

    text = _findings(heads.with_tflite(pack(model)), [*_images(2, 1), *_images(6, 2)])

    first, *lines = text.splitlines()
    numbers = [line[:3] for line in lines if line.startswith("[")]
    assert numbers == [f"[{number}]" for number in range(2, len(numbers) + 2)]
    assert first == (
        f"not the file that the {heads.flow} flow made: CONV_2D #1 (stem): fused activation: "
        f"expected RELU, got None [1 of {len(numbers) + 1} findings on _TwoHeads]"
    )
    assert (
        f"[{len(numbers) + 1}] health: calibration_overlap: inputs: 2 of 8 evaluated samples were "
        "also used to calibrate: the errors look smaller than they are"
    ) in lines


@pytest.mark.parametrize("inputs", [[], torch.zeros(1, 3, 16, 16), [torch.zeros(1, 3, 8, 8)]])
def test_bad_samples_are_refused(heads: QuantizedModel, inputs: Any) -> None:
    """They are no findings about the model; nor is a file without a reference."""
    with pytest.raises((ValueError, TypeError), match="evaluation"):
        Edgeq().check(heads, inputs)
    text = r"no reference to compare with: .*float_tflite=.*assert_conforms, .*edgeq show"
    with pytest.raises(ValueError, match=text):
        Edgeq().check(Edgeq().load(heads.tflite), inputs)


@pytest.mark.parametrize("level", [293.0, 0.0])
def test_an_output_that_is_nearly_constant_is_noted(level: float) -> None:
    """Its SQNR of 58 dB is that of the constant; without one it is that of the variation."""
    step = (level + 5) / 127
    given, quantize = {"dtype": "int8", "scales": [step]}, ("QUANTIZE", "taken", "given")
    content = chain(quantize, inputs="taken", outputs="given", key="run", given=given)
    loaded = Edgeq().load(content, reference=lambda x: x, name="level")
    drawn = np.random.default_rng(0)
    inputs = [(level + drawn.normal(size=(1, 4))).astype(np.float32) for _ in range(16)]
    noted = "output 'given' varies between the samples by 0."
    assert (noted in checked(loaded, inputs)[0] + "".join(checked(loaded, inputs)[1])) is (
        level > 0
    )


def test_ops_are_measured_again_where_the_noise_is_twice_as_great(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With int8 activations by sample it grows with the square of the values."""
    measured: list[float] = []
    update = Localizer.update

    def recorded(localizer: Localizer, sample: Sample, *rest: Any) -> None:
        measured.append(round(float(sample.args[0].abs().max()), 3))
        update(localizer, sample, *rest)

    monkeypatch.setattr(Localizer, "update", recorded)
    edgeq = Edgeq()
    values = next(_images(1, 0))
    values /= values.abs().max()
    quantized = edgeq.quantize(seeded(_two_heads), (values,), quantizer="recipe_dynamic_wi8_afp32")
    with pytest.warns(UserWarning, match=UNREMEMBERED):
        edgeq.check(quantized, [values * scale for scale in (1.0, 0.5, 1.3, 2.0, 2.5, 4.0)])
    assert measured == [1.0, 0.5, 2.0, 4.0]


def _sums(count: int, width: int) -> QuantizedModel:
    """Some additions of two inputs, on a runtime that gives codes one too high."""
    row = {"dtype": "int8", "shape": (1, width), "scales": [1 / 16], "zero_points": [0]}
    made = [f"z{i}" for i in range(count)]
    tensors = {"x": row, "y": row} | dict.fromkeys(made, row | {"scales": [1 / 8]})
    ops = [("ADD", "x y", each, "AddOptions") for each in made]
    content = chain(*ops, inputs="x y", outputs=" ".join(made), key="add", **tensors)
    edgeq = Edgeq(runtimes={"board": _one_off})
    return edgeq.load(content, reference=lambda x, y: [x + y] * count)


_NOTE = "note: baselines were not checked: outside a test nothing is remembered"


@pytest.mark.parametrize(
    ("count", "width", "said", "cause"),
    [
        (
            *(1, 64, "ADD #0: expected at most 50% of the codes to differ, as rounding changes "),
            "on the same inputs, so that nothing before it explains this: one of the two computes "
            "something else",
        ),
        # Each op has too few codes to tell that the runtime moves all by one.
        (
            *(4, 8, "expected at most 50% of the codes of 4 ops to differ, as rounding changes "),
            "on the same inputs: the runtime changes data between the file and the kernels",
        ),
    ],
)
def test_the_text_of_runtimes_that_differ(count: int, width: int, said: str, cause: str) -> None:
    """To the letter: where, on what, expected, got, how many."""
    steps = torch.arange(width)[None] / 16
    got = {
        1: "128 of 128, all higher (sample 0, index [0, 0]: board 1, builtin 0) [1 of 1 ops]",
        4: "64 of 64, 0 of them lower and 64 higher",
    }[count]

    assert _findings(_sums(count, width), [(steps, steps), (steps.flip(1), steps)]) == (
        f"runtimes 'board' and 'builtin': {said}only codes near ties, got {got}\n"
        f"cause: each op was run alone on both, {cause}\n"
        "fix: compare both with torch: edgeq.compare(model, samples, runtime='board') and "
        f"runtime='builtin'\n\n{_NOTE}\n"
        "note: 2 different evaluation samples: too few for paired, per-sample limits, so the "
        "limits are wide; give 5 or more that differ"
    )


def test_the_text_of_a_file_that_kernels_refuse() -> None:
    """Told once for all of them: which op, why, the way out, what they said."""
    content = one_op(
        "REDUCE_MAX",
        [
            {"dtype": "int8", "shape": (1, 4), "scales": [0.1]},
            {"dtype": "int32", "shape": (1,), "data": np.array([1], np.int32)},
        ],
        [{"dtype": "int8", "shape": (1,), "scales": [0.2]}],
        "ReducerOptions",
    )
    edgeq = Edgeq()
    model = edgeq.load(content, reference=net(lambda _, x: x.amax(1), "_Greatest").eval())
    samples = [torch.tensor([[0.1, 0.2, 0.3, k / 10]]) for k in range(5)]

    # XNNPACK hands the codes on, and is off by the scales: findings of their own.
    first, *lines = _findings(model, samples).splitlines()
    assert re.match(
        r"the (xnnpack, )?builtin(, \w+)*( and \w+)? runtimes? cannot run the \.tflite file: "
        r"REDUCE_MAX #0 \[1 of \d findings on _Greatest\]",
        first,
    )
    broken = "its output: expected input 0's scale 0.1, got 0.2 (2 ×)"
    assert lines[0].startswith(f"cause: REDUCE_MAX #0: {broken}; its ")
    assert "SharedQuantizationSpec" in lines[0]
    assert lines[1].startswith("the kernels said: ")
    assert "(scale of the input 0.1, of the output 0.2)" in lines[1]
    assert lines[-2:] == [
        "note: ops were not compared with torch one by one, as the builtin runtime, which keeps "
        "intermediate tensors, refuses the file",
        _NOTE,
    ]
    assert sum("SharedQuantizationSpec" in line for line in lines) == 1

    refused = r"the builtin runtime cannot run the \.tflite file: REDUCE_MAX #0\ncause: "
    with pytest.raises(RuntimeError, match=refused):
        edgeq.localize(model, samples)


def _changed(heads: QuantizedModel, change: Callable[..., Any]) -> QuantizedModel:
    """Load the file with a reference whose outputs are changed."""
    changed = net(lambda self, x: change(*self.model(x)), "_Changed", model=heads.float_model)
    return Edgeq().load(heads.tflite, reference=changed.eval())


def test_the_text_of_a_reference_that_fails(heads: QuantizedModel) -> None:
    """Which model on which sample, what torch said, and what it was given."""
    loaded = _changed(heads, lambda one, two: one + torch.zeros(1, 4, 5, 5))

    assert _findings(loaded, _images(2, 2)) == (
        "the reference of _Changed fails on evaluation sample 0: expected its outputs, got "
        "RuntimeError: The size of tensor a (7) must match the size of tensor b (5) at "
        "non-singleton dimension 3\n"
        "cause: it is called with the inputs of the file, of shape [1, 3, 16, 16]; "
        f"reference(sample) by itself fails the same way\n\n{_NOTE}"
    )


def test_the_text_of_outputs_of_another_shape(heads: QuantizedModel) -> None:
    """Both shapes, and where to look."""
    loaded = _changed(heads, lambda one, two: (one[:, :, 1:], two))

    text = _findings(loaded, _images(2, 2))

    assert text.startswith(
        "_Changed: output 'output_0': the reference returns shape [1, 4, 6, 7], the file [1, 4, 7, "
        "7] [1 of 2 findings on _Changed]\ncause: the file was made from another model than the "
        "reference, or its last ops are others: an axis, a permutation, a slice\n\n[2] TRANSPOSE #"
    )


def test_another_checkpoint_is_told_as_such(heads: QuantizedModel) -> None:
    """Each layer has other weights: the cause is one."""
    loaded = Edgeq().load(heads.tflite, reference=seeded(_two_heads, 1))

    lines = _findings(loaded, _images(4, 2)).splitlines()

    assert re.match(r"CONV_2D #\d \(stem\): the weight's codes: \d+ of 216 differ", lines[0]), lines
    assert lines[1:3] == [
        "cause: all 3 layers with weights differ from the reference's: it is another model or "
        "checkpoint than the file was made from",
        "fix: give the reference that it was made from",
    ]
    explain = Edgeq().compare(loaded, _images(4, 2)).explain
    assert explain is not None
    assert explain().causes == (
        "all 3 layers with weights differ from the reference's: it is another model or checkpoint "
        "than the file was made from",
    )


@pytest.mark.slow
def test_an_output_that_is_worse_than_zeros_is_found(heads: QuantizedModel) -> None:
    """Of another sign."""
    loaded = _changed(heads, lambda one, two: (-one, -two))

    text = _findings(loaded, _images(4, 2))

    assert re.search(
        r"output 'output_0': expected 4.4 dB SQNR or more, which is one bit of it, got "
        r"-[56]\.\d+ dB "
        r"\(rms of torch [\d.]+, of the error [\d.]+\)",
        text,
    ), text


def _normalized() -> nn.Module:
    """What comes before the convolution becomes ops of its own under a recipe."""
    mean = nn.Buffer(torch.tensor([0.5, 1.0, 1.5]).reshape(1, 3, 1, 1))
    forward = lambda self, x: self.conv((x - self.mean) / 0.7)  # noqa: E731
    return net(forward, conv=nn.Conv2d(3, 8, 3), mean=mean)


def test_an_op_that_is_another_is_found_by_torch_alone() -> None:
    """SUB became ADD, in front of ops that no value tells apart from it."""
    module = seeded(_normalized)
    quantized = Edgeq().quantize(
        module,
        (next(_images(1, 0)),),
        quantizer="recipe_static_wi8_ai8",
        calibration=_images(32, 1),
    )
    model = unpack(quantized.tflite)
    [minus] = [
        code
        for code in model.operatorCodes
        if code.builtinCode == schema_py_generated.BuiltinOperator.SUB
    ]
    minus.builtinCode = minus.deprecatedBuiltinCode = schema_py_generated.BuiltinOperator.ADD
    for op in model.subgraphs[0].operators:
        if model.operatorCodes[op.opcodeIndex] is minus:
            op.builtinOptionsType = schema_py_generated.BuiltinOptions.AddOptions
            op.builtinOptions = schema_py_generated.AddOptionsT()

    with pytest.raises(AssertionError, match=r"ADD #\d|CONV_2D #\d|MUL #\d"):
        Edgeq().check(Edgeq().load(pack(model), reference=module), _images(4, 2))


@pytest.mark.slow
def test_one_of_several_signatures_of_another_file_is_checked() -> None:
    """Against the same one of the flow's own file: sound as it is, and found where it is not."""
    drawn = {
        name: [normal(1, 3, side, side, seed=100 + k) for k in range(16)]
        for name, side in (("small", 16), ("large", 20))
    }
    quantized = Edgeq().quantize(
        {name: seeded(_normalized) for name in drawn},
        {name: (images[0],) for name, images in drawn.items()},
        calibration=drawn,
    )

    assert (
        _findings(quantized.with_tflite(quantized.tflite).signature("small"), _images(4, 2)) == ""
    )

    model = unpack(quantized.tflite)
    [small] = [each for each in quantized.graph.signatures if each.key == "small"]
    _scale(model, small.subgraph)
    other = quantized.with_tflite(pack(model))

    text = _findings(other.signature("small"), _images(4, 2))
    assert "expected the scale" in text.splitlines()[0]
