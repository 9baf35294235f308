"""
A test module of a user that calls every public name; read by type checkers, never run.

A line with `# type: ignore[…]` is a wrong call, which a type checker must refuse.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pytest_edgeq import (
    Budget,
    Comparison,
    Delegation,
    Edgeq,
    LayerErrors,
    MixedPrecisionPlan,
    OpDtypeMap,
    QuantizedModel,
    Sensitivity,
    assert_accuracy_drop,
    assert_conforms,
    assert_delegated,
    assert_healthy,
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
    quantizer_from_fx,
)


@pytest.fixture(scope="module")
def quantized(edgeq: Edgeq, edgeq_quantizer: object) -> QuantizedModel:
    """Every argument of quantize."""
    return edgeq.quantize(
        torch.nn.Linear(2, 2).eval(),
        (torch.zeros(1, 2),),
        quantizer=edgeq_quantizer,
        calibration=([torch.zeros(1, 2)] for _ in range(3)),
        sample_kwargs={"mask": torch.zeros(1)},
        train=lambda prepared: prepared.train(),
        dynamic_shapes=None,
        strict_export=False,
        name="net",
    )


def test_quantize(edgeq: Edgeq, model: torch.nn.Module, prepared: torch.fx.GraphModule) -> None:
    """Other kinds of model and quantizer."""
    x, y = torch.zeros(1), torch.zeros(2)
    edgeq.quantize({"small": model, "large": model}, {"small": (x,), "large": (y,)}, quantizer=None)
    quantizer = quantizer_from_fx(prepared)
    edgeq.quantize(quantizer.float_model, (x,), quantizer=quantizer)

    edgeq.quantize("model.pt", (x,))  # type: ignore[arg-type]
    edgeq.quantize(model, (x,), calibration=3)  # type: ignore[arg-type]
    edgeq.quantize(model, (x,), strict_export="no")  # type: ignore[arg-type]
    edgeq.quantize(model, (x,), quantiser="pt2e_static_int8")  # type: ignore[call-arg]
    quantizer_from_fx("prepared")  # type: ignore[arg-type]


def test_model(edgeq: Edgeq, quantized: QuantizedModel) -> None:
    """Attributes of a model, and files made elsewhere."""
    content: bytes = quantized.tflite
    path: Path = quantized.path
    size: int = quantized.size_bytes
    names: list[str] = [border.name for border in (*quantized.inputs, *quantized.outputs)]
    scales: list[float | None] = [border.scale for border in quantized.inputs]
    dtypes: OpDtypeMap = quantized.op_dtypes
    weights: list[str | None] = [op.weight for op in dtypes.ops("CONV_2D", module="layer1.*")]
    stored: dict[str, Any] = dtypes.to_dict()
    values: dict[str, npt.NDArray[Any]] = quantized.run(torch.zeros(1), runtime="builtin")
    other: QuantizedModel = quantized.with_tflite(path)
    reference: Callable[..., dict[str, npt.NDArray[Any]]] = onnx_reference(object())
    loaded: QuantizedModel = edgeq.load(content, reference=torch.nn.ReLU(), name="net")
    edgeq.load(path, reference=reference, float_tflite=str(path), layout={"image": "nhwc"})
    edgeq.load(path, reference={"small": path, "large": str(path)})
    edgeq.load(path, reference=loaded, float_tflite=content)

    edgeq.load(3)  # type: ignore[arg-type]
    edgeq.load(path, reference=3)  # type: ignore[arg-type]
    edgeq.load(path, layout=("nhwc",))  # type: ignore[arg-type]
    quantized.tflite = content  # type: ignore[misc]
    quantized.with_tflite(other)  # type: ignore[arg-type]
    del size, names, scales, weights, stored, values, loaded


def test_errors(edgeq: Edgeq, quantized: QuantizedModel, inputs: Iterator[torch.Tensor]) -> None:
    """Comparisons, layers and budgets."""
    comparison: Comparison = edgeq.compare(quantized, inputs, runtime="builtin")
    layers: LayerErrors = edgeq.localize(quantized, inputs, runtime="reference")
    culprit: str | None = None if layers.culprit is None else layers.culprit.module
    verdicts: list[str] = [row.verdict for row in layers.rows]
    sqnr_db: float = comparison.total.sqnr_db
    lsb: float | None = comparison.total.outputs["y"].max_lsb_error
    bounds: dict[str, float] = Budget(sqnr_db=30, max_lsb_error=2).bounds()
    supported: Budget = edgeq.suggest_budget(comparison)
    assert_within_budget(comparison, supported)
    assert_healthy(comparison)
    assert_healthy(comparison, allow=("clipped_output",))
    assert_within_budget(
        comparison, total={"a": Budget(rmse=0.1), "b": None}, lowering=Budget(sqnr_db=40)
    )
    edgeq.check_op_dtypes(quantized, name="map", delegation=True)
    edgeq.check_op_dtypes(quantized, delegation="mesa:gpu")
    found: Delegation = edgeq.delegation(quantized, "gpu")
    on_cpu: list[str] = [each.words for each in found.not_on_gpu]
    edgeq.check_errors(comparison, name="errors")
    edgeq.check(quantized, inputs, name="net")
    edgeq.check(quantized, inputs, states={"cache_out": "cache_in"})

    if comparison.lowering.sqnr_db > 30:  # type: ignore[union-attr]
        edgeq.compare(quantized.path, inputs)  # type: ignore[arg-type]
    edgeq.compare(quantized, 3)  # type: ignore[arg-type]
    edgeq.localize(quantized.tflite, inputs)  # type: ignore[arg-type]
    edgeq.check(quantized)  # type: ignore[call-arg]
    edgeq.check_errors(quantized)  # type: ignore[arg-type]
    edgeq.check_op_dtypes(quantized.op_dtypes)  # type: ignore[arg-type]
    edgeq.suggest_budget(quantized)  # type: ignore[arg-type]
    assert_within_budget(comparison, 0.1)  # type: ignore[arg-type]
    assert_within_budget(quantized, supported)  # type: ignore[arg-type]
    assert_healthy(quantized)  # type: ignore[arg-type]
    Budget(0.1)  # type: ignore[call-arg]
    Budget(sqnr_db="30")  # type: ignore[arg-type]
    del culprit, verdicts, sqnr_db, lsb, bounds, on_cpu


def test_mixed_precision(
    edgeq: Edgeq, quantized: QuantizedModel, inputs: Iterator[torch.Tensor]
) -> None:
    """Sensitivities and plans."""
    found: Sensitivity = edgeq.sensitivity(quantized, inputs, calibration=[torch.zeros(1, 2)])
    gains: dict[str, float] = {row.module: row.gain_db for row in found.rows}
    plan: MixedPrecisionPlan = edgeq.suggest_mixed_precision(quantized, inputs, Budget(sqnr_db=30))
    pairs = [(torch.zeros(1, 2), 1)]
    edgeq.suggest_mixed_precision(quantized, pairs, metric=max, max_drop=0.02, seconds=60)
    assert_within_budget(plan.comparison, Budget(sqnr_db=30))
    file: QuantizedModel = plan.quantized
    layers: list[str] = [layer.module for layer in plan.layers]
    code: str = plan.code

    edgeq.sensitivity(quantized.path, inputs)  # type: ignore[arg-type]
    edgeq.suggest_mixed_precision(quantized, inputs, 30)  # type: ignore[arg-type]
    edgeq.suggest_mixed_precision(quantized, inputs, metric="top1")  # type: ignore[arg-type]
    del gains, file, layers, code


def test_kinds_of_model(
    quantized: QuantizedModel, path: os.PathLike[str], inputs: list[torch.Tensor]
) -> None:
    """An assertion is given a model, a path or bytes, and nothing else."""
    for model in (quantized, path, Path("a.tflite"), "a.tflite", quantized.tflite):
        assert_input_dtypes(model, "int8")
        assert_output_dtypes(model, "int8")
        assert_op_dtypes(model, "CONV_2D", scheme="int8")
        assert_op_counts(model, {"CONV_2D": 4})
        assert_conforms(model)
        assert_delegated(model, "gpu_f32", allow=("SOFTMAX",))
        assert_no_float_ops(model)
        assert_qparams(model, symmetric=True)
        assert_runtimes_agree(model, inputs, 2)
        assert_size(model, max_bytes=10_000)

    assert_input_dtypes(None, "int8")  # type: ignore[arg-type]
    assert_output_dtypes([path], "int8")  # type: ignore[arg-type]
    assert_op_dtypes(quantized.graph, "CONV_2D", scheme="int8")  # type: ignore[arg-type]
    assert_op_counts(quantized.op_dtypes, {"CONV_2D": 4})  # type: ignore[arg-type]
    assert_conforms(torch.nn.ReLU())  # type: ignore[arg-type]
    assert_no_float_ops(torch.nn.ReLU())  # type: ignore[arg-type]
    assert_qparams(3, symmetric=True)  # type: ignore[arg-type]
    assert_runtimes_agree(torch.nn.ReLU(), inputs, 2)  # type: ignore[arg-type]
    assert_size(10_000, 10_000)  # type: ignore[arg-type]


def test_what_is_expected(quantized: QuantizedModel, inputs: list[torch.Tensor]) -> None:
    """The other arguments of the assertions."""
    assert_input_dtypes(quantized, ("int8", None))
    assert_output_dtypes(quantized, {"scores": torch.int8, "boxes": np.float32, "ids": None})
    assert_op_dtypes(
        quantized,
        "CONV_2D",
        input=["int8", "int8"],
        weight=np.int8,
        bias=np.dtype("int32"),
        output=torch.int8,
        granularity="per_channel",
        module="stem",
        count=1,
    )
    assert_conforms(quantized, allow=("same_scale", "PADV2"))
    assert_no_float_ops(quantized, allow=("SOFTMAX",))
    assert_qparams(quantized, "CONV_2D", scale_range=(1e-6, 1.0), shared_with="b.*")
    assert_runtimes_agree(quantized, inputs, 2, runtimes=("xnnpack", "builtin"))
    assert_accuracy_drop(
        quantized, [(inputs[0], 3)], lambda outputs, label: label == 3, max_drop=0.02
    )
    assert_size(quantized, max_bytes=10_000, max_ratio=0.3)

    assert_input_dtypes(quantized, int)  # type: ignore[arg-type]
    assert_output_dtypes(quantized, {"scores": 8})  # type: ignore[dict-item]
    assert_op_dtypes(quantized, "CONV_2D", weight=8)  # type: ignore[arg-type]
    assert_op_dtypes(quantized, "CONV_2D", None, "int8")  # type: ignore[call-arg]
    assert_op_dtypes(quantized, weight="int8")  # type: ignore[call-arg]
    assert_op_counts(quantized, ["CONV_2D"])  # type: ignore[arg-type]
    assert_conforms(quantized, allow=3)  # type: ignore[arg-type]
    assert_no_float_ops(quantized, allow=3)  # type: ignore[arg-type]
    assert_qparams(quantized, zero_point="0")  # type: ignore[arg-type]
    assert_runtimes_agree(quantized, inputs)  # type: ignore[call-arg]
    assert_accuracy_drop(quantized.path, [(inputs[0], 3)], len)  # type: ignore[arg-type]
    assert_accuracy_drop(quantized, [(inputs[0], 3)], "top1")  # type: ignore[arg-type]
    assert_size(quantized, max_bytes="10")  # type: ignore[arg-type]
