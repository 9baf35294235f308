"""Explain why kernels refuse a file: their words, the cause, the fix."""

from __future__ import annotations

import re
from collections.abc import Callable

from pytest_edgeq.errors import UnrunnableError
from pytest_edgeq.names import printable
from pytest_edgeq.numerics.findings import Place
from pytest_edgeq.tflite.conformance import violations_of
from pytest_edgeq.tflite.cut import Cut, cut_ops, first_op_that
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.subgraph import Op

# The kernels' own words, with cause and fix.
_KNOWN_REFUSALS = {
    r"div\.cc.*data\[i\] != zero_point": (
        "a divisor has the code of 0, at which the kernel fails: values below half a step of the "
        "divisor's range are rounded to 0. Clamp the divisor in the model at a step or more, or "
        "leave the op in float."
    ),
    r"broadcast_to\.cc.*must be broadcastable": (
        "the tensor does not broadcast to the shape that the op has. litert-torch 0.10 writes this "
        "where a constant that forward expands is joined to an image in front of a convolution: it "
        "moves the channels of the shape last, and not those of the constant. Store the constant "
        "at its full size as a buffer of the module, or repeat it in place of expanding it."
    ),
    r"currently supported for stablehlo\.scatter": (
        "the kernel does not know the sum that the converter writes for values that meet in one "
        "place (scatter_add, index_add, F.fold): multiply by a constant matrix in place of it, and "
        "fold by a transposed convolution with weights of 0 and 1."
    ),
    r"Tensor data is null": (
        "the signature names an output that no op of the file computes: the step that wrote the "
        "file broke it."
    ),
    r"in XNNPACK delegate": (
        "the XNNPACK delegate supports no tensor of this kind: choose another runtime "
        "(runtime='builtin'), and mind that a device that runs XNNPACK will refuse the file."
    ),
    r"index out of (bounds|range)": (
        "an index in the inputs, such as a token id, is beyond the rows of the table that it is "
        "looked up in: give samples whose indices are in the table."
    ),
    r"bad_alloc|Unable to allocate": (
        "its tensors need more memory than there is: look at their shapes (edgeq show FILE). A "
        "file that was meant to be small is damaged; build or download it again."
    ),
}

# Errors of LiteRT's CompiledModel for files that it does not support, ai-edge-litert 2.3.0.
OTHER_KIND = {
    r"Failed to load model from": (
        "CompiledModel reads files more strictly than the interpreter: for one, a signature must "
        "name every input and output of its subgraph, each once. The interpreter runs the file "
        "(runtime='xnnpack'); an app that uses CompiledModel cannot."
    ),
    r"Failed to register output|Insufficient buffer size|Failed to allocate tensors": (
        "CompiledModel allocates each output before the run, so the shape of an output may "
        "not depend on values, such as a length that the file reads by SHAPE. The interpreter runs "
        "the file (runtime='xnnpack'); an app that uses CompiledModel cannot."
    ),
    r"CompiledModel leaves memory unwritten": (
        "CompiledModel writes what an op computes, once, and hands out the memory of anything else "
        "as it finds it. The interpreter runs the file (runtime='xnnpack'); an app that uses "
        "CompiledModel gets numbers that mean nothing."
    ),
    r"CompiledModel identifies tensors by name": (
        "the file has no signature, and its names were stripped or are ambiguous: write it with a "
        "signature. The interpreter runs the file (runtime='xnnpack')."
    ),
    r"must have all static dimensions|Dimensions must be positive": (
        "CompiledModel supports no input or output without elements; the interpreter does "
        "(runtime='xnnpack')."
    ),
}

_MISSING = re.compile(
    r"Didn't find op for builtin opcode '(\w+)' version '(\d+)'|nresolved custom op: (.+?)\.?$",
    re.MULTILINE,
)
"""Errors of kernels that lack an op."""

# The XNNPACK delegate's only words for an op without a kernel.
_UNNAMED = "failed to create XNNPACK runtime"

_KERNELS = ("xnnpack", "builtin", "reference")

# A tensor that was zero on all samples gets a scale next to zero (ai-edge-quantizer 0.10:
# 3.9e-12, a range of 1e-9 in 255 steps). No useful sample has values below.
_NEXT_TO_ZERO = 1e-9


def refusal(
    what: str,
    error: str,
    graph: OpGraph,
    runtime: str,
    where: Callable[[Op], str],
    load: Callable[[bytes, str], object],
) -> UnrunnableError:
    """Return the error of a runtime that refuses a file: op, cause, kernels' words."""
    # An interpreter whose runs fail repeats the errors of all runs before.
    error = re.sub(r"\A(.+?)\1+\Z", r"\1", error.strip(), flags=re.DOTALL)
    missing = _MISSING.search(error)
    op, name = _refusing_op(error, graph, missing, load)
    place = f": {name}" if op is None and name else "" if op is None else f": {where(op)}"
    violated = () if op is None or missing is not None else violations_of(graph, op)
    broken = next((each.finding() for each in violated if not each.is_warning), None)
    if missing is not None:
        meaning: str | None = _lacks(graph, op, missing, load)
    elif broken is not None:
        meaning = None
    elif op is not None and _UNNAMED in error:
        meaning = _no_kernel(graph, op)
    else:
        known = (_KNOWN_REFUSALS | OTHER_KIND).items()
        meaning = next((text for symptom, text in known if re.search(symptom, error)), None)
    lines = [f"cannot {what}{place}"]
    # The kernels print floats by %d, which prints another number in every run.
    message = re.sub(r"(?<=params\.scale) \(-?\d+ [!=]= -?\d+\)", _scales(graph, op), error)
    # The delegate joins its words without a blank, and repeats the first of them.
    message = re.sub(rf"(?:{_UNNAMED})+", f"{_UNNAMED}; ", message)
    if meaning is not None:
        lines.append(f"cause: {meaning}")
    # Their words include names of the file.
    lines.append("the kernels said: " + "\n".join(map(printable, message.splitlines())))
    is_lacking = missing is not None or any(re.search(each, error) for each in OTHER_KIND)
    return UnrunnableError(runtime, "\n".join(lines), is_lacking=is_lacking, broken=broken)


def refusing(load: Callable[[bytes], object], symptom: str = "") -> Callable[[Cut], bool]:
    """Return whether loading isolated ops raises an error with this symptom, as a function."""

    def refuses(cut: Cut) -> bool:
        try:
            load(cut.content)
        except (RuntimeError, ValueError) as error:
            return re.search(symptom, str(error)) is not None
        return False

    return refuses


def _refusing_op(
    error: str, graph: OpGraph, missing: re.Match[str] | None, load: Callable[[bytes, str], object]
) -> tuple[Op | None, str]:
    """Return the op that kernels refuse, or its name if it is ambiguous."""
    if _UNNAMED in error:
        return first_op_that(graph, 0, refusing(lambda content: load(content, "xnnpack"))), ""
    if missing is not None:
        builtin, version, custom = missing.groups()
        wanted = (builtin, int(version)) if builtin else (f"CUSTOM:{custom}", None)
        found = ((op, graph.version(op) if builtin else None) for op in graph.ops)
        return next((op for op, op_version in found if (op.name, op_version) == wanted), None), ""
    tensor = re.search(r"of tensor (\d+) in XNNPACK delegate", error)
    if tensor is not None:
        # The delegate names a tensor of the first subgraph, and itself as the node.
        return next((op for op in graph.subgraphs[0].ops if int(tensor[1]) in op.inputs), None), ""
    delegated = re.search(r"failed to [a-z ]+ ([A-Z0-9_]+) node #(\d+)", error)
    if delegated is not None:
        name, number = delegated[1], int(delegated[2])
        ops = [op for op in graph.subgraphs[0].ops if (op.index, op.name) == (number, name)]
        return (ops[0] if ops else None), ""
    node = re.search(r"Node number (\d+) \((\w+)\)", error)
    if node is None or node[2].startswith("TfLite"):  # the delegate, which is no op of the file
        return None, ""
    # Kernels number the ops of each subgraph from 0, and delegates behind the last.
    ops = [op for op in graph.ops if (op.index, op.name) == (int(node[1]), node[2])]
    return (ops[0], "") if len(ops) == 1 else (None, str(Place("op", node[2], int(node[1]))))


def _lacks(
    graph: OpGraph, op: Op | None, missing: re.Match[str], load: Callable[[bytes, str], object]
) -> str:
    """Describe which kernels have an op that others lack."""
    builtin, version, custom = missing.groups()
    called = f"{builtin} version {version}" if builtin else f"the custom op {printable(custom)}"
    cut = None if op is None else cut_ops(graph, op.subgraph, wanted={op.index})
    content = cut.content if cut is not None and cut.outputs else bytes(graph.buffer[:])

    def has(kernels: str) -> bool:
        try:
            load(content, kernels)
        except (RuntimeError, ValueError) as error:
            found = _MISSING.search(str(error))
            return found is None or found.groups() != missing.groups()
        return True

    having = [kernels for kernels in _KERNELS if has(kernels)]
    if having:
        lacking = [kernels for kernels in _KERNELS if kernels not in having]
        return (
            f"{called} has a kernel in {' and '.join(having)}"
            f"{', and none in ' + ' and '.join(lacking) if lacking else ''}: run the file there "
            f"(runtime={having[0]!r})."
        )
    text = f"no kernel of LiteRT ({', '.join(_KERNELS)}) computes {called}"
    if builtin == "STABLEHLO_IOTA":
        return (
            f"{text}, which the converter leaves of a constant that forward makes (torch.eye): "
            "register it as a buffer of the module."
        )
    if builtin and builtin.startswith("STABLEHLO_"):
        examples = " (torch.sort, torch.topk)" if builtin == "STABLEHLO_SORT" else ""
        return (
            f"{text}, which the converter leaves where TFLite has no such op{examples}: keep that "
            "part out of the model."
        )
    if builtin:
        return (
            f"{text}: the file was written for a later release; upgrade ai-edge-litert, or convert "
            "the model for this one."
        )
    return f"{text}: run the file by a runtime of your own that has it, or leave the op out."


def _scales(graph: OpGraph, op: Op | None) -> str:
    """Format the scales of an op's first input and output, if per tensor."""
    ends = () if op is None else (*op.inputs[:1], *op.outputs[:1])
    if op is None or len(ends) < 2 or min(ends) < 0:
        return ""
    pair = [graph.tensor(op, index).scales for index in ends]
    if any(len(scales) != 1 for scales in pair):
        return ""
    return f" (scale of the input {pair[0][0]:.6g}, of the output {pair[1][0]:.6g}) "


def _no_kernel(graph: OpGraph, op: Op) -> str:
    """Describe why XNNPACK has no kernel for an op, from its scales."""
    scales = {}
    for role, indices in (("input", op.inputs), ("output", op.outputs)):
        for place, index in enumerate(indices):
            tensor = graph.tensor(op, index) if index >= 0 else None
            if tensor is not None and not tensor.is_constant and len(tensor.scales) == 1:
                scales[f"{role} {place}"] = float(tensor.scales[0])
    text = ", ".join(f"{scale:.4g} of {name}" for name, scale in scales.items())
    if scales and min(scales.values()) < _NEXT_TO_ZERO:
        why = (
            f"scales that differ so much ({text}). One next to 0 is that of a tensor that was zero "
            "on every calibration sample: calibrate with samples on which it is not, or leave the "
            "op in float."
        )
    else:
        why = f"this op{f' (scales: {text})' if text else ''}: leave it in float."
    return (
        f"XNNPACK makes no kernel for {why} The builtin kernels may run the file "
        "(runtime='builtin'), but a device that runs XNNPACK will refuse it."
    )
