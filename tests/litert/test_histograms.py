"""Ranges of histograms, against those of torchao."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torchao.quantization.pt2e.observer import HistogramObserver

from pytest_edgeq.litert.histograms import fast_histograms

VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda values: values,
    "positive": lambda values: values.relu(),
    "with outliers": lambda values: values**5,
    "far from zero": lambda values: values.abs() + 3,
    "two values": lambda values: torch.where(values > 1, 2.0, 0.0),
    "one value": lambda values: torch.full_like(values, 2.0),
}


def observer(
    kind: str, count: int, batches: int = 1, qscheme: torch.qscheme = torch.per_tensor_affine
) -> HistogramObserver:
    """Return an observer that has seen values of a kind."""
    observed = HistogramObserver(
        dtype=torch.int8, quant_min=-128, quant_max=127, qscheme=qscheme, eps=2**-12
    )
    generator = torch.Generator().manual_seed(count)
    for batch in range(batches):
        observed.forward(VALUES[kind](torch.randn(count, generator=generator) * (1 + batch)))
    return observed


@pytest.mark.parametrize("qscheme", [torch.per_tensor_affine, torch.per_tensor_symmetric])
@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("count", [60, 300_000])
@pytest.mark.parametrize("kind", VALUES)
def test_the_range_has_the_same_bits(
    kind: str, count: int, batches: int, qscheme: torch.qscheme
) -> None:
    """Scales and zero points are those of torchao."""
    observed = observer(kind, count, batches, qscheme)
    expected = observed.calculate_qparams()
    with fast_histograms():
        found = observed.calculate_qparams()
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]


def test_a_histogram_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An equal histogram of another observer is known; another histogram is not."""
    with fast_histograms():
        expected = observer("normal", 5000).calculate_qparams()
        monkeypatch.delattr(HistogramObserver, "_compute_quantization_error")
        assert observer("normal", 5000).calculate_qparams() == expected
        with pytest.raises(AttributeError):
            observer("normal", 5001).calculate_qparams()


class Subscripts(TorchFunctionMode):
    """Counts the elements that are read from tensors."""

    count = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += function is torch.Tensor.__getitem__
        return function(*args, **(kwargs or {}))


def test_torchao_still_reads_a_histogram_one_element_after_the_other() -> None:
    """Once it does not, `fast_histograms` can go."""
    with Subscripts() as upstream:
        observer("two values", 5000).calculate_qparams()
    with Subscripts() as here, fast_histograms():
        observer("two values", 5000).calculate_qparams()
    assert upstream.count > 10_000
    assert here.count == 0
