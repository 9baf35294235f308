"""
What is run of a torch graph: calls with all that they take but the values that they are given.

Calls are looked up once and run on every sample. What only hands on a value is left out; what
clamps a result that no other takes does so in its place, and a convolution pads what no other takes
padded: each saves a pass over memory or two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.fx.node import map_arg

from pytest_edgeq.localize.kinds import HEAVY, base_name

__all__ = ["Call", "Values", "straightened"]

Node = torch.fx.Node
Values = dict[Node, Any]

_aten = torch.ops.aten

# What clamps, and the same written over what it takes. (Of `clamp_` torch has no batching rule.)
_IN_PLACE: dict[Any, Callable[..., Any]] = {
    _aten.clamp.default: _aten.hardtanh_.default,
    _aten.hardtanh.default: _aten.hardtanh_.default,
    _aten.relu.default: _aten.relu_.default,
}

# What conv2d takes where nothing is said: value, weight, bias, stride, padding, dilation, groups.
_CONVOLVED: list[Any] = [None, None, None, [1, 1], [0, 0], [1, 1], 1]

# What gives a value of its own. (einsum may give a view, and `add_` adds to a copy here.)
_ANEW = {*HEAVY, "add", "add_", "batch_norm"} - {"einsum"}


class Call:
    """
    A node with all that it takes but the values that it is given.

    Args:
        node: The node.
        function: What it calls; None where it hands on the one value that it takes.
        args: Nodes stand for the values that are given.
        kwargs: As `args`.
        mutating: Whether it changes what it takes, which others take as well.

    Attributes:
        node: The node.
        taken: The nodes whose values it is given.
    """

    def __init__(
        self,
        node: Node,
        function: Callable[..., Any] | None,
        args: list[Any],
        kwargs: dict[str, Any],
        mutating: bool = False,
    ) -> None:
        taken: dict[Node, None] = {}
        map_arg((args, kwargs), lambda n: taken.setdefault(n))
        self.node = node
        self.taken = tuple(taken)
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._mutating = mutating
        self._places = [(i, each) for i, each in enumerate(args) if isinstance(each, Node)]
        # Most take one value, before all else.
        self._one = self._places[0][1] if [i for i, _ in self._places] == [0] else None
        # Nodes in lists and by keyword are rare, and take longer to fill in.
        self._nested = len(taken) > len({each for _, each in self._places}) or mutating

    def run(self, values: Mapping[Node, Any]) -> Any:
        """What the node gives."""
        if self._function is None:
            return values[self.taken[0]]
        if self._nested:
            return self._run_nested(values)
        if self._one is not None:
            return self._function(values[self._one], *self._args[1:], **self._kwargs)
        args = self._args.copy()
        for place, node in self._places:
            args[place] = values[node]
        return self._function(*args, **self._kwargs)

    def hands_on(self) -> bool:
        """Whether it gives the very value that it takes."""
        return self._function is None

    def taking(self, held: Mapping[Node, Node]) -> Call:
        """The same, of other nodes where these have the values that it takes."""
        if not any(node in held for node in self.taken):
            return self
        args, kwargs = map_arg((self._args, self._kwargs), lambda n: held.get(n, n))
        return Call(self.node, self._function, list(args), dict(kwargs), self._mutating)

    def with_clamp(self, before: Call) -> Call | None:
        """The same and the call before it as one, where one sets a least value, one a greatest."""
        if not self._is_plain_clamp() or not before._is_plain_clamp():
            return None
        pairs = list(zip(before._bounds(), self._bounds(), strict=True))
        if any((first is None) == (second is None) for first, second in pairs):
            return None
        low, high = (second if first is None else first for first, second in pairs)
        if not low <= high:
            return None
        return Call(self.node, self._function, [before._args[0], low, high], {})

    def with_pad(self, before: Call) -> Call | None:
        """The same and the call before it as one, where a convolution can pad what it takes."""
        both = ((self, _aten.conv2d.default), (before, _aten.pad.default))
        if any(call._function is not called or not call._takes_one() for call, called in both):
            return None
        value, amounts, *rest = before._args
        evenly = len(amounts) == 4 and amounts[::2] == amounts[1::2] and min(amounts) >= 0
        if not evenly or rest not in ([], ["constant"], ["constant", None], ["constant", 0]):
            return None
        given = [*self._args, *_CONVOLVED[len(self._args) :]]
        rows, columns = given[4] if len(given[4]) == 2 else given[4] * 2
        given[0], given[4] = value, [rows + amounts[2], columns + amounts[0]]
        return Call(self.node, self._function, given, {})

    def in_place(self, before: Call) -> Call | None:
        """The same, written over what the call before it gives, if it clamps."""
        function = _IN_PLACE.get(self._function)
        if function is None or self._one is None or base_name(before.node) not in _ANEW:
            return None
        plain = self._function
        assert plain is not None, "what hands on does not clamp"
        if plain is _aten.clamp.default and not (self._takes_one() and self._has_both_bounds()):
            return None

        def clamp(value: Any, *args: Any, **kwargs: Any) -> Any:
            # Whole numbers that are clamped by others become floats.
            clamps = function if value.is_floating_point() else plain
            return clamps(value, *args, **kwargs)

        return Call(self.node, clamp, self._args, self._kwargs)

    def _is_plain_clamp(self) -> bool:
        """Whether it clamps, by numbers."""
        return self._function is _aten.clamp.default and self._takes_one()

    def _takes_one(self) -> bool:
        """Whether it takes one value, before all else, and nothing by name."""
        return self._one is not None and not self._nested and not self._kwargs

    def _has_both_bounds(self) -> bool:
        low, high = self._bounds()
        return low is not None and high is not None and low <= high

    def _bounds(self) -> tuple[Any, Any]:
        _, low, high, *_ = (*self._args, None, None)
        return low, high

    def _run_nested(self, values: Mapping[Node, Any]) -> Any:
        args, kwargs = map_arg((self._args, self._kwargs), values.__getitem__)
        if self._mutating:
            args, kwargs = _cloned(args), _cloned(kwargs)
        assert self._function is not None, "only what computes has arguments"
        return self._function(*args, **kwargs)


def straightened(
    calls: Iterable[Call], kept: Iterable[Node]
) -> tuple[list[Call], dict[Node, Node]]:
    """
    Leave out what hands on the value that it takes, and join what makes one pass over memory.

    Args:
        calls: In order.
        kept: Nodes whose values are asked for beside those of the last one.

    Returns:
        The other calls, and by node that was left out the one that has its value.
    """
    left: dict[Node, Call] = {}
    held: dict[Node, Node] = {}
    for call in calls:
        if call.hands_on():
            held[call.node] = held.get(call.taken[0], call.taken[0])
        else:
            left[call.node] = call.taking(held)
    uses = Counter(taken for call in left.values() for taken in call.taken)
    uses.update(held.get(node, node) for node in kept)
    for step in (Call.with_clamp, Call.with_pad, Call.in_place):
        for node, call in list(left.items()):
            before = left.get(call.taken[0]) if call.taken else None
            if before is None or uses[before.node] > 1:
                continue
            joined = step(call, before)
            if joined is not None:
                left[node] = joined
                if before.node not in joined.taken:
                    del left[before.node]
    return list(left.values()), held


def _cloned(arguments: Any) -> Any:
    if isinstance(arguments, (tuple, list)):
        return type(arguments)(_cloned(each) for each in arguments)
    if isinstance(arguments, dict):
        return {key: _cloned(each) for key, each in arguments.items()}
    return arguments.clone() if isinstance(arguments, torch.Tensor) else arguments
