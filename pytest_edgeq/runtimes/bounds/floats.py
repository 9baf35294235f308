"""Error bounds of float kernels, relative to the greatest value in or out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.runtimes.bounds.hybrid import hybrid_position, is_packed
from pytest_edgeq.runtimes.bounds.site import ULP, reach_of, scale_of
from pytest_edgeq.tflite.boundary import numpy_dtype
from pytest_edgeq.tflite.constants import dequantized
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.ops import facts_of
from pytest_edgeq.tflite.subgraph import Op

#: Error of functions and of the operations around a sum, in units in the last place: Eigen's
#: rational approximations of tanh and the logistic function are within 6, measured; twice that.
_FUNCTION = 12

#: Terms of one size that float16 sums before the sum stops growing.
_HALF_TERMS = 2**11

#: XNNPACK computes eˣ as 2 to the power of x · log₂e (`f32-vexp`): the product, rounded to float32,
#: is off by 2^−24 of itself, and the constant by a quarter of that; measured 0.8 in all.
_EXPONENT = 1.25

#: eˣ is infinite in float32 beyond.
_GREATEST_EXPONENT = math.log(float(np.finfo(np.float32).max))

#: Standard deviations that a sum of roundings stays within: 2n · e^−32 of all values do not.
_SIGMAS = 8


def reduction_length(graph: OpGraph, op: Op) -> int:
    """Return the number of terms summed to one output value, including the bias."""

    def shape(position: int) -> tuple[int, ...]:
        return graph.tensor(op, op.inputs[position]).shape

    if summed := facts_of(op.name).summed:
        return math.prod(n for axis, n in enumerate(shape(1)) if axis in summed) + 1
    if op.name == "BATCH_MATMUL":
        return shape(0)[-2 if graph.option(op, "AdjX", False) else -1]
    if op.name in ("MEAN", "SUM"):
        n_outputs = math.prod(graph.tensor(op, op.outputs[0]).shape)
        return max(math.prod(shape(0)) // max(n_outputs, 1), 1)
    if op.name in ("SOFTMAX", "LOG_SOFTMAX", "L2_NORMALIZATION"):
        return shape(0)[-1]
    return len(op.inputs) if op.name == "ADD_N" else 1


def float_bound(graph: OpGraph, op: Op, *, exact: bool = False, half: bool = False) -> float:
    """
    Return the error bound of a sound float kernel, relative to its greatest value.

    A sum of n products in any order is off by n · 2^−24 of Σ|w·x| (Higham, Accuracy and Stability
    of Numerical Algorithms, §3.1), and, if roundings are independent, by 8 · √n of them (Higham and
    Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019). Σ|w·x| is at most the
    greatest input times the greatest row of Σ|w|; for a product of two activations the greatest
    value of both and of the result is used instead.

    With `half` for float16, whose half unit in the last place is 2^−11: a sum of terms of one sign
    stops growing at 2,048 of them, so that roundings of long sums are not independent.

    The bound of a composite is the sum of those of the ops that it consists of.

    Kernels that quantize their input sum integers, exactly. Compared with a sum in float64 of the
    quantized input and float32 weights only the weights' own roundings are left, 8 · √Σw².
    """
    parts = graph.decomposition(op)
    if parts is not None:
        return sum(float_bound(graph, each, exact=exact, half=half) for each in parts.ops)
    sums, roots = _rows(graph, op)
    n = reduction_length(graph, op)
    if exact and hybrid_position(graph, op) is not None:
        weights = graph.tensor(op, op.inputs[1])
        # Its own kernel for int4 has codes from 0 to 15, and subtracts 8 · Σx in floats.
        shifted = 2 * 8 * n * float(weights.scales.max()) if is_packed(op, weights) else 0.0
        return (_SIGMAS * roots + shifted + _FUNCTION) * ULP
    if half:
        return (min(n, _HALF_TERMS) + 2 * _FUNCTION) / _HALF_TERMS * max(1.0, sums)
    return (min(n, _SIGMAS * math.sqrt(n)) + _FUNCTION) * ULP * max(1.0, sums)


def float_error(graph: OpGraph, op: Op, tensor: int, *, half: bool) -> float:
    """Return the error of an output of a quantized op that is computed in floats, in LSB."""
    ends = [graph.tensor(op, index) for index in (*op.inputs, tensor) if index >= 0]
    scales = [(each, scale) for each in ends if (scale := scale_of(each)) and not each.is_constant]
    reach = max((reach_of(each) * scale for each, scale in scales), default=0.0)
    scale = scale_of(ends[-1])
    return float_bound(graph, op, half=half) * reach / scale if scale else 0.0


def float_reach(graph: OpGraph, op: Op) -> float:
    """
    Return the least value to which `float_bound` is relative, in the op's unit.

    A DEQUANTIZE may subtract the zero point in floats, q · s − z · s: each product is rounded, and
    |q| · s is at most the result and |z| · s.
    """
    source = graph.tensor(op, op.inputs[0])
    if op.name != "DEQUANTIZE" or not source.is_quantized:
        return 0.0
    return float(np.abs(source.zero_points * source.scales).max(initial=0.0))


def float_conditioning(op: Op, inputs: Iterable[npt.NDArray[Any]]) -> float:
    """
    Return the growth of `float_bound` where a function amplifies its argument's rounding.

    The relative error of eˣ is the absolute error of the exponent, which grows with x. Negative
    exponents add nothing: there |x| · eˣ is less than 1.
    """
    if op.name != "EXP":
        return 0.0
    finite = [values[np.isfinite(values)] for values in inputs]
    greatest = max((float(values.max(initial=0.0)) for values in finite), default=0.0)
    return _EXPONENT * min(greatest, _GREATEST_EXPONENT) * ULP


def _rows(graph: OpGraph, op: Op) -> tuple[float, float]:
    """Return the greatest Σ|w| and √Σw² of an output value; 1 without known weights."""
    n = reduction_length(graph, op)
    if op.name == "SUM":
        return float(n), math.sqrt(n)
    if not (axes := facts_of(op.name).summed):
        return 1.0, 1.0
    weights = graph.tensor(op, op.inputs[1])
    producer = graph.subgraphs[op.subgraph].producer.get(weights.index)
    if producer is not None and producer.name == "DEQUANTIZE":
        weights = graph.tensor(producer, producer.inputs[0])
    if weights.is_external or not weights.is_constant:
        return 1.0, 1.0
    if numpy_dtype(weights.dtype) is None or (weights.is_quantized and not len(weights.scales)):
        # Packed codes, or scales by blocks: at most as large as they can be.
        greatest = float(graph.scales(op.subgraph, weights).max(initial=0.0)) * reach_of(weights)
        return greatest * n, greatest * math.sqrt(n)
    values = dequantized(graph, op.subgraph, weights)
    return (
        float(np.abs(values).sum(axis=axes).max(initial=0.0)),
        float(np.sqrt((values**2).sum(axis=axes)).max(initial=0.0)),
    )
