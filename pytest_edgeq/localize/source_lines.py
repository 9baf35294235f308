"""Find the line of the model's code that calls an op, by the stack traces of torch.export."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pytest_edgeq import litert
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.reference import as_tensor, torch_module
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.numerics.findings import Place

_FRAME = re.compile(r'File "([^"<]+)", line (\d+), in \S+\n +(.+)')

_TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120 # compared with texts


def source_line(quantized: QuantizedModel, sample: Sample, place: Place) -> str:
    """
    Return `my_model.py:31: x = self.conv(x)` of an op; an empty string if it is not known.

    A file of a flow without a torch graph, or from the conversion cache, exports the reference.
    """
    if place.op is None or place.module is None or torch_module(quantized.float_model) is None:
        return ""
    lines = _lines_of(quantized.simulated, place)
    if not lines:
        lines = _lines_of(graph_of(quantized.float_model, sample), place)
    return lines.pop() if len(lines) == 1 else ""


def _lines_of(graph: Any, place: Place) -> set[str]:
    """Return the lines of a module's calls; only those of the op's own kind if there are any."""
    if not isinstance(graph, torch.fx.GraphModule):
        return set()
    called = [
        node
        for node in graph.graph.nodes
        if node.op == "call_function" and _module_of(node) == place.module
    ]
    name = place.name.lower().replace("_", "")
    own = [node for node in called if _op_of(node) in name]
    return {line for node in own or called for line in _user_line(node)}


def _module_of(node: torch.fx.Node) -> str | None:
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return stack[-1][0] if stack else None


def _op_of(node: torch.fx.Node) -> str:
    return str(node.target).removeprefix("aten.").partition(".")[0].replace("_", "")


def _user_line(node: torch.fx.Node) -> Iterator[str]:
    """Yield the innermost line outside of torch, if there is one."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    for path, line, code in own[-1:]:
        yield f"{os.path.basename(path)}:{line}: {code.strip()}"  # noqa: PTH119 # of any system


def inputs_of(sample: Sample) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Return tensors to export or to call a module with."""
    # Copies, since torch.export merges two inputs that are the same tensor.
    args = tuple(as_tensor(each).clone() for each in sample.args)
    return args, {name: as_tensor(each).clone() for name, each in sample.kwargs.items()}


def graph_of(reference: Callable[..., Any] | None, sample: Sample) -> torch.fx.GraphModule | None:
    """Return torch's graph; None if torch cannot export it."""
    module = torch_module(reference)
    if module is None or isinstance(module, torch.fx.GraphModule):
        return module
    args, kwargs = inputs_of(sample)
    try:
        with litert.quiet(), warnings.catch_warnings():
            # Recurrent layers warn of weights that they look up; the parameters are exported.
            warnings.filterwarnings("ignore", "The tensor attributes? .*_flat_weights", UserWarning)
            graph = torch.export.export(module, args, kwargs, strict=False).module()
    except Exception:  # torch.export raises errors of any type
        return None
    assert isinstance(graph, torch.fx.GraphModule), "torch.export gives graph modules"
    return graph
