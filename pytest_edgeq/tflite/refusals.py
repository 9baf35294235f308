"""What kernels say when they refuse a file, what it means, and the way out."""

from __future__ import annotations

import re
from collections.abc import Callable

from pytest_edgeq.tflite.flatbuffer import printable
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.modules import ModulePaths
from pytest_edgeq.tflite.op_dtypes import OpDtypeMap
from pytest_edgeq.tflite.refused import refused_op
from pytest_edgeq.tflite.subgraph import Op
from pytest_edgeq.unrunnable import UnrunnableError

__all__ = ["refusal"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True

# What the kernels' own words mean, and the way out.
_KNOWN_REFUSALS = (
    (
        re.compile(r"embedding_lookup\.cc.*zero_point"),
        "the kernel takes only symmetric tables (zero point 0) and this one is not. Dynamic PT2E "
        "quantization writes such tables: quantize the model with a recipe "
        "(recipe_dynamic_wi8_afp32), or keep the embedding in float.",
    ),
    (
        re.compile(r"activations\.cc.*(scale not near|params\.(scale|zero_point) == )"),
        "the int8 softmax and sigmoid kernels write fixed output parameters (scale 1/256, zero "
        "point −128), and this file has others: quantize by a recipe (recipe_static_wi8_ai8), "
        "which writes these, annotate the output with FixedQParamsQuantizationSpec(scale=1/256, "
        "zero_point=-128), or leave the op in float.",
    ),
    (
        re.compile(r"params\.(scale|zero_point) [!=]= .*params\.(scale|zero_point)"),
        "this kernel hands codes on as they are, so its output must have the scale and the zero "
        "point of its input: quantize both with one range (SharedQuantizationSpec), or leave the "
        "op in float. In a file that was sound, the op is another than it was.",
    ),
    (
        re.compile(r"batch_matmul\.cc.*data->type == "),
        "the kernel takes int8 beside floats as its second operand alone, and here it is the "
        "first, or another dtype. A dynamic recipe makes int8 of a constant in either place: let "
        "the model compute (bᵀ aᵀ)ᵀ in place of a b, or leave the op in float.",
    ),
    (
        re.compile(r"div\.cc.*data\[i\] != zero_point"),
        "a divisor is the code of 0, for which the kernel ends the run: what is less than half a "
        "step of the divisor's range is rounded to it. Clamp the divisor in the model at a step or "
        "more, or leave the op in float.",
    ),
    (
        re.compile(r"broadcast_to\.cc.*must be broadcastable"),
        "the tensor does not broadcast to the shape that the op has. litert-torch 0.10 writes this "
        "where a constant that forward expands is joined to an image in front of a convolution: it "
        "moves the channels of the shape last, and not those of the constant. Store the constant "
        "at its full size as a buffer of the module, or repeat it in place of expanding it.",
    ),
    (
        re.compile(r"currently supported for stablehlo\.scatter"),
        "the kernel does not know the sum that the converter writes for values that meet in one "
        "place (scatter_add, index_add, F.fold): multiply by a constant matrix in place of it, and "
        "fold by a transposed convolution with weights of 0 and 1.",
    ),
    (
        re.compile(r"fully_connected\.cc.*output->type == kTfLiteUInt8"),
        "it takes int8 and gives float32, and no kernel does. PT2E leaves the product of two "
        "activations in float, and the converter takes the dequantization in front of it away "
        "where one of them is computed from constants alone (learned queries): quantize by a "
        "recipe (recipe_static_wi8_ai8), or leave the layer that takes the constant in float.",
    ),
    (
        re.compile(r"Tensor data is null"),
        "the signature names an output that no op of the file computes: the step that wrote the "
        "file broke it.",
    ),
    (
        re.compile(r"in XNNPACK delegate"),
        "the XNNPACK delegate takes no tensor of this kind: choose another runtime "
        "(runtime='builtin'), and mind that a device that runs XNNPACK will refuse the file.",
    ),
    (
        re.compile(r"Didn't find op for builtin opcode 'STABLEHLO_IOTA'"),
        "no kernel of TFLite computes STABLEHLO_IOTA, which the converter leaves of a constant "
        "that forward makes (torch.eye): register it as a buffer of the module.",
    ),
    (
        re.compile(r"Didn't find op for builtin opcode|unresolved custom op"),
        "these kernels do not have the op, or not in this version: choose another runtime. No "
        "kernel of TFLite computes STABLEHLO_SORT and the like, which the converter leaves where "
        "TFLite has no such op (torch.sort, torch.topk): keep that part out of the model.",
    ),
    # LiteRT's CompiledModel, ai-edge-litert 2.3.0.
    (
        re.compile(r"Failed to load model from"),
        "CompiledModel reads files more strictly than the interpreter: for one, a signature must "
        "name every input and output of its subgraph, each once. The interpreter runs the file "
        "(runtime='xnnpack'); an app that uses CompiledModel cannot.",
    ),
    (
        re.compile(
            r"Failed to register output|Insufficient buffer size|Failed to allocate tensors"
        ),
        "CompiledModel gives each output its memory before the run, so the shape of an output may "
        "not depend on values, such as a length that the file reads by SHAPE. The interpreter runs "
        "the file (runtime='xnnpack'); an app that uses CompiledModel cannot.",
    ),
    (
        re.compile(r"bad_alloc|Unable to allocate"),
        "its tensors need more memory than there is: look at their shapes (edgeq show FILE). A "
        "file that was meant to be small is damaged; build or download it again.",
    ),
    (
        re.compile(r"CompiledModel leaves memory unwritten"),
        "CompiledModel writes what an op computes, once, and hands out the memory of anything else "
        "as it finds it. The interpreter runs the file (runtime='xnnpack'); an app that uses "
        "CompiledModel gets numbers that mean nothing.",
    ),
    (
        re.compile(r"CompiledModel tells tensors apart by name"),
        "the file has no signature, and its names were stripped or are ambiguous: write it with a "
        "signature. The interpreter runs the file (runtime='xnnpack').",
    ),
    (
        re.compile(r"must have all static dimensions|Dimensions must be positive"),
        "CompiledModel takes no input and no output without elements; the interpreter does "
        "(runtime='xnnpack').",
    ),
)

# All that the XNNPACK delegate says of an op whose kernel it cannot make.
_UNNAMED = "failed to create XNNPACK runtime"

# A tensor that was zero on all samples gets a scale next to zero (ai-edge-quantizer 0.10:
# 3.9e-12, a range of 1e-9 in 255 steps). Below, no sample of use has a value.
_NEXT_TO_ZERO = 1e-9


def refusal(
    what: str,
    error: str,
    graph: OpGraph,
    runtime: str,
    modules: ModulePaths | None,
    load: Callable[[bytes], object],
) -> UnrunnableError:
    """
    Say that a runtime cannot load or run a file: which op, why, the way out, its own words.

    Args:
        what: `load` or `run`.
        error: What the kernels said.
        graph: Of the file.
        runtime: Its name.
        modules: To name the op.
        load: Has XNNPACK load a file, and raises RuntimeError or ValueError where it refuses.
    """
    unnamed = _UNNAMED in error
    node = re.search(r"Node number (\d+) \((\w+)\)", error)
    tensor = re.search(r"of tensor (\d+) in XNNPACK delegate", error)
    missing = re.search(r"Didn't find op for builtin opcode '(\w+)'", error)
    where, op = "", None
    if unnamed:
        op = refused_op(graph, 0, load)
        entries = [
            e for e in OpDtypeMap(graph, modules) if op and (e.subgraph, e.index) == (0, op.index)
        ]
        where = "".join(f": {entry.where}" for entry in entries)
    elif tensor is not None:
        # The delegate names a tensor of the first subgraph, and itself as the node.
        users = (op.index for op in graph.subgraphs[0].ops if int(tensor[1]) in op.inputs)
        user = next(users, None)
        entries = [e for e in OpDtypeMap(graph, modules) if (e.subgraph, e.index) == (0, user)]
        where = "".join(f": {entry.where}" for entry in entries)
    elif missing is not None:
        where = "".join(f": {e.where}" for e in OpDtypeMap(graph, modules).ops(missing[1])[:1])
    elif node is not None:
        index, name = int(node[1]), node[2]
        entries = [e for e in OpDtypeMap(graph, modules).ops(name) if e.index == index]
        # Kernels number the ops of each subgraph from 0, and delegates behind the last.
        where = f": {entries[0].where}" if len(entries) == 1 else f": {name} (op {index})"
        if name.startswith("TfLite"):
            where = ""  # the delegate, which is no op of the file
        if len(entries) == 1:
            op = graph.subgraphs[entries[0].subgraph].ops[index]
    meaning = next((text for symptom, text in _KNOWN_REFUSALS if symptom.search(error)), None)
    lines = [f"cannot {what} the .tflite file{where}"]
    # The kernels print floats by %d, which gives another number in every run.
    said = re.sub(r"(?<=params\.scale) \(-?\d+ [!=]= -?\d+\)", _scales(graph, op), error.strip())
    # The delegate glues its words together, and says the first of them once or twice.
    said = re.sub(rf"(?:{_UNNAMED})+", f"{_UNNAMED}; ", said)
    if unnamed and op is not None:
        meaning = _no_kernel(graph, op)
    if meaning is not None:
        lines.append(f"cause: {meaning}")
    # Their words hold names of the file.
    lines.append("the kernels said: " + "\n".join(map(printable, said.splitlines())))
    return UnrunnableError(runtime, "\n".join(lines))


def _scales(graph: OpGraph, op: Op | None) -> str:
    """The scales of an op's first input and output, where both have one."""
    if op is None or not op.inputs or not op.outputs:
        return ""
    pair = [graph.tensor(op, op.inputs[0]).scales, graph.tensor(op, op.outputs[0]).scales]
    if any(len(scales) != 1 for scales in pair):
        return ""
    return f" (scale of the input {pair[0][0]:.6g}, of the output {pair[1][0]:.6g}) "


def _no_kernel(graph: OpGraph, op: Op) -> str:
    """Why XNNPACK makes no kernel for an op, as far as scales tell it."""
    scales = {}
    for role, indices in (("input", op.inputs), ("output", op.outputs)):
        for place, index in enumerate(indices):
            tensor = graph.tensor(op, index) if index >= 0 else None
            if tensor is not None and not tensor.is_constant and len(tensor.scales) == 1:
                scales[f"{role} {place}"] = float(tensor.scales[0])
    told = ", ".join(f"{scale:.4g} of {name}" for name, scale in scales.items())
    if scales and min(scales.values()) < _NEXT_TO_ZERO:
        return (
            f"XNNPACK makes no kernel for scales this far apart ({told}). One next to 0 is that of "
            "a tensor that was zero on every calibration sample: calibrate with samples on which "
            "it is not, or leave the op in float. The builtin kernels may run the file "
            "(runtime='builtin'), but a device that runs XNNPACK will refuse it."
        )
    return (
        f"XNNPACK makes no kernel for this op{f' (scales: {told})' if told else ''}: leave it in "
        "float. The builtin kernels may run the file (runtime='builtin'), but a device that runs "
        "XNNPACK will refuse it."
    )
