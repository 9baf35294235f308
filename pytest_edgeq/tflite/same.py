"""Compare a file with the one that it should be: ops, wiring, options, parameters."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.tflite.flatbuffer import enum_names
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.op_dtypes import OpDtypeMap
from pytest_edgeq.tflite.subgraph import Op, Signature, Tensor

_SCALE_TOLERANCE = 2.0**-10
"""
Relative tolerance of two scales: the furthest code of int8 moves by 1/8 LSB.

Another machine may sum ranges in another order, which changes their last digits.
"""


def io_differences(origin: OpGraph, other: OpGraph) -> list[str]:
    """
    Describe differences of inputs and outputs: number, names, order, dtypes, shapes.

    Signatures are matched by key, or regardless of it if each file has only one.
    """
    found = []
    for ours, theirs in signature_pairs(origin, other):
        for side in ("inputs", "outputs"):
            expected, got = (
                [
                    f"{each.name} {each.tensor.dtype} {list(each.tensor.shape_signature)}"
                    for each in getattr(signature, side)
                ]
                for signature in (ours, theirs)
            )
            if expected != got:
                found.append(f"{side}: expected {'; '.join(expected)}, got {'; '.join(got)}")
    return found


def signature_pairs(origin: OpGraph, other: OpGraph) -> Iterator[tuple[Signature, Signature]]:
    """Pair signatures by key; those of files with one each, whatever their keys."""
    if len(origin.signatures) == len(other.signatures) == 1:
        yield origin.signatures[0], other.signatures[0]
        return
    by_key = {each.key: each for each in other.signatures}
    for ours in origin.signatures:
        if ours.key in by_key:
            yield ours, by_key[ours.key]


def op_differences(origin: OpGraph, other: OpGraph, names: OpDtypeMap) -> list[str]:
    """Describe the differences between the ops of two files with equal op-dtype maps."""
    # Equal maps have equally many ops, inputs and outputs; more of anything else in a damaged file
    # (subgraphs that nothing runs, outputs of an op) does not matter.
    found = []
    places: list[dict[int, int]] = []
    for here, there in zip(origin.subgraphs, other.subgraphs, strict=False):
        places.append(dict(zip(here.inputs, there.inputs, strict=False)))
        for ours, theirs in places[-1].items():
            problem = parameter_difference(here.tensors[ours], there.tensors[theirs])
            if problem:
                found.append(f"the input {here.tensors[ours].name!r}: {problem}")
    for entry, one, two in zip(names, origin.ops, other.ops, strict=False):
        known = places[one.subgraph]
        wrong = [
            *_wiring(origin, other, one, two, known),
            *option_differences(origin, other, one, two),
        ]
        for ours, theirs in zip(one.outputs, two.outputs, strict=False):
            known[ours] = theirs
            if ours >= 0 and theirs >= 0:
                problem = parameter_difference(origin.tensor(one, ours), other.tensor(two, theirs))
                wrong += [f"its output: {problem}"] if problem else []
        found += [f"{entry.where}: {each}" for each in wrong]
    for expected, got in signature_pairs(origin, other):
        known = places[expected.subgraph]
        for io_tensor, claimed in zip(expected.outputs, got.outputs, strict=False):
            index = io_tensor.tensor.index
            if known.get(index, claimed.tensor.index) != claimed.tensor.index:
                wanted = source_of(origin, expected.subgraph, index)
                actual = source_of(other, got.subgraph, claimed.tensor.index)
                found.append(f"the output {io_tensor.name!r}: expected {wanted}, got {actual}")
    return found


def _wiring(
    origin: OpGraph, other: OpGraph, one: Op, two: Op, known: dict[int, int]
) -> Iterator[str]:
    """Describe the operands of an op that have another producer."""
    if len(one.inputs) != len(two.inputs):
        yield f"expected {len(one.inputs)} operands, got {len(two.inputs)}"
        return
    for position, (ours, theirs) in enumerate(zip(one.inputs, two.inputs, strict=True)):
        if (ours < 0) != (theirs < 0):
            yield f"operand {position}: expected one{' to be left out' if ours < 0 else ''}"
        elif ours >= 0 and known.get(ours, theirs) != theirs:
            expected = source_of(origin, one.subgraph, ours)
            got = source_of(other, two.subgraph, theirs)
            yield f"operand {position}: expected {expected}, got {got}"
        elif ours >= 0:
            shapes = origin.tensor(one, ours).shape, other.tensor(two, theirs).shape
            if shapes[0] != shapes[1]:
                yield f"operand {position}: expected shape {list(shapes[0])}, got {list(shapes[1])}"


def source_of(graph: OpGraph, subgraph: int, tensor: int) -> str:
    """Name the op, input or constant that produces a tensor."""
    part = graph.subgraphs[subgraph]
    maker = part.producer.get(tensor)
    if maker is not None:
        return f"the output of {maker.place}"
    kind = "input" if tensor in part.inputs else "constant"
    return f"the {kind} {part.tensors[tensor].name!r}"


def option_differences(
    origin: OpGraph, other: OpGraph, one: Op, two: Op, *, ignored: Container[str] = ()
) -> Iterator[str]:
    """Describe the differing options of two ops: strides, padding, fused activation."""
    for key, expected, got in changed_options(origin, other, one, two):
        if key not in ignored:
            name = "fused activation" if key == "fusedActivationFunction" else key
            yield f"{name}: expected {expected}, got {got}"


def changed_options(
    origin: OpGraph, other: OpGraph, one: Op, two: Op
) -> Iterator[tuple[str, Any, Any]]:
    """Yield the differing options: the schema's names, and both values."""
    ours, theirs = _fields(origin, one), _fields(other, two)
    for key in sorted(ours.keys() | theirs.keys()):
        expected, got = ours.get(key), theirs.get(key)
        if expected == got:
            continue
        if key == "fusedActivationFunction":
            expected, got = one.fused_activation, two.fused_activation
        elif key == "padding":
            paddings: dict[Any, str] = dict(enum_names("Padding"))
            expected, got = paddings.get(expected), paddings.get(got)
        yield key, expected, got


def _fields(graph: OpGraph, op: Op) -> dict[str, Any]:
    from ai_edge_litert import schema_py_generated as schema

    raw = schema.OperatorT.InitFromObj(graph.operator(op))
    fields: dict[str, Any] = {}
    for options in (raw.builtinOptions, raw.builtinOptions2):
        fields |= {} if options is None else vars(options)
    if fields.pop("decompositionSubgraphIndex", None) is not None:  # each file numbers its own
        fields |= _attributes(fields.pop("compositeAttributes"))
    if raw.customOptions is not None:
        fields = {**fields, "options": bytes(bytearray(raw.customOptions))}
    return {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in fields.items()
    }


def _attributes(content: npt.NDArray[np.uint8] | None) -> dict[str, Any]:
    """Return the attributes of a composite, by name."""
    from flatbuffers import flexbuffers  # type: ignore[import-untyped] # ships no types

    raw = b"" if content is None else bytes(bytearray(content))
    try:
        found = flexbuffers.Loads(raw)
    except Exception:  # of many kinds in a damaged file
        found = None
    if not isinstance(found, dict):
        return {"attributes": raw}
    # A float32 is not written as the float64 that it is.
    return {k: float(f"{v:.7g}") if isinstance(v, float) else v for k, v in found.items()}


def decomposition_differences(origin: OpGraph, other: OpGraph, one: Op, two: Op) -> Iterator[str]:
    """Describe the differing options and float constants of the ops of two composites."""
    here, there = origin.decomposition(one), other.decomposition(two)
    if here is None or there is None or [o.name for o in here.ops] != [o.name for o in there.ops]:
        return
    for ours, theirs in zip(here.ops, there.ops, strict=True):
        texts = [*option_differences(origin, other, ours, theirs)]
        for place, pair in enumerate(zip(ours.inputs, theirs.inputs, strict=False)):
            if min(pair) < 0:
                continue
            sides = (origin, here.tensors[pair[0]]), (other, there.tensors[pair[1]])
            if not all(each.is_constant and each.dtype == "float32" for _, each in sides):
                continue
            expected, got = (graph.constant(each).view(np.float32) for graph, each in sides)
            if expected.size == got.size and (expected != got).any():
                at = int((expected != got).argmax())
                texts.append(f"operand {place}: expected {expected[at]:.6g}, got {got[at]:.6g}")
        yield from (f"its {theirs.name} #{theirs.index}: {text}" for text in texts)


def parameter_difference(ours: Tensor, theirs: Tensor) -> str:
    """Describe the difference of two tensors' quantization parameters; empty if none."""
    if len(ours.scales) != len(theirs.scales):
        return f"expected {len(ours.scales)} scales, got {len(theirs.scales)}"
    with np.errstate(invalid="ignore"):
        differences = np.abs(theirs.scales.astype(np.float64) - ours.scales)
        differ = ~(differences <= _SCALE_TOLERANCE * np.abs(ours.scales))
    if differ.any():
        at = int(differ.argmax())
        return f"expected the scale {ours.scales[at]:.6g}, got {theirs.scales[at]:.6g}"
    if not np.array_equal(ours.zero_points, theirs.zero_points):
        at = int((ours.zero_points != theirs.zero_points).argmax())
        return f"expected the zero point {ours.zero_points[at]}, got {theirs.zero_points[at]}"
    return ""


def unexpected_qparams(
    what: str, actual: tuple[float, int], expected: tuple[float, int], whose: str = "the reference"
) -> str | None:
    """Describe how an activation's parameters differ from others, exactly as float32."""
    (scale, zero_point), (wanted, wanted_point) = actual, expected
    wants, gets = [], []
    if np.float32(scale) != np.float32(wanted):
        times = ratio_text(float(np.float64(np.float32(scale)) / np.float32(wanted)))
        wants.append(f"scale {wanted:.6g}")
        gets.append(f"{scale:.6g} ({times} ×)")
    if zero_point != wanted_point:
        wants.append(f"zero point {wanted_point}")
        gets.append(f"{zero_point} ({zero_point - wanted_point:+d})".replace("(-", "(−"))
    if not wants:
        return None
    return f"{what}: expected {whose}'s {' and '.join(wants)}, got {' and '.join(gets)}"


def ratio_text(value: float) -> str:
    """Format a ratio with four digits, or enough to distinguish it from 1."""
    if abs(value - 1) < 5e-4:
        return f"(1 {'+' if value > 1 else '−'} {abs(value - 1):.2g})"
    return f"{value:.4g}"
