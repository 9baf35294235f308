"""Accumulators: what they measure, what they refuse, and that splits leave no trace."""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_edgeq.numerics.error_sums import IOSpec, StageAccumulator
from pytest_edgeq.numerics.results import ElementError, OutputErrors, StageErrors, measured_metrics

Array = npt.NDArray[Any]


def measure(
    *samples: tuple[Any, Any], scale: float | None = None, dtype: Any = np.float32
) -> OutputErrors:
    """Return the errors of one output over (reference, actual) samples."""
    stage = StageAccumulator([IOSpec("y", scale)])
    for reference, actual in samples:
        stage.update([np.array(reference, dtype)], [np.array(actual, dtype)])
    return stage.result().outputs["y"]


def test_metrics_of_a_known_case() -> None:
    """Every metric of a case small enough to work out by hand."""
    errors = measure(([[3.0, 4.0]], [[3.0, 3.0]]), ([[0.0, 5.0]], [[2.0, 5.0]]), scale=0.5)
    assert errors.max_abs_error == 2.0
    assert errors.mean_abs_error == 0.75
    assert errors.rmse == math.sqrt(5 / 4)
    assert errors.max_lsb_error == 4.0
    assert errors.sqnr_db == 10 * math.log10(50 / 5)
    assert errors.worst_sample_sqnr_db == 10 * math.log10(25 / 4)
    assert errors.worst_sample == 1
    assert errors.cosine_similarity == pytest.approx(46 / (math.sqrt(50) * math.sqrt(47)))
    assert errors.top1_agreement == 0.5
    assert errors.max_abs_index == ElementError(1, (0, 0), 0.0, 2.0)
    assert (errors.n_samples, errors.n_elements, errors.nonfinite) == (2, 4, 0)
    assert (errors.degenerate, errors.dtype) == (False, "float32")


def test_unsigned_integers_do_not_wrap() -> None:
    """3 − 5 is −2."""
    assert measure(([3], [5]), dtype=np.uint8).max_abs_error == 2.0


NAN = ("sqnr_db", "worst_sample_sqnr_db", "cosine_similarity")


@pytest.mark.parametrize(
    ("shape", "unknown"),
    [((1, 2), NAN), ((0, 4), (*NAN, "max_abs_error", "mean_abs_error", "rmse", "max_lsb_error"))],
)
def test_zeros_and_no_elements_are_degenerate(
    shape: tuple[int, ...], unknown: tuple[str, ...]
) -> None:
    """They test nothing: what has no answer is NaN, and the output is marked."""
    errors = measure((np.zeros(shape), np.zeros(shape)), scale=1.0)
    assert (errors.degenerate, errors.worst_sample) == (True, 0)
    numbers = {name: getattr(errors, name) for name in measured_metrics([errors])}
    assert [name for name, each in numbers.items() if each is not None and each != each] == [
        name for name in numbers if name in unknown
    ]
    assert (errors.max_abs_index is None) == (numbers["top1_agreement"] is None) == (0 in shape)


def test_noise_without_signal() -> None:
    """A zero reference with noise is −inf dB, and that sample is the worst."""
    errors = measure(([1.0, 1.0], [1.0, 0.5]), ([0.0, 0.0], [0.5, 0.0]))
    assert errors.worst_sample_sqnr_db == -math.inf
    assert errors.worst_sample == 1
    assert measure(([0.0], [1.0])).sqnr_db == -math.inf
    assert measure(([0.0], [1.0])).cosine_similarity == 0.0


def test_a_degenerate_sample_is_not_the_worst() -> None:
    """A sample of zeros on both sides is left out of the worst sample."""
    errors = measure(([0.0], [0.0]), ([1.0], [0.9]))
    assert errors.worst_sample == 1
    assert errors.worst_sample_sqnr_db == pytest.approx(20.0)


def test_nonfinite_values_are_counted_by_side_and_spoil_every_metric() -> None:
    """One NaN or infinity among good samples makes every metric of that output NaN."""
    errors = measure(
        ([[1.0, 5.0]], [[1.0, 2.0]]),
        ([[math.nan, 1.0, math.inf]], [[1.0, math.nan, 1.0]]),
        ([[1.0, math.inf]], [[1.0, math.inf]]),
        scale=1.0,
    )
    assert (errors.nonfinite_reference, errors.nonfinite_actual, errors.nonfinite) == (3, 2, 5)
    for name in measured_metrics([errors]):
        assert math.isnan(getattr(errors, name)), name
    assert not errors.degenerate
    assert errors.worst_sample == 1
    assert errors.max_abs_index is not None
    assert (errors.max_abs_index.sample, errors.max_abs_index.index) == (1, (0, 0))
    chosen, boxes = StageAccumulator([IOSpec("y", chosen=True)]), np.array([[1.0, 2.0], [3.0, 4.5]])
    assert math.isnan(chosen.update([np.where(boxes < 3, boxes, math.inf)], [boxes]))


def test_overflow_fails_instead_of_passing() -> None:
    """Squares beyond float64 give NaN, never an infinite SQNR that passes."""
    errors = measure(([1e200, 1.0], [1e200, 2.0]), dtype=np.float64)
    assert math.isnan(errors.sqnr_db)
    assert math.isnan(errors.worst_sample_sqnr_db)
    assert math.isnan(errors.cosine_similarity)
    assert errors.max_abs_error == 1.0


def test_update_returns_the_worst_sqnr_of_the_sample() -> None:
    """The least over outputs; NaN where not finite, +inf where there is no error to look at."""
    stage = StageAccumulator([IOSpec("a"), IOSpec("b")])
    one, ten, zero = np.array([1.0]), np.array([10.0]), np.array([0.0])
    assert stage.update([ten, one], [ten + 1, one]) == 20.0
    assert stage.update([zero, one], [zero, one]) == math.inf
    assert stage.update([zero, zero], [zero, zero]) == math.inf
    assert stage.update([zero, zero], [one, zero]) == -math.inf
    assert math.isnan(stage.update([one, one], [one * math.nan, zero]))


def test_shapes_are_compared_before_values() -> None:
    """A shape that would broadcast is refused, and nothing of the sample is kept."""
    stage = StageAccumulator([IOSpec("a"), IOSpec("scores")])
    message = (
        "output 'scores', sample 0: expected shape (1, 3), got (3,) "
        "(shapes must be equal, nothing is broadcast)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        stage.update([np.ones(2), np.ones((1, 3))], [np.ones(2), np.ones(3)])
    with pytest.raises(ValueError, match="no sample was measured"):
        stage.result()


def test_outputs_that_are_refused() -> None:
    """Two of one name, none at all, and complex ones, which have no error in this sense."""
    with pytest.raises(ValueError, match="output names must differ, got 'a', 'a'"):
        StageAccumulator([IOSpec("a"), IOSpec("a")])
    with pytest.raises(ValueError, match="no outputs: there is nothing to measure"):
        StageAccumulator([])
    with pytest.raises(ValueError, match=r"output 'a', sample 0: expected bool.*got complex128"):
        StageAccumulator([IOSpec("a")]).update([np.ones(1)], [np.ones(1, complex)])


def stage_of(**outputs: tuple[Any, Any, float | None]) -> StageErrors:
    """Return one sample's errors of outputs given as (reference, actual, scale)."""
    stage = StageAccumulator([IOSpec(name, o[2]) for name, o in outputs.items()])
    stage.update(
        [np.array(o[0]) for o in outputs.values()], [np.array(o[1]) for o in outputs.values()]
    )
    return stage.result()


def test_stage_shows_the_worst_of_its_outputs() -> None:
    """Errors are the greatest and similarities the least, each over the outputs that have it."""
    stage = stage_of(
        scores=([[4.0, 1.0]], [[4.0, 2.0]], 0.5), boxes=([8.0], [6.0], None), n=(2, 2, None)
    )
    outputs = stage.outputs
    assert list(outputs) == ["scores", "boxes", "n"]
    assert stage.max_abs_error == stage.mean_abs_error == stage.rmse == 2.0
    assert stage.max_lsb_error == 2.0
    assert stage.sqnr_db == stage.worst_sample_sqnr_db == outputs["boxes"].sqnr_db
    assert stage.cosine_similarity == outputs["scores"].cosine_similarity
    assert stage.top1_agreement == 1.0
    assert (stage.n_samples, stage.n_elements, stage.nonfinite, stage.degenerate) == (
        1,
        4,
        0,
        False,
    )


def test_stage_lacks_what_no_output_has() -> None:
    """Without a scale or classes anywhere the stage has neither metric."""
    stage = stage_of(a=([1.0], [2.0], None))
    assert stage.max_lsb_error is None
    assert stage.top1_agreement is None


def test_nan_of_one_output_is_the_worst_of_the_stage() -> None:
    """A NaN is not lost among better outputs."""
    stage = stage_of(a=([1.0], [math.nan], 1.0), b=([1.0], [9.0], 1.0), z=([0.0], [0.0], 1.0))
    assert math.isnan(stage.max_abs_error)
    assert stage.max_lsb_error is not None
    assert math.isnan(stage.max_lsb_error)
    assert math.isnan(stage.sqnr_db)
    assert (stage.nonfinite, stage.degenerate) == (1, True)


def test_to_dict_is_plain_sorted_strict_json() -> None:
    """What is stored is sorted and strict JSON, with NaN and infinity as text."""
    data = stage_of(y=([1.0, 2.0], [1.0, 2.0], 0.5), a=([1.0], [math.nan], None)).to_dict()
    text = json.dumps(data, allow_nan=False)
    assert text == json.dumps(data, sort_keys=True)
    assert data["outputs"]["y"]["sqnr_db"] == "inf"
    assert data["sqnr_db"] == "nan"
    assert data["outputs"]["a"]["max_abs_index"] == {
        "actual": "nan",
        "index": [0],
        "reference": 1.0,
        "sample": 0,
    }
    empty = measure((np.zeros(0), np.zeros(0))).to_dict()
    assert empty["max_abs_index"] is None


SPECS = [IOSpec("scores", 0.1), IOSpec("index")]
VALUES = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, 0.0, 1.0, 1.1, math.nan, math.inf]),
)
SAMPLES = st.lists(
    st.tuples(
        st.lists(st.tuples(VALUES, VALUES), min_size=0, max_size=4),
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 3)),
    ),
    min_size=1,
    max_size=8,
)


def accumulate(samples: Sequence[tuple[int, Any]]) -> StageAccumulator:
    """Return an accumulator that has seen these indexed samples, through a pickle as workers do."""
    stage = StageAccumulator(SPECS)
    for index, (pairs, (left, right)) in samples:
        floats = np.array(pairs, np.float32).reshape(-1, 2)
        stage.update([floats[:, 0], np.array(left)], [floats[:, 1], np.array(right)], index=index)
    copy: StageAccumulator = pickle.loads(pickle.dumps(stage))
    return copy


@given(SAMPLES, st.randoms(use_true_random=False), st.integers(1, 4))
def test_any_split_and_merge_order_is_one_pass(samples: list[Any], random: Any, parts: int) -> None:
    """However samples are dealt out and merged, every figure is the same, bit for bit."""
    indexed = list(enumerate(samples))
    expected = accumulate(indexed).result()
    random.shuffle(indexed)
    stages = [accumulate(indexed[part::parts]) for part in range(parts)]
    random.shuffle(stages)
    merged = stages[0]
    for stage in stages[1:]:
        merged.merge(stage)
    # repr, because NaN is not equal to itself and floats repr to their very bits
    assert repr(merged.result()) == repr(expected)
