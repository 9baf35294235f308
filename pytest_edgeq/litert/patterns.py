"""The conv-bn patterns of the converter's quantizer, which its QAT configs look for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from pytest_edgeq.litert.chatter import quiet
from pytest_edgeq.litert.configs import replaced
from pytest_edgeq.litert.libraries import converter_module, pt2e_module

__all__ = ["pattern_modules"]


@contextlib.contextmanager
def pattern_modules() -> Iterator[None]:
    """
    Hand torchao modules for the conv-bn patterns of the converter's quantizer.

    With a QAT config litert-torch 0.10.0 hands it functions, which torch.export refuses (`Expected
    mod to be an instance of torch.nn.Module, got <class 'function'>`; torch 2.13, torchao 0.18.0).
    """
    import torch

    with quiet():
        pt2e_quantizer_utils = converter_module("quantize.pt2e_quantizer_utils")
        export_utils = pt2e_module("export_utils")
        # torch 2.9 has it under a name of its own.
        older = getattr(export_utils, "_WrapperModule", None)
        WrapperModule = older or export_utils.WrapperModule
    trace = pt2e_quantizer_utils._get_aten_graph_module_for_pattern

    def trace_as_module(pattern: Any, *args: Any, **kwargs: Any) -> Any:
        module = pattern if isinstance(pattern, torch.nn.Module) else WrapperModule(pattern)
        return trace(module, *args, **kwargs)

    with replaced(pt2e_quantizer_utils, _get_aten_graph_module_for_pattern=trace_as_module):
        yield
