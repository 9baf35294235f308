"""The torchao flow: what each config promises, told by the file and by numbers; what is refused."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from fixtures.models import EmbeddingMean, SelfAttention, net, normal, samples, seeded
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


def _mlp() -> nn.Module:
    """Two layers of 64 inputs, which are two groups of 32."""
    return net(
        lambda self, x: self.second(torch.relu(self.first(x))),
        "_Mlp",
        first=nn.Linear(64, 64),
        second=nn.Linear(64, 8, bias=False),
    )


def rows(n: int, *, seed: int = 1, length: int = 3) -> list[tuple[Tensor]]:
    """Samples of `_Mlp`, of several rows each: what is dynamic is so row by row."""
    return [(normal(length, 64, seed=1000 * seed + i),) for i in range(n)]


Promise = tuple[str, str, str, dict[str, int], int, int | None]
DEQUANTIZED, RESHAPED = {"DEQUANTIZE": 2}, {"DEQUANTIZE": 2, "RESHAPE": 2}

# Config; scheme, stored dtype and granularity; what stands between the stored weights and the op;
# how near the file must come to the torch module, in dB, on XNNPACK and on LiteRT's own kernels.
PROMISES: dict[str, tuple[Any, Promise]] = {
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
    "dynamic one scale": (
        ao.Int8DynamicActivationInt8WeightConfig(granularity=ao.PerTensor()),
        ("dynamic", "int8", "per_tensor", {}, EIGHT_BITS, EIGHT_BITS),
    ),
    "weight-only int8": (
        WeightOnly(weight_dtype=INT8, granularity=PER_AXIS),
        ("weight_only", "int8", "per_channel", DEQUANTIZED, FLOAT, FLOAT),
    ),
    "weight-only int4": (
        WeightOnly(weight_dtype=INT4, granularity=PER_AXIS),
        ("weight_only", "int4", "per_channel", DEQUANTIZED, FLOAT, FLOAT),
    ),
    "weight-only int4 in groups": (
        # The rows of the longer matrix that holds the groups.
        WeightOnly(weight_dtype=INT4, granularity=GROUPS),
        ("weight_only", "int4", "per_channel", RESHAPED, FLOAT, FLOAT),
    ),
    "weight-only int2": (
        WeightOnly(weight_dtype=INT2, granularity=PER_AXIS),
        ("weight_only", "int2", "per_channel", DEQUANTIZED, FLOAT, FLOAT),
    ),
    "weight-only asymmetric": (
        WeightOnly(weight_dtype=INT8, granularity=PER_AXIS, mapping_type=ao.MappingType.ASYMMETRIC),
        ("weight_only", "int8", "per_channel", DEQUANTIZED, FLOAT, FLOAT),
    ),
    "weight-only one scale": (
        ao.Int8WeightOnlyConfig(granularity=ao.PerTensor()),
        ("weight_only", "int8", "per_tensor", DEQUANTIZED, FLOAT, FLOAT),
    ),
}


def config(case: str) -> Any:
    """Return the config of a promise."""
    return PROMISES[case][0]


@functools.cache
def made(case: str) -> QuantizedModel:
    """Return the conversion under a config, made when first asked for."""
    return quantize(_mlp, config(case))


def quantize(make: Any, quantizer: Any, **options: Any) -> QuantizedModel:
    """Quantize a model that takes rows."""
    model = make if isinstance(make, nn.Module) else seeded(make)
    return Edgeq().quantize(model, rows(1)[0], quantizer=quantizer, **options)


def near(quantized: QuantizedModel, data: Any, bound: int | None, **options: Any) -> None:
    """Assert that the file computes what the quantized torch module does."""
    comparison = Edgeq().compare(quantized, data, **options)
    assert tuple(comparison.stages) == ("quantization", "lowering", "total")
    if bound is not None:
        assert comparison.stages["lowering"].sqnr_db > bound


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", PROMISES)
def test_a_config_keeps_its_promise(case: str) -> None:
    """Scheme, dtype, granularity, the ops beside, torch's own codes; the file computes the same."""
    quantized = made(case)
    scheme, weight, granularity, beside, bound, own = PROMISES[case][1]

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
    for entry in quantized.op_dtypes.ops("FULLY_CONNECTED"):
        module: Any = quantized.simulated
        theirs: Any = module.get_submodule(str(entry.module)).weight
        op = quantized.graph.ops[entry.index]
        stored = _stored(quantized, op)
        scales = quantized.graph.scales(op.subgraph, stored)
        # A bfloat16 keeps eight bits of a block's scale.
        close = 2**-8 if stored.granularity == "blockwise_32" else 0
        np.testing.assert_allclose(scales.ravel(), theirs.scale.numpy().ravel(), rtol=close)
        np.testing.assert_array_equal(_codes(quantized, stored), theirs.qdata.numpy().ravel())
    for runtime, least in (("xnnpack", bound), ("builtin", own), ("reference", own)):
        near(quantized, rows(8), least, runtime=runtime)


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


def test_the_model_and_the_lowest_code() -> None:
    """
    The model keeps its plain weights; the simulated one is another.

    Torchao gives −128 to a weight half-way to −127; the file and the simulated model do not.
    """
    model: Any = seeded(_mlp)
    plain: Any = copy.deepcopy(model)
    ao.quantize_(plain, config("dynamic int8"))
    quantized = Edgeq().quantize(model, rows(1)[0], quantizer=config("dynamic int8"))
    simulated: Any = quantized.simulated
    theirs, ours = (each.first.weight.qdata.int() for each in (plain, simulated))

    assert int((theirs == -128).sum()) > 0
    assert torch.equal(ours, theirs.clamp(min=-127))
    assert type(model.first.weight) is nn.Parameter
    assert torch.equal(model.first.weight, cast("Any", seeded(_mlp)).first.weight)
    assert quantized.float_model is model


def test_each_layer_by_a_config_of_its_own(maker: Edgeq) -> None:
    """`FqnToConfig` chooses: an int4 layer, a dynamic one by a regex, the others in float."""
    chosen = ao.FqnToConfig(
        OrderedDict(
            [
                ("query", config("weight-only int4")),
                ("re:(key|value)", config("dynamic int8")),
                ("out", None),
            ]
        )
    )
    quantized = maker.quantize(
        seeded(SelfAttention), SelfAttention.sample_inputs(), quantizer=chosen
    )

    linear = "FULLY_CONNECTED"
    assert_op_dtypes(
        quantized, linear, module="query", scheme="weight_only", weight="int4", count=1
    )
    for name in ("key", "value"):
        assert_op_dtypes(quantized, linear, module=name, scheme="dynamic", weight="int8", count=1)
    assert_op_dtypes(quantized, linear, module="out", scheme="float", weight="float32", count=1)


@pytest.mark.parametrize("groups", [False, True])
def test_an_embedding(maker: Edgeq, groups: bool) -> None:
    """Named by an `FqnToConfig`, its table is weight-only; integers come in."""
    granularity = ao.PerGroup(seeded(EmbeddingMean).embed.embedding_dim // 2)
    table = (
        WeightOnly(weight_dtype=INT4, granularity=granularity)
        if groups
        else config("weight-only int8")
    )
    quantized = maker.quantize(
        seeded(EmbeddingMean),
        EmbeddingMean.sample_inputs(),
        quantizer=ao.FqnToConfig(OrderedDict(embed=table)),
    )
    expected = {"scheme": "weight_only", "weight": "int4" if groups else "int8"}
    assert_op_dtypes(quantized, "EMBEDDING_LOOKUP", count=1, **expected)
    near(quantized, samples(EmbeddingMean, 8), FLOAT)


def _several() -> nn.Module:
    """A layer used twice, two with the same values, one that is never used."""
    names = ("twice", "twin", "other", "unused")
    layers = {name: nn.Linear(64, 64) for name in names}
    layers["other"].load_state_dict(layers["twin"].state_dict())

    def forward(self: Any, x: Tensor) -> Any:
        x = self.twice(torch.tanh(self.twice(x)))
        return self.other(torch.sigmoid(self.twin(torch.tanh(x))))

    return net(forward, **layers)


@pytest.mark.slow
def test_two_signatures(maker: Edgeq) -> None:
    """Two sizes in one file, with one set of weights; each is run and compared."""
    inputs = {"one": rows(1, length=1)[0], "five": rows(1, length=5)[0]}
    quantized = maker.quantize(seeded(_mlp), inputs, quantizer=config("dynamic int4"))

    assert_op_dtypes(quantized, "FULLY_CONNECTED", scheme="dynamic", count=4)
    # The weights are there once: 64 · 64 + 8 · 64 codes of half a byte, 2,304 bytes.
    assert quantized.size_bytes < 2 * made("dynamic int4").size_bytes
    for name, length in (("one", 1), ("five", 5)):
        near(quantized.signature(name), rows(4, length=length), EIGHT_BITS)


def test_two_models_in_one_file(maker: Edgeq) -> None:
    """Each with its own weights under the same names, one with a layer that it never uses."""
    models = {"some": seeded(_several), "few": seeded(_mlp, seed=1)}
    inputs = {"some": rows(1)[0], "few": rows(1)[0]}
    quantized = maker.quantize(models, inputs, quantizer=config("dynamic int4"))

    assert_op_dtypes(quantized, "FULLY_CONNECTED", scheme="dynamic", weight="int4", count=6)
    for name in models:
        near(quantized.signature(name), rows(4), EIGHT_BITS)


def test_any_number_of_rows(maker: Edgeq) -> None:
    """A dynamic batch: compared at two sizes; a bias there is too much for litert-torch 0.10.0."""
    quantized = maker.quantize(
        nn.Sequential(nn.Linear(64, 32, bias=False)).eval(),
        rows(1)[0],
        quantizer=config("dynamic int8"),
        dynamic_shapes={"input": {0: torch.export.Dim("rows", min=1, max=16)}},
    )
    for length in (1, 7):
        near(quantized, rows(4, length=length), EIGHT_BITS)


def test_trained_for_its_quantization(maker: Edgeq) -> None:
    """Torchao's QAT: prepared and trained by the user, converted by the config that converts."""
    base = config("dynamic int4 in groups")
    model = seeded(_mlp)
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


def _batch_normed(sign: int) -> Any:
    def forward(self: Any, x: Tensor) -> Any:
        return self.head(torch.relu(self.norm(self.linear(x))))

    def make() -> nn.Module:
        linear, head = nn.Linear(64, 32), nn.Linear(32, 8)
        return net(forward, linear=linear, norm=nn.BatchNorm1d(32), head=head)

    model: Any = seeded(make)
    with torch.no_grad():
        model.norm.weight.mul_(sign)
    return model


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("case", "sign"), [("dynamic int8", -1), ("weight-only int4 in groups", 1)]
)
def test_a_batch_norm_is_folded_into_the_scales(case: str, sign: int) -> None:
    """Each channel's factor goes into its scale; of a negative one the sign into the codes."""
    scheme, weight, _, beside, bound, _ = PROMISES[case][1]
    quantized = quantize(_batch_normed(sign), config(case))

    assert_op_dtypes(quantized, "FULLY_CONNECTED", scheme=scheme, weight=weight, count=2)
    # The head's 32 inputs are one group.
    expected = {"FULLY_CONNECTED": 2, **beside, **({"RESHAPE": 1} if "RESHAPE" in beside else {})}
    assert quantized.op_dtypes.counts() == expected
    near(quantized, rows(8), bound)


def _attention() -> nn.Module:
    """One call of torch for scale, softmax and both products."""

    def forward(self: Any, x: Tensor) -> Tensor:
        layers = (self.query, self.key, self.value)
        query, key, value = (f(x).reshape(1, 5, 2, 32).transpose(1, 2) for f in layers)
        return nn.functional.scaled_dot_product_attention(query, key, value)

    return net(forward, **{name: nn.Linear(64, 64) for name in ("query", "key", "value")})


@pytest.mark.sweep(0)
@pytest.mark.parametrize("case", ["dynamic int4 in groups", "weight-only int4"])
def test_the_scale_of_an_attention_is_folded_into_the_scales(maker: Edgeq, case: str) -> None:
    """The converter multiplies queries and keys by its root; so do their scales."""
    scheme, weight, granularity, _, bound, _ = PROMISES[case][1]
    inputs = [(normal(1, 5, 64, seed=i),) for i in range(4)]
    quantized = maker.quantize(seeded(_attention), inputs[0], quantizer=config(case))

    expected = {"scheme": scheme, "weight": weight, "granularity": granularity}
    assert_op_dtypes(quantized, "FULLY_CONNECTED", count=3, **expected)
    near(quantized, inputs, bound)


# One scale cannot take a factor for each channel, and −128 has no opposite.
UNFOLDABLE = [("dynamic one scale", 1), ("weight-only int8", -1)]


@pytest.mark.sweep(0)
@pytest.mark.parametrize(("case", "sign"), UNFOLDABLE)
def test_a_batch_norm_that_the_codes_cannot_take(case: str, sign: int) -> None:
    """Refused, with three ways out, of which the first is gone."""
    told = r"folds linear\.weight with.*fuse_linear_bn_eval.*FqnToConfig"
    with pytest.raises(ValueError, match=told):
        quantize(_batch_normed(sign), config(case))
    model = _batch_normed(sign)
    model.linear = torch.nn.utils.fusion.fuse_linear_bn_eval(model.linear, model.norm)
    model.norm = nn.Identity()
    scheme, weight, *_ = PROMISES[case][1]
    quantized = quantize(model.eval(), config(case))
    assert_op_dtypes(quantized, "FULLY_CONNECTED", scheme=scheme, weight=weight, count=2)


@pytest.mark.slow
def test_a_layer_norm_folded_before(maker: Edgeq) -> None:
    """The way out that the refusal names, by its very words."""

    def normed() -> nn.Module:
        """As a transformer's feed forward: a LayerNorm whose weight the converter folds."""
        norm = nn.LayerNorm(64)
        nn.init.normal_(norm.weight, 1.0, 0.3)
        nn.init.normal_(norm.bias, 0.0, 0.3)
        return net(lambda self, x: self.linear(self.norm(x)), norm=norm, linear=nn.Linear(64, 8))

    model: Any = seeded(normed)
    sample, quantizer = normal(3, 64, seed=0), config("weight-only int8")
    with pytest.raises(ValueError, match=r"linear\.weight \*= norm\.weight"):
        maker.quantize(model, sample, quantizer=quantizer)
    linear, norm, before = model.linear, model.norm, model(sample)
    with torch.no_grad():
        linear.bias.add_(torch.mv(linear.weight, norm.bias))
        linear.weight *= norm.weight
        norm.bias.zero_()
        norm.weight.fill_(1)
    torch.testing.assert_close(model(sample), before)
    quantized = maker.quantize(model, sample, quantizer=quantizer)
    assert_op_dtypes(quantized, "FULLY_CONNECTED", scheme="weight_only", weight="int8", count=1)


def test_a_layer_that_came_out_in_float_is_noticed() -> None:
    """Compared with the promises, a file of which one layer is in float is none."""
    half = quantize(_mlp, ao.FqnToConfig(OrderedDict(first=config("dynamic int8"))))
    whole = made("dynamic int8")
    assert whole.simulated is not None
    weights = litert.ao_weights(whole.simulated, "_Mlp")
    request: Any = SimpleNamespace(name="_Mlp")
    _check_kept(request, whole.edge, weights)
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
def test_refused_before_anything_is_converted(case: str) -> None:
    """What no `.tflite` can hold, what torchao cannot do here, what would change nothing."""
    quantizer, error, told = REFUSED[case]
    with pytest.raises(error, match=told):
        quantize(_mlp, quantizer)


def _attending() -> nn.Module:
    """Let a sequence attend to itself."""
    return net(
        lambda self, x: self.heads(x, x, x, need_weights=False)[0],
        heads=nn.MultiheadAttention(64, 4, batch_first=True),
    )


def _zeros() -> nn.Module:
    model: Any = _several()
    with torch.no_grad():
        model.twin.weight.zero_()
        model.other.weight.zero_()
    return model  # type: ignore[no-any-return] # its class is made


IMAGE, ROWS = (1, 3, 8, 8), (1, 5, 64)

OTHER_MODELS: dict[str, tuple[Any, tuple[int, ...], Any, type[Exception], str]] = {
    "no linear layer": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3)),
        IMAGE,
        config("dynamic int8"),
        ValueError,
        "nothing of Sequential was quantized.*recipe",
    ),
    # Torchao quantizes its weight, but a `.tflite` would not know the codes.
    "a convolution by name": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3)),
        IMAGE,
        ao.FqnToConfig(OrderedDict([("0", ao.Int8WeightOnlyConfig())])),
        ValueError,
        r"0\.weight: a weight of 4 dimensions",
    ),
    # Attention's projections are one parameter, which its forward takes apart.
    "a layer that torchao cannot run": (
        _attending,
        ROWS,
        ao.FqnToConfig(OrderedDict([("heads.in_proj_weight", config("weight-only int8"))])),
        RuntimeError,
        "does not run in torch: torchao has no kernel",
    ),
    # torch 2.13 refuses to copy it.
    "a weight that is computed": (
        lambda: nn.Sequential(prune.l1_unstructured(nn.Linear(64, 8), "weight", 0.5)),  # type: ignore[no-untyped-call]
        ROWS,
        config("dynamic int8"),
        RuntimeError,
        r"torchao cannot apply .*\(remove weight_norm, spectral_norm and pruning before",
    ),
    "a weight that a hook computes": (
        lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(64, 8))),
        ROWS,
        config("dynamic int8"),
        RuntimeError,
        "does not run in torch: .* remove spectral_norm and pruning before",
    ),
    # The file holds them once, so one of the two would be wrong.
    "equal values under two configs": (
        _zeros,
        ROWS,
        ao.FqnToConfig(
            OrderedDict(twin=config("weight-only int8"), other=config("weight-only int4"))
        ),
        ValueError,
        r"twin\.weight and other\.weight hold the same values",
    ),
}


@pytest.mark.parametrize("case", OTHER_MODELS)
def test_layers_that_are_refused(maker: Edgeq, case: str) -> None:
    """By their names."""
    make, shape, quantizer, error, told = OTHER_MODELS[case]
    with pytest.raises(error, match=told):
        maker.quantize(seeded(make), (normal(*shape, seed=0),), quantizer=quantizer)


@pytest.mark.parametrize("quantizer", [None, "pt2e_static_int8", config("dynamic int8")])
def test_a_model_quantized_before(maker: Edgeq, quantizer: Any) -> None:
    """There is no float model any more; whatever the quantizer."""
    model = seeded(_mlp)
    ao.quantize_(model, config("dynamic int8"))
    with pytest.raises(ValueError, match=r"_Mlp is already quantized by torchao's quantize_"):
        maker.quantize(model, rows(1)[0], quantizer=quantizer, calibration=rows(2))


def test_training_is_the_users_own_and_a_config_an_instance() -> None:
    """`train=` belongs to PT2E; the text says how torchao does it."""
    with pytest.raises(ValueError, match=r"train= is for PT2E.*step='prepare'.*step='convert'"):
        quantize(_mlp, config("dynamic int8"), train=lambda prepared: None)
    with pytest.raises(TypeError, match=r"a torchao AOBaseConfig.*instantiate it"):
        quantize(_mlp, WeightOnly)
