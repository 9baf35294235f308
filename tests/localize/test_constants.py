"""Rules about constants: silent on real sound files, and naming what was done to a spoilt one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from fixtures.models import Conv1dNet, ResidualNet, SmallModel, Upsampler, normal, samples, seeded
from fixtures.tflite.writer import pack, unpack
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.localize.biases import check_bias, input_scale_of, unexpected_qparams
from pytest_edgeq.localize.constants import check_weight
from pytest_edgeq.localize.layouts import to_file_layout
from pytest_edgeq.tflite.constants import Constant, read_constant
from pytest_edgeq.tflite.graph import Op, OpGraph
from pytest_edgeq.tflite.roles import roles_of

pytestmark = pytest.mark.slow

Array = npt.NDArray[Any]
Spoil = Callable[[Array], None]


class Constants(SmallModel):
    """A weight of each layout, with equal axes wherever an exchange of them could hide."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.depth = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.first = nn.Conv2d(8, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Go through all of them."""
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(self.depth(x))
        x = torch.relu(self.first(x))
        x = torch.relu(self.second(x))
        scores: torch.Tensor = self.head(x.mean((2, 3)))
        return scores

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[torch.Tensor, ...]:
        """An image."""
        return (normal(1, 3, 8, 8, seed=seed),)


LAYERS = ("stem", "depth", "first", "second", "head")
QUANTIZERS = (
    "pt2e_static_int8",
    "pt2e_dynamic_int8",
    "recipe_static_wi8_ai8",
    "recipe_static_wi8_ai16",
    "recipe_dynamic_wi8_afp32",
    "recipe_weight_only_wi4_afp32",
    None,
)
STATIC = "recipe_static_wi8_ai8"


@pytest.fixture(scope="module")
def converted() -> Callable[[str | None], QuantizedModel]:
    """Give the file of each quantizer, converted once."""
    known: dict[str | None, QuantizedModel] = {}

    def convert(quantizer: str | None) -> QuantizedModel:
        if quantizer not in known:
            known[quantizer] = _convert(Constants, quantizer)
        return known[quantizer]

    return convert


def _convert(model: type[SmallModel], quantizer: str | None) -> QuantizedModel:
    calibration = samples(model, 4) if "static" in (quantizer or "") else None
    return Edgeq().quantize(
        seeded(model), model.sample_inputs(), quantizer=quantizer, calibration=calibration
    )


def _folded(model: nn.Module, layer: str) -> tuple[Array, Array]:
    """Weight and bias as they must be in the file, in float64."""
    module = model.get_submodule(layer)
    assert isinstance(module, nn.Conv2d | nn.Linear)
    assert module.bias is not None
    weight, bias = module.weight.detach().double(), module.bias.detach().double()
    if layer == "stem":
        norm = model.get_submodule("norm")
        assert isinstance(norm, nn.BatchNorm2d)
        assert norm.running_var is not None
        assert norm.running_mean is not None
        factor = norm.weight.detach().double() / torch.sqrt(norm.running_var.double() + norm.eps)
        weight = weight * factor.reshape(-1, 1, 1, 1)
        bias = (bias - norm.running_mean.double()) * factor + norm.bias.detach().double()
    return weight.numpy(), bias.numpy()


def _op(graph: OpGraph, layer: str) -> Op:
    """Tell the op of a layer by its place among those with weights."""
    return [op for op in graph.ops if roles_of(graph, op).weights][LAYERS.index(layer)]


def _findings(graph: OpGraph, layer: str, *, swaps: bool = True) -> tuple[str, ...]:
    """Check weight and bias of a layer."""
    model = seeded(Constants)
    weight, bias = _folded(model, layer)
    op = _op(graph, layer)
    roles = roles_of(graph, op)
    others = {name: _folded(model, name)[0] for name in LAYERS if name != layer} if swaps else {}
    torch_op = "linear" if layer == "head" else "conv2d"
    stored = read_constant(graph, op, roles.weights[0])
    found = check_weight(op.name, stored, weight, others=others, torch_op=torch_op)
    (given,) = roles.biases
    scales = roles.inputs[0].scales
    return found + check_bias(
        op.name,
        read_constant(graph, op, given),
        bias,
        input_scale=float(scales[0]) if len(scales) else None,
        weight_scales=roles.weights[0].tensor.scales,
    )


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_a_sound_file_has_no_findings(
    converted: Callable[[str | None], QuantizedModel], quantizer: str | None
) -> None:
    """Every layer, under every scheme."""
    graph = converted(quantizer).graph
    dtypes = {roles_of(graph, _op(graph, layer)).weights[0].tensor.dtype for layer in LAYERS}
    assert dtypes == {
        None: {"float32"},
        # The recipe leaves depthwise convolutions as they are.
        "recipe_weight_only_wi4_afp32": {"int4", "float32"},
    }.get(quantizer, {"int8"})
    assert [_findings(graph, layer) for layer in LAYERS] == [()] * len(LAYERS)


@pytest.mark.parametrize("model", [Conv1dNet, Upsampler, ResidualNet])
def test_other_layouts_of_sound_files(model: type[SmallModel]) -> None:
    """Convolutions in one dimension and transposed ones find their layout."""
    graph = _convert(model, STATIC).graph
    torch_model = seeded(model)
    checked = 0
    for name, module in torch_model.named_modules():
        if not isinstance(module, nn.Conv1d | nn.ConvTranspose2d | nn.Linear):
            continue
        weight = module.weight.detach().double().numpy()
        shapes = []
        for op in graph.ops:
            for stored in roles_of(graph, op).weights:
                constant = read_constant(graph, op, stored)
                torch_op = "linear" if isinstance(module, nn.Linear) else None
                if to_file_layout(op.name, weight, constant.values.shape, torch_op=torch_op):
                    shapes.append(check_weight(op.name, constant, weight, torch_op=torch_op))
        assert () in shapes, name
        checked += 1
    assert checked


def _spoilt(model: QuantizedModel, layer: str, spoil: Spoil, *, bias: bool = False) -> OpGraph:
    """The file with one constant changed in place, its codes as the op reads them."""
    graph = model.graph
    roles = roles_of(graph, _op(graph, layer))
    tensor = (roles.biases if bias else roles.weights)[0].tensor
    file = unpack(model.tflite)
    buffer = file.buffers[tensor.buffer]
    values = np.frombuffer(bytes(buffer.data), tensor.dtype).reshape(tensor.shape).copy()
    spoil(values)
    buffer.data = np.frombuffer(values.tobytes(), np.uint8)
    return OpGraph.read(pack(file))


def _set(array: Array, values: Array) -> None:
    array[...] = values


def _flip_bit(codes: Array) -> None:
    codes[4, 1, 2, 3] ^= 8


def _negate_largest(codes: Array) -> None:
    place = np.unravel_index(np.abs(codes.astype(int)).argmax(), codes.shape)
    codes[place] = -codes[place]


def _exchange(codes: Array) -> None:
    codes[[3, 7]] = codes[[7, 3]]


def _kill(codes: Array) -> None:
    codes[5] = 0


def _negate_channel(codes: Array) -> None:
    codes[2] = -codes[2]


def _halve(codes: Array) -> None:
    codes[1] = np.rint(codes[1] / 2)


SPOILT_WEIGHTS: dict[str, tuple[str, Spoil]] = {
    "bit": ("1 of 576 differs: [4, 1, 2, 3] is", _flip_bit),
    "sign": ("(its sign, of the largest)", _negate_largest),
    "exchanged": ("permuted: output channels 3 and 7 are exchanged", _exchange),
    "rolled": (
        "permuted: the output channels are rolled by 1",
        lambda codes: _set(codes, np.roll(codes, 1, 0)),
    ),
    "rolled inputs": (
        "permuted: the input channels are rolled by −1",
        lambda codes: _set(codes, np.roll(codes, -1, 3)),
    ),
    "mirrored": (
        "permuted: the rows are in reverse order",
        lambda codes: _set(codes, codes[:, ::-1].copy()),
    ),
    "transposed": (
        "transposed (rows and columns exchanged)",
        lambda codes: _set(codes, codes.transpose(0, 2, 1, 3).copy()),
    ),
    "layers": (
        "transposed (output channels and input channels exchanged)",
        lambda codes: _set(codes, codes.transpose(3, 1, 2, 0).copy()),
    ),
    "torch's order": (
        "in the order in which torch has them",
        lambda codes: _set(codes, codes.transpose(0, 3, 1, 2).copy().reshape(codes.shape)),
    ),
    "zero channel": ("output channel 5 is zero (72 of 576 differ)", _kill),
    "negated channel": ("output channel 2 is negated", _negate_channel),
    "negated": ("negated", lambda codes: _set(codes, -codes)),
    "zero": ("all 576 are zero", lambda codes: _set(codes, np.zeros_like(codes))),
    "halved": ("output channel 1 is about 0.499", _halve),
}


@pytest.mark.parametrize("quantizer", ["pt2e_static_int8", STATIC])
@pytest.mark.parametrize("defect", SPOILT_WEIGHTS)
def test_a_spoilt_weight_is_told(
    converted: Callable[[str | None], QuantizedModel], quantizer: str, defect: str
) -> None:
    """The sentence names what was done, at the layer and at no other."""
    told, spoil = SPOILT_WEIGHTS[defect]
    graph = _spoilt(converted(quantizer), "first", spoil)
    found = _findings(graph, "first", swaps=False)
    assert len(found) == 1
    assert found[0].startswith("the weight's codes: ")
    assert told in found[0]
    assert [_findings(graph, layer) for layer in LAYERS if layer != "first"] == [()] * 4


def _respoilt(model: QuantizedModel, layer: str, change: Callable[[Any, Any], None]) -> OpGraph:
    """The file with the quantization parameters of a layer's weight and bias changed."""
    graph = model.graph
    roles = roles_of(graph, _op(graph, layer))
    file = unpack(model.tflite)
    tensors = file.subgraphs[0].tensors
    weight, bias = roles.weights[0].tensor, roles.biases[0].tensor
    change(tensors[weight.index].quantization, tensors[bias.index].quantization)
    return OpGraph.read(pack(file))


def test_a_scale_of_one_channel(converted: Callable[[str | None], QuantizedModel]) -> None:
    """2 % more in channel 4: its codes are not the nearest, and the bias was not written for it."""

    def change(weight: Any, bias: Any) -> None:
        del bias
        weight.scale = np.array(weight.scale, np.float32)
        weight.scale[4] *= np.float32(1.02)

    found = _findings(_respoilt(converted(STATIC), "first", change), "first")
    assert len(found) == 3
    assert found[0].startswith(
        "the weight's codes: output channel 4 has a scale of 1.02 × the reference's ("
    )
    assert found[1].startswith("the bias's codes: 1 of 8 differs: [4] is ")
    assert found[2] == (
        "the bias's stored scale is not input scale × weight scale, but 0.9804 × that in channel 4"
    )


@pytest.mark.parametrize(("factor", "told"), [(1.1, "1.1"), (2.0, "2")])
def test_a_scale_of_all_channels(
    converted: Callable[[str | None], QuantizedModel], factor: float, told: str
) -> None:
    """The codes tell the right scale, whichever channel."""

    def change(weight: Any, bias: Any) -> None:
        for each in (weight, bias):
            each.scale = np.array(each.scale, np.float32) * np.float32(factor)

    found = _findings(_respoilt(converted(STATIC), "first", change), "first")
    assert f"the scale is {told}" in found[0]
    assert "× the reference's" in found[0]


def test_a_bias_written_for_another_input_scale(
    converted: Callable[[str | None], QuantizedModel],
) -> None:
    """The bias remembers the scale that its input had."""
    graph = converted(STATIC).graph
    roles = roles_of(graph, _op(graph, "second"))
    stored = read_constant(graph, _op(graph, "second"), roles.biases[0])
    weights = roles.weights[0].tensor.scales
    scale = float(roles.inputs[0].scales[0])
    assert input_scale_of(stored, weights) == pytest.approx(scale, rel=1e-6)
    found = check_bias(
        "CONV_2D",
        stored,
        _folded(seeded(Constants), "second")[1],
        input_scale=1.02 * scale,
        weight_scales=weights,
    )
    assert found[-1] == (
        "the bias's stored scale is not input scale × weight scale, but 0.9804 × that"
    )
    # One channel of the weight has another scale: it is not the input's that was changed.
    assert input_scale_of(stored, weights * np.where(np.arange(8) == 3, 1.02, 1)) is None


def _limit(codes: Array) -> None:
    codes[2] = np.iinfo(codes.dtype).min


SPOILT_BIASES: dict[str, tuple[str, Spoil]] = {
    "by 1": (
        "the bias's codes: 1 of 8 differs: [6] is",
        lambda codes: _set(codes, codes + (np.arange(8) == 6).astype(codes.dtype)),
    ),
    "by 16 in two": (
        "channel 1 is shifted by +16 codes, channel 6 is shifted by +16 codes (2 of 8 differ)",
        lambda codes: _set(codes, codes + 16 * np.isin(np.arange(8), (1, 6)).astype(codes.dtype)),
    ),
    "all by 16": (
        "the bias's codes: all are shifted by −16",
        lambda codes: _set(codes, codes - codes.dtype.type(16)),
    ),
    "limit": ("the bias is at the INT32 limit in channel 2: ", _limit),
    "zero": ("the bias's codes: all 8 are zero", lambda codes: _set(codes, np.zeros_like(codes))),
    "rolled": (
        "the bias's codes: permuted: the channels are rolled by 1",
        lambda codes: _set(codes, np.roll(codes, 1)),
    ),
}


@pytest.mark.parametrize("quantizer", ["pt2e_static_int8", STATIC])
@pytest.mark.parametrize("defect", SPOILT_BIASES)
def test_a_spoilt_bias_is_told(
    converted: Callable[[str | None], QuantizedModel], quantizer: str, defect: str
) -> None:
    """One code of one channel is enough."""
    told, spoil = SPOILT_BIASES[defect]
    graph = _spoilt(converted(quantizer), "second", spoil, bias=True)
    (found,) = _findings(graph, "second")
    assert told in found


def test_an_int64_bias_at_the_int32_limit(
    converted: Callable[[str | None], QuantizedModel],
) -> None:
    """Beside int16 activations the limit is the same, because the quantizer clips before."""

    def spoil(codes: Array) -> None:
        codes[3] = -(2**31) + 1

    graph = _spoilt(converted("recipe_static_wi8_ai16"), "second", spoil, bias=True)
    assert roles_of(graph, _op(graph, "second")).biases[0].tensor.dtype == "int64"
    (found,) = _findings(graph, "second")
    assert found.startswith("the bias is at the INT32 limit in channel 3: ")


def test_a_weight_in_the_place_of_another(
    converted: Callable[[str | None], QuantizedModel],
) -> None:
    """Another layer's codes, with its own scales or with those of the place."""
    model = converted(STATIC)
    roles = roles_of(model.graph, _op(model.graph, "second"))
    other = read_constant(model.graph, _op(model.graph, "second"), roles.weights[0]).values
    graph = _spoilt(model, "first", lambda codes: _set(codes, other))
    (found,) = _findings(graph, "first")
    assert found == (
        "the weight's codes: the same as the weight of second (swapped, or the op reads another's "
        "input)"
    )


def test_a_float_weight_and_bias(converted: Callable[[str | None], QuantizedModel]) -> None:
    """Floats are equal but for what folding a batch norm rounds."""

    def perturb(values: Array) -> None:
        values[1, 2, 0, 1] *= 1 + 1e-5

    def negate(values: Array) -> None:
        values[...] = -values

    model = converted(None)
    (found,) = _findings(_spoilt(model, "stem", perturb), "stem")
    assert found.startswith("the weight (float32): 1 of 216 differs: [1, 2, 0, 1] is ")
    (found,) = _findings(_spoilt(model, "head", negate, bias=True), "head")
    assert found == "the bias (float32): negated"


def test_one_bit_of_an_int4_weight(converted: Callable[[str | None], QuantizedModel]) -> None:
    """Two codes a byte, the first in the lower half."""
    model = converted("recipe_weight_only_wi4_afp32")
    roles = roles_of(model.graph, _op(model.graph, "head"))
    file = unpack(model.tflite)
    buffer = file.buffers[roles.weights[0].tensor.buffer]
    data = np.frombuffer(bytes(buffer.data), np.uint8).copy()
    data[5] ^= 0x20
    buffer.data = data
    (found,) = _findings(OpGraph.read(pack(file)), "head")
    assert found.startswith("the weight's codes: 1 of 64 differs: [1, 3] is ")
    assert found.endswith(" (bit 1)")


@pytest.fixture(scope="module")
def chosen(converted: Callable[[str | None], QuantizedModel]) -> tuple[Constant, Constant]:
    """A weight as PT2E's file holds it, and as torch chose it, in torch's layout."""
    graph = converted("pt2e_static_int8").graph
    op = _op(graph, "first")
    stored = read_constant(graph, op, roles_of(graph, op).weights[0])
    weight = torch.from_numpy(_folded(seeded(Constants), "first")[0]).float()
    scales = torch.from_numpy(roles_of(graph, op).weights[0].tensor.scales)
    quantize = torch.ops.quantized_decomposed.quantize_per_channel
    zeros = torch.zeros(8, dtype=torch.int64)
    codes = quantize(weight, scales, zeros, 0, -127, 127, torch.int8)
    return stored, Constant.of_codes(codes.numpy(), scales.numpy(), axis=0)


def test_codes_that_torch_chose_must_be_kept(chosen: tuple[Constant, Constant]) -> None:
    """Not the nearest will do, but the very code, scale and zero point."""
    stored, expected = chosen
    assert check_weight("CONV_2D", stored, expected=expected) == ()
    codes = expected.values.copy()
    codes[4, 3, 1, 2] += 1 if codes[4, 3, 1, 2] < 0 else -1
    other = Constant(expected.dtype, codes, expected.scales, expected.zero_points, "per_channel")
    (found,) = check_weight("CONV_2D", stored, expected=other)
    assert found.startswith("the weight's codes: 1 of 576 differs: [4, 1, 2, 3] is ")


def test_scales_that_torch_chose_must_be_kept(chosen: tuple[Constant, Constant]) -> None:
    """As float32, to the bit."""
    stored, expected = chosen
    assert expected.scales is not None
    assert expected.zero_points is not None
    scales = np.where(np.arange(8) == 4, 1.02, 1).reshape(-1, 1, 1, 1) / expected.scales
    other = Constant.of_codes(expected.values, (1 / scales).ravel(), axis=0)
    (found,) = check_weight("CONV_2D", stored, expected=other)
    assert found == "the weight's scale is 1.02 × the reference's in output channel 4"
    nearly = np.nextafter(expected.scales.astype(np.float32), np.float32(1))
    (found,) = check_weight(
        "CONV_2D", stored, expected=Constant.of_codes(expected.values, nearly.ravel(), axis=0)
    )
    assert found.startswith("the weight's scale is (1 − ")
    points = np.where(np.arange(8) == 2, 3, 0)
    other = Constant.of_codes(expected.values, expected.scales.ravel(), points, axis=0)
    found = check_weight("CONV_2D", stored, expected=other)[-1]
    assert found == "the weight's zero point is −3 from the reference's in output channel 2"


def test_one_scale_for_all_where_torch_chose_one_a_channel(
    chosen: tuple[Constant, Constant],
) -> None:
    """The granularity comes first."""
    stored, expected = chosen
    assert stored.scales is not None
    coarse = stored.scales.max(keepdims=True)
    codes = np.rint(stored.values * (stored.scales / coarse)).astype(np.int64)
    wrong = Constant("int8", codes, coarse, np.zeros((1, 1, 1, 1), np.int64), "per_tensor")
    found = check_weight("CONV_2D", wrong, expected=expected)
    assert found[0] == "the weight's scales are per_tensor, and the reference's per_channel"


def test_the_lowest_code_may_be_narrowed_only_where_it_was_asked_for() -> None:
    """−128 → −127 where kernels compute wrongly with it."""
    codes = np.array([[-128, 5], [7, 127]])
    narrow = np.array([[-127, 5], [7, 127]])
    scales = np.array([0.1, 0.2], np.float32)
    expected = Constant.of_codes(codes, scales, axis=0)
    stored = Constant.of_codes(narrow, scales, axis=0)
    assert check_weight("FULLY_CONNECTED", stored, expected=expected, narrowed=True) == ()
    (found,) = check_weight("FULLY_CONNECTED", stored, expected=expected, torch_op="linear")
    assert found == (
        "the weight's codes: 1 of 4 differs: [0, 0] is -127 where the reference gives -128 (bit 0)"
    )
    assert check_weight("FULLY_CONNECTED", expected, expected=expected, narrowed=True)


def test_a_square_matrix_is_held_to_the_layout_of_its_op() -> None:
    """A linear layer keeps outputs first, so that a transposed one is told."""
    weight = np.arange(16.0).reshape(4, 4)
    stored = Constant("float32", weight.T.astype(np.float32))
    (found,) = check_weight("FULLY_CONNECTED", stored, weight, torch_op="linear")
    assert found == (
        "the weight (float32): transposed (output channels and input channels exchanged)"
    )
    assert check_weight("FULLY_CONNECTED", stored, weight, torch_op="mm") == ()
    assert check_weight("FULLY_CONNECTED", stored, weight) == ()


def test_float16_is_the_nearest_one() -> None:
    """Half a step of float16, which grows with the value."""
    weight = np.array([[0.1, 1.0, 1000.1], [3e-6, -0.2, 7.0]])
    sound = Constant("float16", weight.astype(np.float16))
    assert check_weight("FULLY_CONNECTED", sound, weight, torch_op="linear") == ()
    wrong = sound.values.copy()
    wrong[0, 2] = np.nextafter(wrong[0, 2], np.float16(0))
    (found,) = check_weight(
        "FULLY_CONNECTED", Constant("float16", wrong), weight, torch_op="linear"
    )
    assert found == (
        "the weight (float16): 1 of 6 differs: [0, 2] is 999.5 where the reference gives 1000.1"
    )


def test_codes_in_blocks() -> None:
    """Each block by its own scale; one that is wrong shows in its codes."""
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(2, 64)) * np.repeat([1, 10, 3, 0.1], 32).reshape(2, 64)
    scales = np.repeat(np.abs(weight.reshape(2, 2, 32)).max(axis=2) / 7, 32, axis=1)
    codes = np.rint(weight / scales).astype(np.int64)
    zero = np.zeros((1, 1), np.int64)
    sound = Constant("int4", codes, scales, zero, "blockwise_32")
    assert check_weight("FULLY_CONNECTED", sound, weight, torch_op="linear") == ()
    scales[1, 32:] *= 1.2
    wrong = Constant("int4", codes, scales, zero, "blockwise_32")
    (found,) = check_weight("FULLY_CONNECTED", wrong, weight, torch_op="linear")
    assert "output channel 1 is off in" in found


def test_scales_of_blocks_are_kept_as_the_file_can_hold_them() -> None:
    """The library writes them as bfloat16, whatever torchao chose: 2⁻⁸ of them at most."""
    weight = np.linspace(-1, 1, 128).reshape(2, 64)
    scales = np.repeat(np.abs(weight.reshape(2, 2, 32)).max(axis=2) / 7.5, 32, axis=1)
    codes = np.clip(np.rint(weight / scales), -8, 7).astype(np.int64)
    zero = np.zeros((1, 1), np.int64)
    chosen = Constant("int4", codes, scales, zero, "blockwise_32")
    halves = np.frexp(scales)[1] - 8
    kept = np.ldexp(np.rint(np.ldexp(scales, -halves)), halves)
    stored = Constant("int4", codes, kept, zero, "blockwise_32")
    assert not np.array_equal(kept, scales)
    assert check_weight("FULLY_CONNECTED", stored, weight, expected=chosen) == ()
    exact = Constant("int4", codes, scales, zero, "blockwise_32")
    (found,) = check_weight("FULLY_CONNECTED", exact, expected=chosen)
    assert found.startswith("the weight's scale is ")


def test_a_wasted_range_is_told() -> None:
    """Nearest codes of a scale four times too large."""
    weight = np.linspace(-1, 1, 64).reshape(8, 8)
    scale = 4 / 127
    codes = np.rint(weight / scale).astype(np.int64)
    stored = Constant.of_codes(codes, float(np.float32(scale)))
    (found,) = check_weight("FULLY_CONNECTED", stored, weight, torch_op="linear")
    assert found == (
        "the weight uses codes up to 32 of 127 only: its scale is 3.97 × what its values need"
    )


def test_values_beyond_the_range_may_be_clipped() -> None:
    """Recipes that minimize an error clip the largest values: to the last code, and no other."""
    weight = np.array([[1.0, 0.5, -1.0], [0.1, 0.2, 0.3]])
    stored = Constant.of_codes(np.array([[127, 64, -127], [13, 25, 38]]), 1 / 127.5)
    assert check_weight("FULLY_CONNECTED", stored, weight, torch_op="linear") == ()
    stored = Constant.of_codes(np.array([[126, 64, -127], [13, 25, 38]]), 1 / 127.5)
    (found,) = check_weight("FULLY_CONNECTED", stored, weight, torch_op="linear")
    assert "[0, 0] is 126 where the reference gives 127" in found


def test_values_beyond_a_few_ranges_are_another_weights() -> None:
    """A range from the values reaches each; one that clips does it in most channels."""
    codes = np.array([[127, 3], [5, -127], [127, 9], [-127, 1], [2, 127]])
    scales = np.array([0.1, 0.2, 0.3, 0.4, 0.5], np.float32)
    stored = Constant.of_codes(codes, scales, axis=0)
    weight = codes * scales[:, None]
    assert check_weight("FULLY_CONNECTED", stored, weight, torch_op="linear") == ()
    weight[1, 1] *= 1.1
    (found,) = check_weight("FULLY_CONNECTED", stored, weight, torch_op="linear")
    assert found == (
        "the weight's codes: 1 of 10 lies beyond what its scale reaches: [1, 1] is -127 where the "
        "reference gives -139.7"
    )
    clipped = codes * scales[:, None] * np.where(np.abs(codes) == 127, 1.1, 1)
    assert check_weight("FULLY_CONNECTED", stored, clipped, torch_op="linear") == ()


def test_a_bias_that_is_missing() -> None:
    """Zero is no loss, nor is less than half a step."""
    bias = np.array([0.0, 0.4, -0.3])
    assert check_bias("CONV_2D", None, None) == ()
    assert check_bias("CONV_2D", None, bias * 1e-3, input_scale=0.1, weight_scales=np.ones(3)) == ()
    (found,) = check_bias("CONV_2D", None, bias, input_scale=0.1, weight_scales=np.ones(3))
    assert found == "the op has no bias, and the reference one of up to 0.4 (channel 1)"


def test_damaged_parameters_are_told() -> None:
    """Scales of zero and values that are no numbers give sentences, not errors."""
    weight = np.ones((2, 2))
    stored = Constant.of_codes(np.ones((2, 2)), np.array([0.0, 1.0]), axis=0)
    (found,) = check_weight("FULLY_CONNECTED", stored, weight, torch_op="linear")
    assert found == "the weight has a scale that is zero, negative or not finite"
    values = np.array([[1, np.nan], [1, 1]], np.float32)
    (found,) = check_weight("FULLY_CONNECTED", Constant("float32", values), weight)
    assert found == "the weight (float32): 1 of 4 are NaN or infinite"
    (found,) = check_weight("FULLY_CONNECTED", Constant("float32", values), np.ones((3, 2)))
    assert found == "the weight is [2, 2], which is no layout of the reference's [3, 2]"
    codes = Constant.of_codes(np.zeros(2), math.nan, dtype="int32")
    first, second = check_bias(
        "CONV_2D", codes, np.ones(2), input_scale=0.5, weight_scales=np.ones(1)
    )
    assert first == "the bias's codes: all 2 are zero"
    assert second.startswith("the bias's stored scale is not input scale × weight scale")
    (found,) = check_bias("CONV_2D", codes, values[0], input_scale=0.5, weight_scales=np.ones(1))
    assert found == "the reference's bias is NaN"
    (found,) = check_weight("FULLY_CONNECTED", Constant("float32", weight), values)
    assert found == "the reference's weight is NaN in 1 of 4 places"
    (found,) = check_bias("CONV_2D", codes, np.ones(2), input_scale=0.0, weight_scales=np.ones(1))
    assert found == "input scale × weight scale is zero, negative or not finite"


def test_what_is_not_given_is_an_error() -> None:
    """Nothing to compare with is no comparison."""
    codes = Constant.of_codes(np.zeros(2), 1.0, dtype="int32")
    with pytest.raises(ValueError, match="give reference, expected or both"):
        check_weight("CONV_2D", codes)
    with pytest.raises(ValueError, match="needs input_scale and weight_scales"):
        check_bias("CONV_2D", codes, np.zeros(2))


def test_scales_that_are_nearly_right_are_told_with_enough_digits() -> None:
    """A batch norm with another ε moves them by a few thousandths, each channel by its own."""
    weight = np.random.default_rng(0).standard_normal((4, 160, 3, 3))
    scales = np.abs(weight).max((1, 2, 3)) / 127
    codes = np.rint(weight / scales[:, None, None, None])
    stored = Constant.of_codes(np.moveaxis(codes, 1, -1), scales, axis=0)
    apart = np.array([1.0011, 1.002, 1.003, 1.004])[:, None, None, None]
    (found,) = check_weight("CONV_2D", stored, weight * apart, torch_op="conv2d")
    assert found.startswith("the weight's codes: the scale is 0.996019 to 0.99889 × the reference")


def test_unexpected_parameters() -> None:
    """Exactly as float32, and the ratio."""
    assert unexpected_qparams("output", (float(np.float32(0.1)), 3), (0.1, 3)) is None
    assert unexpected_qparams("output", (0.102, -1), (0.1, 3)) == (
        "output has scale 0.102, which is 1.02 × the reference's 0.1 and zero point -1, where the "
        "reference has 3 (−4)"
    )
    nearly = float(np.nextafter(np.float32(0.1), np.float32(1)))
    assert unexpected_qparams("input 0", (nearly, 0), (0.1, 0)) == (
        "input 0 has scale 0.1, which is (1 + 7.5e-08) × the reference's 0.1"
    )


@pytest.mark.parametrize(
    ("op", "shape", "file_shape", "torch_op", "order"),
    [
        ("CONV_2D", (4, 3, 2, 5), (4, 2, 5, 3), "conv2d", (0, 2, 3, 1)),
        ("CONV_2D", (4, 3, 5), (4, 1, 5, 3), "conv1d", (0, 2, 1)),
        ("DEPTHWISE_CONV_2D", (6, 1, 2, 5), (1, 2, 5, 6), "conv2d", (1, 2, 3, 0)),
        ("DEPTHWISE_CONV_2D", (6, 1, 5), (1, 1, 5, 6), "conv1d", (1, 2, 0)),
        ("TRANSPOSE_CONV", (3, 4, 2, 5), (4, 2, 5, 3), "conv_transpose2d", (1, 2, 3, 0)),
        ("CONV_3D", (4, 3, 2, 5, 6), (2, 5, 6, 3, 4), "conv3d", (2, 3, 4, 1, 0)),
        ("FULLY_CONNECTED", (4, 3), (4, 3), "linear", (0, 1)),
        ("FULLY_CONNECTED", (3, 4), (4, 3), "addmm", (1, 0)),
        ("EMBEDDING_LOOKUP", (9, 4), (9, 4), "embedding", (0, 1)),
        ("PRELU", (4,), (1, 1, 4), "prelu", (0,)),
        ("ADD", (4, 1, 1), (1, 1, 1, 4), "add", (1, 2, 0)),
        ("MUL", (1, 4, 2, 5), (1, 2, 5, 4), "mul", (0, 2, 3, 1)),
    ],
)
def test_layouts(
    op: str,
    shape: tuple[int, ...],
    file_shape: tuple[int, ...],
    torch_op: str,
    order: tuple[int, ...],
) -> None:
    """One layout each, element by element."""
    values = np.arange(np.prod(shape)).reshape(shape)
    (found,) = to_file_layout(op, values, file_shape, torch_op=torch_op)
    assert np.array_equal(found, values.transpose(order).reshape(file_shape))


def test_layouts_that_are_not_there() -> None:
    """What does not fit gives none; what may be two gives both, the usual one first."""
    assert to_file_layout("CONV_2D", np.zeros((4, 3, 2, 2)), (4, 3, 2, 2)) == ()
    square = np.arange(4).reshape(2, 2)
    first, second = to_file_layout("FULLY_CONNECTED", square, (2, 2))
    assert np.array_equal(first, square)
    assert np.array_equal(second, square.T)


def test_a_transposed_convolution_in_groups() -> None:
    """Each group's channels stay together."""
    values = np.arange(4 * 3 * 2 * 2).reshape(4, 3, 2, 2)
    (found,) = to_file_layout("TRANSPOSE_CONV", values, (6, 2, 2, 2))
    assert np.array_equal(found[:3, :, :, 0], values[0])
    assert np.array_equal(found[3:, :, :, 1], values[3])
