"""The marker `sweep` leaves the same cases to each lane, whatever shuffles them."""

from __future__ import annotations

import pytest

FILE = """
import pytest

@pytest.mark.sweep(2, slow=6)
@pytest.mark.parametrize("one", "abc")
@pytest.mark.parametrize("two", range(6))
def test_it(one, two):
    pass
"""


def test_a_sweep_leaves_the_same_cases_in_any_order(pytester: pytest.Pytester) -> None:
    """As many as it says, spread over all of them; the others are slow, most of them `full`."""
    pytester.makeconftest("from tests.conftest import pytest_collection_modifyitems")
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    full\n    sweep(n)")
    pytester.makepyfile(test_sweep=FILE)

    def chosen(*arguments: str) -> set[str]:
        lines = pytester.runpytest("--co", "-q", *arguments).outlines
        return {line.partition("::")[2] for line in lines if "::test_it[" in line}

    always = {"test_it[0-a]", "test_it[3-a]"}
    for order in ("-pno:randomly", "--randomly-seed=1", "--randomly-seed=2"):
        assert chosen("-m", "not slow", order) == always
        assert len(chosen("-m", "slow", order)) == 16
        in_pipeline = chosen("-m", "slow and not full", order)
        assert in_pipeline == {"test_it[1-a]", "test_it[2-a]", "test_it[4-a]", "test_it[5-a]"}
    assert chosen("-m", "not slow", "test_sweep.py::test_it[5-c]") == {"test_it[5-c]"}
