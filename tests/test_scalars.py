"""Scalars keep their shape on the way into files and kernels."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest_edgeq

ROOT = Path(pytest_edgeq.__file__).parent


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
