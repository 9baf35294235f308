"""Which layer is to blame, said by itself where a check of a comparison fails."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_edgeq.quantized import QuantizedModel
    from pytest_edgeq.samples import Sample

__all__ = ["explain"]


def explain(quantized: QuantizedModel, samples: Iterable[Sample], seconds: float) -> str:
    """
    Localize on a few samples, for the text of a failure.

    Args:
        quantized: The model whose check failed.
        samples: The worst ones.
        seconds: After so many no further sample is begun; the first one always is.

    Returns:
        The sentence, the coverage and the worst five rows. Where localizing fails, why: the failure
        that it was to explain counts more.
    """
    from pytest_edgeq.localize.localizer import Localizer

    start = time.monotonic()
    count, left = 0, False
    try:
        with Localizer(quantized) as localizer:
            for sample in samples:
                left = count > 0 and time.monotonic() - start > seconds
                if left:
                    break
                localizer.update(sample)
                count += 1
            errors = localizer.result()
    except Exception as error:  # of torch.export, say, or of a reference that is no torch module
        first = (str(error).splitlines() or [""])[0]
        return f"which layer: not known, as localizing failed: {type(error).__name__}: {first}"
    on = f"{count} sample{'s' if count > 1 else ''}"
    stopped = f", stopped after {seconds:g} s" if left else ""
    other = f"; {errors.of_another_model} than the file" if errors.of_another_model else ""
    where = f"which layer (localized on the worst {on}{stopped})"
    return f"{where}: {errors.cause}{other}\n{errors.overview}"
