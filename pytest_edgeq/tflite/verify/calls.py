"""Check which subgraphs ops call: they exist, and none calls itself in the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_edgeq.tflite.flatbuffer import enum_names
from pytest_edgeq.tflite.verify.damage import damaged, op_place
from pytest_edgeq.tflite.verify.flexbuffer import is_flexbuffer

if TYPE_CHECKING:
    from pytest_edgeq.tflite.subgraph import Op, Subgraph


_CALLS = {
    "CALL_ONCE": ("InitSubgraphIndex",),
    "IF": ("ThenSubgraphIndex", "ElseSubgraphIndex"),
    "REDUCE_WINDOW": (),
    "STABLEHLO_CASE": ("BranchSubgraphIndices",),
    "STABLEHLO_COMPOSITE": ("DecompositionSubgraphIndex",),
    "STABLEHLO_REDUCE": ("BodySubgraphIndex",),
    "STABLEHLO_REDUCE_WINDOW": ("BodySubgraphIndex",),
    "STABLEHLO_SCATTER": ("UpdateComputationSubgraphIndex",),
    "STABLEHLO_SORT": ("ComparatorSubgraphIndex",),
    "STABLEHLO_WHILE": ("CondSubgraphIndex", "BodySubgraphIndex"),
    "WHILE": ("CondSubgraphIndex", "BodySubgraphIndex"),
}
"""The fields of each op's options that are indices of subgraphs."""


def verify_calls(model: Any, subgraphs: Sequence[Subgraph]) -> None:
    """
    Check the subgraphs that ops call.

    Raises:
        ValueError: Names the op and what is wrong with it.
    """
    called: dict[int, list[tuple[Op, int]]] = {}
    for subgraph in subgraphs:
        for op in subgraph.ops:
            if op.name not in _CALLS:
                continue
            operator = model.Subgraphs(subgraph.index).Operators(op.index)
            for index in _called(operator, op):
                if not 0 <= index < len(subgraphs):
                    raise damaged(
                        op_place(op),
                        f"it calls subgraph {index}, which does not exist (there are "
                        f"{len(subgraphs)})",
                    )
                called.setdefault(subgraph.index, []).append((op, index))
            problem = _attribute_problem(operator, op) or _border_problem(
                op, subgraph, [subgraphs[i] for i in _called(operator, op)]
            )
            if problem:
                raise damaged(op_place(op), problem)
    _refuse_recursion(called)


def _attribute_problem(operator: Any, op: Op) -> str:
    """Check the attributes of a composite, of which XNNPACK's delegate reads some."""
    from ai_edge_litert import schema_py_generated as schema

    table = operator.BuiltinOptions2()
    if op.name != "STABLEHLO_COMPOSITE" or table is None:
        return ""
    if operator.BuiltinOptions2Type() != schema.BuiltinOptions2.StableHLOCompositeOptions:
        return "its options are not those of a composite"
    options = schema.StableHLOCompositeOptions()
    options.Init(table.Bytes, table.Pos)
    attributes = options.CompositeAttributesAsNumpy()
    if isinstance(attributes, np.ndarray) and not is_flexbuffer(attributes.tobytes()):
        return "its attributes are no whole flexbuffer"
    return ""


def _border_problem(op: Op, caller: Subgraph, callees: Sequence[Subgraph]) -> str:
    """
    Say where a subgraph does not take or give what the op hands it, tensor by tensor.

    The kernels copy by the sizes of the one into the memory of the other (control_flow_common.h).
    """
    for position, callee in enumerate(callees):
        given = op.inputs[1:] if op.name == "IF" else op.inputs
        condition = op.name == "WHILE" and position == 0
        sides = [("inputs", given, callee.inputs)]
        if op.name in ("IF", "STABLEHLO_COMPOSITE", "WHILE") and not condition:
            sides.append(("outputs", op.outputs, callee.outputs))
        elif op.name in ("CALL_ONCE", "IF", "STABLEHLO_COMPOSITE", "WHILE"):
            pass
        else:
            sides = []
        for side, ours, theirs in sides:
            dtypes = [caller.tensors[index].dtype for index in ours]
            expected = [callee.tensors[index].dtype for index in theirs]
            if dtypes != expected:
                return (
                    f"it has the {side} {dtypes}, subgraph {callee.index} that it calls {expected}"
                )
        if condition and [callee.tensors[i].dtype for i in callee.outputs] != ["bool"]:
            return f"subgraph {callee.index}, its condition, does not give one bool"
        for index in callee.outputs:
            tensor = callee.tensors[index]
            if not (
                index in callee.producer
                or index in callee.inputs
                or tensor.is_constant
                or tensor.is_variable
                or 0 in tensor.shape
            ):
                return (
                    f"subgraph {callee.index} that it calls gives tensor {index} "
                    f"({tensor.name[:80]!r}), which no op computes"
                )
    return ""


def _called(operator: Any, op: Op) -> Iterator[int]:
    from ai_edge_litert import schema_py_generated as schema

    for union, kind, table in (
        ("BuiltinOptions", operator.BuiltinOptionsType(), operator.BuiltinOptions()),
        ("BuiltinOptions2", operator.BuiltinOptions2Type(), operator.BuiltinOptions2()),
    ):
        reader = getattr(schema, enum_names(union).get(kind, ""), None)
        if table is None or reader is None:
            continue
        options = reader()
        options.Init(table.Bytes, table.Pos)
        for field in _CALLS[op.name]:
            if hasattr(options, f"{field}AsNumpy"):
                values = getattr(options, f"{field}AsNumpy")()
                yield from (int(value) for value in values) if hasattr(values, "size") else ()
            elif hasattr(options, field):
                yield int(getattr(options, field)())


def _refuse_recursion(called: dict[int, list[tuple[Op, int]]]) -> None:
    """
    Refuse a subgraph that is reached from itself.

    The kernels prepare what an op calls before the op, down to the end of the stack.
    """
    done: set[int] = set()
    for start in called:
        path: list[int] = []
        stack: list[Iterator[tuple[Op, int]]] = []
        entered = start
        while True:
            if entered not in done:
                path.append(entered)
                stack.append(iter(called.get(entered, ())))
            while stack:
                found = next(stack[-1], None)
                if found is not None:
                    break
                done.add(path.pop())
                stack.pop()
            else:
                break
            op, entered = found
            if entered in path:
                raise damaged(op_place(op), f"it calls subgraph {entered}, which it is called from")
