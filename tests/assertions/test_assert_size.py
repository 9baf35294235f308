"""assert_size."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pytest_edgeq import Edgeq, QuantizedModel, assert_size
from pytest_edgeq.errors import findings_of
from pytest_edgeq.numerics.findings import OVER_BUDGET, Place


def test_bytes_of_every_kind_of_model(static: QuantizedModel) -> None:
    """The bound itself is allowed; one byte less is not."""
    models: tuple[Any, ...] = (static, static.path, static.tflite, bytearray(static.tflite))
    for model in models:
        assert_size(model, max_bytes=static.size_bytes)
        with pytest.raises(AssertionError, match="size: expected at most"):
            assert_size(model, max_bytes=static.size_bytes - 1)


def test_the_ratio_is_to_the_float_file_of_a_recipe(static: QuantizedModel) -> None:
    """A small model gains little: most of the file is structure."""
    assert static.float_tflite is not None
    ratio = static.size_bytes / len(static.float_tflite)

    assert_size(static, max_ratio=ratio + 1e-6)
    with pytest.raises(AssertionError, match=r"of the float \.tflite"):
        assert_size(static, max_ratio=ratio - 1e-6)


def test_the_ratio_is_to_the_parameters_elsewhere(pt2e: QuantizedModel) -> None:
    """PT2E has no float file; a file that was loaded with its module is held against it, too."""
    with pytest.raises(AssertionError, match="of the torch model's parameters and buffers"):
        assert_size(pt2e, max_ratio=0.01)
    assert isinstance(pt2e.float_model, torch.nn.Module)
    loaded = Edgeq().load(pt2e.tflite, reference=pt2e.float_model)
    assert_size(loaded, max_ratio=100)


def test_both_bounds_are_told(plain: QuantizedModel) -> None:
    """The file is too large by both, and its largest constants are listed."""
    with pytest.raises(AssertionError) as caught:
        assert_size(plain, max_bytes=100, max_ratio=0.01)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("size: expected at most 100 bytes, got ")
    assert lines[1].startswith("size: expected at most 0.01 of the torch model")
    assert lines[2].split() == ["bytes", "dtype", "shape", "constant"]
    assert lines[3].split()[:3] == ["2,304", "float32", "8×3×3×8"]
    assert lines[-1] == f"update: max_bytes={plain.size_bytes}"
    (found,) = findings_of(caught.value)
    assert (found.kind, found.place) == (OVER_BUDGET, Place("file", "size"))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, ValueError, "expects nothing"),
        ({"max_bytes": math.inf}, ValueError, "more than 0, and finite"),
        ({"max_bytes": True}, TypeError, "expected a number"),
        ({"max_ratio": math.nan}, ValueError, "more than 0, and finite"),
    ],
)
def test_misuse(
    static: QuantizedModel, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    """A bound that could not fail, or none."""
    with pytest.raises(error, match=text):
        assert_size(static, **arguments)


def test_a_ratio_to_nothing_is_an_error(static: QuantizedModel) -> None:
    """A file alone, or held against a plain function, has no float size."""
    for model in (static.tflite, Edgeq().load(static.tflite, reference=lambda x: x)):
        with pytest.raises(ValueError, match="the size of the float model is not known"):
            assert_size(model, max_ratio=0.5)
