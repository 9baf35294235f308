"""Whether activations have the scales that they must, told by what makes them and takes them."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from pytest_edgeq.localize.biases import INPUT_AT, qparams, unexpected_qparams
from pytest_edgeq.tflite.graph import Op, OpGraph, Tensor
from pytest_edgeq.tflite.op_facts import FIXED_SCALES, HANDS_ON, KEEPS_SCALE, MOVING

__all__ = ["changed_input", "is_shared", "moved_findings"]


def _has(tensor: Tensor, parameters: tuple[float, int]) -> bool:
    scale, zero_point = parameters
    return qparams(tensor) == (float(np.float32(scale)), zero_point)


def is_shared(graph: OpGraph, op: Op, given: Collection[tuple[float, int]]) -> bool:
    """
    Whether what an op takes is taken by one, too, that hands its scale on.

    The converter (litert-torch 0.10.0) gives it the scale of a pool or a resize behind, and leaves
    the bias of a convolution beside as it was written, for the scale that it was observed to have.
    Where the quantizer gave that scale, the op that hands it on need not have it as well.

    Args:
        graph: The file.
        op: With a bias.
        given: Scale and zero point of each activation, as the quantizer gave them.
    """
    subgraph = graph.subgraphs[op.subgraph]
    index, above = op.inputs[INPUT_AT[op.name]], {op.index}
    own = qparams(subgraph.tensors[index])
    while True:
        others = (each for each in subgraph.ops if index in each.inputs)
        keeping = [o for o in others if o.name in KEEPS_SCALE and o.index not in above]
        if any(qparams(subgraph.tensors[each.outputs[0]]) == own for each in keeping):
            return True
        if keeping and any(_has(subgraph.tensors[index], each) for each in given):
            return True
        maker = subgraph.producer.get(index)
        if maker is None or maker.name not in MOVING or not _hands_on(graph, maker):
            return False
        index = maker.inputs[0]
        above.add(maker.index)


def _hands_on(graph: OpGraph, op: Op) -> bool:
    """Whether an op gives the codes that it takes, in the scale that it takes them in."""
    if op.name not in HANDS_ON:
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
    while maker is not None and maker.inputs[0] in producer and _hands_on(graph, maker):
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
        fixed = (
            FIXED_SCALES.get((op.name, graph.tensor(op, op.outputs[0]).dtype))
            if op.outputs
            else None
        )
        if fixed is not None:
            given = qparams(graph.tensor(op, op.outputs[0]))
            text = given and unexpected_qparams("its output", given, fixed, "the kernel")
            if text:
                found[op.index] = (text,)
        text = _misread_constant(graph, op) if op.name == "BATCH_MATMUL" else None
        if text:
            found[op.index] = (text,)
        if op.name not in HANDS_ON or not op.inputs or op.inputs[0] < 0:
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
