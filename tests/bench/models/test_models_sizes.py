"""Models that take more than one size: open dimensions, and a signature for each size."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fixtures.models import DynamicBatch, DynamicImage, TwoSignatures, seeded
from pytest_edgeq import (
    Edgeq,
    QuantizedModel,
    assert_input_dtypes,
)

# SQNR in dB that every size must reach. Measured over those below: 29 to 41, 41 to 49, 19 to 33,
# 41 to 49, 136 to 145. A file whose shapes were mixed up has 0 dB or does not run.
FLOWS = {
    "pt2e_static_int8": 24.0,
    "pt2e_dynamic_int8": 35.0,
    "recipe_static_wi8_ai8": 15.0,
    "recipe_dynamic_wi8_afp32": 35.0,
    None: 100.0,
}


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Edgeq:
    """Quantize and compare, with a folder for this module."""
    return Edgeq(directory=tmp_path_factory.mktemp("sizes"))


def _batches(size: int, seed: int) -> tuple[torch.Tensor, ...]:
    return DynamicBatch.sample_inputs(seed, batch=size)


def _images(size: int, seed: int) -> tuple[torch.Tensor, ...]:
    return DynamicImage.sample_inputs(seed, side=size)


@pytest.mark.sweep(0, slow=5)
@pytest.mark.parametrize("quantizer", FLOWS)
@pytest.mark.parametrize(
    ("model", "draw", "sizes", "shape"),
    [
        (DynamicBatch, _batches, (1, 4), (-1, 3, 8, 8)),
        (DynamicImage, _images, (6, 16), (1, 3, -1, -1)),
    ],
    ids=["batch", "image"],
)
def test_open_dimensions_run_at_two_sizes(
    quantized_once: Callable[..., QuantizedModel],
    maker: Edgeq,
    model: Any,
    draw: Callable[[int, int], tuple[torch.Tensor, ...]],
    sizes: tuple[int, int],
    shape: tuple[int, ...],
    quantizer: str | None,
) -> None:
    """Calibrated at one size, compared at two others, and given torch's own shapes at both."""
    quantized = quantized_once(model, quantizer)
    assert quantized.inputs[0].shape == shape
    for size in (*sizes, *reversed(sizes)):
        given = quantized.run(*draw(size, 1))["output_0"]
        with torch.no_grad():
            expected = seeded(model)(*draw(size, 1))
        assert given.shape == expected.shape
        evaluation = [draw(size, 100 + i) for i in range(4)]
        total = maker.compare(quantized, evaluation).total
        assert total.n_elements == 4 * expected.numel()
        assert total.sqnr_db > FLOWS[quantizer]


@pytest.fixture(scope="module")
def quantized_once(maker: Edgeq) -> Callable[..., QuantizedModel]:
    """Quantize each model once in each flow."""

    @functools.cache
    def quantize(model: Any, quantizer: str | None) -> QuantizedModel:
        return maker.quantize(
            seeded(model),
            model.sample_inputs(),
            quantizer=quantizer,
            calibration=[model.sample_inputs(1000 + i) for i in range(32)],
            dynamic_shapes=model.dynamic_shapes(),
        )

    return quantize


@pytest.fixture(scope="module")
def two_signatures(maker: Edgeq) -> Callable[..., QuantizedModel]:
    """Quantize the model with an entry point for each size once in each flow."""

    @functools.cache
    def quantize(quantizer: str | None) -> QuantizedModel:
        drawn = [TwoSignatures.signatures(1000 + i) for i in range(32)]
        return maker.quantize(
            seeded(TwoSignatures),
            TwoSignatures.signatures(),
            quantizer=quantizer,
            calibration={key: [each[key] for each in drawn] for key in ("small", "large")},
        )

    return quantize


@pytest.mark.sweep(1)
@pytest.mark.parametrize("quantizer", FLOWS)
def test_each_signature_runs_at_its_size(
    two_signatures: Callable[..., QuantizedModel], maker: Edgeq, quantizer: str | None
) -> None:
    """Run and compared one by one; the size of the other is refused."""
    quantized = two_signatures(quantizer)
    assert quantized.signatures == ("small", "large")
    for key, other in (("small", "large"), ("large", "small")):
        view = quantized.signature(key)
        sample = TwoSignatures.signatures(5)
        given = view.run(*sample[key])["output_0"]
        with torch.no_grad():
            expected = seeded(TwoSignatures)(*sample[key])
        assert given.shape == expected.shape
        evaluation = [TwoSignatures.signatures(100 + i)[key] for i in range(8)]
        assert maker.compare(view, evaluation).total.sqnr_db > FLOWS[quantizer]
        with pytest.raises(ValueError, match=r"shape"):
            view.run(*sample[other])


@pytest.mark.sweep(1)
@pytest.mark.parametrize("quantizer", FLOWS)
def test_signatures_are_quantized_alike(
    two_signatures: Callable[..., QuantizedModel], quantizer: str | None
) -> None:
    """Each op stands in both subgraphs, in one scheme."""
    quantized = two_signatures(quantizer)
    schemes: dict[int, list[tuple[str, str]]] = {}
    for entry in quantized.op_dtypes:
        schemes.setdefault(entry.subgraph, []).append((entry.op, entry.scheme))
    small, large = schemes.values()
    assert small == large
    [one] = {border["dtype"] for border in quantized.op_dtypes.to_dict()["inputs"]}
    assert_input_dtypes(quantized, {"small:args_0": one, "large:args_0": one})
