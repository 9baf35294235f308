"""Whether activations have the scales that they must, told by what makes them and takes them."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from pytest_edgeq.localize.biases import INPUT_AT, qparams, unexpected_qparams
from pytest_edgeq.localize.kinds import IDENTITIES, base_name
from pytest_edgeq.localize.matches import Match
from pytest_edgeq.localize.moves import MOVING
from pytest_edgeq.localize.reference import ReferenceGraph
from pytest_edgeq.numerics.health import CLIPPED_SHARE_LIMIT
from pytest_edgeq.tflite.boundary import code_range
from pytest_edgeq.tflite.graph import Op, OpGraph, Tensor

__all__ = [
    "changed_input",
    "costs_no_bit",
    "hands_on",
    "is_shared",
    "moved_findings",
    "parameter_findings",
]

Node = torch.fx.Node

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

_KEEPS_SCALE = {
    *_HANDS_ON,
    *("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR", "CONCATENATION", "PACK", "GATHER"),
    *("MIRROR_PAD", "REVERSE_V2", "BROADCAST_TO", "TILE", "SELECT", "SELECT_V2", "UNPACK"),
    *("SPLIT_V", "SPACE_TO_DEPTH", "DEPTH_TO_SPACE", "MAXIMUM", "MINIMUM", "REDUCE_MAX"),
}


def parameter_findings(
    graph: OpGraph,
    matches: Mapping[int, Match],
    reference: ReferenceGraph,
    subgraph: int,
    *,
    vague: Container[int] = (),
    rms: Mapping[int, float] = MappingProxyType({}),
    beyond: Mapping[int, float] = MappingProxyType({}),
    untaken: Container[int] = (),
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
        rms: By tensor how far off it is by its own op, as measured.
        beyond: By tensor which share of torch's values lie outside of its range.
        untaken: Tensors of which what is lost is not taken by what stands behind them.

    Returns:
        Findings by tensor index.
    """
    tensors = graph.subgraphs[subgraph].tensors
    standing: dict[Node, list[int]] = {}
    consumers = graph.subgraphs[subgraph].consumers
    for index, match in matches.items():
        for reading in match.readings:
            standing.setdefault(reading.node, []).append(index)

    def wanted(index: int) -> bool:
        """Whether a tensor has the parameters of a quantize node that it stands for."""
        nodes = [each.node for each in matches[index].readings] if index in matches else []
        given = (reference.quantization(node) for node in nodes)
        return any(each is not None and _has(tensors[index], each) for each in given)

    def carried(index: int) -> bool:
        """
        Whether what takes a tensor keeps its scale, up to one that the reference has there.

        The converter carries the scale of a concatenation through a resize up to what makes it. An
        image whose pixels are averaged has a narrower range: of what this cuts in front, as much
        may lie outside as of an input.
        """
        keep = [op for op in consumers[index] if op.name in _KEEPS_SCALE]
        own = qparams(tensors[index])
        # Of what is joined or compared each has the scale of one.
        beside = {i for op in keep for i in op.inputs if i >= 0 and i != index}
        if any(qparams(tensors[i]) == own and wanted(i) for i in beside):
            return True
        makes = [op.outputs[0] for op in keep]
        return any(qparams(tensors[i]) == own and (wanted(i) or carried(i)) for i in makes)

    quantizations = map(reference.quantization, reference.nodes)
    every = {each for each in quantizations if each is not None}
    found: dict[int, tuple[str, ...]] = {}
    for index, match in matches.items():
        text = _unexpected_channels(tensors[index], match, reference)
        if text:
            found[index] = (text,)
        # Of several quantize nodes in a row the converter keeps one.
        expected = {
            reading.node: parameters
            for reading in match.readings
            if (parameters := reference.quantization(reading.node)) is not None
        }
        tensor = tensors[index]
        actual = qparams(tensor)
        if actual is None or match.same is not None:
            continue
        if not expected:
            text = _too_narrow(tensor, match, reference, rms.get(index))
            if text:
                found[index] = (text,)
            continue
        alike = {other for node in expected for other in standing[node]}
        if any(_has(tensors[other], each) for other in alike for each in expected.values()):
            # Itself, or a QUANTIZE behind what has a scale that TFLite fixes.
            continue
        if index in vague and any(_has(tensor, each) for each in every):
            # Values that hardly tell a node were taken for another one's.
            continue
        wanted_here = list(expected.values())[-1]
        harmless = (
            _is_wider(tensor, actual, wanted_here)
            or costs_no_bit(rms.get(index), wanted_here)
            or beyond.get(index, 1.0) <= CLIPPED_SHARE_LIMIT
            or index in untaken
        )
        if (harmless and carried(index)) or _only_keeps(match.op, tensors):
            continue
        text = unexpected_qparams("its output", actual, wanted_here)
        found[index] = (text,) if text else ()
    return found


def _is_wider(tensor: Tensor, actual: tuple[float, int], wanted: tuple[float, int]) -> bool:
    """Whether a tensor's codes reach as far as others would, to half a step."""
    low, high = code_range(tensor.dtype)
    (scale, zero_point), (narrow, point) = actual, wanted
    slack = scale / 2
    return (low - zero_point) * scale <= (low - point) * narrow + slack and (
        high - point
    ) * narrow - slack <= (high - zero_point) * scale


def costs_no_bit(rms: float | None, wanted: tuple[float, int]) -> bool:
    """
    Whether values are nearer than twice as far as the reference's own scale rounds them.

    What is carried up from behind may be somewhat narrower, as that of an image whose pixels are
    averaged: what it cuts off counts by how far off it is.
    """
    return rms is not None and rms <= 2 * wanted[0] / math.sqrt(12)


def _unexpected_channels(tensor: Tensor, match: Match, reference: ReferenceGraph) -> str | None:
    """Hold the scales of a weight that the file computes at each run against the reference's."""
    if match.op is None or match.op.name != "QUANTIZE" or len(tensor.scales) < 2:
        return None
    for node in (reading.node for reading in match.readings):
        given = node.args[1] if base_name(node) == "quantize_per_channel" else None
        if not isinstance(given, Node) or reference.varies(given):
            continue
        wanted = reference.constant(given, quantized=True).detach().numpy().astype(np.float32)
        if wanted.shape == tensor.scales.shape and (wanted != tensor.scales).any():
            worst = int(np.abs(np.log(tensor.scales / wanted)).argmax())
            return (
                f"its output has scale {tensor.scales[worst]:.6g} in channel {worst}, which is "
                f"{tensor.scales[worst] / wanted[worst]:.4g} × the reference's {wanted[worst]:.6g}"
            )
    return None


def _too_narrow(
    tensor: Tensor, match: Match, reference: ReferenceGraph, rms: float | None
) -> str | None:
    """
    Tell of values that the reference leaves in float, cut to the range of a part of them.

    It quantizes the parts behind (of weights, each by itself), and the converter gives the whole
    the scale of one. Where that of another is wider, what is cut off is lost to it.
    """
    parts: dict[tuple[float, int], Node] = {}
    queue = [reading.node for reading in match.readings]
    for node in queue:
        for user in node.users:
            given = reference.quantization(user)
            if given is not None:
                parts.setdefault(given, node)
            elif base_name(user) in MOVING and user not in queue:
                queue.append(user)
    own, actual = [node for given, node in parts.items() if _has(tensor, given)], qparams(tensor)
    if not own or actual is None or match.op is None or match.op.name in IDENTITIES:
        return None
    widest = max(parts)
    if _is_wider(tensor, actual, widest) or rms is None or costs_no_bit(rms, widest):
        return None
    low, high = code_range(tensor.dtype)
    (floor, ceiling), (least, greatest) = (
        ((low - point) * scale, (high - point) * scale) for scale, point in (actual, widest)
    )
    text = (
        f"its range [{floor:.3g}, {ceiling:.3g}] is too narrow: it has the scale of "
        f"{own[0].name}, which torch takes from it, and gives {parts[widest].name} "
        f"[{least:.3g}, {greatest:.3g}]"
    )
    return text.replace("-", "−")


def _only_keeps(op: Op | None, tensors: Sequence[Tensor]) -> bool:
    """Whether an op has to give the scale that it takes, and does: what made that one is told."""
    if op is None or op.name not in _KEEPS_SCALE:
        return False
    taken = [tensors[i] for i in op.inputs if i >= 0 and not tensors[i].is_constant]
    given = {qparams(tensors[i]) for i in op.outputs}
    return bool(taken) and given == {qparams(each) for each in taken} and len(given) == 1


def _has(tensor: Tensor, parameters: tuple[float, int]) -> bool:
    scale, zero_point = parameters
    return qparams(tensor) == (float(np.float32(scale)), zero_point)


def is_shared(graph: OpGraph, op: Op, reference: ReferenceGraph | None = None) -> bool:
    """
    Whether what an op takes is taken by one, too, that hands its scale on.

    The converter (litert-torch 0.10.0) gives it the scale of a pool or a resize behind, and leaves
    the bias of a convolution beside as it was written, for the scale that it was observed to have.
    Where the reference has that scale, what hands it on need not be right.
    """
    subgraph = graph.subgraphs[op.subgraph]
    index, above = op.inputs[INPUT_AT[op.name]], {op.index}
    own = qparams(subgraph.tensors[index])
    while True:
        others = (each for each in subgraph.ops if index in each.inputs)
        keeping = [o for o in others if o.name in _KEEPS_SCALE and o.index not in above]
        if any(qparams(subgraph.tensors[each.outputs[0]]) == own for each in keeping):
            return True
        if keeping and reference is not None:
            given = filter(None, map(reference.quantization, reference.nodes))
            if any(_has(subgraph.tensors[index], each) for each in given):
                return True
        maker = subgraph.producer.get(index)
        if maker is None or maker.name not in IDENTITIES or not hands_on(graph, maker):
            return False
        index = maker.inputs[0]
        above.add(maker.index)


def hands_on(graph: OpGraph, op: Op) -> bool:
    """Whether an op gives the codes that it takes, in the scale that it takes them in."""
    if op.name not in _HANDS_ON:
        return False
    taken, made = graph.tensor(op, op.inputs[0]), graph.tensor(op, op.outputs[0])
    same = np.array_equal(taken.scales, made.scales)
    return same and np.array_equal(taken.zero_points, made.zero_points)


def changed_input(graph: OpGraph, op: Op, scale: float, written: float) -> tuple[int, str]:
    """
    Tell of an op's input whose scale is not the one that its bias was written with.

    Returns:
        The index of the op that makes the input, or of this one where none does, and a sentence.
    """
    producer = graph.subgraphs[op.subgraph].producer
    maker = producer.get(op.inputs[INPUT_AT[op.name]])
    while maker is not None and maker.inputs[0] in producer and hands_on(graph, maker):
        maker = producer[maker.inputs[0]]
    text = (
        f"its output has scale {scale:.6g}, which is {scale / written:.4g} × the one that the bias "
        f"of {op.name} #{op.index} was written with ({written:.6g})"
    )
    return (op.index if maker is None else maker.index), text


def moved_findings(graph: OpGraph, subgraph: int) -> dict[int, tuple[str, ...]]:
    """
    Tell of ops that only move codes and say that these mean something else behind them.

    (https://ai.google.dev/edge/litert/models/quantization_spec: inputs and outputs must all have
    the same scale and zero point.) And of those whose kernels know no such constants.

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
        text = _misread_constant(graph, op) if op.name == "BATCH_MATMUL" else None
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


def _misread_constant(graph: OpGraph, op: Op) -> str | None:
    """Tell of a BATCH_MATMUL whose kernels do not know its constants as they are stored."""
    taken = [graph.tensor(op, index) for index in op.inputs[:2]]
    constants = [each for each in taken if each.is_constant and each.is_quantized]
    if len(constants) == 2 and graph.tensor(op, op.outputs[0]).is_floating_point:
        return (
            "it gives floats of two constants that are codes, which its kernels read as floats: "
            "leave the op in float, or compute what it gives before the model is exported"
        )
    # Floats times codes is another kernel, which knows them.
    in_codes = all(each.is_quantized for each in taken)
    for each in constants if in_codes else ():
        if len(each.scales) > 1:
            return (
                f"its constant operand has {len(each.scales)} scales, and its kernels know one for "
                "all alone: give that constant one scale, or leave the op in float"
            )
    return None
