"""Who refuses a model, and at which of its lines: by the frames of the error."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pytest_edgeq import Edgeq
from pytest_edgeq.quantize.conversion_refusals import refusal


class _Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class _Branch(_Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if y.sum() > 0:  # here
            y = -y
        return y


class _Item(_Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)[: int(x.abs().sum())]  # here
        return y


class _Numpy(_Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(torch.from_numpy(np.tanh(x.numpy())))  # here
        return y


class _OnlyEager(_Linear):
    def forward(self, x: Tensor) -> Tensor:
        """Behave otherwise in a trace, as masks of transformers do."""
        mask = None if torch.compiler.is_exporting() else x
        y: Tensor = self.linear(x) * mask.shape[0]  # type: ignore[union-attr] # here
        return y


class _Dtype(_Linear):
    def forward(self, x: Tensor) -> Tensor:
        """Measure whole numbers in a trace, which have no norm."""
        dtype = torch.int32 if torch.compiler.is_exporting() else torch.float32
        y: Tensor = self.linear(x) * torch.linalg.vector_norm(x.to(dtype))  # here
        return y


class _NoLowering(_Linear):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.special.bessel_j0(self.linear(x))  # here
        return y


def _line(model: type[nn.Module]) -> str:
    """The line of a forward that is marked."""
    code = model.forward.__code__
    numbers = {line for *_, line in code.co_lines() if line is not None}
    lines = {n: linecache.getline(__file__, n).strip() for n in numbers}
    ((number, source),) = ((n, s) for n, s in lines.items() if s.endswith("# here"))
    return f"at {__file__}:{number}, in forward: {source}"


def _refused(
    maker: Edgeq, make: Callable[[], nn.Module], quantizer: str | None, **more: Any
) -> str:
    torch.manual_seed(0)
    x = more.pop("x", (torch.ones(2, 4),))
    with pytest.raises(RuntimeError) as caught:
        maker.quantize(make().eval(), x, quantizer=quantizer, calibration=[x], **more)
    return str(caught.value)


@pytest.mark.parametrize("quantizer", [None, "pt2e_static_int8"])
@pytest.mark.parametrize(
    ("model", "hint"),
    [
        (_Branch, "must be traceable: no Python branch on a tensor's values"),
        (_OnlyEager, "runs on the sample inputs, and fails while torch traces it"),
    ],
)
def test_what_is_refused_while_it_is_traced(
    maker: Edgeq, model: type[nn.Module], hint: str, quantizer: str | None
) -> None:
    """By torch.export, whatever the class of the error, at the innermost line of the model."""
    first, place, *rest = _refused(maker, model, quantizer).splitlines()

    assert first.startswith(f"torch.export refuses {model.__name__}: ")
    assert hint in first
    assert place == _line(model)
    assert len("".join(rest)) < 400


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        (_Item, "no sizes or indices"),
        (_Numpy, "it computes in numpy"),
        (_Dtype, "runs on the sample inputs, and fails while torch traces it"),
    ],
)
def test_what_non_strict_export_alone_refuses(
    maker: Edgeq, model: type[nn.Module], hint: str
) -> None:
    """Values and arrays that forward reads from a tensor."""
    first, place, *_ = _refused(maker, model, None).splitlines()

    assert first.startswith(f"torch.export refuses {model.__name__}: ")
    assert hint in first
    assert place == _line(model)


@pytest.mark.parametrize("model", [_Numpy, _NoLowering])
def test_that_export_was_not_strict_is_named(maker: Edgeq, model: type[nn.Module]) -> None:
    """By torch.export, which takes the former strictly, and by the converter."""
    text = _refused(maker, model, "pt2e_static_int8", strict_export=False)

    assert text.splitlines()[-1].startswith("strict_export=False was given: the default, True, ")
    ill_fed = _refused(maker, model, "pt2e_static_int8", x=(torch.ones(2, 3),), strict_export=False)
    assert "its forward fails on the sample inputs" in ill_fed
    assert "strict_export" not in ill_fed


@pytest.mark.parametrize("quantizer", [None, "pt2e_static_int8"])
def test_what_is_traced_and_not_lowered(maker: Edgeq, quantizer: str | None) -> None:
    """The converter refuses it; its own words name the op."""
    text = _refused(maker, _NoLowering, quantizer)

    assert "strict_export" not in text
    assert text.startswith("the converter refuses _NoLowering: an op or a dtype that litert-torch")
    assert "Lowering not found: aten.special_bessel_j0" in text


class _Folded(_Linear):
    def forward(self, x: Tensor) -> Tensor:
        """Join two axes, whose lengths are open."""
        y: Tensor = self.linear(x.reshape(x.shape[0] * x.shape[1], 4))
        return y.reshape(x.shape[0], x.shape[1], 4)


_OPEN = {0: torch.export.Dim("b", min=1, max=64), 1: torch.export.Dim("t", min=2, max=64)}


@pytest.mark.parametrize(
    "quantizer", [None, pytest.param("pt2e_static_int8", marks=pytest.mark.slow)]
)
def test_sizes_that_are_left_open(maker: Edgeq, quantizer: str | None) -> None:
    """No op and no dtype: the axes are named, and the way out converts."""
    x = (torch.ones(2, 3, 4),)
    text = _refused(maker, _Folded, quantizer, x=x, dynamic_shapes=(_OPEN,))

    assert text.startswith(
        "the converter refuses _Folded: litert-torch does not lower the op that the last lines "
        "name with sizes left open (x: axes 0 and 1): give no dynamic_shapes, but a signature for "
        "each size: "
    )
    assert maker.quantize(_Folded().eval(), {"one": x}, quantizer=None).tflite


def test_an_op_without_lowering_beside_open_sizes(maker: Edgeq) -> None:
    """The sizes are not to blame."""

    class Bessel(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = torch.special.bessel_j0(x)
            return y

    text = _refused(maker, Bessel, None, dynamic_shapes=({0: _OPEN[0]},))

    assert "Lowering not found: aten.special_bessel_j0" in text
    assert "left open" not in text


def test_no_message_is_longer_than_what_is_read() -> None:
    """Torch and MLIR print whole modules, in a line of thousands of characters or in many lines."""
    error = RuntimeError("begins " + "x" * 4000 + " ends\n" + "more\n" * 100 + "the last line")
    text = refusal("Net", "the converter", error)

    assert len(text) < 1000
    assert re.search("begins x+ … x+ ends", text)
    assert text.endswith("the last line")
