"""Which room imports what: the libraries of the converter stand in one, pytest in two."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import pytest_edgeq

ROOT = Path(pytest_edgeq.__file__).parent
CONVERTER = {"litert_torch", "ai_edge_torch", "torchao", "ai_edge_quantizer", "litert_quantizer"}

ISOLATING = {"isolate", "edgeq.py", "options", "plugin", "assertions", "cli"}
"""What hands an isolation to those that run files, which know none of it."""
ENGINES = {"cloudpickle", "distributed", "loky", "pebble"}
"""What carries samples to other processes."""

CHARTS = {"bokeh", "jinja2", "PIL"}
"""Of the extra `report`, which need not be installed."""


def _imports(path: Path) -> set[str]:
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    names = set()
    for node in tree:
        if isinstance(node, ast.ImportFrom) and not node.level:
            names.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
    return names


def _imports_package(path: Path, package: str) -> bool:
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    names = {
        name
        for node in tree
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    }
    return any(f"{name}.".startswith(f"pytest_edgeq.{package}.") for name in names)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_room_imports_only_what_it_may(path: Path) -> None:
    """A release of the converter's libraries is answered in `litert/` alone."""
    where, names = path.relative_to(ROOT), _imports(path)
    if where.parts[0] != "litert":
        assert not names & CONVERTER
    if where.parts[0] not in ("plugin", "options"):
        assert "pytest" not in names
    if where.parts[0] in ("numerics", "tflite", "snapshots", "report", "isolate"):
        assert "torch" not in names
    if where.parts[0] not in ISOLATING:
        assert not _imports_package(path, "isolate")
    if where.parts[:2] != ("report", "html"):
        assert not names & CHARTS
    if where.parts[0] not in ("executors", "isolate"):
        assert not names & ENGINES
    if where.parts[0] not in ("cli", "__main__.py"):
        assert "click" not in names
        assert not _imports_package(path, "cli")


def test_scalars_keep_their_shape() -> None:
    """`np.ascontiguousarray` returns shape (1,) for a scalar: `arrays.contiguous` does not."""
    banned = {"ascontiguousarray", "asfortranarray", "atleast_1d"}
    users = {
        path.name
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in banned
    }

    assert not users
