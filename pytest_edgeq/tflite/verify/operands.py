"""Check what ops take and give: how many tensors, in which order, and nothing twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_edgeq.tflite.flatbuffer import integers
from pytest_edgeq.tflite.verify.arity import ARITY
from pytest_edgeq.tflite.verify.damage import damaged, op_place, tensor_place

if TYPE_CHECKING:
    from pytest_edgeq.tflite.subgraph import Op, Subgraph, Tensor


def verify_ops(raw: Any, subgraph: Subgraph) -> None:
    """
    Check the operands of every op, in execution order.

    Raises:
        ValueError: Names the op and what is wrong with it.
    """
    tensors = subgraph.tensors
    for index in subgraph.inputs:
        if tensors[index].is_constant:
            raise damaged(tensor_place(subgraph, tensors[index]), "it is an input, and a constant")
    inputs = set(subgraph.inputs)
    computed: dict[int, Op] = {}
    for op in subgraph.ops:
        problem = (
            _count_problem(op)
            or _input_problem(op, tensors, inputs, computed)
            or _dtype_problem(op, tensors)
            or _intermediate_problem(raw, op, len(tensors))
        )
        if problem:
            raise damaged(op_place(op), problem)
        for index in op.outputs:
            problem = _output_problem(op, tensors, inputs, computed, index)
            if problem:
                raise damaged(op_place(op), problem)
            computed[index] = op


def _count_problem(op: Op) -> str:
    arity = ARITY.get(op.name)
    if arity is None:
        return ""
    n_inputs, n_outputs = len(op.inputs), len(op.outputs)
    if n_inputs < arity.inputs:
        return f"it has {_counted(n_inputs, 'input')}, expected {arity.inputs}"
    if n_outputs < arity.outputs:
        return f"it has {_counted(n_outputs, 'output')}, expected {arity.outputs}"
    required = arity.inputs if arity.required is None else arity.required
    if -1 in op.inputs[:required]:
        return f"its input {op.inputs.index(-1)} is left out, and is not optional"
    if arity.all_required and -1 in op.inputs:
        return f"its input {op.inputs.index(-1)} is left out, and is not optional"
    return ""


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _input_problem(
    op: Op, tensors: tuple[Tensor, ...], inputs: set[int], computed: dict[int, Op]
) -> str:
    for index in op.inputs:
        if index < 0 or index in computed or index in inputs:
            continue
        tensor = tensors[index]
        # The empty shape of a scalar is an empty constant.
        if tensor.is_constant or tensor.is_variable or tensor.is_external or 0 in tensor.shape:
            continue
        return f"it reads tensor {index} ({tensor.name[:80]!r}), which no op before it computes"
    return ""


_KEEPING_DTYPE = {
    **dict.fromkeys(
        (
            *("BATCH_MATMUL", "BATCH_TO_SPACE_ND", "BROADCAST_TO", "CUMSUM", "MEAN", "REDUCE_MAX"),
            *("REDUCE_MIN", "REDUCE_PROD", "RESHAPE", "SOFTMAX", "SQUEEZE", "SUM"),
        ),
        0,
    ),
    "EMBEDDING_LOOKUP": 1,
    "SPLIT": 1,
    "SPLIT_V": 0,
}
"""
Ops whose kernels write elements of this input's dtype, whichever the output has.

Their `Prepare` functions neither compare the dtypes nor set the output's (ai-edge-litert 2.3.0).
"""

_OTHER_DTYPES = {
    # ai-edge-quantizer 0.10.0 writes it for a product of two constants: the kernels give fewer
    # bytes than the tensor has, which `localize` tells.
    ("BATCH_MATMUL", "float32"),
    ("BATCH_MATMUL", "int32"),
    ("EMBEDDING_LOOKUP", "float16"),
    ("EMBEDDING_LOOKUP", "float32"),
    ("SOFTMAX", "int16"),
}
"""Outputs that these ops can have for inputs of 8 bits or less."""


def _dtype_problem(op: Op, tensors: tuple[Tensor, ...]) -> str:
    position = _KEEPING_DTYPE.get(op.name)
    if position is None:
        return ""
    expected = tensors[op.inputs[position]].dtype
    for index in op.outputs:
        dtype = tensors[index].dtype if index >= 0 else expected
        if dtype != expected and not (
            expected in ("int8", "uint8", "int4", "int2") and (op.name, dtype) in _OTHER_DTYPES
        ):
            return f"its output, tensor {index}, is {dtype}, and its input {expected}"
    return ""


def _intermediate_problem(raw: Any, op: Op, count: int) -> str:
    """Check the tensors of an LSTM's gates, which stand beside its inputs and outputs."""
    for index in integers(raw.Operators(op.index).IntermediatesAsNumpy()):
        if not -1 <= index < count:
            return f"its intermediate tensor {index} does not exist (there are {count})"
    return ""


def _output_problem(
    op: Op,
    tensors: tuple[Tensor, ...],
    inputs: set[int],
    computed: dict[int, Op],
    index: int,
) -> str:
    if index < 0:
        return "an output is left out" if op.name in ARITY else ""
    where = f"it writes tensor {index} ({tensors[index].name[:80]!r}), which"
    if tensors[index].is_constant:
        return f"{where} is a constant"
    if tensors[index].is_variable:
        return f"{where} is a variable"
    if index in inputs:
        return f"{where} is an input of the graph"
    if index in computed:
        return f"{where} {op_place(computed[index])} has written already"
    return ""
