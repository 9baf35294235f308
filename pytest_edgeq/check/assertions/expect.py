"""Parse expectations of users: dtypes, names and counts; format rows of failure texts."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.errors import UnmatchedError, failure, warn_user
from pytest_edgeq.names import nearest
from pytest_edgeq.numerics.arrays import kind_of, short_repr
from pytest_edgeq.numerics.comparison import Comparison
from pytest_edgeq.numerics.findings import Finding, aligned
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.runtimes.registry import BUILT_IN
from pytest_edgeq.runtimes.workers.settings import default_memory, innermost
from pytest_edgeq.tflite.flatbuffer import enum_names
from pytest_edgeq.tflite.op_dtypes import OpDtypes
from pytest_edgeq.tflite.ops import facts_of, nearest_op
from pytest_edgeq.tflite.source import TflitePath
from pytest_edgeq.tflite.subgraph import Op, Tensor

if TYPE_CHECKING:
    import torch

    from pytest_edgeq.runtimes.workers.policy import Isolation

Model: TypeAlias = "QuantizedModel | TflitePath | bytes"
"""A model, or the path or the content of a `.tflite` file."""

Dtype: TypeAlias = "str | np.dtype[Any] | type[np.generic] | torch.dtype"
"""A dtype in any spelling, for instance `"int8"`, `np.int8` or `torch.int8`."""

DtypeByName: TypeAlias = "Dtype | Sequence[Dtype | None] | Mapping[str, Dtype | None]"
"""One dtype for all inputs or outputs, a sequence in order, or a dict by name; None: any dtype."""

ROWS = 5
"""How many cases a failure text shows."""

_WEIGHT = 1
"""Position of the weight among the operands of every op whose weight has an axis of channels."""

CUSTOM = "CUSTOM"
"""Name for all custom ops together; one of them is `CUSTOM:<code>`."""


def bare_isolation() -> Isolation:
    """Return the isolation of the innermost session; the defaults outside of pytest."""
    from pytest_edgeq.quantize.cache.directory import Store
    from pytest_edgeq.runtimes.workers.policy import Isolation

    session = innermost()
    return Isolation(
        session.mode,
        seconds=session.seconds,
        memory=default_memory() if session.memory is None else session.memory,
        store=None if session.cache_dir is None else Store(session.cache_dir, warn_user),
    )


def require_comparison(comparison: object, hint: str = "") -> None:
    """Raise a TypeError unless it is a comparison."""
    if not isinstance(comparison, Comparison):
        raise TypeError(
            f"expected the result of edgeq.compare(model, inputs), got {kind_of(comparison)}{hint}"
        )


def swapped(inputs: object) -> str:
    """Return a hint if samples and model are swapped; an empty string otherwise."""
    is_model = isinstance(inputs, QuantizedModel)
    return "; the arguments are swapped: the model comes first, then its samples" * is_model


def edge_of(model: Model, inputs: object = None) -> EdgeFile:
    """Open the model of an assertion: a QuantizedModel, a path or bytes."""
    if isinstance(model, QuantizedModel):
        return model.edge
    if isinstance(model, (str, os.PathLike, bytes, bytearray, memoryview)):
        source = bytes(model) if isinstance(model, (bytearray, memoryview)) else model
        return EdgeFile(source, runtimes=BUILT_IN.isolated(bare_isolation()), foreign=True)
    raise TypeError(
        f"expected a QuantizedModel, a path or the bytes of a .tflite file, got "
        f"{kind_of(model)}{swapped(inputs)}"
    )


def parse_dtype(dtype: Any) -> str:
    """Return TFLite's name of a dtype, from a string, numpy or torch dtype."""
    if isinstance(dtype, str):
        name = dtype
    elif (type(dtype).__module__, type(dtype).__name__) == ("torch", "dtype"):
        name = str(dtype).removeprefix("torch.")
    elif isinstance(dtype, np.dtype) or (isinstance(dtype, type) and issubclass(dtype, np.generic)):
        name = np.dtype(dtype).name
    else:
        # Python's int and float have no width, so they are no dtypes.
        raise TypeError(
            f"expected a dtype such as 'int8', np.int8 or torch.int8, got {short_repr(dtype)}"
        )
    known = [each.lower() for each in enum_names("TensorType").values()]
    if name in known:
        return name
    # TFLite stores torch's quantized dtypes as a plain dtype and a scale.
    stored = re.sub(r"^(torch\.)?q(?=u?int)", "", name)
    hint = f"; give {stored!r}, as which TFLite stores it" if stored in known else ""
    raise ValueError(
        f"unknown dtype {name!r}{hint or nearest(name, known)}; TFLite has {', '.join(known)}"
    )


def parse_granularity(granularity: Any) -> str:
    """Return a granularity if it is valid."""
    valid = ("per_tensor", "per_channel")
    if isinstance(granularity, str) and (
        granularity in valid or re.fullmatch(r"blockwise_[1-9][0-9]*", granularity)
    ):
        return granularity
    raise ValueError(
        f"unknown granularity {granularity!r}{nearest(str(granularity), valid)}; "
        f"valid: {', '.join(valid)}, blockwise_<size>"
    )


def parse_count(what: str, count: Any, *, least: int = 0) -> int:
    """Return a count as an int; it must be `least` or more."""
    try:
        number = operator.index(count)
    except TypeError:
        number = None
    if number is None or isinstance(count, (bool, np.bool_)):
        raise TypeError(f"{what}: expected an integer, got {short_repr(count)}")
    if number < least:
        raise ValueError(f"{what}: expected {least} or more, got {count!r}")
    return number


def parse_number(what: str, number: Any) -> float:
    """Return a bound if it is a real number, NaN and infinities included."""
    if not isinstance(number, Real) or isinstance(number, bool):
        raise TypeError(f"{what}: expected a number, got {short_repr(number)}")
    return int(number) if isinstance(number, int) else float(number)


def spread(expected: Any, names: Sequence[str], what: str) -> list[Any]:
    """Expand an expectation to one for each of a model's inputs or outputs."""
    if isinstance(expected, Mapping):
        for name in expected:
            if name not in names:
                raise UnmatchedError(
                    f"no {what} is named {name!r}{nearest(str(name), names)}; the model has "
                    f"{list(names)}"
                )
        left_out = [name for name in names if name not in expected]
        if left_out:
            raise UnmatchedError(
                f"{what} {left_out[0]!r} is left out of {dict(expected)!r}: an unlisted {what} "
                "would not be checked. Add it, with None if it may be anything"
            )
        each = [expected[name] for name in names]
    elif isinstance(expected, Sequence) and not isinstance(expected, (str, bytes)):
        if len(expected) != len(names):
            raise UnmatchedError(
                f"expected {len(expected)} {what}s {list(expected)!r}, the model has {len(names)}: "
                f"{list(names)}"
            )
        each = list(expected)
    elif not names:
        raise UnmatchedError(f"the model has no {what}s, so {expected!r} is expected of nothing")
    else:
        each = [expected] * len(names)
    if names and all(value is None for value in each):
        raise ValueError(f"{expected!r} expects nothing of any {what}")
    return each


def known_op(op: Any) -> str:
    """Return the name if it is an operator of TFLite."""
    if not isinstance(op, str):
        raise TypeError(f"op: expected a name such as 'CONV_2D', got {op!r}")
    known = enum_names("BuiltinOperator").values()
    if op not in known and not op.startswith(f"{CUSTOM}:"):
        raise ValueError(f"TFLite has no operator {op!r}{nearest_op(op, known)}")
    return op


def require_names(allow: Sequence[str]) -> None:
    """Raise a TypeError for one name in place of a sequence."""
    if isinstance(allow, str):
        raise TypeError(f"allow: expected a sequence, got {allow!r}; write ({allow!r},)")


def require_needed(allow: Sequence[str], known: Sequence[str], what: str) -> None:
    """Raise an error for an entry of `allow` that matches nothing."""
    for each in allow:
        if each not in known:
            raise UnmatchedError(
                f"allow={each!r} matches no {what}{nearest(each, known)}; take it out, or it will "
                "hide the next one"
            )


def op_of(edge: EdgeFile, entry: OpDtypes) -> Op:
    """Return the graph's op for an entry of the op-dtype map."""
    return edge.graph.subgraphs[entry.subgraph].ops[entry.index]


def select_ops(edge: EdgeFile, op: str | None, module: str | None) -> tuple[OpDtypes, ...]:
    """Return the ops of this name whose torch module matches a glob."""
    if op is not None:
        known_op(op)
    if module is not None and not isinstance(module, str):
        raise TypeError(f"module: expected a glob such as 'layer1.*', got {module!r}")
    chosen = edge.op_dtypes.ops(op=op, module=module)
    if chosen:
        return chosen
    counts = edge.op_dtypes.counts()
    if op is not None and not edge.op_dtypes.ops(op=op):
        listed = ", ".join(f"{n} {name}" for name, n in counts.items()) or "no op at all"
        raise UnmatchedError(f"the model has no {op}{nearest(op, counts)}; it has {listed}")
    what = op or "op"
    modules = sorted({e.module for e in edge.op_dtypes.ops(op=op) if e.module is not None})
    if module is None:
        raise UnmatchedError("the model has no op: there is nothing to check")
    if not modules:
        raise UnmatchedError(
            f"no {what} matches module={module!r}: the torch module of none of them is known. "
            "Load the file with edgeq.load(tflite, reference=model), or leave module= out"
        )
    # For example, a convolution of one channel per group is a DEPTHWISE_CONV_2D.
    others = sorted({entry.op for entry in edge.op_dtypes.ops(op=None, module=module)})
    hint = nearest(module, modules)
    if others:
        hint = f", which is {' and '.join(others[:4])} in the file"
    raise UnmatchedError(
        f"no {what} matches module={module!r}{hint}; there are "
        f"{', '.join(repr(name) for name in modules[:12])}{', …' if len(modules) > 12 else ''}"
    )


def granularities(edge: EdgeFile, op: Op, tensor: Tensor) -> tuple[str, ...]:
    """
    Return the possible names of a quantized operand's granularity.

    One scale for one channel is `per_tensor` and `per_channel`. A tensor with a single scale has
    `quantized_dimension` 0 whatever its op, so its channels are counted on the op's own axis: axis
    0 of a depthwise weight has length 1 always.
    """
    own = tensor.granularity
    if own is None:
        return ()
    axis = facts_of(op.name).axis
    if own == "per_tensor":
        if axis is None or len(op.inputs) <= _WEIGHT or tensor.index == op.inputs[0]:
            return (own,)
        shape = edge.graph.tensor(op, op.inputs[_WEIGHT]).shape
        return (own, "per_channel") if len(shape) > axis and shape[axis] == 1 else (own,)
    if own == "per_channel":
        along, n_scales = tensor.quantized_dimension, len(tensor.scales)
        length = tensor.shape[along] if 0 <= along < len(tensor.shape) else 0
        if n_scales != length:
            return (f"{n_scales} scales for {length} channels",)
        is_weight = len(op.inputs) > _WEIGHT and tensor.index == op.inputs[_WEIGHT]
        if is_weight and axis is not None and along != axis:
            return (f"per_channel on axis {along} instead of {axis}",)
    return (own,)


def table(rows: Iterable[Sequence[Any]], header: Sequence[str]) -> tuple[str, ...]:
    """Format columns under a header: the first rows, and how many more there are."""
    lines = [list(header), *([str(cell) for cell in row] for row in rows)]
    shown, hidden = lines[: ROWS + 1], len(lines) - ROWS - 1
    text = aligned(shown, indent="  ")
    if hidden > 0:
        text.append(f"  … and {hidden} more")
    return tuple(text)


def failed(found: Finding, *ways: str) -> AssertionError:
    """Return the error of a failed expectation; `ways` replace fix and command at its end."""
    causes = [f"cause: {each}" for each in found.causes]
    fix = [f"fix: {found.fix}"] if found.fix else []
    lines = [found.title, *found.evidence, *causes, *(ways or (*fix, *found.acceptance))]
    return failure([found], "\n".join(lines))
