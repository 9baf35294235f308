"""Match constants of a torch graph with constants of its file, by their values."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pytest_edgeq import litert
from pytest_edgeq.localize.structure import ConstantPair

__all__ = ["axis_orders", "unrounded_constants", "with_file_constants"]

Array = npt.NDArray[Any]
Node = torch.fx.Node

_SLACK = 2.0**-9
"""Tolerance for float32 arithmetic, relative to one step."""

_ROUNDED = 2.0**-20
"""Tolerance of a constant that both sides compute in float32, relative to its greatest value."""

_LEAST = 2
"""Elements by which a constant is told from others; one number may be anybody's."""


def with_file_constants(
    module: torch.fx.GraphModule, constants: Iterable[ConstantPair]
) -> torch.fx.GraphModule:
    """
    Return a graph in which each constant has the values that the file has for it.

    A constant of the graph is looked up by its values: it is the one in the file that lies within
    half of the file's own step of it, in any order of its axes. So the converter's rounding of what
    the graph leaves in float (biases, the operand of a product) is no difference any more.

    Args:
        module: The graph; left as it is.
        constants: Operands of the file's ops.
    """
    by_size: dict[int, list[tuple[Array, Array]]] = {}
    for pair in constants:
        if _is_told(pair):
            by_size.setdefault(pair.floats.size, []).append((pair.floats, _steps(pair)))
    changed = litert.copied_graph(module)
    graph = changed.graph
    by_target: dict[str, list[tuple[Node, Node]]] = {}
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            if operand.op == "get_attr":
                by_target.setdefault(str(operand.target), []).append((operand, node))
    number = 0
    for target, uses in by_target.items():
        value = operator.attrgetter(target)(module)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        found = _fitting(value.detach().numpy(), by_size.get(value.numel(), ()))
        if not found:
            continue
        if len(found) != len(uses):
            # Of a constant that several ops share, whose is whose is told by their order alone.
            found = [min(found, key=lambda fit: fit.furthest)] * len(uses)
        for (operand, user), fit in zip(uses, found, strict=True):
            name = f"_of_the_file_{number}"
            number += 1
            made = torch.from_numpy(fit.values.copy())
            changed.register_buffer(name, made.to(value.dtype))
            with graph.inserting_before(user):
                user.replace_input_with(operand, graph.get_attr(name))
    graph.eliminate_dead_code()
    changed.recompile()
    return changed


def unrounded_constants(
    candidates: Iterable[tuple[Array, Array]], constants: Iterable[ConstantPair]
) -> dict[tuple[int, int], Array]:
    """
    Return the floats that the constants of a file were before they were rounded.

    Args:
        candidates: Constants of torch, as the file was made from them and before.
        constants: Operands of the file's ops; `floats` holds the dequantized values.

    Returns:
        By the number of the op and the position of the operand, floats of its shape. What torch has
        nothing like is left out.
    """
    by_size: dict[int, list[tuple[Array, Array]]] = {}
    for rounded, exact in candidates:
        by_size.setdefault(rounded.size, []).append((rounded, exact))
    found: dict[tuple[int, int], Array] = {}
    for pair in constants:
        best: tuple[float, Array] | None = None
        steps = _steps(pair)
        for rounded, exact in by_size.get(pair.floats.size, ()) if _is_told(pair) else ():
            near = _fitting(rounded, [(pair.floats, steps)])
            if near and (best is None or near[0].furthest < best[0]):
                turned = exact.transpose(near[0].order).reshape(pair.floats.shape)
                best = near[0].furthest, turned
        if best is not None:
            found[pair.op.index, pair.place] = best[1]
    return found


def _is_told(pair: ConstantPair) -> bool:
    return pair.floats.dtype.kind == "f" and pair.floats.size >= _LEAST


def _steps(pair: ConstantPair) -> Array:
    steps = np.zeros(()) if pair.stored.scales is None else pair.stored.scales
    return np.broadcast_to(steps, pair.stored.values.shape).reshape(pair.floats.shape)


def axis_orders(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Give every order of the axes that are longer than 1, the others in front."""
    long = [axis for axis, length in enumerate(shape) if length > 1]
    short = [axis for axis, length in enumerate(shape) if length <= 1]
    for order in itertools.permutations(long):
        yield (*short, *order)


class _Fit(NamedTuple):
    """
    A constant of the file that one of the graph may have become.

    Attributes:
        furthest: How far a value is off at most.
        order: Of the axes of the graph's constant, as they lie in the file.
        values: The file's, in the graph's layout.
    """

    furthest: float
    order: tuple[int, ...]
    values: Array


def _fitting(value: Array, known: Iterable[tuple[Array, Array]]) -> list[_Fit]:
    """
    Find the constants of the file that a constant of the graph may have become.

    Args:
        value: Of the graph.
        known: Constants of the file, with the steps to which they are rounded.

    Returns:
        Those within half a step, in the file's order.
    """
    found = []
    slack = _ROUNDED * float(np.abs(value[np.isfinite(value)]).max(initial=0.0))
    for floats, steps in known:
        for order in axis_orders(value.shape):
            turned = value.transpose(order)
            given = floats.reshape(turned.shape)
            with np.errstate(invalid="ignore"):
                apart = np.where(given == turned, 0.0, np.abs(given - turned))
            if (apart <= steps.reshape(turned.shape) * (0.5 + _SLACK) + slack).all():
                back = tuple(np.argsort(order))
                furthest = float(apart.max(initial=0.0))
                found.append(_Fit(furthest, order, given.transpose(back)))
                break
    return found
