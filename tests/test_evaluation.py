"""Limits that could not fail: refused or told, with the number of samples that would do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fixtures import digits
from pytest_edgeq import Comparison, Edgeq, QuantizedModel
from pytest_edgeq.baselines.claims import Owner
from pytest_edgeq.baselines.paths import Layout
from pytest_edgeq.baselines.session import SnapshotSession
from pytest_edgeq.check.remember import (
    Evaluation,
    accepted,
    errors_to_remember,
    limits_of,
    samples_needed,
)
from pytest_edgeq.numerics.error_sums import IOSpec, StageAccumulator
from pytest_edgeq.numerics.results import OutputErrors, StageErrors
from pytest_edgeq.numerics.samples import EvaluatedSamples
from tests.bench.detection.flatfile import FlatFile

GOLDEN = Path(__file__).parent / "golden"

Array = np.ndarray[Any, Any]
_EDGEQ = Edgeq(localize_timeout=0)
Remember = Callable[..., dict[str, Any]]


def _comparison(
    pairs: Sequence[tuple[Array, Array]],
    evaluated: EvaluatedSamples | None = None,
    scale: float | None = 0.05,
) -> Comparison:
    accumulator = StageAccumulator([IOSpec("y", scale)])
    for left, right in pairs:
        accumulator.update([left], [right])
    n = len(pairs)
    return Comparison(
        name="net",
        flow="pt2e",
        runtime="xnnpack",
        total=accumulator.result(),
        evaluated=evaluated or EvaluatedSamples(n, n),
        fingerprint=f"{n:064}",
    )


def _uneven(n: int) -> Comparison:
    """An error of a tenth of the signal's power, at every second sample of more than all of it."""
    generator = np.random.default_rng(0)
    pairs = []
    for index in range(n):
        x, error = generator.normal(size=(2, 1, 10))
        share = (0.1, 1.2)[index % 2]
        pairs.append((x, x + error * np.sqrt(share * (x**2).sum() / (error**2).sum())))
    return _comparison(pairs)


@pytest.fixture
def remember(tmp_path: Path) -> Remember:
    """Claim the errors of a comparison in a test of its own, and return its record."""

    def run(comparison: Comparison, *update: str) -> dict[str, Any]:
        owner = Owner(tmp_path / "test_x.py", "test_y")
        memory = SnapshotSession(Layout(tmp_path), update=update)
        with memory.running(owner, "call"):
            Edgeq(memory=memory).check_errors(comparison)
        (claim,) = memory.record(owner)
        return dict(claim)

    return run


@pytest.fixture(scope="module")
def net() -> QuantizedModel:
    """The sound network that was trained on digits."""
    return _EDGEQ.quantize(
        digits.trained(), (torch.zeros(1, 1, 8, 8),), calibration=digits.calibration(64)
    )


@pytest.fixture(scope="module")
def wiped_net(net: QuantizedModel) -> QuantizedModel:
    """The same file, in which the head's weight and bias are zeros."""
    file = FlatFile(net.tflite)
    (head,) = [i for i in range(len(file.operators)) if file.name(i) == "FULLY_CONNECTED"]
    for tensor in file.operators[head].inputs[1:]:
        values = file.constant(int(tensor))
        assert values is not None
        file.store(int(tensor), np.zeros_like(values))
    return net.with_tflite(file.content())


def _held_out(n: int) -> list[torch.Tensor]:
    return list(digits.held_out().samples())[:n]


def _errors(comparison: Comparison) -> OutputErrors:
    (errors,) = comparison.total.outputs.values()
    return errors


@pytest.mark.parametrize("n", [2, 64])
def test_a_sound_model_is_stored_and_given_a_budget(
    net: QuantizedModel, remember: Remember, n: int
) -> None:
    """Of any number of samples; how few they are is told."""
    comparison = _EDGEQ.compare(net, _held_out(n))
    claim = remember(comparison, "new")
    assert claim["written"]
    assert bool(claim["remarks"]) == (n < 5)
    assert ("top1_agreement: zeros or a guess would pass" in claim["stored"]) == (n <= 8)
    budget = _EDGEQ.suggest_budget(comparison)
    assert budget.violations(comparison.total, "total") == []
    assert budget.sqnr_db is not None
    assert (budget.top1_agreement is None) == (n <= 8)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 64])
def test_a_wiped_file_is_neither_stored_nor_given_a_budget(
    wiped_net: QuantizedModel, remember: Remember, n: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """No number of samples would do: the text says so, and nothing is printed to paste."""
    comparison = _EDGEQ.compare(wiped_net, _held_out(n))
    for update in ((), ("new",)):
        with pytest.raises(AssertionError, match="the error is as large as the signal") as caught:
            remember(comparison, *update)
        lines = str(caught.value).splitlines()
        assert lines[0].startswith("errors not stored: total, output 'output_0': ")
        assert [line.split(":")[0] for line in lines[1:]] == ["cause", "fix", "file"]
        assert "edgeq.localize(quantized, samples)" in lines[2]
    with pytest.raises(ValueError, match="no budget for DigitsNet: total, output 'output_0': "):
        _EDGEQ.suggest_budget(comparison)
    assert capsys.readouterr().out == ""


def test_one_black_image_is_told(net: QuantizedModel, remember: Remember) -> None:
    """Of others nothing is known, and the top-1 limit is 0."""
    comparison = _EDGEQ.compare(net, [torch.zeros(1, 1, 8, 8)])
    claim = remember(comparison, "new")
    assert claim["remarks"] == [
        "1 evaluation sample: nothing is known of others; give 5 or more that differ",
        "the evaluation sample is constant, as a black image: every input has one value in all "
        "elements; give samples with content",
    ]
    assert claim["stored"].endswith(
        "; output 'output_0': top1_agreement: zeros or a guess would pass (16 samples would do)"
    )
    assert remember(comparison)["remarks"] == claim["remarks"]


@pytest.mark.parametrize(
    ("evaluated", "notes"),
    [
        ((64, 64, 1), []),
        (
            (64, 1, 0),
            [
                "the 64 evaluation samples are one and the same: nothing is known of others; give "
                "5 or more that differ"
            ],
        ),
        (
            (64, 4, 0),
            [
                "4 different evaluation samples of 64 given: too few for paired, per-sample "
                "limits, so the limits are wide; give 5 or more that differ"
            ],
        ),
        (
            (8, 8, 8),
            [
                "all evaluation samples are constant, as a black image: every input has one value "
                "in all elements; give samples with content"
            ],
        ),
    ],
)
def test_few_equal_and_constant_samples_are_told(
    evaluated: tuple[int, int, int], notes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """By `check_errors` and by `suggest_budget` alike, where enough samples are not."""
    generator = np.random.default_rng(0)
    values = [generator.normal(size=(1, 10)) for _ in range(16)]
    comparison = _comparison(
        [(x, x + 0.01 * generator.normal(size=x.shape)) for x in values],
        EvaluatedSamples(*evaluated),
    )
    assert Evaluation(comparison).notes == notes
    Edgeq().suggest_budget(comparison)
    assert capsys.readouterr().out.splitlines()[1:] == [f"# {note}" for note in notes]


def test_samples_are_counted_where_they_are_compared(net: QuantizedModel) -> None:
    """On any number of threads."""
    black, other = torch.zeros(1, 1, 8, 8), _held_out(1)[0]
    assert _EDGEQ.compare(net, [black, other, other, black, black]).evaluated == (5, 2, 3)


def test_eight_uneven_samples_are_refused_with_the_number_that_would_do(remember: Remember) -> None:
    """The golden text, whether or not the file would be written; the number does."""
    comparison = _uneven(8)
    expected = (GOLDEN / "errors_too_few_samples.txt").read_text("utf-8")
    for update in ((), ("new",)):
        with pytest.raises(AssertionError) as caught:
            remember(comparison, *update)
        assert f"{caught.value}\n" == expected
    needed = samples_needed(_errors(comparison), "pt2e", "sqnr_db")
    assert needed is not None
    assert remember(_uneven(needed), "new")["written"]


def _one_uneven(n: int) -> Comparison:
    """Outputs that hardly differ, with errors forty times as large at the first sample."""
    generator = np.random.default_rng(0)
    pairs = []
    for index in range(n):
        x, error = 1 + 0.1 * generator.random(size=(1, 10)), generator.normal(size=(1, 10))
        pairs.append((x, x + (0.001 if index else 0.04) * error))
    return _comparison(pairs)


def test_an_sqnr_limit_that_zeros_would_keep_is_refused(remember: Remember) -> None:
    """Though other limits would not: a worst value says little of a wrong output."""
    comparison = _one_uneven(5)
    limits = limits_of(_errors(comparison), "pt2e")
    kept = accepted(_errors(comparison), limits)
    assert "sqnr_db" in kept
    assert len(kept) < len(limits)
    few = r"5 samples are too few to remember the errors of 'y': give at least .*zeros would pass: "
    with pytest.raises(AssertionError, match=f"(?s)^{few}"):
        remember(comparison, "new")
    with pytest.raises(
        ValueError, match=r"5 samples are too few: give at least .*\ncause: .* zeros"
    ):
        Edgeq().suggest_budget(comparison)
    needed = samples_needed(_errors(comparison), "pt2e", "sqnr_db")
    assert needed is not None
    assert remember(_one_uneven(needed), "new")["written"]


@pytest.mark.parametrize(("spread", "passes"), [(0.01, True), (3.0, False)])
def test_an_sqnr_limit_that_a_constant_output_would_keep_is_told(
    remember: Remember, spread: float, passes: bool
) -> None:
    """The stage's mean over the samples, element by element."""
    generator = np.random.default_rng(0)
    levels = generator.uniform(100, 300, (1, 10))
    values = [levels + spread * generator.normal(size=(1, 10)) for _ in range(12)]
    pairs = [(each, each + 0.1 * generator.normal(size=(1, 10))) for each in values]
    comparison = _comparison(pairs)
    errors = _errors(comparison)
    table = np.stack([each for each, _ in pairs])
    constant = 10 * np.log10((table**2).sum() / ((table - table.mean(axis=0)) ** 2).sum())
    assert errors.sqnr_db - errors.spread_db == pytest.approx(constant)
    assert ("as a constant output" in remember(comparison, "new")["stored"]) is passes


def test_an_output_that_never_varies_has_no_error_of_what_varies() -> None:
    """As of anchors: what the sums leave of it is rounding."""
    levels = np.random.default_rng(0).uniform(100, 300, (1, 10)).astype(np.float32)
    errors = _errors(_comparison([(levels, levels + 0.1)] * 7))
    assert errors.spread == 0
    assert np.isnan(errors.spread_db)


def test_a_limit_that_zeros_would_keep_is_left_out_of_a_budget(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As the greatest error, where one value of each sample is off by up to all of it."""
    generator = np.random.default_rng(0)
    values = [generator.normal(size=(1, 100)) for _ in range(64)]
    pairs = [(x, x + 0.01 * generator.normal(size=x.shape)) for x in values]
    for _, right in pairs:
        right[0, 7] += generator.uniform(0, 3)
    budget = Edgeq().suggest_budget(_comparison(pairs))
    assert "max_lsb_error" not in budget.bounds()
    assert budget.sqnr_db is not None
    assert any(
        line.startswith("# max_lsb_error is left out: zeros would pass")
        for line in capsys.readouterr().out.splitlines()
    )


def test_a_baseline_of_before_is_told_of_and_does_not_fail(
    remember: Remember, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next update is refused; a sound one on more samples replaces it."""
    with monkeypatch.context() as before:
        before.setattr(Evaluation, "refusal", lambda self, data: None)
        remember(_uneven(8), "new")
    claim = remember(_uneven(8))
    assert (claim["category"], claim["written"]) == ("unchanged", False)
    (remark,) = claim["remarks"]
    assert remark.startswith(
        "__edgeq__/test_x/test_y.errors.json would be refused today: 8 samples are too few to "
        "remember the errors of 'y': give at least "
    )
    assert remark.endswith("; then update it with --edgeq-update=changed")
    other = _uneven(9)
    with pytest.raises(AssertionError, match="update: would be refused: 9 samples are too few"):
        remember(other)
    with pytest.raises(AssertionError, match=r"^9 samples are too few to remember the errors"):
        remember(other, "changed")
    assert remember(_uneven(256), "changed")["category"] == "changed"


@pytest.mark.slow
def test_where_no_number_of_samples_would_do_the_layer_is_to_be_found(remember: Remember) -> None:
    """One sample of thousands bears all of the error."""
    values = np.random.default_rng(0).normal(size=(5000, 1, 1))
    pairs = [(x, x + 1e-3) for x in values]
    pairs[7] = (values[7], values[7] + 50.0)
    with pytest.raises(AssertionError, match="fix: no number up to 8192 would do: find the layer"):
        remember(_comparison(pairs), "new")


def test_of_several_outputs_the_one_without_a_limit_is_named() -> None:
    """Its bound is that of all; and of many limits that cannot fail the first ones are told."""
    one, two = _uneven(8), _comparison([(np.full((1, 2), 3.0), np.full((1, 2), 3.1))] * 8)
    outputs = {name: replace(_errors(each), name=name) for name, each in (("a", two), ("b", one))}
    both = replace(one, total=StageErrors(outputs))
    with pytest.raises(ValueError, match="no budget for net: total, output 'b': 8 samples are too"):
        Edgeq().suggest_budget(both)
    told = Evaluation(both).remark(errors_to_remember(both))
    assert told.startswith("output 'a': top1_agreement: zeros or a guess would pass; output 'b': ")
    assert told.endswith("; and 2 more")


def test_an_output_whose_reference_is_zero_takes_the_bounds_of_the_others() -> None:
    """It has no SQNR, and what is left accepts zeros elsewhere."""
    zeros = np.zeros((1, 10))
    values = np.random.default_rng(0).normal(size=(4, 1, 10))
    one = _comparison([(values[0], values[0] + 0.01 * values[1]), (values[2], values[2] * 0.99)])
    two = _comparison([(zeros, zeros + 0.1)] * 2)
    outputs = {name: replace(_errors(each), name=name) for name, each in (("a", two), ("b", one))}
    with pytest.raises(ValueError, match="total, output 'a': the reference is zero in all element"):
        Edgeq().suggest_budget(replace(one, total=StageErrors(outputs)))
    assert Edgeq().suggest_budget(two).max_lsb_error is not None


def _below_a_step(scale: float) -> Comparison:
    generator = np.random.default_rng(0)
    values = [1e-3 * generator.random(size=(1, 10)) for _ in range(16)]
    return _comparison([(x, np.zeros_like(x)) for x in values], scale=scale)


def test_values_below_a_step_are_broken_where_the_scale_is_calibrated(remember: Remember) -> None:
    """Its range is too wide; of a fixed scale a sound file says zero, too: nothing is detected."""
    with pytest.raises(AssertionError, match=r"^errors not stored: total"):
        remember(_below_a_step(1 / 255), "new")
    assert remember(_below_a_step(1 / 256), "new")["written"]
