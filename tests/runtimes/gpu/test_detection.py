"""Defects that show on a GPU alone are told by `check`, and their sound counterparts are not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pytest_edgeq import Edgeq
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.float_form import write_in_float
from pytest_edgeq.tflite.graph import OpGraph
from tests.runtimes.gpu.cases import CASES, Case

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.*outside a test nothing is remembered"),
    pytest.mark.filterwarnings("ignore:.*the reference quantizes by itself"),
]

KERNELS = ("gpu", "gpu_f32")


@pytest.fixture(scope="module")
def checking(gpu_command: list[str]) -> Iterator[Callable[..., str]]:
    """Return a function that checks a file on both kernels of a GPU, and returns the failure."""
    edgeq = Edgeq(targets={"mesa": gpu_command}, check_targets=[f"mesa:{each}" for each in KERNELS])

    def checked(content: bytes, inputs: Sequence[Any]) -> str:
        model = edgeq.load(content, reference=_computed_on_the_cpu(content))
        try:
            edgeq.check(model, inputs)
        except AssertionError as error:
            return str(error).partition("\nnote:")[0]
        return ""

    yield checked
    edgeq.close()


def _computed_on_the_cpu(content: bytes) -> Callable[..., Any]:
    """Return the file in float, by the builtin kernels."""
    edge = EdgeFile(write_in_float(OpGraph.read(content)))
    names = [each.name for each in edge.signature.inputs]

    def reference(*arrays: npt.NDArray[Any]) -> Any:
        return tuple(edge.run(names, [np.asarray(each) for each in arrays], "builtin"))

    return reference


def _inputs(case: Case, content: bytes) -> list[tuple[npt.NDArray[Any], ...]]:
    edge = EdgeFile(content)
    return [tuple(edge_floats(edge, case.inputs(seed))) for seed in range(6)]


def edge_floats(edge: EdgeFile, arrays: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    """Return the floats that inputs of a file stand for."""
    floats = []
    for io_tensor, array in zip(edge.signature.inputs, arrays, strict=True):
        tensor = io_tensor.tensor
        if tensor.is_quantized:
            array = (array.astype(np.float32) - tensor.zero_points) * tensor.scales
        floats.append(array.astype(np.float32) if tensor.is_quantized else array)
    return floats


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_defect_is_told_and_its_counterpart_is_not(
    case: Case, checking: Callable[..., str]
) -> None:
    """In each precision in which it shows, with the op and the kind of the cause."""
    content = case.build()
    text = checking(content, _inputs(case, content))
    for kernels in KERNELS:
        # Of two runtimes with equal outputs the ops of one are compared.
        is_told = re.search(rf"mesa:{kernels}\b", text) is not None
        assert is_told <= (kernels in case.precisions), text
    assert case.op in text, text
    if case.outcome in ("overflow", "underflow"):
        assert case.outcome in text, text
    content = case.counterpart()
    assert checking(content, _inputs(case, content)) == ""
