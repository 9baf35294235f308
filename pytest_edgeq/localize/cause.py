"""
Choose the row to blame, and say why.

An error beyond the kernel's rounding and a wrong constant are defects in any op. A loss by
quantization alone is no defect, since every layer has one. It is reported only for a layer that
loses far more than others of its kind, or whose parameters can only come from a mistake.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from pytest_edgeq.localize.mistakes import (
    BIT_DB,
    FAR,
    Mistake,
    calibrated_on_nothing,
    clipped,
    fill,
    is_cut_off,
    lossy,
    mistake,
    never_calibrated,
    one_channel,
    overshoot,
    too_narrow,
    too_wide,
)
from pytest_edgeq.localize.rows import (
    LOWERING,
    QUANTIZATION,
    SOUND,
    UNMATCHED,
    Diagnostics,
    LayerError,
    LayerErrors,
)
from pytest_edgeq.numerics.findings import (
    ACCUMULATED_LOSS,
    FILE,
    LOSSY_EVERYWHERE,
    LOSSY_OP,
    NO_HARM,
    OP_IN_FLOAT,
    USELESS,
    WRONG_OP,
    WRONG_QPARAMS,
    WRONG_RESULT,
    Finding,
    Harm,
    Place,
)
from pytest_edgeq.numerics.static_health import Reason
from pytest_edgeq.tflite.ops import BOUNDED, LAYERS

# Minimum number of layers to detect an outlier.
# The third quartile of five values is the fourth of them, so that the worst one does not move the
# fence that it is compared with; of four values it would.
_LEAST_LAYERS = 5

_FENCES = 3.0  # interquartile ranges beyond the median

ROUNDED = 2 / math.sqrt(12)
"""Root mean square in LSB beyond which rounding makes less than a quarter of an error's power."""


def blame(
    rows: Sequence[LayerError], evidence: Sequence[Diagnostics], inputs: Sequence[Finding] = ()
) -> LayerErrors:
    """
    Assign a verdict to every row, choose the culprit and say why.

    A finding about constants precedes an excess over rounding, which precedes a loss by
    quantization. Of rows with findings of one kind the most harmful is chosen, and of those within
    a bit of it the first. The range of an input explains losses by quantization in all ops.
    """
    losses = _outlier_losses(rows, evidence)
    # Those whose range clips most of their values, whatever others lose.
    losses |= {
        i: f"{_sqnr(row):.1f} dB locally"
        for i, (row, own) in enumerate(zip(rows, evidence, strict=True))
        if row.matched and not own.unused and is_cut_off(row, own)
    }
    mistaken = {} if losses else _mistaken(rows, evidence)
    judged = tuple(
        replace(row, verdict=_verdict(row, own, i in losses or i in mistaken))
        for i, (row, own) in enumerate(zip(rows, evidence, strict=True))
    )
    wrong = _wrong(judged, evidence)
    if wrong is not None:
        first, *others = _defects(judged, evidence, wrong)
        return LayerErrors(rows=judged, culprit=judged[wrong], finding=first, others=tuple(others))
    if inputs:
        return LayerErrors(rows=judged, culprit=None, finding=inputs[0])
    everywhere = _everywhere(judged, evidence)
    worst = None if everywhere else _worst_row(judged, evidence)
    lossy_rows = losses or mistaken
    culprit = min(lossy_rows, key=lambda i: (_sqnr(rows[i]), i)) if lossy_rows else None
    shared, is_half_empty = _shared_by_ranges(judged, evidence)
    if is_half_empty and culprit is not None and too_wide(judged[culprit], evidence[culprit]):
        culprit = None  # where most ranges are half empty, an even emptier one is not to blame
    if worst is not None:
        place, cause = worst
        if culprit is None or _sqnr(judged[place]) < _sqnr(judged[culprit]):
            row = replace(judged[place], verdict=QUANTIZATION)
            return _lossy((*judged[:place], row, *judged[place + 1 :]), place, cause)
    if culprit is not None:
        return _lossy(
            judged, culprit, _loss(judged[culprit], evidence[culprit], losses.get(culprit))
        )
    floats = _left_in_float(judged, evidence)
    if floats is not None and not everywhere:
        return _lossy(judged, *floats, kind=OP_IN_FLOAT)
    found = accumulated(judged)
    if (known := everywhere or shared) is not None:
        known = known._replace(symptom=f"no single layer: {known.symptom}")
        found = _finding(LOSSY_EVERYWHERE, FILE, known)
    return LayerErrors(rows=judged, culprit=None, finding=found)


def _finding(kind: str, place: Place, known: Mistake, harm: Harm = NO_HARM) -> Finding:
    symptom, why = known
    return Finding(
        kind=kind, place=place, symptom=symptom, causes=why.causes, fix=why.fix, harm=harm
    )


def accumulated(rows: Sequence[LayerError]) -> Finding:
    """Return the finding that the error accumulates over all layers."""
    count = sum(row.local_sqnr_db is not None and row.local_sqnr_db < math.inf for row in rows)
    over = f": the error accumulates over {count} layers" if count > 1 else ""
    return Finding(kind=ACCUMULATED_LOSS, place=FILE, symptom=f"no single layer stands out{over}")


def _lossy(
    rows: tuple[LayerError, ...], culprit: int, known: Mistake, kind: str = LOSSY_OP
) -> LayerErrors:
    row = rows[culprit]
    harm = NO_HARM if kind == OP_IN_FLOAT else Harm.of_rms(row.local_rmse_lsb or 0.0)
    return LayerErrors(rows=rows, culprit=row, finding=_finding(kind, row.place, known, harm))


def _verdict(row: LayerError, evidence: Diagnostics, loses: bool) -> str:
    if row.records or evidence.nonfinite or _beyond_rounding(row):
        return LOWERING
    if not row.matched:
        return UNMATCHED
    return QUANTIZATION if loses else SOUND


def _beyond_rounding(row: LayerError) -> bool:
    # Not `> 0`, which NaN would pass.
    return row.excess_lsb is not None and not row.excess_lsb <= 0


def _wrong(rows: Sequence[LayerError], evidence: Sequence[Diagnostics]) -> int | None:
    """Choose the row that computes something else than torch; None if all are correct."""
    for chosen in (
        [i for i, row in enumerate(rows) if any(each.kind == WRONG_OP for each in row.records)],
        [i for i, row in enumerate(rows) if row.records],
        [i for i, own in enumerate(evidence) if own.nonfinite],
        _far_beyond(rows),
    ):
        if chosen:
            most = max(evidence[i].harm for i in chosen)
            near = Harm(most.level, most.amount - BIT_DB)
            return next(i for i in chosen if evidence[i].harm >= near)
    return None


def _defects(
    rows: Sequence[LayerError], evidence: Sequence[Diagnostics], wrong: int
) -> list[Finding]:
    """Return one finding per kind of op and defect, that of `wrong` first."""
    beyond = set(_far_beyond(rows))
    found = {i: _defect(rows[i], evidence[i]) for i, row in enumerate(rows) if row.records}
    found |= {
        i: _defect(rows[i], evidence[i]) for i in beyond - found.keys() if not evidence[i].nonfinite
    }
    found[wrong] = _defect(rows[wrong], evidence[wrong])
    groups: dict[tuple[str, str], list[Finding]] = {}
    for i in sorted(found, key=lambda i: (i != wrong, i)):
        groups.setdefault((found[i].kind, rows[i].op), []).append(found[i])
    first, *others = (
        replace(one, evidence=tuple(f"  {each.sentence}" for each in alike))
        for one, *alike in groups.values()
    )
    others = [each for each in others if each.kind != WRONG_QPARAMS]
    return [first, *sorted(others, key=lambda each: each.harm, reverse=True)]


def _far_beyond(rows: Sequence[LayerError]) -> list[int]:
    """Return rows beyond rounding by a hundredth of the greatest excess, of codes and of floats."""
    beyond = {i: row.excess_lsb or 0.0 for i, row in enumerate(rows) if _beyond_rounding(row)}
    # NaN is beyond every bound.
    size = {i: math.inf if math.isnan(x) else x for i, x in beyond.items()}
    coded = {i: rows[i].local_lsb_error is not None for i in size}
    most = {kind: max(size[i] for i in size if coded[i] is kind) for kind in set(coded.values())}
    return [i for i in size if size[i] >= most[coded[i]] / 100]


def _mistaken(rows: Sequence[LayerError], evidence: Sequence[Diagnostics]) -> dict[int, Mistake]:
    """Return rows, if a minority, with parameters that only a mistake explains."""
    scaled = [
        i
        for i, own in enumerate(evidence)
        if own.scale and rows[i].matched and not (own.unused or _is_endless(own))
    ]
    found = {
        i: found
        for i in scaled
        # Behind an op that returns zeros there is nothing to lose.
        if rows[i].local_sqnr_db not in (None, math.inf)
        if (found := mistake(rows[i], evidence[i])) is not None
    }
    return found if 2 * len(found) < len(scaled) else {}


def _sqnr(row: LayerError) -> float:
    """Return the local SQNR in dB; NaN, which is worse than any, as −inf."""
    sqnr = row.local_sqnr_db
    assert sqnr is not None
    return sqnr if not math.isnan(sqnr) else -math.inf


def _outlier_losses(rows: Sequence[LayerError], evidence: Sequence[Diagnostics]) -> dict[int, str]:
    """Return rows that lose far more than others of their op and scheme, or scheme, with texts."""
    known = _comparable(rows, evidence)
    found = {}
    for i in known:
        schemes = [j for j in known if evidence[j].scheme == evidence[i].scheme]
        alike = [j for j in schemes if rows[j].op == rows[i].op]
        kind, name = alike, f"{rows[i].op} ops"
        if len(alike) < _LEAST_LAYERS:
            kind, name = schemes, f"{evidence[i].scheme or ''} ops".strip()
        text = _outlier(_sqnr(rows[i]), [_sqnr(rows[j]) for j in kind], name)
        if text:
            found[i] = text
    return found


def _worst_row(
    rows: Sequence[LayerError], evidence: Sequence[Diagnostics]
) -> tuple[int, Mistake] | None:
    """
    Return the row that clipping makes a bit worse than any other.

    It is used if there are few ops of its kind, or all differ. Chance may clip as many of few
    values if a range is an average over samples; they are lost all the same.
    """
    known = sorted(_comparable(rows, evidence), key=lambda i: _sqnr(rows[i]))
    if len(known) < _LEAST_LAYERS:
        return None
    (worst, next_worst), own = known[:2], evidence[known[0]]
    far = _sqnr(rows[worst]) < _sqnr(rows[next_worst]) - BIT_DB
    if not far or not sum(own.beyond) or not (rows[worst].local_rmse_lsb or 0) > ROUNDED:
        return None
    return worst, _with_loss(
        too_narrow(own),
        f"{_sqnr(rows[worst]):.1f} dB locally, where no other op has less than "
        f"{_sqnr(rows[next_worst]):.1f} dB",
    )


def _with_loss(known: Mistake, loss: str) -> Mistake:
    """Add the op's loss to the symptom of a mistake."""
    return known._replace(symptom=f"{known.symptom}; {loss}")


def _comparable(rows: Sequence[LayerError], evidence: Sequence[Diagnostics]) -> list[int]:
    """Return rows whose losses can be compared with those of others."""
    found = []
    for i, (row, own) in enumerate(zip(rows, evidence, strict=True)):
        to_float = own.scheme == "float" or row.op == "DEQUANTIZE"
        only_rounds = to_float and row.excess_lsb is not None and not _beyond_rounding(row)
        is_measured = row.matched and row.local_sqnr_db is not None
        if is_measured and not (only_rounds or own.unused or _is_endless(own)):
            found.append(i)
    return found


def _is_endless(evidence: Diagnostics) -> bool:
    """Whether torch has infinite values there, such as log(0), so that no range fits."""
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


def _defect(row: LayerError, evidence: Diagnostics) -> Finding:
    """Return one finding on a wrong op, made from the most certain evidence."""
    count = evidence.nonfinite
    nonfinite = f"{count} output values are NaN or infinite; " if count else ""
    if row.records:
        first, *others = sorted(row.records, key=lambda each: each.kind == WRONG_QPARAMS)
        also = f" (and {len(others)} more finding{'s' * (len(others) > 1)})" if others else ""
        return replace(
            first,
            place=row.place,
            symptom=f"{nonfinite}{first.summary}{also}",
            harm=max(evidence.harm, USELESS if count else NO_HARM),
        )
    reason = Reason()
    if count:
        symptom = f"{nonfinite}the first op that has any"
        reason = _INPUT_ROUNDED if evidence.nonfinite_by_rounding else reason
    else:
        channel = one_channel(evidence)
        where = f", and {channel}" if channel else ""
        assert row.excess_lsb is not None, "callers have checked it"
        excess = f"{row.excess_lsb:.3g} LSB beyond rounding"
        if row.local_lsb_error is None:
            excess = f"{row.excess_lsb + 1:.3g} times as far off as float32 rounds"
        symptom = f"does not compute {row.op}: {excess} on its own inputs{where}"
    harm = USELESS if count else evidence.harm
    return _finding(WRONG_RESULT, row.place, Mistake(symptom, reason), harm)


def _loss(row: LayerError, evidence: Diagnostics, loss: str | None) -> Mistake:
    """Return the reason for an op's loss."""
    known = lossy(row, evidence)
    if known is None:
        assert loss is not None, "a row without a known mistake is blamed for its loss"
        if overshoot(evidence) < FAR:
            return Mistake(f"it loses more than others of its kind: {loss}")
        known = too_narrow(evidence)
    return _with_loss(known, loss) if loss else known


NEAREST = Reason(
    (
        "the op reads the pixel at the centre (half_pixel_centers), and torch's "
        'mode="nearest" the one at floor(i / factor), which is another unless the factor is a '
        "whole number",
    ),
    'take mode="nearest-exact" in the model, which is converted as it is',
)
"""Of a RESIZE_NEAREST_NEIGHBOR with half_pixel_centers, as litert-torch 0.10.0 writes all."""

_INPUT_ROUNDED = Reason(
    (
        "torch has none there, and the op is correct on its inputs, but quantization rounded one "
        "of them, for example a divisor to 0",
    ),
    "leave the op that computes this input in float, or clamp the input in the model at a step of "
    "its range or more",
)


def _left_in_float(
    rows: Sequence[LayerError], evidence: Sequence[Diagnostics]
) -> tuple[int, Mistake] | None:
    """Return the first float op with weights while most of its kind are quantized."""
    weighted = [i for i, row in enumerate(rows) if "weight" in row.dtypes and evidence[i].scheme]
    others = [i for i in weighted if evidence[i].scheme != "float"]
    kinds = {rows[i].op for i in others}
    if kinds & LAYERS:
        kinds |= LAYERS
    # Ops that no quantizer supports (a transposed convolution, say) have no quantized counterpart.
    floats = [i for i in weighted if i not in others and rows[i].op in kinds]
    if not floats or len(floats) >= len(others):
        return None
    scheme, count = Counter(evidence[i].scheme for i in others).most_common(1)[0]
    more = f", as do {len(floats) - 1} more" if len(floats) > 1 else ""
    return floats[0], Mistake(
        f"it computes in float32{more}, where {count} other{'s' if count > 1 else ''} with weights "
        f"{'are' if count > 1 else 'is'} {scheme}; unless that is meant, the quantizer has no "
        "pattern for what torch calls here (a GRUCell, say), its annotation was dropped, or its "
        "config names another layer"
    )


def _everywhere(rows: Sequence[LayerError], evidence: Sequence[Diagnostics]) -> Mistake | None:
    """Return the mistake that at least half of the outputs share."""
    scaled = [
        (row, own) for row, own in zip(rows, evidence, strict=True) if own.scale and not own.unused
    ]
    for test, text, why in _EVERYWHERE:
        found = [own for row, own in scaled if test(row, own) is not None]
        if found and 2 * len(found) >= len(scaled):
            middle = sorted(found, key=lambda own: own.scale or 0.0)[len(found) // 2]
            return Mistake(f"{len(found)} of {len(scaled)} outputs {text}", why(middle))
    return None


def _shared_by_ranges(
    rows: Sequence[LayerError], evidence: Sequence[Diagnostics]
) -> tuple[Mistake | None, bool]:
    """
    Return the mistake that the ranges show together, and whether most of them are half empty.

    A single range may be exceeded by chance: in sound networks that were calibrated on 64 samples,
    one in 26, or in 9, is exceeded by a tenth of its width, and the median is 86 % full or more.
    Calibrated on 2 samples, or at half the amplitude, a quarter of the ranges are exceeded so far.
    """
    filled = [
        (share, own)
        for row, own in zip(rows, evidence, strict=True)
        if not (own.unused or own.range_narrowed or row.op in BOUNDED) and (share := fill(own))
    ]
    if len(filled) < _LEAST_LAYERS:
        return None, False
    most = median(share for share, _ in filled)
    if most < 0.5:
        symptom = f"values fill {100 * most:.2g} % of their ranges, in the median of {len(filled)}"
        return Mistake(symptom, filled[0][1].calibration.too_wide()), True
    narrow = [(share, own) for share, own in filled if overshoot(own) >= FAR]
    if len(narrow) < max(2, len(filled) / 8):
        return None, False
    symptom = (
        f"{len(narrow)} of {len(filled)} ranges are too narrow (values span "
        f"{median(share for share, _ in narrow):.2g} × as much, in the median of these)"
    )
    return Mistake(symptom, narrow[0][1].calibration.too_narrow(on_more=True)), False


_Test = Callable[[LayerError, Diagnostics], Mistake | None]
_EVERYWHERE: tuple[tuple[_Test, str, Callable[[Diagnostics], Reason]], ...] = (
    (
        lambda _, own: never_calibrated(own),
        "were never calibrated (scale 1.0, zero point 0)",
        lambda _: Reason(),
    ),
    (
        lambda _, own: calibrated_on_nothing(own),
        "have a range of next to nothing",
        lambda _: Reason(("calibrated on zeros",)),
    ),
    (clipped, "have too narrow a range", lambda own: own.calibration.too_narrow()),
    (too_wide, "have too wide a range", lambda own: own.why_too_wide),
)
