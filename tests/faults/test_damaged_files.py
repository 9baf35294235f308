"""
A share of the damaged files that `python -m tests.faults.files` tries, in the slow lane.

The whole is 10,000 cases of each kind and takes minutes. The share is what one core does in about
ten seconds of each kind, with a seed of its own, so that the command with another seed tries
others. Every case starts from the next sound file in turn: of models the share is more than ten
damages of each of some 150.
"""

from __future__ import annotations

import pytest

from tests.faults.files import describe
from tests.faults.pool import try_cases

pytestmark = pytest.mark.slow

SEED = 18


@pytest.mark.parametrize(
    ("kind", "count", "outcomes"),
    [
        ("tflite", 2000, {"ran", "refused", "refused by the runtime"}),
        ("baseline", 600, {"passed", "refused", "told as a change"}),
        ("cache", 500, {"missed", "read"}),
        ("report", 120, {"refused", "shown"}),
    ],
)
def test_each_ends_in_a_result_or_a_sentence(kind: str, count: int, outcomes: set[str]) -> None:
    """No process dies, hangs or outgrows its bound, and no error is Python's own."""
    print(f"python -m tests.faults.files --kind {kind} --seed {SEED} --count {count}")
    report = try_cases(kind, SEED, range(count), workers=1)
    assert not report.failures, "\n".join(describe(kind, SEED, each) for each in report.failures)
    # Were all refused, or none, the damage would try nothing.
    assert outcomes <= set(report.outcomes)
