"""Errors of language models: formulas, positions, agreement, and what shows a broken cache."""

from __future__ import annotations

import math
import pickle
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from fixtures.token_logits import (
    LENGTH,
    VOCAB,
    Sequences,
    accumulated,
    broken,
    logits,
    noisy,
    sequences,
)
from pytest_edgeq.numerics import token_errors
from pytest_edgeq.numerics.budget import Budget, loosened
from pytest_edgeq.numerics.results import OutputErrors, wiped
from pytest_edgeq.numerics.token_errors import LOGITS, WORST, TokenAccumulator, TokenErrors


def errors_of(make: Any = noisy, **how: Any) -> OutputErrors:
    """Return the errors of the logits of eight sequences."""
    return accumulated(sequences(make, **how)).stage().outputs[LOGITS]


def oracle(pairs: Sequences) -> dict[str, float]:
    """Return the metrics by their definitions, in float64, without blocks or shifts."""
    f, q = (np.concatenate([pair[side] for pair in pairs]).astype(np.float64) for side in (0, 1))
    tokens = np.concatenate([pair[2] for pair in pairs])
    p, r = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (f, q))
    at = np.flatnonzero(tokens >= 0)
    nll, nll_reference = (-np.log(x[at, tokens[at]]).mean() for x in (r, p))
    return {
        "max_abs_error": np.abs(f - q).max(),
        "mean_abs_error": np.abs(f - q).mean(),
        "rmse": math.sqrt(((f - q) ** 2).mean()),
        "sqnr_db": 10 * math.log10((f**2).sum() / ((f - q) ** 2).sum()),
        "cosine_similarity": (f * q).sum() / math.sqrt((f**2).sum() * (q**2).sum()),
        "kl": (p * np.log(p / r)).sum(1).mean(),
        "perplexity_ratio": math.exp(nll - nll_reference),
    }


def test_the_formulas() -> None:
    """Every metric is what its definition gives, and the whole is pooled over all positions."""
    pairs = sequences()
    errors = accumulated(pairs).stage().outputs[LOGITS]
    for name, expected in oracle(pairs).items():
        assert getattr(errors, name) == pytest.approx(expected, rel=1e-9), name
    assert (errors.n_samples, errors.n_elements) == (8, 8 * LENGTH * VOCAB)
    assert errors.max_lsb_error is None


def test_each_position_pools_the_sequences_that_reach_it() -> None:
    """Only the longest sequences have the last positions."""
    lengths = [20, 12, 16]
    made = [logits(seed, length) for seed, length in enumerate(lengths)]
    pairs = [(f, noisy(f, seed), tokens) for seed, (f, tokens) in enumerate(made)]
    found = accumulated(pairs, start=4).positions()
    assert found.first == 4
    assert found.n.tolist() == [3] * 12 + [2] * 4 + [1] * 4
    for position in (0, 13, 19):
        row = [
            (f[[position]], q[[position]], t[[position]]) for f, q, t in pairs if len(f) > position
        ]
        expected = oracle([(f, q, np.zeros_like(t)) for f, q, t in row])
        assert found.sqnr_db[position] == pytest.approx(expected["sqnr_db"], rel=1e-9)
        assert found.kl[position] == pytest.approx(expected["kl"], rel=1e-9)
    quarters = [name for name in found.outputs if "quarter" in name]
    assert [found.outputs[name].n_elements // VOCAB for name in quarters] == [15, 15, 12, 6]
    assert [found.outputs[name].n_samples for name in quarters] == [3, 3, 3, 2]
    position, decibels = found.worst
    assert decibels == found.sqnr_db.min() == pytest.approx(found.outputs[WORST].sqnr_db)
    assert found.sqnr_db[position - 4] == decibels


def test_blocks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are measured one by one as in one go."""
    reference, tokens = logits(0)
    actual = noisy(reference, 0)
    whole = TokenErrors.measure(0, reference, actual, tokens)
    monkeypatch.setattr(token_errors, "_BLOCK", 3 * VOCAB)
    parts = TokenErrors.measure(0, reference, actual, tokens)
    for name in whole.rows.dtype.names or ():
        np.testing.assert_allclose(parts.rows[name], whole.rows[name], rtol=1e-12, err_msg=name)


def test_merges_in_any_order() -> None:
    """The figures do not depend on which worker measured a sequence."""
    measured = [TokenErrors.measure(i, *pair) for i, pair in enumerate(sequences(n=4))]
    found = set()
    for order in permutations(measured):
        one, other = TokenAccumulator(), TokenAccumulator()
        for at, each in enumerate(order):
            (one if at % 2 else other).add(LOGITS, each)
        one.merge(pickle.loads(pickle.dumps(other)))
        found.add(repr((one.stage().to_dict(), one.positions().to_dict())))
    assert len(found) == 1


def test_a_sound_file_is_not_failed_by_near_ties() -> None:
    """Rows whose first two logits are nearer than twice the error do not count."""
    errors = errors_of(size=0.5)
    pairs = sequences(size=0.5)
    plain = np.mean([(f.argmax(1) == q.argmax(1)).mean() for f, q, _ in pairs])
    assert plain < 0.95
    assert errors.top1_agreement is not None
    assert errors.top1_agreement > 0.99
    counted = sum(each.rows for each in errors.samples)
    assert 0.7 * 8 * LENGTH < counted < 8 * LENGTH


@pytest.mark.parametrize(("start", "most"), [(0, 0.1), (10, 0.2), (40, 0.6), (60, 0.8)])
def test_a_broken_file_does_not_agree(start: int, most: float) -> None:
    """Neither one that is broken everywhere nor one whose cache breaks on the way is excused."""
    agreement = errors_of(broken, start=start).top1_agreement
    assert agreement is not None
    assert agreement < most


def test_where_a_broken_cache_begins() -> None:
    """A failed budget says at which position the SQNR falls."""
    found = accumulated(sequences(broken, start=40))
    positions, stage = found.positions(), found.stage()
    assert positions.first_below(20) == 40
    assert positions.first_below(-40) is None
    sound = accumulated(sequences()).positions()
    assert sound.first_below(30) is None
    violations = Budget(sqnr_db=30, kl=0.01).violations(stage, "total", positions)
    first = "(the SQNR falls below 30 dB at position 40 of 80)"
    assert [each.title.endswith(first) for each in violations] == [True, False]


def test_a_budget_that_only_the_divergence_exceeds() -> None:
    """Without a position below the SQNR bound the worst one is named."""
    found = accumulated(sequences())
    (violation,) = Budget(kl=1e-9).violations(found.stage(), "total", found.positions())
    position, decibels = found.positions().worst
    assert violation.title.endswith(
        f"(the worst SQNR is {decibels:.3g} dB, at position {position} of 80)"
    )
    (alone,) = Budget(kl=1e-9).violations(found.stage(), "total")
    assert alone.title.startswith("total, output 'logits': kl: expected at most 1e-09, got ")
    assert "position" not in alone.title


def test_the_budget_that_a_measurement_needs() -> None:
    """A ratio is rounded outward in its distance from 1, and never below 1."""
    for how in ({}, {"size": 1.0}):
        errors = errors_of(**how)
        needed = Budget(kl=9, perplexity_ratio=9).needed(errors)
        assert needed is not None
        assert needed.violations(errors, "total") == []
    assert loosened("perplexity_ratio", 0.97) == 1
    assert loosened("perplexity_ratio", 1.0012341) == 1.00124
    assert loosened("perplexity_ratio", math.inf) is None
    assert loosened("kl", 0.00123456) == 0.00124


def test_logits_of_zeros() -> None:
    """The metrics that a file of zeros would have, by which bounds that cannot fail are found."""
    zeros = errors_of(lambda reference, seed: np.zeros_like(reference))
    expected = wiped(errors_of())
    for name in ("kl", "perplexity_ratio", "sqnr_db", "rmse", "max_abs_error"):
        assert getattr(zeros, name) == pytest.approx(expected[name]), name


def test_equal_logits() -> None:
    """A file that gives the reference's logits has no error at all."""
    found = accumulated(sequences(lambda reference, seed: reference.copy()))
    errors = found.stage().outputs[LOGITS]
    assert (errors.kl, errors.perplexity_ratio, errors.top1_agreement) == (0, 1, 1)
    assert found.positions().first_below(200) is None
    assert errors.sqnr_db == math.inf
    assert found.positions().summary == "no error at any position"


def test_values_that_are_not_finite() -> None:
    """One NaN spoils the metrics of its sequence, quarter and position, and no other quarter."""
    pairs = sequences()
    pairs[3][1][50, 7] = math.nan
    accumulator = TokenAccumulator()
    sums = [accumulator.add(LOGITS, TokenErrors.measure(i, *p)) for i, p in enumerate(pairs)]
    assert [i for i, each in enumerate(sums) if math.isnan(each)] == [3]
    errors, positions = accumulator.stage().outputs[LOGITS], accumulator.positions()
    assert (errors.nonfinite_reference, errors.nonfinite_actual) == (0, 1)
    assert errors.max_abs_index is not None
    assert (errors.max_abs_index.sample, errors.max_abs_index.index) == (3, (50, 7))
    for name in ("sqnr_db", "kl", "perplexity_ratio", "top1_agreement"):
        assert math.isnan(getattr(errors, name)), name
    assert positions.worst[0] == 50
    assert positions.first_below(10) == 50
    broken_quarters = [name for name, each in positions.outputs.items() if each.nonfinite]
    assert broken_quarters == [f"{LOGITS}, quarter 3", WORST]
    (violation,) = Budget(kl=1).violations(errors, "total", positions)
    assert violation.title.startswith(
        "total, output 'logits': nonfinite: expected at most 0, got 1"
    )


def test_a_sequence_of_one_token() -> None:
    """It has one quarter, and no token that it could predict."""
    reference, _ = logits(0, 1)
    found = accumulated([(reference, noisy(reference, 0), np.array([-1]))])
    assert list(found.positions().outputs) == [f"{LOGITS}, quarter 4", WORST]
    assert found.stage().outputs[LOGITS].perplexity_ratio is None


def test_logits_far_from_zero() -> None:
    """Neither greatness of the logits nor a common shift of them overflows or costs digits."""
    values, tokens = logits(0)
    reference, actual = (each.astype(np.float64) for each in (values, noisy(values, 0)))
    near = TokenErrors.measure(0, reference, actual, tokens)
    far = TokenErrors.measure(0, reference + 5000.0, actual + 4000.0, tokens)
    for name in ("kl", "kl_of_zeros", "nll", "nll_reference"):
        np.testing.assert_allclose(far.rows[name], near.rows[name], rtol=1e-6, atol=1e-11)


def test_logits_of_another_vocabulary_or_of_no_sequence() -> None:
    """The text names the sequence."""
    with pytest.raises(ValueError, match="no sequence was measured"):
        TokenAccumulator().stage()
    text = r"^sequence 7: expected logits .* got \[4, 5\] of the reference and \[4, 6\] of the file"
    with pytest.raises(ValueError, match=text):
        TokenErrors.measure(7, np.zeros((4, 5)), np.zeros((4, 6)), np.array([1, 2, 3, -1]))


def test_the_table_of_positions() -> None:
    """A row for each quarter, and the worst position."""
    head, *rows = str(accumulated(sequences(broken, start=60)).positions()).splitlines()
    assert head.split()[:5] == ["output", "positions", "sequences", "sqnr_db", "kl"]
    assert [" ".join(row.split()[:6]) for row in rows[:4]] == [
        f"logits, quarter {part + 1} {20 * part} to {20 * part + 19}" for part in range(4)
    ]
    assert rows[4].startswith("logits, worst position")
