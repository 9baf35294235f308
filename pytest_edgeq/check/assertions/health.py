"""Assert that a comparison shows no defect, whatever its budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_edgeq.errors import UnmatchedError, failure
from pytest_edgeq.names import nearest
from pytest_edgeq.numerics.comparison import Comparison
from pytest_edgeq.numerics.findings import ordered


def assert_healthy(comparison: Comparison, allow: Sequence[str] = ()) -> None:
    """
    Assert that a comparison shows no defect, whatever its errors are.

    Defects are outputs that are constant or not finite, ranges that clip their values, scales that
    were never calibrated, evaluated samples that were used for calibration, and more.

    Args:
        comparison: From `edgeq.compare`.
        allow: Kinds of findings to ignore, such as `"clipped_output"`.

    Raises:
        AssertionError: Lists the findings, the most harmful first; or an entry of `allow` matches
            none.
        TypeError: Not a comparison, or `allow` is no sequence.
    """
    if not isinstance(comparison, Comparison):
        raise TypeError(
            f"expected the result of edgeq.compare(model, inputs), got {type(comparison).__name__}"
        )
    if isinstance(allow, str):
        raise TypeError(f"allow: expected a sequence, got {allow!r}; write ({allow!r},)")
    kinds = sorted({each.kind for each in comparison.health})
    for kind in allow:
        if kind not in kinds:
            raise UnmatchedError(
                f"allow={kind!r} matches no finding{nearest(kind, kinds)}; take it out, or it will "
                "hide the next one"
            )
    wrong = [each for each in ordered(comparison.health) if each.kind not in allow]
    if not wrong:
        return
    reported: set[str] = set()
    shown = []
    for each in wrong:
        causes = tuple(cause for cause in each.causes if cause not in reported)
        fix = "" if each.fix in reported else each.fix
        shown.append(replace(each, headline=f"{each.kind}: {each.title}", causes=causes, fix=fix))
        reported |= {*each.causes, each.fix}
    first, *others = shown
    title, *lines = first.lines
    if others:
        title += f" [1 of {len(wrong)} findings on {comparison.name}]"
    lines = [title, *lines, *(line for each in others for line in ("", *each.lines))]
    raise failure(wrong, "\n".join([*lines, f"update: allow={tuple(kinds)!r}"]))
