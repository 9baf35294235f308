"""Files that TFLite's kernels abort at, or compute from foreign memory, are refused before."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_edgeq.tflite.graph import Op, OpGraph
from pytest_edgeq.tflite.modules import ModulePaths
from pytest_edgeq.tflite.op_dtypes import OpDtypeMap
from pytest_edgeq.unrunnable import UnrunnableError

__all__ = ["refuse_unsafe", "unsafe_ops"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True

# Inputs are shifted left by so many bits before they are added, and the sum is then multiplied by
# 2 · (greatest input scale) / (2^shift · output scale), for which the kernels demand less than 1:
# QuantizeMultiplierSmallerThanOneExp in tensorflow/lite/kernels/{add,sub}.cc, ai-edge-litert 2.3.0.
_LEFT_SHIFT = {"int8": 20, "uint8": 20, "int16": 15}

# That product is taken in float32, where it becomes infinite, and the multiplier 0.
_GREATEST = 2.0**128

# No activation of a network has values of 1e6 and more; a scale of int8 is 1/255 of its range.
_HUGE = 1e6 / 255


def refuse_unsafe(graph: OpGraph, runtime: str, modules: ModulePaths | None) -> None:
    """
    Refuse a file that the kernels would end this process at, or answer with chance.

    Raises:
        UnrunnableError: Says which op and why.
    """
    for op, cause in unsafe_ops(graph):
        [entry] = [
            e
            for e in OpDtypeMap(graph, modules).ops(op.name)
            if (e.subgraph, e.index) == (op.subgraph, op.index)
        ]
        raise UnrunnableError(
            runtime, f"cannot load the .tflite file: {entry.where}\ncause: {cause}"
        )


def unsafe_ops(graph: OpGraph) -> Iterator[tuple[Op, str]]:
    """Yield each op that the kernels abort at, or answer with chance, and why they do."""
    for op in graph.ops:
        cause = _aborts(graph, op) or _reads_past(graph, op) or _not_unpacked(graph, op)
        if cause:
            yield op, cause


def _aborts(graph: OpGraph, op: Op) -> str:
    """Say why the scales of an ADD or SUB make its kernels abort; nothing where they do not."""
    if op.name not in ("ADD", "SUB"):
        return ""
    inputs = [graph.tensor(op, index) for index in op.inputs]
    output = graph.tensor(op, op.outputs[0])
    if output.dtype not in _LEFT_SHIFT or not all(len(t.scales) for t in (*inputs, output)):
        return ""
    greatest = max(float(tensor.scales[0]) for tensor in inputs)
    scale = float(output.scales[0])
    power = _LEFT_SHIFT[output.dtype] - 1
    if scale * 2 ** (power + 1) > _GREATEST:
        text = (
            f"its output's scale, {scale:.3g}, times 2^{power + 1} is beyond float32: the kernels "
            "would abort, and end this process"
        )
    elif scale > 0 and greatest >= 2**power * scale:
        text = (
            f"an input's scale, {greatest:.3g}, is 2^{power} times the output's, {scale:.3g}, or "
            "more: the kernels would abort, and end this process"
        )
    else:
        return ""
    if greatest < _HUGE:
        return (
            f"{text}. Such an output was zero, or next to it, in every sample of the calibration: "
            "calibrate with samples that make it speak, or leave the op in float"
        )
    return (
        f"{text}. Such a scale comes from a constant with "
        "infinite or huge values, for instance an attention mask of -inf, which the converter "
        "clamps to the largest float. Let the model mask with a finite value of the scores' own "
        "size (-30, say: softmax makes 1e-13 of it), or leave the op in float"
    )


def _reads_past(graph: OpGraph, op: Op) -> str:
    """
    Say why the kernels of a dynamic DEPTHWISE_CONV_2D read past its scales; else nothing.

    They read one for each channel, having held their number against the axis that the file names:
    the first, of length 1, where there is one scale (depthwise_conv.cc, ai-edge-litert 2.3.0, on
    all of xnnpack, builtin, reference, compiled and tensorflow).
    """
    if op.name != "DEPTHWISE_CONV_2D":
        return ""
    data, weight = (graph.tensor(op, index) for index in op.inputs[:2])
    if not (data.is_floating_point and weight.is_quantized and len(weight.scales) == 1):
        return ""
    channels = weight.shape[-1]
    if channels == 1 or weight.shape[weight.quantized_dimension] != 1:
        return ""
    return (
        f"it is dynamic, with one scale for {channels} channels: the kernels read a scale for each "
        "channel, past the end of the one, and compute something else in every run. Quantize its "
        "weights per channel (CHANNELWISE in a recipe's rule for DEPTHWISE_CONV_2D), or leave it "
        "in float"
    )


def _not_unpacked(graph: OpGraph, op: Op) -> str:
    """
    Say why a dynamic CONV_2D of 2 bits is read as if it had 8; nothing for any other op.

    Its kernels unpack 4 bits only (conv.cc, ai-edge-litert 2.3.0, on all runtimes).
    """
    if op.name != "CONV_2D":
        return ""
    data, weight = (graph.tensor(op, index) for index in op.inputs[:2])
    if not (data.is_floating_point and weight.dtype == "int2"):
        return ""
    return (
        "its weights are int2 and its input is float: the kernels take them for int8, read past "
        "their end, and compute something else in every run. FULLY_CONNECTED and EMBEDDING_LOOKUP "
        "do take int2: give the convolutions 4 bits or 8"
    )
