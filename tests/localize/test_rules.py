"""Localize names the rule of a kernel that an op breaks, and is silent on its sound sibling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fixtures.tflite.writer import pack, unpack
from pytest_edgeq import Edgeq
from tests.tflite.one_op_files import CHANNELS, data_of, layer, run, write

_SHARED = (1 / 64, 3)
_LOADED = [
    *("MAXIMUM", "MINIMUM", "GATHER", "GATHER_ND", "TILE", "REVERSE_V2", "DEPTH_TO_SPACE"),
    *("SPACE_TO_DEPTH", "RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"),
]
"""Ops that the builtin kernels run with any output scale."""


def _reference(floats: bytes) -> Callable[..., Any]:
    """Return what runs a float file."""

    def reference(*given: Any) -> Any:
        made = run(floats, "builtin", [np.asarray(each, np.float32) for each in given])
        assert made is not None
        return made[0]

    return reference


def _cause(content: bytes, reference: Any, inputs: list[Any]) -> str:
    edgeq = Edgeq(isolate="off")
    return edgeq.localize(edgeq.load(content, reference=reference), inputs).cause


@pytest.mark.sweep(3)
@pytest.mark.parametrize("op", _LOADED)
def test_an_op_that_does_not_rescale(op: str) -> None:
    """Both scales are named, and no other runtime is asked."""
    count = len(data_of(op))
    floats = write(op, ["float32"] * (count + 1), [(1.0, 0)] * (count + 1))
    draws = np.random.default_rng(0)
    samples = [
        tuple(draws.uniform(-1, 1, shape).astype(np.float32) for shape in data_of(op))
        for _ in range(3)
    ]

    def cause(output: tuple[float, int]) -> str:
        return _cause(
            write(op, ["int8"] * (count + 1), [*[_SHARED] * count, output]),
            _reference(floats),
            samples,
        )

    assert cause((1 / 32, 5)).startswith(
        f"{op} #0: its output: expected input 0's scale 0.015625 and zero point 3, got 0.03125 "
        "(2 ×) and 5 (+2)"
    )
    assert op not in cause(_SHARED)


_LAYERS = [
    ("CONV_2D", {"scales": CHANNELS, "axis": 3}, "its weight's scales lie along axis 3, expected"),
    ("FULLY_CONNECTED", {"bias_factor": 4.0}, "the bias's stored scale is not input scale × weig"),
    ("BATCH_MATMUL", {"scales": CHANNELS}, "its weight has 4 scales, expected 1"),
    ("DEPTHWISE_CONV_2D", {"point": -64}, "its weight has zero point −64, expected 0"),
]


@pytest.mark.parametrize(("op", "options", "told"), _LAYERS, ids=[op for op, *_ in _LAYERS])
def test_a_layer_whose_weight_or_bias_the_kernels_read_otherwise(
    op: str, options: dict[str, Any], told: str
) -> None:
    """The sound file of the same kind has no such cause."""
    draws = np.random.default_rng(0)
    for given, text in ((options, told), ({}, None)):
        content, floats, inputs, _ = layer(op, **given)
        assert inputs is not None
        shape = inputs[1].shape
        samples = [(draws.uniform(0, 1, shape).astype(np.float32),) for _ in range(3)]
        cause = _cause(content, _reference(floats), samples)
        assert cause.startswith(f"{op} #0: {text}") if text else op not in cause


@pytest.mark.parametrize("flow", ["recipe", "pt2e"])
@pytest.mark.parametrize("in_float", [False, True])
def test_who_wrote_a_wrong_op_depends_on_the_flow(flow: str, in_float: bool) -> None:
    """In a recipe's flow the quantizer did, unless the float file has it wrong as well."""
    content, floats, inputs, _ = layer("FULLY_CONNECTED", scales=CHANNELS)
    assert inputs is not None
    raw = unpack(floats if in_float else content)
    weight = raw.buffers[raw.subgraphs[0].tensors[1].buffer]
    dtype = np.float32 if in_float else np.int8
    codes = weight.data.view(dtype).copy()
    codes[0] = -codes[0]
    weight.data = codes.view(np.uint8)
    broken = pack(raw)
    edgeq, reference = Edgeq(isolate="off"), _reference(floats)
    model = (
        edgeq.load(content, reference=reference, float_tflite=broken)
        if in_float
        else edgeq.load(broken, reference=reference, float_tflite=floats)
    )
    model.flow = flow
    draws = np.random.default_rng(0)
    samples = [(draws.uniform(0, 1, (1, 4)).astype(np.float32),) for _ in range(8)]

    with pytest.raises(AssertionError) as caught:
        edgeq.check(model, samples)

    wrote = "ai-edge-quantizer" if flow == "recipe" and not in_float else "the converter"
    assert f"fix: {wrote} wrote this: take another quantizer" in str(caught.value)
