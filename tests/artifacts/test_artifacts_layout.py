"""Channels last in the file and first in the reference, or the other way round: only when asked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from fixtures import keras_nets
from fixtures.models import normal, seeded
from fixtures.tflite.writer import chain
from pytest_edgeq import (
    Budget,
    Edgeq,
    QuantizedModel,
    assert_input_dtypes,
    assert_no_float_ops,
    assert_runtimes_agree,
    assert_within_budget,
)
from tests.artifacts.conftest import Features, sqnr_db

if TYPE_CHECKING:
    from collections.abc import Callable


class _ChannelsLast(nn.Module):
    """`Features` for NHWC images, with NHWC features."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of 1×8×8×3: 1×6×6×8 and 1×8."""
        features, mean = self.inner(image.permute(0, 3, 1, 2))
        return features.permute(0, 2, 3, 1), mean


def _images(n: int, *shape: int, seed: int = 1) -> list[torch.Tensor]:
    return [normal(1, *shape, seed=100 * seed + i) for i in range(n)]


NCHW, NHWC = (3, 8, 8), (8, 8, 3)


@pytest.fixture(scope="module")
def last(features: Features, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files with channels last, in float and in int8."""
    maker = Edgeq(directory=tmp_path_factory.mktemp("last"))
    model, images = seeded(lambda: _ChannelsLast(features)), _images(32, *NHWC)
    quantizers = {"float": None, "int8": "pt2e_static_int8"}
    return {
        name: maker.quantize(model, (images[0],), quantizer=quantizer, calibration=images).tflite
        for name, quantizer in quantizers.items()
    }


@pytest.fixture(scope="module")
def first(features: Features, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A float file with channels first."""
    maker = Edgeq(directory=tmp_path_factory.mktemp("first"))
    return maker.quantize(features, (_images(1, *NCHW)[0],), quantizer=None).tflite


# Measured: 145 dB for the float file (float32's rounding), 33.7 for the int8 one, whose worst
# samples lie outside of what 32 calibrated; 6 dB are twice the noise.
@pytest.mark.sweep(1)
@pytest.mark.parametrize(("name", "floor"), [("float", 110.0), ("int8", 27.5)])
def test_a_file_with_channels_last(
    maker: Edgeq, last: dict[str, bytes], features: Features, name: str, floor: float
) -> None:
    """Samples, what `run` gives, and what health looks at are laid out as the reference has it."""
    loaded = maker.load(last[name], reference=features, layout="nhwc")
    images = _images(8, *NCHW, seed=2)
    comparison = maker.compare(loaded, images)

    assert [border.shape for border in loaded.inputs] == [(1, 8, 8, 3)], "the file's own"
    assert_within_budget(comparison, Budget(sqnr_db=floor))
    assert not comparison.health
    assert loaded.run(images[0])["output_0"].shape == (1, 8, 6, 6)
    assert comparison.worst_samples[0].inputs.args[0].shape == (1, *NCHW)
    if name == "int8":
        assert_input_dtypes(loaded, "int8")
        assert_no_float_ops(loaded)
        # Measured: 1.
        assert_runtimes_agree(loaded, images, 1)


def test_nothing_is_turned_unasked(
    maker: Edgeq, last: dict[str, bytes], features: Features
) -> None:
    """Neither inputs nor outputs; each text says what to pass."""
    unturned = maker.load(last["float"], reference=features)
    with pytest.raises(ValueError, match=r'1×8×8×3, got 1×3×8×8; only.*pass layout="nhwc" if'):
        maker.compare(unturned, _images(1, *NCHW))
    with pytest.raises(ValueError, match=r'pass layout="nhwc" if the file keeps them last'):
        unturned.run(_images(1, *NCHW)[0])
    half = maker.load(last["float"], reference=features, layout={"args_0": "nhwc"})
    text = r"'output_0': the reference returns shape \[1, 8, 6, 6\], the file \[1, 6, 6, 8\]; only"
    with pytest.raises(ValueError, match=text + r'.*pass layout="nhwc"'):
        maker.compare(half, _images(1, *NCHW))
    layout = {"args_0": "nhwc", "output_0": "nhwc"}
    turned = maker.load(last["float"], reference=features, layout=layout)
    assert maker.compare(turned, _images(4, *NCHW)).total.sqnr_db > 110
    with pytest.raises(ValueError, match=r"1×3×8×8, got 1×8×8×3; samples are laid out as the ref"):
        maker.compare(turned, _images(1, *NHWC))


def test_a_layout_that_the_file_does_not_have(
    maker: Edgeq, first: bytes, features: Features
) -> None:
    """Turned once too often, the samples do not fit; an output says so, too."""
    loaded = maker.load(first, reference=features, layout="nhwc")
    with pytest.raises(ValueError, match=r"expected shape 1×8×3×8, got 1×3×8×8"):
        maker.compare(loaded, _images(1, *NCHW))
    loaded = maker.load(first, reference=features, layout={"output_0": "nhwc"})
    with pytest.raises(ValueError, match=r"the reference returns shape \[1, 8, 6, 6\], the file"):
        maker.compare(loaded, _images(1, *NCHW))


@pytest.mark.slow
def test_another_file_keeps_or_changes_the_layout(
    maker: Edgeq, last: dict[str, bytes], first: bytes, features: Features
) -> None:
    """`with_tflite` holds it as this one, unless told otherwise."""
    images = _images(4, *NCHW)
    loaded = maker.load(last["float"], reference=features, layout="nhwc")
    assert maker.compare(loaded.with_tflite(last["int8"]), images).total.sqnr_db > 27.5
    unturned = maker.load(first, reference=features)
    assert maker.compare(unturned, images).total.sqnr_db > 110
    turned = unturned.with_tflite(last["float"], layout="nhwc")
    assert maker.compare(turned, images).total.sqnr_db > 110


def test_a_reference_with_channels_last(maker: Edgeq, first: bytes, features: Features) -> None:
    """The other way round: torch's file, and a reference that takes images as cameras give them."""
    model = seeded(lambda: _ChannelsLast(features))
    images = _images(4, *NHWC)
    loaded = maker.load(first, reference=model, layout="nchw")
    assert maker.compare(loaded, images).total.sqnr_db > 110
    assert loaded.run(images[0])["output_0"].shape == (1, 6, 6, 8)
    with pytest.raises(ValueError, match=r'pass layout="nchw" if the file keeps them first'):
        maker.compare(maker.load(first, reference=model), images)


@pytest.mark.slow
def test_keras_by_way_of_torch_and_back(
    maker: Edgeq, keras_files: Path, first: bytes, features: Features
) -> None:
    """One network, twice: Keras' file for the torch model, and torch's file for the Keras model."""
    images = _images(4, *NCHW)
    loaded = maker.load(keras_files / "twin.tflite", reference=features, layout="nhwc")
    assert {entry.module for entry in loaded.op_dtypes} == {None}, "the names are Keras'"
    assert min(sqnr_db(maker.compare(loaded, images)).values()) > 110

    parameters = {name: value.detach().numpy() for name, value in features.conv.named_parameters()}
    twin = keras_nets.twin(parameters["weight"], parameters["bias"])
    turned = [image.permute(0, 2, 3, 1).contiguous() for image in images]
    loaded = maker.load(first, reference=twin, layout="nchw")
    assert min(sqnr_db(maker.compare(loaded, turned)).values()) > 110
    mirrored = keras_nets.twin(parameters["weight"][..., ::-1], parameters["bias"])
    wrong = maker.load(first, reference=mirrored, layout="nchw")
    assert max(sqnr_db(maker.compare(wrong, turned)).values()) < 20


def _file(*shapes: tuple[int, ...]) -> bytes:
    """A file whose outputs `out_0`, … are the absolute values of its inputs `in_0`, and so on."""
    ends = [(f"in_{i}", f"out_{i}") for i in range(len(shapes))]
    sides = {"inputs": " ".join(x for x, _ in ends), "outputs": " ".join(y for _, y in ends)}
    tensors = {
        name: {"shape": shape} for pair, shape in zip(ends, shapes, strict=True) for name in pair
    }
    ops = [("ABS", *pair) for pair in ends]
    return chain(*ops, key="serving_default", **sides, **tensors)


@pytest.mark.parametrize(
    ("word", "reference", "file"),
    [
        ("ncw", (1, 5, 2), (1, 2, 5)),
        ("nhwc", (1, 2, 3, 4), (1, 3, 4, 2)),
        ("ndhwc", (1, 2, 3, 4, 5), (1, 3, 4, 5, 2)),
    ],
)
def test_every_layout(
    maker: Edgeq, word: str, reference: tuple[int, ...], file: tuple[int, ...]
) -> None:
    """All elements arrive in their places; by one word, and by name."""
    content = _file(file, (1, 7))
    value = -np.arange(np.prod(reference), dtype=np.float32).reshape(reference)
    other = -np.ones((1, 7), np.float32)

    def absolute(in_0: Any, in_1: Any) -> Any:
        return {"out_0": np.abs(in_0), "out_1": np.abs(in_1)}

    turned: list[Any] = [word, {"in_0": word, "out_0": word}]
    for layout in turned:
        loaded = maker.load(content, reference=absolute, layout=layout)
        assert maker.compare(loaded, [(value, other)]).total.max_abs_error == 0
        np.testing.assert_array_equal(loaded.run(value, other)["out_0"], -value)
    # Unturned, and with the input alone turned, shapes tell.
    for layout in [None, {"in_0": word}]:
        with pytest.raises(ValueError, match=f'layout="{word}"'):
            maker.compare(maker.load(content, reference=absolute, layout=layout), [(value, other)])


@pytest.mark.parametrize(
    ("layout", "error", "match"),
    [
        ("NHWC", ValueError, r"unknown layout 'NHWC' \(did you mean nhwc"),
        ("hwc", ValueError, r"unknown layout 'hwc'.*valid: nwc, nhwc, ndhwc, ncw, nchw, ncdhw"),
        ("ndhwc", ValueError, r"no input or output of the file has the 5 dimensions of 'ndhwc'"),
        ({"in_O": "nhwc"}, ValueError, r"no input or output 'in_O' .*did you mean .*in_0"),
        ({"in_1": "nhwc"}, ValueError, r"'nhwc' has 4 dimensions, and 'in_1' has 2 in the file"),
        ({"in_0": "nwc"}, ValueError, r"'nwc' has 3 dimensions, and 'in_0' has 4 in the file"),
        ({"in_0": "last"}, ValueError, r"layout of 'in_0': unknown layout 'last'"),
        ({"in_0": (0, 2, 3, 1)}, TypeError, r"layout of 'in_0': expected one of nwc"),
        (True, TypeError, r"layout: expected one of nwc"),
        (["nhwc"], TypeError, r"layout: expected one of nwc"),
    ],
)
def test_a_layout_that_fits_nothing(
    maker: Edgeq, layout: Any, error: type[Exception], match: str
) -> None:
    """It is refused when the file is loaded."""
    load: Callable[..., QuantizedModel] = maker.load
    with pytest.raises(error, match=match):
        load(_file((1, 4, 4, 3), (1, 7)), layout=layout)
