"""What tests of sound models and of defects in them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fixtures.models import SmallModel, samples
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.localize.rows import LOWERING, LayerErrors

Build = Callable[[type[SmallModel], Any], QuantizedModel]
STATIC, PT2E = "recipe_static_wi8_ai8", "pt2e_static_int8"


def localized(maker: Edgeq, quantized: QuantizedModel, kind: type[SmallModel]) -> LayerErrors:
    """Localize on samples that were not calibrated with."""
    return maker.localize(quantized, list(samples(kind, 3, seed=2)))


def blamed(errors: LayerErrors) -> dict[int, tuple[str, tuple[str, ...]]]:
    """Names and findings of the rows that compute something else, by index."""
    return {row.index: (row.name, row.findings) for row in errors.rows if row.verdict == LOWERING}
