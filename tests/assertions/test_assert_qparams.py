"""assert_qparams."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema

from fixtures.tflite.writer import one_op, pack, unpack
from pytest_edgeq import QuantizedModel, assert_qparams
from pytest_edgeq.errors import UnmatchedError
from tests.assertions.conftest import golden, operand, patch


def test_the_sound_model_passes(static: QuantizedModel, weight_only: QuantizedModel) -> None:
    """Weights, biases, inputs and outputs; weights behind a DEQUANTIZE, too."""
    assert_qparams(static, symmetric=True, granularity="per_channel", scale_range=(1e-5, 0.1))
    assert_qparams(static, "CONV_2D", role="bias", symmetric=True)
    assert_qparams(static, "CONV_2D", role="output", granularity="per_tensor", symmetric=False)
    assert_qparams(static, role="output", granularity="per_tensor")
    assert_qparams(weight_only, "CONV_2D", "layer1.*", zero_point=0, granularity="per_channel")


def test_a_zero_point_that_was_changed(static: QuantizedModel) -> None:
    """One of many channels is enough."""

    def shifted(content: Any) -> None:
        operand(content, "CONV_2D", 1).quantization.zeroPoint = [0, 0, 3, 0, 0, 0, 0, 0]

    spoiled = patch(static, shifted)

    golden("qparams_symmetric", lambda: assert_qparams(spoiled, "CONV_2D", symmetric=True))
    with pytest.raises(AssertionError, match="zero_point: expected 0, got 8 zero points 0 … 3"):
        assert_qparams(spoiled, "CONV_2D", zero_point=0)


@pytest.mark.parametrize("scale", [0.0, 2.0, 1e-9])
def test_a_scale_out_of_range(static: QuantizedModel, scale: float) -> None:
    """Zero is never in range, even where the range begins at 0."""

    def spoilt(content: Any) -> None:
        quantization = operand(content, "CONV_2D", 1).quantization
        quantization.scale = [*quantization.scale[:-1], scale]

    low = 1e-6 if scale == 1e-9 else 0
    with pytest.raises(AssertionError, match=r"scale_range: expected .* \(1 of 8 outside\)"):
        assert_qparams(patch(static, spoilt), "CONV_2D", scale_range=(low, 1))


def adds(content: Any) -> list[Any]:
    """Give the quantization of the outputs of the two ADDs."""
    graph = content.subgraphs[0]
    code = next(i for i, code in enumerate(content.operatorCodes) if code.builtinCode == 0)
    ops = [op for op in graph.operators if op.opcodeIndex == code]
    return [graph.tensors[op.outputs[0]].quantization for op in ops]


def test_shared_parameters(pt2e: QuantizedModel) -> None:
    """Two ADDs with scales of their own; an op with itself is nothing shared."""

    def apart(content: Any) -> None:
        one, two = adds(content)
        one.scale, one.zeroPoint, two.scale, two.zeroPoint = [0.5], [3], [0.25], [3]

    def shared(content: Any) -> None:
        one, two = adds(content)
        two.scale, two.zeroPoint = one.scale, one.zeroPoint

    same, spoiled = (pt2e.with_tflite(patch(pt2e, change)) for change in (shared, apart))
    assert_qparams(same, "ADD", "layer1.0", "output", shared_with="layer1.1")
    golden(
        "qparams_shared",
        lambda: assert_qparams(spoiled, "ADD", "layer1.0", "output", shared_with="layer1.1"),
    )
    with pytest.raises(UnmatchedError, match="itself and no other op"):
        assert_qparams(spoiled, "ADD", "layer1.0", "output", shared_with="layer1.0")


def blockwise(scales: int, zero_points: int, size: int) -> Any:
    """Make parameters whose scales and zero points are tensors, -1 for none."""
    details = schema.BlockwiseQuantizationT()
    details.scales, details.zeroPoints, details.blockSize = scales, zero_points, size
    quantization = schema.QuantizationParametersT()
    quantization.detailsType = schema.QuantizationDetails.BlockwiseQuantization
    quantization.details = details
    return quantization


def blocks(content: Any, zero_points: list[int] | None) -> None:
    """Make the scales of the linear layer's weight blocks of 4."""
    graph = content.subgraphs[0]

    def add(array: np.ndarray[Any, Any], dtype: int) -> int:
        buffer = schema.BufferT()
        buffer.data = np.frombuffer(array.tobytes(), np.uint8)
        content.buffers.append(buffer)
        tensor = schema.TensorT()
        tensor.shape, tensor.type, tensor.name = list(array.shape), dtype, b"blocks"
        tensor.buffer = len(content.buffers) - 1
        graph.tensors.append(tensor)
        return len(graph.tensors) - 1

    scales = add(np.linspace(0.5, 1, 20, dtype=np.float16).reshape(10, 2), 1)
    points = -1
    if zero_points is not None:
        points = add(np.resize(np.array(zero_points, np.int32), (10, 2)), 2)
    operand(content, "FULLY_CONNECTED", 1).quantization = blockwise(scales, points, 4)


def test_blocks(static: QuantizedModel) -> None:
    """Their scales stand in a tensor of their own, and their zero points, if any, too."""
    fine = patch(static, lambda content: blocks(content, None))
    shifted = patch(static, lambda content: blocks(content, [0, 2]))

    assert_qparams(
        fine,
        "FULLY_CONNECTED",
        symmetric=True,
        zero_point=0,
        granularity="blockwise_4",
        scale_range=(0.5, 1),
    )
    with pytest.raises(AssertionError, match="granularity: expected blockwise_32, got blockwise_4"):
        assert_qparams(fine, "FULLY_CONNECTED", granularity="blockwise_32")
    with pytest.raises(AssertionError, match=r"expected 0\.6 … 1, got 20 scales 0\.5 … 1"):
        assert_qparams(fine, "FULLY_CONNECTED", scale_range=(0.6, 1))
    with pytest.raises(AssertionError, match="expected zero point 0, got 20 zero points 0 … 2"):
        assert_qparams(shifted, "FULLY_CONNECTED", symmetric=True)


def test_a_weight_computed_at_run_time_is_told(static: QuantizedModel) -> None:
    """The other convolutions must not pass for it."""

    def computed(content: Any) -> None:
        graph = content.subgraphs[0]
        weight = graph.operators[1].inputs[1]
        graph.tensors[weight].buffer = 0
        graph.inputs = [*graph.inputs, weight]

    with pytest.raises(AssertionError, match=r"expected a weight in the file, got none \(1 of 3"):
        assert_qparams(patch(static, computed), "CONV_2D", symmetric=True)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, ValueError, "expects nothing"),
        ({"role": "weights", "symmetric": True}, ValueError, "did you mean weight"),
        ({"symmetric": 1}, TypeError, "symmetric: expected True or False"),
        ({"zero_point": True}, TypeError, "zero_point: expected an integer"),
        ({"granularity": "per_axis"}, ValueError, "unknown granularity"),
        ({"scale_range": (0.1,)}, TypeError, "scale_range: expected"),
        ({"scale_range": ("0", "1")}, TypeError, "scale_range: expected a number"),
        ({"scale_range": (math.nan, 1)}, ValueError, "scale_range: expected 0"),
        ({"shared_with": "layer9"}, UnmatchedError, "no op matches module='layer9'"),
        ({"op": "ADD", "symmetric": True}, UnmatchedError, "no ADD has a weight"),
        ({"symmetric": False}, AssertionError, "a zero point other than 0, got zero point 0"),
    ],
)
def test_misuse(
    static: QuantizedModel, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    """Nothing expected, nothing matched, an argument of the wrong kind, or symmetric weights."""
    with pytest.raises(error, match=text):
        assert_qparams(static, **arguments)


@pytest.mark.parametrize(
    "zero_points",
    [
        {"dtype": "int8", "shape": (1, 1)},  # computed, so not in the file
        {"dtype": "int4", "shape": (1, 1), "data": b"\1"},
    ],
    ids=["computed", "int4"],
)
def test_zero_points_of_blocks_that_cannot_be_read_are_refused(
    tmp_path: Path, zero_points: dict[str, Any]
) -> None:
    """They are not taken for 0."""
    scales = np.ones((1, 1), np.float16)
    content = one_op(
        "FULLY_CONNECTED",
        [
            {"dtype": "float32", "shape": (1, 32)},
            {"dtype": "int4", "shape": (1, 32), "data": b"\0" * 16},
            {"dtype": "float16", "shape": (1, 1), "data": scales},
            zero_points,
        ],
        [{"dtype": "float32", "shape": (1, 1)}],
    )
    model = unpack(content)
    quantization = blockwise(2, 3, 0)
    quantization.details.blockShape = np.array([1, 32], np.int32)
    model.subgraphs[0].tensors[1].quantization = quantization
    path = tmp_path / "blocks.tflite"
    path.write_bytes(pack(model))

    with pytest.raises(ValueError, match=r"are kept in a tensor of dtype int. that cannot be read"):
        assert_qparams(path, "FULLY_CONNECTED", symmetric=True)
