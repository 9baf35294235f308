"""Ops at the ends of a file: those that quantize inputs and outputs, and those that choose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pytest_edgeq.tflite.boundary import qparams
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.ops import LAYOUT, MOVING, facts_of
from pytest_edgeq.tflite.subgraph import Op, Signature, SignatureTensor, Subgraph, Tensor


def quantized_inputs(
    graph: OpGraph, signature: Signature
) -> Iterator[tuple[SignatureTensor, Tensor]]:
    """
    Yield every input quantized per tensor, with the tensor that holds its codes.

    A float32 input may be quantized several times, or not at all.
    """
    subgraph = graph.subgraphs[signature.subgraph]
    for io_tensor in signature.inputs:
        found: dict[tuple[float, int, str], Tensor] = {}
        waiting = [io_tensor.tensor]
        while waiting:
            tensor = waiting.pop()
            if tensor.is_quantized:
                if (parameters := qparams(tensor)) is not None:
                    found.setdefault((*parameters, tensor.dtype), tensor)
                continue
            for op in subgraph.consumers[tensor.index]:
                if op.name in {"QUANTIZE", *LAYOUT}:
                    waiting += [subgraph.tensors[index] for index in op.outputs]
        for tensor in found.values():
            yield io_tensor, tensor


def quantized_output(graph: OpGraph, signature: Signature, io_tensor: SignatureTensor) -> Tensor:
    """
    Return the tensor that holds the codes of an output.

    That is the input of a DEQUANTIZE of one scale, else the output itself.
    """
    subgraph = graph.subgraphs[signature.subgraph]
    tensor = io_tensor.tensor
    ends = {"DEQUANTIZE", *LAYOUT}
    while (op := subgraph.producer.get(tensor.index)) is not None and op.name in ends:
        source = subgraph.tensors[op.inputs[0]]
        if op.name == "DEQUANTIZE" and qparams(source) is not None:
            return source
        if op.name == "DEQUANTIZE" or tensor.is_quantized:
            break
        tensor = source
    return io_tensor.tensor


class Choice(NamedTuple):
    """The op that decides an output."""

    op: Op  # the op that chooses
    scores: int  # the tensor by which it chooses


def choices(graph: OpGraph, signature: Signature) -> dict[str, Choice]:
    """
    Return the outputs that hold a choice, each with the op that chooses.

    Only ops that move, pick, compare or join elements lie between that op and the output, so a
    small error of two nearly equal scores may exchange whole elements of the output. The values of
    TOPK_V2 are no choice: for two that are nearly equal, either is nearly right.
    """
    subgraph = graph.subgraphs[signature.subgraph]
    return {
        io_tensor.name: choice
        for io_tensor in signature.outputs
        if (choice := _choice(subgraph, io_tensor.tensor.index)) is not None
    }


def _choice(subgraph: Subgraph, index: int) -> Choice | None:
    """Return the choice that decides a tensor, searching its producers."""
    left, seen = [index], {index}
    while left:
        tensor = left.pop(0)
        op = subgraph.producer.get(tensor)
        if op is None:
            continue
        facts = facts_of(op.name)
        if facts.scores is not None and len(op.inputs) > facts.scores:
            if op.name == "TOPK_V2" and tensor == op.outputs[0]:
                continue
            return Choice(op, op.inputs[facts.scores])
        operands = [
            each for each in op.inputs if each >= 0 and not subgraph.tensors[each].is_constant
        ]
        passes = facts.passes_choice == "always" or op.name in MOVING
        passes = passes or (facts.passes_choice == "alone" and len(operands) == 1)
        left += [each for each in operands if passes and each not in seen]
        seen.update(operands)
    return None
