"""assert_op_dtypes, assert_op_counts and assert_no_float_ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fixtures.models import net
from pytest_edgeq import (
    Edgeq,
    QuantizedModel,
    assert_no_float_ops,
    assert_op_counts,
    assert_op_dtypes,
)
from pytest_edgeq.errors import UnmatchedError
from tests.assertions.conftest import operand, patch


def test_the_sound_models_pass(
    pt2e: QuantizedModel,
    dynamic: QuantizedModel,
    weight_only: QuantizedModel,
    float16: QuantizedModel,
) -> None:
    """Every field, on every scheme."""
    assert_op_dtypes(
        pt2e,
        "CONV_2D",
        input=torch.int8,
        weight=np.int8,
        bias="int32",
        output=("int8",),
        scheme="int8",
        granularity="per_channel",
        count=3,
    )
    assert_op_dtypes(pt2e, "ADD", input=["int8", "int8"], output="int8", module="layer1.*", count=2)
    assert_op_dtypes(dynamic, "CONV_2D", input="float32", weight="int8", scheme="dynamic")
    assert_op_dtypes(weight_only, "CONV_2D", weight="int8", scheme="weight_only")
    assert_op_dtypes(float16, "CONV_2D", weight="float16", scheme="float16")


def test_a_single_channel_is_both(static: QuantizedModel) -> None:
    """One scale for one output channel may be called either."""

    def one_channel(content: Any) -> None:
        weight = operand(content, "FULLY_CONNECTED", 1)
        weight.shape = [1, 80]
        weight.quantization.scale = weight.quantization.scale[:1]
        weight.quantization.zeroPoint = [0]

    narrow = patch(static, one_channel)

    assert_op_dtypes(narrow, "FULLY_CONNECTED", granularity="per_channel")
    assert_op_dtypes(narrow, "FULLY_CONNECTED", granularity="per_tensor")


def test_scales_along_another_axis_are_not_per_channel(static: QuantizedModel) -> None:
    """As many as there are output channels, and still not what the kernel takes them for."""

    def turned(content: Any) -> None:
        graph = content.subgraphs[0]
        for op in graph.operators:
            weight = graph.tensors[op.inputs[1]] if len(op.inputs) == 3 else None
            if weight is not None and list(weight.shape) == [8, 3, 3, 8]:
                weight.quantization.quantizedDimension = 3

    with pytest.raises(
        AssertionError, match="expected per_channel, got per_channel on axis 3 instead of 0"
    ):
        assert_op_dtypes(patch(static, turned), "CONV_2D", granularity="per_channel")


BLOCK = {"output": "int8", "module": "layer2.*"}


@pytest.mark.parametrize(
    ("op", "arguments", "error", "text"),
    [
        # An ADD has no weight: nothing that is expected of it holds.
        ("ADD", {"weight": "int8"}, AssertionError, "weight: expected int8, got no weight"),
        ("ADD", {"bias": "int32"}, AssertionError, "bias: expected int32, got no bias"),
        ("ADD", {"granularity": "per_channel"}, AssertionError, "expected per_channel, got no wei"),
        ("ADD", {"input": ("int8",)}, AssertionError, "input: expected int8, got int8, int8"),
        # The nearest names are told.
        ("SOFTMAX", {"output": "int8"}, UnmatchedError, "model has no SOFTMAX; it has 2 ADD, 3 C"),
        ("CUSTOM", {"output": "int8"}, UnmatchedError, "the model has no CUSTOM"),
        ("CONV_2D", BLOCK, UnmatchedError, "no CONV_2D matches .* .did you mean layer1.1.conv_a"),
        ("CONV_2D", {}, ValueError, "expects nothing: give input="),
        ("CONV2D", {"output": "int8"}, ValueError, "no operator 'CONV2D' .did you mean CONV_2D"),
        (None, {"output": "int8"}, TypeError, "op: expected a name"),
        ("CONV_2D", {"scheme": "int7"}, ValueError, "unknown scheme 'int7' .did you mean int8"),
        ("CONV_2D", {"granularity": "channel"}, ValueError, "did you mean per_channel"),
        ("CONV_2D", {"input": ()}, ValueError, "input: an empty sequence"),
        ("CONV_2D", {"count": 0}, ValueError, "write assert_op_counts"),
        ("CONV_2D", {"count": -1}, ValueError, "count: expected 0 or more"),
        ("CONV_2D", {"count": True}, TypeError, "count: expected an integer"),
        ("CONV_2D", {"output": "int8", "module": 3}, TypeError, "module: expected a glob"),
    ],
)
def test_op_dtypes_that_do_not_pass(
    pt2e: QuantizedModel, op: Any, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    """A call that expects nothing, or something that there is not, is refused."""
    with pytest.raises(error, match=text):
        assert_op_dtypes(pt2e, op, **arguments)


def test_modules_that_do_not_pass(depthwise: QuantizedModel) -> None:
    """A file alone knows none: the way out is to give the torch model; and one with another op."""
    with pytest.raises(UnmatchedError, match=r"is known\. Load the file with edgeq\.load"):
        assert_op_dtypes(depthwise.tflite, "CONV_2D", output="int8", module="stem")
    with pytest.raises(
        UnmatchedError,
        match="no CONV_2D matches module='depthwise', which is DEPTHWISE_CONV_2D in the file; "
        "there are 'pointwise', 'stem'",
    ):
        assert_op_dtypes(depthwise, "CONV_2D", weight="int8", module="depthwise")


def test_counts(pt2e: QuantizedModel) -> None:
    """Of ops that are there and of one that is not; numpy's integers are integers."""
    assert_op_counts(pt2e, {"CONV_2D": 3, "ADD": np.int64(2), "SOFTMAX": 0, "CUSTOM": 0})  # type: ignore[dict-item]


def test_custom_ops_are_counted_together(static: QuantizedModel) -> None:
    """`CUSTOM: 0` must see CUSTOM:Foo, which bears another name."""

    def custom(content: Any) -> None:
        code = content.operatorCodes[0]
        code.builtinCode, code.deprecatedBuiltinCode, code.customCode = 32, 32, b"Foo"

    spoiled = patch(static, custom)

    with pytest.raises(AssertionError, match="CUSTOM: expected 0, got"):
        assert_op_counts(spoiled, {"CUSTOM": 0})
    with pytest.raises(AssertionError, match="CUSTOM:Foo: expected 0, got"):
        assert_op_counts(spoiled, {"CUSTOM:Foo": 0})


@pytest.mark.parametrize(
    ("expected", "error", "text"),
    [
        ({}, ValueError, "expects nothing"),
        (["CONV_2D"], TypeError, "expected a dict"),
        ({"conv_2d": 1}, ValueError, "did you mean CONV_2D"),
        ({"CONV_2D": True}, TypeError, "expected an integer"),
    ],
)
def test_misuse_of_counts(
    pt2e: QuantizedModel, expected: Any, error: type[Exception], text: str
) -> None:
    """Not an operator, not a count, or nothing."""
    with pytest.raises(error, match=text):
        assert_op_counts(pt2e, expected)


def test_no_float_op_in_a_fully_quantized_model(
    static: QuantizedModel, pt2e: QuantizedModel
) -> None:
    """And those that may are named."""
    assert_no_float_ops(static)
    assert_no_float_ops(pt2e, allow=(op for op in ("RELU", "TRANSPOSE", "MEAN")))  # type: ignore[arg-type]


def test_float_ops_that_another_tool_left(pt2e: QuantizedModel) -> None:
    """Of a file alone no preset is named."""
    with pytest.raises(
        AssertionError, match="the tool that made the file has no pattern for RELU and MEAN"
    ):
        assert_no_float_ops(pt2e.path, allow=["TRANSPOSE"])


def test_a_float_op_that_no_recipe_quantizes() -> None:
    """A rule of the recipe would not help, and the preset has one for every op."""
    model, sample = net(lambda _, x: torch.floor(x) + x).eval(), torch.linspace(-3, 3, 8)[None]
    recipe = "recipe_static_wi8_ai8"
    quantized = Edgeq().quantize(model, (sample,), quantizer=recipe, calibration=[(sample,)])
    with pytest.raises(AssertionError) as caught:
        assert_no_float_ops(quantized)
    text = " ".join(str(caught.value).split())
    assert "ai-edge-quantizer has no static quantization for FLOOR, whatever the recipe" in text
    assert "replace it in the model" in text


@pytest.mark.parametrize("dtype", ["BFLOAT16", "COMPLEX64"])
def test_every_kind_of_float_is_one(static: QuantizedModel, dtype: str) -> None:
    """An operand of any of them counts."""
    from ai_edge_litert import schema_py_generated as schema

    def widened(content: Any) -> None:
        graph = content.subgraphs[0]
        graph.tensors[graph.operators[1].outputs[0]].type = getattr(schema.TensorType, dtype)

    with pytest.raises(AssertionError, match=f"expected no float, got {dtype.lower()}"):
        assert_no_float_ops(patch(static, widened))


def test_a_file_without_ops_passes_nothing(static: QuantizedModel) -> None:
    """Nothing to check is not a success."""

    def emptied(content: Any) -> None:
        content.subgraphs[0].operators = []

    spoiled = patch(static, emptied)

    with pytest.raises(UnmatchedError, match="there is nothing to check"):
        assert_no_float_ops(spoiled)
    with pytest.raises(UnmatchedError, match="it has no op at all"):
        assert_op_dtypes(spoiled, "CONV_2D", output="int8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("allow", "error", "text"),
    [
        ("RELU", TypeError, "allow: expected a sequence"),
        (("RELU", "SOFTMAX"), UnmatchedError, "allow='SOFTMAX' matches no float op"),
        (("RELU", "CONV_2D"), UnmatchedError, "allow='CONV_2D' matches no float op"),
        (("DEQUANTIZE",), UnmatchedError, "never counted"),
        (("relu",), ValueError, "did you mean RELU"),
    ],
)
def test_misuse_of_allow(
    pt2e: QuantizedModel, allow: Any, error: type[Exception], text: str
) -> None:
    """An entry that is not needed would hide the next op of that name."""
    with pytest.raises(error, match=text):
        assert_no_float_ops(pt2e, allow=allow)
