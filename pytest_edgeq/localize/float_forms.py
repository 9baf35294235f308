"""Choose the float files that a quantized file is compared with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq import litert
from pytest_edgeq.compare.reference import (
    graph_module,
    module_tree,
    quantizes_by_itself,
    torch_module,
)
from pytest_edgeq.errors import warn_user
from pytest_edgeq.localize.consumers import MASKING
from pytest_edgeq.localize.measured import difference
from pytest_edgeq.localize.structure import ConstantPair, Pairs, Structure, paired
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.runtimes.runner import Copied
from pytest_edgeq.tflite.boundary import code_range
from pytest_edgeq.tflite.float_form import is_cast, write_in_float
from pytest_edgeq.tflite.op_dtypes import entry_of
from pytest_edgeq.tflite.roles import stored_constant

if TYPE_CHECKING:
    import torch

    from pytest_edgeq.compare.quantized import QuantizedModel
    from pytest_edgeq.compare.samples import Sample


Array = npt.NDArray[Any]

_SLACK = 2.0**-9  # tolerance for float32 arithmetic, relative to one step
_LOOSE = 0.5  # additional tolerance in steps while a factor is only estimated
_NEAR = 2.0**-8  # relative tolerance of a factor that is estimated from rounded values

_PROBED = 64  # elements of a constant that exclude most orders of its axes

_ROUNDED = 2.0**-20
"""Tolerance of a constant that both sides compute in float32, relative to its greatest value."""


def is_rounded_to(pair: ConstantPair, floats: Array, *, cut: bool = False) -> bool:
    """Whether a constant of the file is the rounding of floats."""
    constant, steps = pair.floats, _steps(pair)
    allowed = steps * (0.5 + _SLACK) + _slack(floats)
    near = difference(constant, floats) <= allowed
    if pair.stored.values.dtype.kind == "i" and not near.all():
        # A bias may have been written for another input scale.
        near = difference(pair.stored.floats.reshape(constant.shape), floats) <= allowed
    codes = pair.stored.values.reshape(constant.shape)
    if cut and pair.stored.scales is not None and codes.size and not np.ptp(codes):
        low, high = code_range(pair.stored.dtype)
        near |= ((codes == low) & (floats < constant)) | ((codes == high) & (floats > constant))
    return bool(near.all())


def times_a_number(pair: ConstantPair, floats: Array) -> Array | None:
    """Return floats times the integer, or its inverse, that a constant includes (1/N of a mean)."""
    constant, steps = pair.floats, _steps(pair)
    large = np.abs(floats) >= np.median(np.abs(floats))
    if not floats[large].all():
        return None
    ratio = float(np.median(constant[large] / floats[large]))
    for _ in range(2):
        near = difference(constant, ratio * floats) <= steps * (0.5 + _LOOSE) + _slack(constant)
        if 2 * np.count_nonzero(near) <= near.size or not np.isfinite(ratio) or not ratio:
            return None
        ratio = float((constant[near] * floats[near]).sum() / np.square(floats[near]).sum())
    number = round(ratio) if abs(ratio) > 1 else round(1 / ratio)
    exact = float(number) if abs(ratio) > 1 else 1.0 / number
    return None if abs(number) < 2 or abs(exact / ratio - 1) > _NEAR else exact * floats


def nearest_constants(
    candidates: Iterable[tuple[Array, Array]], constants: Iterable[ConstantPair]
) -> dict[tuple[int, int], Array]:
    """Return the floats within half a step of a file's constants, in any order of the axes."""
    by_size: dict[int, list[tuple[Array, Array]]] = {}
    for rounded, exact in candidates:
        by_size.setdefault(rounded.size, []).append((rounded, exact))
    found: dict[tuple[int, int], Array] = {}
    for pair in constants:
        best: tuple[float, Array] | None = None
        is_float = pair.floats.dtype.kind == "f" and pair.floats.size > 0
        for rounded, exact in by_size.get(pair.floats.size, ()) if is_float else ():
            order = _order(rounded, pair)
            if order is None:
                continue
            turned = rounded.transpose(order).reshape(pair.floats.shape)
            furthest = float(np.abs(turned - pair.floats).max(initial=0.0))
            if best is None or furthest < best[0]:
                best = furthest, exact.transpose(order).reshape(pair.floats.shape)
        if best is not None:
            found[pair.key] = best[1]
    return found


def _order(value: Array, pair: ConstantPair) -> tuple[int, ...] | None:
    """Return the order of axes in which a value rounds to the file's."""
    some = np.linspace(0, value.size - 1, min(value.size, _PROBED)).astype(int)
    steps, slack = _steps(pair).flat[some], _slack(value)
    either = [pair.floats.flat[some], pair.stored.floats.flat[some]]
    for order in axis_orders(value.shape):
        turned = value.transpose(order)
        probed = turned.flat[some]
        off = np.minimum(*(difference(each, probed) for each in either))
        if (off <= steps * (0.5 + _SLACK) + slack).all() and is_rounded_to(
            pair, turned.reshape(pair.floats.shape)
        ):
            return order
    return None


def _slack(floats: Array) -> float:
    return _ROUNDED * float(np.abs(floats[np.isfinite(floats)]).max(initial=0.0))


def _steps(pair: ConstantPair) -> Array:
    """Return the distance between neighbouring codes, or between neighbouring float16 numbers."""
    stored = pair.stored
    steps = np.zeros(()) if stored.scales is None else stored.scales
    if stored.dtype == "float16":
        steps = np.spacing(np.abs(stored.values)).astype(np.float64)
    return np.broadcast_to(steps, stored.values.shape).reshape(pair.floats.shape)


def axis_orders(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield every order of the axes longer than 1, the present one first; others stay in place."""
    for order in itertools.permutations(axis for axis, length in enumerate(shape) if length > 1):
        moved = iter(order)
        yield tuple(next(moved) if length > 1 else axis for axis, length in enumerate(shape))


@dataclass(frozen=True, slots=True, eq=False)
class Forms:
    """Float files of a model, each with interpreters of its own."""

    exact: EdgeFile  # with torch's constants, as far as these are known
    checked: EdgeFile  # the one that is compared with torch; may be the same
    reference: Callable[..., Any] | None
    modules: Mapping[int, str] = field(default_factory=dict)  # by the op of the file
    # Outputs of ops of `checked` that are other ops in the reference's file, or whose constants the
    # reference lacks.
    substituted: frozenset[int] = frozenset()
    unmatched: frozenset[int] = frozenset()
    # `checked` with rounded constants drawn within half a step (by a seed), and with torch's.
    perturbed: Callable[[int], EdgeFile] | None = None
    aligned: Callable[[], EdgeFile] | None = None
    is_nearest: bool = False  # whether most constants are the reference's, rounded to nearest
    converted: EdgeFile | None = None  # the reference's float file, if `checked` is another one


def forms_of(quantized: QuantizedModel, sample: Sample) -> Forms:
    """
    Return the float files of a model.

    A recipe quantizes a float file, which is kept. Other files are written in float, with the torch
    constants that theirs were rounded from: these are looked up in the reference's float file and
    in the reference. A loaded file is compared with the reference's float file itself if its ops
    and most of its constants have a partner there. Without a converted reference the constants are
    unknown.
    """
    if quantized.flow == "torchao":
        return _of_rounded_module(quantized)
    reference = _reference(quantized, sample)
    base = _float_file(quantized, sample)
    structure = None if base is None else Structure(quantized.edge, base)
    is_kept = quantized.float_edge is not None or quantized.flow == "float"
    if base is not None and structure is not None and structure.pairs.is_whole and is_kept:
        return Forms(base, base, reference)
    made = _original_file(quantized)
    constants = Structure(made, _in_float(made, {})).constants
    aligned: dict[tuple[int, int], Array] = {}
    modules: dict[int, str] = {}
    substituted: frozenset[int] = frozenset()
    is_whole = False
    if base is not None and structure is not None:
        own = structure if made is quantized.edge else Structure(made, base)
        is_whole = own.pairs.is_whole
        aligned = {pair.key: pair.floats for pair in own.constants}
        modules = _modules(structure.pairs, base)
        substituted = _substituted(made, own.pairs) if is_whole else substituted
    # A range may clip a mask: its effect on the scores is judged instead.
    masks = {key for key, each in aligned.items() if float(each.min(initial=0)) <= MASKING}
    found = {
        pair.key: aligned[pair.key]
        for pair in constants
        if pair.key in aligned and is_rounded_to(pair, aligned[pair.key], cut=pair.key in masks)
    }
    floating = {key for key, values in aligned.items() if values.dtype.kind == "f"}
    is_nearest = 2 * len(floating & found.keys()) > len(floating)
    if base is not None and structure is not None and quantized.flow == "prebuilt":
        pairs = structure.pairs
        is_alike = pairs.is_whole and not _substituted(quantized.edge, pairs)
        # Differences may be the converter's choice: then the results are compared.
        if is_alike and floating <= found.keys() | masks and not any(structure.findings(())):
            return Forms(base, base, reference, modules)
    candidates = [(each, each) for each in (() if base is None else _floats_of(base))]
    torchs: list[tuple[Array, Array]] = []
    module = torch_module(quantized.float_model)
    if module is not None:
        torchs += [(each, each) for each in map(_array, dict(_tensors(module)).values())]
    if (graph := graph_module(quantized.simulated)) is not None:
        torchs += [(_array(one), _array(two)) for one, two in litert.constants_of(graph)]
    left = [pair for pair in constants if pair.key not in found]
    found |= nearest_constants(candidates + torchs, left)
    if is_whole and not substituted:
        found = aligned | found
    unknown = {
        pair.key: pair for pair in left if pair.key not in found and pair.floats.dtype.kind == "f"
    }
    others = {key: aligned[key] for key in unknown if key in aligned}
    folded = {
        key: product
        for key, values in others.items()
        if (product := times_a_number(unknown[key], values)) is not None
    }
    unmatched = {pair.op.outputs[0] for key, pair in unknown.items() if key not in folded}
    found |= folded
    exact = _in_float(made, found)
    rounded = {
        key: (folded.get(key, pair.floats), steps)
        for key, pair in unknown.items()
        if (steps := _steps(pair)).any()
    }

    def perturbed(seed: int) -> EdgeFile:
        draw = np.random.default_rng(seed).uniform
        drawn = {
            key: values + draw(-0.5, 0.5, values.shape) * steps
            for key, (values, steps) in rounded.items()
        }
        return _in_float(made, found | drawn)

    def with_torchs() -> EdgeFile:
        # The reference's float file may fold a factor near 1, as of a batch norm, where this does
        # not: both values have the same codes.
        return _in_float(made, found | others | nearest_constants(torchs, constants))

    return Forms(
        exact,
        exact,
        reference,
        modules,
        substituted,
        frozenset(unmatched),
        perturbed if rounded else None,
        with_torchs if others or (aligned and not is_whole) else None,
        is_nearest,
        base,
    )


def _of_rounded_module(quantized: QuantizedModel) -> Forms:
    """Return the forms of a file whose weights torchao rounded; the reference has these."""
    made = _original_file(quantized)
    simulated, reference = quantized.simulated, quantized.float_model
    assert simulated is not None, "this flow has one"
    assert reference is not None, "this flow has one"
    plain = _in_float(made, {})
    constants = Structure(made, plain).constants
    found = nearest_constants(_named_constants(simulated, reference), constants)
    return Forms(_in_float(made, found), plain, litert.dequantized(simulated))


def _original_file(quantized: QuantizedModel) -> EdgeFile:
    """Return the flow's file if its ops match the replacement's, else the replacement."""
    origin = quantized.origin
    is_same = origin is not None and paired(quantized.edge, origin).is_whole
    return origin if origin is not None and is_same else quantized.edge


def _in_float(made: EdgeFile, operands: Mapping[tuple[int, int], Array]) -> EdgeFile:
    """Write a file in float, with other values of some operands."""
    subgraph = made.subgraph
    constants: dict[tuple[int, int], Array] = {}
    for (number, place), values in operands.items():
        # A constant behind a RESHAPE or TRANSPOSE keeps its own values.
        stored = stored_constant(subgraph, subgraph.ops[number].inputs[place])
        is_same = stored is not None and values.shape == stored.tensor.shape
        if stored is not None and is_same and values.dtype.kind == "f":
            constants[subgraph.index, stored.tensor.index] = values
    return EdgeFile(
        write_in_float(made.graph, constants),
        runtimes=made.runtimes,
        copied=Copied("a copy of the file in float", _names(made)),
    ).at(made.key)


def _names(made: EdgeFile) -> dict[tuple[int, int], str]:
    """Return op names by place in the float form, which has no casts."""
    return {
        (subgraph.index, number): entry_of(made.graph, op, made.modules).where
        for subgraph in made.graph.subgraphs
        for number, op in enumerate(op for op in subgraph.ops if not is_cast(made.graph, op))
    }


def _float_file(quantized: QuantizedModel, sample: Sample) -> EdgeFile | None:
    """Return the flow's float file, or the converted reference; None if neither."""
    if quantized.float_edge is not None:
        return quantized.float_edge.clone()
    if quantized.flow == "float":
        return (quantized.origin or quantized.edge).clone()
    make = quantized.float_file
    if make is None:
        return None
    try:
        return EdgeFile(
            make(sample),
            modules=module_tree(make.traced(sample).model),
            runtimes=quantized.edge.runtimes,
            copied=Copied("the float file that the reference converts to"),
        )
    except RuntimeError as error:
        warn_user(
            f"{quantized.name}: constants are compared with torch by their effect on outputs, not "
            f"one by one, as the reference cannot be converted in float: {error}"
        )
        return None


def _substituted(file: EdgeFile, pairs: Pairs) -> frozenset[int]:
    """Return the output tensors of ops whose partners have another name."""
    ops = file.subgraph.ops
    partners = pairs.ops.items()
    return frozenset(ops[n].outputs[0] for n, each in partners if ops[n].name != each.name)


def _modules(pairs: Pairs, base: EdgeFile) -> dict[int, str]:
    """Return the modules of the partners of a file's ops."""
    subgraph = base.signature.subgraph
    known = {entry.index: entry.module for entry in base.op_dtypes if entry.subgraph == subgraph}
    return {
        number: module
        for number, partner in pairs.ops.items()
        if (module := known.get(partner.index)) is not None
    }


def _reference(quantized: QuantizedModel, sample: Sample) -> Callable[..., Any] | None:
    """Return what a form is compared with; None if it quantizes by itself or is that form."""
    reference, make = quantized.float_model, quantized.float_file
    assert reference is not None, "a localizer has checked it"
    if make is None:
        is_base = quantized.is_float_file_reference and (
            (base := quantized.float_edge) is not None and paired(quantized.edge, base).is_whole
        )
        return None if is_base or quantizes_by_itself(reference) else reference
    model = make.traced(sample).model
    return reference if model is torch_module(reference) else model


def _floats_of(edge: EdgeFile) -> Iterator[Array]:
    """Yield the constants of a float file."""
    subgraph = edge.subgraph
    for tensor in subgraph.tensors:
        if tensor.is_constant and tensor.dtype == "float32":
            values = edge.graph.constant(tensor).view(np.float32)
            yield values.astype(np.float64).reshape(tensor.shape)


def _named_constants(
    simulated: torch.nn.Module, reference: Callable[..., Any]
) -> list[tuple[Array, Array]]:
    """Return torch's constants, as the flow rounded them and as they were."""
    if torch_module(reference) is not reference:
        return []
    plain, known = litert.dequantized(simulated), dict(_tensors(reference))
    return [
        (_array(value), _array(known[name]))
        for name, value in _tensors(plain)
        if name in known and known[name].shape == value.shape
    ]


def _tensors(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return [(name, value) for name, value in named if value.is_floating_point()]


def _array(value: torch.Tensor) -> Array:
    array: Array = value.detach().double().numpy()
    return array
