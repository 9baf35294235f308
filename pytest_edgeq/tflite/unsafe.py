"""Files that TFLite's kernels abort at, or compute from foreign memory, are refused before."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pytest_edgeq.tflite.flatbuffer import text
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.subgraph import Op
from pytest_edgeq.tflite.unsafe_scales import (
    aborts_at_scales,
    aborts_at_softmax,
    lacks_parameters,
    null_logger,
)


def unsafe_ops(graph: OpGraph, runtime: str | None = None) -> Iterator[tuple[Op, str]]:
    """Yield each op that the kernels abort at, or answer with chance, and why they do."""
    for op in graph.ops:
        for rule, runtimes in _RULES:
            if runtime is None or not runtimes or runtime in runtimes:
                cause = rule(graph, op)
                if cause:
                    yield op, cause
                    break


def _reads_past(graph: OpGraph, op: Op) -> str:
    """
    Say why the kernels of a dynamic DEPTHWISE_CONV_2D read past its scales; else nothing.

    They read one for each channel, having held their number against the axis that the file names:
    the first, of length 1, where there is one scale (depthwise_conv.cc, ai-edge-litert 2.3.0, on
    all of xnnpack, builtin, reference, compiled and tensorflow).
    """
    if op.name != "DEPTHWISE_CONV_2D":
        return ""
    data, weight = (graph.tensor(op, index) for index in op.inputs[:2])
    if not (data.is_floating_point and weight.is_quantized and len(weight.scales) == 1):
        return ""
    channels = weight.shape[-1]
    if channels == 1 or weight.shape[weight.quantized_dimension] != 1:
        return ""
    return (
        f"it is dynamic, with one scale for {channels} channels: the kernels read a scale for each "
        "channel, past the end of the one, and compute something else in every run. Quantize its "
        "weights per channel (CHANNELWISE in a recipe's rule for DEPTHWISE_CONV_2D), or leave it "
        "in float"
    )


def _not_unpacked(graph: OpGraph, op: Op) -> str:
    """
    Say why a dynamic CONV_2D of 2 bits is read as if it had 8; nothing for any other op.

    Its kernels unpack 4 bits only (conv.cc, ai-edge-litert 2.3.0, on all runtimes).
    """
    if op.name != "CONV_2D":
        return ""
    data, weight = (graph.tensor(op, index) for index in op.inputs[:2])
    if not (data.is_floating_point and weight.dtype == "int2"):
        return ""
    return (
        "its weights are int2 and its input is float: the kernels take them for int8, read past "
        "their end, and compute something else in every run. FULLY_CONNECTED and EMBEDDING_LOOKUP "
        "do take int2: give the convolutions 4 bits or 8"
    )


def _without_bias(graph: OpGraph, op: Op) -> str:
    """
    Say that a DEPTHWISE_CONV_2D has no bias, which the optimized kernels read, else "".

    `DepthwiseConvInitAccBuffer` in optimized/depthwiseconv_*.h copies it from a null pointer
    (ai-edge-litert 2.3.0); the reference kernels ask whether there is one.
    """
    if op.name != "DEPTHWISE_CONV_2D" or len(op.inputs) > 2:
        return ""
    return (
        "it has no bias, which the kernels read all the same, and end this process. Give it a "
        "bias of zeros; the reference kernels (runtime='reference') run the file as it is"
    )


def _from_nothing(graph: OpGraph, op: Op) -> str:
    """
    Say that a resize makes an image of an empty one, whose first pixel it reads, else "".

    Neither resize_bilinear.cc nor resize_nearest_neighbor.cc asks (ai-edge-litert 2.3.0).
    """
    if op.name not in ("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"):
        return ""
    given, made = graph.tensor(op, op.inputs[0]), graph.tensor(op, op.outputs[0])
    if 0 not in given.shape or 0 in made.shape:
        return ""
    return (
        f"it makes {list(made.shape)} of an empty image {list(given.shape)}: the kernels would "
        "read past the end of its memory, and end this process or answer with chance"
    )


def _taken_for_floats(graph: OpGraph, op: Op) -> str:
    """Say that a FAKE_QUANT is not of floats, which fake_quant.cc takes it for (2.3.0), else ""."""
    if op.name != "FAKE_QUANT" or graph.tensor(op, op.inputs[0]).dtype == "float32":
        return ""
    dtype = graph.tensor(op, op.inputs[0]).dtype
    return (
        f"its input is {dtype}: the kernels take it for float32, and write past the end of its "
        "memory"
    )


def _other_variable(graph: OpGraph, op: Op) -> str:
    """
    Say that a variable is read in another shape than it is ever given, else "".

    The ops behind it are prepared for the shape in the file, and run on the memory of the other
    (ai-edge-litert 2.3.0).
    """
    if op.name != "READ_VARIABLE":
        return ""
    name = _variable(graph, op)
    given = [
        graph.tensor(each, each.inputs[1])
        for each in graph.ops
        if each.name == "ASSIGN_VARIABLE" and name is not None and _variable(graph, each) == name
    ]
    made = graph.tensor(op, op.outputs[0])
    if not given or any(tensor.shape == made.shape for tensor in given):
        return ""
    return (
        f"it reads a variable of {list(given[0].shape)} as {list(made.shape)}: the kernels would "
        "read past the end of its memory"
    )


def _never_given(graph: OpGraph, op: Op) -> str:
    """
    Say that a variable is read that nothing in the file gives a value, else "".

    XNNPACK's delegate reads its memory as it was allocated; the other kernels refuse to
    (read_variable.cc, ai-edge-litert 2.3.0).
    """
    if op.name != "READ_VARIABLE":
        return ""
    name = _variable(graph, op)
    given = [_variable(graph, each) for each in graph.ops if each.name == "ASSIGN_VARIABLE"]
    if name is None or name in given or None in given:
        return ""
    return (
        "it reads a variable that no op of the file gives a value: the kernels would read memory "
        "that nothing has written"
    )


def _no_permutation(graph: OpGraph, op: Op) -> str:
    """
    Say that a TRANSPOSE names an axis twice, else "".

    Neither transpose.cc nor its kernels look (ai-edge-litert 2.3.0): they step through the input
    by the sizes of the output, past its end. XNNPACK's delegate refuses such a file.
    """
    if op.name != "TRANSPOSE" or not graph.tensor(op, op.inputs[1]).is_constant:
        return ""
    order = graph.tensor(op, op.inputs[1])
    if order.dtype != "int32" or order.is_external:
        return ""
    axes = [int(axis) for axis in graph.constant(order).view("<i4")]
    if len({axis % len(axes) for axis in axes}) == len(axes):
        return ""
    return (
        f"its order of the axes {axes} is no permutation: the kernels would read past the end of "
        "the memory of its input"
    )


def _over_nothing(graph: OpGraph, op: Op) -> str:
    """
    Say that a softmax of floats is over an axis of no elements, else "".

    The optimized kernels read the first one (`LogSoftmax` and `Softmax` in
    internal/optimized/optimized_ops.h, ai-edge-litert 2.3.0); the reference kernels do not.
    """
    if op.name not in ("LOG_SOFTMAX", "SOFTMAX"):
        return ""
    data = graph.tensor(op, op.inputs[0])
    if data.dtype != "float32" or data.shape[-1:] != (0,) or 0 in data.shape[:-1]:
        return ""
    return (
        f"its input {list(data.shape)} has no elements on the last axis: the kernels read the "
        "first one all the same, and end this process. The reference kernels "
        "(runtime='reference') run the file as it is"
    )


def _no_matrices(graph: OpGraph, op: Op) -> str:
    """
    Say that a dynamic BATCH_MATMUL has weights of no matrices, else "".

    XNNPACK's delegate sums up the first one when it prepares the op (ai-edge-litert 2.3.0).
    """
    if op.name != "BATCH_MATMUL":
        return ""
    data, weight = (graph.tensor(op, index) for index in op.inputs[:2])
    if not (data.is_floating_point and weight.is_quantized and 0 in weight.shape[:-2]):
        return ""
    return (
        f"its weights {list(weight.shape)} are no matrices: the kernels read the first one all "
        "the same, and end this process"
    )


def _past_the_end(graph: OpGraph, op: Op) -> str:
    """
    Say that a STRIDED_SLICE takes one index past the end of an axis, else "".

    `StridedSliceStartForAxis` in internal/strided_slice_logic.h moves the index to the length of
    the axis, and the kernels read there (ai-edge-litert 2.3.0).
    """
    from ai_edge_litert import schema_py_generated as schema

    table = graph.operator(op).BuiltinOptions() if op.name == "STRIDED_SLICE" else None
    if table is None:
        return ""
    data, begin = (graph.tensor(op, index) for index in op.inputs[:2])
    options = schema.StridedSliceOptions()
    options.Init(table.Bytes, table.Pos)
    if not begin.is_constant or begin.is_external or begin.dtype != "int32":
        return ""
    if any(-1 in tensor.shape_signature for tensor in graph.subgraphs[op.subgraph].tensors):
        return ""  # the axis may be longer when it runs
    starts = graph.constant(begin).view("<i4").tolist()
    if (options.NewAxisMask() | options.EllipsisMask()) & ((1 << len(starts)) - 1):
        return ""  # the numbers are of other axes
    one = options.ShrinkAxisMask() & ~options.BeginMask()
    for axis, (start, length) in enumerate(zip(starts, data.shape, strict=False)):
        if one >> axis & 1 and start >= length:
            return (
                f"it takes index {start} of axis {axis}, whose length is {length}: the kernels "
                "would read past the end of the memory of its input"
            )
    return ""


def _variable(graph: OpGraph, op: Op) -> str | None:
    """Return the name of the variable that an op's first input is a handle of, if it is known."""
    from ai_edge_litert import schema_py_generated as schema

    handle = graph.subgraphs[op.subgraph].producer.get(op.inputs[0])
    table = None if handle is None else graph.operator(handle).BuiltinOptions()
    if table is None or handle is None or handle.name != "VAR_HANDLE":
        return None
    options = schema.VarHandleOptions()
    options.Init(table.Bytes, table.Pos)
    return f"{text(options.Container())}/{text(options.SharedName())}"


# Those that hand ops to XNNPACK's delegate.
_DELEGATING = ("xnnpack", "compiled", "tensorflow")

# Each rule, and the runtimes whose kernels it is of; all where none is named.
_RULES: tuple[tuple[Callable[[OpGraph, Op], str], tuple[str, ...]], ...] = (
    (aborts_at_scales, ()),
    (lacks_parameters, ()),
    (_reads_past, ()),
    (_not_unpacked, ()),
    (_from_nothing, ()),
    (_taken_for_floats, ()),
    (_other_variable, ()),
    (_no_permutation, ()),
    (_past_the_end, ()),
    (_never_given, _DELEGATING),
    (_over_nothing, (*_DELEGATING, "builtin")),
    (_no_matrices, _DELEGATING),
    (null_logger, _DELEGATING),
    (aborts_at_softmax, ("reference",)),
    (_without_bias, (*_DELEGATING, "builtin")),
)
