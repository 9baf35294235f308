"""What is wrong with an op's constants and parameters, told without running it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pytest_edgeq.localize.constants import (
    INPUT_AT,
    SAME_SCALE,
    check_bias,
    check_weight,
    input_scale_of,
    read_constant,
    to_file_layout,
    unexpected_qparams,
)
from pytest_edgeq.localize.kinds import CLAMPS, HEAVY, base_name, is_heavy
from pytest_edgeq.localize.match import Match
from pytest_edgeq.localize.reference import ReferenceGraph
from pytest_edgeq.localize.weights import (
    Taken,
    constants_behind,
    expected_codes,
    nearest_factor,
)
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
    pairs = list(_pairs(graph, steps, reference))
    floats = {
        taken.node.name: _array(reference.constant(taken.node, quantized=False))
        for _, taken, _ in pairs
    }
    for op, taken, step in pairs:
        on_weight = _weight_findings(
            graph, op, taken, reference, floats, narrowed=op.index in narrowed
        )
        on_bias = _bias_findings(graph, op, taken, step, reference)
        source = None if on_weight or not on_bias else _changed_input(graph, op)
        if source is not None:
            maker, text = source
            found[maker] = (text, *found.get(maker, ()))
        elif on_weight or on_bias:
            found[op.index] = (*found.get(op.index, ()), *on_weight, *on_bias)
    return found


def _changed_input(graph: OpGraph, op: Op) -> tuple[int, str] | None:
    """
    Tell of an op's input whose scale is not the one that its bias was written with.

    Returns:
        The index of the op that makes the input, or of this one where none does, and a sentence.
    """
    weight, roles = _weight(graph, op), roles_of(graph, op)
    taken_in = graph.tensor(op, op.inputs[INPUT_AT[op.name]])
    biases = [each for each in roles.biases if each.tensor.is_constant]
    if weight is None or not biases or len(taken_in.scales) != 1:
        return None
    written = input_scale_of(read_constant(graph, op, biases[0]), weight.tensor.scales)
    scale = float(taken_in.scales[0])
    if written is None or abs(scale / written - 1) <= SAME_SCALE:
        return None
    producer = graph.subgraphs[op.subgraph].producer
    maker = producer.get(taken_in.index)
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
    the same scale and zero point.)

    Returns:
        Findings by the index of the op.
    """
    found: dict[int, tuple[str, ...]] = {}
    for op in graph.subgraphs[subgraph].ops:
        if op.name not in _HANDS_ON or not op.inputs or op.inputs[0] < 0:
            continue
        taken, made = graph.tensor(op, op.inputs[0]), graph.tensor(op, op.outputs[0])
        if len(taken.scales) != 1 or len(made.scales) != 1:
            continue
        text = unexpected_qparams(
            "its output",
            float(made.scales[0]),
            int(made.zero_points[0]),
            float(taken.scales[0]),
            int(taken.zero_points[0]),
        )
        if text:
            found[op.index] = (f"{text.replace('reference', 'input')}: it only moves codes",)
    return found


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
    if not is_heavy(op.name) or len(taken.factors) > 1 or _adds_behind(step, taken.user):
        # What is added or multiplied behind is folded into the bias, or is not.
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
    if stored is not None and scale is not None and scales is not None:
        written = input_scale_of(stored, scales)
        if written is not None and abs(scale / written - 1) <= SAME_SCALE:
            scale = written
    folded = isinstance(node, Node) and "folded" in str(node.target)
    return check_bias(op.name, stored, own, input_scale=scale, weight_scales=scales, folded=folded)


def _adds_behind(step: Step, user: Node) -> bool:
    """Whether nodes behind the product add or multiply by what a converter may fold into it."""
    behind = step.nodes[step.nodes.index(user) + 1 :]
    front = step.nodes[: step.nodes.index(user)]
    plain = {*CLAMPS, "view", "reshape", "permute", "transpose", "squeeze", "unsqueeze"}
    return any(
        base_name(node) in ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_", "rsub")
        or (base_name(node) not in plain and base_name(node) in ("batch_norm",))
        for node in (*behind, *front)
    )


def parameter_findings(
    graph: OpGraph, matches: Mapping[int, Match], reference: ReferenceGraph, subgraph: int
) -> dict[int, tuple[str, ...]]:
    """
    Hold the scales and zero points of activations against the simulated graph's.

    A tensor of the file must have those of a quantize node that it stands for, or be followed by
    one that has.

    Returns:
        Findings by tensor index.
    """
    tensors = graph.subgraphs[subgraph].tensors
    standing: dict[Node, list[int]] = {}
    for index, match in matches.items():
        for reading in match.readings:
            standing.setdefault(reading.node, []).append(index)
    found: dict[int, tuple[str, ...]] = {}
    for index, match in matches.items():
        # Of several quantize nodes in a row the converter keeps one.
        expected = {
            reading.node: parameters
            for reading in match.readings
            if (parameters := reference.quantization(reading.node)) is not None
        }
        tensor = tensors[index]
        if not expected or not tensor.is_quantized or match.same is not None:
            continue
        alike = {other for node in expected for other in standing[node]}
        if any(_has(tensors[other], each) for other in alike for each in expected.values()):
            # Itself, or a QUANTIZE behind what has a scale that TFLite fixes.
            continue
        scale, zero_point, _ = list(expected.values())[-1]
        text = unexpected_qparams(
            "its output", float(tensor.scales[0]), int(tensor.zero_points[0]), scale, zero_point
        )
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
        for mine, its in zip(op.outputs, other.outputs, strict=False):
            tensor, wanted = ours.tensors[mine], theirs.tensors[its]
            if len(tensor.scales) != 1 or len(wanted.scales) != 1:
                continue
            text = unexpected_qparams(
                "its output",
                float(tensor.scales[0]),
                int(tensor.zero_points[0]),
                float(wanted.scales[0]),
                int(wanted.zero_points[0]),
            )
            told += [text] if text else []
        told += _changed_constants(edge.graph, op, origin.graph, other)
        if told:
            found[op.index] = tuple(told)
    return found


def _changed_constants(graph: OpGraph, op: Op, origin: OpGraph, other: Op) -> list[str]:
    told = []
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


def _has(tensor: Tensor, parameters: tuple[float, int, str]) -> bool:
    scale, zero_point, _ = parameters
    return (
        tensor.is_quantized
        and len(tensor.scales) == 1
        and tensor.scales[0] == np.float32(scale)
        and int(tensor.zero_points[0]) == zero_point
    )


def _array(value: torch.Tensor) -> Array:
    array: Array = value.detach().numpy()
    return array
