"""Find the line of the model's code that calls an op, by the stack traces of torch.export."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.reference import graph_module, torch_module
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.numerics.findings import Place
from pytest_edgeq.versions import loaded_torch

if TYPE_CHECKING:
    import torch

_FRAME = re.compile(r'File "([^"<]+)", line (\d+), in \S+\n +(.+)')


def source_line(quantized: QuantizedModel, sample: Sample, place: Place) -> str:
    """
    Return `my_model.py:31: x = self.conv(x)` of an op; an empty string if it is not known.

    A file of a flow without a torch graph, or from the conversion cache, exports the reference.
    """
    if place.op is None or place.module is None or torch_module(quantized.float_model) is None:
        return ""
    from pytest_edgeq.compare.torch_graphs import exported_graph

    entries = quantized.op_dtypes
    count = sum((each.op, each.module) == (place.name, place.module) for each in entries)
    lines = _lines_of(quantized.simulated, place, count)
    if not lines:
        lines = _lines_of(exported_graph(quantized.float_model, sample), place, count)
    return lines.pop() if len(lines) == 1 else ""


def _lines_of(graph: Any, place: Place, count: int) -> set[str]:
    """
    Return the lines of a module's calls.

    Only those of the op's name if as many have it: a call of another name may lower to it, too.
    """
    if graph_module(graph) is None:
        return set()
    called = {
        node: str(node.target).removeprefix("aten.").partition(".")[0].replace("_", "")
        for node in graph.graph.nodes
        if node.op == "call_function" and _module_of(node) == place.module
    }
    own = [node for node in called if called[node] == place.name.lower().replace("_", "")]
    chosen = own if len(own) == count else called
    return {line for node in chosen for line in _user_line(node)}


def _module_of(node: torch.fx.Node) -> str | None:
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return stack[-1][0] if stack else None


def _user_line(node: torch.fx.Node) -> Iterator[str]:
    """Yield the innermost line outside of torch, if there is one."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    library = os.path.dirname(loaded_torch().__file__) + os.sep  # noqa: PTH120 # of texts
    own = [frame for frame in frames if not frame[0].startswith(library)]
    for path, line, code in own[-1:]:
        yield f"{os.path.basename(path)}:{line}: {code.strip()}"  # noqa: PTH119 # of any system
