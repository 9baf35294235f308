"""Which op of a file is to blame: each op beside its partner in the file's float form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pytest_edgeq.localize.rows import LayerError, LayerErrors

if TYPE_CHECKING:
    from pytest_edgeq.quantized import QuantizedModel

__all__ = ["LayerError", "LayerErrors", "localize"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True


def localize(
    quantized: QuantizedModel, inputs: Iterable[Any], *, runtime: str, threads: int
) -> LayerErrors:
    """
    Measure every op of a file on the values that it really took.

    Args:
        quantized: The file and its references.
        inputs: Samples, read once, in order; as many are held at a time as are measured together.
        runtime: Kernels that keep every tensor.
        threads: Cores that may be used; the figures are the same for any number.

    Raises:
        ValueError, TypeError, RuntimeError: As `Edgeq.localize` says.
    """
    from pytest_edgeq.localize.localizer import Localizer
    from pytest_edgeq.samples import read_samples

    with Localizer(quantized, runtime) as localizer:
        localizer.update_all(read_samples(inputs, quantized.spec, "evaluation"), threads)
        return localizer.result()
