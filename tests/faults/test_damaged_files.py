"""Damaged models, in the slow lane; `python -m tests.faults.files` tries others."""

from __future__ import annotations

import pytest

from tests.faults.files import describe
from tests.faults.pool import try_cases

# 10,000 damaged files take 60 s of CPU time.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEED = 18


@pytest.mark.parametrize("count", [2_000, pytest.param(10_000, marks=pytest.mark.full)])
def test_each_ends_in_a_result_or_a_sentence(count: int) -> None:
    """
    No process dies, hangs or outgrows its bound, and no error is Python's own.

    Kernels that crash do so in the child process, and the text names the signal and the op. There
    are some 13 damages of each of 150 sound files.
    """
    print(f"python -m tests.faults.files --seed {SEED} --count {count}")
    report = try_cases(SEED, range(count))
    assert not report.failures, "\n".join(describe(SEED, each) for each in report.failures)
    # Were all refused, or none, the damage would try nothing.
    assert {"ran", "refused", "refused by the runtime"} <= set(report.outcomes)
