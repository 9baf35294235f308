"""
Quantization regression tests for PyTorch models that ship as `.tflite`.

Importing this package, or loading the plugin, imports neither torch nor a converter nor numpy:
names are fetched when first used.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_edgeq.check.assertions import (
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
    )
    from pytest_edgeq.compare.foreign import onnx_reference
    from pytest_edgeq.compare.quantized import QuantizedModel
    from pytest_edgeq.edgeq import Edgeq
    from pytest_edgeq.litert.fx import quantizer_from_fx
    from pytest_edgeq.localize.rows import LayerErrors
    from pytest_edgeq.numerics.budget import Budget
    from pytest_edgeq.numerics.comparison import Comparison
    from pytest_edgeq.quantize.mixed.results import MixedPrecisionPlan, Sensitivity
    from pytest_edgeq.runtimes.delegation import Delegation
    from pytest_edgeq.tflite.op_dtypes import OpDtypeMap


__all__ = [
    "Budget",
    "Comparison",
    "Delegation",
    "Edgeq",
    "LayerErrors",
    "MixedPrecisionPlan",
    "OpDtypeMap",
    "QuantizedModel",
    "Sensitivity",
    "assert_accuracy_drop",
    "assert_conforms",
    "assert_delegated",
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
    "Delegation": "pytest_edgeq.runtimes.delegation",
    "Edgeq": "pytest_edgeq.edgeq",
    "LayerErrors": "pytest_edgeq.localize.rows",
    "MixedPrecisionPlan": "pytest_edgeq.quantize.mixed.results",
    "OpDtypeMap": "pytest_edgeq.tflite.op_dtypes",
    "QuantizedModel": "pytest_edgeq.compare.quantized",
    "Sensitivity": "pytest_edgeq.quantize.mixed.results",
    "onnx_reference": "pytest_edgeq.compare.foreign",
    "quantizer_from_fx": "pytest_edgeq.litert.fx",
}


def _after_import(names: Sequence[str], call: Callable[[ModuleType], None]) -> None:
    """Call a function with each of these modules, now or as soon as it has been imported."""
    for name in names:
        if name in sys.modules:
            call(sys.modules[name])
    sys.meta_path.insert(0, _Finder(frozenset(names), call))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, names: frozenset[str], call: Callable[[ModuleType], None]) -> None:
        self._names = names
        self._call = call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the next finder finds, with a loader that calls the function at its end."""
        if fullname not in self._names:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._extend(spec.loader)
                return spec
        return None

    def _extend(self, loader: importlib.abc.Loader) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            self._call(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]


def _accept_none(module: ModuleType) -> None:
    from pytest_edgeq.litert.configs import accept_none

    accept_none(module)


# Tests make quantizers where they are collected, before any fixture runs.
_after_import(
    (
        "litert_torch.quantize.pt2e_quantizer",
        "torchao.testing.pt2e._xnnpack_quantizer",
    ),
    _accept_none,
)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, "pytest_edgeq.check.assertions")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
