"""Quantization of a file's inputs and outputs, also by ops next to them."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.ops import LAYOUT
from pytest_edgeq.tflite.subgraph import Signature, SignatureTensor, Tensor


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
                if len(tensor.scales) == 1:
                    key = (float(tensor.scales[0]), int(tensor.zero_points[0]), tensor.dtype)
                    found.setdefault(key, tensor)
                continue
            for op in subgraph.ops:
                if tensor.index in op.inputs and op.name in {"QUANTIZE", *LAYOUT}:
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
    while (op := subgraph.producer.get(tensor.index)) is not None and op.inputs[0] >= 0:
        source = subgraph.tensors[op.inputs[0]]
        if op.name == "DEQUANTIZE" and source.is_quantized and len(source.scales) == 1:
            return source
        if op.name not in LAYOUT or tensor.is_quantized:
            break
        tensor = source
    return io_tensor.tensor
