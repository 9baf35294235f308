"""assert_runtimes_agree."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fixtures.models import DepthwiseSeparable, ResidualNet, samples
from pytest_edgeq import QuantizedModel, assert_runtimes_agree
from pytest_edgeq.errors import UnmatchedError
from pytest_edgeq.runtimes.edge import EdgeFile
from tests.assertions.conftest import golden, patch


class Spoilt:
    """A runner whose codes are changed where the runtime is another than builtin."""

    def __init__(self, codes: dict[str, list[Any]], runtime: str) -> None:
        self.codes = [np.array(array) for array in codes[runtime]]

    def run(self, inputs: Any) -> list[Any]:
        """Give the codes, whatever comes."""
        del inputs
        return self.codes


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let each runtime give the codes told."""

    def give(**codes: list[Any]) -> None:
        monkeypatch.setattr(EdgeFile, "runner", lambda self, runtime: Spoilt(codes, runtime))

    return give


def test_real_kernels_differ_by_one_step(depthwise: QuantizedModel) -> None:
    """Within the bound that was measured it passes, below it does not."""
    assert_runtimes_agree(depthwise, samples(DepthwiseSeparable, 4, seed=9), 1)
    with pytest.raises(AssertionError, match="xnnpack and builtin: expected at most 0 LSB, got 1"):
        assert_runtimes_agree(depthwise, samples(DepthwiseSeparable, 4, seed=9), max_lsb_error=0)


def test_path_and_bytes_agree_with_themselves(static: QuantizedModel) -> None:
    """From a file, from memory, and on numpy's arrays."""
    inputs = [np.asarray(x) for (x,) in samples(ResidualNet, 2, seed=9)]

    assert_runtimes_agree(static.path, inputs, 2)
    assert_runtimes_agree(str(static.path), inputs, 2, runtimes=["builtin", "reference"])
    assert_runtimes_agree(static.tflite, inputs, np.float32(2))  # type: ignore[arg-type]


def test_samples_are_read_once(static: QuantizedModel) -> None:
    """A generator does for all runtimes."""
    read = []

    def once() -> Any:
        for sample in samples(ResidualNet, 3):
            read.append(sample)
            yield sample

    assert_runtimes_agree(static, once(), 4)
    assert len(read) == 3


def test_codes_that_differ(static: QuantizedModel, kernels: Any) -> None:
    """The golden text; uint8 and int8 codes do not wrap."""
    one = np.zeros((1, 10), np.int8)
    other = one.copy()
    other[0, 4], one[0, 4], other[0, 6] = 127, -128, 1
    kernels(xnnpack=[one], builtin=[one], reference=[other])

    golden("runtimes", lambda: assert_runtimes_agree(static, samples(ResidualNet, 2), 3))


def test_another_shape_is_not_broadcast(static: QuantizedModel, kernels: Any) -> None:
    """One code for ten is another output."""
    kernels(builtin=[np.zeros((1, 10), np.int8)], reference=[np.zeros((1, 1), np.int8)])
    with pytest.raises(AssertionError, match=r"got inf .*\n.*\n.*shape \[1, 10\] and \[1, 1\]"):
        assert_runtimes_agree(
            static, samples(ResidualNet, 1), 255, runtimes=("builtin", "reference")
        )


@pytest.mark.parametrize(("one", "two"), [(0, 1), (2**63 - 1, -(2**63))])
def test_classes_must_be_equal(static: QuantizedModel, kernels: Any, one: int, two: int) -> None:
    """An integer without a scale has no step to forgive, however far apart the two are."""

    def unscaled(content: Any) -> None:
        graph = content.subgraphs[0]
        tensor = graph.tensors[graph.outputs[0]]
        tensor.quantization, tensor.type = None, 4

    classes = patch(static, unscaled)
    kernels(builtin=[np.array([[one]], np.int64)], reference=[np.array([[two]], np.int64)])
    with pytest.raises(AssertionError, match="expected equal values, got"):
        assert_runtimes_agree(
            classes, samples(ResidualNet, 1), 255, runtimes=("builtin", "reference")
        )


def test_a_float_output_has_no_step(dynamic: QuantizedModel) -> None:
    """The way out is a budget on each runtime."""
    with pytest.raises(UnmatchedError, match="output 'output_0' is float32 and has no LSB"):
        assert_runtimes_agree(dynamic, samples(ResidualNet, 1), 1)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"max_lsb_error": math.nan}, ValueError, "expected 0 or more, and finite"),
        ({"max_lsb_error": True}, TypeError, "expected a number"),
        ({"runtimes": "builtin"}, ValueError, "two or more different ones"),
        ({"runtimes": ("builtin", "builtin")}, ValueError, "two or more different ones"),
        ({"runtimes": ("builtin", "xnpack")}, ValueError, "did you mean xnnpack"),
        ({"inputs": []}, ValueError, "there is no sample"),
        ({"inputs": [torch.zeros(2, 3, 16, 16)]}, ValueError, "expected shape"),
    ],
)
def test_misuse(
    static: QuantizedModel, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    """Bounds, runtimes and samples that say nothing."""
    given: dict[str, Any] = {"inputs": samples(ResidualNet, 1), "max_lsb_error": 1} | arguments
    with pytest.raises(error, match=text):
        assert_runtimes_agree(static, **given)
