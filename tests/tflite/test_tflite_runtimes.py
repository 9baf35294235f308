"""Running files: output order, shapes, and refusals that name the op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fixtures.models import net
from fixtures.tflite.kinds import free_shapes
from fixtures.tflite.writer import FileWriter, chain, constant, one_op, pack, unpack
from pytest_edgeq import Edgeq
from pytest_edgeq.compare.reference import module_tree
from pytest_edgeq.errors import UnrunnableError
from pytest_edgeq.names import RUNTIMES
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.graph import OpGraph
from tests.tflite.one_op_files import write

Floats = np.ndarray[Any, np.dtype[np.float32]]
X = np.array([[1, -2, 3, -4]], np.float32)

# The interpreter's own; and those that take every file of these tests.
INTERPRETERS = RUNTIMES[:3]
LITERT = RUNTIMES[:4]


def _unary(key: str | None = "main", dynamic: bool = False) -> bytes:
    """Give twelve outputs, of which output i adds i."""
    free = {"signature": (-1, 4) if dynamic else None}
    outputs = " ".join(f"output_{i}" for i in range(12))
    tensors = dict.fromkeys(["x", *outputs.split()], free)
    tensors |= {f"addend{i}": constant([i]) for i in range(12)}
    ops = [("ADD", f"x addend{i}", f"output_{i}", "AddOptions") for i in range(12)]
    return chain(*ops, inputs="x", outputs=outputs, key=key, **tensors)


@pytest.mark.parametrize("runtime", LITERT)
@pytest.mark.parametrize("key", ["main", None])
def test_twelve_outputs_come_in_the_models_order(runtime: str, key: str | None) -> None:
    """Not in the runner's alphabetical one, where output_10 comes before output_2."""
    edge = EdgeFile(_unary(key))
    values = edge.decode(edge.run(["x"], [X], runtime))
    assert [float(value[0, 0]) for value in values] == [1.0 + i for i in range(12)]


@pytest.mark.parametrize("runtime", INTERPRETERS)
@pytest.mark.parametrize("signature", [True, False])
def test_one_output_twice_and_an_input_as_output(runtime: str, signature: bool) -> None:
    """Each is given, in its place."""
    file = FileWriter()
    graph = file.graph()
    x, y = graph.tensor("float32"), graph.tensor("float32")
    graph.op("NEG", [x], [y])
    graph.borders([x], [y, x, y])
    if signature:
        file.signature("main", [("x", x)], [("a", y), ("b", x), ("c", y)])
    edge = EdgeFile(file.content())
    values = edge.run([edge.signature.inputs[0].name], [X], runtime)
    assert [value.tolist() for value in values] == [(-X).tolist(), X.tolist(), (-X).tolist()]


@pytest.mark.parametrize("runtime", LITERT)
def test_results_are_the_callers_own(runtime: str) -> None:
    """The next sample must not change what the last one gave."""
    edge = EdgeFile(_unary())
    first = edge.run(["x"], [X], runtime)[0]
    kept = first.copy()
    edge.run(["x"], [10 * X], runtime)
    assert np.array_equal(first, kept)


@pytest.mark.parametrize("runtime", LITERT)
def test_a_stored_shape_that_no_kernel_takes(runtime: str) -> None:
    """[1, 1] of a layer of 16 inputs: it is allocated by the sample's shape."""
    kind = free_shapes()
    edge = EdgeFile(kind.content)
    x, again = kind.inputs[0][0], kind.inputs[1][0][:2]

    made = [edge.decode(edge.run(["x"], [each], runtime))[0] for each in (x, again)]

    assert [each.shape for each in made] == [(3, 32), (2, 32)]
    assert np.abs(made[0] - kind.reference(x)).max() < 0.1


@pytest.mark.parametrize("runtime", LITERT)
@pytest.mark.parametrize("key", ["main", None])
def test_dynamic_dimensions_take_any_length(runtime: str, key: str | None) -> None:
    """The interpreter is sized again when the length changes, and back."""
    edge = EdgeFile(_unary(key, dynamic=True))
    for rows in (1, 3, 1, 2, 2):
        values = edge.run(["x"], [np.repeat(X, rows, 0)], runtime)
        assert {value.shape for value in values} == {(rows, 4)}
        assert values[11].tolist() == np.repeat(X + 11, rows, 0).tolist()


@pytest.mark.parametrize("shape", [(2, 4), (4,), (1, 4, 1), (4, 1), (1, 5), (), (0, 4)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    """The interpreter would size itself to whatever comes, without a word."""
    for key in ("main", None):
        with pytest.raises(ValueError, match=r"expects shape \[1, 4\], got"):
            EdgeFile(_unary(key)).run(["x"], [np.zeros(shape, np.float32)], "builtin")
    if len(shape) != 2 or shape[1] != 4:
        with pytest.raises(ValueError, match=r"expects shape \[-1, 4\], got"):
            EdgeFile(_unary(dynamic=True)).run(["x"], [np.zeros(shape, np.float32)], "builtin")


def _subtract(names: tuple[str, str] | None) -> EdgeFile:
    a, b = names or ("first", "second")
    key = None if names is None else "main"
    content = chain(("SUB", f"{a} {b}", "y", "SubOptions"), inputs=f"{a} {b}", outputs="y", key=key)
    model = unpack(content)
    for each in model.signatureDefs:
        each.inputs.reverse()  # a signature lists its names in any order
    return EdgeFile(pack(model))


def test_inputs_are_matched_by_name() -> None:
    """Where the file knows the names, their order does not count."""
    edge = _subtract(("a", "b"))
    a, b = X, np.ones_like(X)
    for names, arrays in ((["a", "b"], [a, b]), (["b", "a"], [b, a])):
        assert edge.run(names, arrays, "builtin")[0].tolist() == (a - b).tolist()


def test_inputs_are_matched_by_position_where_no_name_is_known() -> None:
    """A loaded file, fed with positional arguments."""
    for edge in (_subtract(None), _subtract(("left", "right"))):
        assert edge.run(["args_0", "args_1"], [X, X + 1], "builtin")[0].tolist() == [[-1] * 4]


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c"], ["b", "c"], ["args_0"]])
def test_inputs_that_do_not_match_are_refused(names: list[str]) -> None:
    """Too few, too many, and names that agree in part: `b` would be fed to `a`."""
    with pytest.raises(ValueError, match=r"the file has the inputs \['a', 'b'\], got"):
        _subtract(("a", "b")).encode(names, [X] * len(names))


@pytest.mark.parametrize("runtime", LITERT)
def test_the_first_signature_is_run_wherever_its_subgraph_stands(runtime: str) -> None:
    """The interpreter numbers tensors by subgraph: those of another must not be fed."""
    file = FileWriter()
    for op in ("NEG", "ABS"):
        file.graph(op).fill((op, "x", "y"), inputs="x", outputs="y")
    file.signature("abs", [("x", 0)], [("y", 1)], subgraph=1)
    file.signature("neg", [("x", 0)], [("y", 1)], subgraph=0)
    whole = EdgeFile(file.content())
    for key, expected in (("abs", np.abs(X)), ("neg", -X), ("abs", np.abs(X))):
        edge = whole.at(key)
        assert edge.signature.key == key
        assert edge.run(["x"], [X], runtime)[0].tolist() == expected.tolist()


def _softmax(scale: float) -> bytes:
    return write("SOFTMAX", ["int8"] * 2, [(0.1, 0), (scale, -128)])


@pytest.mark.parametrize("runtime", ["builtin", "compiled"])
def test_a_softmax_with_another_scale_is_refused_with_the_reason(runtime: str) -> None:
    """The file converts, and no kernel takes it; we say which op and what to do."""
    assert EdgeFile(_softmax(1 / 256)).runner(runtime)
    with pytest.raises(RuntimeError) as caught:
        EdgeFile(_softmax(1 / 128)).runner(runtime)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"the {runtime} runtime cannot load the .tflite file: SOFTMAX #0"
    assert "expected the kernel's scale 0.00390625, got 0.0078125 (2 ×)" in lines[1]
    assert "FixedQParamsQuantizationSpec(scale=1/256" in lines[2]
    assert lines[3].startswith("the kernels said: ")


def test_a_kernel_that_hands_codes_on_says_which_scales_differ() -> None:
    """The kernels' own words hold numbers that change from run to run: floats, printed by %d."""
    edge = EdgeFile(write("REDUCE_MAX", ["int8"] * 2, [(0.1, 0), (0.2, 0)]))
    texts = []
    for runtime in ("builtin", "reference"):
        with pytest.raises(UnrunnableError) as caught:
            edge.runner(runtime).run({edge.signature.inputs[0].name: np.zeros((2, 8), np.int8)})
        texts.append(str(caught.value))
        lines = texts[-1].splitlines()
        assert lines[0] == f"the {runtime} runtime cannot run the .tflite file: REDUCE_MAX #0"
        assert lines[1].startswith(
            "cause: its output: expected input 0's scale 0.1, got 0.2 (2 ×); its "
        )
        assert "SharedQuantizationSpec" in lines[2]
        assert "scale of the input 0.1, of the output 0.2" in lines[3]
    assert texts[0].replace("builtin", "reference") == texts[1]


def test_what_xnnpack_refuses_is_told_by_op(by_recipe: Callable[[str], bytes]) -> None:
    """The delegate names itself as the node; int2 blocks run on no XNNPACK of today."""
    edge = EdgeFile(by_recipe("dynamic_wi2b32_afp32"))
    with pytest.raises(RuntimeError) as caught:
        edge.runner("xnnpack")
    first, second = str(caught.value).splitlines()[:2]
    assert first.startswith("the xnnpack runtime cannot load the .tflite file: FULLY_CONNECTED #")
    assert "choose another runtime" in second


def test_an_op_that_xnnpack_refuses_without_a_word_is_found(
    by_recipe: Callable[[str], bytes],
) -> None:
    """A tensor that is zero while calibrating gets such a scale; XNNPACK says not even which."""
    model = unpack(by_recipe("static_wi8_ai8"))
    graph = OpGraph.read(pack(model))
    assert EdgeFile(pack(model)).runner("xnnpack")
    layer = next(op for op in graph.ops if op.name == "FULLY_CONNECTED")
    model.subgraphs[0].tensors[layer.outputs[0]].quantization.scale = [3.9e-12]
    edge = EdgeFile(pack(model))
    assert edge.runner("builtin")
    for runtime in ("xnnpack", "compiled"):
        with pytest.raises(UnrunnableError) as caught:
            edge.runner(runtime)
        first, cause, said = str(caught.value).splitlines()
        assert first.startswith(f"the {runtime} runtime cannot load the .tflite file: ")
        assert first.endswith(f": FULLY_CONNECTED #{layer.index}")
        assert cause.startswith("cause: XNNPACK makes no kernel for scales that differ so much (")
        assert ", 3.9e-12 of output 0). One next to 0 is that of a tensor that was zero" in cause
        assert cause.endswith("but a device that runs XNNPACK will refuse it.")
        assert said.startswith("the kernels said: failed to create XNNPACK runtime; Node number")


def test_ops_of_two_subgraphs_with_one_number_are_not_confused() -> None:
    """Kernels number the ops of each subgraph from 0: where two fit, only the number is told."""
    model = unpack(_softmax(1 / 128))
    words = net(lambda self, ids: torch.sin(self.words(ids)), words=nn.Embedding(10, 4))
    root = f"{type(words).__module__}.{type(words).__qualname__}"
    model.subgraphs[0].tensors[1].name = f"{root}/torch.nn.modules.sparse.Embedding_words;"
    modules = module_tree(words)
    with pytest.raises(RuntimeError, match=r"file: SOFTMAX #0 \(words\)\n"):
        EdgeFile(pack(model), modules=modules).runner("builtin")
    model.subgraphs.append(model.subgraphs[0])
    with pytest.raises(RuntimeError, match=r"file: SOFTMAX #0\n"):
        EdgeFile(pack(model), modules=modules).runner("builtin")


def test_complex_numbers_inside_of_a_file_are_compared_as_pairs() -> None:
    """As of a spectrogram: RESHAPE stands between RFFT2D and COMPLEX_ABS."""
    spectrum = {"dtype": "complex64", "shape": (1, 1, 9)}
    content = chain(
        ("RFFT2D", "x length", "spectrum", "Rfft2dOptions"),
        ("RESHAPE", "spectrum shape", "row"),
        ("COMPLEX_ABS", "row", "y"),
        inputs="x",
        outputs="y",
        x={"shape": (1, 1, 16)},
        length=constant([1, 16], "int32"),
        spectrum=spectrum,
        shape=constant([1, 9], "int32"),
        row=spectrum | {"shape": (1, 9)},
        y={"shape": (1, 9)},
    )
    maker = Edgeq(cache_dir=None)
    samples = [np.arange(16 * n, 16 * n + 16, dtype=np.float32).reshape(1, 1, 16) for n in (1, 2)]
    assert maker.localize(maker.load(content, float_tflite=content), samples).culprit is None


@pytest.mark.parametrize("runtime", LITERT)
def test_a_failing_run_is_told_as_such(runtime: str) -> None:
    """GATHER of a row that is not there: the kernels fail at the sample, not at loading."""
    table = {"dtype": "float32", "shape": (4, 1), "data": np.arange(4, dtype=np.float32)[:, None]}
    ids, y = {"dtype": "int32", "shape": (1,)}, {"dtype": "float32", "shape": (1, 1)}
    edge = EdgeFile(one_op("GATHER", [table, ids], [y], "GatherOptions"))
    name = edge.signature.inputs[0].name
    assert edge.run([name], [np.array([3])], runtime)[0].tolist() == [[3]]
    with pytest.raises(RuntimeError, match="gather index out of bounds") as caught:
        edge.run([name], [np.array([4])], runtime)
    assert str(caught.value).startswith(f"the {runtime} runtime cannot run the .tflite file: GATH")
    assert "\ncause: an index in the inputs, such as a token id, is beyond" in str(caught.value)
    assert edge.run([name], [np.array([2])], runtime)[0].tolist() == [[2]]
    with pytest.raises(RuntimeError, match="gather index out of bounds") as again:
        edge.run([name], [np.array([4])], runtime)
    assert str(again.value) == str(caught.value)
