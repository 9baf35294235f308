"""Elements kept for charts: the same ones however the samples are split."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_edgeq.numerics.comparison import PointSample

SEED = 17


def _sides(size: int, count: int) -> list[dict[str, np.ndarray[tuple[int], np.dtype[np.float32]]]]:
    generator = np.random.default_rng(SEED)
    values = [generator.normal(size=size).astype(np.float32) for _ in range(count)]
    return [{"float": each, "edge": each + np.float32(0.5)} for each in values]


def test_few_elements_are_all_kept_in_order() -> None:
    """Of three samples of five elements none is left out."""
    points, samples = PointSample(), _sides(5, 3)
    for index, sides in enumerate(samples):
        points.update(index, sides)
    kept = points.result()
    assert np.array_equal(kept["float"], np.concatenate([each["float"] for each in samples]))
    assert np.array_equal(kept["edge"], kept["float"].astype(np.float32) + np.float32(0.5))


@pytest.mark.parametrize("size", [3, 100, 5000])
def test_any_split_keeps_the_same_elements(size: int) -> None:
    """Two threads that share the samples keep what one keeps."""
    whole, even, odd = PointSample(), PointSample(), PointSample()
    for index, sides in enumerate(_sides(size, 100)):
        whole.update(index, sides)
        (odd if index % 3 else even).update(index, sides)
    odd.merge(even)
    kept = whole.result()
    for side, values in odd.result().items():
        assert np.array_equal(values, kept[side])
    assert 0 < kept["edge"].size <= 2048


def test_the_ends_of_a_large_output_are_kept() -> None:
    """The first and the last element are among those of a sample."""
    points = PointSample()
    points.update(0, {"float": np.arange(10_000).reshape(100, 100)})
    kept = points.result()["float"]
    assert (kept.size, kept[0], kept[-1]) == (256, 0, 9999)


def test_nothing_is_kept_of_no_sample() -> None:
    """Without a sample there is no side."""
    assert PointSample().result() == {}
