"""One class has one name, and docstrings begin with plain technical words."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import pytest_edgeq

PACKAGE = Path(pytest_edgeq.__file__).parent
TREES = {path: ast.parse(path.read_text("utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}

DENIED = re.compile(
    r"\b(gives?|gave|given|takes?|took|taken|tells?|told|lets?|stands?|stood|goes|comes? to"
    r"|held (against|to)|holds? .*against|apart|beside|mend(s|ed)?|travels?|speaks?|is made of"
    r"|what (it|is|was|are)|(far|near) side|borders?|parcels?|shelf|stations?|lanes?)\b",
    re.IGNORECASE,
)
"""Words that stand for everything: "return", "accept", "report", "compare" say which it is."""

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def denied(tree: ast.Module) -> Iterator[str]:
    """Yield the first lines of docstrings that have a denied word."""
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED):
            line = (ast.get_docstring(node) or "").partition("\n")[0]
            if DENIED.search(line):
                yield line


def test_a_class_name_is_defined_once() -> None:
    """In all modules, whether or not it has a leading underscore."""
    modules = defaultdict(set)
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                modules[node.name.lstrip("_")].add(path.relative_to(PACKAGE).as_posix())
    assert {name: found for name, found in modules.items() if len(found) > 1} == {}


def test_first_lines_of_docstrings_are_plain() -> None:
    """In every module, class, method and function."""
    assert {path.name: lines for path, tree in TREES.items() if (lines := [*denied(tree)])} == {}


@pytest.mark.parametrize(
    "line", ["Give what it takes.", "The file held against torch.", "A Shelf."]
)
def test_a_denied_word_is_found(line: str) -> None:
    """In the docstring of a method as well."""
    code = f'class Sound:\n    """A sound one."""\n    def run(self):\n        """{line}"""\n'
    assert [*denied(ast.parse(code))] == [line]
