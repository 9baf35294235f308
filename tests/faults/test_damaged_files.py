"""
Damaged files of each kind, in the slow lane; `python -m tests.faults.files` tries others.

Of models, which come from outside, there are 2,000, some 13 damages of each of 150 sound files, and
10,000 with `-m full`. Of baselines, cache entries and records, which are our own, there is what one
core does in about ten seconds; the command tries 10,000 of each in minutes. Every case starts from
the next sound file in turn.
"""

from __future__ import annotations

import pytest

from tests.faults.files import describe
from tests.faults.pool import try_cases

# 10,000 damaged files take 60 s of CPU time.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEED = 18
MODELS = {"ran", "refused", "refused by the runtime"}


@pytest.mark.parametrize(
    ("kind", "count", "outcomes"),
    [
        ("tflite", 2_000, MODELS),
        pytest.param("tflite", 10_000, MODELS, marks=pytest.mark.full),
        ("baseline", 600, {"passed", "refused", "told as a change"}),
        ("cache", 500, {"missed", "read"}),
        ("report", 120, {"refused", "shown"}),
    ],
)
def test_each_ends_in_a_result_or_a_sentence(kind: str, count: int, outcomes: set[str]) -> None:
    """
    No process dies, hangs or outgrows its bound, and no error is Python's own.

    Kernels that crash do so in the child process, and the text names the signal and the op.
    """
    print(f"python -m tests.faults.files --kind {kind} --seed {SEED} --count {count}")
    report = try_cases(kind, SEED, range(count))
    assert not report.failures, "\n".join(describe(kind, SEED, each) for each in report.failures)
    # Were all refused, or none, the damage would try nothing.
    assert outcomes <= set(report.outcomes)
