"""What is run of a torch graph gives what torch gives, whatever is left out and joined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fixtures.models import normal
from pytest_edgeq.localize.reference import ReferenceGraph, export

Function = Callable[[torch.Tensor], torch.Tensor]

_ROWS = torch.eye(3) - 0.5

CLAMPS: dict[str, tuple[Function, int]] = {
    "both bounds": (lambda y: y.clamp(-0.1, 0.2), 2),
    "one after the other": (lambda y: y.clamp(min=-0.1).clamp(max=0.2), 2),
    "the other way round": (lambda y: y.clamp(max=0.2).clamp(min=-0.1), 2),
    # The last one wins, whatever was before.
    "crossed": (lambda y: y.clamp(min=0.2).clamp(max=-0.1), 3),
    "twice from below": (lambda y: y.clamp(min=-0.1).clamp(min=0.1), 3),
    "by tensors": (lambda y: torch.clamp(y, min=torch.tensor([-0.1, 0.0, 0.1])), 2),
    "relu": (torch.relu, 2),
    "in place": (nn.ReLU6(inplace=True), 2),
    "three": (lambda y: torch.relu(y.clamp(min=-0.1).clamp(max=0.2)), 3),
    # What is clamped is taken once more: it must not be written over.
    "taken again": (lambda y: y.clamp(-0.1, 0.2) + y, 3),
    "taken between": (lambda y: (z := y.clamp(min=-0.1)).clamp(max=0.2) * z, 4),
    "viewed": (lambda y: y.view(-1).clamp(-0.1, 0.2) + y.sum(), 5),
}


class _Clamped(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A product, and what is made of it."""
        return self.function(x @ _ROWS)


@pytest.mark.parametrize("name", CLAMPS)
def test_clamps_are_joined_and_give_the_same(name: str) -> None:
    """To the bit, and twice in a row; no input is written over."""
    function, calls = CLAMPS[name]
    model, x = _Clamped(function), normal(4, 3, seed=0)
    graph = ReferenceGraph(export(model, (x,), {}))
    (returned,) = (node for node in graph.nodes if node.op == "output")
    (last,) = returned.all_input_nodes
    program = graph.program({last: 1})
    given = x.clone()
    made = [program.start([given]).take(last) for _ in range(2)]

    assert len(program.calls) == calls
    expected = model(x)
    assert all(torch.equal(each, expected) for each in made)
    assert torch.equal(given, x)


_WEIGHT = normal(4, 1, 3, 3, seed=1)

PADS: dict[str, tuple[Function, int]] = {
    "evenly": (lambda x: _convolved(functional.pad(x, (2, 2, 1, 1))), 1),
    "on one axis": (lambda x: _convolved(functional.pad(x, (1, 1, 0, 0)), stride=2), 1),
    "and once more": (lambda x: _convolved(functional.pad(x, (1, 1, 2, 2)), padding=(1, 0)), 1),
    "on one side": (lambda x: _convolved(functional.pad(x, (0, 1, 0, 1))), 2),
    "the last axis alone": (lambda x: _convolved(functional.pad(x, (1, 1))), 2),
    "by ones": (lambda x: _convolved(functional.pad(x, (1, 1, 1, 1), value=1.0)), 2),
    "by itself": (lambda x: _convolved(functional.pad(x, (1, 1, 1, 1), mode="reflect")), 2),
    "cut off": (lambda x: _convolved(functional.pad(x, (-1, -1, -1, -1))), 2),
    "taken again": (lambda x: _convolved(y := functional.pad(x, (1, 1, 1, 1))) + y.mean(), 4),
}


def _convolved(x: torch.Tensor, **options: Any) -> torch.Tensor:
    return functional.conv2d(x, _WEIGHT, groups=4, **options)


class _Padded(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A convolution of what is padded."""
        return self.function(x)


@pytest.mark.parametrize("name", PADS)
def test_a_convolution_pads_what_it_alone_takes(name: str) -> None:
    """By zeros, as much on both sides; sums of other order apart."""
    function, calls = PADS[name]
    model, x = _Padded(function), normal(2, 4, 9, 8, seed=0)
    graph = ReferenceGraph(export(model, (x,), {}))
    (returned,) = (node for node in graph.nodes if node.op == "output")
    (last,) = returned.all_input_nodes
    program = graph.program({last: 1})
    made = program.start([x]).take(last)

    assert len(program.calls) == calls
    torch.testing.assert_close(made, model(x))


def test_what_is_asked_for_is_not_written_over() -> None:
    """The product itself, beside what clamps it."""
    model, x = _Clamped(torch.relu), normal(4, 3, seed=0)
    graph = ReferenceGraph(export(model, (x,), {}))
    (returned,) = (node for node in graph.nodes if node.op == "output")
    (last,) = returned.all_input_nodes
    (product,) = last.all_input_nodes
    run = graph.program({last: 1, product: 1}).start([x])
    clamped = run.take(last)

    assert torch.equal(run.take(product), x @ _ROWS)
    assert torch.equal(clamped, model(x))


def test_whole_numbers_are_clamped_by_others() -> None:
    """To floats, which whole numbers cannot hold."""
    rows = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    model = _Clamped(lambda y: y.clamp(1.5, 40.5))
    model.forward = lambda x: model.function(x @ rows)  # type: ignore[method-assign]
    graph = ReferenceGraph(export(model, (rows,), {}))
    (returned,) = (node for node in graph.nodes if node.op == "output")
    (last,) = returned.all_input_nodes
    made = graph.program({last: 1}).start([rows]).take(last)

    assert torch.equal(made, (rows @ rows).clamp(1.5, 40.5))
