"""
What is run of a torch graph in order: of one sample, or of a stack of them in one go.

Of a small model, to call torch and numpy takes longer than what they compute: what is measured of
several samples together is measured in a fraction of the time. Such a stack is held in a row: one
sample behind the other along the first axis of a node's value, as torch's layers hold a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pytest_edgeq.localize.calls import Call, Values

__all__ = ["Program", "Routine", "in_a_row"]

Node = torch.fx.Node


def in_a_row(value: torch.Tensor) -> torch.Tensor:
    """Samples along an axis of their own, put one behind the other along the next one."""
    return value.flatten(0, 1) if value.ndim > 1 else value


class Routine:
    """
    Calls that give some nodes' values from those of others.

    Args:
        taken: The nodes whose values it is given, in order.
        calls: What is run.
        wanted: The nodes whose values are asked for.

    Attributes:
        wanted: The same.
    """

    def __init__(
        self, taken: Sequence[Node], calls: Sequence[Call], wanted: Sequence[Node]
    ) -> None:
        self._taken = tuple(taken)
        self._calls = tuple(calls)
        self.wanted = tuple(wanted)
        self._together: Callable[..., Any] | None = torch.vmap(self.run)

    def run(self, *given: Any) -> tuple[Any, ...]:
        """Of one sample."""
        values = dict(zip(self._taken, given, strict=True))
        for call in self._calls:
            values[call.node] = call.run(values)
        return tuple(values[node] for node in self.wanted)

    def run_together(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """
        Of several samples.

        Args:
            given: With the samples along an axis of their own, the first.

        Returns:
            The same of what is wanted.
        """
        if self._together is not None:
            try:
                with _refusing():
                    return tuple(self._together(*given))
            except RuntimeError:
                # Of what depends on values, or draws numbers: it is run sample by sample from now
                # on, and raises there if it is no other matter.
                self._together = None
        each = [self.run(*values) for values in zip(*given, strict=True)]
        return tuple(torch.stack(values) for values in zip(*each, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """
    The float model's nodes, in order, ready to run.

    Attributes:
        placeholders: Its inputs.
        calls: All that it computes from them.
        held: By node that only hands on what it takes, the one that has its value.
        left: How often each value is taken, by calls and from outside.
        routine: All of it, for the values that are taken from outside.
    """

    placeholders: Sequence[Node]
    calls: Sequence[Call]
    held: Mapping[Node, Node]
    left: Mapping[Node, int]
    routine: Routine

    def start(self, inputs: Sequence[Any]) -> Run:
        """Begin a run on one sample, a value for each placeholder."""
        return Run(self, dict(zip(self.placeholders, inputs, strict=True)))

    def run_together(self, inputs: Sequence[torch.Tensor]) -> dict[Node, torch.Tensor]:
        """
        Run several samples.

        Args:
            inputs: A value for each placeholder, with the samples along an axis of their own, the
                first.

        Returns:
            By node whose value is taken from outside, that value, samples in a row.
        """
        made = map(in_a_row, self.routine.run_together(*inputs))
        values = dict(zip(self.routine.wanted, made, strict=True))
        return values | {n: values[held] for n, held in self.held.items() if held in values}


class Run:
    """
    The float model on one sample, run as far as it is asked for.

    Args:
        program: The model.
        values: Of the placeholders.
    """

    def __init__(self, program: Program, values: Values) -> None:
        self._calls = iter(program.calls)
        self._held = program.held
        self._left = dict(program.left)
        self._values = values

    def take(self, node: Node) -> Any:
        """The value of a node, a row of one, which is let go of after its last use."""
        node = self._held.get(node, node)
        while node not in self._values:
            call = next(self._calls)
            self._values[call.node] = call.run(self._values)
            for each in call.taken:
                self._used(each)
            if call.node not in self._left:
                del self._values[call.node]
        value = self._values[node]
        self._used(node)
        return value if value.ndim else value.reshape(1)

    def _used(self, node: Node) -> None:
        self._left[node] -= 1
        if not self._left[node]:
            del self._values[node]


@contextmanager
def _refusing() -> Iterator[None]:
    """Let vmap raise of an op that it can only loop over, rather than print that it does."""
    functorch: Any = torch._C._functorch
    before = functorch._is_vmap_fallback_enabled()
    functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_enabled(before)
