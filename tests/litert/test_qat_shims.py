"""
What stands between quantization-aware training and its libraries is still needed, and does it.

A test whose name says "still" fails when the upstream symptom is gone: then the shim goes, too.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fixtures.models import net, normal, seeded
from pytest_edgeq import litert
from pytest_edgeq.litert import pt2e_graphs

# What they look at changes with the libraries alone, which the pipeline pins.
pytestmark = [pytest.mark.slow, pytest.mark.full]

EPS, MOMENTUM, DROPOUT = 0.1, 0.3, 0.25


def _net() -> Any:
    """A conv and its batch norm with settings of their own; a dropout."""
    return net(
        lambda self, x: self.drop(torch.relu(self.norm(self.conv(x)))),
        conv=nn.Conv2d(2, 4, 3, bias=False),
        norm=nn.BatchNorm2d(4, eps=EPS, momentum=MOMENTUM),
        drop=nn.Dropout(DROPOUT),
    )


def _images(seed: int = 0) -> Tensor:
    return normal(8, 2, 6, 6, seed=seed)


def _exported(model: nn.Module | None = None) -> Any:
    with litert.quiet():
        program = torch.export.export(model or seeded(_net), (_images(),), strict=True)
        return copy.deepcopy(program.module())


def _quantizer() -> Any:
    return litert.pt2e_preset("pt2e_qat_int8")


def _by_torchao(quantizer: Any) -> Any:
    """What torchao makes of the graph once it is handed modules for its patterns."""
    with litert.quiet(), pt2e_graphs.pattern_modules(), pt2e_graphs.possible_patterns():
        from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e

        return prepare_qat_pt2e(_exported(), quantizer)


@pytest.fixture(scope="module")
def theirs() -> Any:
    """The graph as torchao prepares it; not to be changed."""
    return _by_torchao(_quantizer())


@pytest.fixture(scope="module")
def ours() -> Any:
    """The graph as we do."""
    return litert.prepare_qat(_exported(), _quantizer())


def _arguments(graph: Any, op: Any) -> list[Any]:
    return [node.args for node in graph.graph.nodes if node.target is op]


def _eps(graph: Any) -> set[float]:
    norms = _arguments(graph, torch.ops.aten.batch_norm.default)
    scales = [args for args in _arguments(graph, torch.ops.aten.add.Tensor) if args[1] != 1]
    return {args[7] for args in norms} | {args[1] for args in scales}


def test_the_converters_patterns_are_still_refused() -> None:
    """litert-torch 0.10.0 hands torchao functions; see `pattern_modules`."""
    with litert.quiet():
        from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e

        with pytest.raises(ValueError, match=r"instance of .torch.nn.Module., got .*function"):
            prepare_qat_pt2e(_exported(), _quantizer())


def test_batch_norms_still_lose_their_settings(theirs: Any, ours: Any) -> None:
    """Torchao 0.18.0 puts its pattern's in their place; see `_restore_batch_norms`."""
    for graph, eps, momentum in ((theirs, 1e-5, 0.1), (ours, EPS, MOMENTUM)):
        assert _eps(graph) == {eps}  # also where weights are scaled
        norms = _arguments(graph, torch.ops.aten.batch_norm.default)
        assert [args[6] for args in norms] == [momentum]


def test_batch_norms_are_still_folded_with_another_eps() -> None:
    """Torchao 0.18.0 folds with its pattern's; see `_folding_with`."""
    weights = []
    for shim in (True, False):
        prepared = litert.prepare_qat(_exported(), _quantizer())
        prepared(_images())
        converted = litert.finish_qat(prepared) if shim else litert.finish_pt2e(prepared)
        weights.append(converted.get_parameter("conv.weight"))
    model = seeded(_net)
    expected = torch.nn.utils.fuse_conv_bn_eval(model.conv, model.norm).weight

    torch.testing.assert_close(weights[0], expected)
    assert (weights[1] - expected).abs().max() > 0.02 * expected.abs().max()


def test_torchaos_switch_still_resets_dropouts(theirs: Any) -> None:
    """Torchao 0.18.0 gives every dropout its pattern's p=0.5; see `_make_switchable`."""
    with litert.quiet():
        from torchao.quantization.pt2e import move_exported_model_to_train

        graph = copy.deepcopy(theirs)
        move_exported_model_to_train(graph)

    assert [args[1:] for args in _arguments(graph, torch.ops.aten.dropout.default)] == [(0.5, True)]


def test_pairs_in_float_still_get_the_training_pattern() -> None:
    """Torchao 0.18.0 makes it for each pair, and leaves it; see `_fusing_annotated`."""

    class NoConv(type(_quantizer())):  # type: ignore[misc] # the class is the library's own
        def annotate(self, model: Any) -> Any:
            return model

    theirs, ours = _by_torchao(NoConv()), litert.prepare_qat(_exported(), NoConv())
    divisions = [_arguments(graph, torch.ops.aten.div.Tensor) for graph in (theirs, ours)]
    assert list(map(len, divisions)) == [2, 0]

    # They are folded as without training: no batch norm is left, and the numbers are the same.
    converted = litert.finish_qat(ours)
    assert _arguments(converted, torch.ops.aten.batch_norm.default) == []
    torch.testing.assert_close(converted(_images(1)), seeded(_net)(_images(1)))


def test_patterns_of_absent_convolutions_are_still_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchao 0.18.0: three for each of four kinds; see `possible_patterns`."""
    with litert.quiet():
        from torchao.quantization.pt2e import qat_utils
    trace, traced = qat_utils._get_aten_graph_module_for_pattern, []

    def count(*args: Any) -> Any:
        traced.append(args)
        return trace(*args)

    monkeypatch.setattr(qat_utils, "_get_aten_graph_module_for_pattern", count)
    monkeypatch.setattr(pt2e_graphs, "_TRACED_PATTERNS", {})
    with litert.quiet():
        qat_utils._fuse_conv_bn_qat(_exported())
        theirs = len(traced)
        with pt2e_graphs.possible_patterns():
            qat_utils._fuse_conv_bn_qat(_exported())

    assert (theirs, len(traced) - theirs) == (12, 3)


class _TracedError(Exception):
    """A pattern was exported."""


def test_patterns_of_training_are_still_exported_for_every_batch_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """96 of them, a minute long; ours only in a graph that was trained."""
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 4, 3), nn.ReLU()).eval()
    calibrated = []
    for _ in range(2):
        preset = litert.pt2e_preset("pt2e_static_int8")
        calibrated.append(litert.prepare_pt2e(_exported(model), preset))
        calibrated[-1](_images())
    trained = litert.prepare_qat(_exported(), _quantizer())
    with litert.quiet():
        from torchao.quantization.pt2e import qat_utils
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise _TracedError

    monkeypatch.setattr(qat_utils, "_get_aten_graph_module_for_pattern", refuse)
    monkeypatch.setattr(pt2e_graphs, "_TRACED_PATTERNS", {})
    with pytest.raises(_TracedError):
        convert_pt2e(calibrated[0], fold_quantize=False)
    with pytest.raises(_TracedError):
        litert.finish_pt2e(trained)
    finished = litert.finish_pt2e(calibrated[1])
    assert torch.ops.aten.batch_norm.default in {node.target for node in finished.graph.nodes}
