"""The public names."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pytest_edgeq


def test_all_is_sorted() -> None:
    """And holds no name twice."""
    assert pytest_edgeq.__all__ == sorted(set(pytest_edgeq.__all__))


@pytest.mark.parametrize("name", pytest_edgeq.__all__)
def test_every_name_can_be_imported(name: str) -> None:
    """Each is fetched from where it lives, and is documented."""
    value = getattr(pytest_edgeq, name)
    assert value.__name__ == name
    assert value.__doc__
    assert name in dir(pytest_edgeq)


def test_other_names_are_told() -> None:
    """As any module does."""
    with pytest.raises(AttributeError, match="has no attribute 'assert_everything'"):
        getattr(pytest_edgeq, "assert_everything")  # noqa: B009 # mypy knows that there is none


def test_the_import_is_cheap() -> None:
    """Neither torch nor a converter nor numpy comes with it."""
    code = """
import sys, pytest_edgeq, pytest_edgeq.names
heavy = {"torch", "numpy", "litert_torch", "ai_edge_litert", "ai_edge_quantizer", "tensorflow"}
print(sorted(heavy & set(sys.modules)))
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    assert run.stdout.strip() == "[]"
