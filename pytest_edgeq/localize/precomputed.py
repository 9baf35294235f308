"""Constants that the file computes anew at each run, from constants alone."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pytest_edgeq.localize.biases import qparams
from pytest_edgeq.localize.kinds import IDENTITIES, VIEWS, base_name, is_dequantize, is_quantize
from pytest_edgeq.localize.reference import ReferenceGraph
from pytest_edgeq.localize.views import View, best_view
from pytest_edgeq.localize.weights import constants_behind
from pytest_edgeq.tflite.boundary import code_range
from pytest_edgeq.tflite.constants import shape_along
from pytest_edgeq.tflite.graph import Op, OpGraph, Subgraph, Tensor
from pytest_edgeq.tflite.roles import roles_of

__all__ = [
    "computed_behind",
    "computed_from_constants",
    "constant_starts",
    "precomputed_constants",
]

Node = torch.fx.Node

_GREATEST = torch.finfo(torch.float32).max


def computed_from_constants(graph: OpGraph, ops: Sequence[Op]) -> set[int]:
    """The tensors that ops make of constants alone, of one subgraph, in order."""
    found: set[int] = set()
    for op in ops:
        inputs = [index for index in op.inputs if index >= 0]
        if inputs and all(i in found or graph.tensor(op, i).is_constant for i in inputs):
            found.update(op.outputs)
    return found


def constant_starts(
    graph: OpGraph,
    ops: Sequence[Op],
    reference: ReferenceGraph,
    read: Callable[[int], torch.Tensor],
    computed: Container[int],
) -> dict[int, dict[Node, View]]:
    """
    Constants of the file from which it computes others at each run, and what torch has for them.

    A parameter that is normalised or weighed in torch (of a fusion by weights, of a convolution
    whose weight is standardised) is folded only as far as no quantize node stands in between: the
    ops behind are matched as any others are.

    Args:
        graph: The file.
        ops: Of one subgraph, in order.
        reference: The torch graph.
        read: Gives a tensor of the file, dequantized.
        computed: What the file computes from constants alone.

    Returns:
        By tensor the nodes that have its values, and how it reads as each.
    """
    wanted: set[int] = set()
    for op in reversed(ops):
        if not any(index in computed for index in op.outputs):
            continue
        if op.name not in IDENTITIES or wanted.intersection(op.outputs):
            roles = roles_of(graph, op)
            wanted.update(each.index for each in roles.inputs)
            if op.name == "BATCH_MATMUL":
                wanted.update(each.operand.index for each in roles.weights)
    starts = sorted(i for i in wanted if graph.tensor(ops[0], i).is_constant)
    if not starts:
        return {}
    nodes = [node for node in reference.nodes if _is_computed_with(node, reference)]
    found = {}
    for index in starts:
        tensor = graph.tensor(ops[0], index)
        readings = _readings(tensor, read(index), nodes, reference)
        if readings:
            found[index] = readings
    return found


def _is_computed_with(node: Node, reference: ReferenceGraph) -> bool:
    """Whether torch makes another constant of this one."""
    if reference.varies(node) or node.op not in ("get_attr", "call_function"):
        return False
    for user in node.users:
        if user.op != "call_function" or reference.varies(user):
            continue
        if not _passes(user) or _is_computed_with(user, reference):
            return True
    return False


def _readings(
    tensor: Tensor, file: torch.Tensor, nodes: Iterable[Node], reference: ReferenceGraph
) -> dict[Node, View]:
    """
    The nodes whose values a constant of the file holds, to its own rounding.

    Of those that it might hold (a sum, and the sum with an ε) they are the ones whose parameters
    it has, else the nearest.
    """
    # A table of one truth throughout, such as a mask of nothing, tells no other from it.
    if not file.numel() or (file.dtype == torch.bool and bool(file.all() or not file.any())):
        return {}
    if not file.is_floating_point():
        return _equal(file, nodes, reference)
    # What masks is infinite in torch, and the least float to kernels: nothing is near to it but it.
    file = file.clamp(-_GREATEST, _GREATEST)
    near: dict[Node, tuple[float, View]] = {}
    parameters, rounding = qparams(tensor), _half_steps(tensor)
    told = {node for node in nodes if parameters and _parameters(node, reference) == parameters}
    for node in nodes:
        value = reference.constant(node, quantized=True)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        if value.numel() != file.numel():
            continue
        value = value.clamp(-_GREATEST, _GREATEST)
        if parameters is not None and node in told:
            (scale, point), (low, high) = parameters, code_range(tensor.dtype)
            value = value.double().clamp((low - point) * scale, (high - point) * scale)
        best = best_view(file, value)
        if best is None:
            continue
        # What torch and the converter add up in another order is as far off as the largest of it.
        slack = best[1].read(rounding) + float(value.abs().max()) * 2.0**-20 + 1e-30
        if bool(((best[1].read(file) - value).abs() <= slack).all()):
            near[node] = best
    chosen = told.intersection(near) or set(near)
    least = min((near[node][0] for node in chosen), default=0.0)
    most = least + 2.0**-20 * float(file.double().abs().max())
    if chosen.isdisjoint(told):
        chosen = {node for node in chosen if near[node][0] <= most}
    return {node: near[node][1] for node in _first(chosen, reference)}


def _half_steps(tensor: Tensor) -> torch.Tensor:
    """By how much its codes round each element of a constant."""
    if not tensor.is_quantized or not len(tensor.scales):
        return torch.zeros(tensor.shape, dtype=torch.float64)
    scales = torch.from_numpy(tensor.scales.astype(np.float64))
    axis = tensor.quantized_dimension if scales.numel() > 1 else None
    along = shape_along(scales.numel(), len(tensor.shape), axis)
    return (scales * (0.5 + 2.0**-10)).reshape(along).expand(tensor.shape)


def _equal(
    file: torch.Tensor, nodes: Iterable[Node], reference: ReferenceGraph
) -> dict[Node, View]:
    """The nodes of whole numbers that are those of a constant: ids of which a table is made."""
    found: dict[Node, View] = {}
    for node in nodes:
        value = reference.constant(node, quantized=True)
        if not isinstance(value, torch.Tensor) or value.is_floating_point():
            continue
        if value.numel() != file.numel() or value.numel() < 2:
            continue
        if (value.dtype == torch.bool) is not (file.dtype == torch.bool):
            continue
        best = best_view(file, value)
        if best is not None and not best[0]:
            found[node] = best[1]
    return {node: found[node] for node in _first(found, reference)}


def _first(alike: Container[Node], reference: ReferenceGraph) -> Iterator[Node]:
    """Of nodes with the same values those that torch computes of none of the others."""
    held: set[Node] = set()
    made: set[Node] = set()
    for node in reference.nodes:
        if reference.varies(node):
            continue
        taken = set(node.all_input_nodes)
        if taken & made or (taken & held and not _passes(node)):
            made.add(node)
        elif node in alike:
            held.add(node)
            yield node
        elif taken & held:
            held.add(node)


def _passes(node: Node) -> bool:
    return is_quantize(node) or is_dequantize(node) or base_name(node) in VIEWS


def _parameters(node: Node, reference: ReferenceGraph) -> tuple[float, int] | None:
    """Scale and zero point that torch gives a constant of one scale."""
    while is_dequantize(node) and is_quantize(node.all_input_nodes[0]):
        node = node.all_input_nodes[0]
    for each in (node, *node.users):
        if base_name(each) == "quantize_per_tensor" and (each is node or each.args[0] is node):
            given: Sequence[Any] = each.args[1:3]
            scale, point = (
                reference.constant(n, quantized=True) if isinstance(n, Node) else n for n in given
            )
            return float(torch.tensor(float(scale))), int(point)
    return None


def computed_behind(
    reference: ReferenceGraph, starts: Mapping[int, Mapping[Node, View]]
) -> Iterator[Node]:
    """The constant nodes that torch computes from those that the file starts from."""
    first = {node for readings in starts.values() for node in readings}
    found: set[Node] = set()
    for node in reference.nodes:
        if node.op != "call_function" or reference.varies(node) or node in first:
            continue
        taken = set(node.all_input_nodes)
        passes = _passes(node)
        if passes and node.all_input_nodes[0] in first:
            first.add(node)
        elif taken & (found if passes else found | first):
            found.add(node)
            yield node


def precomputed_constants(
    graph: OpGraph,
    op: Op,
    reference: ReferenceGraph,
    given: Iterable[Node],
    read: Callable[[int], torch.Tensor],
    computed: Container[int],
) -> dict[Node, torch.Tensor]:
    """
    Constants of the reference as the file computes them for an op, where it does.

    A table of positions that is resized or looked up by constant indices is rounded at each step
    on its way; torch has it as it is. What is further from it than these steps round is left.

    Args:
        graph: The file.
        op: The op.
        reference: The torch graph.
        given: The nodes whose values the op takes.
        read: Gives a tensor of the file, dequantized.
        computed: What the file computes from constants alone.
    """
    subgraph = graph.subgraphs[op.subgraph]
    rounding = {index: _rounding(subgraph, index) for index in op.inputs if index in computed}
    found: dict[Node, torch.Tensor] = {}
    for index in (each for each, most in rounding.items() if most):
        file = read(index)
        if not file.is_floating_point():
            continue
        for taken in constants_behind(reference, given):
            plain = reference.constant(taken.node, quantized=False)
            if not isinstance(plain, torch.Tensor) or not plain.is_floating_point():
                continue
            best = best_view(file, plain)
            if best is None or reference.is_rounded(taken.node):
                continue
            value = best[1].read(file)
            if float((value - plain).abs().max()) <= rounding[index]:
                found[taken.node] = value.to(plain.dtype)
    return found


def _rounding(subgraph: Subgraph, index: int) -> float:
    """By how much what is computed from constants is rounded on its way."""
    total, stack, seen = 0.0, [index], {index}
    while stack:
        each = stack.pop()
        tensor, maker = subgraph.tensors[each], subgraph.producer.get(each)
        if tensor.is_quantized and len(tensor.scales):
            total += float(tensor.scales.max()) / 2
        for above in () if maker is None else maker.inputs:
            if above >= 0 and above not in seen:
                seen.add(above)
                stack.append(above)
    # float32's own part, and that of a step that is exactly half of one.
    return total * (1 + 2.0**-10)
