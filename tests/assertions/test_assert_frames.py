"""What surrounds a failure: the user's line and nothing of ours, inside pytest and outside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pytest_edgeq import QuantizedModel
from pytest_edgeq.tflite.flatbuffer import enum_names
from pytest_edgeq.tflite.ops import nearest_op
from tests.projects import Project

GOLDEN = Path(__file__).parent / "golden"
ALL_OPS = list(enum_names("BuiltinOperator").values())

FAILING = """
from pytest_edgeq import *

MODEL = {path!r}

def test_dtypes():
    assert_output_dtypes(MODEL, "float32")  # the user's line

def test_names():
    assert_output_dtypes(MODEL, {{"scores": "int8"}})  # the user's line

def test_spelling():
    assert_op_dtypes(MODEL, "CONV2D", output="int8")  # the user's line

def test_unmatched():
    assert_qparams(MODEL, "SOFTMAX", symmetric=True)  # the user's line

def test_qparams():
    assert_qparams(MODEL, "CONV_2D", symmetric=False)  # the user's line

def test_size():
    assert_size(MODEL, max_bytes="10")  # the user's line
"""


def test_a_failing_test_shows_the_users_line(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, static: QuantizedModel
) -> None:
    """Each failure points to the call, and to no line of this package."""
    files = FAILING.format(path=str(static.path))
    output = Project(pytester, monkeypatch).run(files=files, failed=6).stdout.str()
    assert output.count("# the user's line") == 6
    assert "pytest_edgeq/" not in output


def test_outside_of_pytest(static: QuantizedModel) -> None:
    """Plain Python, from a path and from bytes, without pytest or torch being imported."""
    code = f"""
import pathlib, sys
from pytest_edgeq import assert_no_float_ops, assert_op_dtypes, assert_output_dtypes
path = {str(static.path)!r}
content = pathlib.Path(path).read_bytes()
for model in (path, pathlib.Path(path), content, memoryview(content)):
    assert_output_dtypes(model, "int8")
    assert_op_dtypes(model, "CONV_2D", weight="int8", granularity="per_channel", count=3)
    assert_no_float_ops(model)
assert not {{"pytest", "torch"}} & set(sys.modules)
assert_output_dtypes(path, "float32")
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100
    )
    assert run.returncode == 1
    assert "AssertionError: output 'output_0': expected float32, got int8 (1 of 1" in run.stderr


def test_the_telling_part_comes_first() -> None:
    """Expected and got stand within the first 80 characters where names are short."""
    for path in GOLDEN.glob("*.txt"):
        first = path.read_text("utf-8").splitlines()[0]
        assert "expected" in first[:80], path.name


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("LINEAR", ALL_OPS, "FULLY_CONNECTED"),
        ("aten.linear.default", ALL_OPS, "FULLY_CONNECTED"),
        ("MatMul", ALL_OPS, "FULLY_CONNECTED or BATCH_MATMUL"),
        ("SIGMOID", ALL_OPS, "LOGISTIC"),
        ("PixelShuffle", ALL_OPS, "DEPTH_TO_SPACE"),
        # Spelled like the operator itself: no other vocabulary is consulted.
        ("RESIZE_BILINAR", ALL_OPS, "RESIZE_BILINEAR"),
        # One of those that can be meant, else one that is spelled alike.
        ("matmul", ["BATCH_MATMUL", "ADD"], "BATCH_MATMUL?"),
        ("linear", ["RESIZE_BILINEAR"], "RESIZE_BILINEAR?"),
    ],
)
def test_operators_by_their_names_elsewhere(name: str, known: list[str], hint: str) -> None:
    """In torch, Keras and ONNX."""
    assert nearest_op(name, known).startswith(f" (did you mean {hint}")
