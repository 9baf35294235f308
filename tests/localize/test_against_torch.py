"""The float form of a file against torch, end to end, and where the two part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fixtures.models import (
    GruWithState,
    LstmNet,
    ResidualNet,
    SelfAttention,
    SharedModule,
    SmallModel,
    net,
    normal,
    samples,
    seeded,
    small_model,
)
from fixtures.models.idioms import IDIOMS
from fixtures.tflite.writer import one_op
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.compare.samples import Sample, read_samples
from pytest_edgeq.localize.against_torch import AgainstTorch, Divergence
from pytest_edgeq.localize.float_forms import Forms, axis_orders, forms_of, nearest_constants
from pytest_edgeq.localize.rows import LayerErrors
from pytest_edgeq.localize.structure import Structure
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.float_form import write_in_float
from tests.bench.detection.defects_file import defect
from tests.bench.detection.edits import edited, ops_of
from tests.bench.detection.flatfile import FlatFile
from tests.localize.builds import DYNAMIC, PT2E, STATIC, Build, blamed
from tests.localize.rows import culprit

BUILDS = [
    *((ResidualNet, PT2E), (SelfAttention, "pt2e_dynamic_int8"), (SharedModule, None)),
    *((LstmNet, STATIC), (GruWithState, DYNAMIC), (GruWithState, PT2E)),
]


def divergence(quantized: QuantizedModel, kind: type[SmallModel]) -> Divergence | None:
    """Compare on three samples."""
    first = _sample(quantized, kind)
    against = AgainstTorch(quantized, forms_of(quantized, first), first)
    for sample in read_samples(samples(kind, 3, seed=2), quantized.spec, "evaluation"):
        against.update(sample)
    against.settle()
    return against.divergence


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("kind", "flow"), BUILDS)
def test_a_sound_file_computes_what_torch_does(
    build: Build, kind: type[SmallModel], flow: str | None
) -> None:
    """To the precision of float32, also where its weights are rounded and shared."""
    assert divergence(build(kind, flow), kind) is None


def _scaled(model: nn.Module, name: str, factor: float) -> None:
    with torch.no_grad():
        model.get_parameter(name).mul_(factor)


@pytest.mark.parametrize(("flow", "factor"), [(None, -1.0), (STATIC, 1.001)])
def test_the_first_op_that_differs_is_named(maker: Edgeq, flow: str | None, factor: float) -> None:
    """The reference has another weight than it was converted with."""
    model = seeded(ResidualNet)
    quantized = maker.quantize(
        model, ResidualNet.sample_inputs(), quantizer=flow, calibration=samples(ResidualNet, 8)
    )
    name = [name for name, value in model.named_parameters() if value.ndim == 4][1]
    _scaled(model, name, factor)

    found = divergence(quantized, ResidualNet)

    assert found is not None
    assert found.op is not None
    entry = quantized.float_edge or quantized.edge
    module = {each.index: each.module for each in entry.op_dtypes}[found.op.index]
    assert module == name.rpartition(".")[0]
    assert found.sqnr_db < 80

    errors = maker.localize(quantized, list(samples(ResidualNet, 3, seed=2)))
    assert culprit(errors).module == module
    assert "the file in float does not compute what torch does" in errors.cause


_one_layer = small_model((4, 8), layers=lambda: {"layer": nn.Linear(8, 4)})


@_one_layer
def _makes_floats(m: Any, x: torch.Tensor) -> Any:
    """Its graph runs in float64, as dtypes can be changed there; its forward does not."""
    return m.layer(x) + torch.ones(4, 4, dtype=torch.float32) @ x[:, :4].T


@_one_layer
def _triples(m: Any, x: torch.Tensor) -> Any:
    """What it gives in float64 tells nothing of what float32 rounds."""
    scores = m.layer(x)
    return scores if x.dtype == torch.float32 else 3 * scores


@_one_layer
def _overflows(m: Any, x: torch.Tensor) -> Any:
    """It masks by the least number of its dtype: NaN in float64 says nothing of float32."""
    scores = m.layer(x)
    least = torch.full_like(scores, torch.finfo(scores.dtype).min).triu().float()
    return ((scores + least).softmax(-1) @ scores.T).tanh()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [_makes_floats, _triples, _overflows])
def test_a_model_that_is_another_in_float64_hides_nothing(
    maker: Edgeq, kind: type[SmallModel]
) -> None:
    """Sound, it equals the file; with a larger weight it does not."""
    model = seeded(kind)
    quantized = maker.quantize(model, kind.sample_inputs(), quantizer=None)
    assert divergence(quantized, kind) is None
    _scaled(model, "layer.weight", 1.2)
    assert divergence(quantized, kind) is not None


def _sample(quantized: QuantizedModel, kind: type[SmallModel]) -> Sample:
    return next(iter(read_samples(samples(kind, 1), quantized.spec, "evaluation")))


def test_constants_that_explain_a_difference_do_so_on_every_sample(build: Build) -> None:
    """With torch's in their place the file computes what torch does, also on later samples."""
    quantized = build(ResidualNet, None)
    file = FlatFile(quantized.tflite)
    edited(file, 1, 1, lambda values: np.multiply(values, 2, out=values))
    broken, sound = EdgeFile(file.content()), quantized.edge.clone()
    forms = Forms(broken, broken, quantized.float_model, aligned=lambda: sound)
    against = AgainstTorch(quantized, forms, _sample(quantized, ResidualNet))
    runner, names = broken.runner("builtin", keep=True), list(quantized.input_names)
    for sample in read_samples(samples(ResidualNet, 3, seed=2), quantized.spec, "evaluation"):
        runner.run(broken.encode(names, sample.arrays()))
        against.update(sample, is_run=True)
        assert against.divergence is None
        assert against.aligned is sound


def test_a_constant_like_no_other_is_not_found(build: Build) -> None:
    """Nor one of which a single value is off by a step."""
    edge = build(ResidualNet, PT2E).edge
    structure = Structure(edge, EdgeFile(write_in_float(edge.graph)))
    (pair, *_) = (each for each in structure.constants if each.floats.ndim == 4)
    for order in axis_orders(pair.floats.shape):
        turned = pair.floats.transpose(order)
        assert nearest_constants([(turned, turned)], [pair])
    changed = pair.floats.copy()
    assert pair.stored.scales is not None
    changed.flat[3] += np.broadcast_to(pair.stored.scales, changed.shape).flat[3]
    assert not nearest_constants([(changed, changed)], [pair])


@small_model(
    (4, 8),
    layers=lambda: {
        "norm": nn.BatchNorm1d(8, 3e-5),
        "first": nn.Linear(8, 16),
        "last": nn.Linear(16, 4),
    },
)
def _normed(m: Any, x: torch.Tensor) -> Any:
    """PT2E keeps the norm in front of the layer, and the float file folds it into the weights."""
    return m.last(m.first(m.norm(x)).relu())


def test_an_untrained_batch_norm_is_not_applied_twice(maker: Edgeq) -> None:
    """Weights times its factor, 1 / √(1 + ε), have the same codes as the weights."""
    model = seeded(_normed)
    model.load_state_dict(model.state_dict() | nn.BatchNorm1d(8).state_dict(prefix="norm."))
    quantized = maker.quantize(
        model, _normed.sample_inputs(), quantizer=PT2E, calibration=samples(_normed, 16)
    )
    for each in (quantized, maker.load(quantized.tflite, reference=model)):
        assert divergence(each, _normed) is None


@pytest.mark.slow
def test_an_op_in_place_of_another_is_found(maker: Edgeq, build: Build) -> None:
    """By its values."""
    quantized = build(GruWithState, DYNAMIC)
    file = FlatFile(quantized.tflite)
    op, other = ops_of(file, "TANH")[0], ops_of(file, "LOGISTIC")[0]
    file.operators[op].opcodeIndex = file.operators[other].opcodeIndex
    broken = quantized.with_tflite(file.content())
    errors = maker.localize(broken, list(samples(GruWithState, 3, seed=2)))
    assert op in blamed(errors), errors


def test_what_float32_alone_cannot_hold_allows_no_other_value(build: Build) -> None:
    """Where torch overflows and float64 does not, the file must overflow; NaN is never equal."""
    quantized = build(ResidualNet, None)
    forms = Forms(quantized.edge, quantized.edge, quantized.float_model)
    against = AgainstTorch(quantized, forms, _sample(quantized, ResidualNet))
    torchs, precise = np.array([np.inf, 1.0], np.float32), np.array([1e39, 1.0])
    for first, expected in ((np.inf, None), (7.0, -np.inf), (np.nan, -np.inf)):
        ours = np.array([first, 1.0], np.float32)
        found = against.tolerance.compare([(torchs, precise)], [ours])
        assert (None if found is None else found.sqnr_db) == expected


@pytest.mark.parametrize("codes", [0, 16])
def test_one_constant_among_those_rounded_to_the_nearest_code(
    build: Build, maker: Edgeq, codes: int
) -> None:
    """Where most are, one that is not is wrong, although it moves outputs by less than rounding."""
    quantized = build(ResidualNet, PT2E)
    file = FlatFile(quantized.tflite)
    op = ops_of(file, "CONV_2D")[1]

    def moved(values: np.ndarray) -> None:
        values[0] += codes

    edited(file, op, 2, moved)
    loaded = maker.load(file.content(), reference=quantized.float_model)
    found = blamed(maker.localize(loaded, list(samples(ResidualNet, 3, seed=2))))
    assert set(found) == ({op} if codes else set())


@small_model(
    (1, 3, 12, 12),
    layers=lambda: {
        "patches": nn.Conv2d(3, 16, 4, stride=4),
        "norm": nn.LayerNorm(16),
        "mixed": nn.Linear(16, 48),
        "out": nn.Linear(16, 16),
    },
)
def _patch_attention(m: Any, image: torch.Tensor) -> Any:
    """
    Patches of an image, then torch's own attention, as a vision transformer has them.

    The converter multiplies queries and keys by the root of the factor that torch multiplies the
    scores by: values that torch's graph has no node for.
    """
    tokens = m.patches(image).flatten(2).transpose(1, 2)
    query, key, value = (
        each.reshape(1, -1, 2, 8).transpose(1, 2)
        for each in m.mixed(m.norm(tokens)).chunk(3, dim=-1)
    )
    mixed = nn.functional.scaled_dot_product_attention(query, key, value)
    return tokens + m.out(mixed.transpose(1, 2).reshape(1, -1, 16))


def _blamed_alone(
    maker: Edgeq, build: Build, model: type[SmallModel], kind: str, seed: int
) -> LayerErrors:
    """Put a defect into a PT2E file, load that alone, and check which op is blamed."""
    made = defect(build(model, PT2E).tflite, kind, seed)
    assert made is not None
    loaded = maker.load(made.tflite, reference=seeded(model))

    errors = maker.localize(loaded, list(samples(model, 3, seed=2)))

    assert culprit(errors).index in made.ops, f"{made.place}: {errors.cause}"
    return errors


@pytest.mark.sweep(0)
@pytest.mark.parametrize("kind", ["softmax sharper", "operand replaced", "transpose permuted"])
def test_a_defect_in_an_op_of_a_loaded_file_is_located(
    maker: Edgeq, build: Build, kind: str
) -> None:
    """By the values that the reference converts to, where torch's graph has none of them."""
    _blamed_alone(maker, build, _patch_attention, kind, 0)


@pytest.mark.sweep(0, slow=2)
@pytest.mark.parametrize(
    ("name", "kind", "seed"),
    [
        ("volumes", "transpose permuted", 1),
        ("patches", "operand replaced", 0),
        ("curves", "operand replaced", 1),
        ("dotted", "operand replaced", 0),  # of a RESHAPE
        ("matrices_as_stored", "operand replaced", 0),
        ("shuffled_pixels", "operand replaced", 0),
        ("between_norms", "operand replaced", 1),
        ("divided_queries", "operand replaced", 2),  # by one operand of it alone
    ],
)
def test_an_op_that_repairs_a_loaded_file_is_named(
    maker: Edgeq, build: Build, name: str, kind: str, seed: int
) -> None:
    """Though the converter makes other ops of the reference than PT2E has it make."""
    errors = _blamed_alone(maker, build, IDIOMS[name], kind, seed)
    assert "replacing this op by the reference's converted op fixes it" in errors.cause


@small_model(
    (1, 3, 8), layers=lambda: {"lstm": nn.LSTM(8, 8, batch_first=True), "last": nn.Linear(8, 4)}
)
def _recurrent(m: Any, x: torch.Tensor) -> Any:
    return m.last(m.lstm(x)[0][:, -1])


@pytest.mark.slow
def test_a_constant_is_found_where_the_reference_cannot_be_converted(maker: Edgeq) -> None:
    """Not at the first op of the region that differs, which is a whole LSTM."""
    model, inputs = seeded(_recurrent), list(samples(_recurrent, 4))
    quantized = maker.quantize(model, inputs[0], quantizer=None)

    def unconverted(self: Any, x: torch.Tensor) -> Any:
        return self.inner(x) + 0 * torch.special.bessel_j0(x).sum()

    def negate(values: Any) -> None:
        values.reshape(-1)[3:6] *= -1

    file = FlatFile(quantized.tflite)
    edited(file, 15, 1, negate)
    loaded = maker.load(file.content(), reference=net(unconverted, inner=model).eval())
    with pytest.warns(UserWarning, match="the reference cannot be converted in float"):
        culprit = maker.localize(loaded, inputs).culprit
    assert culprit is not None
    assert culprit.name.startswith("FULLY_CONNECTED #15")


@small_model((1, 3, 6, 6), layers=lambda: {"convolution": nn.Conv2d(4, 8, 3)})
def _rows(m: Any, x: torch.Tensor) -> Any:
    """A convolution that is told the row of each pixel of a square image."""
    rows = torch.linspace(-1, 1, 6).view(1, 1, 6, 1).expand(1, 1, 6, 6)
    return m.convolution(torch.cat([x, rows], 1))


@small_model(
    (1, 3, 16, 16), layers=lambda: {"patches": nn.Conv2d(3, 8, 2, 2), "mix": nn.Linear(8, 8)}
)
def _tokens(m: Any, x: torch.Tensor) -> Any:
    """Tokens of an image that has as many rows and columns as channels, the columns first."""
    tokens = m.patches(x).permute(0, 2, 3, 1).reshape(8, 8, 8)
    return m.mix(tokens.transpose(0, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [(_rows, "BROADCAST_TO"), (_tokens, "TRANSPOSE")])
def test_axes_of_one_length_that_the_converter_exchanges(
    maker: Edgeq, kind: type[SmallModel], name: str
) -> None:
    """The op whose result is in another order is named, not the one that reads it."""
    quantized = maker.quantize(seeded(kind), kind.sample_inputs(), quantizer=None)
    errors = maker.localize(quantized, list(samples(kind, 3, seed=2)))

    assert culprit(errors).op == name
    assert "does not compute what torch does" in errors.cause
    assert errors.cause.endswith("reordering the axes of this op's result fixes it")


def _resized(factor: float, mode: str, gain: float) -> nn.Module:
    """Enlarge an image (NHWC)."""

    def forward(self: nn.Module, image: torch.Tensor) -> torch.Tensor:
        channels_first = image.permute(0, 3, 1, 2)
        resized = nn.functional.interpolate(channels_first, scale_factor=factor, mode=mode)
        return gain * resized.permute(0, 2, 3, 1)

    return net(forward)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by_centres", "factor", "mode", "gain", "is_told"),
    [
        (True, 1.5, "nearest", 1.0, True),
        (False, 1.5, "nearest-exact", 1.0, False),
        (True, 2, "nearest", 2.0, False),
    ],
    ids=["centres", "no centres", "whole factor"],
)
def test_pixels_at_the_centre_are_a_cause_where_they_are_others(
    maker: Edgeq, by_centres: bool, factor: float, mode: str, gain: float, is_told: bool
) -> None:
    """Each file differs from torch; not each by half_pixel_centers."""
    size = int(4 * factor)
    content = one_op(
        "RESIZE_NEAREST_NEIGHBOR",
        [
            {"dtype": "float32", "shape": (1, 4, 4, 1)},
            {"dtype": "int32", "shape": (2,), "data": np.array([size, size], np.int32)},
        ],
        [{"dtype": "float32", "shape": (1, size, size, 1)}],
        "ResizeNearestNeighborOptions",
        halfPixelCenters=by_centres,
    )
    loaded = maker.load(content, reference=_resized(factor, mode, gain).eval())
    cause = maker.localize(loaded, [normal(1, 4, 4, 1, seed=0)]).cause
    assert "the file in float does not compute what torch does" in cause
    assert ("reads the pixel at the centre (half_pixel_centers)" in cause) is is_told
