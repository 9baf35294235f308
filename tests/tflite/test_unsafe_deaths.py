"""Ops that end the process of the bare interpreter are refused, where they do, and only those."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from fixtures.tflite.writer import FileWriter, one_op
from pytest_edgeq.tflite.edge import EdgeFile

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


def _depthwise(*, bias: bool) -> bytes:
    shape = (1, 3, 3, 4)
    zeros = {"dtype": "float32", "shape": (4,), "data": np.zeros(4, np.float32)}
    weight = {"dtype": "float32", "shape": shape, "data": np.ones(shape, np.float32)}
    return one_op(
        "DEPTHWISE_CONV_2D",
        [{"dtype": "float32", "shape": (1, 5, 5, 4)}, weight, *([zeros] if bias else [])],
        [{"dtype": "float32", "shape": (1, 3, 3, 4)}],
        "DepthwiseConv2DOptions",
        **dict.fromkeys(("padding", "strideW", "strideH", "depthMultiplier"), 1),
        **dict.fromkeys(("dilationWFactor", "dilationHFactor"), 1),
    )


def _resize(side: int) -> bytes:
    size = {"dtype": "int32", "shape": (2,), "data": np.array([64, 64], np.int32)}
    codes = {"dtype": "uint8", "scales": [0.5], "zero_points": [3]}
    return one_op(
        "RESIZE_BILINEAR",
        [{**codes, "shape": (1, side, side, 600)}, size],
        [{**codes, "shape": (1, 64, 64, 600)}],
        "ResizeBilinearOptions",
    )


def _transposed(*order: int) -> bytes:
    """Return a turn of an image."""
    shape = (2, 3, 40, 50)
    return one_op(
        "TRANSPOSE",
        [
            {"dtype": "float32", "shape": shape},
            {"dtype": "int32", "shape": (4,), "data": np.array(order, np.int32)},
        ],
        [{"dtype": "float32", "shape": [shape[axis] for axis in order]}],
        "TransposeOptions",
    )


def _row(index: int) -> bytes:
    """Return one row of three."""
    numbers = [
        {"dtype": "int32", "shape": (1,), "data": np.array([number], np.int32)}
        for number in (index, index + 1, 1)
    ]
    return one_op(
        "STRIDED_SLICE",
        [{"dtype": "float32", "shape": (3, 400)}, *numbers],
        [{"dtype": "float32", "shape": (400,)}],
        "StridedSliceOptions",
        shrinkAxisMask=1,
    )


def _log_softmax(*shape: int) -> bytes:
    return one_op(
        "LOG_SOFTMAX",
        [{"dtype": "float32", "shape": shape}],
        [{"dtype": "float32", "shape": shape}],
        "LogSoftmaxOptions",
    )


def _hybrid_matmul(matrices: int) -> bytes:
    """Return a product of one matrix with so many constant ones."""
    weights = np.ones((matrices, 7, 4), np.int8)
    return one_op(
        "BATCH_MATMUL",
        [
            {"dtype": "float32", "shape": (1, 2, 7)},
            {"dtype": "int8", "shape": weights.shape, "data": weights, "scales": [0.1]},
        ],
        [{"dtype": "float32", "shape": (matrices, 2, 4)}],
        "BatchMatMulOptions",
    )


def _variable(rows: int, assigned: str = "v") -> bytes:
    """Return a sum with a variable of one row, which is read as so many."""
    file = FileWriter()
    main, first = file.graph("main"), file.graph("first")
    handle, held = main.tensor("resource", ()), main.tensor("float32", (rows, 4))
    x, y = main.tensor("float32", (1, 4)), main.tensor("float32", (1, 4))
    main.op("CALL_ONCE", [], [], "CallOnceOptions", initSubgraphIndex=1)
    main.op("VAR_HANDLE", [], [handle], "VarHandleOptions", sharedName="v", container="")
    main.op("READ_VARIABLE", [handle], [held], "ReadVariableOptions")
    main.op("ADD", [x, held], [y], "AddOptions")
    main.borders([x], [y])
    handle = first.tensor("resource", ())
    ones = first.tensor("float32", (1, 4), data=np.ones((1, 4), np.float32))
    first.op("VAR_HANDLE", [], [handle], "VarHandleOptions", sharedName=assigned, container="")
    first.op("ASSIGN_VARIABLE", [handle, ones], [], "AssignVariableOptions")
    return file.content()


# A sound file, one that differs in what matters, the runtimes that it ends, what is told of it.
CASES: dict[str, tuple[bytes, bytes, tuple[str, ...], str]] = {
    "softmax over nothing": (
        _log_softmax(0, 4),
        _log_softmax(4, 0),
        ("xnnpack", "builtin"),
        "its input [4, 0] has no elements on the last axis",
    ),
    "weights that are no matrices": (
        _hybrid_matmul(1),
        _hybrid_matmul(0),
        ("xnnpack",),
        "its weights [0, 7, 4] are no matrices",
    ),
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
    "no scale of SQRT": (
        _unary("SQRT", _quantized("int16", 0.5), _quantized("int16", 0.5)),
        _unary("SQRT", _quantized("int16", None), _quantized("int16", 0.5)),
        RUNTIMES,
        "its input, tensor 0 ('t0'), is int16 and has no scale",
    ),
    "no scale of LOG": (
        _unary("LOG", _quantized("int16", 0.5), _quantized("int16", 0.5)),
        _unary("LOG", _quantized("int16", None), _quantized("int16", 0.5)),
        RUNTIMES,
        "its input, tensor 0 ('t0'), is int16 and has no scale",
    ),
    "subnormal scale of QUANTIZE": (
        _unary("QUANTIZE", _quantized("float32", None), _quantized("int8", 1e-30)),
        _unary("QUANTIZE", _quantized("float32", None), _quantized("int8", 1e-44)),
        ("xnnpack",),
        "below the least normal float32: XNNPACK would end this process",
    ),
    "zero point of QUANTIZE": (
        _unary("QUANTIZE", _quantized("float32", None), _quantized("uint8", 0.5, 255)),
        _unary("QUANTIZE", _quantized("float32", None), _quantized("uint8", 0.5, 256)),
        ("xnnpack",),
        "is uint8 and has the zero point 256: XNNPACK would end this process",
    ),
    "no bias of DEPTHWISE_CONV_2D": (
        _depthwise(bias=True),
        _depthwise(bias=False),
        ("xnnpack", "builtin"),
        "it has no bias, which the kernels read all the same",
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
    "a variable of another shape": (
        _variable(1),
        _variable(1 << 24),
        ("xnnpack", "builtin", "reference"),
        "it reads a variable of [1, 4] as [16777216, 4]",
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
    for runtime in RUNTIMES:
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


@pytest.mark.parametrize(
    ("sound", "wrong", "told"),
    [
        (_resize(3), _resize(0), "it makes [1, 64, 64, 600] of an empty image [1, 0, 0, 600]"),
        (_row(2), _row(3), "it takes index 3 of axis 0, whose length is 3"),
        (_transposed(3, -3, 0, 2), _transposed(3, -1, 1, 2), "axes [3, -1, 1, 2] is no permut"),
        (
            one_op("FAKE_QUANT", [_quantized("float32", None)], [_quantized("float32", None)]),
            one_op("FAKE_QUANT", [_quantized("int8", None)], [_quantized("int8", None)]),
            "its input is int8: the kernels take it for float32",
        ),
    ],
)
def test_foreign_memory_is_not_read(sound: bytes, wrong: bytes, told: str) -> None:
    """Whether the process dies of it depends on what lies there."""
    EdgeFile(sound).runner("builtin")
    with pytest.raises(RuntimeError, match=r"cannot load the \.tflite file") as caught:
        EdgeFile(wrong).runner("builtin")
    assert told in str(caught.value)


def test_memory_that_nothing_has_written_is_not_read() -> None:
    """XNNPACK's delegate gives it as a variable's value; the other kernels refuse by themselves."""
    EdgeFile(_variable(1)).runner("xnnpack")
    never = EdgeFile(_variable(1, assigned="another"))
    with pytest.raises(RuntimeError, match="a variable that no op of the file gives a value"):
        never.runner("xnnpack")
    with pytest.raises(RuntimeError, match="variable != nullptr"):
        never.run(["t2"], [np.zeros((1, 4), np.float32)], "builtin")
