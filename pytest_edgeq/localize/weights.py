"""The constants that an op should compute with: the reference's, rounded as the file rounds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from pytest_edgeq.localize.biases import qparams
from pytest_edgeq.localize.constants import costs_a_bit
from pytest_edgeq.localize.kinds import HEAVY, VIEWS, base_name, is_dequantize, is_quantize
from pytest_edgeq.localize.layouts import to_file_layout
from pytest_edgeq.localize.reference import ReferenceGraph
from pytest_edgeq.tflite.boundary import code_range
from pytest_edgeq.tflite.constants import Constant, read_constant, shape_along
from pytest_edgeq.tflite.graph import Op, OpGraph
from pytest_edgeq.tflite.roles import StoredTensor, roles_of, stored_constant

__all__ = [
    "Taken",
    "constants_behind",
    "expected_codes",
    "nearest_factor",
    "product_weights",
    "rounded_constants",
]

Node = torch.fx.Node
Array = np.ndarray[Any, Any]

# Where torch's functions take their weight; the others in the second place. A product of two
# matrices may have it first, as one of learned queries with keys.
_WEIGHT_AT = {
    "embedding": (0,),
    "addmm": (2, 1),
    "baddbmm": (2, 1),
    **dict.fromkeys(("matmul", "mm", "bmm"), (1, 0)),
}
_SCALES = ("mul", "div", "mul_", "div_")

# How graphs turn what they have quantized, or take a group of it.
_LAID_OUT = ("permute", "transpose", "t", "view", "reshape", "unsqueeze", "slice")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """
    A constant of the reference that an op of the file may hold.

    Attributes:
        user: The node that takes it.
        node: The constant.
        factors: What the file may have multiplied it by, each a number or one a channel, because
            the reference multiplies in front or behind by a constant.
    """

    user: Node
    node: Node
    factors: list[torch.Tensor]

    @property
    def kind(self) -> str:
        """The function that takes it; of the first of two matrices the one whose rows it has."""
        name = base_name(self.user)
        places = _WEIGHT_AT.get(name, ())
        is_first = len(places) > 1 and self.user.args[places[1]] is self.node
        return "linear" if is_first else name


def rounded_constants(
    graph: OpGraph, op: Op, reference: ReferenceGraph, given: Iterable[Node]
) -> dict[Node, torch.Tensor]:
    """
    Every float constant that the op may take, as its file's parameters round it.

    Args:
        graph: The file.
        op: The op.
        reference: The torch graph.
        given: The nodes whose values the op takes.
    """
    found: dict[Node, torch.Tensor] = {}
    for stored in _held(graph, op):
        constant = _as_rounded(read_constant(graph, op, stored), stored)
        if constant.scales is None and constant.dtype != "float16":
            continue
        for taken in _nearest_uses(op, constant, reference, constants_behind(reference, given)):
            if reference.is_rounded(taken.node):
                tied = _tied(op, constant, taken, reference)
                if tied is not None:
                    found[taken.node] = tied
                continue
            plain = reference.constant(taken.node, quantized=False)
            if isinstance(plain, torch.Tensor) and plain.numel() == constant.values.size:
                inverse = _is_inverted(op, taken)
                rounded = _rounded(op, constant, taken, 1 / plain if inverse else plain)
                if rounded is not None:
                    found[taken.node] = 1 / rounded if inverse else rounded
    return found


def _nearest_uses(
    op: Op, constant: Constant, reference: ReferenceGraph, uses: Iterable[Taken]
) -> Iterator[Taken]:
    """
    Of a parameter that is used several times the use whose factors the file's constant fits best.

    Another one lies behind products of which the file has ops of their own.
    """
    by_node: dict[Node, list[Taken]] = {}
    for each in uses:
        by_node.setdefault(each.node, []).append(each)
    for node, alike in by_node.items():
        if len(alike) == 1:
            yield alike[0]
            continue
        plain = reference.constant(node, quantized=False)
        if not isinstance(plain, torch.Tensor) or plain.numel() != constant.values.size:
            continue
        yield min(alike, key=lambda each: _nearest(op, constant, each, plain)[0])


def _is_inverted(op: Op, taken: Taken) -> bool:
    """Whether the op multiplies by the inverse of what torch divides by."""
    divides = base_name(taken.user) in ("div", "div_") and taken.user.args[1] is taken.node
    return divides and op.name == "MUL"


def expected_codes(
    op: Op, stored: Constant, taken: Taken, reference: ReferenceGraph
) -> Constant | None:
    """
    The codes that the quantizer chose; where two are as near to a weight, the file's.

    None where the graph makes the constant of them in a way that is not known here.
    """
    chosen = _codes(taken.node, reference)
    if chosen is None:
        return None
    plain = reference.constant(taken.node, quantized=False)
    expected = _with_ties(chosen, op, stored, plain.numpy(), taken)
    # What multiplies behind the product the converter folds into the scale, and leaves the codes.
    factor = nearest_factor(op, stored, taken, plain)
    if factor is None or len(taken.factors) < 2 or not _same_codes(op, stored, expected, taken):
        return expected
    assert expected.scales is not None, "codes have scales"
    return dataclasses.replace(expected, scales=expected.scales * np.abs(factor))


def _same_codes(op: Op, stored: Constant, expected: Constant, taken: Taken) -> bool:
    laid_out = to_file_layout(op.name, expected.values, stored.values.shape, torch_op=taken.kind)
    return any(np.array_equal(each, stored.values) for each in laid_out)


def _tied(op: Op, stored: Constant, taken: Taken, reference: ReferenceGraph) -> torch.Tensor | None:
    """The constant with the file's codes where two are as near; None where it is as it is."""
    chosen = _codes(taken.node, reference)
    if chosen is None or chosen.values.size != stored.values.size:
        return None
    plain = reference.constant(taken.node, quantized=False)
    tied = _with_ties(chosen, op, stored, plain.numpy(), taken)
    if np.array_equal(chosen.values, tied.values):
        return None
    return torch.from_numpy(tied.floats).to(plain.dtype)


def _codes(node: Node, reference: ReferenceGraph) -> Constant | None:
    """The codes of a fake-quantized constant, turned as the graph turns them."""
    chain: list[Any] = []
    while not is_dequantize(node):
        if base_name(node) not in _LAID_OUT:
            return None
        chain.append(node)
        node = node.all_input_nodes[0]
    quantize = node.all_input_nodes[0]
    if not is_quantize(quantize):
        return None
    values = reference.constant(quantize, quantized=True)
    scale, zero_point = (
        reference.constant(n, quantized=True) if isinstance(n, Node) else torch.as_tensor(n)
        for n in quantize.args[1:3]
    )
    axis: Any = quantize.args[3] if base_name(quantize) == "quantize_per_channel" else None
    parts = [values]
    for each in (scale, zero_point):
        shape = shape_along(each.numel(), values.ndim, axis)
        parts.append(each.reshape(shape).expand(values.shape))
    for each in reversed(chain):
        parts = [each.target(part, *each.args[1:], **each.kwargs) for part in parts]
    codes, scales, points = (each.detach().numpy() for each in parts)
    dtype = "int8" if codes.dtype == np.int8 else str(codes.dtype)
    low = quantize.args[4 if axis is not None else 3]
    grouping = "per_tensor" if axis is None else "per_channel"
    return Constant(
        "int4" if low in (-8, -7) else dtype,
        codes.astype(np.int64),
        scales.astype(np.float64),
        points.astype(np.int64),
        grouping,
    )


def _with_ties(expected: Constant, op: Op, stored: Constant, own: Array, taken: Taken) -> Constant:
    """
    Of two codes that are as near to a weight, take the file's.

    torch multiplies by the scale's reciprocal and the converter divides, so that a weight halfway
    between two codes may come out as either.
    """
    assert expected.scales is not None, "codes have scales"
    assert expected.zero_points is not None, "and zero points"
    if own.shape != expected.values.shape:
        return expected
    places = _places(op, stored, taken, own)
    if places is None:
        return expected
    held = _turned(stored.values, places, own.shape)
    steps = own.astype(np.float64) / expected.scales
    middle = (held + expected.values) / 2 - expected.zero_points
    tied = (np.abs(held - expected.values) == 1) & (
        np.abs(steps - middle) <= (np.abs(steps) + 1) * 2.0**-21
    )
    return dataclasses.replace(expected, values=np.where(tied, held, expected.values))


def _as_rounded(constant: Constant, stored: StoredTensor) -> Constant:
    """A float constant in the codes of the QUANTIZE between it and the op, if there is one."""
    given = qparams(stored.operand)
    if constant.scales is not None or given is None:
        return constant
    scale, zero_point = given
    low, high = code_range(stored.operand.dtype)
    codes = np.clip(np.rint(constant.values / scale) + zero_point, low, high)
    rounded = Constant.of_codes(codes, scale, zero_point)
    return dataclasses.replace(rounded, dtype=stored.operand.dtype)


def _held(graph: OpGraph, op: Op) -> Iterator[StoredTensor]:
    """Constants that the op computes with, but for biases, which its bound allows for."""
    roles = roles_of(graph, op)
    inputs = [each.index for each in roles.inputs]
    subgraph = graph.subgraphs[op.subgraph]
    stored = [*roles.weights, *(stored_constant(subgraph, index) for index in inputs)]
    for each in stored:
        if each is not None and each.tensor.is_constant and not each.tensor.is_sparse:
            yield each


def constants_behind(reference: ReferenceGraph, given: Iterable[Node]) -> Iterator[Taken]:
    """Constants that nodes take behind some values, up to the first matrix product."""
    seen: dict[Node, torch.Tensor] = {node: torch.ones(()) for node in given}
    queue = list(seen)
    while queue:
        node = queue.pop(0)
        for user in node.users:
            if user in seen or user.op != "call_function":
                continue
            name = base_name(user)
            seen[user] = seen[node]
            constants = [n for n in user.all_input_nodes if not reference.varies(n)]
            if name in HEAVY or name == "embedding":
                for place in _WEIGHT_AT.get(name, (1,)):
                    weight = user.args[place]
                    if isinstance(weight, Node) and weight in constants:
                        yield Taken(user, weight, _factors(reference, user, seen[node]))
                continue
            scale = _scale(reference, user)
            if scale is not None:
                seen[user] = seen[node] * scale if scale.numel() == 1 else seen[node]
            for constant in constants:
                yield Taken(user, constant, [torch.ones(())])
            if len(seen) < _FAR:
                queue.append(user)


def product_weights(reference: ReferenceGraph) -> Iterator[Node]:
    """The weights of all matrix products, as far as they are constants."""
    for node in reference.nodes:
        for place in _WEIGHT_AT.get(base_name(node), (1,)) if base_name(node) in HEAVY else ():
            weight = node.args[place] if len(node.args) > place else None
            if isinstance(weight, Node) and not reference.varies(weight):
                yield weight


# Constants further away are another op's.
_FAR = 120


def _scale(reference: ReferenceGraph, node: Node) -> torch.Tensor | None:
    """By what a node multiplies, where that is a constant."""
    if base_name(node) in ("neg", "neg_"):
        return torch.tensor(-1.0, dtype=torch.float64)
    if base_name(node) not in _SCALES or len(node.args) < 2:
        return None
    operands = [n for n in node.args[:2] if isinstance(n, Node)]
    varying = [n for n in operands if reference.varies(n)]
    if len(varying) != 1:
        return None
    other = node.args[1] if node.args[0] is varying[0] else node.args[0]
    value = reference.constant(other, quantized=False) if isinstance(other, Node) else other
    scale = torch.as_tensor(value, dtype=torch.float64)
    if base_name(node).startswith("div"):
        return None if node.args[0] is not varying[0] else 1 / scale
    return scale


def _factors(reference: ReferenceGraph, user: Node, before: torch.Tensor) -> list[torch.Tensor]:
    """What lies in front, alone and with each constant that multiplies behind."""
    factors = [before.double()]
    node = user
    while len(node.users) == 1:
        node = next(iter(node.users))
        if base_name(node) in VIEWS or is_quantize(node) or is_dequantize(node):
            continue
        scale = _scale(reference, node)
        if scale is None:
            break
        factors.append(factors[-1] * scale.reshape(-1))
    return factors


def _rounded(op: Op, constant: Constant, taken: Taken, plain: torch.Tensor) -> torch.Tensor | None:
    """
    The reference's constant as the file's parameters round it, in the reference's shape.

    Where a stored code is the nearest one, it is taken as it is: of two that are as near, either
    will do. Elsewhere the nearest one is, so that a code that was changed shows in the results.
    """
    places = _places(op, constant, taken, plain.numpy())
    if places is None:
        return None
    if constant.scales is None or constant.zero_points is None:
        return plain.to(torch.float16).to(plain.dtype)

    codes, scales, points = (
        _turned(each, places, tuple(plain.shape))
        for each in (constant.values, constant.scales, constant.zero_points)
    )
    spread = nearest_factor(op, constant, taken, plain)
    if spread is None:
        return None
    low, high = code_range(constant.dtype)
    steps = plain.double().numpy() * spread / scales
    wanted = steps + points
    # As far as ½ from the real value, one code is as near as the other, up to float32's rounding.
    tied = np.abs(wanted - codes) <= 0.5 + (np.abs(steps) + 1) * 2.0**-20
    nearest = np.round(wanted)
    if not _is_beyond(op, wanted, (low, high), points):
        nearest = np.clip(nearest, low, high)
    # A symmetric range leaves the lowest code out.
    tied |= (wanted < low) & (codes == low + 1)
    held = np.where(tied, codes, nearest)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.where(spread == 0, plain.double().numpy(), (held - points) * scales / spread)
    return torch.from_numpy(values).to(plain.dtype)


def _is_beyond(op: Op, wanted: Array, limits: tuple[int, int], points: Array) -> bool:
    """
    Whether a constant lies beyond its scale where nothing explains it.

    Weights are held to theirs for themselves; what masks with no finite value no scale holds.
    """
    if op.name not in _OF_OWN_RANGE or not np.isfinite(wanted).all():
        return False
    lost = wanted - np.clip(wanted, *limits)
    ends = np.maximum(limits[1] - points, points - limits[0])
    return bool((np.abs(lost) > 1).any()) and costs_a_bit(lost, wanted - points, ends)


# Ops whose constants have a range for themselves; that of others is what the op gives.
_OF_OWN_RANGE = ("ADD", "SUB", "MUL", "DIV")


def _places(op: Op, constant: Constant, taken: Taken, own: Array) -> Array | None:
    """
    Where in torch's layout each element of a constant of the file's belongs, as flat indices.

    Of several layouts that fit it is the one in which both are alike, up to a factor.
    """
    indices = np.arange(own.size).reshape(own.shape)
    places = to_file_layout(op.name, indices, constant.values.shape, torch_op=taken.kind)
    if len(places) < 2 or not own.size:
        return places[0] if places else None
    floats = constant.floats
    held = np.clip(own.ravel(), floats.min(), floats.max())
    return max(places, key=lambda each: abs(float((held[each] * floats).sum())))


def _turned(values: Array, places: Array, shape: tuple[int, ...]) -> Array:
    """Values in the file's layout, in torch's."""
    spread = np.broadcast_to(values, places.shape)
    found = np.empty_like(spread, shape=spread.size)
    found[places.ravel()] = spread.ravel()
    return found.reshape(shape)


def nearest_factor(op: Op, constant: Constant, taken: Taken, plain: torch.Tensor) -> Array | None:
    """
    Of the factors that the file may have folded into a constant the one that fits best.

    Returns:
        Over the constant's elements, in torch's layout; None where it is no layout of the file's.
    """
    return _nearest(op, constant, taken, plain)[1]


def _nearest(
    op: Op, constant: Constant, taken: Taken, plain: torch.Tensor
) -> tuple[float, Array | None]:
    """How far the constant is from the reference's with the factor that fits best, and that one."""
    places = _places(op, constant, taken, plain.numpy())
    best: tuple[float, Array | None] = (math.inf, None)
    if places is None:
        return best
    reals = _turned(constant.floats, places, tuple(plain.shape))
    for factor in taken.factors:
        spread = _spread(factor, plain, taken.user)
        if spread is None:
            continue
        apart = float(np.square(plain.double().numpy() * spread - reals).sum())
        if best[1] is None or not apart >= best[0]:
            best = (apart, spread)
    return best


def _spread(factor: torch.Tensor, plain: torch.Tensor, user: Node) -> Array | None:
    """A factor, one number or one an output channel, over the weight's elements."""
    name = base_name(user)
    axis = 1 if name.startswith("conv_transpose") or name in ("addmm", "mm", "matmul") else 0
    if factor.numel() != 1 and (plain.ndim <= axis or plain.shape[axis] != factor.numel()):
        return None
    shape = shape_along(factor.numel(), plain.ndim, axis)
    return np.broadcast_to(factor.reshape(shape).numpy(), tuple(plain.shape))
