"""Which op of a file is to blame: ops matched to torch nodes, and their own errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pytest_edgeq.localize.rows import LayerError, LayerErrors

if TYPE_CHECKING:
    from pytest_edgeq.quantized import QuantizedModel

__all__ = ["LayerError", "LayerErrors", "localize"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True


def localize(quantized: QuantizedModel, inputs: Iterable[Any], *, runtime: str) -> LayerErrors:
    """
    Measure every op of a file on the values that it really took.

    Raises:
        ValueError, TypeError, RuntimeError: As `Edgeq.localize` says.
    """
    from pytest_edgeq.localize.localizer import Localizer
    from pytest_edgeq.samples import read_samples

    with Localizer(quantized, runtime) as localizer:
        for sample in read_samples(inputs, quantized.spec, "evaluation"):
            localizer.update(sample)
        return localizer.result()
