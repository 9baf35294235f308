"""What is wrong with an op's constants and parameters, told without running it."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
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
from pytest_edgeq.localize.constants import FOLDED, check_weight
from pytest_edgeq.localize.kinds import HEAVY, IDENTITIES, VIEWS, base_name, is_heavy
from pytest_edgeq.localize.layouts import to_file_layout
from pytest_edgeq.localize.matches import Match
from pytest_edgeq.localize.moves import MOVING
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
from pytest_edgeq.tflite.graph import Op, OpGraph, Tensor
from pytest_edgeq.tflite.roles import StoredTensor, roles_of

if TYPE_CHECKING:
    from pytest_edgeq.localize.local import Step

__all__ = [
    "constant_findings",
    "is_shared",
    "moved_findings",
    "parameter_findings",
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
    matches = {match.tensor: match for step in steps for match in (step.match, *step.sources)}
    # Those of all layers, so that one in another's place is told.
    nodes = {taken.node for _, taken, _ in pairs} | set(product_weights(reference))
    floats = {
        node: _array(reference.constant(node, quantized=False))
        for node in sorted(nodes, key=reference.order)
    }
    for op, taken, step in pairs:
        on_weight = _weight_findings(
            graph, op, taken, reference, floats, narrowed=op.index in narrowed
        )
        if on_weight and _lies_in_another_order(graph, op, taken, step, reference):
            on_weight = ()
        on_bias = _bias_findings(graph, op, taken, step, reference)
        scales = None if on_weight else written_scale(graph, op)
        source = None
        if scales is not None and not _is_written_for(graph, op, step, reference, *scales):
            read = _misread(graph, op, taken, scales[1], matches)
            source = (op.index, read) if read else _changed_input(graph, op, *scales)
        if source is not None:
            maker, text = source
            found[maker] = (text, *found.get(maker, ()))
        elif on_weight or on_bias:
            found[op.index] = (*found.get(op.index, ()), *on_weight, *on_bias)
    return found


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
        if maker is None or maker.name not in IDENTITIES or not _hands_on(graph, maker):
            return False
        index = maker.inputs[0]
        above.add(maker.index)


def _is_written_for(
    graph: OpGraph, op: Op, step: Step, reference: ReferenceGraph, scale: float, written: float
) -> bool:
    """Whether a bias was written for the scale that an op's input has, or what is off is little."""
    if abs(scale / written - 1) <= SAME_SCALE:
        return True
    measured, limits = step.measured, step.limits
    if limits is None or not measured.elements or not is_shared(graph, op, reference):
        return False
    rms = math.sqrt(measured.noise / measured.elements)
    return _costs_no_bit(rms, (limits.scale, limits.zero_point))


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
    floats: Mapping[Node, Array],
    *,
    narrowed: bool,
) -> tuple[str, ...]:
    stored = _weight(graph, op)
    assert stored is not None, "chosen by it"
    constant = read_constant(graph, op, stored)
    kind = base_name(taken.user)
    own = floats[taken.node]
    others = {_called(node): each for node, each in floats.items() if node is not taken.node}
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
    kind = base_name(taken.user)
    steps = 1.0 if constant.scales is None else constant.scales
    rounding = (
        FOLDED * np.abs(constant.floats) + (0.5 if constant.scales is not None else 0) * steps
    )
    for laid_out in to_file_layout(op.name, own, constant.values.shape, torch_op=kind):
        apart = np.abs(np.sort(constant.floats, -1) - np.sort(laid_out, -1))
        if (apart <= rounding * (1 + FOLDED)).all():
            return True
    return False


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
    alike = both is not None and abs(both[0] / both[1] - 1) <= SAME_SCALE
    if both is not None and (alike or is_shared(graph, op, reference)):
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
    rms: Mapping[int, float] = MappingProxyType({}),
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
        Whether what takes a tensor keeps its scale, up to one that the reference has there.

        The converter carries the scale of a concatenation through a resize up to what makes it.
        """
        keep = [op for op in users.get(index, ()) if op.name in _KEEPS_SCALE]
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
        harmless = _is_wider(tensor, actual, wanted_here) or _costs_no_bit(
            rms.get(index), wanted_here
        )
        if (harmless and carried(index)) or _only_keeps(match.op, tensors):
            continue
        text = unexpected_qparams("its output", actual, wanted_here)
        found[index] = (text,) if text else ()
    return found


# Ops whose kernels want one scale of all that they take and give.
_KEEPS_SCALE = {
    *_HANDS_ON,
    *("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR", "CONCATENATION", "PACK", "GATHER"),
    *("MIRROR_PAD", "REVERSE_V2", "BROADCAST_TO", "TILE", "SELECT", "SELECT_V2", "UNPACK"),
    *("SPLIT_V", "SPACE_TO_DEPTH", "DEPTH_TO_SPACE", "MAXIMUM", "MINIMUM", "REDUCE_MAX"),
}


def _is_wider(tensor: Tensor, actual: tuple[float, int], wanted: tuple[float, int]) -> bool:
    """Whether a tensor's codes reach as far as others would, to half a step."""
    low, high = code_range(tensor.dtype)
    (scale, zero_point), (narrow, point) = actual, wanted
    slack = scale / 2
    return (low - zero_point) * scale <= (low - point) * narrow + slack and (
        high - point
    ) * narrow - slack <= (high - zero_point) * scale


def _costs_no_bit(rms: float | None, wanted: tuple[float, int]) -> bool:
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
        wanted = _array(reference.constant(given, quantized=True)).astype(np.float32)
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
    if _is_wider(tensor, actual, widest) or rms is None or _costs_no_bit(rms, widest):
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


def _array(value: torch.Tensor) -> Array:
    array: Array = value.detach().numpy()
    return array
