"""Exported graphs on their way to a quantizer, without any conversion."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fixtures.models import net
from pytest_edgeq import litert


def _frozen(context: Any) -> Any:
    """A body in a context of torch, and a head outside of it."""

    def forward(self: Any, x: Tensor) -> Any:
        with context():
            y = self.body(x)
        return self.head(y), y

    body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    return net(forward, body=body, head=nn.Linear(4, 2)).eval()


def _no_autocast() -> Any:
    return torch.autocast("cpu", enabled=False)


def _bfloat16() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def _modules(program: Any) -> list[tuple[str, str]]:
    return [
        (str(node.target), list(node.meta["nn_module_stack"].values())[-1][0])
        for node in program.graph.nodes
        if node.op == "call_function"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "strict"),
    [
        (torch.no_grad, True),
        (torch.no_grad, False),
        (torch.enable_grad, False),
        (_no_autocast, True),
    ],
)
def test_ops_in_a_context_stand_in_the_graph(context: Any, strict: bool) -> None:
    """With the modules that called them, and as outputs too."""
    model, x = _frozen(context), torch.randn(3, 4)

    with torch.set_grad_enabled(context is not torch.enable_grad):
        program = litert.export(litert.Traced(model, (x,)), strict=strict)

    assert _modules(program) == [
        ("aten.linear.default", "body.0"),
        ("aten.relu.default", "body.1"),
        ("aten.linear.default", "head"),
    ]
    with litert.quiet():
        graphs = program.module(), program.run_decompositions().module()
    for graph in graphs:
        torch.testing.assert_close(graph(x), model(x), rtol=0, atol=0)


def test_an_autocast_that_changes_dtypes_is_kept() -> None:
    """What it holds would be computed in another dtype outside of it."""
    model, x = _frozen(_bfloat16), torch.randn(3, 4)
    model.head.to(torch.bfloat16)

    program = litert.export(litert.Traced(model, (x,)))

    assert "wrap_with_autocast" in str(program.graph)
    torch.testing.assert_close(program.module()(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("context", [torch.no_grad, _no_autocast])
def test_what_is_frozen_is_not_trained(context: Any) -> None:
    """The gradients of a graph for training are the model's own: none below `no_grad`."""
    model, x = _frozen(context), torch.randn(3, 4)
    program = litert.export(litert.Traced(model, (x,)), trains=True)
    with litert.quiet():
        graph = copy.deepcopy(program.module())

    for each in (model, graph):
        torch.autograd.backward(each(x)[0].sum())

    theirs = dict(graph.named_parameters())
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (theirs[name].grad is None), name
    assert (model.body[0].weight.grad is None) == (context is torch.no_grad)
    assert model.head.weight.grad is not None
