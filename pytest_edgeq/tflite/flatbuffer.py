"""
Read single fields of a `.tflite` flatbuffer, with ai-edge-litert's own schema.

The schema: https://github.com/tensorflow/tensorflow/blob/master/tensorflow/compiler/mlir/lite/schema/schema.fbs
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from pytest_edgeq.names import printable


@functools.cache
def enum_names(enum: str) -> dict[int, str]:
    """Return the names of one of the schema's enumerations, by number."""
    from ai_edge_litert import schema_py_generated as schema

    members = vars(getattr(schema, enum))
    return {value: key for key, value in members.items() if not key.startswith("_")}


def checked(what: str, index: int, count: int, *, least: int = 0) -> int:
    """Return an index if it is in range, which the verifier does not check."""
    if not least <= index < count:
        raise damaged(f"{what} {index} does not exist (there are {count})")
    return index


def damaged(problem: str) -> ValueError:
    """Return the error for a file with this problem."""
    return ValueError(f"damaged .tflite file: {problem}; build or download it again")


def text(raw: bytes | None) -> str:
    """Decode a string of the file, escaped as by `printable`."""
    return "" if raw is None else printable(raw.decode("utf-8", "backslashreplace"))


def integers(values: Any) -> tuple[int, ...]:
    """Return a vector of integers; empty if absent."""
    return tuple(values.tolist()) if isinstance(values, np.ndarray) else ()


def indices(values: Any, count: int, *, least: int = 0) -> tuple[int, ...]:
    """Return a vector of tensor indices."""
    return tuple(checked("tensor", index, count, least=least) for index in integers(values))


def op_name(code: Any) -> str:
    """Return the name of an `OperatorCode`; `CUSTOM:<code>` for a custom op."""
    # Files from before 2020 keep the code in a byte; 127 in it means "look at the newer field".
    builtin = max(code.BuiltinCode(), code.DeprecatedBuiltinCode())
    name = enum_names("BuiltinOperator").get(builtin, f"UNKNOWN_{builtin}")
    return f"CUSTOM:{text(code.CustomCode())}" if name == "CUSTOM" else name


def builtin_option(operator: Any, field: str, default: Any) -> Any:
    """Return an option of an `Operator`, or the default if it has none."""
    from ai_edge_litert import schema_py_generated as schema

    kind = enum_names("BuiltinOptions").get(operator.BuiltinOptionsType(), "NONE")
    table, reader = operator.BuiltinOptions(), getattr(schema, kind, None)
    if table is None or reader is None or not hasattr(reader, field):
        return default
    options = reader()
    options.Init(table.Bytes, table.Pos)
    return getattr(options, field)()


def fused_activation(operator: Any) -> str | None:
    """Return the activation that an `Operator` applies to its result."""
    activation = builtin_option(operator, "FusedActivationFunction", 0)
    name = enum_names("ActivationFunctionType").get(activation, f"UNKNOWN_{activation}")
    return None if name == "NONE" else name


def has_data(model: Any, tensor: Any, file_bytes: int) -> bool:
    """Return whether a `Tensor` has data, in this file or its own."""
    if tensor.ExternalBuffer():
        return True
    index = tensor.Buffer()
    if not index:
        # Buffer 0 is the empty one by convention (schema.fbs, "Model.buffers").
        return False
    buffer = model.Buffers(checked("buffer", index, model.BuffersLength()))
    # Large files keep data behind the flatbuffer, which the verifier does not check; an offset
    # of 0 or 1 means none.
    if buffer.Offset() <= 1:
        return bool(buffer.DataLength())
    end = buffer.Offset() + buffer.Size()
    if end > file_bytes:
        raise damaged(f"buffer {index} ends at byte {end:,} of {file_bytes:,}. It was truncated")
    return bool(buffer.Size())


def read_quantization(raw: Any, n_tensors: int) -> dict[str, Any]:
    """Read a `QuantizationParameters` table, or its absence, as fields of `Tensor`."""
    from ai_edge_litert import schema_py_generated as schema

    if raw is None:
        return {}
    fields: dict[str, Any] = {"quantized_dimension": raw.QuantizedDimension()}
    kinds = schema.QuantizationDetails
    by_block = raw.DetailsType() == kinds.BlockwiseQuantization
    # ai-edge-litert 2.2 is the first release whose schema has it.
    if by_block or raw.DetailsType() == getattr(kinds, "MultiAxisQuantization", None):
        details = schema.BlockwiseQuantization() if by_block else schema.MultiAxisQuantization()
        table = raw.Details()
        details.Init(table.Bytes, table.Pos)
        scales = checked("tensor", details.Scales(), n_tensors)
        zero_points = checked("tensor", details.ZeroPoints(), n_tensors, least=-1)
        shape = integers(details.BlockShapeAsNumpy()) if by_block else ()
        fields["block_size"] = details.BlockSize() or (math.prod(shape) if shape else 0)
        fields["block_scales"] = scales
        # Both fields are 0 where they were left out: one tensor cannot be both.
        fields["block_zero_points"] = -1 if zero_points == scales else zero_points
    elif raw.ScaleLength():
        stored = np.array(raw.ScaleAsNumpy(), np.float32)
        # A file may leave the zero points out if all are 0, or store one for all channels.
        points = np.zeros(1, np.int64)
        if raw.ZeroPointLength():
            points = np.array(raw.ZeroPointAsNumpy(), np.int64)
        fields["scales"] = stored
        fields["zero_points"] = np.repeat(points, len(stored)) if len(points) == 1 else points
    return fields
