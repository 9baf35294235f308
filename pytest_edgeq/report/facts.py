"""Describe models, measurements and samples as plain data."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.numerics.metrics import short_numbers

if TYPE_CHECKING:
    from pytest_edgeq.compare.quantized import QuantizedModel
    from pytest_edgeq.numerics.comparison import Comparison

_PICTURE_SIDE = 96  # greatest height and width of a picture in the record, in pixels
_LEAST_SIDE = 8  # height and width below which an input is no picture


def model_key(quantized: QuantizedModel) -> str:
    """Return the key of a model in a record: its name and a hash of its file."""
    return f"{quantized.name}-{quantized.sha256[:12]}"


def model_facts(quantized: QuantizedModel) -> dict[str, Any]:
    """Return a model as the record has it: JSON-able, of the schema's type `model`."""
    known, origin = quantized.float_size, quantized.origin
    return {
        "name": quantized.name,
        "flow": quantized.flow,
        "quantizer": quantized.quantizer,
        "sha256": quantized.sha256,
        "replaces": None if origin is None else origin.graph.sha256,
        "size_bytes": quantized.size_bytes,
        "float_size": None if known is None else known._asdict(),
        "inputs": _io_entries(quantized, "inputs"),
        "outputs": _io_entries(quantized, "outputs"),
        "ops": quantized.op_dtypes.to_dict()["ops"],
    }


def _io_entries(quantized: QuantizedModel, side: str) -> list[dict[str, Any]]:
    views = (
        [(key, quantized.signature(key)) for key in quantized.signatures]
        if len(quantized.edge.signatures) > 1
        else [(None, quantized)]
    )
    return [
        {
            "signature": key,
            "name": entry.name,
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "scale": entry.scale,
            "zero_point": entry.zero_point,
        }
        for key, view in views
        for entry in getattr(view, side)
    ]


def comparison_facts(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as the record has it, with the points and pictures that it kept."""
    facts = comparison.to_dict()
    facts["fingerprint"] = comparison.fingerprint
    facts["machines"] = list(comparison.machines)
    target = comparison.target
    facts["target"] = None if target is None else target.to_dict()
    facts["points"] = {
        output: {side: short_numbers(values) for side, values in sides.items()}
        for output, sides in comparison.points.items()
    }
    facts["worst_samples"] = [
        each.to_dict() | {"pictures": _pictures(each.inputs) if comparison.points else {}}
        for each in comparison.worst_samples
    ]
    return facts


def _pictures(sample: Any) -> dict[str, dict[str, Any]]:
    """Return the inputs of a sample that are images, by their position."""
    found = {str(i): _picture(array) for i, array in enumerate(sample.arrays())}
    return {name: picture for name, picture in found.items() if picture is not None}


def _picture(array: npt.NDArray[Any]) -> dict[str, Any] | None:
    """
    Return an input as 8-bit pixels; None where it is no image.

    An image is `[H, W]`, or has one or three channels first or last, in front of which there may be
    a batch of one. Its least value becomes 0 and its greatest 255.
    """
    if array.ndim == 4 and array.shape[0] == 1:
        array = array[0]
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.dtype.kind not in "fiu":
        return None
    if array.shape[0] in (1, 3) and array.shape[2] not in (1, 3):
        array = array.transpose(1, 2, 0)
    height, width, channels = array.shape
    if channels not in (1, 3) or min(height, width) < _LEAST_SIDE:
        return None
    step = -(-max(height, width) // _PICTURE_SIDE)
    # Values that are not finite are drawn too; health findings report them.
    pixels = np.nan_to_num(array[::step, ::step].astype(np.float64))
    low, high = pixels.min(), pixels.max()
    scaled = np.zeros_like(pixels) if high == low else (pixels - low) * (255 / (high - low))
    shown = np.rint(scaled).astype(np.uint8)
    return {
        "height": shown.shape[0],
        "width": shown.shape[1],
        "channels": channels,
        "low": float(low),
        "high": float(high),
        "pixels": base64.b64encode(shown.tobytes()).decode("ascii"),
    }
