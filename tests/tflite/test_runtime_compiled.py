"""LiteRT's CompiledModel: the same bits as the interpreter of the same kernels, or a refusal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from ai_edge_litert import schema_py_generated as schema

from fixtures.tflite import make
from fixtures.tflite.stateful import counter
from fixtures.tflite.writer import chain, constant, one_op, pack, unpack
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.boundary import numpy_dtype
from tests.bench.speed.kernels_of_arm import drawn

FILES = sorted(make.CONVERTED.glob("*.tflite"))
X = np.array([[1, -2, 3, -4]], np.float32)
Arrays = list[npt.NDArray[Any]]


def _assert_same(left: Arrays, right: Arrays) -> None:
    assert [(a.dtype, a.shape) for a in left] == [(a.dtype, a.shape) for a in right]
    assert [a.tobytes() for a in left] == [a.tobytes() for a in right]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.removesuffix(".tflite"))
def test_the_same_bits_as_xnnpack(path: Path) -> None:
    """Every converted file, sample after sample, on one thread and on two."""
    edge, wide = EdgeFile(path), EdgeFile(path, threads=2)
    for seed, length in enumerate((3, 1, 1, 4)):
        inputs = drawn(edge, seed, length)
        expected = edge.runner("xnnpack").run(inputs)
        _assert_same(edge.runner("compiled").run(inputs), expected)
        _assert_same(wide.runner("compiled").run(inputs), expected)


@pytest.mark.parametrize(
    "dtype",
    [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
    + ["float16", "float32", "float64", "bool"],
)
@pytest.mark.parametrize("key", ["main", None])
def test_every_dtype_crosses_the_border(dtype: str, key: str | None) -> None:
    """Its own buffers know six of them by name; we hand over bytes."""
    tensor = {"dtype": dtype, "scales": (0.5,) if dtype in ("int8", "uint8", "int16") else ()}
    reshape = ("RESHAPE", "x shape", "y", "ReshapeOptions", {"newShape": [2, 2]})
    tensors = {"x": tensor, "y": tensor | {"shape": (2, 2)}, "shape": constant([2, 2], "int32")}
    edge = EdgeFile(chain(reshape, inputs="x", outputs="y", key=key, **tensors))
    low = 0 if dtype == "bool" or dtype.startswith("uint") else -7
    value = np.array([[low, 1, 0, 1 if dtype == "bool" else 99]]).astype(numpy_dtype(dtype))
    for given in (value, np.asfortranarray(value[:, ::-1]), value):
        _assert_same(edge.runner("compiled").run({"x": given}), [given.reshape(2, 2)])


def test_a_scalar_and_an_op_without_input() -> None:
    """Shapes without a dimension, and files that only give."""
    edge = EdgeFile(
        one_op("NEG", [{"dtype": "float32", "shape": ()}], [{"dtype": "float32", "shape": ()}])
    )
    name = edge.signature.inputs[0].name
    _assert_same(
        edge.runner("compiled").run({name: np.array(3, np.float32)}), [np.array(-3, np.float32)]
    )
    constant = {"dtype": "float32", "data": X}
    _assert_same(
        EdgeFile(one_op("NEG", [constant], [{"dtype": "float32"}])).runner("compiled").run({}), [-X]
    )


def _two_inputs(names: Sequence[str] = ("a", "b"), *, constant: bool = False) -> EdgeFile:
    a, b = names
    ops = ("SUB", f"{a} {b}", "output_2", "SubOptions"), ("NEG", "output_2", "output_10")
    outputs = "output_10 output_2" + " always" * constant
    always = {"dtype": "float32", "data": 7 * X}
    content = chain(*ops, inputs=f"{a} {b}", outputs=outputs, key="main", always=always)
    model = unpack(content)
    for entries in (model.signatureDefs[0].inputs, model.signatureDefs[0].outputs):
        entries.reverse()  # a signature lists its names in any order
    return EdgeFile(pack(model))


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_names_and_order_are_the_models_own(names: tuple[str, str]) -> None:
    """Neither alphabetical nor the signature's."""
    runner = _two_inputs(names).runner("compiled")
    sign, less = runner.run({names[0]: X, names[1]: X + X})
    _assert_same([sign, less], [X, -X])


def test_a_constant_as_output() -> None:
    """No op computes it, and it is given all the same."""
    values = _two_inputs(constant=True).runner("compiled").run({"a": X, "b": 0 * X})
    _assert_same(values, [-X, X, 7 * X])


@pytest.mark.parametrize("runtime", ["xnnpack", "compiled"])
def test_state_goes_on_until_a_restart(runtime: str) -> None:
    """As in the interpreter: from run to run, and anew after `restart`."""
    edge = EdgeFile(counter())
    for _ in range(2):
        totals = [edge.runner(runtime).run({"x": X})[0] for _ in range(3)]
        _assert_same(totals, [X, 2 * X, 3 * X])
        edge.restart()


# --- what it cannot do -----------------------------------------------------------------------


def _alias(borders: tuple[int, ...]) -> EdgeFile:
    """NEG with tensor 1 as its output; tensor 2 is computed by nothing."""
    outputs = " ".join(f"t{index}" for index in borders)
    return EdgeFile(chain(("NEG", "t0", "t1"), inputs="t0", outputs=outputs))


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ((1, 0), "output 't0' is an input, too"),
        ((1, 1), "output 't1' is listed 2 times"),
        ((1, 2), "output 't2' is computed by no op"),
    ],
)
def test_outputs_that_it_does_not_write_are_refused(outputs: tuple[int, ...], said: str) -> None:
    """What stands in the buffer of such an output is whatever stood in that memory before."""
    edge = _alias(outputs)
    with pytest.raises(RuntimeError) as caught:
        edge.runner("compiled")
    lines = str(caught.value).splitlines()
    assert lines[0] == "the compiled runtime cannot load the .tflite file"
    assert said in lines[2]
    inputs = {edge.signature.inputs[0].name: X}
    if outputs == (1, 2):
        assert "an output that no op of the file computes" in lines[1]
        with pytest.raises(RuntimeError, match="an output that no op of the file computes"):
            edge.runner("xnnpack").run(inputs)
    else:
        assert "runtime='xnnpack'" in lines[1]
        expected = [X if index == 0 else -X for index in outputs]
        _assert_same(edge.runner("xnnpack").run(inputs), expected)


@pytest.mark.parametrize("outputs", [(1, 0), (1, 1), (1, 2)])
def test_such_outputs_are_still_left_unwritten(outputs: tuple[int, ...]) -> None:
    """With ai-edge-litert 2.3.0. Once this fails, what is refused above can run."""
    from ai_edge_litert.compiled_model import CompiledModel

    edge = _alias(outputs)
    model = CompiledModel.from_buffer(bytes(edge.graph.buffer[:]))
    ins, outs = model.create_input_buffers(0), model.create_output_buffers(0)
    ins[0].write(X)
    for buffer in outs:
        buffer.write(np.full((1, 4), 1234, np.float32))
    model.run_by_index(0, ins, outs)
    got = [buffer.read(4, np.float32).tolist() for buffer in outs]
    assert [1234.0] * 4 in got


@pytest.mark.parametrize(("dynamic", "length"), [(True, 1), (False, 2)])
def test_a_shape_that_depends_on_values_is_refused(dynamic: bool, length: int) -> None:
    """Where the interpreter gives two rows, it would give the buffer as it was made."""
    mask = {"dtype": "bool", "shape": (4,), "signature": (-1,) if dynamic else None}
    found = {"dtype": "int64", "shape": (length, 1), "signature": (-1, 1) if dynamic else None}
    edge = EdgeFile(one_op("WHERE", [mask], [found]))
    inputs = {edge.signature.inputs[0].name: np.array([True, False, True, False])}
    assert edge.runner("xnnpack").run(inputs)[0].tolist() == [[0], [2]]
    with pytest.raises(RuntimeError, match="the compiled runtime cannot") as caught:
        edge.runner("compiled").run(inputs)
    assert "shape of an output may not depend on values" in str(caught.value)


@pytest.mark.parametrize(("stored", "dynamic"), [((1, 1), True), ((2, 2), False), ((4, 1), False)])
def test_a_shape_given_as_values_is_refused(stored: tuple[int, int], dynamic: bool) -> None:
    """RESHAPE to what comes in: a run with room for as many bytes passes, with a stale shape."""
    x, shape = {"dtype": "float32", "shape": (4,)}, {"dtype": "int32", "shape": (2,)}
    made = {"dtype": "float32", "shape": stored, "signature": (-1, -1) if dynamic else None}
    edge = EdgeFile(one_op("RESHAPE", [x, shape], [made]))
    inputs = {"t0": X[0], "t1": np.array([2, 2], np.int32)}
    _assert_same(edge.runner("xnnpack").run(inputs), [X.reshape(2, 2)])
    with pytest.raises(RuntimeError, match="may not depend on values"):
        edge.runner("compiled").run(inputs)


def test_an_inner_shape_may_depend_on_values() -> None:
    """Only the borders need their memory beforehand."""
    line = {"dtype": "float32", "shape": (4,)}
    ops = (
        ("RESHAPE", "x shape", "inner"),
        ("RESHAPE", "inner flat", "y", "ReshapeOptions", {"newShape": [4]}),
    )
    tensors = {"x": line, "y": line, "shape": {"dtype": "int32", "shape": (2,)}}
    tensors |= {"inner": {"shape": (1, 1), "signature": (-1, -1)}, "flat": constant([4], "int32")}
    edge = EdgeFile(chain(*ops, inputs="x shape", outputs="y", **tensors))
    for given in ([2, 2], [4, 1]):
        inputs = {"x": X[0], "shape": np.array(given, np.int32)}
        _assert_same(edge.runner("compiled").run(inputs), [X[0]])


def _flatten() -> EdgeFile:
    """Any number of 2×2 images, flattened as Keras does: by the batch's length, read by SHAPE."""
    content = chain(
        ("SHAPE", "x", "shape", "ShapeOptions", {"outType": schema.TensorType.INT32}),
        (
            "STRIDED_SLICE",
            "shape zero one one",
            "batch",
            "StridedSliceOptions",
            {"shrinkAxisMask": 1},
        ),
        ("PACK", "batch four", "rows", "PackOptions", {"valuesCount": 2}),
        ("RESHAPE", "x rows", "flat"),
        ("FULLY_CONNECTED", "flat weight -", "y", "FullyConnectedOptions"),
        inputs="x",
        outputs="y",
        x={"shape": (1, 2, 2), "signature": (-1, 2, 2)},
        shape={"dtype": "int32", "shape": (3,)},
        batch={"dtype": "int32", "shape": ()},
        rows={"dtype": "int32", "shape": (2,)},
        flat={"signature": (-1, 4)},
        y={"signature": (-1, 4)},
        zero=constant([0], "int32"),
        one=constant([1], "int32"),
        four=constant(4, "int32"),
        weight=constant(np.eye(4)),
    )
    return EdgeFile(content)


def test_a_batch_that_is_read_by_shape_is_refused() -> None:
    """It would write the second row past the buffer; the file's own length is sound."""
    edge = _flatten()
    for batch in (1, 3):
        image = np.arange(batch * 4, dtype=np.float32).reshape(batch, 2, 2)
        runner = edge.runner("xnnpack")
        _assert_same(runner.run({"x": image}), [image.reshape(batch, 4)])
    runner = edge.runner("compiled")
    for _ in range(2):
        with pytest.raises(
            RuntimeError,
            match=r"(?s)reads by SHAPE.*'y' has room for \[1, 4\], and becomes \[3, 4\]",
        ):
            runner.run({"x": image})
        _assert_same(runner.run({"x": image[:1]}), [image[:1].reshape(1, 4)])


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_tensor_without_elements_is_refused(dynamic: bool) -> None:
    """The interpreter takes it; and a dynamic file goes on with the next sample."""
    border = {"dtype": "float32", "shape": (2 if dynamic else 0, 4)}
    if dynamic:
        border["signature"] = (-1, 4)
    edge = EdgeFile(one_op("NEG", [border], [border]))
    empty = {edge.signature.inputs[0].name: np.empty((0, 4), np.float32)}
    _assert_same(edge.runner("xnnpack").run(empty), [np.empty((0, 4), np.float32)])
    with pytest.raises(RuntimeError, match="supports no input or output without elements"):
        edge.runner("compiled").run(empty)
    if dynamic:
        name = edge.signature.inputs[0].name
        for value in (X, np.repeat(X, 3, 0)):
            _assert_same(edge.runner("compiled").run({name: value}), [-value])


@pytest.mark.parametrize("name", ["", "same"])
def test_a_file_of_equal_names_needs_a_signature(name: str) -> None:
    """A stripped file, for instance: its outputs' shapes would be those of the last one."""
    ops = ("NEG", "x", "y"), ("RESHAPE", "x shape", "z", "ReshapeOptions", {"newShape": [2, 2]})
    tensors: dict[str, Any] = {"z": {"shape": (2, 2)}, "shape": constant([2, 2], "int32")}
    tensors = {each: {**tensors.get(each, {}), "name": name} for each in ("x", "y", "z", "shape")}

    def edge(key: str | None) -> EdgeFile:
        return EdgeFile(chain(*ops, inputs="x", outputs="y z", key=key, **tensors))

    expected = [-X, X.reshape(2, 2)]
    stripped = edge(None)
    inputs = {stripped.signature.inputs[0].name: X}
    _assert_same(stripped.runner("xnnpack").run(inputs), expected)
    with pytest.raises(RuntimeError, match="3 inputs or outputs are called") as caught:
        stripped.runner("compiled")
    assert "write it with a signature" in str(caught.value)
    _assert_same(edge("main").runner("compiled").run({"x": X}), expected)


def test_a_signature_that_leaves_an_output_out_is_refused() -> None:
    """Its own reader counts them; the interpreter does not."""
    ops = ("NEG", "x", "y"), ("ABS", "x", "z")
    model = unpack(chain(*ops, inputs="x", outputs="y z", key="main"))
    del model.signatureDefs[0].outputs[0]
    edge = EdgeFile(pack(model))
    _assert_same(edge.runner("xnnpack").run({"x": X}), [-X, np.abs(X)])
    with pytest.raises(RuntimeError, match="reads files more strictly"):
        edge.runner("compiled")


_EXIT = """
import sys
import numpy as np
from pytest_edgeq.runtimes.edge import EdgeFile

edge = EdgeFile(sys.argv[1])
inputs = {
    each.name: np.zeros(each.tensor.shape, each.tensor.dtype) for each in edge.signature.inputs
}
edge.runner("compiled").run(inputs)
print("the end", file=sys.stderr)
"""

_EXIT_UPSTREAM = """
import sys
from ai_edge_litert.environment import Environment
from ai_edge_litert.tensor_buffer import TensorBuffer
import numpy as np

if sys.argv[2] == "environment":
    environment = Environment.create(dispatch_library_path="none", compiler_plugin_path="none")
else:
    TensorBuffer.create_from_host_memory(np.zeros(1, np.int8)).get_tensor_details()
print("the end", file=sys.stderr)
"""


def _stderr_at_exit(code: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, str(FILES[0]), *args],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        timeout=100,
    )
    return done.stderr.partition("the end\n")[2]


def test_nothing_is_written_when_python_exits() -> None:
    """Environments are not destroyed, or in silence."""
    assert _stderr_at_exit(_EXIT) == ""


@pytest.mark.parametrize("made", ["environment", "buffer"])
def test_an_environment_still_writes_when_python_exits(made: str) -> None:
    """
    Of ai-edge-litert 2.3.0: its own log, whose level cannot be set.

    Where one of both passes in silence, `_environment` no longer has to keep the first, or
    `_close_stderr_behind_python` is not needed.
    """
    assert "DestroyAccelerator" in _stderr_at_exit(_EXIT_UPSTREAM, made)
