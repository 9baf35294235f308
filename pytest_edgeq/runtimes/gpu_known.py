"""
Ops that LiteRT's GPU engine computes wrongly without a message (ai-edge-litert 2.3.0).

Measured on files of one op against XNNPACK and the reference kernels, which agree. Most have one
reason: the engine stores every tensor as batch × height × width × channels, and other ranks lose an
axis. `tests/runtimes/gpu` has a file of each, and fails once the engine computes it correctly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.subgraph import Op


class Explanation(NamedTuple):
    """Why the GPU computes an op wrongly, and how to avoid it in the model."""

    cause: str
    fix: str


class _Defect(NamedTuple):
    ops: tuple[str, ...]
    is_at: Callable[[OpGraph, Op], bool]
    does: str  # what the engine does
    fix: str


def known_defect(graph: OpGraph, op: Op) -> Explanation | None:
    """Return the known defect of the GPU engine at an op, if there is one."""
    for each in _DEFECTS:
        if op.name in each.ops and each.is_at(graph, op):
            return Explanation(f"LiteRT's GPU engine {each.does}", each.fix)
    return None


def _shape(graph: OpGraph, op: Op, position: int) -> tuple[int, ...]:
    return graph.tensor(op, op.inputs[position]).shape


def _ranks_differ(graph: OpGraph, op: Op) -> bool:
    """Whether all operands are quantized activations, and their ranks differ."""
    both = [graph.tensor(op, index) for index in op.inputs]
    is_computed = all(each.is_quantized and not each.is_constant for each in both)
    return is_computed and len({len(each.shape) for each in both}) > 1


def _has_batch_in_constant(graph: OpGraph, op: Op) -> bool:
    """Whether a constant has a first axis that is not 1, or more axes than the other operand."""
    both = [graph.tensor(op, index) for index in op.inputs]
    least = min(len(each.shape) for each in both)
    return any(
        each.is_constant and (each.shape[:1] not in ((), (1,)) or len(each.shape) > least)
        for each in both
    )


def _pads_other_axes(graph: OpGraph, op: Op) -> bool:
    if len(_shape(graph, op, 0)) != 4:
        return True
    padding = graph.tensor(op, op.inputs[1])
    # Bytes of each axis' two numbers.
    return padding.is_constant and bool(graph.constant(padding).reshape(4, -1)[0].any())


def _strides_pointwise(graph: OpGraph, op: Op) -> bool:
    strides = (graph.option(op, each, 1) for each in ("StrideH", "StrideW"))
    is_quantized = graph.tensor(op, op.inputs[0]).is_quantized
    return is_quantized and _shape(graph, op, 1)[1:3] == (1, 1) and {*strides} != {1}


def _is_pointwise(graph: OpGraph, op: Op) -> bool:
    _, *size, made = _shape(graph, op, 1)
    return size == [1, 1] and made > _shape(graph, op, 0)[-1] > 1


_ELEMENTWISE: Final = (
    *("ADD", "SUB", "MUL", "DIV", "POW", "MAXIMUM", "MINIMUM", "SQUARED_DIFFERENCE"),
    *("FLOOR_DIV", "FLOOR_MOD"),
)

_DEFECTS: Final = (
    _Defect(
        _ELEMENTWISE,
        _ranks_differ,
        "cannot compute int8 operands of different ranks",
        "give both operands the same rank in the model, by unsqueeze or view",
    ),
    _Defect(
        _ELEMENTWISE,
        lambda graph, op: any(graph.tensor(op, each).dtype == "int16" for each in op.inputs),
        "accepts sums and products of int16, and computes them wrongly",
        "keep this part in int8 or float",
    ),
    _Defect(
        _ELEMENTWISE,
        _has_batch_in_constant,
        "drops the first axis of a constant operand and reads wrong elements of it",
        "give the constant a first axis of 1 in the model, or make it an input",
    ),
    _Defect(
        ("FULLY_CONNECTED",),
        lambda graph, op: len(_shape(graph, op, 0)) != 2 and not graph.option(op, "KeepNumDims", 0),
        "does not flatten the input of this op as the CPU kernels do",
        "reshape the input to rank 2 in the model, by flatten or view",
    ),
    _Defect(
        ("BATCH_MATMUL",),
        lambda graph, op: _shape(graph, op, 0)[:-2] != _shape(graph, op, 1)[:-2],
        "does not broadcast the batch axes of a matrix product",
        "expand the operand in the model, so that both have the same batch axes",
    ),
    _Defect(
        ("PAD", "PADV2", "MIRROR_PAD"),
        _pads_other_axes,
        "pads only height, width and channels of a tensor of rank 4",
        "pad a tensor of rank 4 in the model, and not along its first axis",
    ),
    _Defect(
        ("CONV_2D",),
        _strides_pointwise,
        "ignores the strides of a quantized 1×1 convolution",
        "slice its input in the model, or use a kernel of 3×3",
    ),
    _Defect(
        ("DEPTHWISE_CONV_2D",),
        _is_pointwise,
        "computes a 1×1 depthwise convolution with several outputs per channel wrongly",
        "write it as a product with a constant, or as a grouped convolution",
    ),
    _Defect(
        ("CUMSUM",),
        lambda graph, op: True,
        "sums along another axis, or ignores the options exclusive and reverse",
        "multiply by a constant triangular matrix in the model",
    ),
    _Defect(
        ("REVERSE_V2",),
        lambda graph, op: True,
        "does not reverse the last axis",
        "reverse another axis, or index by a constant",
    ),
    _Defect(
        ("ARG_MAX",),
        lambda graph, op: _shape(graph, op, 0) != () and _shape(graph, op, 0)[-1] % 4 != 0,
        "computes the argmax of the last axis wrongly if its length is not a multiple of 4",
        "return the scores, and choose in the app",
    ),
    _Defect(
        ("SELECT_V2",),
        lambda graph, op: _shape(graph, op, 0) != graph.tensor(op, op.outputs[0]).shape,
        "does not broadcast a condition",
        "expand the condition to the shape of the result in the model",
    ),
)
