"""Judge outputs of a selection by their matches and by the selected scores."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.localize.localizer import Localizer
from pytest_edgeq.numerics.comparison import Comparison
from pytest_edgeq.numerics.findings import LOST_OUTPUT, USELESS, Finding, Place
from pytest_edgeq.numerics.metrics import ONE_BIT_DB, sqnr_db
from pytest_edgeq.numerics.results import OutputErrors
from pytest_edgeq.tflite.choices import Choice, choices
from pytest_edgeq.tflite.ops import COMPARING

Array = npt.NDArray[np.float64]

_LEAST_MATCHES = 0.5
"""Minimum share of matching rows if the scores are unknown."""


@dataclass(slots=True)
class _RankedScores:
    """Scores that an op selects by, on the worst samples."""

    op: str  # their producer, for texts
    signal: float = 0.0  # sum of the squares of those of the float form
    noise: float = 0.0  # sum of the squared differences of the file's from them
    gap: float = 0.0  # greatest difference of two scores of the float form that changed places
    off: float = 0.0  # greatest error of the file's scores

    @property
    def sqnr_db(self) -> float:
        """SQNR of the scores, in dB."""
        return sqnr_db(self.signal, self.noise)


def judge_choices(
    quantized: QuantizedModel, localizer: Localizer | None, comparison: Comparison
) -> tuple[list[Finding], list[str]]:
    """
    Return findings and notes on outputs of a selection with rows unlike the reference's.

    A selection differs only if two scores are closer than the error of the file's scores: the
    reference's choice is greater there, and the file's choice in the file. So such an output is as
    good as its scores: less than one bit of them (4.4 dB SQNR) is a finding, else a note reports
    near ties. If the scores are unknown, half of the rows must match.
    """
    findings: list[Finding] = []
    notes: list[str] = []
    found = choices(quantized.graph, quantized.edge.signature)
    samples: list[Sample] = [each.inputs for each in comparison.worst_samples]
    for name, errors in comparison.total.outputs.items():
        agreement = errors.top1_agreement
        if name not in found or agreement is None or not agreement < 1:
            continue
        scores = None if localizer is None else _scores(localizer, found[name], samples)
        lost = agreement < _LEAST_MATCHES if scores is None else not scores.sqnr_db >= ONE_BIT_DB
        if lost:
            findings.append(_finding(errors, found[name], agreement, scores))
        else:
            notes.append(_note(errors, found[name], scores))
    return findings, notes


def _counts(errors: OutputErrors) -> tuple[int, int]:
    agreeing, rows = (sum(getattr(s, n) for s in errors.samples) for n in ("agreeing", "rows"))
    return agreeing, rows


def _finding(
    errors: OutputErrors, choice: Choice, agreement: float, scores: _RankedScores | None
) -> Finding:
    agreeing, rows = _counts(errors)
    got = f"got {agreeing} of {rows} ({100 * agreement:.3g} %)"
    if scores is None:
        return Finding(
            kind=LOST_OUTPUT,
            place=Place("output", errors.name),
            symptom=(f"expected half of what {choice.op.place} chose to be the reference's, {got}"),
            harm=USELESS,
        )
    return Finding(
        kind=LOST_OUTPUT,
        place=Place("output", errors.name),
        symptom=f"expected what {choice.op.place} chose in the reference, {got}",
        harm=USELESS,
        causes=(
            f"the scores that it chooses by, of {scores.op}, have {scores.sqnr_db:.3g} dB SQNR: "
            f"expected {ONE_BIT_DB:.3g} dB or more, which is one bit of them",
        ),
    )


def _note(errors: OutputErrors, choice: Choice, scores: _RankedScores | None) -> str:
    agreeing, rows = _counts(errors)
    text = (
        f"output {errors.name!r}: {agreeing} of {rows} are what {choice.op.place} "
        "chose in the reference"
    )
    if scores is None:
        return text
    text += f"; the scores, of {scores.op}, have {scores.sqnr_db:.3g} dB SQNR"
    if scores.gap:
        text += (
            f", and those that changed places lie {scores.gap:.2g} apart or less, which is within "
            f"the error of two of them, up to {2 * scores.off:.2g}"
        )
    return text


def _scores(
    localizer: Localizer, choice: Choice, samples: Iterable[Sample]
) -> _RankedScores | None:
    """Measure the scores that an op selects by; None if unknown."""
    subgraph = localizer.subgraph
    wanted = {choice.scores, *(choice.op.inputs if choice.op.name in COMPARING else ())}
    # Ops that only move scores, such as casts, may have no partner.
    makers = {localizer.pairs.source(tensor): tensor for tensor in wanted}
    scores: _RankedScores | None = None
    for sample in samples:
        try:
            made = [m for m in localizer.tensors(sample) if m.op.outputs[m.place] in makers]
        except (RuntimeError, ValueError, TypeError):
            return None
        known = {makers[m.op.outputs[m.place]]: m for m in made}
        if choice.scores not in known:
            continue
        first = known[choice.scores]
        if scores is None:
            scores = _RankedScores(f"{first.op.place}")
        shape = subgraph.tensors[choice.scores].shape
        whole, value = (_shaped(each, shape) for each in (first.whole, first.value))
        scores.signal += float(np.square(whole).sum())
        scores.noise += float(np.square(value - whole).sum())
        scores.off = max(scores.off, float(np.abs(value - whole).max(initial=0.0)))
        count = subgraph.tensors[choice.op.outputs[-1]].shape[-1:]
        scores.gap = max(scores.gap, _gap(choice.op.name, whole, value, *count))
    return scores


def _shaped(values: npt.NDArray[np.generic], shape: tuple[int, ...]) -> Array:
    floats = values.astype(np.float64)
    return floats.reshape(shape) if floats.size == np.prod(shape) else floats


def _gap(op: str, whole: Array, value: Array, most: int = 1) -> float:
    """Return the greatest difference of two scores that changed places in the result."""
    if op not in ("ARG_MAX", "ARG_MIN", "TOPK_V2") or not whole.size or not whole.ndim:
        return 0.0
    sign = -1.0 if op == "ARG_MIN" else 1.0
    count = whole.shape[-1]
    rows, own = (sign * each.reshape(-1, count) for each in (whole, value))
    if op == "TOPK_V2":
        order, got = (np.argsort(-each, axis=1, kind="stable")[:, :most] for each in (rows, own))
    else:
        order, got = (each.argmax(axis=1)[:, None] for each in (rows, own))
    ranked, chosen = (np.take_along_axis(rows, each, axis=1) for each in (order, got))
    return float(np.abs(ranked - chosen).max(initial=0.0))
