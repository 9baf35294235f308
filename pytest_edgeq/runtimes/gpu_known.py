"""
Ops that LiteRT's GPU engine computes wrong, without a word (ai-edge-litert 2.3.0).

Measured on files of one op against XNNPACK and the reference kernels, which agree. Most are of one
kind: the engine holds every tensor as batch, height, width and channels, and other ranks lose an
axis. `tests/runtimes/gpu` has a file of each, and fails when the engine computes it right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.subgraph import Op

_Shape = tuple[int, ...]


def known_defect(graph: OpGraph, op: Op) -> str:
    """Return what the GPU engine is known to compute wrong at an op; empty if nothing is known."""
    predicate, sentence = _KNOWN.get(op.name, (None, ""))
    if predicate is None:
        predicate, sentence = (_has_batch_in_constant, _CONSTANT_BATCH)
        if op.name not in _ELEMENTWISE:
            return ""
        if _ranks_differ(graph, op):
            return _RANKS
        if any(graph.tensor(op, index).dtype == "int16" for index in op.inputs):
            return _INT16
    return sentence if predicate(graph, op) else ""


def _shape(graph: OpGraph, op: Op, position: int) -> _Shape:
    return graph.tensor(op, op.inputs[position]).shape


def _ranks_differ(graph: OpGraph, op: Op) -> bool:
    """Whether both operands are quantized activations, of several ranks."""
    both = [graph.tensor(op, index) for index in op.inputs]
    is_computed = all(each.is_quantized and not each.is_constant for each in both)
    return is_computed and len({len(each.shape) for each in both}) > 1


def _has_batch_in_constant(graph: OpGraph, op: Op) -> bool:
    constants = (graph.tensor(op, index) for index in op.inputs)
    return any(each.is_constant and each.shape[:1] not in ((), (1,)) for each in constants)


def _flattens(graph: OpGraph, op: Op) -> bool:
    return len(_shape(graph, op, 0)) != 2 and not graph.option(op, "KeepNumDims", False)


def _broadcasts_batch(graph: OpGraph, op: Op) -> bool:
    return _shape(graph, op, 0)[:-2] != _shape(graph, op, 1)[:-2]


def _pads_other_axes(graph: OpGraph, op: Op) -> bool:
    if len(_shape(graph, op, 0)) != 4:
        return True
    padding = graph.tensor(op, op.inputs[1])
    if not padding.is_constant:
        return False
    rows = graph.constant(padding).reshape(4, -1)  # bytes of each axis' two numbers
    return bool(rows[0].any())


def _strides_pointwise(graph: OpGraph, op: Op) -> bool:
    _, height, width, _ = _shape(graph, op, 1)
    strides = (graph.option(op, each, 1) for each in ("StrideH", "StrideW"))
    is_quantized = graph.tensor(op, op.inputs[0]).is_quantized
    return is_quantized and (height, width) == (1, 1) and {*strides} != {1}


def _is_pointwise(graph: OpGraph, op: Op) -> bool:
    _, height, width, made = _shape(graph, op, 1)
    given = _shape(graph, op, 0)[-1]
    return (height, width) == (1, 1) and made > given > 1


def _always(graph: OpGraph, op: Op) -> bool:
    return True


_ELEMENTWISE: Final = (
    *("ADD", "SUB", "MUL", "DIV", "POW", "MAXIMUM", "MINIMUM", "SQUARED_DIFFERENCE"),
    *("FLOOR_DIV", "FLOOR_MOD"),
)
_CONSTANT_BATCH = (
    "the engine keeps no batch axis of a constant, and reads another part of it: give the constant "
    "a first axis of 1 in the model, or make it an input"
)
_RANKS = (
    "the engine adds tensors of one rank: of int8 tensors of two ranks it writes a shader that "
    "does not compile. Keep the batch axis in the model, by unsqueeze or view"
)
_INT16 = (
    "the engine takes sums and products of int16 without an error, and computes them wrong: keep "
    "this part in int8 or float"
)
_PAD = (
    "the engine pads height, width and channels of images: pad a tensor of rank 4 in the model, "
    "and no batch axis"
)

_KNOWN: Final[dict[str, tuple[Callable[[OpGraph, Op], bool], str]]] = {
    "FULLY_CONNECTED": (
        _flattens,
        "the engine does not flatten the input of this op as TFLite does: reshape it to rank 2 in "
        "the model, by flatten or view",
    ),
    "BATCH_MATMUL": (
        _broadcasts_batch,
        "the engine does not broadcast the batch axes of a product: expand the operand in the "
        "model, or give both the same batch axes",
    ),
    "PAD": (_pads_other_axes, _PAD),
    "PADV2": (_pads_other_axes, _PAD),
    "MIRROR_PAD": (_pads_other_axes, _PAD),
    "CONV_2D": (
        _strides_pointwise,
        "the engine ignores the strides of a quantized convolution of 1×1: take every second value "
        "in the model before it, by slicing, or use a kernel of 3×3",
    ),
    "DEPTHWISE_CONV_2D": (
        _is_pointwise,
        "the engine computes a depthwise convolution of 1×1 with several outputs a channel wrong: "
        "write it as a product with a constant, or as a grouped convolution",
    ),
    "CUMSUM": (
        _always,
        "the engine sums along other axes, and ignores exclusive and reverse: multiply by a "
        "constant triangular matrix in the model",
    ),
    "REVERSE_V2": (_always, "the engine does not reverse the last axis: reverse another one"),
    "ARG_MAX": (
        _always,
        "the engine's argmax of the last axis is wrong where its length is no multiple of 4: "
        "return the scores, and choose in the app",
    ),
    "SELECT_V2": (
        _always,
        "the engine does not broadcast a condition: expand it to the shape of the result",
    ),
}
