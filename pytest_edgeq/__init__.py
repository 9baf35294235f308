"""
Quantization regression tests for PyTorch models that ship as `.tflite`.

Importing this package, or loading the plugin, imports neither torch nor a converter nor numpy:
names are fetched when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pytest_edgeq.after_import import after_import

if TYPE_CHECKING:
    from types import ModuleType

    from pytest_edgeq.assertions import (
        assert_accuracy_drop,
        assert_conforms,
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
    )
    from pytest_edgeq.edgeq import Edgeq
    from pytest_edgeq.foreign import onnx_reference
    from pytest_edgeq.litert.fx import quantizer_from_fx
    from pytest_edgeq.localize.rows import LayerErrors
    from pytest_edgeq.numerics.budget import Budget
    from pytest_edgeq.numerics.comparison import Comparison
    from pytest_edgeq.quantized import QuantizedModel
    from pytest_edgeq.tflite.op_dtypes import OpDtypeMap


__all__ = [
    "Budget",
    "Comparison",
    "Edgeq",
    "LayerErrors",
    "OpDtypeMap",
    "QuantizedModel",
    "assert_accuracy_drop",
    "assert_conforms",
    "assert_healthy",
    "assert_input_dtypes",
    "assert_no_float_ops",
    "assert_op_counts",
    "assert_op_dtypes",
    "assert_output_dtypes",
    "assert_qparams",
    "assert_runtimes_agree",
    "assert_size",
    "assert_within_budget",
    "onnx_reference",
    "quantizer_from_fx",
]

_HOMES = {
    "Budget": "pytest_edgeq.numerics.budget",
    "Comparison": "pytest_edgeq.numerics.comparison",
    "Edgeq": "pytest_edgeq.edgeq",
    "LayerErrors": "pytest_edgeq.localize.rows",
    "OpDtypeMap": "pytest_edgeq.tflite.op_dtypes",
    "QuantizedModel": "pytest_edgeq.quantized",
    "onnx_reference": "pytest_edgeq.foreign",
    "quantizer_from_fx": "pytest_edgeq.litert.fx",
}


def _accept_none(module: ModuleType) -> None:
    from pytest_edgeq.litert.layers_in_float import accept_none

    accept_none(module)


# Tests make quantizers where they are collected, before any fixture runs.
after_import(
    (
        "litert_torch.quantize.pt2e_quantizer",
        "ai_edge_torch.quantize.pt2e_quantizer",
        "torchao.testing.pt2e._xnnpack_quantizer",
    ),
    _accept_none,
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, "pytest_edgeq.assertions")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
