"""In float16 the result of a comparison or a step may differ near it, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pytest_edgeq.check.gpu_ops import GpuResults
from pytest_edgeq.runtimes.edge import EdgeFile
from tests.runtimes.gpu.cases import write

Array = npt.NDArray[Any]

_FLOATS = "a,b,y:64x32"
_BOOLS = {"y": {"dtype": "bool", "shape": (64, 32)}}
_INTS = {"y": {"dtype": "int32", "shape": (64, 32)}}
_PLACES = {"y": {"dtype": "int32", "shape": (64,)}, "axis": 1}

OPS: dict[str, tuple[str, Callable[..., Array], dict[str, Any]]] = {
    "GREATER": ("GREATER a b > y", np.greater, _BOOLS),
    "FLOOR": ("FLOOR a > y", np.floor, {}),
    "ROUND": ("ROUND a > y", np.rint, {}),
    "SIGN": ("SIGN a > y", np.sign, {}),
    "FLOOR_DIV": ("FLOOR_DIV a b > y", np.floor_divide, {}),
    "CAST": ("CAST a > y inDataType=0 outDataType=2", lambda a: np.trunc(a).astype("i4"), _INTS),
    "ARG_MAX": ("ARG_MAX a axis > y outputType=2", lambda a, axis: a.argmax(1), _PLACES),
}


@pytest.mark.parametrize("name", OPS)
def test_a_result_may_differ_near_its_step(name: str) -> None:
    """A float16 of the operands passes; one more element that differs does not."""
    ops, compute, tensors = OPS[name]
    inputs = "a b" if " a b " in ops else "a"
    edge = EdgeFile(write(inputs, ops, _FLOATS if not tensors else "a,b:64x32", tensors))
    results = GpuResults("gpu", "xnnpack", edge)
    [op] = edge.graph.ops
    rng = np.random.default_rng(0)
    # A quarter of the elements are about as near a step as float16 rounds.
    values = dict.fromkeys(op.inputs[1:], np.array(1))
    for index in op.inputs[: len(inputs.split())]:
        whole = rng.integers(1, 9, (64, 32)) + 0.5 * (name == "ROUND")
        near = whole * (1 + rng.uniform(-1, 1, whole.shape) / 2048)
        far = rng.uniform(-9, 9, whole.shape)
        values[index] = np.where(rng.random(whole.shape) < 0.25, near, far).astype(np.float32)
    operands = [values[index] for index in op.inputs]
    base = compute(*operands)
    half = compute(*(each.astype(np.float16).astype(np.float32) for each in operands))
    assert name == "SIGN" or (base != half).any()
    values[op.outputs[0]] = base

    pair = results._make_pair(op, op.outputs[0])
    pair.update(0, base, half.astype(base.dtype), values)
    assert not pair.problem()
    assert (pair.sqnr_db < math.inf) == ((base != half).any() and base.any())

    wrong = half.astype(base.dtype)
    place = np.argwhere(np.abs(operands[0] - 0.25) < 0.1)[0][: wrong.ndim]
    wrong[tuple(place)] = not wrong[tuple(place)] if wrong.dtype == bool else 99
    pair.update(1, base, wrong, values)
    assert f"sample 1, index {place.tolist()}" in pair.problem()
