"""
Which row is to blame, and why, in a sentence.

What a kernel's rounding does not explain, and what is wrong with a constant, is a defect wherever
it stands. A loss by quantization is none by itself: every layer has one. It is told only of a layer
that loses far more than others of its kind, or whose parameters can come from a mistake only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from pytest_edgeq.localize.mistakes import (
    BIT_DB,
    FAR,
    at_bias_limit,
    calibrated_on_nothing,
    clipped,
    is_cut_off,
    lossy,
    mistake,
    never_calibrated,
    one_channel,
    other_samples,
    overshoot,
    too_narrow,
    too_wide,
)
from pytest_edgeq.localize.readers import MASK_WAYS_OUT
from pytest_edgeq.localize.rows import (
    LOWERING,
    QUANTIZATION,
    SOUND,
    SPREAD,
    UNMATCHED,
    Evidence,
    LayerError,
    LayerErrors,
)
from pytest_edgeq.tflite.same import is_of_parameters

__all__ = ["WAYS_OUT", "blame", "says_way_out"]

_LEAST_LAYERS = 5
"""
Layers that it takes to tell an outlier.

The third quartile of five is the fourth of them, so that the worst one does not move the fence that
it is held against; of four it would.
"""

_FENCES = 3.0
"""Interquartile ranges beyond the median."""

_ROUNDED = 2 / math.sqrt(12)
"""Root mean square in LSB beyond which rounding makes less than a quarter of an error's power."""

_LAYERS = {"CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"}
"""Ops with weights that every flow quantizes where it quantizes one of them."""


def blame(rows: Sequence[LayerError], evidence: Sequence[Evidence]) -> LayerErrors:
    """
    Give every row its verdict, choose the one to blame and say why.

    A finding about constants stands before an excess over rounding, which stands before a loss by
    quantization. Of several rows the first in execution order has made what the others show.

    Args:
        rows: In execution order; their verdicts are not looked at.
        evidence: One a row.

    Raises:
        ValueError: Not one piece of evidence a row.
    """
    if len(rows) != len(evidence):
        raise ValueError(f"{len(rows)} rows, and evidence for {len(evidence)}")
    losses = _losses(rows, evidence) | _cut_off(rows, evidence)
    mistaken = {} if losses else _mistaken(rows, evidence)
    judged = tuple(
        replace(row, verdict=_verdict(row, given, i in losses or i in mistaken))
        for i, (row, given) in enumerate(zip(rows, evidence, strict=True))
    )
    everywhere = _everywhere(judged, evidence)
    alone = None if everywhere else _alone(judged, evidence)
    culprit = _culprit(judged, evidence, losses or mistaken)
    apart = other_samples(judged, evidence)
    is_loss = culprit is not None and judged[culprit].verdict == QUANTIZATION
    if apart.half_empty and culprit is not None and is_loss:
        # Where most ranges are half empty, one that is still emptier is none to blame.
        culprit = None if too_wide(judged[culprit], evidence[culprit]) else culprit
    if alone is not None and (culprit is None or is_loss):
        place, cause = alone
        if culprit is None or _sqnr(judged[place]) < _sqnr(judged[culprit]):
            row = replace(judged[place], verdict=QUANTIZATION)
            return _blamed((*judged[:place], row, *judged[place + 1 :]), place, cause)
    if culprit is not None:
        cause = _cause(judged[culprit], evidence[culprit], losses.get(culprit))
        return _blamed(judged, culprit, cause)
    floats = _left_in_float(judged, evidence)
    if floats is not None and not everywhere:
        return _blamed(judged, *floats)
    known = everywhere or apart.text
    cause = f"no single layer: {known}" if known else SPREAD
    return LayerErrors(rows=judged, culprit=None, cause=cause)


def _blamed(rows: tuple[LayerError, ...], culprit: int, cause: str) -> LayerErrors:
    row = rows[culprit]
    return LayerErrors(rows=rows, culprit=row, cause=f"{row.name}: {cause}")


def _verdict(row: LayerError, evidence: Evidence, loses: bool) -> str:
    if row.findings or evidence.nonfinite or _beyond_rounding(row):
        return LOWERING
    if not row.matched:
        return UNMATCHED
    return QUANTIZATION if loses else SOUND


def _beyond_rounding(row: LayerError) -> bool:
    # Not `> 0`, which NaN would pass.
    return row.excess_lsb is not None and not row.excess_lsb <= 0


def _culprit(
    rows: Sequence[LayerError],
    evidence: Sequence[Evidence],
    losses: Mapping[int, str],
) -> int | None:
    for chosen in (
        [i for i, row in enumerate(rows) if not all(map(is_of_parameters, row.findings))],
        [i for i, row in enumerate(rows) if row.findings],
        [i for i, given in enumerate(evidence) if given.nonfinite],
        _far_beyond(rows),
    ):
        if chosen:
            return chosen[0]
    return min(losses, key=lambda i: (_sqnr(rows[i]), i)) if losses else None


def _far_beyond(rows: Sequence[LayerError]) -> list[int]:
    """
    Rows beyond rounding, but for those that are by less than a hundredth of another.

    Of another that is measured alike: codes in LSB, floats in what float32 rounds.
    """
    beyond = {i: row.excess_lsb or 0.0 for i, row in enumerate(rows) if _beyond_rounding(row)}
    # NaN is beyond every bound.
    size = {i: math.inf if math.isnan(x) else x for i, x in beyond.items()}
    coded = {i: rows[i].local_lsb_error is not None for i in size}
    most = {kind: max(size[i] for i in size if coded[i] is kind) for kind in set(coded.values())}
    return [i for i in size if size[i] >= most[coded[i]] / 100]


def _mistaken(rows: Sequence[LayerError], evidence: Sequence[Evidence]) -> dict[int, str]:
    """
    Which rows have parameters that can come from a mistake only, if they are the fewer.

    This is how a layer is told among too few of its kind.
    """
    scaled = [
        i
        for i, given in enumerate(evidence)
        if given.scale and rows[i].matched and not (given.untaken or _is_endless(given))
    ]
    found = {
        i: text
        for i in scaled
        if rows[i].local_sqnr_db is not None and (text := mistake(rows[i], evidence[i]))
    }
    return found if 2 * len(found) < len(scaled) else {}


def _sqnr(row: LayerError) -> float:
    """In dB; NaN, which is worse than any, as −inf."""
    sqnr = row.local_sqnr_db
    assert sqnr is not None
    return sqnr if not math.isnan(sqnr) else -math.inf


def _losses(rows: Sequence[LayerError], evidence: Sequence[Evidence]) -> dict[int, str]:
    """
    Which rows lose far more than others of their kind, and what they are held against.

    The kind is op and scheme; where there are too few of it, the scheme alone.
    """
    known = _comparable(rows, evidence)
    found = {}
    for i in known:
        schemes = [j for j in known if evidence[j].scheme == evidence[i].scheme]
        alike = [j for j in schemes if rows[j].op == rows[i].op]
        kind, name = alike, f"{rows[i].op} ops"
        if len(alike) < _LEAST_LAYERS:
            kind, name = schemes, f"{evidence[i].scheme or ''} ops".strip()
        told = _outlier(_sqnr(rows[i]), [_sqnr(rows[j]) for j in kind], name)
        if told:
            found[i] = told
    return found


def _alone(rows: Sequence[LayerError], evidence: Sequence[Evidence]) -> tuple[int, str] | None:
    """
    The one row that loses a bit more than any other, as its range cuts off what it gives.

    Where there are few of its kind, or all differ, nothing else tells it. Of few values chance may
    cut off as many, where a range is an average over samples; they are lost all the same.
    """
    known = sorted(_comparable(rows, evidence), key=lambda i: _sqnr(rows[i]))
    if len(known) < _LEAST_LAYERS:
        return None
    (worst, next_worst), given = known[:2], evidence[known[0]]
    far = _sqnr(rows[worst]) < _sqnr(rows[next_worst]) - BIT_DB
    if not far or not sum(given.beyond) or not (rows[worst].local_rmse_lsb or 0) > _ROUNDED:
        return None
    return worst, (
        f"{too_narrow(rows[worst], given)}; {_sqnr(rows[worst]):.1f} dB locally, where no other op "
        f"has less than {_sqnr(rows[next_worst]):.1f} dB"
    )


def _cut_off(rows: Sequence[LayerError], evidence: Sequence[Evidence]) -> dict[int, str]:
    """Which rows have a range that cuts off what they give, whatever others of their kind lose."""
    given = list(zip(rows, evidence, strict=True))
    return {
        i: f"{_sqnr(row):.1f} dB locally"
        for i, (row, each) in enumerate(given)
        if row.matched and not each.untaken and is_cut_off(row, each)
    }


def _only_rounds(row: LayerError, evidence: Evidence) -> bool:
    """Whether an op has nothing to lose: one to float that is as far off as float32 rounds."""
    to_float = evidence.scheme == "float" or row.op == "DEQUANTIZE"
    in_float = to_float and row.excess_lsb is not None
    return in_float and not _beyond_rounding(row)


def _comparable(rows: Sequence[LayerError], evidence: Sequence[Evidence]) -> list[int]:
    """Rows whose losses tell something beside those of others."""
    return [
        i
        for i, row in enumerate(rows)
        if row.matched and row.local_sqnr_db is not None
        if not (_only_rounds(row, evidence[i]) or evidence[i].untaken or _is_endless(evidence[i]))
    ]


def _is_endless(evidence: Evidence) -> bool:
    """Whether torch gives what no range reaches, such as the logarithm of 0: how far off is all."""
    return evidence.reference is not None and not all(map(math.isfinite, evidence.reference))


def _outlier(value: float, kind: Sequence[float], name: str) -> str | None:
    if len(kind) < _LEAST_LAYERS:
        return None
    # Without any error (a MAX_POOL_2D) there is nothing to stand out from.
    finite = np.array([each for each in kind if math.isfinite(each)])
    if len(finite) < _LEAST_LAYERS - 1:
        return None
    low, median, high = np.percentile(finite, (25, 50, 75))
    fence = median - max(_FENCES * (high - low), BIT_DB)
    if not value < fence:
        return None
    return f"{value:.1f} dB locally, where the median of {len(kind)} {name} is {median:.1f} dB"


def _cause(row: LayerError, evidence: Evidence, loss: str | None) -> str:
    """
    Say why an op is to blame, by what is most certain.

    Args:
        row: The op.
        evidence: What is known of it.
        loss: How far it stands out from others of its kind, if it does.
    """
    if row.findings:
        more = len(row.findings) - 1
        also = f" (and {more} more finding{'s' if more > 1 else ''})" if more else ""
        return f"{_nonfinite(evidence)}{row.findings[0]}{also}"
    if evidence.nonfinite:
        return f"{_nonfinite(evidence)}the first op that gives any{_SPOILT * evidence.spoilt}"
    if _beyond_rounding(row):
        far = f"{_far(row)} on its own inputs"
        limited = at_bias_limit(evidence)
        if limited:
            return f"{limited}; {far}"
        channel = one_channel(evidence)
        where = f", and {channel}" if channel else ""
        return f"does not compute {row.op}: {far}{where}; {WAYS_OUT.get(row.op, _WAY_OUT)}"
    known = lossy(row, evidence)
    if known is None:
        assert loss is not None, "a row that nothing is known of is blamed for its loss alone"
        if overshoot(evidence) < FAR:
            return f"it loses more than others of its kind: {loss}"
        known = too_narrow(row, evidence)
    return f"{known}; {loss}" if loss else known


def _far(row: LayerError) -> str:
    assert row.excess_lsb is not None, "callers have looked"
    if row.local_lsb_error is None:
        return f"{row.excess_lsb + 1:.3g} times as far off as float32 rounds"
    return f"{row.excess_lsb:.3g} LSB beyond rounding"


WAYS_OUT = {
    "RESIZE_NEAREST_NEIGHBOR": (
        'litert-torch takes the pixel at the centre, and torch\'s mode="nearest" the one at '
        "floor(i / factor), which is another unless the factor is a whole number: take "
        'mode="nearest-exact" in the model, which is converted as it is'
    )
}
"""Of ops that a converter is known to write otherwise (litert-torch 0.10.0)."""

_WAY_OUT = "run the file on another runtime to tell whether the kernel or the file is wrong"


_SPOILT = (
    ": torch gives none there, and the op computes its inputs correctly, but quantization has "
    "rounded one of them to 0 (of a logarithm or a divisor) or the like; leave the op that makes "
    "it in float, or clamp it in the model at a step of its range or more"
)


def says_way_out(layers: LayerErrors) -> bool:
    """Whether the cause says what to change in the model, as nothing else is to blame."""
    known = layers.culprit is not None and layers.culprit.op in WAYS_OUT
    return known or any(text in layers.cause for text in (_SPOILT, *MASK_WAYS_OUT))


def _nonfinite(evidence: Evidence) -> str:
    count = evidence.nonfinite
    return f"{count} output values are NaN or infinite; " if count else ""


def _left_in_float(
    rows: Sequence[LayerError], evidence: Sequence[Evidence]
) -> tuple[int, str] | None:
    """
    The first op with weights that computes in float where most of its like do not.

    It loses nothing, and may be meant: it is told only where nothing else is.
    """
    weighted = [i for i, row in enumerate(rows) if "weight" in row.dtypes and evidence[i].scheme]
    others = [i for i in weighted if evidence[i].scheme != "float"]
    kinds = {rows[i].op for i in others}
    if kinds & _LAYERS:
        kinds |= _LAYERS
    # What no quantizer takes (a transposed convolution, say) has none of its like among the others.
    floats = [i for i in weighted if i not in others and rows[i].op in kinds]
    if not floats or len(floats) >= len(others):
        return None
    scheme, count = Counter(evidence[i].scheme for i in others).most_common(1)[0]
    more = f", as do {len(floats) - 1} more" if len(floats) > 1 else ""
    return floats[0], (
        f"it computes in float32{more}, where {count} other{'s' if count > 1 else ''} with weights "
        f"{'are' if count > 1 else 'is'} {scheme}; unless that is meant, the quantizer has no "
        "pattern for what torch calls here (a GRUCell, say), its annotation was dropped, or its "
        "config names another layer"
    )


def _everywhere(rows: Sequence[LayerError], evidence: Sequence[Evidence]) -> str | None:
    """What ails half of the outputs or more."""
    scaled = [
        (row, given)
        for row, given in zip(rows, evidence, strict=True)
        if given.scale and not given.untaken
    ]
    for test, text in _EVERYWHERE:
        found = [given for row, given in scaled if test(row, given) is not None]
        if found and 2 * len(found) >= len(scaled):
            return f"{len(found)} of {len(scaled)} outputs {text(_typical(found))}"
    return None


def _typical(found: Sequence[Evidence]) -> Evidence:
    """Return the evidence of the middle scale, for what has to be said of all of them."""
    return sorted(found, key=lambda given: given.scale or 0.0)[len(found) // 2]


_EVERYWHERE: tuple[
    tuple[Callable[[LayerError, Evidence], str | None], Callable[[Evidence], str]], ...
] = (
    (
        lambda _, given: never_calibrated(given),
        lambda _: "were never calibrated (scale 1.0, zero point 0)",
    ),
    (
        lambda _, given: calibrated_on_nothing(given),
        lambda _: "have a range of next to nothing: calibrated on zeros",
    ),
    (
        clipped,
        lambda given: (
            "have too narrow a range: "
            f"{given.calibration.too_narrow(averaged=bool(given.averaged))}"
        ),
    ),
    (too_wide, lambda given: f"have too wide a range: {given.calibration.too_wide(given.scale)}"),
)
