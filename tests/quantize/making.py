"""How the tests of the flows quantize and compare: by the same samples wherever any will do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fixtures.models import ResidualNet, normal, samples, seeded
from pytest_edgeq import Edgeq

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from pytest_edgeq import QuantizedModel

Shape = tuple[int, ...]


def drawn(make: Any, *shapes: Shape, n: int = 8, seed: int = 1) -> list[tuple[Tensor, ...]]:
    """Draw samples of these shapes, or of a small model that knows its own."""
    if not shapes:
        return list(samples(make, n, seed=seed))
    start = 1000 * seed
    return [
        tuple(normal(*shape, seed=start + 100 * k + i) for k, shape in enumerate(shapes))
        for i in range(n)
    ]


def quantize(
    quantizer: Any,
    make: Callable[[], nn.Module] = ResidualNet,
    *shapes: Shape,
    n: int = 8,
    **options: Any,
) -> QuantizedModel:
    """
    Quantize a seeded model, calibrated on its first samples.

    A conversion that another test has made with the same model and samples is a hit of the cache,
    which costs a tenth.
    """
    inputs = drawn(make, *shapes, n=n)
    options = {"calibration": inputs, **options}
    return Edgeq().quantize(seeded(make), inputs[0], quantizer=quantizer, **options)


def sqnr_db(
    quantized: QuantizedModel, make: Any = ResidualNet, *shapes: Shape, stage: str = "total"
) -> float:
    """Compare on samples that the calibration has not seen."""
    comparison = Edgeq().compare(quantized, drawn(make, *shapes, seed=2))
    assert comparison.total.nonfinite == 0
    return float(comparison.stages[stage].sqnr_db)
