"""Export a torch reference, record the tensors of its graph, and run it in float64."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import torch

from pytest_edgeq import litert
from pytest_edgeq.compare.reference import as_tensor, call_reference, torch_module
from pytest_edgeq.compare.samples import Sample

Array = npt.NDArray[Any]


_exporting = threading.Lock()  # torch.export is not safe to run in two threads at once


def exported_graph(
    reference: Callable[..., Any] | None, sample: Sample
) -> torch.fx.GraphModule | None:
    """Return a torch module's graph; None of other references and where torch cannot export."""
    module = torch_module(reference)
    if module is None or isinstance(module, torch.fx.GraphModule):
        return module
    return exported(module, sample)


def exported(module: torch.nn.Module, sample: Sample) -> torch.fx.GraphModule | None:
    """Export a module or graph; None where torch cannot."""
    # Copies, since torch.export merges two inputs that are the same tensor.
    copied = sample.clone().mapped(as_tensor)
    try:
        with _exporting, litert.quiet(), torch.no_grad():
            graph = torch.export.export(module, copied.args, copied.kwargs, strict=False).module()
    except Exception:  # torch.export raises errors of any type
        return None
    assert isinstance(graph, torch.fx.GraphModule), "torch.export returns graph modules"
    return graph


def run_in_float64(
    reference: Callable[..., Any] | None, sample: Sample
) -> list[tuple[str | None, Array]] | None:
    """Return a torch module's outputs in float64, by name where they have one; None if it fails."""
    double = sample.clone().mapped(_to_float64)
    # A forward may create float32 tensors; in its graph such dtypes are replaced.
    for is_graph in (False, True):
        module = _float64_copy(exported_graph(reference, sample) if is_graph else reference)
        try:
            with litert.quiet():
                outputs = None if module is None else call_reference(module, double)
        except Exception:  # torch raises errors of any type
            continue
        if outputs is not None:
            return outputs
    return None


def recorded(reference: Callable[..., Any] | None, sample: Sample) -> list[Array] | None:
    """Return every tensor that torch's graph computes; None if torch cannot export it."""
    graph = exported_graph(reference, sample)
    if graph is None:
        return None
    recorder, copied = _Recorder(graph), sample.clone().mapped(as_tensor)
    args, kwargs = copied.args, copied.kwargs
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"][len(args) :]
    values = [kwargs[n] for n in names] if set(names) == set(kwargs) else kwargs.values()
    with torch.no_grad():
        recorder.run(*args, *values, enable_io_processing=False)
    return recorder.values


def _float64_copy(reference: Callable[..., Any] | None) -> torch.nn.Module | None:
    """Return a float64 copy of a module; None if it cannot be copied."""
    if not isinstance(reference, torch.nn.Module):
        return None
    try:
        with litert.quiet():  # torch 2.13 warns of its own use of LeafSpec
            double = copy.deepcopy(reference).double()
    except Exception:  # attributes may fail to copy; float32 is used then
        return None
    if isinstance(double, torch.fx.GraphModule):
        for node in double.graph.nodes:
            node.args, node.kwargs = torch.fx.node.map_aggregate(
                (node.args, node.kwargs),
                lambda each: torch.float64 if each is torch.float32 else each,
            )
        double.recompile()
    return double


def _to_float64(value: Any) -> Any:
    tensor = as_tensor(value)
    return tensor.double() if tensor.is_floating_point() else tensor


class _Recorder(torch.fx.Interpreter):
    """Records every tensor that a graph computes."""

    def __init__(self, graph: torch.fx.GraphModule) -> None:
        super().__init__(graph)
        self.values: list[Array] = []

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run one node and record its output tensors."""
        made = super().run_node(n)
        if n.op in ("call_function", "placeholder"):
            for value in torch.utils._pytree.tree_leaves(made):
                if isinstance(value, torch.Tensor):
                    self.values.append(value.detach().to(torch.float64).numpy().copy())
        return made
