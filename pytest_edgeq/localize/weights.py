"""The constants that an op should compute with: the reference's, rounded as the file rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from pytest_edgeq.localize.constants import Constant, read_constant, to_file_layout
from pytest_edgeq.localize.kinds import HEAVY, VIEWS, base_name
from pytest_edgeq.localize.reference import ReferenceGraph, is_dequantize, is_quantize
from pytest_edgeq.tflite.boundary import code_range
from pytest_edgeq.tflite.graph import Op, OpGraph
from pytest_edgeq.tflite.roles import StoredTensor, roles_of, stored_constant

__all__ = ["Taken", "constants_behind", "nearest_factor", "rounded_constants"]

Node = torch.fx.Node
Array = np.ndarray[Any, Any]

_RANGES = {"int4": (-8, 7), "int2": (-2, 1)}

# Where torch's functions take their weight; the others in the second place.
_WEIGHT_AT = {"addmm": 2, "baddbmm": 2, "embedding": 0, "einsum": 1}
_SCALES = ("mul", "div", "mul_", "div_")


class Taken:
    """
    A constant of the reference that an op of the file may hold.

    Attributes:
        user: The node that takes it.
        node: The constant.
        factors: What the file may have multiplied it by, each a number or one a channel, because
            the reference multiplies in front or behind by a constant.
    """

    __slots__ = ("factors", "node", "user")

    def __init__(self, user: Node, node: Node, factors: list[torch.Tensor]) -> None:
        self.user = user
        self.node = node
        self.factors = factors


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
    held = list(_held(graph, op))
    for stored in held:
        constant = read_constant(graph, op, stored)
        if constant.scales is None and constant.dtype != "float16":
            continue
        for taken in constants_behind(reference, given):
            if reference.is_rounded(taken.node):
                continue
            plain = reference.constant(taken.node, quantized=False)
            if isinstance(plain, torch.Tensor) and plain.numel() == constant.values.size:
                rounded = _rounded(op, constant, taken, plain)
                if rounded is not None:
                    found[taken.node] = rounded
    return found


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
                place = _WEIGHT_AT.get(name, 1)
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


# Constants further away are another op's.
_FAR = 120


def _scale(reference: ReferenceGraph, node: Node) -> torch.Tensor | None:
    """By what a node multiplies, where that is a constant."""
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
    places = to_file_layout(
        op.name,
        np.arange(plain.numel()).reshape(tuple(plain.shape)),
        constant.values.shape,
        torch_op=base_name(taken.user),
    )
    if not places:
        return None
    if constant.scales is None or constant.zero_points is None:
        return plain.to(torch.float16).to(plain.dtype)

    codes, scales, points = (
        _turned(each, places[0], tuple(plain.shape))
        for each in (constant.values, constant.scales, constant.zero_points)
    )
    low, high = _RANGES.get(constant.dtype) or code_range(constant.dtype)
    spread = nearest_factor(op, constant, taken, plain)
    if spread is None:
        return None
    wanted = plain.double().numpy() * spread / scales + points
    # As far as ½ from the real value, one code is as near as the other, up to float32's rounding.
    tied = np.abs(wanted - codes) <= 0.5 + (np.abs(wanted) + 1) * 2.0**-20
    held = np.where(tied, codes, np.clip(np.round(wanted), low, high))
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.where(spread == 0, plain.double().numpy(), (held - points) * scales / spread)
    return torch.from_numpy(values).to(plain.dtype)


def _turned(values: Array, places: Array, shape: tuple[int, ...]) -> Array:
    """Values in the file's layout, in torch's."""
    spread = np.broadcast_to(values, places.shape)
    found = np.empty(spread.size, np.float64)
    found[places.ravel()] = spread.ravel()
    return found.reshape(shape)


def nearest_factor(op: Op, constant: Constant, taken: Taken, plain: torch.Tensor) -> Array | None:
    """
    Of the factors that the file may have folded into a constant the one that fits best.

    Returns:
        Over the constant's elements, in torch's layout; None where it is no layout of the file's.
    """
    places = to_file_layout(
        op.name,
        np.arange(plain.numel()).reshape(tuple(plain.shape)),
        constant.values.shape,
        torch_op=base_name(taken.user),
    )
    if not places:
        return None
    reals = _turned(constant.floats, places[0], tuple(plain.shape))
    best: tuple[float, Array] | None = None
    for factor in taken.factors:
        spread = _spread(factor, plain, taken.user)
        if spread is None:
            continue
        apart = float(np.square(plain.double().numpy() * spread - reals).sum())
        if best is None or not apart >= best[0]:
            best = (apart, spread)
    return None if best is None else best[1]


def _spread(factor: torch.Tensor, plain: torch.Tensor, user: Node) -> Array | None:
    """A factor, one number or one an output channel, over the weight's elements."""
    if factor.numel() == 1:
        return np.broadcast_to(factor.reshape(()).numpy(), tuple(plain.shape))
    name = base_name(user)
    axis = 1 if name.startswith("conv_transpose") or name in ("addmm", "mm", "matmul") else 0
    if plain.ndim <= axis or plain.shape[axis] != factor.numel():
        return None
    shape = [1] * plain.ndim
    shape[axis] = -1
    return np.broadcast_to(factor.reshape(shape).numpy(), tuple(plain.shape))
