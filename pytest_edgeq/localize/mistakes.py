"""Name the mistake that explains an op's error or loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pytest_edgeq.localize.rows import Diagnostics, LayerError
from pytest_edgeq.numerics.health import more_than_chance
from pytest_edgeq.numerics.static_health import Reason, keeps_nothing
from pytest_edgeq.tflite.ops import facts_of

FAR = 0.1  # share of a range's width beyond which an overshoot is not chance


class Mistake(NamedTuple):
    """Why an op loses."""

    symptom: str  # what is wrong with it
    reason: Reason = Reason()  # the causes, and what to change


def overshoot(evidence: Diagnostics) -> float:
    """Return how far torch's values exceed a range, as a share of its width."""
    if _span(evidence) is None or evidence.reach is None or evidence.reference is None:
        return 0.0
    (low, high), (least, greatest) = evidence.reach, evidence.reference
    return max(greatest - high, low - least, 0.0) / (high - low)


def fill(evidence: Diagnostics) -> float:
    """Return the width of torch's values over the range's; 0 if unknown."""
    spans = _span(evidence)
    return 0.0 if spans is None else spans[1] / spans[0]


def _span(evidence: Diagnostics) -> tuple[float, float] | None:
    """Return the widths of the range and of torch's values; None if degenerate."""
    if evidence.reach is None or evidence.reference is None:
        return None
    reach = evidence.reach[1] - evidence.reach[0]
    # A range always includes 0, even if all values are far from it.
    needed = max(evidence.reference[1], 0.0) - min(evidence.reference[0], 0.0)
    return (reach, needed) if reach > 0 and 0 < needed < math.inf else None


BIT_DB = 20 * math.log10(2)
"""One bit in dB; a smaller loss is none, since layers of a small model hardly differ."""

_FEW_LEVELS = 1 / 8
"""Share of the codes in use below which a range is too wide: three bits are wasted."""

_UNEVEN = 16.0
"""Ratio of the channels' largest weights at which one scale leaves the least 4 bits fewer."""

_ENOUGH = 32
"""Minimum number of elements to judge a range: on average they span 31/33 of all values."""

_MOST = 0.5  # share of values beyond a range that counts even with fewer elements, unless by chance
_FEW_VALUES = 2  # maximum values per sample whose averaged range is about their mean

_AVERAGED_VALUE = Reason(
    ("a recipe averages the samples' ranges; for so few values the average is about their mean",),
    "leave it in float, or calibrate by pt2e_static_int8, which keeps the extremes of all samples",
)

_ONE_CHANNEL = 0.5  # minimum share of the error that one channel among four or more is blamed for


def lossy(row: LayerError, evidence: Diagnostics) -> Mistake | None:
    """Return the mistake in an op's parameters that explains its loss."""
    known = mistake(row, evidence)
    channel = one_channel(evidence)
    if known or channel is None:
        return known
    beyond = sum(evidence.beyond)
    # Half of one channel's values: fewer may belong to any channel.
    if evidence.reach is None or beyond * len(evidence.channel_noise) < 0.5:
        return Mistake(channel)
    return Mistake(
        f"{channel}: it overflows, {_percent(beyond)} of torch's values lie beyond the range "
        f"{_between(evidence.reach)}"
    )


def mistake(row: LayerError, evidence: Diagnostics) -> Mistake | None:
    """Return the mistake in parameters that no sound calibration yields."""
    return (
        never_calibrated(evidence)
        or calibrated_on_nothing(evidence)
        or clipped(row, evidence)
        or too_wide(row, evidence)
        or _uneven_weights(evidence)
        or at_bias_limit(evidence)
    )


def at_bias_limit(evidence: Diagnostics) -> Mistake | None:
    """Return the mistake of a bias that is clipped at the INT32 limit."""
    channels = evidence.bias_limited
    if not channels:
        return None
    return Mistake(
        f"its bias is at the INT32 limit in {channels_text(channels)}",
        Reason(
            ("weights near zero give a scale that the bias does not fit",),
            "give the layer's weights one scale, or leave it in float",
        ),
    )


def channels_text(channels: Sequence[int]) -> str:
    """Name the first few channels."""
    more = ", …" if len(channels) > 4 else ""
    return f"channel{'s' * (len(channels) > 1)} {', '.join(map(str, channels[:4]))}{more}"


def is_cut_off(row: LayerError, evidence: Diagnostics) -> bool:
    """Whether half of an op's values are clipped and no bit is left."""
    sqnr = row.local_sqnr_db
    if evidence.reach is None or sqnr is None or not sum(evidence.beyond) >= _MOST:
        return False
    return not sqnr >= BIT_DB


def never_calibrated(evidence: Diagnostics) -> Mistake | None:
    """Return the mistake of an observer that saw no sample."""
    if evidence.scale != 1.0 or evidence.zero_point != 0:
        return None
    return Mistake(
        "its output was never calibrated (scale 1.0, zero point 0)",
        Reason(("the observer saw no sample",), "calibrate before converting"),
    )


def calibrated_on_nothing(evidence: Diagnostics) -> Mistake | None:
    """Return the mistake of a range of almost nothing."""
    spans = _span(evidence)
    if spans is None or not keeps_nothing(*spans):
        return None
    few = evidence.calibration.averages and evidence.elements <= _FEW_VALUES * evidence.averaged
    return Mistake(
        f"its range is {_between(evidence.reach)}, next to nothing, where torch has "
        f"{_between(evidence.reference)}",
        _AVERAGED_VALUE if few else Reason(("calibrated on zeros",)),
    )


def clipped(row: LayerError, evidence: Diagnostics) -> Mistake | None:
    """Return the mistake of a range that is too narrow for torch's values."""
    beyond, elements = sum(evidence.beyond), evidence.elements
    if evidence.reach is None or (elements < _ENOUGH and not beyond >= _MOST):
        return None
    chance = not more_than_chance(round(beyond * elements), elements, averaged=evidence.averaged)
    if chance and not is_cut_off(row, evidence):
        return None
    return too_narrow(evidence)


def too_narrow(evidence: Diagnostics) -> Mistake:
    """Return the mistake of a narrow range, with the share of values beyond it."""
    beyond = _percent(sum(evidence.beyond))
    why = evidence.calibration.too_narrow()
    if (shared := evidence.range_narrowed) is not None:
        # An averaged range may clip as much.
        known = [why, shared] if evidence.averaged else [shared]
        causes = tuple(cause for each in known for cause in each.causes)
        why = Reason(causes, "; or ".join(each.fix for each in known if each.fix))
    reach = _between(evidence.reach)
    return Mistake(f"its range {reach} is too narrow: {beyond} of torch's values lie beyond", why)


def too_wide(row: LayerError, evidence: Diagnostics) -> Mistake | None:
    """Return the mistake of a range of which few codes are in use."""
    if evidence.codes is None or evidence.code_range is None or evidence.elements < _ENOUGH:
        return None
    if "weight" not in row.dtypes and not facts_of(row.op).own_range:
        return None
    if evidence.reference == (0.0, 0.0) and row.cumulative_sqnr_db == math.inf:
        # A ReLU that returns zeros for these samples proves nothing about its range.
        return None
    low, high = evidence.codes
    levels, all_levels = high - low + 1, evidence.code_range[1] - evidence.code_range[0] + 1
    zero = evidence.zero_point
    # A range always includes 0, even if all values are far from it.
    spanned = levels if zero is None else max(high, zero) - min(low, zero) + 1
    if not spanned < all_levels * _FEW_LEVELS:
        return None
    note = f", and the values reach {_between(evidence.observed)}" if evidence.observed else ""
    used = f"{levels} of {all_levels} levels are used{note}"
    reach = _between(evidence.reach)
    return Mistake(f"its range {reach} is too wide: {used}", evidence.why_too_wide)


def _uneven_weights(evidence: Diagnostics) -> Mistake | None:
    largest = [each for each in evidence.weight_maxima if each > 0]
    if evidence.weight_granularity != "per_tensor" or len(largest) < 2:
        return None
    ratio = max(largest) / min(largest)
    if not ratio >= _UNEVEN:
        return None
    return Mistake(
        f"one scale for all of its weights, whose channels differ by {ratio:.3g} ×: the least "
        f"uses {127 / ratio:.2g} of 127 codes",
        Reason(fix="quantize them per channel"),
    )


def one_channel(evidence: Diagnostics) -> str | None:
    """Return a text on the channel with most of the error, if any."""
    noise = np.asarray(evidence.channel_noise, np.float64)
    total = float(noise.sum())
    if len(noise) < 4 or not total > 0:
        return None
    worst = int(noise.argmax())
    share = float(noise[worst]) / total
    # Of few channels one has much by chance: it must also have four times the mean share.
    if not (share > _ONE_CHANNEL and share * len(noise) > 4):
        return None
    return f"channel {worst} of {len(noise)} has {_percent(share)} of the error"


def _between(pair: tuple[float, float] | None) -> str:
    assert pair is not None
    return f"[{pair[0]:.3g}, {pair[1]:.3g}]".replace("-", "−")


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
