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

_VAGUE = (
    r"gives|gave|takes|took|taken|tells|told|lets|stood|goes|comes? to|held (against|to)"
    r"|holds? .*against|apart|beside|mend(s|ed)?|travels?|speaks?|is made of|(far|near) side"
    r"|borders?|parcels?|shelf|stations?|lanes?"
)
DENIED = re.compile(
    rf"\b({_VAGUE}|give|given|take|tell|let|stands?|what (it|is|was|are))\b", re.IGNORECASE
)
"""Words that stand for everything: "return", "accept", "report", "compare" say which it is."""

DENIED_IN_TEXTS = re.compile(rf"\b({_VAGUE})\b", re.IGNORECASE)
"""The same in texts for users, which may ask them to give or take something."""

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def denied(tree: ast.Module) -> Iterator[str]:
    """Yield the first lines of docstrings that have a denied word."""
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED):
            line = (ast.get_docstring(node) or "").partition("\n")[0]
            if DENIED.search(line):
                yield line


def denied_in_texts(tree: ast.Module) -> Iterator[str]:
    """Yield strings of four words or more, but docstrings, that have a denied word."""
    nodes = list(ast.walk(tree))
    left_out = {id(each.value) for each in nodes if isinstance(each, ast.Expr)}
    left_out |= {
        id(part) for each in nodes if isinstance(each, ast.JoinedStr) for part in each.values
    }
    for node in nodes:
        if not isinstance(node, (ast.Constant, ast.JoinedStr)) or id(node) in left_out:
            continue
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        text = "".join(str(each.value) for each in parts if isinstance(each, ast.Constant))
        if text.count(" ") > 2 and DENIED_IN_TEXTS.search(text):
            yield text


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


def test_texts_are_plain() -> None:
    """Every string that is not a docstring."""
    found = {
        path.name: texts for path, tree in TREES.items() if (texts := [*denied_in_texts(tree)])
    }
    assert found == {}


def test_a_denied_word_in_a_text_is_found() -> None:
    """Also between the values of an f-string; not in a docstring or a word alone."""
    code = 'def sound(x):\n    """It takes what it gives to x."""\n    return "gives"\n'
    assert [*denied_in_texts(ast.parse(code))] == []
    code += 'raise ValueError(f"expected {x} where the model gives {x}")\n'
    assert [*denied_in_texts(ast.parse(code))] == ["expected  where the model gives "]


@pytest.mark.parametrize(
    "line", ["Give what it takes.", "The file held against torch.", "A Shelf."]
)
def test_a_denied_word_is_found(line: str) -> None:
    """In the docstring of a method as well."""
    code = f'class Sound:\n    """A sound one."""\n    def run(self):\n        """{line}"""\n'
    assert [*denied(ast.parse(code))] == [line]


def _modules_left_out(package: Path) -> list[str]:
    """Return the modules and packages of a package that its docstring does not name."""
    documented = ast.get_docstring(ast.parse((package / "__init__.py").read_text("utf-8"))) or ""
    modules = {each.stem for each in package.glob("*.py")} - {"__init__"}
    packages = {each.parent.name for each in package.glob("*/__init__.py")}
    return sorted(each for each in modules | packages if f"`{each}`" not in documented)


PACKAGES = [path.parent for path in TREES if path.name == "__init__.py"]


@pytest.mark.parametrize(
    "package", [each for each in PACKAGES if each not in (PACKAGE, PACKAGE / "cli" / "commands")]
)
def test_a_package_names_its_modules(package: Path) -> None:
    """Each command has a module of its name."""
    assert _modules_left_out(package) == []


def test_a_module_that_is_left_out_is_found(tmp_path: Path) -> None:
    """A package inside, too."""
    (tmp_path / "inner").mkdir()
    for name in ("known", "unknown", "inner/__init__"):
        (tmp_path / f"{name}.py").touch()
    (tmp_path / "__init__.py").write_text('"""`known` is all."""')
    assert _modules_left_out(tmp_path) == ["inner", "unknown"]
