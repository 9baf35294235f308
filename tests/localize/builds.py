"""What tests of sound models and of defects in them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fixtures.models import SmallModel, samples, seeded
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.localize.rows import LOWERING, LayerErrors
from pytest_edgeq.tflite.constants import Constant

Array = npt.NDArray[Any]
Build = Callable[[type[SmallModel], Any], QuantizedModel]
STATIC, PT2E = "recipe_static_wi8_ai8", "pt2e_static_int8"
DYNAMIC = "recipe_dynamic_wi8_afp32"


def built_once(
    maker: Edgeq, make: Callable[[type[SmallModel]], SmallModel] = seeded, *, calibrate: int = 16
) -> Build:
    """Convert each model by each flow once, calibrated on so many samples."""
    known: dict[tuple[type[SmallModel], Any], QuantizedModel] = {}

    def get(kind: type[SmallModel], flow: Any) -> QuantizedModel:
        if (kind, flow) not in known:
            known[kind, flow] = maker.quantize(
                make(kind),
                kind.sample_inputs(),
                quantizer=flow,
                calibration=samples(kind, calibrate) if flow is not None else None,
            )
        return known[kind, flow]

    return get


def localized(maker: Edgeq, quantized: QuantizedModel, kind: type[SmallModel]) -> LayerErrors:
    """Localize on samples that were not calibrated with."""
    return maker.localize(quantized, list(samples(kind, 3, seed=2)))


def blamed(errors: LayerErrors) -> dict[int, tuple[str, tuple[str, ...]]]:
    """Names and findings of the rows that compute something else, by index."""
    return {row.index: (row.name, row.findings) for row in errors.rows if row.verdict == LOWERING}


def rounded(
    weight: Array, scales: Array, grouping: str = "per_channel", *, last: int = 127
) -> Constant:
    """Give the nearest codes of a weight, up to the last one of int8 or int4."""
    codes = np.clip(np.rint(weight / scales), -last, last).astype(np.int64)
    points = np.zeros((1,) * weight.ndim, np.int64)
    return Constant("int8" if last > 7 else "int4", codes, scales, points, grouping)
