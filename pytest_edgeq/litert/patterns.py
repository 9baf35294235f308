"""Shims for the conv-bn patterns of the converter's quantizer and torchao."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from pytest_edgeq.litert.annotations import is_constant
from pytest_edgeq.litert.configs import replaced
from pytest_edgeq.litert.libraries import converter_module, pt2e_module


@contextlib.contextmanager
def pattern_modules() -> Iterator[None]:
    """
    Pass torchao modules as the conv-bn patterns of the converter's quantizer.

    With a QAT config litert-torch 0.10.0 passes functions, which torch.export refuses (`Expected
    mod to be an instance of torch.nn.Module, got <class 'function'>`; torch 2.13, torchao 0.18.0).
    """
    pt2e_quantizer_utils = converter_module("quantize.pt2e_quantizer_utils")
    WrapperModule = pt2e_module("export_utils").WrapperModule
    trace = pt2e_quantizer_utils._get_aten_graph_module_for_pattern

    def trace_as_module(pattern: Any, *args: Any, **kwargs: Any) -> Any:
        module = pattern if isinstance(pattern, torch.nn.Module) else WrapperModule(pattern)
        return trace(module, *args, **kwargs)

    with replaced(pt2e_quantizer_utils, _get_aten_graph_module_for_pattern=trace_as_module):
        yield


@contextlib.contextmanager
def ordered_partitions() -> Iterator[None]:
    """
    Sort the inputs and outputs of matched patterns, the last of the graph first.

    torch 2.13 orders them as a set, by their addresses. litert-torch 0.10.0 annotates the first two
    inputs of a GRU at the node that reads both, so that the second replaces the first, and equal
    conversions produced two different files. So the sequence, which is first in the graph, comes
    last.
    """
    pt2e_quantizer_utils = converter_module("quantize.pt2e_quantizer_utils")
    find = pt2e_quantizer_utils.get_source_partitions

    def found(graph: torch.fx.Graph, *args: Any, **kwargs: Any) -> Any:
        places = {node: place for place, node in enumerate(graph.nodes)}
        partitions = find(graph, *args, **kwargs)
        for each in (partition for kind in partitions.values() for partition in kind):
            for nodes in (each.input_nodes, each.output_nodes, each.params):
                nodes.sort(key=places.__getitem__, reverse=True)
        return partitions

    with replaced(pt2e_quantizer_utils, get_source_partitions=found):
        yield


@contextlib.contextmanager
def patterns_of_trained(prepared: torch.fx.GraphModule) -> Iterator[None]:
    """
    Skip torchao's search of trained conv-bn pairs if there is none.

    If any batch norm is left, trained or not, its `convert_pt2e` exports 96 patterns one by one,
    which takes a minute (torchao 0.18.0). All of them scale the weight by the root of the variance,
    which depends only on constants: a graph without such a root matches none of them.
    """
    roots = (node for node in prepared.graph.nodes if node.target is torch.ops.aten.sqrt.default)
    if any(map(is_constant, roots)):
        yield
        return
    qat_utils = pt2e_module("qat_utils")
    with replaced(qat_utils, _fold_conv_bn_qat_helper=lambda graph, *_, **__: graph):
        yield
