"""Quantization parameters at which TFLite's kernels abort, or that they read without a look."""

from __future__ import annotations

import numpy as np

from pytest_edgeq.tflite.conformance import is_power_of_two
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.options import op_options
from pytest_edgeq.tflite.subgraph import Op, Tensor

# Inputs are shifted left by so many bits before they are added, and the sum is then multiplied by
# 2 · (greatest input scale) / (2^shift · output scale), for which the kernels demand less than 1:
# QuantizeMultiplierSmallerThanOneExp in tensorflow/lite/kernels/{add,sub}.cc, ai-edge-litert 2.3.0.
_LEFT_SHIFT = {"int8": 20, "uint8": 20, "int16": 15}

# SQUARED_DIFFERENCE squares them, for int8 alone: squared_difference.cc.
_LEFT_SHIFT_OF_SQUARE = 7

# No activation of a network has values of 1e6 and more; a scale of int8 is 1/255 of its range.
_HUGE = 1e6 / 255

_END = "the kernels would abort, and end this process"


def aborts_at_scales(graph: OpGraph, op: Op) -> str:
    """Say why the scales of an ADD, SUB or SQUARED_DIFFERENCE make its kernels abort, else ""."""
    if op.name not in ("ADD", "SUB", "SQUARED_DIFFERENCE"):
        return ""
    inputs = [graph.tensor(op, index) for index in op.inputs[:2]]
    output = graph.tensor(op, op.outputs[0])
    # The kernels give the output the type of the second input.
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
            and _by_powers_of_two(graph, op)
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
            f"{text}. Such an output was zero, or next to it, in every sample of the calibration: "
            "calibrate with samples for which it is not, or leave the op in float"
        )
    return (
        f"{text}. Such a scale comes from infinite or huge values, for instance an attention mask "
        "of -inf, which the converter clamps to the least float32: mask with a finite value of the "
        "scores' own size (-30, of which a softmax makes 1e-13), or leave the op in float"
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
    """Return the scale that kernels see who look for one alone; 0 where there are several."""
    return float(tensor.scales[0]) if len(tensor.scales) == 1 else 0.0


def _by_powers_of_two(graph: OpGraph, op: Op) -> bool:
    """Return whether an int16 op allows scales of powers of two to be shifts."""
    options = op_options(graph, op)
    return options is not None and bool(options.PotScaleInt16())


# The reference kernels hold differences of codes in numbers of 5 bits before the point.
_SOFTMAX_SHIFT = 31 - 5


def aborts_at_softmax(graph: OpGraph, op: Op) -> str:
    """
    Say that the reference kernels of a softmax abort at its scale, else "".

    beta · scale · 2^26 must be more than 1: `PreprocessSoftmaxScaling` in quantization_util.cc,
    ai-edge-litert 2.3.0. The optimized kernels look the exponentials up.
    """
    if op.name not in ("SOFTMAX", "LOG_SOFTMAX"):
        return ""
    given = graph.tensor(op, op.inputs[0])
    if given.dtype not in ("int8", "uint8"):
        return ""
    options = op_options(graph, op) if op.name == "SOFTMAX" else None
    beta = 1.0 if op.name == "LOG_SOFTMAX" else 0.0 if options is None else options.Beta()
    # Never turned around: NaN must fail.
    if beta * _scale(given) * 2**_SOFTMAX_SHIFT > 1:
        return ""
    return (
        f"its beta, {beta:.3g}, times the scale of its input, {_scale(given):.3g}, is not more "
        f"than 2^-{_SOFTMAX_SHIFT}: the reference kernels would abort, and end this process"
    )


def lacks_parameters(graph: OpGraph, op: Op) -> str:
    """
    Say that an int16 function has no quantization parameters, which its kernel reads, else "".

    They are held against the kernel's demands where there are some (`GenericPrepare` in
    elementwise.cc, ai-edge-litert 2.3.0), and read, or the table made of them, without.
    """
    if op.name not in ("LOG", "RSQRT", "SQRT"):
        return ""
    given, made = graph.tensor(op, op.inputs[0]), graph.tensor(op, op.outputs[0])
    if given.dtype != "int16" or len(given.scales):
        return ""
    return (
        f"its input, tensor {given.index} ({given.name!r}), is int16 and has no scale, nor has it "
        f"been asked for one of tensor {made.index}: the kernels would read one, and end this "
        "process. Quantize its input, or leave the op in float"
    )


def null_logger(graph: OpGraph, op: Op) -> str:
    """
    Say which parameters XNNPACK's delegate would complain of to a logger that it lacks, else "".

    It looks at the types of these ops once without a logger (`GetXNNPackDatatype` in
    xnnpack_delegate.cc, called in `VisitNode` for QUANTIZE and `VisitBatchMatMulNode`,
    ai-edge-litert 2.3.0).
    """
    if op.name == "QUANTIZE":
        tensors = [graph.tensor(op, op.inputs[0]), graph.tensor(op, op.outputs[0])]
    elif op.name == "BATCH_MATMUL":
        tensors = [graph.tensor(op, index) for index in op.inputs[:2]]
    else:
        return ""
    least = np.finfo(np.float32).tiny
    for tensor in tensors:
        if tensor.dtype not in ("int8", "uint8") or not len(tensor.scales):
            continue
        small = tensor.scales[tensor.scales < least]
        if len(small):
            return (
                f"tensor {tensor.index} ({tensor.name!r}) has a scale of {small[0]:.3g}, below the "
                "least normal float32: XNNPACK would end this process. It was zero in every "
                "sample of the calibration: calibrate with samples for which it is not"
            )
        low, high = (-128, 127) if tensor.dtype == "int8" else (0, 255)
        if len(tensor.scales) == 1 and not low <= tensor.zero_points[0] <= high:
            return (
                f"tensor {tensor.index} ({tensor.name!r}) is {tensor.dtype} and has the zero point "
                f"{tensor.zero_points[0]}: XNNPACK would end this process"
            )
    return ""
