"""assert_input_dtypes and assert_output_dtypes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from ai_edge_litert import schema_py_generated as schema

from pytest_edgeq import QuantizedModel, assert_input_dtypes, assert_output_dtypes
from pytest_edgeq.errors import UnmatchedError
from tests.assertions.conftest import golden, patch


@pytest.mark.parametrize(
    "expected",
    [
        pytest.param("int8", id="text"),
        pytest.param(np.int8, id="numpy_type"),
        pytest.param(np.dtype("int8"), id="numpy_dtype"),
        pytest.param(torch.int8, id="torch"),
        pytest.param(["int8"], id="list"),
        pytest.param({"output_0": "int8"}, id="dict"),
    ],
)
def test_every_spelling_of_a_dtype_passes(static: QuantizedModel, expected: Any) -> None:
    """A string, numpy's and torch's dtypes, alone, in order and by name."""
    assert_output_dtypes(static, expected)


def test_inputs_and_outputs_are_looked_at(static: QuantizedModel, plain: QuantizedModel) -> None:
    """Both borders of a sound model pass, quantized or not."""
    assert_input_dtypes(static, {"args_0": torch.int8})
    assert_input_dtypes(plain, np.float32)
    assert_output_dtypes(plain, torch.float32)


def test_a_changed_input_fails(static: QuantizedModel) -> None:
    """A file whose input was made uint8."""

    def unsigned(content: Any) -> None:
        graph = content.subgraphs[0]
        graph.tensors[graph.inputs[0]].type = 3

    spoiled = patch(static, unsigned)

    golden("input_uint8", lambda: assert_input_dtypes(spoiled, torch.int8))


def test_every_signature_is_looked_at(static: QuantizedModel) -> None:
    """The second entry point of a file does not pass unseen; its names bear the signature's."""

    def second(content: Any) -> None:
        import copy

        graph, key = copy.deepcopy(content.subgraphs[0]), copy.deepcopy(content.signatureDefs[0])
        key.signatureKey, key.subgraphIndex = b"extra", len(content.subgraphs)
        graph.tensors[graph.outputs[0]].type = 0
        content.subgraphs.append(graph)
        content.signatureDefs.append(key)

    spoiled = patch(static, second)
    first = static.edge.signature.key

    with pytest.raises(AssertionError, match="output 'extra:output_0': expected int8, got float32"):
        assert_output_dtypes(spoiled, "int8")
    assert_output_dtypes(spoiled, {f"{first}:output_0": "int8", "extra:output_0": "float32"})


def test_outputs_of_one_name_are_told_apart(static: QuantizedModel) -> None:
    """Without signatures names may repeat: by position each is still looked at."""

    def twice(content: Any) -> None:
        content.signatureDefs = []
        graph = content.subgraphs[0]
        (index,) = graph.outputs
        (other,) = graph.inputs
        graph.tensors[other].name = graph.tensors[index].name
        graph.tensors[index].type = 0
        graph.outputs = [index, other]

    with pytest.raises(AssertionError, match="expected int8, got float32"):
        assert_output_dtypes(patch(static, twice), ["int8", "int8"])


def test_a_model_without_inputs_passes_nothing(static: QuantizedModel) -> None:
    """What is expected of no input is expected of nothing; no input may be said."""

    def closed(content: Any) -> None:
        (index,) = content.subgraphs[0].inputs
        tensor, buffer = content.subgraphs[0].tensors[index], schema.BufferT()
        buffer.data = np.zeros(math.prod(tensor.shape), np.uint8)
        content.buffers.append(buffer)
        tensor.buffer = len(content.buffers) - 1
        content.subgraphs[0].inputs = []
        content.signatureDefs[0].inputs = []

    spoiled = patch(static, closed)

    with pytest.raises(UnmatchedError, match="the model has no inputs"):
        assert_input_dtypes(spoiled, "int8")
    assert_input_dtypes(spoiled, [])


@pytest.mark.parametrize(
    ("expected", "error", "text"),
    [
        # An output that is not there, or that nobody looks at.
        ({"output_1": "int8"}, UnmatchedError, "no output is named 'output_1' .did you mean outpu"),
        ({}, UnmatchedError, "output 'output_0' is left out"),
        (["int8", "int8"], UnmatchedError, "expected 2 outputs"),
        # None of every output would pass anything.
        *((each, ValueError, "expects nothing") for each in (None, [None], {"output_0": None})),
        # With the nearest name, or the plain dtype of a quantized one.
        ("int9", ValueError, "unknown dtype 'int9' .did you mean int8"),
        ("float", ValueError, "did you mean float"),
        (torch.qint8, ValueError, "'qint8'; give 'int8', as which TFLite stores it"),
        ("torch.quint8", ValueError, "give 'uint8'"),
        (int, TypeError, "expected a dtype"),
        (torch.zeros(1), TypeError, "expected a dtype"),
    ],
)
def test_misuse(static: QuantizedModel, expected: Any, error: type[Exception], text: str) -> None:
    """Outputs that do not match, nothing, and what is no dtype."""
    with pytest.raises(error, match=text):
        assert_output_dtypes(static, expected)


@pytest.mark.parametrize("dtype", [np.dtype("int64"), "int4"])
def test_dtypes_that_equal_python_types_are_dtypes(static: QuantizedModel, dtype: Any) -> None:
    """np.dtype('int64') == int, and it is still a dtype: here one that the model has not."""
    with pytest.raises(AssertionError, match="got int8") as caught:
        assert_output_dtypes(static, dtype)
    assert not isinstance(caught.value, UnmatchedError)


@pytest.mark.parametrize("model", [None, ["m.tflite"]])
def test_what_is_no_model_is_refused(model: Any) -> None:
    """A model is a QuantizedModel, a path or bytes."""
    with pytest.raises(TypeError, match="expected a QuantizedModel, a path or the bytes"):
        assert_input_dtypes(model, "int8")
