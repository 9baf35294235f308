"""Format the failure of an accuracy drop that is too large, or inconclusive."""

from __future__ import annotations

import math

from pytest_edgeq.check.assertions.expect import failed, table
from pytest_edgeq.check.assertions.scoring import Scores
from pytest_edgeq.numerics.findings import OVER_BUDGET, Finding, Place
from pytest_edgeq.numerics.paired import MOST_SAMPLES, RightWrong, mcnemar_p


def drop_error(scores: Scores, limit: float, n_samples: int) -> AssertionError:
    """Return the error of a drop that is, or may be, beyond a limit."""
    evidence, bounds = scores.evidence, scores.evidence.bounds
    what = "drop" if scores.higher_is_better else "rise"
    items = "samples" if evidence.n == n_samples else "items"
    n, between = f"{evidence.n} {items}", f"{bounds.low:.3g} to {bounds.high:.3g}"
    least = f"max_drop={_up(bounds.high):g}" if math.isfinite(bounds.high) else ""
    end, command = f"({between}): {n} cannot settle it", ""
    if bounds.low > limit:
        end = f"({n})"
        cause = (
            f"other data of the same kind would show a {what} of more than {limit:g}, too: chance "
            "does not explain it."
        )
        fix = "edgeq.compare(model, samples) says which stage of the flow loses it"
        command = f"{least}, the least that these {items} support" if least else ""
    elif not least:
        cause = f"{n} are too few: {scores.name} is undefined on some bootstrap resamples."
        fix = "pass more, of every class"
    else:
        side = (
            "is beyond the limit, but chance may explain it"
            if evidence.drop > limit
            else f"is within the limit, but the data do not prove that the true {what} is"
        )
        cause = f"the bounds lie on both sides of {limit:g}. What was seen {side}."
        fix = f"{least} is the least that these {items} support"
        if (enough := evidence.samples_needed(limit)) is None:
            end = f"({between}): to settle it needs more than {MOST_SAMPLES:,} {items}"
        else:
            end += f", about {enough:,} would"
            fix = f"about {enough:,} {items} settle it, if as large a share of them changes; {fix}"
    float_right, edge_right = (
        f"{round(score * evidence.n)} of {evidence.n} right"
        if isinstance(evidence, RightWrong)
        else ""
        for score in (scores.float_score, scores.edge_score)
    )
    rows = [
        ("float", f"{scores.float_score:.4g}", float_right),
        ("edge", f"{scores.edge_score:.4g}", edge_right),
        (what, f"{evidence.drop:.4g}", f"{between}, each bound with 95 % confidence"),
    ]
    found = Finding(
        kind=OVER_BUDGET,
        place=Place("file", f"{what} of {scores.name}"),
        expected=f"at most {limit:g}",
        got=f"{evidence.drop:.4g} {end}",
        evidence=(*table(rows, ("", "score", f"{n}, {scores.detail}")), *_changes(scores, items)),
        causes=(cause,),
        fix=fix,
        command=command,
    )
    return failed(found, fix, *found.acceptance)


def _changes(scores: Scores, items: str) -> list[str]:
    """Return lines on the samples that changed, and on whether chance explains it."""
    evidence = scores.evidence
    if not isinstance(evidence, RightWrong):
        worst = ", ".join(f"{i} ({a:.3g} → {b:.3g})" for i, a, b in scores.worst)
        return [f"lost most: samples {worst}"] if worst else []
    if not evidence.lost + evidence.gained:
        return [f"none of {evidence.n} {items} changed: what was right, or wrong, still is"]
    p = mcnemar_p(evidence.lost, evidence.gained)
    lines = [
        f"{evidence.lost} of {evidence.n} {items} became wrong, {evidence.gained} became "
        f"right; p = {p:.2g} (exact McNemar test)"
    ]
    if scores.worst:
        more = evidence.lost - len(scores.worst)
        worst = ", ".join(str(index) for index, _, _ in scores.worst)
        lines.append(f"became wrong: samples {worst}" + (f", … and {more} more" if more else ""))
    return lines


def _up(number: float) -> float:
    """Round up to two digits."""
    if number <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(number)) - 1)
    nearest = round(number / unit)
    return (nearest if nearest * unit >= number else nearest + 1) * unit
