"""Refuse converters' files at which TFLite's kernels abort or read out of bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from pytest_edgeq.tflite.conformance import is_power_of_two
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.subgraph import Op, Tensor

# Inputs are shifted left by so many bits before they are added, and the sum is then multiplied by
# 2 · (greatest input scale) / (2^shift · output scale), for which the kernels demand less than 1:
# QuantizeMultiplierSmallerThanOneExp in tensorflow/lite/kernels/{add,sub}.cc, ai-edge-litert 2.3.0.
_LEFT_SHIFT = {"int8": 20, "uint8": 20, "int16": 15}

# SQUARED_DIFFERENCE squares them, for int8 alone: squared_difference.cc.
_LEFT_SHIFT_OF_SQUARE = 7

# No activation of a network has values above 1e6; a scale of int8 is 1/255 of its range.
_HUGE = 1e6 / 255

# The reference kernels of a softmax hold differences of codes in numbers of 5 bits before the
# point: beta · scale · 2^26 must be more than 1 (`PreprocessSoftmaxScaling` in
# quantization_util.cc, ai-edge-litert 2.3.0). The optimized kernels look the exponentials up.
_SOFTMAX_SHIFT = 31 - 5

_END = "the kernels would abort, and end this process"


def unsafe_ops(graph: OpGraph, runtime: str | None = None) -> Iterator[tuple[Op, str]]:
    """Yield the ops at which kernels abort or read foreign memory, with the cause."""
    for op in graph.ops:
        for rule, runtimes in _RULES.get(op.name, ()):
            if runtime is None or not runtimes or runtime in runtimes:
                cause = rule(graph, op)
                if cause:
                    yield op, cause
                    break


def _reads_past(graph: OpGraph, op: Op) -> str:
    """
    Describe how a dynamic DEPTHWISE_CONV_2D reads past its scales, else return "".

    Kernels read a scale for each channel, but compare their number with the length of the axis that
    the file names: the first, of length 1, if there is one scale (depthwise_conv.cc,
    ai-edge-litert 2.3.0, on all of xnnpack, builtin, reference, compiled and tensorflow).
    """
    data, weight = (graph.tensor(op, index) for index in op.inputs[:2])
    if not (data.is_floating_point and weight.is_quantized and len(weight.scales) == 1):
        return ""
    if weight.shape[-1:] == (1,) or weight.shape[weight.quantized_dimension :][:1] != (1,):
        return ""
    channels = weight.shape[-1]
    return (
        f"it is dynamic, with one scale for {channels} channels: the kernels read a scale for each "
        "channel, past the end of the only one, and return other values in every run. Quantize its "
        "weights per channel (CHANNELWISE in a recipe's rule for DEPTHWISE_CONV_2D), or leave it "
        "in float"
    )


def _not_unpacked(graph: OpGraph, op: Op) -> str:
    """
    Describe that a dynamic CONV_2D reads int2 weights as int8, else return "".

    Its kernels unpack 4 bits only (conv.cc, ai-edge-litert 2.3.0, on all runtimes).
    """
    data, weight = (graph.tensor(op, index) for index in op.inputs[:2])
    if not (data.is_floating_point and weight.dtype == "int2"):
        return ""
    return (
        "its weights are int2 and its input is float: the kernels read them as int8, past their "
        "end, and return other values in every run. FULLY_CONNECTED and EMBEDDING_LOOKUP support "
        "int2: give the convolutions 4 bits or 8"
    )


def _aborts_at_scales(graph: OpGraph, op: Op) -> str:
    """Describe scales at which ADD, SUB or SQUARED_DIFFERENCE abort, else return ""."""
    inputs = [graph.tensor(op, index) for index in op.inputs[:2]]
    output = graph.tensor(op, op.outputs[0])
    # The kernels set the output's type to that of the second input.
    dtype = inputs[1].dtype
    if inputs[0].dtype != dtype or dtype not in _LEFT_SHIFT:
        return ""
    if op.name == "SQUARED_DIFFERENCE" and dtype != "int8":
        return ""
    if dtype == "int16" and (
        # Numbers that are no codes, which ADD adds as they are.
        (op.name == "ADD" and not len(inputs[0].scales) and not len(output.scales))
        or (
            all(is_power_of_two(_scale(each)) for each in (*inputs, output))
            and graph.option(op, "PotScaleInt16", False)
        )
    ):
        return ""
    for tensor in (*inputs, output):
        if not len(tensor.scales):
            return f"tensor {tensor.index} ({tensor.name!r}) is {dtype} and has no scale: {_END}"
    if op.name == "SQUARED_DIFFERENCE":
        return _square_cause(inputs, output)
    return _sum_cause(inputs, output, _LEFT_SHIFT[dtype])


def _sum_cause(inputs: list[Tensor], output: Tensor, shift: int) -> str:
    least, greatest = sorted(_scale(each) for each in inputs)
    scale = _scale(output)
    # In float32, as the kernels do, where a product becomes infinite or 0.
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        twice = np.float32(2) * np.float32(greatest)
        divisor = np.float32(1 << shift) * np.float32(scale)
        multipliers = np.array([least, greatest]) / np.float64(twice)
        factor = np.float64(twice) / np.float64(divisor)
    if least == 0 or not np.all((multipliers > 0) & (multipliers < 1)):
        return f"an input's scale is {least:.3g}, the other's {greatest:.3g}: {_END}"
    if np.isinf(divisor):
        text = f"its output's scale, {scale:.3g}, times 2^{shift} is beyond float32: {_END}"
    elif scale == 0:
        return f"its output's scale is 0: {_END}"
    elif factor >= 1:
        text = (
            f"an input's scale, {greatest:.3g}, is 2^{shift - 1} times the output's, {scale:.3g}, "
            f"or more: {_END}"
        )
    else:
        return ""
    if greatest < _HUGE:
        return (
            f"{text}. Such an output was zero or nearly zero in every sample of the calibration: "
            "calibrate with samples for which it is not, or leave the op in float"
        )
    return (
        f"{text}. Such a scale comes from infinite or huge values, for instance an attention mask "
        "of -inf, which the converter clamps to the least float32: mask with a finite value of the "
        "scores' own size (-30, which a softmax maps to 1e-13), or leave the op in float"
    )


def _square_cause(inputs: list[Tensor], output: Tensor) -> str:
    least, greatest = sorted(_scale(each) for each in inputs)
    scale = _scale(output)
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        twice = np.float64(np.float32(2) * np.float32(greatest))
        divisor = np.float32(1 << 2 * _LEFT_SHIFT_OF_SQUARE) * np.float32(scale)
        multipliers = np.array([least, greatest]) / twice
        factor = twice * twice / np.float64(divisor)
    if np.all((multipliers > 0) & (multipliers < 1)) and 0 < factor < 1:
        return ""
    return (
        f"its inputs' scales are {least:.3g} and {greatest:.3g}, its output's {scale:.3g}, which "
        f"the factor of the result, {factor:.3g}, does not fit (expected more than 0 and less "
        f"than 1): {_END}"
    )


def _scale(tensor: Tensor) -> float:
    """Return the scale of a tensor quantized per tensor, else 0."""
    return float(tensor.scales[0]) if len(tensor.scales) == 1 else 0.0


def _aborts_at_softmax(graph: OpGraph, op: Op) -> str:
    """Describe a scale at which the reference softmax aborts, else return ""."""
    data = graph.tensor(op, op.inputs[0])
    if data.dtype not in ("int8", "uint8"):
        return ""
    beta = 1.0 if op.name == "LOG_SOFTMAX" else graph.option(op, "Beta", 0.0)
    # Not `<=`, which NaN would pass.
    if beta * _scale(data) * 2**_SOFTMAX_SHIFT > 1:
        return ""
    return (
        f"its beta, {beta:.3g}, times the scale of its input, {_scale(data):.3g}, is not more "
        f"than 2^-{_SOFTMAX_SHIFT}: the reference kernels would abort, and end this process"
    )


def _null_logger(graph: OpGraph, op: Op) -> str:
    """
    Describe a scale that XNNPACK's delegate cannot report, else return "".

    It checks the types of these ops once without a logger (`GetXNNPackDatatype` in
    xnnpack_delegate.cc, called in `VisitNode` for QUANTIZE and `VisitBatchMatMulNode`,
    ai-edge-litert 2.3.0).
    """
    second = op.outputs[0] if op.name == "QUANTIZE" else op.inputs[1]
    for tensor in (graph.tensor(op, index) for index in (op.inputs[0], second)):
        small = tensor.scales[tensor.scales < np.finfo(np.float32).tiny]
        if tensor.dtype in ("int8", "uint8") and len(small):
            return (
                f"tensor {tensor.index} ({tensor.name!r}) has a scale of {small[0]:.3g}, below the "
                "least normal float32: XNNPACK would end this process. It was zero in every "
                "sample of the calibration: calibrate with samples for which it is not"
            )
    return ""


_Rule = tuple[Callable[[OpGraph, Op], str], tuple[str, ...]]

_SCALES: _Rule = (_aborts_at_scales, ())
_SOFTMAX: _Rule = (_aborts_at_softmax, ("reference",))
# Runtimes that delegate ops to XNNPACK.
_DELEGATED: _Rule = (_null_logger, ("xnnpack", "compiled", "tensorflow"))

# By op, each rule with the runtimes to which it applies; all if none is named.
_RULES: dict[str, tuple[_Rule, ...]] = {
    "ADD": (_SCALES,),
    "BATCH_MATMUL": (_DELEGATED,),
    "CONV_2D": ((_not_unpacked, ()),),
    "DEPTHWISE_CONV_2D": ((_reads_past, ()),),
    "LOG_SOFTMAX": (_SOFTMAX,),
    "QUANTIZE": (_DELEGATED,),
    "SOFTMAX": (_SOFTMAX,),
    "SQUARED_DIFFERENCE": (_SCALES,),
    "SUB": (_SCALES,),
}
