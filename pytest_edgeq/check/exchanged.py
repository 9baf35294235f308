"""
What the outputs of another sample would measure: a limit that accepts these tests little.

Outputs that hardly depend on the input differ little between samples, so that exchanged ones may be
within limits that zeros are not.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_edgeq.compare.measurement import SampleRunner
from pytest_edgeq.compare.reference import torch_module, undisturbed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_edgeq.numerics.comparison import Comparison

Array = np.ndarray[Any, Any]


def exchanged_sqnr_db(comparison: Comparison) -> dict[str, float]:
    """
    Return the SQNR of the reference's own outputs of one sample in place of another's.

    The reference is run again, on the worst samples that the comparison keeps.
    """
    model = comparison.quantized
    if model is None or len(comparison.worst_samples) < 2:
        return {}
    if torch_module(model.float_model) is None:
        # Other code of the user's may count its calls, or give outputs that it has in order.
        return {}
    runner = SampleRunner(model, comparison.runtime)
    with undisturbed(model.float_model, model.name):
        outputs = [runner.reference(each.inputs, each.index) for each in comparison.worst_samples]
    names = [border.name for border in model.edge.signature.outputs]
    found = {name: _sqnr_db(arrays) for name, *arrays in zip(names, *outputs, strict=True)}
    return {name: decibels for name, decibels in found.items() if decibels is not None}


def _sqnr_db(arrays: Sequence[Array]) -> float | None:
    signal = noise = 0.0
    for one, other in itertools.permutations((np.float64(array) for array in arrays), 2):
        if one.shape == other.shape:
            signal += float(np.square(one).sum())
            noise += float(np.square(one - other).sum())
    if not (0 < signal < math.inf and 0 < noise < math.inf):
        return None
    return 10 * math.log10(signal / noise)
