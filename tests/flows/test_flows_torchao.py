"""The torchao flow: what each config promises, told by the file and by numbers; what is refused."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fixtures.models import EmbeddingMean, ResidualNet, SelfAttention, normal, samples, seeded
from pytest_edgeq import Edgeq, QuantizedModel, assert_op_dtypes, litert
from pytest_edgeq.quantize.torchao import _check_kept

with litert.quiet():
    from torchao import quantization as ao
    from torchao.quantization.qat import QATConfig

# The narrow ones are there, but not in the stubs.
INT2, INT3, INT4 = (vars(torch)[name] for name in ("int2", "int3", "int4"))
INT8 = torch.int8
PER_AXIS, GROUPS = ao.PerAxis(0), ao.PerGroup(32)
Dynamic, WeightOnly = ao.Int8DynamicActivationIntxWeightConfig, ao.IntxWeightOnlyConfig

# Float activations through two layers: each of the 64 products of a sum is rounded to 24 bits, so
# an error of at most 64 · 2⁻²⁴ of the sum of their amounts: 108 dB. 131 dB and more were measured.
FLOAT = 100
# Activations rounded to eight bits by torchao and by the kernels, each in its own way where the
# config is symmetric and XNNPACK is not: about 40 dB for each rounding; 38 dB and more measured.
EIGHT_BITS = 35
# Scales of blocks are kept to eight bits (bfloat16's mantissa): 2⁻⁹ of a weight at most, 54 dB, and
# independent from block to block; in two layers 47 dB and more were measured.
BLOCK_SCALES = 45


class _Mlp(nn.Module):
    """Two layers of 64 inputs, which are two groups of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Give eight numbers a row."""
        out: Tensor = self.second(torch.relu(self.first(x)))
        return out


def rows(n: int, *, seed: int = 1, length: int = 3) -> list[tuple[Tensor]]:
    """Samples of `_Mlp`, of several rows each: what is dynamic is so row by row."""
    return [(normal(length, 64, seed=1000 * seed + i),) for i in range(n)]


# Config; scheme, stored dtype and granularity; what stands between the stored weights and the op;
# how near the file must come to the torch module, in dB, on XNNPACK and on LiteRT's own kernels.
PROMISES: dict[str, tuple[Any, tuple[str, str, str, dict[str, int], int, int | None]]] = {
    "dynamic int8": (
        Dynamic(weight_dtype=INT8, weight_granularity=PER_AXIS),
        ("dynamic", "int8", "per_channel", {}, EIGHT_BITS, EIGHT_BITS),
    ),
    "dynamic int4": (
        Dynamic(weight_dtype=INT4, weight_granularity=PER_AXIS),
        ("dynamic", "int4", "per_channel", {}, EIGHT_BITS, EIGHT_BITS),
    ),
    "dynamic int4 in groups": (
        Dynamic(weight_dtype=INT4, weight_granularity=GROUPS),
        # LiteRT's own kernels forget the ReLU or the groups (2.3.0): −1 dB.
        ("dynamic", "int4", "blockwise_32", {}, BLOCK_SCALES, None),
    ),
    "dynamic int3": (
        Dynamic(weight_dtype=INT3, weight_granularity=PER_AXIS),
        ("dynamic", "int4", "per_channel", {}, EIGHT_BITS, EIGHT_BITS),
    ),
    "dynamic symmetric": (
        ao.Int8DynamicActivationInt8WeightConfig(),
        ("dynamic", "int8", "per_channel", {}, EIGHT_BITS, EIGHT_BITS),
    ),
    "dynamic one scale": (
        ao.Int8DynamicActivationInt8WeightConfig(granularity=ao.PerTensor()),
        ("dynamic", "int8", "per_tensor", {}, EIGHT_BITS, EIGHT_BITS),
    ),
    "weight-only int8": (
        WeightOnly(weight_dtype=INT8, granularity=PER_AXIS),
        ("weight_only", "int8", "per_channel", {"DEQUANTIZE": 2}, FLOAT, FLOAT),
    ),
    "weight-only int4": (
        WeightOnly(weight_dtype=INT4, granularity=PER_AXIS),
        ("weight_only", "int4", "per_channel", {"DEQUANTIZE": 2}, FLOAT, FLOAT),
    ),
    "weight-only int8 in groups": (
        WeightOnly(weight_dtype=INT8, granularity=GROUPS),
        # The rows of the longer matrix that holds the groups.
        ("weight_only", "int8", "per_channel", {"DEQUANTIZE": 2, "RESHAPE": 2}, FLOAT, FLOAT),
    ),
    "weight-only int4 in groups": (
        WeightOnly(weight_dtype=INT4, granularity=GROUPS),
        ("weight_only", "int4", "per_channel", {"DEQUANTIZE": 2, "RESHAPE": 2}, FLOAT, FLOAT),
    ),
    "weight-only int2": (
        WeightOnly(weight_dtype=INT2, granularity=PER_AXIS),
        ("weight_only", "int2", "per_channel", {"DEQUANTIZE": 2}, FLOAT, FLOAT),
    ),
    "weight-only asymmetric": (
        WeightOnly(weight_dtype=INT8, granularity=PER_AXIS, mapping_type=ao.MappingType.ASYMMETRIC),
        ("weight_only", "int8", "per_channel", {"DEQUANTIZE": 2}, FLOAT, FLOAT),
    ),
    "weight-only classic": (
        ao.Int8WeightOnlyConfig(),
        ("weight_only", "int8", "per_channel", {"DEQUANTIZE": 2}, FLOAT, FLOAT),
    ),
    "weight-only one scale": (
        ao.Int8WeightOnlyConfig(granularity=ao.PerTensor()),
        ("weight_only", "int8", "per_tensor", {"DEQUANTIZE": 2}, FLOAT, FLOAT),
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, QuantizedModel]:
    """One conversion for each config, made when asked for."""
    maker = Edgeq(directory=tmp_path_factory.mktemp("torchao"))

    class Made(dict[str, QuantizedModel]):
        def __missing__(self, case: str) -> QuantizedModel:
            config = PROMISES[case][0]
            self[case] = maker.quantize(seeded(_Mlp), rows(1)[0], quantizer=config)
            return self[case]

    return Made()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("case", PROMISES)
def test_a_config_keeps_its_promise(
    made: dict[str, QuantizedModel], maker: Edgeq, case: str
) -> None:
    """Scheme, dtype, granularity and the ops beside; the file computes what torch does."""
    quantized = made[case]
    scheme, weight, granularity, beside, near, near_own = PROMISES[case][1]

    assert quantized.flow == "torchao"
    assert_op_dtypes(
        quantized,
        "FULLY_CONNECTED",
        input="float32",
        output="float32",
        weight=weight,
        scheme=scheme,
        granularity=granularity,
        count=2,
    )
    assert [op.module for op in quantized.op_dtypes.ops("FULLY_CONNECTED")] == ["first", "second"]
    assert quantized.op_dtypes.counts() == {"FULLY_CONNECTED": 2, **beside}
    for runtime, bound in (("xnnpack", near), ("builtin", near_own), ("reference", near_own)):
        comparison = maker.compare(quantized, rows(8), runtime=runtime)
        assert tuple(comparison.stages) == ("quantization", "lowering", "total")
        assert comparison.lowering is not None
        if bound is not None:
            assert comparison.lowering.sqnr_db > bound, runtime


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", PROMISES)
def test_the_file_holds_torchs_own_weights(made: dict[str, QuantizedModel], case: str) -> None:
    """Every scale and every code, in the order of torch."""
    quantized = made[case]
    module = quantized.simulated
    assert module is not None
    for op in quantized.graph.ops:
        if op.name != "FULLY_CONNECTED":
            continue
        entry = quantized.op_dtypes.ops("FULLY_CONNECTED", module=None)
        path = next(each.module for each in entry if each.index == op.index)
        weight: Any = module.get_submodule(str(path)).weight
        stored = _stored(quantized, op)
        scales = quantized.graph.scales(op.subgraph, stored)
        # A bfloat16 keeps eight bits of a block's scale.
        close = 2**-8 if stored.granularity == "blockwise_32" else 0
        np.testing.assert_allclose(scales.ravel(), weight.scale.numpy().ravel(), rtol=close)
        np.testing.assert_array_equal(_codes(quantized, stored), weight.qdata.numpy().ravel())


def _stored(quantized: QuantizedModel, op: Any) -> Any:
    subgraph = quantized.graph.subgraphs[op.subgraph]
    index = op.inputs[1]
    while not subgraph.tensors[index].is_constant:
        index = subgraph.producer[index].inputs[0]
    return subgraph.tensors[index]


def _codes(quantized: QuantizedModel, tensor: Any) -> np.ndarray[Any, Any]:
    packed = quantized.graph.constant(tensor)
    bits = {"int8": 8, "int4": 4, "int2": 2}[tensor.dtype]
    # The first code stands in the lowest bits; shifting it up and down again extends its sign.
    parts = [(packed << (8 - bits - low)).view(np.int8) >> (8 - bits) for low in range(0, 8, bits)]
    return np.stack(parts, axis=-1).ravel()


def test_a_code_that_moved_by_one_is_noticed(made: dict[str, QuantizedModel], maker: Edgeq) -> None:
    """The bounds are no formality: one weight a row moved by one code breaks that of a file."""
    quantized = made["weight-only int8"]
    op = quantized.graph.ops[-1]
    packed = quantized.graph.constant(_stored(quantized, op))
    content = bytearray(quantized.tflite)
    start = bytes(content).index(packed.tobytes())
    for row in range(8):
        content[start + 64 * row] ^= 1
    comparison = maker.compare(quantized.with_tflite(bytes(content)), rows(8))

    assert comparison.lowering is not None
    assert comparison.lowering.sqnr_db < 60


def test_the_model_is_left_as_it_was(maker: Edgeq) -> None:
    """Its weights are plain and the same; the simulated model is another."""
    model = seeded(_Mlp)
    before = copy.deepcopy(model.state_dict())
    quantized = maker.quantize(model, rows(1)[0], quantizer=PROMISES["dynamic int8"][0])

    assert quantized.float_model is model
    assert type(model.first.weight) is nn.Parameter
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_lowest_code_is_not_used_where_activations_are_quantized(maker: Edgeq) -> None:
    """Torchao gives −128 to a weight half-way to −127; the file and the simulated model do not."""
    model = seeded(_Mlp)
    plain: Any = copy.deepcopy(model)
    ao.quantize_(plain, PROMISES["dynamic int8"][0])
    quantized = maker.quantize(model, rows(1)[0], quantizer=PROMISES["dynamic int8"][0])
    simulated: Any = quantized.simulated
    theirs = plain.first.weight.qdata.int()
    ours = simulated.first.weight.qdata.int()

    assert int((theirs == -128).sum()) > 0
    assert torch.equal(ours, theirs.clamp(min=-127))


def test_each_layer_by_a_config_of_its_own(maker: Edgeq) -> None:
    """`FqnToConfig` chooses: an int4 layer, a dynamic one by a regex, the others in float."""
    config = ao.FqnToConfig(
        OrderedDict(
            [
                ("query", PROMISES["weight-only int4"][0]),
                ("re:(key|value)", PROMISES["dynamic int8"][0]),
                ("out", None),
            ]
        )
    )
    quantized = maker.quantize(
        seeded(SelfAttention), SelfAttention.sample_inputs(), quantizer=config
    )

    linear = "FULLY_CONNECTED"
    assert_op_dtypes(
        quantized, linear, module="query", scheme="weight_only", weight="int4", count=1
    )
    for name in ("key", "value"):
        assert_op_dtypes(quantized, linear, module=name, scheme="dynamic", weight="int8", count=1)
    assert_op_dtypes(quantized, linear, module="out", scheme="float", weight="float32", count=1)


@pytest.mark.parametrize("case", ["weight-only int8", "weight-only int4 in groups"])
def test_an_embedding(maker: Edgeq, case: str) -> None:
    """Named by an `FqnToConfig`, its table is weight-only; integers come in."""
    model = seeded(EmbeddingMean)
    name = next(n for n, m in model.named_modules() if isinstance(m, nn.Embedding))
    table: Any = model.get_submodule(name)
    config = copy.deepcopy(PROMISES[case][0])
    if case.endswith("groups"):
        config.granularity = ao.PerGroup(table.embedding_dim // 2)
    quantized = maker.quantize(
        model,
        EmbeddingMean.sample_inputs(),
        quantizer=ao.FqnToConfig(OrderedDict([(name, config)])),
    )
    comparison = maker.compare(quantized, samples(EmbeddingMean, 8))

    assert_op_dtypes(
        quantized,
        "EMBEDDING_LOOKUP",
        scheme="weight_only",
        weight="int4" if "int4" in case else "int8",
        count=1,
    )
    assert comparison.lowering is not None
    assert comparison.lowering.sqnr_db > FLOAT


class _Several(nn.Module):
    """A layer used twice, two with the same values, one that is never used, four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(64, 64)
        self.twin = nn.Linear(64, 64)
        self.other = nn.Linear(64, 64)
        self.other.load_state_dict(self.twin.state_dict())
        self.unused = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        """Five layers in a row."""
        x = self.twice(torch.tanh(self.twice(x)))
        out: Tensor = self.other(torch.sigmoid(self.twin(torch.tanh(x))))
        return out


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dynamic int4", "weight-only int4 in groups"])
def test_layers_that_share_or_idle(maker: Edgeq, case: str) -> None:
    """All four calls are quantized; what the model never uses is not missed."""
    inputs = (normal(1, 2, 3, 64, seed=1),)
    quantized = maker.quantize(seeded(_Several), inputs, quantizer=PROMISES[case][0])
    comparison = maker.compare(quantized, [(normal(1, 2, 3, 64, seed=i),) for i in range(4)])

    scheme = PROMISES[case][1][0]
    assert_op_dtypes(quantized, "FULLY_CONNECTED", scheme=scheme, weight="int4", count=4)
    assert comparison.lowering is not None
    assert comparison.lowering.sqnr_db > EIGHT_BITS


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dynamic int4", "weight-only int4 in groups"])
def test_two_signatures(maker: Edgeq, case: str) -> None:
    """Two sizes in one file, with one set of weights; each is run and compared."""
    inputs = {"one": rows(1, length=1)[0], "five": rows(1, length=5)[0]}
    quantized = maker.quantize(seeded(_Mlp), inputs, quantizer=PROMISES[case][0])
    alone = maker.quantize(seeded(_Mlp), inputs["one"], quantizer=PROMISES[case][0])

    assert_op_dtypes(quantized, "FULLY_CONNECTED", scheme=PROMISES[case][1][0], count=4)
    # The weights are there once: 64 · 64 + 8 · 64 codes of half a byte, 2,304 bytes.
    assert quantized.size_bytes < 2 * alone.size_bytes
    for name, length in (("one", 1), ("five", 5)):
        comparison = maker.compare(quantized.signature(name), rows(4, length=length))
        assert comparison.lowering is not None
        assert comparison.lowering.sqnr_db > EIGHT_BITS


def test_two_models_in_one_file(maker: Edgeq) -> None:
    """Each with its own weights under the same names, one with a layer that it never uses."""
    models = {"some": seeded(_Several), "few": seeded(_Mlp, seed=1)}
    inputs = {"some": rows(1)[0], "few": rows(1)[0]}
    quantized = maker.quantize(models, inputs, quantizer=PROMISES["dynamic int4"][0])

    assert_op_dtypes(quantized, "FULLY_CONNECTED", scheme="dynamic", weight="int4", count=6)
    for name in models:
        comparison = maker.compare(quantized.signature(name), rows(4))
        assert comparison.lowering is not None
        assert comparison.lowering.sqnr_db > EIGHT_BITS


def test_any_number_of_rows(maker: Edgeq) -> None:
    """A dynamic batch: compared at two sizes; a bias there is too much for litert-torch 0.10.0."""
    quantized = maker.quantize(
        nn.Sequential(nn.Linear(64, 32, bias=False)).eval(),
        rows(1)[0],
        quantizer=PROMISES["dynamic int8"][0],
        dynamic_shapes={"input": {0: torch.export.Dim("rows", min=1, max=16)}},
    )
    for length in (1, 7):
        comparison = maker.compare(quantized, rows(4, length=length))
        assert comparison.lowering is not None
        assert comparison.lowering.sqnr_db > EIGHT_BITS


def test_trained_for_its_quantization(maker: Edgeq) -> None:
    """Torchao's QAT: prepared and trained by the user, converted by the config that converts."""
    base = PROMISES["dynamic int4 in groups"][0]
    model = seeded(_Mlp)
    with litert.quiet():
        ao.quantize_(model, QATConfig(base, step="prepare"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in rows(3):
        optimizer.zero_grad()
        (model.train()(x) - 1).square().mean().backward()
        optimizer.step()
    quantized = maker.quantize(model.eval(), rows(1)[0], quantizer=QATConfig(base, step="convert"))
    comparison = maker.compare(quantized, rows(8))

    assert_op_dtypes(
        quantized, "FULLY_CONNECTED", weight="int4", granularity="blockwise_32", count=2
    )
    # The reference is the prepared model, which computes with the int4 weights already; of the
    # distance between int4 and float weights (18 dB) nothing is left but the lowest codes.
    assert comparison.total.sqnr_db > 25


class _Attending(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.MultiheadAttention(64, 4, batch_first=True))

    def forward(self, x: Tensor) -> Tensor:
        """Let the sequence attend to itself."""
        out: Tensor = self[0](x, x, x, need_weights=False)[0]
        return out


class _BatchNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 32)
        self.norm: Any = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Give eight numbers a row."""
        out: Tensor = self.head(torch.relu(self.norm(self.linear(x))))
        return out


def _batch_normed(*, sign: int) -> Any:
    model: Any = seeded(_BatchNormed)
    with torch.no_grad():
        model.norm.weight.mul_(sign)
    return model


def _near(maker: Edgeq, quantized: QuantizedModel, samples: Any, bound: int) -> None:
    comparison = maker.compare(quantized, samples)
    assert comparison.lowering is not None
    assert comparison.lowering.sqnr_db > bound


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("case", "sign"),
    [
        ("dynamic int4", 1),
        ("dynamic int8", -1),
        ("weight-only int8", 1),
        ("weight-only int4 in groups", 1),
    ],
)
def test_a_batch_norm_is_folded_into_the_scales(maker: Edgeq, case: str, sign: int) -> None:
    """Each channel's factor goes into its scale; of a negative one the sign into the codes."""
    config, (scheme, weight, *_, beside, near, _) = PROMISES[case]
    quantized = maker.quantize(_batch_normed(sign=sign), rows(1)[0], quantizer=config)

    assert_op_dtypes(quantized, "FULLY_CONNECTED", scheme=scheme, weight=weight, count=2)
    # The head's 32 inputs are one group.
    expected = {"FULLY_CONNECTED": 2, **beside, **({"RESHAPE": 1} if "RESHAPE" in beside else {})}
    assert quantized.op_dtypes.counts() == expected
    _near(maker, quantized, rows(8), near)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """One call of torch for scale, softmax and both products."""
        layers = (self.query, self.key, self.value)
        query, key, value = (f(x).reshape(1, 5, 2, 32).transpose(1, 2) for f in layers)
        return nn.functional.scaled_dot_product_attention(query, key, value)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("case", ["dynamic int8", "dynamic int4 in groups", "weight-only int4"])
def test_the_scale_of_an_attention_is_folded_into_the_scales(maker: Edgeq, case: str) -> None:
    """The converter multiplies queries and keys by its root; so do their scales."""
    config, (scheme, weight, granularity, _, near, _) = PROMISES[case]
    inputs = [(normal(1, 5, 64, seed=i),) for i in range(4)]
    quantized = maker.quantize(seeded(_Attention), inputs[0], quantizer=config)

    assert_op_dtypes(
        quantized,
        "FULLY_CONNECTED",
        scheme=scheme,
        weight=weight,
        granularity=granularity,
        count=3,
    )
    _near(maker, quantized, inputs, near)


# One scale cannot take a factor for each channel, and −128 has no opposite.
UNFOLDABLE = [("dynamic one scale", 1), ("weight-only int8", -1)]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "sign"), UNFOLDABLE)
def test_a_batch_norm_that_the_codes_cannot_take(maker: Edgeq, case: str, sign: int) -> None:
    """Refused, with three ways out."""
    told = r"folds linear\.weight with.*fuse_linear_bn_eval.*FqnToConfig.*recipe_dynamic_wi8_afp32"
    with pytest.raises(ValueError, match=told):
        maker.quantize(_batch_normed(sign=sign), rows(1)[0], quantizer=PROMISES[case][0])


@pytest.mark.parametrize(("case", "sign"), UNFOLDABLE)
def test_a_batch_norm_folded_before(maker: Edgeq, case: str, sign: int) -> None:
    """The first way out that the refusal names."""
    model = _batch_normed(sign=sign)
    model.linear = torch.nn.utils.fusion.fuse_linear_bn_eval(model.linear, model.norm)
    model.norm = nn.Identity()
    config, (scheme, weight, *_) = PROMISES[case]
    quantized = maker.quantize(model.eval(), rows(1)[0], quantizer=config)

    assert_op_dtypes(quantized, "FULLY_CONNECTED", scheme=scheme, weight=weight, count=2)


class _Normed(nn.Module):
    """As a transformer's feed forward: a LayerNorm whose weight the converter folds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.linear = nn.Linear(64, 8)
        nn.init.normal_(self.norm.weight, 1.0, 0.3)
        nn.init.normal_(self.norm.bias, 0.0, 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise and map."""
        y: torch.Tensor = self.linear(self.norm(x))
        return y


@pytest.mark.slow
def test_a_layer_norm_folded_before(maker: Edgeq) -> None:
    """The way out that the refusal names, by its very words."""
    model, sample = seeded(_Normed), normal(3, 64, seed=0)
    config = PROMISES["weight-only int8"][0]
    with pytest.raises(ValueError, match=r"linear\.weight \*= norm\.weight"):
        maker.quantize(model, sample, quantizer=config)
    linear, norm, before = model.linear, model.norm, model(sample)
    with torch.no_grad():
        linear.bias.add_(torch.mv(linear.weight, norm.bias))
        linear.weight *= norm.weight
        norm.bias.zero_()
        norm.weight.fill_(1)
    torch.testing.assert_close(model(sample), before)
    quantized = maker.quantize(model, sample, quantizer=config)
    assert_op_dtypes(quantized, "FULLY_CONNECTED", scheme="weight_only", weight="int8", count=1)


def test_a_layer_that_came_out_in_float_is_noticed(
    made: dict[str, QuantizedModel], maker: Edgeq
) -> None:
    """Held against the promises, a file of which one layer is in float is none."""
    model = seeded(_Mlp)
    one = ao.FqnToConfig(OrderedDict([("first", PROMISES["dynamic int8"][0])]))
    half = maker.quantize(model, rows(1)[0], quantizer=one)
    simulated = made["dynamic int8"].simulated
    assert simulated is not None
    weights = litert.ao_weights(simulated, "_Mlp")
    request: Any = SimpleNamespace(name="_Mlp")
    _check_kept(request, made["dynamic int8"].edge, weights)
    with pytest.raises(RuntimeError, match=r"of 2 layers quantized as dynamic int8.*kept 1"):
        _check_kept(request, half.edge, weights)
    second = [weight for weight in weights if weight.name == "second.weight"]
    with pytest.raises(RuntimeError, match=r"FULLY_CONNECTED #1 \(second\) is in float"):
        _check_kept(request, half.edge, second)


def _groups(size: int, **options: Any) -> Any:
    return Dynamic(weight_granularity=ao.PerGroup(size), **options)


REFUSED = {
    "groups of int8": (_groups(32), ValueError, r"first\.weight: int8 in groups of 32.*PerAxis"),
    "small groups": (_groups(16, weight_dtype=INT4), ValueError, "int4 in groups of 16.*of 32"),
    "asymmetric": (
        Dynamic(
            weight_dtype=INT8,
            weight_granularity=PER_AXIS,
            weight_mapping_type=ao.MappingType.ASYMMETRIC,
        ),
        ValueError,
        "zero points other than 0.*MappingType.SYMMETRIC",
    ),
    "no whole groups": (
        WeightOnly(weight_dtype=INT4, granularity=ao.PerGroup(48)),
        RuntimeError,
        "(?s)torchao cannot apply IntxWeightOnlyConfig to _Mlp.*divisible",
    ),
    "for a GPU": (
        ao.Int4WeightOnlyConfig(group_size=32),
        RuntimeError,
        "(?s)torchao cannot apply Int4WeightOnlyConfig.*use IntxWeightOnlyConfig.*mslk",
    ),
    "float8": (ao.Float8WeightOnlyConfig(), ValueError, "Float8Tensor, which no .tflite can hold"),
    "float8 for a GPU": (
        ao.Float8DynamicActivationFloat8WeightConfig(),
        RuntimeError,
        "(?s)cannot apply Float8DynamicActivationFloat8WeightConfig.*CUDA",
    ),
    "static": (
        ao.Int8StaticActivationInt8WeightConfig(
            act_quant_scale=torch.tensor([[0.05]]), granularity=ao.PerTensor()
        ),
        ValueError,
        "activations by fixed scales.*pt2e_static_int8",
    ),
    "to be trained": (
        QATConfig(Dynamic(weight_dtype=INT8, weight_granularity=PER_AXIS), step="prepare"),
        ValueError,
        r"prepares _Mlp for training.*QATConfig\(base_config, step='convert'\)",
    ),
    "a name that is none": (
        ao.FqnToConfig(OrderedDict([("frist", Dynamic(weight_granularity=PER_AXIS))])),
        ValueError,
        r"'frist' matches no module.*did you mean first",
    ),
    "a regex for nothing": (
        ao.FqnToConfig(OrderedDict([("re:fir", Dynamic(weight_granularity=PER_AXIS))])),
        ValueError,
        r"'re:fir' matches no module",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_converted(maker: Edgeq, tmp_path: Path, case: str) -> None:
    """What no `.tflite` can hold, what torchao cannot do here, what would change nothing."""
    config, error, told = REFUSED[case]
    with pytest.raises(error, match=told):
        maker.quantize(seeded(_Mlp), rows(1)[0], quantizer=config)

    assert list(tmp_path.iterdir()) == []


def test_a_model_without_a_linear_layer(maker: Edgeq) -> None:
    """Torchao leaves convolutions alone, and says nothing."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).eval()
    with pytest.raises(ValueError, match=r"nothing of Sequential was quantized.*recipe"):
        maker.quantize(model, (normal(1, 3, 8, 8, seed=0),), quantizer=PROMISES["dynamic int8"][0])


def test_a_convolution_by_name(maker: Edgeq) -> None:
    """Torchao quantizes its weight, but a `.tflite` would not know the codes."""
    name, _ = next(
        (n, m) for n, m in seeded(ResidualNet).named_modules() if isinstance(m, nn.Conv2d)
    )
    config = ao.FqnToConfig(OrderedDict([(name, ao.Int8WeightOnlyConfig())]))
    with pytest.raises(ValueError, match=rf"{name}\.weight: a weight of 4 dimensions"):
        maker.quantize(seeded(ResidualNet), ResidualNet.sample_inputs(), quantizer=config)


def test_a_layer_that_torchao_cannot_run(maker: Edgeq) -> None:
    """Attention's projections are one parameter, which its forward takes apart."""
    config = ao.FqnToConfig(OrderedDict([("0.in_proj_weight", PROMISES["weight-only int8"][0])]))
    with pytest.raises(RuntimeError, match="does not run in torch: torchao has no kernel"):
        maker.quantize(seeded(_Attending), (normal(1, 5, 64, seed=0),), quantizer=config)


def test_equal_values_under_two_configs(maker: Edgeq) -> None:
    """The file holds them once, so one of the two would be wrong."""
    model = seeded(_Several)
    with torch.no_grad():
        for layer in (model.twin, model.other):
            layer.weight.zero_()
    config = ao.FqnToConfig(
        OrderedDict(
            [
                ("twin", PROMISES["weight-only int8"][0]),
                ("other", PROMISES["weight-only int4"][0]),
            ]
        )
    )
    with pytest.raises(ValueError, match=r"twin\.weight and other\.weight hold the same values"):
        maker.quantize(model, (normal(1, 64, seed=0),), quantizer=config)


@pytest.mark.parametrize("quantizer", [None, "pt2e_static_int8", PROMISES["dynamic int8"][0]])
def test_a_model_quantized_before(maker: Edgeq, quantizer: Any) -> None:
    """There is no float model any more; whatever the quantizer."""
    model = seeded(_Mlp)
    ao.quantize_(model, PROMISES["dynamic int8"][0])
    with pytest.raises(ValueError, match=r"_Mlp is already quantized by torchao's quantize_"):
        maker.quantize(model, rows(1)[0], quantizer=quantizer, calibration=rows(2))


def test_training_is_the_users_own(maker: Edgeq) -> None:
    """`train=` belongs to PT2E; the text says how torchao does it."""
    with pytest.raises(ValueError, match=r"train= is for PT2E.*step='prepare'.*step='convert'"):
        maker.quantize(
            seeded(_Mlp),
            rows(1)[0],
            quantizer=PROMISES["dynamic int8"][0],
            train=lambda prepared: None,
        )


def test_the_class_of_a_config(maker: Edgeq) -> None:
    """Not instantiated; the text lists what a quantizer can be."""
    with pytest.raises(TypeError, match=r"a torchao AOBaseConfig.*instantiate it"):
        maker.quantize(seeded(_Mlp), rows(1)[0], quantizer=WeightOnly)
