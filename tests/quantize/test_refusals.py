"""Models that cannot be converted: who refuses them, why, at which line, and what helps."""

from __future__ import annotations

import linecache
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fixtures.models import EmbeddingMean, NeverExported, net, normal, seeded
from pytest_edgeq import Edgeq
from pytest_edgeq.litert import Traced
from pytest_edgeq.quantize.conversion_refusals import refusal
from tests.quantize import making

if TYPE_CHECKING:
    from collections.abc import Callable

PT2E, RECIPE, DYNAMIC = "pt2e_static_int8", "recipe_static_wi8_ai8", "recipe_dynamic_wi8_afp32"


@dataclass(frozen=True)
class Refused:
    """A model that is refused, what the text says (first that its first line does), what helps."""

    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    quantizer: str | None
    told: tuple[str, ...]
    helps: tuple[Callable[[], nn.Module], str | None] | None = None
    error: type[Exception] = RuntimeError


def _best() -> nn.Module:
    return net(lambda self, x: self.scores(x).topk(3, -1).values * 2, scores=nn.Linear(4, 8))


def _whitened(one: Any = None) -> nn.Module:
    """A residual written as a sum of matrices, with the identity made in the forward."""

    def forward(self: Any, x: Tensor) -> Any:
        return x @ (self.mix.weight + (torch.eye(4) if self.one is None else self.one))

    return net(forward, mix=nn.Linear(4, 4), one=one)


def _columns(repeated: bool = False) -> nn.Module:
    """A convolution that is told the column of each pixel."""

    def forward(self: Any, x: Tensor) -> Any:
        columns = torch.arange(5.0).view(1, 1, 1, 5)
        whole = columns.repeat(1, 1, 6, 1) if repeated else columns.expand(1, 1, 6, 5)
        return self.convolution(torch.cat([x, whole], 1))

    return net(forward, convolution=nn.Conv2d(4, 8, 3))


def _learned_queries() -> nn.Module:
    """Scores of tokens by queries that no input changes, as Perceiver's are."""
    return net(
        lambda self, x: self.queries(self.latents) @ self.keys(x).mT,
        latents=nn.Parameter(normal(4, 16, seed=1)),
        queries=nn.Linear(16, 16),
        keys=nn.Linear(8, 16),
    )


def _overlapping(folded: bool = True) -> nn.Module:
    """Patches that overlap, added up."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if folded:
            return nn.functional.fold(x, (8, 8), 4, stride=2)
        return nn.functional.conv_transpose2d(x.view(1, 16, 3, 3), self.places, stride=2)

    return net(forward, places=nn.Buffer(torch.eye(16).view(16, 1, 4, 4)))


def _written() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Any:
        y = self.first(x)
        y[:, ::2] *= 2
        return self.second(y)

    return net(forward, first=_layer(), second=_layer())


def _expectation() -> nn.Module:
    """The mean of a distribution over bins, by a convolution whose weight the forward makes."""

    def forward(self: Any, x: Tensor) -> Tensor:
        numbers = torch.arange(8.0).view(1, 8, 1, 1)
        return nn.functional.conv2d(self.bins(x).softmax(1), numbers)

    return net(forward, bins=nn.Conv2d(3, 8, 1))


def _from_the_left() -> nn.Module:
    left = nn.Parameter(normal(1, 6, 5, seed=3))
    return net(lambda self, x: self.left @ self.layer(x), left=left, layer=_layer())


def _layer() -> nn.Module:
    return nn.Linear(4, 4)


def _quotient() -> nn.Module:
    """A quotient whose divisor is next to 0 in places."""
    return net(
        lambda self, x: self.layer(x) / (torch.relu(self.layer(x.flip(-1))) + 1e-6), layer=_layer()
    )


def _encoding() -> nn.Module:
    """An input that is joined with a multiple of itself, as positional encodings do."""

    def forward(self: Any, x: Tensor) -> Any:
        return self.head(torch.cat([x, (x[..., None] * self.frequencies).flatten(-2)], 1))

    return net(forward, head=nn.Linear(20, 4), frequencies=nn.Buffer(2.0 ** torch.arange(4)))


def _gru() -> nn.Module:
    return net(
        lambda self, x: self.head(self.recurrent(x)[0]),
        recurrent=nn.GRU(4, 6, batch_first=True),
        head=nn.Linear(6, 3),
    )


def _upsampled(kernel: int = 3, more: int = 1) -> nn.Module:
    up = nn.ConvTranspose2d(4, 4, kernel, stride=2, padding=1, output_padding=more)
    return nn.Sequential(nn.Conv2d(3, 4, 3), up)


LOAD = "the xnnpack runtime cannot load the .tflite file: "
BY_RECIPE = "quantize by a recipe (recipe_static_wi8_ai8)"

REFUSED: dict[str, Refused] = {
    "an op that no kernel computes": Refused(
        _best,
        ((2, 4),),
        None,
        (
            LOAD + "STABLEHLO_SORT #",
            "no kernel of LiteRT (xnnpack, builtin, reference) computes STABLEHLO_SORT ",
            "(torch.sort, torch.topk): keep that part out of the model",
        ),
    ),
    "the same where the library that calibrates meets it": Refused(
        _best, ((2, 4),), RECIPE, (LOAD + "STABLEHLO_SORT #",)
    ),
    "an identity matrix that the forward makes": Refused(
        _whitened,
        ((2, 4),),
        None,
        (LOAD + "STABLEHLO_IOTA #", "(torch.eye): register it as a buffer of the module"),
        (lambda: _whitened(nn.Buffer(torch.eye(4))), None),
    ),
    "an expanded constant whose channels are not moved": Refused(
        _columns,
        ((1, 3, 6, 5),),
        None,
        (
            LOAD + "BROADCAST_TO #",
            "\ncause: the tensor does not broadcast to the shape that the op has",
            "or repeat it in place of expanding it",
        ),
        (lambda: _columns(repeated=True), None),
    ),
    "a product in float of codes": Refused(
        _learned_queries,
        ((1, 20, 8),),
        PT2E,
        (
            LOAD + "FULLY_CONNECTED #",
            "\ncause: its input is int8 and its output float32; no kernel supports this; ",
            "removes the DEQUANTIZE in front of it\nfix: " + BY_RECIPE,
        ),
        (_learned_queries, RECIPE),
    ),
    "patches that a scatter adds up": Refused(
        _overlapping,
        ((1, 16, 9),),
        None,
        (
            LOAD + "STABLEHLO_SCATTER",
            "(scatter_add, index_add, F.fold): multiply by a constant matrix",
        ),
        (lambda: _overlapping(folded=False), None),
    ),
    "a table that no kernel takes": Refused(
        EmbeddingMean,
        (),
        "pt2e_dynamic_int8",
        (
            LOAD + "EMBEDDING_LOOKUP #1 (embed)",
            "its weight has zero point",
            "such tables, even if its config leaves the embedding out: quantize the model by a ",
            DYNAMIC,
        ),
    ),
    "a weight that is computed when the model runs": Refused(
        _expectation, ((1, 3, 4, 4),), PT2E, ("is computed when",), error=ValueError
    ),
    "a write into a part of a tensor, which torchao's graph loses": Refused(
        _written,
        ((2, 4),),
        PT2E,
        (
            "Net: mul_ (aten.mul_.Tensor) writes into a part of a tensor that copy_ reads later: ",
            "y[:, ::2] *= 2",
            "quantize by a recipe (recipe_static_wi8_ai8)",
        ),
        (_written, RECIPE),
        error=ValueError,
    ),
    "codes from the left": Refused(
        _from_the_left,
        ((1, 5, 4),),
        DYNAMIC,
        (": ", "codes with floats only as the second operand", "leave the op in float"),
    ),
    "a divisor of 0": Refused(
        _quotient, ((1, 5, 4),), RECIPE, (": ", "a divisor has the code of 0", "leave the op in fl")
    ),
    "export": Refused(
        NeverExported,
        (),
        PT2E,
        ("torch.export refuses NeverExported: ", "no Python branch on a tensor's values"),
    ),
    "an op without lowering": Refused(
        lambda: net(lambda self, x: torch.special.bessel_j0(self.layer(x)), layer=_layer()),
        ((2, 4),),
        PT2E,
        (
            "the converter refuses Net: an op or a dtype that litert-torch",
            "Lowering not found: aten.special_bessel_j0",
        ),
    ),
    "half precision": Refused(
        lambda: net(lambda self, x: self.layer(x.bfloat16()), layer=_layer().bfloat16()),
        ((2, 4),),
        None,
        ("it computes in half or double precision", "model.float()", "BFloat16"),
    ),
    "double precision": Refused(
        lambda: net(lambda self, x: self.layer(x.double()), layer=_layer().double()),
        ((2, 4),),
        None,
        ("it computes in half or double precision", "model.float()", "f64"),
    ),
    "None among the outputs": Refused(
        lambda: net(lambda self, x: (x + 1, None)),
        ((1, 4),),
        None,
        ("returns None among its outputs", "contained a None item"),
    ),
    "scales without an op": Refused(
        _encoding,
        ((1, 4),),
        PT2E,
        ("wrote scales or dtypes that TFLite does not allow for the op", BY_RECIPE),
        (_encoding, RECIPE),
    ),
    "an annotator that fails": Refused(
        _gru,
        ((1, 5, 4),),
        PT2E,
        ("annotator of nn.GRU (recurrent) fails", BY_RECIPE),
        (_gru, RECIPE),
    ),
    "a padding that is not lowered": Refused(
        _upsampled,
        ((1, 3, 8, 8),),
        RECIPE,
        (
            "the converter refuses Sequential: transposed convolutions whose padding it cannot "
            "lower: 1. It lowers",
        ),
        (lambda: _upsampled(4, 0), RECIPE),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in REFUSED.items()])
def test_refused_with_what_helps(case: Refused) -> None:
    """The first line says who refuses what; a way out that is named converts, and computes."""
    with pytest.raises(case.error) as caught:
        making.quantize(case.quantizer, case.make, *case.shapes, n=2)
    text = str(caught.value)
    assert case.told[0] in text.splitlines()[0]
    for part in case.told:
        assert part in text
    if case.helps is not None:
        other, quantizer = case.helps
        made = making.quantize(quantizer, other, *case.shapes)
        (x,) = making.drawn(other, *case.shapes, n=1, seed=2)
        assert seeded(case.make)(*x).shape == seeded(other)(*x).shape
        # Static recipes clip what their averages over few samples leave out: 4 dB at worst.
        assert making.sqnr_db(made, other, *case.shapes) > (100 if quantizer is None else 3)


def _branch(self: Any, x: Tensor) -> Any:
    y = self.linear(x)
    if y.sum() > 0:  # here
        y = -y
    return y


def _item(self: Any, x: Tensor) -> Any:
    return self.linear(x)[: int(x.abs().sum())]  # here


def _numpy(self: Any, x: Tensor) -> Any:
    return self.linear(torch.from_numpy(np.tanh(x.numpy())))  # here


def _only_eager(self: Any, x: Tensor) -> Any:
    """Behave otherwise in a trace, as masks of transformers do."""
    mask: Any = None if torch.compiler.is_exporting() else x
    return self.linear(x) * mask.shape[0]  # here


def _dtype(self: Any, x: Tensor) -> Any:
    """Measure whole numbers in a trace, which have no norm."""
    dtype = torch.int32 if torch.compiler.is_exporting() else torch.float32
    return self.linear(x) * torch.linalg.vector_norm(x.to(dtype))  # here


def _made(forward: Callable[..., Any]) -> nn.Module:
    return net(forward, linear=nn.Linear(4, 4))


def _line(forward: Any) -> str:
    """The line of a forward that is marked."""
    numbers = {line for *_, line in forward.__code__.co_lines() if line is not None}
    lines = {n: linecache.getline(__file__, n).strip() for n in numbers}
    ((number, source),) = ((n, s) for n, s in lines.items() if s.endswith("# here"))
    return f"at {__file__}:{number}, in {forward.__name__}: {source}"


def _refused(make: Callable[[], nn.Module], quantizer: str | None, **more: Any) -> str:
    torch.manual_seed(0)
    x = more.pop("x", (torch.ones(2, 4),))
    with pytest.raises(RuntimeError) as caught:
        Edgeq().quantize(make().eval(), x, quantizer=quantizer, calibration=[x], **more)
    return str(caught.value)


ELSEWHERE = "runs on the sample inputs, and fails while torch traces it"


@pytest.mark.parametrize(
    ("forward", "quantizer", "hint"),
    [
        (_branch, None, "must be traceable: no Python branch on a tensor's values"),
        (_branch, PT2E, "must be traceable: no Python branch on a tensor's values"),
        (_only_eager, PT2E, ELSEWHERE),
        # What non-strict export alone refuses.
        (_item, None, "no sizes or indices"),
        (_numpy, None, "it computes in numpy"),
        (_dtype, None, ELSEWHERE),
    ],
)
def test_what_is_refused_while_it_is_traced(
    forward: Callable[..., Any], quantizer: str | None, hint: str
) -> None:
    """By torch.export, whatever the class of the error, at the innermost line of the model."""
    first, place, *rest = _refused(lambda: _made(forward), quantizer).splitlines()

    assert first.startswith("torch.export refuses Net: ")
    assert hint in first
    assert place == _line(forward)
    assert len("".join(rest)) < 1000


def test_that_export_was_not_strict_is_named() -> None:
    """Where torch.export takes a model strictly alone, and not where something else fails."""
    text = _refused(lambda: _made(_numpy), PT2E, strict_export=False)

    assert text.splitlines()[-1].startswith("strict_export=False was given: the default, True, ")
    ill_fed = _refused(lambda: _made(_numpy), PT2E, x=(torch.ones(2, 3),), strict_export=False)
    assert "its forward fails on the sample inputs" in ill_fed
    assert "strict_export" not in ill_fed


@pytest.mark.parametrize("quantizer", [None, PT2E, DYNAMIC])
def test_a_model_whose_own_forward_fails(quantizer: str | None) -> None:
    """No exporter and no converter refuses it: it does not run in torch."""
    text = _refused(lambda: nn.Sequential(_layer(), nn.Linear(8, 4)), quantizer, x=torch.ones(1, 4))
    assert text.splitlines() == [
        "Sequential: its forward fails on the sample inputs (args_0: float32 1×4)",
        "cause: RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x4 and 8x4)",
        "fix: give inputs that the model accepts in eval mode; no quantizer is involved",
    ]


def test_images_as_they_were_read() -> None:
    """Whole numbers where the weights are floats: what was given is told, and what is usual."""
    first, *_, last = _refused(_layer, PT2E, x=torch.ones(1, 4, dtype=torch.uint8)).splitlines()
    assert first == "Linear: its forward fails on the sample inputs (args_0: uint8 1×4)"
    assert last.endswith("no quantizer is involved; for images, usually x.float() / 255")


def test_weights_that_hold_nan() -> None:
    """They are named; the observers' own words come behind."""
    last = nn.Linear(4, 3)
    with torch.no_grad():
        last.bias[1] = math.nan
    text = _refused(lambda: nn.Sequential(_layer(), last), PT2E)
    assert text.splitlines()[0] == (
        "Sequential: its weights hold NaN: 1.bias (1 of 3 values): load a checkpoint that is whole"
    )


_OPEN = {0: torch.export.Dim("b", min=1, max=64), 1: torch.export.Dim("t", min=2, max=64)}


def test_sizes_that_are_left_open() -> None:
    """No op and no dtype: the axes are named, and the way out converts."""

    def folded() -> nn.Module:
        def forward(self: Any, x: Tensor) -> Any:
            y = self.linear(x.reshape(x.shape[0] * x.shape[1], 4))
            return y.reshape(x.shape[0], x.shape[1], 4)

        return net(forward, linear=_layer())

    x = (torch.ones(2, 3, 4),)
    text = _refused(folded, None, x=x, dynamic_shapes=(_OPEN,))

    assert text.startswith(
        "the converter refuses Net: litert-torch does not lower the op that the last lines "
        "name with sizes left open (x: axes 0 and 1): give no dynamic_shapes, but a signature for "
        "each size: "
    )
    assert Edgeq().quantize(folded().eval(), {"one": x}, quantizer=None).tflite


def test_an_op_without_lowering_beside_open_sizes() -> None:
    """The sizes are not to blame."""
    bessel = net(lambda self, x: torch.special.bessel_j0(x))
    text = _refused(lambda: bessel, None, dynamic_shapes=({0: _OPEN[0]},))

    assert "Lowering not found: aten.special_bessel_j0" in text
    assert "left open" not in text


def test_no_message_is_longer_than_what_is_read() -> None:
    """Torch and MLIR print whole modules, in a line of thousands of characters or in many lines."""
    error = RuntimeError("begins " + "x" * 4000 + " ends\n" + "more\n" * 100 + "the last line")
    text = refusal("Net", "the converter", error)

    assert len(text) < 1000
    assert re.search("begins x+ … x+ ends", text)
    assert text.endswith("the last line")


def test_an_observer_at_what_gives_several_tensors() -> None:
    """Met where a decoder parts queries, keys and values by unbind (torchao 0.18.0)."""
    error = AttributeError("'tuple' object has no attribute 'numel'")
    assert refusal("Net", "calibration sample 0", error, is_annotated=True).startswith(
        "calibration sample 0 stops Net: the quantizer observes an op that returns several tensors "
        "(unbind, split, chunk): take the parts by indices or slices in the model (x[:, 0] in "
    )


@pytest.mark.parametrize("who", ["torch.export", "the converter"])
def test_no_quantizer_is_blamed_where_none_annotated(who: str) -> None:
    """The same words come from the export of a float model, such as a Nystromformer's."""
    error = RuntimeError("Attempting to broadcast a dimension of length 16 at -2!")
    text = refusal("Net", who, error)
    assert text.startswith(f"{who} refuses Net: ")
    assert "quantizer" not in text


def test_a_symptom_in_the_middle_of_a_long_line_is_recognized() -> None:
    """MLIR begins a line with a path: the installation decides where the line is cut."""
    model = nn.Sequential(nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1))
    traced = Traced(model, (normal(1, 4, 8, 8, seed=0),))
    for path in range(0, 400, 40):
        line = f"{'p' * path}: failed to legalize operation 'mhlo.convolution'{'x' * 400}"
        text = refusal("Sequential", "the converter", RuntimeError(line), [traced])
        assert "transposed convolutions whose padding it cannot lower: 0. " in text, path
