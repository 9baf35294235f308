"""A run for a pull request: as a page of Markdown, and as annotations of GitHub Actions."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_edgeq.numerics.findings import Finding, counted, text_of
from pytest_edgeq.report.model_rows import HEADINGS, LEFT_ALIGNED, ModelRow, cells, model_rows
from pytest_edgeq.report.run import Run, findings_in

LIMIT = 65_000  # characters of a page: GitHub refuses a comment of more than 65,536

_VERDICT = HEADINGS.index("verdict")

_OTHERS = 4  # findings behind the first of a failure whose titles are shown without unfolding it
_SPARE = 500  # characters kept for the lines that say what was left out


def markdown_page(run: Run) -> str:
    """
    Return the page, of at most `LIMIT` characters.

    What does not fit is left out from the end, and counted: baselines that were stored, then
    failures. The table stays, with as many models as fit.
    """
    rows = model_rows(run)
    failed = [test for test in run.tests if test["failure"] is not None]
    head = f"## pytest-edgeq: {_verdict(run, rows, len(failed))}\n"
    parts = [head]
    left = LIMIT - _SPARE - len(head)
    if rows:
        table, count = _table(rows, left // 2)
        left -= len(table)
        parts.append(table)
        if count < len(rows):
            parts.append(f"\n… and {len(rows) - count} more models\n")
    sections = [
        ("more failed tests: see the log", [_failure(test) for test in failed]),
        ("more baselines", list(_baselines(run))),
    ]
    for name, texts in sections:
        for index, text in enumerate(texts):
            if len(text) > left:
                parts.append(f"\n… and {len(texts) - index} {name}\n")
                left = 0
                break
            parts.append(text)
            left -= len(text)
    return "".join(parts)


def _verdict(run: Run, rows: Sequence[ModelRow], failed_tests: int) -> str:
    failed = sum(row.verdict == "failed" for row in rows)
    tests, models = counted(len(run.tests), "test"), counted(len(rows), "model")
    if not failed_tests:
        return f"{models} passed, in {tests}" if rows else "no model was tested"
    if not failed:
        return f"{failed_tests} of {tests} failed without a model"
    return f"{failed} of {models} failed, in {failed_tests} of {tests}"


def _table(rows: Sequence[ModelRow], room: int) -> tuple[str, int]:
    """Return the table with as many rows as there is room for, and their number."""
    aligned = ["---" if i in LEFT_ALIGNED else "--:" for i in range(len(HEADINGS))]
    lines = ["", _line(HEADINGS), _line(aligned)]
    room -= sum(map(len, lines))
    count = 0
    for row in rows:
        texts = [_cell(text) for text in cells(row)]
        if row.verdict == "failed":
            texts[_VERDICT] = f"❌ {texts[_VERDICT]}"
        line = _line(texts)
        room -= len(line) + 1
        if room < 0:
            break
        lines.append(line)
        count += 1
    note = (
        "\n<sub>`share` is the size divided by the float model's; `quant.`, `lower.` the SQNR of "
        "the stages quantization and lowering in dB; `s` seconds; `cached` what came from the "
        "conversion cache.</sub>\n"
    )
    return "\n".join(lines) + "\n" + note, count


def _line(texts: Any) -> str:
    return f"| {' | '.join(texts)} |"


def _cell(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>|#~])", r"\\\1", text)


def _failure(test: Mapping[str, Any]) -> str:
    message = test["failure"]["message"]
    title, *lines = message.splitlines() or [""]
    # Of an error of another kind its first lines are shown, but for tables.
    lines = [line for line in lines if line.strip() and line == line.lstrip()][:_OTHERS]
    if found := findings_in(test["failure"]):
        first, *others = found
        title = f"{first.title} [1 of {len(found)} findings]" if others else first.title
        lines = [*first.reasons, *first.acceptance, *(each.title for each in others[:_OTHERS])]
        lines += [f"… and {len(others) - _OTHERS} more"] if len(others) > _OTHERS else []
    shown = "\n".join([_cell(title), "", *(f"- {_cell(line)}" for line in lines)])
    return (
        f"\n### ❌ {_cell(test['test'])}\n\n{shown}\n\n<details><summary>the whole text"
        f"</summary>\n\n{_fenced(message)}\n</details>\n"
    )


def _fenced(text: str, language: str = "text") -> str:
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}\n"


def _baselines(run: Run) -> Iterator[str]:
    """Return a paragraph a baseline that was written, changed or is obsolete."""
    for test in run.tests:
        for claim in test["claims"]:
            if claim["written"]:
                yield f"\n- stored: `{claim['path']}`: {_cell(claim['stored'])}"
                if claim["change"]:
                    yield f"\n\n{_fenced(text_of([Finding.from_dict(claim['change'])]))}"
    for path in run.data["baselines"]["obsolete"]:
        yield f"\n- obsolete: `{path}` (delete it with `pytest --edgeq-update=prune`)"


_LIMIT = 4_000  # characters of a message: GitHub shows a few lines, and the log has the whole


def annotation_lines(run: Run, rootdir: Path, workspace: Path | None) -> list[str]:
    """Return one workflow command of GitHub Actions a failed test."""
    lines = []
    for test in run.tests:
        if (failure := test["failure"]) is None:
            continue
        options = {"title": test["test"]}
        if failure["path"] is not None:
            path = Path(os.path.relpath(rootdir / failure["path"], workspace or Path.cwd()))
            options = {"file": path.as_posix(), "line": str(failure["line"]), **options}
        properties = ",".join(f"{name}={_option(value)}" for name, value in options.items())
        lines.append(f"::error {properties}::{_message(_text(failure))}")
    return lines


def _text(failure: Mapping[str, Any]) -> str:
    """Return titles, causes and advice of the findings; their tables are in the log."""
    if not failure.get("records"):
        return str(failure["message"])
    return "\n".join(
        line
        for each in findings_in(failure)
        for line in (each.title, *each.reasons, *each.acceptance)
    )


def _message(text: str) -> str:
    if len(text) > _LIMIT:
        text = text[:_LIMIT].rpartition("\n")[0] + "\n…"
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _option(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
