"""Judge outputs of a selection by their matches and by the selected scores."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.localize.localizer import Localizer
from pytest_edgeq.numerics.comparison import Comparison
from pytest_edgeq.numerics.findings import LOST_OUTPUT, USELESS, Finding, Place
from pytest_edgeq.numerics.metrics import ONE_BIT_DB, sqnr_db
from pytest_edgeq.tflite.ends import Choice, choices

_LEAST_MATCHES = 0.5  # minimum share of matching rows if the scores are unknown


def judge_choices(
    quantized: QuantizedModel, localizer: Localizer | None, comparison: Comparison
) -> tuple[list[Finding], list[str]]:
    """
    Return findings and notes on outputs of a selection with rows unlike the reference's.

    A selection differs only if two scores are closer than their error, so it is as good as its
    scores: less than one bit of them (4.4 dB SQNR) is a finding, else a note reports near ties. If
    the scores are unknown, half of the rows must match.
    """
    findings: list[Finding] = []
    notes: list[str] = []
    found = choices(quantized.graph, quantized.edge.signature)
    samples: list[Sample] = [each.inputs for each in comparison.worst_samples]
    for name, errors in comparison.total.outputs.items():
        agreement = errors.top1_agreement
        if name not in found or agreement is None or not agreement < 1:
            continue
        agreeing, rows = (sum(getattr(s, n) for s in errors.samples) for n in ("agreeing", "rows"))
        op = found[name].op.place
        got = f"got {agreeing} of {rows} ({100 * agreement:.3g} %)"
        scores = None if localizer is None else _scores(localizer, found[name], samples)
        causes: tuple[str, ...] = ()
        if scores is None:
            text = f"expected at least half of the choices of {op} to match the reference, {got}"
            note, is_lost = "", agreement < _LEAST_MATCHES
        else:
            maker, quality = scores
            text = f"expected the choices of {op} to match the reference, {got}"
            causes = (
                f"the scores that it chooses by, of {maker}, have {quality:.3g} dB SQNR: expected "
                f"{ONE_BIT_DB:.3g} dB or more, which is one bit of them",
            )
            note = f"; the scores, of {maker}, have {quality:.3g} dB SQNR"
            is_lost = not quality >= ONE_BIT_DB
        if is_lost:
            place = Place("output", name)
            findings.append(
                Finding(kind=LOST_OUTPUT, place=place, symptom=text, harm=USELESS, causes=causes)
            )
        else:
            notes.append(
                f"output {name!r}: {agreeing} of {rows} choices of {op} match the reference{note}"
            )
    return findings, notes


def _scores(
    localizer: Localizer, choice: Choice, samples: Iterable[Sample]
) -> tuple[str, float] | None:
    """Return which op makes the scores of a choice, and their SQNR in dB; None if unknown."""
    # Ops that only move scores, such as casts, may have no partner.
    source = localizer.pairs.source(choice.scores)
    maker, signal, noise = "", 0.0, 0.0
    for sample in samples:
        try:
            made = [m for m in localizer.tensors(sample) if m.tensor == source]
        except (RuntimeError, ValueError, TypeError):
            return None
        for each in made:
            whole, value = (v.astype(np.float64).reshape(-1) for v in (each.whole, each.value))
            maker = str(each.op.place)
            signal += float(np.square(whole).sum())
            noise += float(np.square(value - whole).sum())
    return (maker, sqnr_db(signal, noise)) if maker else None
