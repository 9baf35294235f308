"""A session that checks files on both kernels of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pytest_edgeq import Edgeq
from pytest_edgeq.names import GPU_KERNELS
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.float_form import write_in_float
from pytest_edgeq.tflite.graph import OpGraph

Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def gpu_session(gpu_command: list[str]) -> Iterator[Edgeq]:
    """A session with the target `mesa`, which `check` runs on both kernels of its GPU."""
    check_targets = [f"mesa:{each}" for each in GPU_KERNELS]
    edgeq = Edgeq(targets={"mesa": gpu_command}, check_targets=check_targets)
    yield edgeq
    edgeq.close()


@pytest.fixture(scope="module")
def checking(gpu_session: Edgeq) -> Callable[..., str]:
    """Return a function that checks a file on samples as it stores them, and returns the text."""

    def checked(content: bytes, samples: Sequence[Sequence[Array]]) -> str:
        model = gpu_session.load(content, reference=_computed_on_the_cpu(content))
        try:
            gpu_session.check(model, [_floats(model.edge, each) for each in samples])
        except AssertionError as error:
            return str(error).partition("\nnote:")[0]
        return ""

    return checked


def _computed_on_the_cpu(content: bytes) -> Callable[..., Any]:
    """Return the file in float, by the builtin kernels."""
    edge = EdgeFile(write_in_float(OpGraph.read(content)))
    names = [each.name for each in edge.signature.inputs]

    def reference(*arrays: Array) -> Any:
        return tuple(edge.run(names, [np.asarray(each) for each in arrays], "builtin"))

    return reference


def _floats(edge: EdgeFile, arrays: Sequence[Array]) -> tuple[Array, ...]:
    """Return the floats that inputs of a file stand for."""
    floats = []
    for io_tensor, array in zip(edge.signature.inputs, arrays, strict=True):
        tensor = io_tensor.tensor
        if tensor.is_quantized:
            array = (array.astype(np.float32) - tensor.zero_points) * tensor.scales
        floats.append(array.astype(np.float32) if tensor.is_quantized else array)
    return tuple(floats)
