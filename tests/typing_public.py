"""The public names as a type checker sees them: read by mypy, never run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from pytest_edgeq import (
    Budget,
    Comparison,
    Edgeq,
    LayerErrors,
    OpDtypeMap,
    QuantizedModel,
    assert_accuracy_drop,
    assert_input_dtypes,
    assert_no_float_ops,
    assert_op_counts,
    assert_op_dtypes,
    assert_output_dtypes,
    assert_qparams,
    assert_runtimes_agree,
    assert_size,
    assert_within_budget,
    onnx_reference,
)


def quantize(edgeq: Edgeq, model: torch.nn.Module) -> QuantizedModel:
    """All that quantize takes."""
    quantized: QuantizedModel = edgeq.quantize(
        model,
        (torch.zeros(1),),
        quantizer="pt2e_static_int8",
        calibration=([torch.zeros(1)] for _ in range(3)),
        sample_kwargs={"mask": torch.zeros(1)},
        dynamic_shapes=None,
        strict_export=False,
        name="net",
    )
    return quantized


def look(model: QuantizedModel, edgeq: Edgeq) -> None:
    """What a model tells."""
    content: bytes = model.tflite
    path: Path = model.path
    size: int = model.size_bytes
    names: list[str] = [border.name for border in (*model.inputs, *model.outputs)]
    dtypes: OpDtypeMap = model.op_dtypes
    weights: list[str | None] = [op.weight for op in dtypes.ops("CONV_2D", module="layer1.*")]
    values: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = model.run(torch.zeros(1))
    other: QuantizedModel = model.with_tflite(path)
    loaded: QuantizedModel = edgeq.load(content, reference=lambda x: x, name="net")
    edgeq.load(path, reference=onnx_reference(object()), layout="nhwc")
    edgeq.load(path, layout={"image": "nhwc"})
    edgeq.load(path, layout=("nhwc",))  # type: ignore[arg-type]
    edgeq.check_op_dtypes(loaded, name="map")
    del size, names, weights, values, other


def measure(model: QuantizedModel, edgeq: Edgeq, inputs: Iterator[torch.Tensor]) -> None:
    """Comparisons and budgets."""
    comparison: Comparison = edgeq.compare(model, inputs, runtime="builtin")
    layers: LayerErrors = edgeq.localize(model, inputs)
    culprit: str | None = None if layers.culprit is None else layers.culprit.module
    worst: float = comparison.total.sqnr_db
    lsb: float | None = comparison.total.max_lsb_error
    bounds: dict[str, float] = Budget(sqnr_db=30, max_lsb_error=2).bounds()
    assert_within_budget(comparison, Budget(rmse=0.1))
    assert_within_budget(
        comparison, total={"a": Budget(rmse=0.1), "b": None}, lowering=Budget(sqnr_db=40)
    )
    assert_within_budget(comparison, 0.1)  # type: ignore[arg-type]
    Budget(0.1)  # type: ignore[call-arg]
    del worst, lsb, bounds, culprit


def promise(model: QuantizedModel, path: os.PathLike[str], inputs: list[torch.Tensor]) -> None:
    """Assertions."""
    assert_input_dtypes(path, "int8")
    assert_output_dtypes(model.tflite, {"scores": torch.int8, "boxes": np.float32})
    assert_op_dtypes(
        model, "CONV_2D", input="int8", weight=np.int8, scheme="int8", module="stem", count=1
    )
    assert_op_counts(model, {"CONV_2D": 4, "DEQUANTIZE": 0})
    assert_no_float_ops(model, allow=("SOFTMAX",))
    assert_qparams(model, "CONV_2D", symmetric=True, scale_range=(1e-6, 1.0), shared_with="b.*")
    assert_runtimes_agree(model, inputs, 2, runtimes=("xnnpack", "builtin"))
    assert_accuracy_drop(model, [(inputs[0], 3)], lambda outputs, label: label == 3, max_drop=0.02)
    assert_accuracy_drop(path, [(inputs[0], 3)], len)  # type: ignore[arg-type]
    assert_size(model, max_bytes=10_000, max_ratio=0.3)
    assert_size(model, max_bytes="10")  # type: ignore[arg-type]
    assert_op_counts(model, ["CONV_2D"])  # type: ignore[arg-type]
