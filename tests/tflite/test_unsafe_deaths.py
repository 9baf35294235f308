"""Ops that end the process of the bare interpreter are refused, where they do, and only those."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from fixtures.tflite.writer import one_op
from pytest_edgeq.runtimes.edge import EdgeFile

_RUN = """
import os, sys
import numpy as np
from ai_edge_litert.interpreter import Interpreter, OpResolverType
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
for path in sys.argv[1:]:
    codes = []
    for resolver in ("BUILTIN", "BUILTIN_WITHOUT_DEFAULT_DELEGATES", "BUILTIN_REF"):
        child = os.fork()
        if not child:
            try:
                interpreter = Interpreter(
                    model_path=path, experimental_op_resolver_type=OpResolverType[resolver]
                )
                interpreter.allocate_tensors()
                for each in interpreter.get_input_details():
                    interpreter.set_tensor(each["index"], np.ones(each["shape"], each["dtype"]))
                interpreter.invoke()
            except BaseException:
                os._exit(1)
            os._exit(0)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(*codes, flush=True)
"""

RUNTIMES = ("xnnpack", "builtin", "reference")


def _quantized(dtype: str, scale: float | None, zero_point: int = 0) -> dict[str, Any]:
    scales = {} if scale is None else {"scales": [scale], "zero_points": [zero_point]}
    return {"dtype": dtype, "shape": (1, 4), **scales}


def _pair(op: str, dtype: str, first: float | None, second: float, result: float | None) -> bytes:
    options = {"ADD": "AddOptions", "SUB": "SubOptions"}.get(op, "SquaredDifferenceOptions")
    more = {} if op == "SQUARED_DIFFERENCE" else {"potScaleInt16": False}
    operands = [_quantized(dtype, first), _quantized(dtype, second)]
    return one_op(op, operands, [_quantized(dtype, result)], options, **more)


def _unary(op: str, given: dict[str, Any], made: dict[str, Any]) -> bytes:
    return one_op(op, [given], [made])


def _softmax(beta: float) -> bytes:
    given, made = _quantized("int8", 0.5), _quantized("int8", 2.0**-8, -128)
    return one_op("SOFTMAX", [given], [made], "SoftmaxOptions", beta=beta)


def _sum(op: str, dtype: str, first: float, *, result: float = 1.0) -> bytes:
    """Write an op on an input of one scale and a constant of scale 0.5."""
    constant = _quantized(dtype, 0.5) | {"data": np.ones((1, 4), dtype)}
    operands, made = [_quantized(dtype, first), constant], [_quantized(dtype, result)]
    return one_op(op, operands, made, f"{op.title()}Options", potScaleInt16=False)


LIMITS = {"int8": 2.0**19, "int16": 2.0**14}
"""Ratio of an input's scale to the output's from which on kernels abort."""

# A sound file, one that differs in what matters, the runtimes that it ends, what is told of it.
CASES: dict[str, tuple[bytes, bytes, tuple[str, ...], str]] = {
    **{
        f"limit of {op} {dtype}": (
            _sum(op, dtype, limit * 0.999),
            _sum(op, dtype, limit),
            RUNTIMES,
            "the kernels would abort",
        )
        for op in ("ADD", "SUB")
        for dtype, limit in LIMITS.items()
    },
    **{
        # A mask of float32's least value, by which both sides are scaled.
        f"mask of {dtype} beyond float32": (
            _sum("ADD", dtype, scale * 0.999, result=scale * 0.999),
            _sum("ADD", dtype, scale * 1.001, result=scale * 1.001),
            RUNTIMES,
            "an attention mask of -inf",
        )
        for dtype, scale in (("int8", 2.0**108), ("int16", 2.0**113))
    },
    "no scale of ADD": (
        _pair("ADD", "int8", 0.5, 0.5, 0.5),
        _pair("ADD", "int8", 0.5, 0.5, None),
        RUNTIMES,
        "tensor 2 ('t2') is int8 and has no scale",
    ),
    "scale 0 of ADD": (
        _pair("ADD", "int8", 0.5, 0.5, 0.5),
        _pair("ADD", "int8", 0.0, 0.5, 0.5),
        RUNTIMES,
        "an input's scale is 0, the other's 0.5",
    ),
    "no scale of one input of SUB": (
        _pair("SUB", "int16", 0.3, 0.3, 0.3),
        _pair("SUB", "int16", None, 0.3, 0.3),
        RUNTIMES,
        "tensor 0 ('t0') is int16 and has no scale",
    ),
    "factor of SQUARED_DIFFERENCE": (
        _pair("SQUARED_DIFFERENCE", "int8", 0.5, 0.5, 0.5),
        _pair("SQUARED_DIFFERENCE", "int8", 0.5, 0.5, 1e-9),
        RUNTIMES,
        "which the factor of the result, 6.1e+04, does not fit",
    ),
    "subnormal scale of QUANTIZE": (
        _unary("QUANTIZE", _quantized("float32", None), _quantized("int8", 1e-30)),
        _unary("QUANTIZE", _quantized("float32", None), _quantized("int8", 1e-44)),
        ("xnnpack",),
        "below the least normal float32: XNNPACK would end this process",
    ),
    "beta of SOFTMAX": (
        _softmax(1.0),
        _softmax(1e-9),
        ("reference",),
        "its beta, 1e-09, times the scale of its input, 0.5, is not more than 2^-26",
    ),
    "scale of LOG_SOFTMAX": (
        _unary("LOG_SOFTMAX", _quantized("int8", 0.5), _quantized("int8", 1 / 16, 127)),
        _unary("LOG_SOFTMAX", _quantized("int8", 1e-9), _quantized("int8", 1 / 16, 127)),
        ("reference",),
        "its beta, 1, times the scale of its input, 1e-09, is not more than 2^-26",
    ),
}


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """How the bare interpreter ends on each pair of files, by runtime: 0, or minus a signal."""
    folder = tmp_path_factory.mktemp("files")
    paths = []
    for number, (sound, wrong, _, _) in enumerate(CASES.values()):
        for name, content in (("sound", sound), ("wrong", wrong)):
            paths.append(folder / f"{number}.{name}.tflite")
            paths[-1].write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *map(str, paths)],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    ended = [[int(code) for code in line.split()] for line in done.stdout.splitlines()]
    return {name: ended[2 * i : 2 * i + 2] for i, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_kernels_still_end_the_process(codes: dict[str, list[list[int]]], name: str) -> None:
    """ai-edge-litert 2.3.0: at these files, and not at their sound neighbours."""
    sound, wrong = codes[name]
    assert all(code >= 0 for code in sound), "not refused: the sound one"
    assert {runtime for runtime, code in zip(RUNTIMES, wrong, strict=True) if code < 0} == set(
        CASES[name][2]
    )


@pytest.mark.parametrize("name", CASES)
def test_they_are_refused_before(name: str) -> None:
    """On the runtimes that they end, with the op and the cause; the sound neighbour is loaded."""
    sound, wrong, ended, told = CASES[name]
    ended = (*ended, "compiled") if ended == RUNTIMES else ended
    for runtime in {*RUNTIMES, *ended}:
        EdgeFile(sound).runner(runtime)
        if runtime not in ended:
            EdgeFile(wrong).runner(runtime)
            continue
        with pytest.raises(RuntimeError, match=r"cannot load the \.tflite file") as caught:
            EdgeFile(wrong).runner(runtime)
        assert told in str(caught.value)


def test_a_handle_is_not_read() -> None:
    """The process dies of `get_tensor` on one."""
    edge = EdgeFile(one_op("VAR_HANDLE", [], [{"dtype": "resource", "shape": ()}]))
    with pytest.raises(RuntimeError, match="output 't0' is resource, which cannot be read here"):
        edge.runner("builtin")
