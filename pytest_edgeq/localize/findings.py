"""What is wrong with an op's constants and parameters, told without running it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pytest_edgeq.localize.biases import (
    INPUT_AT,
    SAME_SCALE,
    check_bias,
    qparams,
    written_scale,
)
from pytest_edgeq.localize.constants import FOLDED, check_weight, hold_all
from pytest_edgeq.localize.kinds import (
    HEAVY,
    HEAVY_OPS,
    VIEWS,
    base_name,
    is_dequantize,
    is_quantize,
)
from pytest_edgeq.localize.layouts import to_file_layout
from pytest_edgeq.localize.matches import Match
from pytest_edgeq.localize.reference import ReferenceGraph
from pytest_edgeq.localize.scales import changed_input, costs_no_bit, is_shared
from pytest_edgeq.localize.weights import (
    Taken,
    constants_behind,
    expected_codes,
    nearest_factor,
    product_weights,
)
from pytest_edgeq.tflite.constants import Constant, read_constant
from pytest_edgeq.tflite.graph import Op, OpGraph
from pytest_edgeq.tflite.roles import StoredTensor, roles_of

if TYPE_CHECKING:
    from pytest_edgeq.localize.local import Step

__all__ = [
    "constant_findings",
]

Node = torch.fx.Node
Array = np.ndarray[Any, Any]

_BIAS_AT = {"addmm": 0, "baddbmm": 0}


def constant_findings(
    graph: OpGraph, steps: Iterable[Step], reference: ReferenceGraph, *, narrowed: Container[int]
) -> dict[int, tuple[str, ...]]:
    """
    Hold the weights and biases of all matched ops against the reference's.

    Args:
        graph: The file.
        steps: What is matched.
        reference: The torch graph.
        narrowed: Indices of dynamic ops, of whose weights the lowest code was taken for the next
            one on purpose.

    Returns:
        Findings by the index of the op that holds the constant.
    """
    found: dict[int, tuple[str, ...]] = {}
    steps = list(steps)
    pairs = list(_pairs(graph, steps, reference))
    kept = functools.cache(lambda: hold_all(_weights(graph, pairs, reference)))
    matches = {match.tensor: match for step in steps for match in (step.match, *step.sources)}
    # Those of all layers, so that one in another's place is told.
    nodes = {taken.node for _, taken, _ in pairs} | set(product_weights(reference))
    floats = {
        node: _array(reference.constant(node, quantized=False))
        for node in sorted(nodes, key=reference.order)
    }
    for op, taken, step in pairs:
        on_weight = _weight_findings(
            graph, op, taken, reference, floats, narrowed=op.index in narrowed, kept=kept
        )
        if on_weight and (
            _lies_in_another_order(graph, op, taken, step, reference)
            or _is_as_it_is(graph, op, taken, step, floats[taken.node])
        ):
            on_weight = ()
        on_bias = _bias_findings(graph, op, taken, step, reference)
        scales = None if on_weight else written_scale(graph, op)
        source = None
        if scales is not None and not _is_written_for(graph, op, step, reference, *scales):
            read = _misread(graph, op, taken, scales[1], matches)
            source = (op.index, read) if read else changed_input(graph, op, *scales)
        if source is not None:
            maker, text = source
            found[maker] = (text, *found.get(maker, ()))
        elif on_weight or on_bias:
            found[op.index] = (*found.get(op.index, ()), *on_weight, *on_bias)
    return found


def _is_written_for(
    graph: OpGraph, op: Op, step: Step, reference: ReferenceGraph, scale: float, written: float
) -> bool:
    """Whether a bias was written for the scale that an op's input has, or what is off is little."""
    if abs(scale / written - 1) <= SAME_SCALE:
        return True
    measured, limits = step.measured, step.limits
    if limits is None or not measured.elements or not is_shared(graph, op, reference):
        return False
    return costs_no_bit(measured.rms, (limits.scale, limits.zero_point))


def _misread(
    graph: OpGraph, op: Op, taken: Taken, written: float, matches: Mapping[int, Match]
) -> str | None:
    """Tell of an op that reads another tensor than the one that its bias was written for."""
    subgraph = graph.subgraphs[op.subgraph]
    given = subgraph.tensors[op.inputs[INPUT_AT[op.name]]]
    wanted: set[Node] = set()
    node = taken.user.args[0]
    while isinstance(node, Node) and node not in wanted:
        wanted.add(node)
        if base_name(node) in VIEWS or is_quantize(node) or is_dequantize(node):
            node = node.args[0]
    for index, match in matches.items():
        tensor = subgraph.tensors[index]
        parameters = qparams(tensor)
        if index == given.index or tensor.shape != given.shape or parameters is None:
            continue
        if abs(parameters[0] / written - 1) > SAME_SCALE or match.op is None:
            continue
        if match.op.index < op.index and wanted.intersection(r.node for r in match.readings):
            maker = subgraph.producer.get(given.index)
            read = f"{maker.name} #{maker.index}'s output" if maker else f"the input {given.name!r}"
            return (
                f"it reads {read} (scale {float(given.scales[0]):.6g}), and its bias was written "
                f"for {match.op.name} #{match.op.index}'s ({written:.6g})"
            )
    return None


def _pairs(
    graph: OpGraph, steps: Iterable[Step], reference: ReferenceGraph
) -> Iterator[tuple[Op, Taken, Step]]:
    """Each op with a weight, with the one node of its step that takes one."""
    for step in steps:
        if step.match.same is not None:
            continue
        ops = [graph.subgraphs[step.op.subgraph].ops[index] for index in step.match.ops]
        with_weight = [op for op in ops if _weight(graph, op) is not None]
        users = [n for n in step.nodes if base_name(n) in HEAVY or base_name(n) == "embedding"]
        if len(with_weight) != 1 or len(users) != 1:
            continue
        given = {reading.node for source in step.sources for reading in source.readings}
        for taken in constants_behind(reference, given):
            if taken.user is users[0]:
                yield with_weight[0], taken, step


def _weight(graph: OpGraph, op: Op) -> StoredTensor | None:
    """The one constant that an op multiplies by or looks up in."""
    weights = [each for each in roles_of(graph, op).weights if each.tensor.is_constant]
    return weights[0] if len(weights) == 1 and not weights[0].tensor.is_sparse else None


def _weight_findings(
    graph: OpGraph,
    op: Op,
    taken: Taken,
    reference: ReferenceGraph,
    floats: Mapping[Node, Array],
    *,
    narrowed: bool,
    kept: Callable[[], bool],
) -> tuple[str, ...]:
    stored = _weight(graph, op)
    assert stored is not None, "chosen by it"
    constant = read_constant(graph, op, stored)
    kind = taken.kind
    own = floats[taken.node]
    others = {_called(node): each for node, each in floats.items() if node is not taken.node}
    if reference.is_rounded(taken.node):
        expected = expected_codes(op, constant, taken, reference)
        if expected is None:
            return ()
        return check_weight(
            op.name, constant, expected=expected, others=others, torch_op=kind, narrowed=narrowed
        )
    scaled = _as_folded(op, constant, taken, own)
    if scaled is None:
        return ()
    return check_weight(op.name, constant, scaled, others=others, torch_op=kind, kept=kept)


def _as_folded(op: Op, constant: Constant, taken: Taken, own: Array) -> Array | None:
    """The reference's weight times what the file has folded into it; None in no layout of it."""
    kind = taken.kind
    if not to_file_layout(op.name, own, constant.values.shape, torch_op=kind):
        return None
    factor = nearest_factor(op, constant, taken, torch.from_numpy(own))
    return None if factor is None else own * factor


def _weights(
    graph: OpGraph, pairs: Iterable[tuple[Op, Taken, Step]], reference: ReferenceGraph
) -> Iterator[tuple[Constant, Array]]:
    """The file's weights that are quantized, with the reference's in their layout."""
    for op, taken, _ in pairs:
        stored = _weight(graph, op)
        assert stored is not None, "chosen by it"
        constant = read_constant(graph, op, stored)
        if constant.scales is None:
            continue
        own = _array(reference.constant(taken.node, quantized=False))
        scaled = _as_folded(op, constant, taken, own)
        if scaled is None:
            continue
        shape = constant.values.shape
        for laid_out in to_file_layout(op.name, scaled, shape, torch_op=taken.kind)[:1]:
            yield constant, laid_out


def _called(weight: Node) -> str:
    """The layer whose parameter a weight is; its own name where it is made of more."""
    above = weight
    while above.op == "call_function" and len(above.all_input_nodes) > 0:
        if not (is_quantize(above) or is_dequantize(above)):
            return weight.name
        above = above.all_input_nodes[0]
    return str(above.target).removesuffix(".weight") if above.op == "get_attr" else weight.name


def _lies_in_another_order(
    graph: OpGraph, op: Op, taken: Taken, step: Step, reference: ReferenceGraph
) -> bool:
    """
    Whether a matrix has its input channels in another order, as has what it is multiplied by.

    Of a product over several axes at once the converter flattens them in an order of its own. That
    both sides have it is told by the result, which is that of the reference's matrix.
    """
    stored = _weight(graph, op)
    if op.name != "FULLY_CONNECTED" or stored is None or not step.measured.excess_lsb <= 0:
        return False
    constant = read_constant(graph, op, stored)
    own = _array(reference.constant(taken.node, quantized=False))
    kind = taken.kind
    steps = 1.0 if constant.scales is None else constant.scales
    rounding = (
        FOLDED * np.abs(constant.floats) + (0.5 if constant.scales is not None else 0) * steps
    )
    for laid_out in to_file_layout(op.name, own, constant.values.shape, torch_op=kind):
        apart = np.abs(np.sort(constant.floats, -1) - np.sort(laid_out, -1))
        if (apart <= rounding * (1 + FOLDED)).all():
            return True
    return False


def _is_as_it_is(graph: OpGraph, op: Op, taken: Taken, step: Step, own: Array) -> bool:
    """
    Whether a weight is the reference's, and what would be folded into it is done by ops in front.

    That they do something else than torch is not the weight's fault.
    """
    ops, stored = graph.subgraphs[op.subgraph].ops, _weight(graph, op)
    before = {ops[index].name for index in step.match.ops if index < op.index}
    if stored is None or before.isdisjoint(("MUL", "DIV", "ADD", "SUB")):
        return False
    constant, kind = read_constant(graph, op, stored), base_name(taken.user)
    return not check_weight(op.name, constant, own, torch_op=kind)


def _bias_findings(
    graph: OpGraph, op: Op, taken: Taken, step: Step, reference: ReferenceGraph
) -> tuple[str, ...]:
    if op.name not in HEAVY_OPS or len(taken.factors) > 1 or _may_be_folded(step, taken.user):
        # What is added or multiplied beside it is folded into the bias, or is not.
        return ()
    biases = [each for each in roles_of(graph, op).biases if each.tensor.is_constant]
    if len(biases) > 1 or (biases and biases[0].tensor.is_sparse):
        return ()
    stored = read_constant(graph, op, biases[0]) if biases else None
    place = _BIAS_AT.get(base_name(taken.user), 2)
    node = taken.user.args[place] if len(taken.user.args) > place else None
    if base_name(taken.user) in ("mm", "bmm", "matmul", "einsum", "embedding"):
        node = None
    own = None
    if isinstance(node, Node):
        if reference.varies(node):
            return ()
        own = _array(reference.constant(node, quantized=False)).reshape(-1)
    if stored is None and own is None:
        return ()
    if stored is not None and own is not None and stored.values.size != own.size:
        return ()
    weight = _weight(graph, op)
    assert weight is not None, "chosen by it"
    taken_in = graph.tensor(op, op.inputs[INPUT_AT[op.name]])
    scale = float(taken_in.scales[0]) if taken_in.is_quantized else None
    scales = weight.tensor.scales if taken_in.is_quantized else None
    both = written_scale(graph, op)
    alike = both is not None and abs(both[0] / both[1] - 1) <= SAME_SCALE
    if both is not None and (alike or is_shared(graph, op, reference)):
        scale = both[1]
    folded = isinstance(node, Node) and "folded" in str(node.target)
    return check_bias(op.name, stored, own, input_scale=scale, weight_scales=scales, folded=folded)


def _may_be_folded(step: Step, user: Node) -> bool:
    """Whether nodes beside the product add or multiply by what a converter may fold into it."""
    return any(base_name(node) in _FOLDS for node in step.nodes if node is not user)


_FOLDS = {"add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_", "rsub", "batch_norm"}


def _array(value: torch.Tensor) -> Array:
    array: Array = value.detach().numpy()
    return array
