"""Inputs and outputs of every kind: positional, keyword, integer, many, nested, dynamic."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fixtures.models import (
    DictOutput,
    EmbeddingMean,
    IntScalar,
    KeywordInputs,
    NestedOutput,
    PositionalAndKeyword,
    ResidualNet,
    TwelveOutputs,
    TwoInputs,
    net,
    normal,
    samples,
    seeded,
)
from pytest_edgeq import Edgeq
from pytest_edgeq.compare.reference import flatten_outputs
from tests.quantize import making

STATIC, RECIPE = "pt2e_static_int8", "recipe_static_wi8_ai8"


@pytest.mark.slow
def test_two_positional_inputs_go_to_their_places(maker: Edgeq) -> None:
    """A dict by parameter names is the same sample as a tuple."""
    quantized = making.quantize(STATIC, TwoInputs)
    image, vector = TwoInputs.sample_inputs(5)
    by_name = maker.compare(quantized, [{"vector": vector, "image": image}])
    by_position = maker.compare(quantized, [(image, vector)])

    assert by_name.to_dict() == by_position.to_dict()
    assert by_name.total.sqnr_db > 20


@pytest.mark.slow
@pytest.mark.parametrize("preset", [STATIC, None])
def test_a_tensor_given_twice_is_two_inputs(maker: Edgeq, preset: str | None) -> None:
    """torch.export makes one of them, and the file would never read the second."""
    one = KeywordInputs.sample_kwargs()["minuend"]
    quantized = maker.quantize(
        seeded(KeywordInputs),
        sample_kwargs={"minuend": one, "amount": one},
        quantizer=preset,
        calibration=[KeywordInputs.sample_kwargs(1000 + i) for i in range(16)],
    )

    # The difference of the first to itself: 0 dB.
    assert maker.compare(quantized, [KeywordInputs.sample_kwargs(5)]).total.sqnr_db > 10


@pytest.mark.sweep(1)
@pytest.mark.parametrize("preset", [None, STATIC])
def test_keyword_inputs_do_not_change_places(maker: Edgeq, preset: str | None) -> None:
    """Minuend − amount of one shape, in an order that is not the alphabetical one."""
    quantized = maker.quantize(
        seeded(KeywordInputs),
        sample_kwargs=KeywordInputs.sample_kwargs(),
        quantizer=preset,
        calibration=[KeywordInputs.sample_kwargs(1000 + i) for i in range(16)],
    )
    sample = KeywordInputs.sample_kwargs(5)
    swapped = {"amount": sample["amount"], "minuend": sample["minuend"]}

    # Swapped inputs change the sign: −6 dB.
    assert maker.compare(quantized, [swapped]).total.sqnr_db > 10
    assert quantized.run(amount=sample["amount"], minuend=sample["minuend"]).keys() == {"output_0"}


def test_positional_and_keyword_inputs_together(maker: Edgeq) -> None:
    """A sample of both kinds is a pair; a dict by name holds both, too."""
    args, kwargs = PositionalAndKeyword.sample_inputs(), PositionalAndKeyword.sample_kwargs()
    calibration = [
        (PositionalAndKeyword.sample_inputs(i), PositionalAndKeyword.sample_kwargs(i))
        for i in range(10, 26)
    ]
    quantized = maker.quantize(
        seeded(PositionalAndKeyword), args, sample_kwargs=kwargs, calibration=calibration
    )
    as_pair = maker.compare(quantized, [(args, kwargs)])
    as_dict = maker.compare(quantized, [{"vector": args[0], **kwargs}])

    assert as_pair.to_dict() == as_dict.to_dict()
    assert as_pair.total.sqnr_db > 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "preset", "dtype"),
    [
        # int64 ids become int32 in the file; annotations on them are dropped.
        (EmbeddingMean, STATIC, "int32"),
        (EmbeddingMean, "recipe_dynamic_wi8_afp32", "int32"),
        # `x * 2`: strict export makes the annotators take the 2.
        (IntScalar, STATIC, "int8"),
    ],
)
def test_integers_do_not_break_calibration(model: Any, preset: str, dtype: str) -> None:
    """Neither token ids nor Python's own."""
    quantized = making.quantize(preset, model)

    assert [border.dtype for border in quantized.inputs] == [dtype]
    assert making.sqnr_db(quantized, model) > 15


@pytest.mark.parametrize(
    ("model", "preset"),
    [
        (DictOutput, None),
        (TwelveOutputs, None),
        pytest.param(NestedOutput, STATIC, marks=pytest.mark.slow),
        pytest.param(TwelveOutputs, STATIC, marks=pytest.mark.slow),
    ],
)
def test_outputs_keep_the_models_own_order(
    maker: Edgeq, model: type[Any], preset: str | None
) -> None:
    """Each output is near the torch output at its place; `output_10` comes after `output_9`."""
    quantized = making.quantize(preset, model)
    sample = model.sample_inputs(9)
    with torch.no_grad():
        expected = flatten_outputs(seeded(model)(*sample))
    actual = quantized.run(*sample)
    comparison = maker.compare(quantized, [sample])

    assert list(actual) == [border.name for border in quantized.outputs]
    assert list(comparison.total.outputs) == list(actual)
    for (key, value), (name, edge) in zip(expected, actual.items(), strict=True):
        assert key in (None, name)
        assert edge.shape == value.shape
        np.testing.assert_allclose(edge, value, atol=0.2 * float(np.abs(value).max()))


def test_two_outputs_of_one_name_are_refused(maker: Edgeq) -> None:
    """The converter joins nested keys with "_", so two outputs may get one name."""
    collision = net(lambda self, x: {"a_0": x + 1, "a": (x + 2,)})
    with pytest.raises(ValueError, match=r"of 2 outputs the file names 1, so 1 could"):
        maker.quantize(collision.eval(), (torch.ones(1, 4),), quantizer=None)


def test_calibration_is_read_once_and_in_order() -> None:
    """Any iterable will do, a generator too, and it is not asked twice."""
    seen = []

    def generator() -> Iterator[Any]:
        for i, sample in enumerate(samples(ResidualNet, 8)):
            seen.append(i)
            yield sample

    making.quantize(STATIC, calibration=generator())

    assert seen == list(range(8))


@pytest.mark.parametrize("preset", ["pt2e_dynamic_int8", "recipe_dynamic_wi8_afp32", None])
def test_calibration_is_not_read_where_it_is_not_needed(preset: str | None) -> None:
    """One test may pass calibration data to every preset."""

    def generator() -> Iterator[Any]:
        raise AssertionError("was read")
        yield

    making.quantize(preset, calibration=generator())


@pytest.mark.slow
@pytest.mark.parametrize("preset", [STATIC, RECIPE])
def test_one_sample_at_a_time_is_held(maker: Edgeq, preset: str) -> None:
    """Calibration and evaluation data are streamed: a sample read is let go before the next."""
    alive: list[Any] = []

    def generator(seed: int) -> Iterator[Any]:
        for sample in samples(ResidualNet, 6, seed=seed):
            tensor = sample[0].clone()
            alive.append(weakref.ref(tensor))
            yield tensor
            del tensor, sample
            gc.collect(1)  # what is older, the objects of the libraries, takes a second
            assert sum(ref() is not None for ref in alive) <= 1

    maker.compare(making.quantize(preset, calibration=generator(1)), generator(2))


@pytest.mark.sweep(0)
@pytest.mark.parametrize("preset", ["recipe_dynamic_wi8_afp32", STATIC])
def test_a_dynamic_batch_runs_at_several_sizes(maker: Edgeq, preset: str) -> None:
    """dynamic_shapes goes to the exporter, and samples of any batch fit."""
    batch = torch.export.Dim("batch", min=1, max=8)
    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()))
    quantized = maker.quantize(
        model,
        (normal(2, 3, 8, 8, seed=0),),
        quantizer=preset,
        calibration=[normal(n, 3, 8, 8, seed=n) for n in (2, 3, 4)],
        dynamic_shapes=({0: batch},),
    )
    comparison = maker.compare(quantized, [normal(n, 3, 8, 8, seed=10 + n) for n in (1, 5, 3)])

    assert quantized.inputs[0].shape == (-1, 3, 8, 8)
    assert comparison.total.n_elements == 9 * 4 * 6 * 6
    assert comparison.total.sqnr_db > 20


def test_a_scalar_input_keeps_its_shape(maker: Edgeq) -> None:
    """A row of a cache is written; the file packs its place, and PACK refuses other shapes."""

    def forward(self: Any, x: Tensor, position: Tensor, cache: Tensor) -> Any:
        from litert_torch.generative.custom_ops import dynamic_update_slice

        place = [position, torch.zeros((), dtype=torch.int32)]
        return dynamic_update_slice.dynamic_update_slice(cache, self.layer(x), place)

    inputs = (torch.randn(1, 8), torch.tensor(2, dtype=torch.int32), torch.zeros(4, 8))
    model = seeded(lambda: net(forward, layer=nn.Linear(8, 8)))
    quantized = maker.quantize(model, inputs, quantizer=None)

    assert quantized.inputs[1].shape == ()
    assert maker.compare(quantized, [inputs]).total.sqnr_db > 100
    assert maker.localize(quantized, [inputs]).culprit is None
