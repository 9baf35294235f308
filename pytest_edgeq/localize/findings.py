"""What is wrong with an op's constants and parameters, told without running it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pytest_edgeq.localize.biases import (
    INPUT_AT,
    SAME_SCALE,
    check_bias,
    qparams,
    unexpected_qparams,
    written_scale,
)
from pytest_edgeq.localize.constants import check_weight
from pytest_edgeq.localize.kinds import HEAVY, VIEWS, base_name, is_heavy
from pytest_edgeq.localize.layouts import to_file_layout
from pytest_edgeq.localize.match import Match
from pytest_edgeq.localize.reference import ReferenceGraph, is_dequantize, is_quantize
from pytest_edgeq.localize.stored import read_constant
from pytest_edgeq.localize.weights import (
    Taken,
    constants_behind,
    expected_codes,
    nearest_factor,
    product_weights,
)
from pytest_edgeq.tflite.boundary import code_range
from pytest_edgeq.tflite.edge import EdgeFile
from pytest_edgeq.tflite.graph import Op, OpGraph, Tensor
from pytest_edgeq.tflite.roles import StoredTensor, roles_of

if TYPE_CHECKING:
    from pytest_edgeq.localize.local import Step

__all__ = ["constant_findings", "moved_findings", "origin_findings", "parameter_findings"]

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
    matches = {match.tensor: match for step in steps for match in (step.match, *step.sources)}
    # Those of all layers, so that one in another's place is told.
    nodes = {taken.node for _, taken, _ in pairs} | set(product_weights(reference))
    floats = {
        node.name: _array(reference.constant(node, quantized=False))
        for node in sorted(nodes, key=reference.order)
    }
    for op, taken, step in pairs:
        on_weight = _weight_findings(
            graph, op, taken, reference, floats, narrowed=op.index in narrowed
        )
        on_bias = _bias_findings(graph, op, taken, step, reference)
        scales = None if on_weight else written_scale(graph, op)
        if scales is None or abs(scales[0] / scales[1] - 1) <= SAME_SCALE:
            source = None
        else:
            read = _misread(graph, op, taken, scales[1], matches)
            source = (op.index, read) if read else _changed_input(graph, op, *scales)
        if source is not None:
            maker, text = source
            found[maker] = (text, *found.get(maker, ()))
        elif on_weight or on_bias:
            found[op.index] = (*found.get(op.index, ()), *on_weight, *on_bias)
    return found


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


def _changed_input(graph: OpGraph, op: Op, scale: float, written: float) -> tuple[int, str]:
    """
    Tell of an op's input whose scale is not the one that its bias was written with.

    Returns:
        The index of the op that makes the input, or of this one where none does, and a sentence.
    """
    producer = graph.subgraphs[op.subgraph].producer
    maker = producer.get(op.inputs[INPUT_AT[op.name]])
    while maker is not None and maker.inputs[0] in producer and _hands_on(graph, maker):
        maker = producer[maker.inputs[0]]
    text = (
        f"its output has scale {scale:.6g}, which is {scale / written:.4g} × the one that the bias "
        f"of {op.name} #{op.index} was written with ({written:.6g})"
    )
    return (op.index if maker is None else maker.index), text


def _hands_on(graph: OpGraph, op: Op) -> bool:
    """Whether an op gives the codes that it takes, in the scale that it takes them in."""
    if op.name not in _HANDS_ON:
        return False
    taken, made = graph.tensor(op, op.inputs[0]), graph.tensor(op, op.outputs[0])
    same = np.array_equal(taken.scales, made.scales)
    return same and np.array_equal(taken.zero_points, made.zero_points)


def moved_findings(graph: OpGraph, subgraph: int) -> dict[int, tuple[str, ...]]:
    """
    Tell of ops that only move codes and say that these mean something else behind them.

    (https://ai.google.dev/edge/litert/models/quantization_spec: inputs and outputs must all have
    the same scale and zero point.) And of those whose kernels know one scale alone.

    Returns:
        Findings by the index of the op.
    """
    found: dict[int, tuple[str, ...]] = {}
    for op in graph.subgraphs[subgraph].ops:
        fixed = _FIXED.get((op.name, graph.tensor(op, op.outputs[0]).dtype)) if op.outputs else None
        if fixed is not None:
            given = qparams(graph.tensor(op, op.outputs[0]))
            text = given and unexpected_qparams("its output", given, fixed, "the kernel")
            if text:
                found[op.index] = (text,)
        if op.name not in _HANDS_ON or not op.inputs or op.inputs[0] < 0:
            continue
        taken, made = (qparams(graph.tensor(op, i)) for i in (op.inputs[0], op.outputs[0]))
        if taken is None or made is None:
            continue
        text = unexpected_qparams("its output", made, taken, "the input")
        if text:
            found[op.index] = (f"{text}: it only moves codes",)
    return found


# What kernels write whatever the file says (tensorflow/lite/kernels/activations.cc).
_FIXED = {
    ("LOGISTIC", "int8"): (1 / 256, -128),
    ("SOFTMAX", "int8"): (1 / 256, -128),
}

# Ops whose output must have their input's scale.
_HANDS_ON = {
    *("TRANSPOSE", "RESHAPE", "PAD", "MAX_POOL_2D", "SQUEEZE", "EXPAND_DIMS", "SLICE"),
    *("STRIDED_SLICE", "AVERAGE_POOL_2D", "SPLIT"),
}


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
    floats: Mapping[str, Array],
    *,
    narrowed: bool,
) -> tuple[str, ...]:
    stored = _weight(graph, op)
    assert stored is not None, "chosen by it"
    constant = read_constant(graph, op, stored)
    kind = base_name(taken.user)
    own = floats[taken.node.name]
    others = {name: each for name, each in floats.items() if name != taken.node.name}
    if reference.is_rounded(taken.node):
        expected = expected_codes(op, constant, taken, reference)
        if expected is None:
            return ()
        return check_weight(
            op.name, constant, expected=expected, others=others, torch_op=kind, narrowed=narrowed
        )
    if not to_file_layout(op.name, own, constant.values.shape, torch_op=kind):
        return ()
    factor = nearest_factor(op, constant, taken, torch.from_numpy(own))
    if factor is None:
        return ()
    return check_weight(op.name, constant, own * factor, others=others, torch_op=kind)


def _bias_findings(
    graph: OpGraph, op: Op, taken: Taken, step: Step, reference: ReferenceGraph
) -> tuple[str, ...]:
    if not is_heavy(op.name) or len(taken.factors) > 1 or _may_be_folded(step, taken.user):
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
    if both is not None and abs(both[0] / both[1] - 1) <= SAME_SCALE:
        scale = both[1]
    folded = isinstance(node, Node) and "folded" in str(node.target)
    return check_bias(op.name, stored, own, input_scale=scale, weight_scales=scales, folded=folded)


def _may_be_folded(step: Step, user: Node) -> bool:
    """Whether nodes beside the product add or multiply by what a converter may fold into it."""
    return any(base_name(node) in _FOLDS for node in step.nodes if node is not user)


_FOLDS = {"add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_", "rsub", "batch_norm"}


def parameter_findings(
    graph: OpGraph,
    matches: Mapping[int, Match],
    reference: ReferenceGraph,
    subgraph: int,
    *,
    vague: Container[int] = (),
) -> dict[int, tuple[str, ...]]:
    """
    Hold the scales and zero points of activations against the simulated graph's.

    A tensor of the file must have those of a quantize node that it stands for, or be followed by
    one that has.

    Args:
        graph: The file.
        matches: What each matched tensor stands for.
        reference: The simulated graph.
        subgraph: Index of the subgraph.
        vague: Tensors whose values hardly tell a node.

    Returns:
        Findings by tensor index.
    """
    tensors = graph.subgraphs[subgraph].tensors
    standing: dict[Node, list[int]] = {}
    users: dict[int, list[Op]] = {}
    for index, match in matches.items():
        for reading in match.readings:
            standing.setdefault(reading.node, []).append(index)
    for op in graph.subgraphs[subgraph].ops:
        for index in op.inputs:
            users.setdefault(index, []).append(op)

    def wanted(index: int) -> bool:
        """Whether a tensor has the parameters of a quantize node that it stands for."""
        nodes = [each.node for each in matches[index].readings] if index in matches else []
        given = (reference.quantization(node) for node in nodes)
        return any(each is not None and _has(tensors[index], each) for each in given)

    def carried(index: int) -> bool:
        """
        Whether all that takes a tensor keeps its scale, up to one that the reference has there.

        The converter carries the scale of a concatenation through a resize up to what makes it.
        """
        makes = [op.outputs[0] for op in users.get(index, ()) if op.name in _KEEPS_SCALE]
        if not makes or len(makes) < len(users[index]):
            return False
        own = qparams(tensors[index])
        return all(qparams(tensors[i]) == own and (wanted(i) or carried(i)) for i in makes)

    quantizations = map(reference.quantization, reference.nodes)
    every = {each for each in quantizations if each is not None}
    found: dict[int, tuple[str, ...]] = {}
    for index, match in matches.items():
        # Of several quantize nodes in a row the converter keeps one.
        expected = {
            reading.node: parameters
            for reading in match.readings
            if (parameters := reference.quantization(reading.node)) is not None
        }
        tensor = tensors[index]
        actual = qparams(tensor)
        if not expected or actual is None or match.same is not None:
            continue
        alike = {other for node in expected for other in standing[node]}
        if any(_has(tensors[other], each) for other in alike for each in expected.values()):
            # Itself, or a QUANTIZE behind what has a scale that TFLite fixes.
            continue
        if index in vague and any(_has(tensor, each) for each in every):
            # Values that hardly tell a node were taken for another one's.
            continue
        wanted_here = list(expected.values())[-1]
        if _is_wider(tensor, actual, wanted_here) and carried(index):
            continue
        text = unexpected_qparams("its output", actual, wanted_here)
        found[index] = (text,) if text else ()
    return found


def origin_findings(edge: EdgeFile, origin: EdgeFile) -> dict[int, tuple[str, ...]]:
    """
    Hold activations' parameters and constants against those of the file that the flow made.

    Scales come from the calibration, so where no simulated graph has them, that file stands for it.

    Returns:
        Findings by the index of the op; none where the ops are others.
    """
    ours, theirs = (each.graph.subgraphs[each.signature.subgraph] for each in (edge, origin))
    if [op.name for op in ours.ops] != [op.name for op in theirs.ops]:
        return {}
    found: dict[int, tuple[str, ...]] = {}
    for op, other in zip(ours.ops, theirs.ops, strict=True):
        told = []
        # A damaged file may give an op fewer outputs or operands: `same` tells of that.
        for mine, its in zip(op.outputs, other.outputs, strict=False):
            actual, wanted = qparams(ours.tensors[mine]), qparams(theirs.tensors[its])
            if actual is None or wanted is None:
                continue
            text = unexpected_qparams("its output", actual, wanted)
            told += [text] if text else []
        told += _changed_constants(edge.graph, op, origin.graph, other)
        if told:
            found[op.index] = tuple(told)
    return found


def _changed_constants(graph: OpGraph, op: Op, origin: OpGraph, other: Op) -> list[str]:
    told = []
    # The first that both have: of another number of operands `same` tells.
    for place, (mine, its) in enumerate(zip(op.inputs, other.inputs, strict=False)):
        if mine < 0 or its < 0:
            continue
        tensor, wanted = graph.tensor(op, mine), origin.tensor(other, its)
        if not tensor.is_constant or not wanted.is_constant or tensor.is_external:
            continue
        held, given = graph.constant(tensor), origin.constant(wanted)
        if not np.array_equal(held, given):
            count = int((held != given).sum()) if held.shape == given.shape else len(held)
            told.append(
                f"its constant operand {place} is not the one that the flow wrote: {count} of "
                f"{len(held)} bytes differ"
            )
    return told


# Ops whose kernels want one scale of all that they take and give.
_KEEPS_SCALE = {
    *_HANDS_ON,
    *("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR", "CONCATENATION", "PACK", "GATHER"),
}


def _is_wider(tensor: Tensor, actual: tuple[float, int], wanted: tuple[float, int]) -> bool:
    """Whether a tensor's codes reach as far as others would, to half a step."""
    low, high = code_range(tensor.dtype)
    (scale, zero_point), (narrow, point) = actual, wanted
    slack = scale / 2
    return (low - zero_point) * scale <= (low - point) * narrow + slack and (
        high - point
    ) * narrow - slack <= (high - zero_point) * scale


def _has(tensor: Tensor, parameters: tuple[float, int]) -> bool:
    scale, zero_point = parameters
    return qparams(tensor) == (float(np.float32(scale)), zero_point)


def _array(value: torch.Tensor) -> Array:
    array: Array = value.detach().numpy()
    return array
