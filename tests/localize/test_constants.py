"""Rules about constants: silent on real sound files, and naming what was done to a spoilt one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fixtures.models import Conv1dNet, DepthwiseSeparable, ResidualNet, SmallModel, Upsampler
from fixtures.tflite.writer import pack, unpack
from pytest_edgeq.localize.constant_checks import check_bias, check_stored_weight, written_scale
from pytest_edgeq.tflite.constants import Constant, read_constant
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.roles import roles_of
from pytest_edgeq.tflite.subgraph import Op
from tests.localize.builds import PT2E, STATIC, Build, rounded

pytestmark = pytest.mark.slow

Array = npt.NDArray[Any]
Spoil = Callable[[Array], Any]

WIDE, FOUR_BITS = "recipe_static_wi8_ai16", "recipe_weight_only_wi4_afp32"
# Of the layers of a ResidualNet: two convolutions with equal shapes, and the linear one.
FIRST, SECOND, HEAD = 1, 2, 3
SCALE = "the bias's stored scale is not input scale × weight scale, but"
POINT = "the bias's zero point is 2, which must be 0"


class Layer(NamedTuple):
    """What an op takes beside its input."""

    op: str
    weight: Constant
    bias: Constant
    input_scale: float | None


def _weighted(graph: OpGraph) -> list[Op]:
    return [op for op in graph.ops if roles_of(graph, op).weights]


def _layer(graph: OpGraph, place: int) -> Layer:
    op = _weighted(graph)[place]
    roles = roles_of(graph, op)
    weight, bias = (read_constant(graph, op, each) for each in (*roles.weights, *roles.biases))
    scales = roles.inputs[0].scales
    return Layer(op.name, weight, bias, float(scales[0]) if len(scales) else None)


def _layers(build: Build, flow: str | None, place: int) -> tuple[Layer, Layer]:
    """Return a layer of a flow's file, and of the float file."""
    ours, theirs = (_layer(build(ResidualNet, each).graph, place) for each in (flow, None))
    return ours, theirs


def _findings(layer: Layer, floats: Layer) -> tuple[str, ...]:
    """Check weight and bias of a layer."""
    op, weight, bias, scale = layer
    return (
        *check_stored_weight(op, weight, floats.weight.values, kept=lambda: True),
        *check_bias(bias, floats.bias.values, input_scale=scale, weight_scales=weight.scales),
    )


@pytest.mark.parametrize(
    ("model", "flow", "dtype"),
    [
        *((ResidualNet, flow, "int8") for flow in (PT2E, "pt2e_dynamic_int8", STATIC, WIDE)),
        (ResidualNet, "recipe_dynamic_wi8_afp32", "int8"),
        (ResidualNet, FOUR_BITS, "int4"),
        *((model, STATIC, "int8") for model in (DepthwiseSeparable, Conv1dNet, Upsampler)),
    ],
)
def test_a_sound_file_has_no_findings(
    build: Build, model: type[SmallModel], flow: str | None, dtype: str
) -> None:
    """Every layer, under every scheme, and convolutions of every kind."""
    graph, floats = (build(model, each).graph for each in (flow, None))
    places = range(len(_weighted(graph)))
    assert len(places) == len(_weighted(floats)) > 1
    layers = [_layer(graph, place) for place in places]
    assert {layer.weight.dtype for layer in layers} == {dtype}
    assert [_findings(layers[i], _layer(floats, i)) for i in places] == [()] * len(places)


def _at(place: Any, change: Spoil) -> Spoil:
    """Change a part of the values alone."""

    def spoil(values: Array) -> Array:
        values = values.copy()
        values[place] = change(values[place])
        return values

    return spoil


def _negate_largest(codes: Array) -> Any:
    return _at(np.unravel_index(np.abs(codes).argmax(), codes.shape), np.negative)(codes)


SPOILT: list[tuple[str, str, Spoil]] = [
    ("weight", "codes: 1 of 576 differs: [4, 1, 2, 3] is", _at((4, 1, 2, 3), lambda n: n ^ 8)),
    ("weight", "(its sign)", _negate_largest),
    (
        *("weight", "codes: output channel 3 holds output channel 7, output channel 7 holds "),
        _at([3, 7], np.flipud),
    ),
    ("weight", "576 differ, in 8 of 8 output channels, most at [", lambda n: np.roll(n, 1, 0)),
    ("weight", "codes: output channel 5 is zero (72 of 576 differ)", _at(5, np.zeros_like)),
    ("weight", "codes: output channel 2 is negated (72 of 576 differ)", _at(2, np.negative)),
    ("weight", "codes: negated", np.negative),
    ("weight", "codes: all 576 are zero", np.zeros_like),
    ("weight", "codes: output channel 1 is off in", _at(1, lambda n: np.rint(n / 2))),
    ("bias", "codes: 1 of 8 differs: [6] is", _at(6, lambda n: n + 1)),
    (
        "bias",
        "codes: channel 1 is off in 1 of 1 codes by up to 16, ",
        _at([1, 6], lambda n: n + 16),
    ),
    ("bias", "codes: 8 of 8 differ, in 8 of 8 channels, most at [", lambda n: n - 16),
    ("bias", " is at the INT32 limit in channel 2: ", _at(2, lambda _: -(2**31))),
    ("bias", "codes: all 8 are zero", np.zeros_like),
]


@pytest.mark.parametrize(
    ("flow", "role", "told", "spoil"),
    [
        *((STATIC, *case) for case in SPOILT),
        # For int64 the limit is the same, because the quantizer clips before.
        (WIDE, "bias", " is at the INT32 limit in channel 3: ", _at(3, lambda _: -(2**31) + 1)),
        (None, "weight", "(float32): 1 of 576 differs", _at((1, 2, 0, 1), lambda n: 1.00001 * n)),
        (None, "bias", " (float32): negated", np.negative),
    ],
)
def test_what_was_done_to_a_constant_is_told(
    build: Build, flow: str | None, role: str, told: str, spoil: Spoil
) -> None:
    """In one sentence; one code of one channel is enough."""
    layer, floats = _layers(build, flow, FIRST)
    constant = getattr(layer, role)
    wrong = replace(constant, values=spoil(constant.values))
    (found,) = _findings(layer._replace(**{role: wrong}), floats)
    assert found.startswith(f"the {role}")
    assert told in found


def test_floats_may_differ_by_what_folding_a_batch_norm_rounds(build: Build) -> None:
    """In all of their values, of weight and bias."""
    floats, _ = _layers(build, None, FIRST)
    weight, bias = (
        replace(each, values=each.values * (1 + 5e-7)) for each in (floats.weight, floats.bias)
    )
    assert _findings(floats._replace(weight=weight, bias=bias), floats) == ()


def test_one_bit_of_an_int4_weight(build: Build) -> None:
    """Two codes a byte, the first in the lower half."""
    model = build(ResidualNet, FOUR_BITS)
    (weight,) = roles_of(model.graph, _weighted(model.graph)[HEAD]).weights
    file = unpack(model.tflite)
    buffer = file.buffers[weight.tensor.buffer]
    buffer.data = _at(5, lambda byte: byte ^ 0x20)(np.asarray(buffer.data, np.uint8))
    (found,) = _findings(_layer(OpGraph.read(pack(file)), HEAD), _layers(build, None, HEAD)[1])
    assert found.startswith("the weight's codes: 1 of 80 differs: [1, 3] is ")


@pytest.mark.parametrize(
    ("factors", "told", "where"),
    [
        (np.where(np.arange(8) == 4, 1.02, 1), "output channel 4 has a scale of", " in channel 4"),
        (np.full(8, 1.1), "the scale is", ""),
        (np.full(8, 2.0), "the scale is", ""),
    ],
)
def test_another_scale_of_a_weight(build: Build, factors: Array, told: str, where: str) -> None:
    """The codes tell the right one; the bias was not written for it."""
    layer, floats = _layers(build, STATIC, FIRST)
    assert layer.weight.scales is not None
    scales = layer.weight.scales * factors.reshape(-1, 1, 1, 1)
    wrong = layer._replace(weight=replace(layer.weight, scales=scales))
    codes, bias, scale = _findings(wrong, floats)
    assert codes.startswith(f"the weight's codes: {told} {factors.max():.3g} × the reference's (")
    assert bias.startswith("the bias's codes: ")
    assert scale == f"{SCALE} {1 / factors.max():.4g} × that{where}"


def test_a_bias_written_for_another_input_scale(build: Build) -> None:
    """The bias remembers the scale that its input had."""
    layer, floats = _layers(build, STATIC, SECOND)
    assert layer.input_scale is not None
    assert _findings(layer._replace(input_scale=1.02 * layer.input_scale), floats)[-1] == (
        f"{SCALE} 0.9804 × that"
    )
    model = build(ResidualNet, STATIC)
    op = _weighted(model.graph)[SECOND]
    assert written_scale(model.graph, op) == pytest.approx([layer.input_scale] * 2, rel=1e-6)
    # One channel of the weight has another scale: it is not the input's that was changed.
    file = unpack(model.tflite)
    quantization = file.subgraphs[0].tensors[op.inputs[1]].quantization
    quantization.scale = _at(3, lambda scale: 1.02 * scale)(quantization.scale)
    assert written_scale(OpGraph.read(pack(file)), op) is None


@pytest.mark.parametrize(
    ("op", "shape", "place", "name"),
    [
        ("CONV_2D", (4, 2, 3, 5), 1, "output channel"),
        ("DEPTHWISE_CONV_2D", (1, 2, 3, 5), (..., 1), "channel"),
        ("TRANSPOSE_CONV", (4, 2, 3, 5), 1, "output channel"),
        ("CONV_3D", (2, 3, 6, 4, 5), (..., 1), "output channel"),
        ("CONV_3D_TRANSPOSE", (2, 3, 6, 4, 5), (..., 1, slice(None)), "output channel"),
        ("FULLY_CONNECTED", (4, 5), 1, "output channel"),
        ("EMBEDDING_LOOKUP", (4, 5), 1, "row"),
        ("ADD", (2, 4, 5), (..., 1), "channel"),
    ],
)
def test_the_channels_of_an_ops_weight(
    op: str, shape: tuple[int, ...], place: Any, name: str
) -> None:
    """By the order of its kernel."""
    weight = np.random.default_rng(0).normal(size=shape)
    dead = Constant("float32", _at(place, np.zeros_like)(weight))
    (found,) = check_stored_weight(op, dead, weight)
    assert found.startswith(f"the weight (float32): {name} 1 is zero (")


@pytest.mark.parametrize(("dtype", "next_one"), [("float16", "1000.5"), ("bfloat16", "996")])
def test_a_shorter_float_is_the_nearest_one(dtype: str, next_one: str) -> None:
    """Half a step, which grows with the value."""
    weight = np.array([[0.1, 1.0, 1000.1], [3e-6, -0.2, 7.0]])
    values = torch.from_numpy(weight).to(getattr(torch, dtype)).to(torch.float32).numpy()
    assert check_stored_weight("FULLY_CONNECTED", Constant(dtype, values), weight) == ()
    values[0, 2] = next_one
    assert check_stored_weight("FULLY_CONNECTED", Constant(dtype, values), weight) == (
        f"the weight ({dtype}): 1 of 6 differs: [0, 2] is {next_one} where the reference has "
        "1000.1",
    )


def test_codes_in_blocks() -> None:
    """Each block by its own scale, rounded to bfloat16; one that is wrong shows in its codes."""
    weight = np.random.default_rng(0).normal(size=(2, 64))
    scales = np.repeat(np.abs(weight.reshape(2, 2, 32)).max(axis=2) / 7, 32, axis=1)
    chosen = rounded(weight, scales, "blockwise_32", last=7)
    kept = torch.from_numpy(scales).to(torch.bfloat16).to(torch.float64).numpy()
    assert not np.array_equal(kept, scales)
    for held in (scales, kept):
        stored = replace(chosen, scales=held)
        assert check_stored_weight("FULLY_CONNECTED", stored, weight, kept=lambda: True) == ()
    wrong = replace(chosen, scales=_at((1, slice(32, None)), lambda each: 1.2 * each)(scales))
    (found,) = check_stored_weight("FULLY_CONNECTED", wrong, weight)
    assert "output channel 1 is off in" in found


LINE, ONES = np.linspace(-1, 1, 64).reshape(8, 8), np.ones((2, 2))


@pytest.mark.parametrize(
    ("stored", "weight", "told"),
    [
        # Nearest codes of a scale four times too large.
        (
            rounded(LINE, np.full((1, 1), 4 / 127)),
            LINE,
            "the weight uses codes up to 32 of 127 only: its scale is 3.97 × what its values need",
        ),
        (
            replace(rounded(ONES, ONES), scales=np.array([[0.0], [1.0]])),
            ONES,
            "the weight has a scale that is zero, negative or not finite",
        ),
        (
            Constant("float32", np.array([[1, np.nan], [1, 1]], np.float32)),
            ONES,
            "the weight (float32): 1 of 4 are NaN or infinite",
        ),
    ],
    ids=["range", "scale", "values"],
)
def test_wasted_ranges_and_damaged_weights(stored: Constant, weight: Array, told: str) -> None:
    """Sentences, not errors."""
    assert check_stored_weight("FULLY_CONNECTED", stored, weight, kept=lambda: False) == (told,)


def test_scales_that_are_nearly_right_are_told_with_enough_digits() -> None:
    """A batch norm with another ε moves them by a few thousandths, each channel by its own."""
    weight = np.random.default_rng(0).standard_normal((4, 160, 3, 3))
    stored = rounded(weight, np.abs(weight).max((1, 2, 3), keepdims=True) / 127)
    apart = np.array([1.0011, 1.002, 1.003, 1.004])[:, None, None, None]
    (found,) = check_stored_weight("CONV_2D", stored, weight * apart)
    assert found.startswith("the weight's codes: the scale is 0.996019 to 0.99889 × the reference")


@pytest.mark.parametrize(
    ("bias", "input_scale", "told"),
    [
        ([1, np.nan], 0.5, ["the reference's bias is NaN"]),
        ([1, 1], 0.0, ["input scale × weight scale is zero, negative or not finite"]),
        ([1, 1, 1], 0.5, ["the bias has 3 values, and the weight 2 scales"]),
        ([1, 1], 0.5, ["the bias's codes: all 2 are zero", f"{SCALE} nan × that", POINT]),
    ],
)
def test_damaged_biases_are_told(bias: list[float], input_scale: float, told: list[str]) -> None:
    """First what is wrong beside the bias itself."""
    floats, codes, scales = np.array(bias), np.zeros(len(bias), np.int64), np.ones(2)
    stored = Constant("int32", codes, np.full(1, math.nan), np.full(1, 2), "per_tensor")
    found = check_bias(stored, floats, input_scale=input_scale, weight_scales=scales)
    assert list(found) == told


@pytest.mark.parametrize(
    ("code", "wider", "is_told"),
    [(2**31 - 1, 1e9, False), (2**31 - 1, 1e3, True), (2**31 - 1, 1.0, True), (5, 1e9, True)],
    ids=["the input's range", "not by that much", "the weight's scale", "a damaged code"],
)
def test_a_bias_that_the_range_of_the_input_cuts_is_sound(
    code: float, wider: float, is_told: bool
) -> None:
    """It would fit a range as wide as the input's values; a damaged code fits any."""
    size = 1e5 * 2**31 if code > 5 else code
    bias = np.array([size * 1e-15, 1e-9])
    stored = Constant(
        "int32", np.array([2**31 - 1, 1_000_000]), np.full(1, 1e-15), np.zeros(1, int), "per_tensor"
    )
    scales = np.full(1, 1e-3)
    found = check_bias(stored, bias, input_scale=1e-12, weight_scales=scales, wider=wider)
    assert any("is at the INT32 limit in channel 0" in each for each in found) is is_told
    assert len(found) == is_told


def test_what_a_bias_needs() -> None:
    """Integers have a scale, and are compared by those of input and weight."""
    codes = np.zeros(2, np.int64)
    plain, scaled = Constant("int32", codes), Constant("int32", codes, np.ones(1), codes[:1])
    assert check_bias(plain, np.ones(2)) == ("the bias is int32 without a scale",)
    with pytest.raises(ValueError, match="needs input_scale and weight_scales"):
        check_bias(scaled, np.ones(2))
