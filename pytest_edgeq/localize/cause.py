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

from pytest_edgeq.localize.biases import is_of_parameters
from pytest_edgeq.localize.rows import (
    LOWERING,
    QUANTIZATION,
    SOUND,
    UNMATCHED,
    Evidence,
    LayerError,
    LayerErrors,
)
from pytest_edgeq.numerics.health import AVERAGES, more_than_chance

__all__ = ["blame", "cause_of"]

_LEAST_LAYERS = 5
"""
Layers that it takes to tell an outlier.

The third quartile of five is the fourth of them, so that the worst one does not move the fence that
it is held against; of four it would.
"""

_FENCES = 3.0
"""Interquartile ranges beyond the median."""

_ONE_BIT_DB = 20 * math.log10(2)
"""Layers as alike as those of a small model have hardly any range: what costs no bit is no loss."""

_FEW_LEVELS = 1 / 8
"""Share of the codes in use below which a range is too wide: three bits are wasted."""

_UNEVEN = 16.0
"""Ratio of the channels' largest weights at which one scale leaves the least 4 bits fewer."""

_LEAST_SCALE = 2.0**-12
"""What torchao's observers give all that has less (its quantizers' `eps`)."""

_TOO_SMALL = "PT2E gives no scale below 2⁻¹²: leave what is so small in float, or scale it up"

_ENOUGH = 32
"""Elements that span 31/33 of what their like spans, on average: fewer say nothing of a range."""

_MOST = 0.5
"""Share of torch's values beyond a range that so few tell of, too, if it is more than chance."""

_OWN_RANGE = {"ADD", "SUB", "MUL", "DIV", "BATCH_MATMUL", "QUANTIZE"}
"""
Ops, beside those with weights, whose output has a range of its own.

Others take their input's (pools, reshapes, joins), or one that TFLite fixes (SOFTMAX, LOGISTIC,
TANH), whatever the values are.
"""

_LAYERS = {"CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"}
"""Ops with weights that every flow quantizes where it quantizes one of them."""

_ONE_CHANNEL = 0.5
"""Share of the error from which one channel among four or more has it."""


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
    strangers = [i for i, given in enumerate(evidence) if given.stranger and not everywhere]
    culprit = _culprit(judged, evidence, losses or mistaken, strangers)
    if culprit is not None:
        cause = cause_of(judged[culprit], evidence[culprit], losses.get(culprit))
        first = _first_of_group(judged[culprit], evidence[culprit])
        if first is None:
            return _blamed(judged, culprit, cause)
        return _blamed(judged, first, f"with what follows it up to {judged[culprit].name}, {cause}")
    floats = _left_in_float(judged, evidence)
    if floats is not None and not everywhere:
        return _blamed(judged, *floats)
    cause = f"no single layer: {everywhere or 'the loss is spread'}"
    return LayerErrors(rows=judged, culprit=None, cause=cause)


def _first_of_group(row: LayerError, evidence: Evidence) -> int | None:
    """
    Where what is off starts, of ops that are only off together; None where the row has it itself.

    Ops that can be right alone were told apart, so that the first one is where torch was left.
    """
    if row.findings or evidence.nonfinite or not evidence.group or _broken(evidence):
        return None
    if not _beyond_rounding(row, evidence) or row.op in _WITH_OPTIONS:
        return None
    return evidence.group[0]


_WITH_OPTIONS = {
    *("CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV", "MAX_POOL_2D", "AVERAGE_POOL_2D"),
}
"""Ops whose own options (strides, dilations) are as likely to be wrong as what stands before."""


def _blamed(rows: tuple[LayerError, ...], culprit: int, cause: str) -> LayerErrors:
    row = rows[culprit]
    return LayerErrors(rows=rows, culprit=row, cause=f"{row.name}: {cause}")


def _verdict(row: LayerError, evidence: Evidence, loses: bool) -> str:
    if row.findings or evidence.nonfinite or _beyond_rounding(row, evidence):
        return LOWERING
    if not row.matched:
        return UNMATCHED
    return QUANTIZATION if loses else SOUND


def _beyond_rounding(row: LayerError, evidence: Evidence) -> bool:
    # Not `> 0`, which NaN would pass.
    if row.excess_lsb is not None:
        return not row.excess_lsb <= 0
    if _adds_up_to_more(row, evidence):
        return True
    most = _most(evidence)
    return most is not None and row.local_lsb_error is not None and not row.local_lsb_error <= most


def _adds_up_to_more(row: LayerError, evidence: Evidence) -> bool:
    """
    Whether ops that round one after the other are further off than their roundings add up to.

    What a range within cuts off is in few values, and may be far off, and what the last one cuts
    off is no error of codes: they must be so at most and on average.
    """
    most, rms, together = row.local_lsb_error, row.local_rmse_lsb, evidence.together
    if together is None or most is None or rms is None:
        return False
    # The code of the rounded reference is half a step further.
    return not most <= together + 0.5 and not rms <= together


_GROUP_SHARE = 1 / 8
"""
Of the codes, how far ops may be off whose roundings no bound is known of together.

Sound groups were off by a code or none. An eighth is three bits, which no rounding adds up to.
"""


def _most(evidence: Evidence) -> float | None:
    """How many LSB ops may be off together; None without codes."""
    if evidence.code_range is None:
        return None
    return (evidence.code_range[1] - evidence.code_range[0] + 1) * _GROUP_SHARE


def _culprit(
    rows: Sequence[LayerError],
    evidence: Sequence[Evidence],
    losses: Mapping[int, str],
    strangers: Sequence[int],
) -> int | None:
    for chosen in (
        [i for i, row in enumerate(rows) if not all(map(is_of_parameters, row.findings))],
        [i for i, row in enumerate(rows) if row.findings],
        [i for i, given in enumerate(evidence) if given.nonfinite],
        _far_beyond(rows, evidence),
    ):
        if chosen:
            return chosen[0]
    # What loses too much is not recognised any more: it comes first where it stands in front.
    if strangers and not any(i < strangers[0] for i in losses):
        return strangers[0]
    return min(losses, key=lambda i: (_sqnr(rows[i]), i)) if losses else None


def _far_beyond(rows: Sequence[LayerError], evidence: Sequence[Evidence]) -> list[int]:
    """
    Rows beyond rounding, but for those that are by less than a hundredth of another.

    Of another that is measured alike: codes in LSB, floats in what float32 rounds.
    """
    beyond = {
        i: _excess(row, given)
        for i, (row, given) in enumerate(zip(rows, evidence, strict=True))
        if _beyond_rounding(row, given)
    }
    # NaN is beyond every bound.
    size = {i: math.inf if math.isnan(x) else x for i, x in beyond.items()}
    coded = {i: rows[i].local_lsb_error is not None for i in size}
    most = {kind: max(size[i] for i in size if coded[i] is kind) for kind in set(coded.values())}
    return [i for i in size if size[i] >= most[coded[i]] / 100]


def _excess(row: LayerError, evidence: Evidence) -> float:
    if row.excess_lsb is not None:
        return row.excess_lsb
    most = evidence.together if _adds_up_to_more(row, evidence) else _most(evidence)
    return (row.local_lsb_error or 0.0) - (most or 0.0)


def _mistaken(rows: Sequence[LayerError], evidence: Sequence[Evidence]) -> dict[int, str]:
    """
    Which rows have parameters that can come from a mistake only, if they are the fewer.

    This is how a layer is told among too few of its kind.
    """
    scaled = [
        i
        for i, given in enumerate(evidence)
        if given.scale and rows[i].matched and not given.untaken
    ]
    found = {
        i: text
        for i in scaled
        if rows[i].local_sqnr_db is not None and (text := _mistake(rows[i], evidence[i]))
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
    known = [
        i
        for i, row in enumerate(rows)
        if row.matched and row.local_sqnr_db is not None
        if not (_only_rounds(row, evidence[i]) or evidence[i].untaken)
    ]
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


def _cut_off(rows: Sequence[LayerError], evidence: Sequence[Evidence]) -> dict[int, str]:
    """Which rows have a range that cuts off what they give, whatever others of their kind lose."""
    given = list(zip(rows, evidence, strict=True))
    return {
        i: f"{_sqnr(row):.1f} dB locally"
        for i, (row, each) in enumerate(given)
        if row.matched and not each.untaken and _is_cut_off(row, each)
    }


def _is_cut_off(row: LayerError, evidence: Evidence) -> bool:
    """Whether half of an op's values or more lie beyond its range, and not one bit is left."""
    sqnr = row.local_sqnr_db
    if evidence.reach is None or sqnr is None or not sum(evidence.beyond) >= _MOST:
        return False
    return not sqnr >= _ONE_BIT_DB


def _only_rounds(row: LayerError, evidence: Evidence) -> bool:
    """Whether an op has nothing to lose: one to float that is as far off as float32 rounds."""
    to_float = evidence.scheme == "float" or row.op == "DEQUANTIZE"
    in_float = to_float and row.excess_lsb is not None
    return in_float and not _beyond_rounding(row, evidence)


def _outlier(value: float, kind: Sequence[float], name: str) -> str | None:
    if len(kind) < _LEAST_LAYERS:
        return None
    # Without any error (a MAX_POOL_2D) there is nothing to stand out from.
    finite = np.array([each for each in kind if math.isfinite(each)])
    if len(finite) < _LEAST_LAYERS - 1:
        return None
    low, median, high = np.percentile(finite, (25, 50, 75))
    fence = median - max(_FENCES * (high - low), _ONE_BIT_DB)
    if not value < fence:
        return None
    return f"{value:.1f} dB locally, where the median of {len(kind)} {name} is {median:.1f} dB"


def cause_of(row: LayerError, evidence: Evidence, loss: str | None = None) -> str:
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
        return f"{_nonfinite(evidence)}the first op that gives any"
    if _beyond_rounding(row, evidence):
        known, far = _broken(evidence), f"{_far(row, evidence)} on its own inputs"
        if known:
            return f"{known}; {far}"
        channel = _one_channel(evidence)
        where = f", and {channel}" if channel else ""
        return f"does not compute {_twins(row)}: {far}{where}; {_WAY_OUT}that torch call"
    if evidence.stranger:
        return f"no torch call gives what it gives of what it takes; {_WAY_OUT}torch"
    known = _lossy(row, evidence)
    if known is None:
        return f"it loses more than others of its kind: {loss}" if loss else "nothing stands out"
    return f"{known}; {loss}" if loss else known


def _far(row: LayerError, evidence: Evidence) -> str:
    if row.excess_lsb is None:
        return f"{row.local_lsb_error:g} LSB off, more than roundings add up to,"
    if row.local_lsb_error is None:
        return f"{row.excess_lsb + 1:.3g} times as far off as float32 rounds"
    return f"{row.excess_lsb:.3g} LSB beyond rounding"


_WAY_OUT = (
    "compare the op, its options (stride, padding, axis, fused activation) and what it reads with "
)


def _nonfinite(evidence: Evidence) -> str:
    count = evidence.nonfinite
    return f"{count} output values are NaN or infinite; " if count else ""


def _twins(row: LayerError) -> str:
    if len(row.nodes) > 3:
        return f"{row.nodes[0]}, …, {row.nodes[-1]} ({len(row.nodes)} torch nodes)"
    return " and ".join(row.nodes) or "torch"


def _broken(evidence: Evidence) -> str | None:
    """What makes an op compute something else."""
    return _dtype_changed(evidence) or _at_bias_limit(evidence) or _lost_activation(evidence)


def _lossy(row: LayerError, evidence: Evidence) -> str | None:
    """What makes an op lose by its parameters."""
    known = _dtype_changed(evidence) or _mistake(row, evidence)
    channel = _one_channel(evidence)
    if known or channel is None:
        return known
    beyond = sum(evidence.beyond)
    # Half of one channel's values: fewer may be of any.
    if evidence.reach is None or beyond * len(evidence.channel_noise) < 0.5:
        return channel
    return (
        f"{channel}: it overflows, {_percent(beyond)} of torch's values lie beyond the range "
        f"{_range(evidence)}"
    )


def _mistake(row: LayerError, evidence: Evidence) -> str | None:
    """Parameters that no sound calibration gives."""
    return (
        _never_calibrated(evidence)
        or _calibrated_on_nothing(evidence)
        or _clipped(row, evidence)
        or _too_wide(row, evidence)
        or _uneven_weights(evidence)
        or _at_bias_limit(evidence)
    )


def _dtype_changed(evidence: Evidence) -> str | None:
    if not evidence.dtype_changes:
        return None
    role, actual, wanted = evidence.dtype_changes[0]
    return f"its {role} is {actual} and was to be {wanted}: what makes it changed its dtype"


def _at_bias_limit(evidence: Evidence) -> str | None:
    channels = evidence.bias_limited
    if not channels:
        return None
    return (
        f"its bias is at the INT32 limit in {_channels(channels)}: weights near zero give a scale "
        "that the bias does not fit; give the layer's weights one scale, or leave it in float"
    )


def _channels(channels: Sequence[int]) -> str:
    if len(channels) == 1:
        return f"channel {channels[0]}"
    return f"channels {', '.join(map(str, channels[:4]))}{', …' if len(channels) > 4 else ''}"


def _lost_activation(evidence: Evidence) -> str | None:
    """A fused activation shows in the sides on which values end."""
    if evidence.reference is None or evidence.met is None or evidence.scale is None:
        return None
    (least, greatest), (low, high) = evidence.reference, evidence.met
    assert evidence.reach is not None
    step = evidence.scale
    # A step is left for rounding at either end; what only the codes' range ends is no clamp.
    if least >= 0 and low < -1.5 * step:
        return f"it gives {low:.3g}, where torch gives nothing below 0: a RELU was dropped"
    if abs(low) < step / 2 and least < -1.5 * step and evidence.reach[0] < -1.5 * step:
        return f"it gives nothing below 0, where torch gives {least:.3g}: a RELU too many"
    if high > greatest + 1.5 * step and greatest in (1.0, 6.0):
        return f"it gives {high:.3g}, where torch stops at {greatest:g}: a clamp was dropped"
    for stop in (1.0, 6.0):
        inside = evidence.reach[1] > stop + 1.5 * step
        if abs(high - stop) < step / 2 and greatest > stop + 1.5 * step and inside:
            return f"it stops at {stop:g}, where torch gives {greatest:.3g}: a clamp too many"
    return None


def _never_calibrated(evidence: Evidence) -> str | None:
    if evidence.scale != 1.0 or evidence.zero_point != 0:
        return None
    return (
        "its output was never calibrated (scale 1.0, zero point 0): the observer saw no sample; "
        "calibrate before converting"
    )


def _span(evidence: Evidence) -> tuple[float, float] | None:
    """Widths of what the codes reach, and of what torch gives; both must be known, and not 0."""
    if evidence.reach is None or evidence.reference is None:
        return None
    reach = evidence.reach[1] - evidence.reach[0]
    needed = max(evidence.reference[1], 0.0) - min(evidence.reference[0], 0.0)
    return (reach, needed) if reach > 0 and needed > 0 else None


def _calibrated_on_nothing(evidence: Evidence) -> str | None:
    spans = _span(evidence)
    # A range that keeps one value in a hundred can only come from samples that were none.
    if spans is None or spans[0] > spans[1] / 100:
        return None
    return (
        f"its range is {_range(evidence)}, next to nothing, where torch gives "
        f"{_between(evidence.reference)}: calibrated on zeros"
    )


def _clipped(row: LayerError, evidence: Evidence) -> str | None:
    beyond, elements = sum(evidence.beyond), evidence.elements
    if evidence.reach is None or (elements < _ENOUGH and not beyond >= _MOST):
        return None
    chance = not more_than_chance(round(beyond * elements), elements, averaged=evidence.averaged)
    if chance and not _is_cut_off(row, evidence):
        return None
    at_ends = f", {_percent(row.clipped)} of its codes are at an end" if row.clipped else ""
    return (
        f"its range {_range(evidence)} is too narrow: {_percent(beyond)} of torch's values lie "
        f"beyond{at_ends}; calibrate with samples like those evaluated"
        f"{AVERAGES if evidence.averaged else ''}"
    )


def _too_wide(row: LayerError, evidence: Evidence) -> str | None:
    if evidence.codes is None or evidence.code_range is None or evidence.elements < _ENOUGH:
        return None
    if "weight" not in row.dtypes and row.op not in _OWN_RANGE:
        return None
    if evidence.reference == (0.0, 0.0) and row.cumulative_sqnr_db == math.inf:
        # A ReLU that gives nothing for these samples says nothing of its range.
        return None
    low, high = evidence.codes
    levels, all_levels = high - low + 1, evidence.code_range[1] - evidence.code_range[0] + 1
    zero = evidence.zero_point
    # A range has 0 in it, however far from it all values lie.
    spanned = levels if zero is None else max(high, zero) - min(low, zero) + 1
    if not spanned < all_levels * _FEW_LEVELS:
        return None
    met = f", and the values reach {_between(evidence.met)}" if evidence.met else ""
    why = evidence.widened or "calibrated with an outlier, or with other preprocessing"
    return (
        f"its range {_range(evidence)} is too wide: {levels} of {all_levels} levels are "
        f"used{met}; {_TOO_SMALL if evidence.scale == _LEAST_SCALE else why}"
    )


def _uneven_weights(evidence: Evidence) -> str | None:
    largest = [each for each in evidence.weight_maxima if each > 0]
    if evidence.weight_granularity != "per_tensor" or len(largest) < 2:
        return None
    ratio = max(largest) / min(largest)
    if not ratio >= _UNEVEN:
        return None
    return (
        f"one scale for all of its weights, whose channels differ by {ratio:.3g} ×: the least "
        f"uses {127 / ratio:.2g} of 127 codes; quantize them per channel"
    )


def _one_channel(evidence: Evidence) -> str | None:
    noise = np.asarray(evidence.channel_noise, np.float64)
    total = float(noise.sum())
    if len(noise) < 4 or not total > 0:
        return None
    worst = int(noise.argmax())
    share = float(noise[worst]) / total
    # Of few channels one has much by chance: it must have four times its part, too.
    if not (share > _ONE_CHANNEL and share * len(noise) > 4):
        return None
    return f"channel {worst} of {len(noise)} has {_percent(share)} of the error"


def _range(evidence: Evidence) -> str:
    return _between(evidence.reach)


def _between(pair: tuple[float, float] | None) -> str:
    assert pair is not None
    return f"[{pair[0]:.3g}, {pair[1]:.3g}]".replace("-", "−")


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


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
        f"{'are' if count > 1 else 'is'} {scheme}; unless that is meant, its annotation was "
        "dropped, or its config names another layer"
    )


def _everywhere(rows: Sequence[LayerError], evidence: Sequence[Evidence]) -> str | None:
    """What ails half of the outputs or more."""
    scaled = [
        (row, given)
        for row, given in zip(rows, evidence, strict=True)
        if given.scale and not given.untaken
    ]
    for test, text in _EVERYWHERE:
        count = sum(test(row, given) is not None for row, given in scaled)
        if count and 2 * count >= len(scaled):
            return f"{count} of {len(scaled)} outputs {text}"
    return None


_EVERYWHERE: tuple[tuple[Callable[[LayerError, Evidence], str | None], str], ...] = (
    (lambda _, given: _never_calibrated(given), "were never calibrated (scale 1.0, zero point 0)"),
    (
        lambda _, given: _calibrated_on_nothing(given),
        "have a range of next to nothing: calibrated on zeros",
    ),
    (_clipped, "have too narrow a range: calibrate with samples like those evaluated"),
    (
        _too_wide,
        "have too wide a range: calibrated with an outlier, or with other preprocessing",
    ),
)
