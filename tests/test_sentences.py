"""No code reads a sentence of its own: what it needs to know is a field of a record."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest_edgeq

PACKAGE = Path(pytest_edgeq.__file__).parent

SENTENCES = frozenset(
    {
        *("cause", "causes", "change", "evidence", "finding", "findings", "fix", "headline"),
        *("lines", "message", "reason", "refusal", "sentence", "summary", "symptom", "text"),
        *("texts", "title", "told", "why"),
    }
)
"""Names of variables and fields that hold what is said of a finding."""

SEARCHES = frozenset(
    {"startswith", "endswith", "find", "index", "count", "removeprefix", "split", "partition"}
)
SEARCHES_OF_RE = frozenset({"match", "search", "fullmatch", "findall", "finditer"})

PLACES = (
    *("baselines", "check", "compare", "edgeq.py", "errors.py", "localize", "numerics"),
    *("report", "runtimes", "tflite"),
)
"""Where findings are made, ordered and shown; elsewhere texts are those of other programs."""

OTHER_PROGRAMS = ("compare/executors/", "runtimes/workers/")
"""Texts in these are of other processes."""

LAYOUT = {
    ("report/markdown.py", "_fenced"),  # backticks
    ("runtimes/refusals.py", "*"),  # kernels' texts
}
"""Functions that look at the layout of any text."""


def _word(node: ast.expr) -> str:
    """Return the last name of an expression: `message` of `each.message`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript):
        return _word(node.value)
    return node.id if isinstance(node, ast.Name) else ""


def reads(code: str) -> Iterator[tuple[str, int]]:
    """Yield the function and the line of each place where a sentence is searched."""
    for function in ast.walk(ast.parse(code)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            searched: ast.expr | None = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr in SEARCHES:
                    searched = node.func.value
                elif node.func.attr in SEARCHES_OF_RE and node.args:
                    searched = node.args[-1]
            elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
                # A sentence in a text: what is looked for is a text, too.
                is_text = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
                searched = node.comparators[0] if is_text or _word(node.left).isupper() else None
            if searched is not None and _word(searched) in SENTENCES:
                yield function.name, searched.lineno


def test_no_code_searches_a_sentence() -> None:
    """Order, merging and what is left out are decided on kinds, places and harms."""
    paths = [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if _place(path).split("/")[0] in PLACES and not _place(path).startswith(OTHER_PROGRAMS)
    ]
    found = [
        f"{_place(path)}:{line}: {function} searches a sentence"
        for path in paths
        for function, line in reads(path.read_text("utf-8"))
        if not LAYOUT & {(_place(path), function), (_place(path), "*")}
    ]
    assert not found, "\n".join(found)


def _place(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_searches_are_found() -> None:
    """Each way in which the package once read its own texts, and near misses."""
    code = """
def guilty(text, cause, layers, change):
    a = text.startswith("errors regressed")
    b = SPREAD in cause
    c = any(each in layers.cause for each in WAYS_OUT)
    d = change.message.endswith(REGRESSED)
    e = re.search("dB", layers.text)
    f = "ranges" in text
    g = FIELD.finditer(text)
    h = text.split()[0] == "op"

def innocent(finding, name, kinds):
    return finding.kind in kinds, name.startswith("a"), finding.kind == "x", "a" in name
"""
    lines = [line for function, line in reads(code) if function == "guilty"]
    assert sorted(lines) == [3, 4, 6, 7, 8, 9, 10]
    assert not [line for function, line in reads(code) if function == "innocent"]


def bare_failures(code: str) -> list[int]:
    """Return the lines that make an AssertionError of a text alone."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call) and _word(node.func) == "AssertionError"
        if not (isinstance(node.args[0], ast.Constant) and "unreachable" in str(node.args[0].value))
    ]


def test_every_failure_carries_its_findings() -> None:
    """It is made by `errors.failure`, or is an `UnmatchedError`."""
    found = {
        _place(path): lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if (lines := bare_failures(path.read_text("utf-8")))
    }
    assert list(found) == ["errors.py"]


def test_failures_without_findings_are_found() -> None:
    """Raised at once or later; what cannot happen is none."""
    code = """
raise AssertionError("a" + b)
error = AssertionError(text)
raise AssertionError("unreachable, because it is none")
raise failure([found])
"""
    assert bare_failures(code) == [2, 3]
