"""Ops that stand alone compute what they do in the whole file, on any runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fixtures.tflite import make
from fixtures.tflite.writer import FileWriter, GraphWriter, chain, composite, constant
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.cut import Cut, cut_ops, grouped_ops
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.subgraph import Tensor
from tests.bench.speed.kernels_of_arm import drawn

Arrays = dict[str, npt.NDArray[Any]]
FILES = sorted(
    path
    for path in make.CONVERTED.glob("*.tflite")
    if "weight_only" not in path.name and ".float." not in path.name
)


def _run(edge: EdgeFile, cut: Cut, runtime: str, inputs: Arrays) -> tuple[Any, Any]:
    """What the ops gave in the whole file, and what they give alone."""
    kept = edge.runner("builtin", keep=True)
    kept.run(inputs)
    given = {name: kept.tensor(tensor) for name, (_, tensor) in cut.inputs.items()}
    expected = [kept.tensor(tensor) for _, tensor in cut.outputs]
    return expected, EdgeFile(cut.content).runner(runtime).run(given)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_op_gives_what_it_gave(path: Any) -> None:
    """On the same kernels bit by bit, and none is left out."""
    edge = EdgeFile(path)
    cut = cut_ops(edge.graph, 0)

    expected, got = _run(edge, cut, "builtin", drawn(edge, 0))

    for (op, _), one, two in zip(cut.outputs, expected, got, strict=True):
        np.testing.assert_array_equal(two, one, err_msg=op.name, strict=True)
    assert cut.left_out == ()
    assert {op.index for op, _ in cut.outputs} == {op.index for op in edge.graph.ops}


@pytest.mark.parametrize("runtime", ["xnnpack", "reference", "compiled"])
def test_it_runs_on_every_runtime(runtime: str) -> None:
    """Codes are within 1 LSB, where the whole file's may be further apart."""
    edge = EdgeFile(make.CONVERTED / "nested.int8.tflite")
    cut = cut_ops(edge.graph, 0)

    expected, got = _run(edge, cut, runtime, drawn(edge, 0))

    for one, two in zip(expected, got, strict=True):
        assert one.dtype == two.dtype == np.int8
        assert np.abs(one.astype(int) - two).max() <= 1


def test_weights_behind_a_dequantize_stay_with_their_op() -> None:
    """As kernels treat them apart from activations; the DEQUANTIZE is no op to look at."""
    edge = EdgeFile(make.CONVERTED / "nested.recipe_weight_only_wi8_afp32.tflite")
    cut = cut_ops(edge.graph, 0)
    from_weights = [
        op
        for op in edge.graph.ops
        if op.name == "DEQUANTIZE" and edge.graph.tensor(op, op.inputs[0]).is_constant
    ]

    expected, got = _run(edge, cut, "xnnpack", drawn(edge, 0))

    assert from_weights
    assert not {op.index for op, _ in cut.outputs} & {op.index for op in from_weights}
    assert len(expected) == len(edge.graph.ops) - len(from_weights)
    for one, two in zip(expected, got, strict=True):
        np.testing.assert_allclose(two, one, rtol=0, atol=2e-6)  # 16 units of 2^-24, values to 2


def test_what_is_computed_of_constants_is_an_op_to_look_at() -> None:
    """Else its error would be that of the op which takes it, as of a table of positions."""
    ops = (
        ("MUL", "table table", "squared"),
        ("RESHAPE", "squared shape", "flat"),
        ("ADD", "x flat", "y"),
    )
    tensors = {"table": constant([[3] * 4]), "shape": constant([1, 4], "int32")}
    graph = OpGraph.read(chain(*ops, inputs="x", outputs="y", **tensors))
    index = {tensor.name: tensor.index for tensor in graph.subgraphs[0].tensors}

    cut = cut_ops(graph, 0)

    assert [op.name for op, _ in cut.outputs] == ["MUL", "RESHAPE", "ADD"]
    assert {at for _, at in cut.inputs.values()} == {
        index[each] for each in ("squared", "flat", "x")
    }
    values = {name: np.full((1, 4), tensor, np.float32) for name, (_, tensor) in cut.inputs.items()}
    made = EdgeFile(cut.content).runner("builtin").run(values)
    assert [value[0, 0] for value in made] == [9, index["squared"], index["x"] + index["flat"]]


def test_a_tensor_that_an_op_takes_twice_is_one_input() -> None:
    """As of x · x; and a tensor that two ops read is an input of each."""
    ops = ("MUL", "x x", "y"), ("ADD", "x y", "z")
    cut = cut_ops(OpGraph.read(chain(*ops, inputs="x", outputs="z")), 0)

    assert [(op.index, at) for op, at in cut.inputs.values()] == [(0, 0), (1, 0), (1, 1)]
    values = {key: np.full((1, 4), 3 + at, np.float32) for key, (_, at) in cut.inputs.items()}
    made = EdgeFile(cut.content).runner("builtin").run(values)
    assert [value[0, 0] for value in made] == [9, 7]


@pytest.mark.parametrize(
    "recipe", ["dynamic_wi4_afp32", "weight_only_wi4_afp32", "static_wi8_ai16", "float16"]
)
def test_constants_of_every_kind_come_along(by_recipe: Callable[[str], bytes], recipe: str) -> None:
    """Two values a byte, one scale a channel, 64-bit biases, float16."""
    edge = EdgeFile(by_recipe(recipe))
    cut = cut_ops(edge.graph, 0)

    expected, got = _run(edge, cut, "builtin", drawn(edge, 0))

    for (op, _), one, two in zip(cut.outputs, expected, got, strict=True):
        np.testing.assert_array_equal(two, one, err_msg=op.name, strict=True)


def test_scales_of_blocks_come_along(by_recipe: Callable[[str], bytes]) -> None:
    """They stand in a tensor of their own, which has another index here."""
    edge = EdgeFile(by_recipe("dynamic_wi4b32_afp32"))
    graph = OpGraph.read(cut_ops(edge.graph, 0).content)

    blocks = [t for t in graph.subgraphs[0].tensors if t.block_scales >= 0]
    before = [t for t in edge.graph.subgraphs[0].tensors if t.block_scales >= 0]

    def scales(of: OpGraph, tensors: list[Tensor]) -> list[bytes]:
        holders = (of.subgraphs[0].tensors[tensor.block_scales] for tensor in tensors)
        return sorted(bytes(of.constant(holder)) for holder in holders)

    assert scales(graph, blocks) == scales(edge.graph, before) != []


def test_constants_stand_at_multiples_of_sixteen_bytes(by_recipe: Callable[[str], bytes]) -> None:
    """As the schema demands, and kernels of some processors need."""
    graph = OpGraph.read(cut_ops(OpGraph.read(by_recipe("static_wi8_ai8")), 0).content)
    start = np.frombuffer(graph.buffer, np.uint8).ctypes.data
    tensors = [t for t in graph.subgraphs[0].tensors if t.is_constant]

    places = {graph.constant(tensor).ctypes.data - start for tensor in tensors}

    assert len(places) > 1
    assert all(place % 16 == 0 for place in places)


def test_any_length_is_cut_at_the_length_that_ran() -> None:
    """A file stores 1 for it, which a convolution over 3 × 3 refuses."""
    free = {"shape": (1, 1, 1, 1), "signature": (1, -1, -1, 1)}
    tensors = {"begin": constant([0, 2, 2, 0], "int32"), "size": constant([1, -1, -1, 1], "int32")}
    slicing = ("SLICE", "x begin size", "y", "SliceOptions")
    whole = OpGraph.read(chain(slicing, inputs="x", outputs="y", x=free, y=free, **tensors))
    value = np.arange(16, dtype=np.float32).reshape(1, 4, 4, 1)

    cut = cut_ops(whole, 0, lambda _: value.shape)
    [got] = EdgeFile(cut.content).runner("builtin").run({"in_0_0": value})

    assert OpGraph.read(cut.content).signatures[0].inputs[0].tensor.shape == value.shape
    assert got.ravel().tolist() == [10, 11, 14, 15]


def _with_state(graph: GraphWriter, x: int, y: int) -> None:
    state = graph.tensor("float32", (1, 4))
    graph.raw.tensors[state].isVariable = True
    graph.op("ADD", [x, state], [y], "AddOptions")


def _with_subgraphs(graph: GraphWriter, x: int, y: int) -> None:
    graph.file.graph("nothing")
    graph.op("CALL_ONCE", [], [], "CallOnceOptions", initSubgraphIndex=1)
    graph.op("ABS", [x], [y], "AbsOptions")


def _with_resource(graph: GraphWriter, x: int, y: int) -> None:
    handle = graph.tensor("resource", ())
    graph.op("VAR_HANDLE", [], [handle], "VarHandleOptions")
    graph.op("ASSIGN_VARIABLE", [handle, x], [], "AssignVariableOptions")
    graph.op("READ_VARIABLE", [handle], [y], "ReadVariableOptions")


def _with_chance(graph: GraphWriter, x: int, y: int) -> None:
    shape = graph.tensor("int32", (2,), data=np.array([1, 4], np.int32))
    noise = graph.tensor("float32", (1, 4))
    graph.op("RANDOM_UNIFORM", [shape], [noise], "RandomOptions")
    graph.op("ADD", [x, noise], [y], "AddOptions")


@pytest.mark.parametrize(
    ("write", "causes"),
    [
        (_with_state, {"ADD": "it keeps state from run to run"}),
        (_with_subgraphs, {"CALL_ONCE": "it runs other subgraphs"}),
        (
            _with_resource,
            dict.fromkeys(
                ("VAR_HANDLE", "ASSIGN_VARIABLE", "READ_VARIABLE"), "it keeps state from run to run"
            ),
        ),
        (_with_chance, {"RANDOM_UNIFORM": "it returns other values in every run"}),
    ],
)
def test_what_cannot_stand_alone_is_left_out(
    write: Callable[[GraphWriter, int, int], None], causes: dict[str, str]
) -> None:
    """With a reason; what comes behind takes its result as an input."""
    file = FileWriter()
    graph = file.graph()
    x, y = graph.tensor("float32", (1, 4)), graph.tensor("float32", (1, 4))
    write(graph, x, y)
    z = graph.tensor("float32", (1, 4))
    graph.op("NEG", [y], [z], "NegOptions")
    graph.borders([x], [z])

    cut = cut_ops(OpGraph.read(file.content()), 0)

    assert {op.name: cause for op, cause in cut.left_out} == causes
    assert cut.inputs[list(cut.inputs)[-1]][1] == y
    given = {name: np.ones((1, 4), np.float32) for name in cut.inputs}
    assert EdgeFile(cut.content).runner("builtin").run(given)[-1].tolist() == [[-1, -1, -1, -1]]


def test_a_composite_stands_alone_with_the_ops_that_it_consists_of() -> None:
    """Also one in another one, with constants of their own."""
    file = FileWriter()
    outer = composite("outer", "x", "y", 1)
    file.graph().fill(outer, ("NEG", "y", "z"), inputs="x", outputs="z")
    add = ("ADD", "i two", "o", "AddOptions")
    two = constant(np.full((1, 4), 2.0))
    file.graph("outer").fill(composite("inner", "x", "i", 2), add, inputs="x", outputs="o", two=two)
    file.graph("inner").fill(("ABS", "x", "y"), inputs="x", outputs="y")

    cut = cut_ops(OpGraph.read(file.content()), 0)

    assert [op.name for op in cut.ops] == ["STABLEHLO_COMPOSITE", "NEG"]
    given = {name: np.full((1, 4), -3, np.float32) for name in cut.inputs}
    one, other = EdgeFile(cut.content).runner("builtin").run(given)
    assert one.tolist() == [[5, 5, 5, 5]]
    assert other.tolist() == [[3, 3, 3, 3]]


def test_a_loop_that_passes_a_tensor_through_is_grouped() -> None:
    """As a Keras LSTM does with its input: interpreters have no memory for that output."""
    file, number = FileWriter(), {"dtype": "int32", "shape": ()}
    parts = {"condSubgraphIndex": 1, "bodySubgraphIndex": 2}
    loop = ("WHILE", "zero x x", "count sum same", "WhileOptions", parts)
    zero, one, three = (constant(np.array(each), "int32") for each in (0, 1, 3))
    file.graph().fill(loop, ("NEG", "sum", "y"), inputs="x", outputs="y", zero=zero, count=number)
    less, truth = ("LESS", "n three", "goes_on", "LessOptions"), {"dtype": "bool", "shape": ()}
    tensors: dict[str, Any] = {"n": number, "three": three, "goes_on": truth}
    file.graph().fill(less, inputs="n sum x", outputs="goes_on", **tensors)
    steps = ("ADD", "n one", "next", "AddOptions"), ("ADD", "sum x", "more", "AddOptions")
    tensors = {"n": number, "one": one, "next": number}
    file.graph().fill(*steps, inputs="n sum x", outputs="next more x", **tensors)
    edge = EdgeFile(file.content())
    kept = edge.runner("builtin", keep=True)

    [made] = kept.run({edge.signature.inputs[0].name: np.ones((1, 4), np.float32)})
    groups = grouped_ops(edge.graph, edge.graph.subgraphs[0].ops, lambda at: kept.tensor(at).shape)

    assert made.tolist() == [[-4] * 4]
    assert [[op.name for op in group] for group in groups] == [["WHILE", "NEG"]]


@pytest.mark.parametrize(("index", "cause"), [(1, "itself"), (7, "other subgraphs")])
def test_a_damaged_composite_is_left_out(index: int, cause: str) -> None:
    """One that runs itself would run for ever, one that runs nothing not at all."""
    file = FileWriter()
    file.graph().fill(composite("outer", "x", "y", 1), inputs="x", outputs="y")
    file.graph("outer").fill(composite("outer", "x", "y", index), inputs="x", outputs="y")

    cut = cut_ops(OpGraph.read(file.content()), 0)

    assert [why for _, why in cut.left_out] == [f"it runs {cause}"]
