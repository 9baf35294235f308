"""Files that others shipped, as they are: old converters, float16, sparse weights, state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import skimage.data

from fixtures.shipped import FACES, WAKE_WORDS, shipped
from pytest_edgeq import (
    Edgeq,
    assert_input_dtypes,
    assert_no_float_ops,
    assert_op_counts,
    assert_op_dtypes,
    assert_output_dtypes,
    assert_runtimes_agree,
)
from pytest_edgeq.names import RUNTIMES

WAKE_WORD_NAMES = ("alexa", "hey_jarvis", "hey_mycroft", "okay_nabu")


@pytest.mark.parametrize("name", WAKE_WORD_NAMES)
def test_a_streaming_int8_file(name: str) -> None:
    """Two subgraphs, variables, int8 in and uint8 out: every op that computes is int8."""
    path = shipped(WAKE_WORDS, name)
    convolutions = (6, 8) if name == "okay_nabu" else (5, 4)

    assert_input_dtypes(path, "int8")
    assert_output_dtypes(path, "uint8")
    for op, count in zip(("CONV_2D", "DEPTHWISE_CONV_2D"), convolutions, strict=True):
        int8 = {"input": "int8", "weight": "int8", "bias": "int32", "output": "int8"}
        assert_op_dtypes(path, op, granularity="per_channel", scheme="int8", count=count, **int8)
    assert_op_dtypes(path, "FULLY_CONNECTED", weight="int8", granularity="per_tensor", count=1)
    assert_no_float_ops(path)
    with pytest.raises(AssertionError, match="output 'dense"):
        assert_output_dtypes(path, "int8")


@pytest.mark.parametrize(
    "runtimes",
    [
        pytest.param(RUNTIMES[:4], id="litert"),
        pytest.param(RUNTIMES[:5], id="all", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", ["alexa", "okay_nabu"])
def test_every_runtime_keeps_the_state_of_a_stream(name: str, runtimes: Sequence[str]) -> None:
    """Twenty steps of one stream; at the end all kernels are within a step of each other."""
    generator = np.random.default_rng(0)
    stream = [generator.uniform(0, 20, (1, 3, 40)).astype(np.float32) for _ in range(20)]

    assert_runtimes_agree(shipped(WAKE_WORDS, name), stream, 1, runtimes)


@pytest.mark.parametrize(
    ("name", "convolutions"),
    [("face_detection_front", 21), ("face_detection_back", 37), ("face_detection_full_range", 49)],
)
def test_weights_in_float16(name: str, convolutions: int) -> None:
    """They stand behind a DEQUANTIZE, and each op is told as float16 and not as float."""
    path = shipped(FACES, name)

    assert_op_dtypes(path, "CONV_2D", weight="float16", scheme="float16", count=convolutions)
    with pytest.raises(AssertionError, match="expected"):
        assert_op_dtypes(path, "CONV_2D", scheme="float", count=convolutions)
    with pytest.raises(AssertionError, match="float"):
        assert_no_float_ops(path)


def test_sparse_weights() -> None:
    """Behind a DENSIFY and a DEQUANTIZE, they are found all the same."""
    path = shipped(FACES, "face_detection_full_range_sparse")

    assert_op_counts(path, {"DENSIFY": 46, "DEQUANTIZE": 182})
    assert_op_dtypes(path, "CONV_2D", weight="float16", scheme="float16", count=49)
    assert_op_dtypes(path, "DEPTHWISE_CONV_2D", weight="float16", scheme="float16", count=42)


def _score(maker: Edgeq, image: np.ndarray[Any, Any], runtime: str) -> float:
    """How sure the detector is of its best anchor."""
    model = maker.load(shipped(FACES, "face_detection_front"))
    outputs = model.run(image, runtime=runtime)
    return float(1 / (1 + np.exp(-outputs["classificators"].max())))


def _square(name: str, top: int, left: int, size: int) -> np.ndarray[Any, Any]:
    """A square of a photograph as the detector takes it: 1×128×128×3, −1 … 1."""
    pixels: np.ndarray[Any, Any] = getattr(skimage.data, name)()
    step = size // 128
    image = pixels[top : top + size : step, left : left + size : step]
    return (image[None, :128, :128] / np.float32(127.5) - 1).astype("float32", copy=False)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("runtime", RUNTIMES[:5])
def test_a_face_is_found_on_every_runtime(tmp_path: Any, runtime: str) -> None:
    """The astronaut's face is one, her patches are none."""
    maker = Edgeq(directory=tmp_path)

    assert _score(maker, _square("astronaut", 0, 100, 256), runtime) > 0.9
    assert _score(maker, _square("coffee", 0, 0, 384), runtime) < 0.5
