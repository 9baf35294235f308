"""Files that would end the process are refused, and only those."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fixtures.models import CausalMask, samples, seeded
from fixtures.tflite.writer import one_op
from pytest_edgeq import Edgeq
from pytest_edgeq.tflite.edge import EdgeFile

_ALLOCATE = """
import sys
from ai_edge_litert.interpreter import Interpreter, OpResolverType
Interpreter(
    model_path=sys.argv[1],
    experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
).allocate_tensors()
"""
LIMITS = {"int8": 2.0**19, "int16": 2.0**14}


def _file(op: str, dtype: str, ratio: float) -> bytes:
    """Write an op whose first input's scale is `ratio` times the output's."""
    options = {"ADD": "AddOptions", "SUB": "SubOptions"}[op]
    constant = np.ones((1, 4), dtype)
    return one_op(
        op,
        [{"dtype": dtype, "scales": [ratio]}, {"dtype": dtype, "scales": [0.5], "data": constant}],
        [{"dtype": dtype, "scales": [1.0]}],
        options,
        potScaleInt16=False,
    )


@pytest.mark.parametrize("op", ["ADD", "SUB"])
@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_kernels_still_abort_at_the_limit(tmp_path: Path, op: str, dtype: str) -> None:
    """ai-edge-litert 2.3.0: just below the limit a file is allocated, at it the process dies."""
    path = tmp_path / "file.tflite"
    codes = []
    for ratio in (LIMITS[dtype] * 0.999, LIMITS[dtype]):
        path.write_bytes(_file(op, dtype, ratio))
        done = subprocess.run(
            [sys.executable, "-c", _ALLOCATE, str(path)], capture_output=True, check=False
        )
        codes.append(done.returncode)

    assert codes == [0, -signal.SIGABRT]


@pytest.mark.parametrize("op", ["ADD", "SUB"])
@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_such_a_file_is_refused(op: str, dtype: str) -> None:
    """Exactly from the limit on, on every runtime."""
    for runtime in ("xnnpack", "builtin", "reference", "compiled"):
        EdgeFile(_file(op, dtype, LIMITS[dtype] * 0.999)).runner(runtime)
        with pytest.raises(
            RuntimeError, match=rf"(?s)cannot load .* {op} .*the kernels would abort"
        ):
            EdgeFile(_file(op, dtype, LIMITS[dtype])).runner(runtime)


@pytest.mark.parametrize("recipe", ["recipe_static_wi8_ai8", "recipe_static_wi8_ai16"])
def test_an_infinite_mask_under_a_static_recipe_is_refused(tmp_path: Path, recipe: str) -> None:
    """What brings such scales about: ai-edge-quantizer takes the clamped −inf for a range."""
    with pytest.raises(RuntimeError, match=r"(?s)ADD .*an attention mask of -inf"):
        Edgeq(directory=tmp_path).quantize(
            seeded(CausalMask),
            CausalMask.sample_inputs(),
            quantizer=recipe,
            calibration=samples(CausalMask, 8),
        )
