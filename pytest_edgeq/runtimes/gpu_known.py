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

_Shape = tuple[int, ...]


class Explanation(NamedTuple):
    """Why the GPU computes an op wrongly, and how to avoid it in the model."""

    cause: str
    fix: str


def known_defect(graph: OpGraph, op: Op) -> Explanation | None:
    """Return the known defect of the GPU engine at an op, if there is one."""
    if op.name in _ELEMENTWISE:
        if _ranks_differ(graph, op):
            return _RANKS
        if any(graph.tensor(op, index).dtype == "int16" for index in op.inputs):
            return _INT16
        return _CONSTANT_BATCH if _has_batch_in_constant(graph, op) else None
    predicate, explanation = _KNOWN.get(op.name, (None, None))
    return explanation if predicate is not None and predicate(graph, op) else None


def _shape(graph: OpGraph, op: Op, position: int) -> _Shape:
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


def _broadcasts_condition(graph: OpGraph, op: Op) -> bool:
    return _shape(graph, op, 0) != graph.tensor(op, op.outputs[0]).shape


def _is_no_multiple(graph: OpGraph, op: Op) -> bool:
    return _shape(graph, op, 0)[-1:] != () and _shape(graph, op, 0)[-1] % 4 != 0


def _always(graph: OpGraph, op: Op) -> bool:
    return True


_ELEMENTWISE: Final = (
    *("ADD", "SUB", "MUL", "DIV", "POW", "MAXIMUM", "MINIMUM", "SQUARED_DIFFERENCE"),
    *("FLOOR_DIV", "FLOOR_MOD"),
)
_CONSTANT_BATCH: Final = Explanation(
    "LiteRT's GPU engine drops the first axis of a constant operand and reads wrong elements of it",
    "give the constant a first axis of 1 in the model, or make it an input",
)
_RANKS: Final = Explanation(
    "LiteRT's GPU engine cannot compute int8 operands of different ranks",
    "give both operands the same rank in the model, by unsqueeze or view",
)
_INT16: Final = Explanation(
    "LiteRT's GPU engine accepts sums and products of int16, and computes them wrongly",
    "keep this part in int8 or float",
)
_PAD: Final = Explanation(
    "LiteRT's GPU engine pads only height, width and channels of a tensor of rank 4",
    "pad a tensor of rank 4 in the model, and not along its first axis",
)

_KNOWN: Final[dict[str, tuple[Callable[[OpGraph, Op], bool], Explanation]]] = {
    "FULLY_CONNECTED": (
        _flattens,
        Explanation(
            "LiteRT's GPU engine does not flatten the input of this op as the CPU kernels do",
            "reshape the input to rank 2 in the model, by flatten or view",
        ),
    ),
    "BATCH_MATMUL": (
        _broadcasts_batch,
        Explanation(
            "LiteRT's GPU engine does not broadcast the batch axes of a matrix product",
            "expand the operand in the model, so that both have the same batch axes",
        ),
    ),
    "PAD": (_pads_other_axes, _PAD),
    "PADV2": (_pads_other_axes, _PAD),
    "MIRROR_PAD": (_pads_other_axes, _PAD),
    "CONV_2D": (
        _strides_pointwise,
        Explanation(
            "LiteRT's GPU engine ignores the strides of a quantized 1×1 convolution",
            "slice its input in the model, or use a kernel of 3×3",
        ),
    ),
    "DEPTHWISE_CONV_2D": (
        _is_pointwise,
        Explanation(
            "LiteRT's GPU engine computes a 1×1 depthwise convolution with several outputs per "
            "channel wrongly",
            "write it as a product with a constant, or as a grouped convolution",
        ),
    ),
    "CUMSUM": (
        _always,
        Explanation(
            "LiteRT's GPU engine sums along another axis, or ignores the options exclusive and "
            "reverse",
            "multiply by a constant triangular matrix in the model",
        ),
    ),
    "REVERSE_V2": (
        _always,
        Explanation(
            "LiteRT's GPU engine does not reverse the last axis",
            "reverse another axis, or index by a constant",
        ),
    ),
    "ARG_MAX": (
        _is_no_multiple,
        Explanation(
            "LiteRT's GPU engine computes the argmax of the last axis wrongly if its length is not "
            "a multiple of 4",
            "return the scores, and choose in the app",
        ),
    ),
    "SELECT_V2": (
        _broadcasts_condition,
        Explanation(
            "LiteRT's GPU engine does not broadcast a condition",
            "expand the condition to the shape of the result in the model",
        ),
    ),
}
