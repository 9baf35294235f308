"""The room imports numpy, scipy and itself, nothing else."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import pytest_edgeq.numerics

FILES = sorted(Path(pytest_edgeq.numerics.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_imports_stay_in_the_room(path: Path) -> None:
    """Neither pytest nor torch nor another room is imported, anywhere in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level <= 1
            names = [] if node.level else [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            top = name.split(".")[0]
            assert top in ("numpy", "scipy") or top in sys.stdlib_module_names, name
