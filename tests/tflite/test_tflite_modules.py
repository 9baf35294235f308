"""
Module paths of ops, against a truth that is found without looking at names.

An op with weights is owned by the module whose parameter its constant resembles, value by value and
up to the order of axes, a scale a channel and rounding; other ops by `stacks.ORDERS`. What is told
must be the owner or None: never a guess.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import numpy.typing as npt
import pytest
import torch

from fixtures.models import ResidualNet, SmallModel, TwinLists, Under_Scored_Net_1, seeded
from fixtures.tflite import make, stacks
from fixtures.tflite.writer import FileWriter
from pytest_edgeq import litert
from pytest_edgeq.compare.reference import module_tree
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.modules import ModuleNode, ModuleTree
from pytest_edgeq.tflite.op_dtypes import OpDtypeMap, OpDtypes
from pytest_edgeq.tflite.roles import roles_of
from pytest_edgeq.tflite.subgraph import Op

FILES = sorted(path.name for path in make.CONVERTED.glob("*.tflite"))
Floats = npt.NDArray[np.float64]


@functools.cache
def _model(name: str) -> torch.nn.Module:
    return stacks.build(name)


def _told(file: str) -> list[tuple[OpGraph, Op, OpDtypes]]:
    graph = OpGraph.read(make.CONVERTED / file)
    entries = OpDtypeMap(graph, module_tree(_model(file.split(".")[0])))
    return [(graph, op, entry) for op, entry in zip(graph.ops, entries, strict=True)]


def _weight(graph: OpGraph, op: Op) -> Floats | None:
    """The values of an op's weight; int4 is unpacked."""
    weights = roles_of(graph, op).weights
    if len(weights) != 1:
        return None
    tensor = weights[0].tensor
    raw = graph.constant(tensor)
    if tensor.dtype == "int4":
        halves = np.stack([raw.view(np.int8) << 4, raw.view(np.int8)], -1).reshape(-1) >> 4
        codes = halves[: np.prod(tensor.shape)].reshape(tensor.shape).astype(np.float64)
    else:
        codes = raw.view(np.dtype(tensor.dtype)).reshape(tensor.shape).astype(np.float64)
    if not tensor.is_quantized:
        return codes
    along = [1] * codes.ndim
    along[tensor.quantized_dimension] = -1
    values: Floats = codes * tensor.scales.reshape(along if len(tensor.scales) > 1 else ())
    return values


def _resembles(weight: Floats, parameter: Floats, least: float) -> bool:
    """Equal up to the order of axes and a factor a channel, which batch norms and folds leave."""
    # A 1-D convolution is a 2-D one with an axis of length 1, and so is a matrix.
    weight = weight.reshape([n for n in weight.shape if n != 1] or [1])
    parameter = parameter.reshape([n for n in parameter.shape if n != 1] or [1])
    if sorted(weight.shape) != sorted(parameter.shape):
        return False
    for axes in itertools.permutations(range(parameter.ndim)):
        moved = parameter.transpose(axes)
        if moved.shape != weight.shape:
            continue
        for channel in range(weight.ndim):
            others = tuple(axis for axis in range(weight.ndim) if axis != channel)
            dot = np.abs((weight * moved).sum(others))
            size = np.sqrt((weight**2).sum(others) * (moved**2).sum(others))
            if np.all(dot >= least * size):
                return True
    return False


def _owners(model: torch.nn.Module, weight: Floats, least: float) -> set[str]:
    """
    Modules with a parameter of these values; one that has several names has its first.

    torch's attention does not call its `out_proj`: it takes the weight from it.
    """
    return {
        path.removesuffix(".out_proj")
        for path, module in model.named_modules()
        for parameter in module.parameters(recurse=False)
        if parameter.ndim > 1 and _resembles(weight, parameter.detach().double().numpy(), least)
    }


@pytest.mark.parametrize("file", FILES)
def test_an_op_with_weights_is_told_its_owner_or_nothing(file: str) -> None:
    """Whatever was fused, folded, shared or renamed: the values say whose weight it is."""
    least = 0.9 if "wi4" in file else 0.999
    wrong = []
    for graph, op, entry in _told(file):
        weight = _weight(graph, op)
        if weight is None or entry.module is None:
            continue
        owners = _owners(_model(file.split(".")[0]), weight, least)
        assert owners, f"{entry.where}: no module owns its weight, the test cannot judge"
        if entry.module not in owners:
            wrong.append(f"{entry.where}: owned by {owners}")
    assert not wrong


@pytest.mark.parametrize("file", [f for f in FILES if f.split(".")[0] in stacks.ORDERS])
def test_an_op_without_weights_is_told_its_caller_or_nothing(file: str) -> None:
    """ADD, MUL and the rest, in the order in which the model calls them."""
    wrong = []
    for name, callers in stacks.ORDERS[file.split(".")[0]].items():
        told = [entry for _, op, entry in _told(file) if op.name == name]
        assert len(told) == len(callers), f"{name}: {len(told)} ops, the test cannot judge"
        wrong += [
            f"{entry.where}: called by {caller!r}"
            for entry, caller in zip(told, callers, strict=True)
            if entry.module not in (None, caller)
        ]
    assert not wrong


@pytest.mark.parametrize(
    ("file", "least"),
    [
        ("activation_elsewhere.int8.tflite", 3),
        ("attention.float.tflite", 2),
        ("batch_norms.int8.tflite", 2),
        ("called_one_by_one.int8.tflite", 4),
        ("decomposed.int8.tflite", 2),
        ("folded.int8.tflite", 3),
        ("local.int8.tflite", 2),
        ("nested.float.tflite", 8),
        ("nested.int8.tflite", 8),
        ("nested.recipe_dynamic_wi8_afp32.tflite", 8),
        ("nested.recipe_static_wi8_ai8.tflite", 8),
        ("nested.recipe_weight_only_wi4_afp32.tflite", 8),
        ("pad_then_conv.float.tflite", 2),
        ("transposed.int8.tflite", 3),
    ],
)
def test_ordinary_layers_are_told(file: str, least: int) -> None:
    """None is always safe and would pass every other test here: layers by the book must be told."""
    told = [e for graph, op, e in _told(file) if roles_of(graph, op).weights and e.module]
    assert len(told) >= least


@pytest.mark.parametrize(
    ("file", "op", "index"),
    [
        ("two_loops.float.tflite", "FULLY_CONNECTED", 0),
        ("two_loops.int8.tflite", "FULLY_CONNECTED", 1),
        ("past_its_owner_twice.float.tflite", "FULLY_CONNECTED", 0),
        ("past_its_owner_twice.int8.tflite", "FULLY_CONNECTED", 1),
        ("shared_constants.float.tflite", "ADD", 1),
        ("shared_constants.int8.tflite", "ADD", 2),
        ("functional_linears.float.tflite", "FULLY_CONNECTED", 4),
    ],
)
def test_what_cannot_be_told_is_none(file: str, op: str, index: int) -> None:
    """Names that several modules would leave: no rule can tell them apart."""
    told = [entry for _, _, entry in _told(file) if entry.op == op]
    assert told[index].module is None


def test_a_file_of_another_model_has_no_modules() -> None:
    """The root of each stack must be the live model's class."""
    graph = OpGraph.read(make.CONVERTED / "nested.float.tflite")
    tree = module_tree(_model("folded"))
    assert {entry.module for entry in OpDtypeMap(graph, tree)} == {None}


def test_one_tree_reads_several_files() -> None:
    """A recipe flow has two files of one model: nothing of the first is left in the second."""
    tree = module_tree(_model("nested"))
    graphs = [
        OpGraph.read(make.CONVERTED / f"nested.{flow}.tflite")
        for flow in ("float", "int8", "float")
    ]
    maps = [[entry.module for entry in OpDtypeMap(graph, tree)] for graph in graphs]
    assert maps[0] == maps[2]
    assert "heads.a_b.0" in maps[0]
    assert "heads.a_b.0" in maps[1]


def _node(path: str, class_name: str, *children: ModuleNode, kind: str | None = None) -> ModuleNode:
    return ModuleNode(path, path.rpartition(".")[2], class_name, kind, list(children))


_TORCH = "torch.nn.modules"
_NET = _node(
    "",
    "Net",
    _node("a", f"{_TORCH}.linear.Linear", kind="linear"),
    _node("b", f"{_TORCH}.linear.Linear", kind="linear"),
    _node("own", "Block"),
    _node("relu", f"{_TORCH}.activation.ReLU"),
    _node("norm", f"{_TORCH}.batchnorm.BatchNorm1d"),
    _node("attention", f"{_TORCH}.activation.MultiheadAttention"),
)


def _name(*paths: str) -> str:
    """A tensor's name as the converter writes it; `?` is a module that the model does not have."""
    labels = {child.path: f"Net/{child.label};" for child in _NET.children}
    return ";".join(labels.get(path, "Net;" if path == "" else "Net/Gone_gone;") for path in paths)


def _written(
    op: str,
    output: str,
    weight: str | None = None,
    bias: str | None = None,
    *,
    constant: bool = False,
    fused: bool = False,
    times: int = 1,
) -> list[str | None]:
    """What is told of an op in a file with these names, written by hand."""
    file = FileWriter()
    graph = file.graph()
    x = graph.tensor("float32", name="x")
    operands, inputs = [x], [x]
    if op == "FULLY_CONNECTED":
        ones = np.ones((4, 4), np.float32)
        operands.append(graph.tensor("float32", (4, 4), data=ones, name=weight or "w"))
        if bias is not None:
            operands.append(graph.tensor("float32", (4,), data=ones[0], name=bias))
    elif op in ("ADD", "MUL"):
        data = np.ones((1, 4), np.float32) if constant else None
        operands.append(graph.tensor("float32", data=data, name="y"))
        inputs += [] if constant else operands[1:]
    outputs = [graph.tensor("float32", name=output) for _ in range(times)]
    for y in outputs:
        options = "FullyConnectedOptions" if op == "FULLY_CONNECTED" else "AddOptions"
        if fused:
            graph.op(op, operands, [y], options, fusedActivationFunction=1)
        else:
            graph.op(op, operands, [y])
    graph.borders(inputs, outputs)
    return [e.module for e in OpDtypeMap(OpGraph.read(file.content()), ModuleTree(_NET))]


RESULT = "serving_default_output_0_output"


@pytest.mark.parametrize(
    ("output", "weight", "bias", "expected"),
    [
        # The op's own name, and what cannot have called it left out.
        (("own",), None, None, "own"),
        (("relu", "norm", "own"), None, None, "own"),
        (("relu", "attention"), None, None, "attention"),
        (("own", "?"), None, None, None),
        (("own", ""), None, None, None),
        (("a",), None, None, "a"),
        (("a", "own"), None, None, None),
        # A weight's name, where the op's does not contradict it.
        (None, ("a",), None, "a"),
        (("a", "b", "relu"), ("b",), None, "b"),
        (("a", "own"), ("a",), None, "a"),
        (("a", "own"), ("own",), None, None),
        (("own",), ("a",), None, None),
        (("a",), ("own",), None, None),
        (("own",), ("own", "a"), None, None),
        (None, ("a", "b"), None, None),
        (None, ("a", "?"), None, None),
        (None, ("relu", "norm", "a"), None, "a"),
        (None, ("own", "a"), None, "a"),
        (None, ("own",), None, None),
        # A bias's name alone, where the weight's tells nothing: nobody else may be in it.
        (None, None, ("a",), "a"),
        (None, None, ("a", "relu"), "a"),
        (None, None, ("a", "own"), None),
        (None, None, ("a", "b"), None),
        (("own",), None, ("a",), None),
        # The weight's name goes before the bias's.
        (None, ("b",), ("a",), "b"),
        (None, ("own",), ("a",), None),
    ],
)
def test_names_of_a_layer_are_weighed(
    output: tuple[str, ...] | None,
    weight: tuple[str, ...] | None,
    bias: tuple[str, ...] | None,
    expected: str | None,
) -> None:
    """What the names of an op with weights tell together, and where they contradict."""
    given = [None if paths is None else _name(*paths) for paths in (weight, bias)]
    told = _written("FULLY_CONNECTED", RESULT if output is None else _name(*output), *given)
    assert told == [expected]


def test_a_constant_of_two_layers_tells_of_neither() -> None:
    """Equal weights are kept once, under the name of one of the layers."""
    assert _written("FULLY_CONNECTED", RESULT, _name("a"), times=2) == [None, None]
    assert _written("FULLY_CONNECTED", _name("b"), _name("a"), times=2) == ["b", "b"]


@pytest.mark.parametrize(
    ("op", "output", "constant", "fused", "expected"),
    [
        ("ADD", ("own",), False, False, "own"),
        ("ADD", ("relu", "own"), False, True, "own"),
        ("ADD", ("relu", "norm", "own"), False, True, None),
        ("ADD", ("own", ""), False, False, None),
        ("ADD", ("own", "?"), False, False, None),
        # Between two computed operands a linear layer adds nothing; its bias is a constant.
        ("ADD", ("own", "a"), False, False, "own"),
        ("ADD", ("own", "a"), True, False, None),
        # The activation's caller, where its lowering was first met, and the op's own caller.
        ("ADD", ("own", "", "own"), False, True, "own"),
        ("ADD", ("own", "", "own"), False, False, None),
        ("ADD", ("own", "?", "", "own"), False, True, None),
        ("ADD", ("own", "", "attention"), False, True, None),
        ("ADD", ("own", "", "attention", "own"), False, True, None),
        # An elementwise function stands first; it is none of torch's other layers.
        ("LOGISTIC", ("own", "attention"), False, False, "own"),
        ("LOGISTIC", ("a", "own"), False, False, "own"),
        ("LOGISTIC", ("own", "?"), False, False, None),
        ("RELU", ("relu", "own"), False, False, "relu"),
        ("RESHAPE", ("relu", "own"), False, False, "own"),
        ("RESHAPE", ("own", "attention"), False, False, None),
        ("RESHAPE", (), False, False, None),
    ],
)
def test_names_of_other_ops_are_weighed(
    op: str, output: tuple[str, ...], constant: bool, fused: bool, expected: str | None
) -> None:
    """What the name of an op without weights tells."""
    assert _written(op, _name(*output), constant=constant, fused=fused) == [expected]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        (ResidualNet, {"stem", "layer1.0.conv_a", "layer1.0", "layer1.1", "fc"}),
        (TwinLists, set()),
        (Under_Scored_Net_1, {"conv", "conv_1", "_conv_1_1", "block_1.conv_1", "block_1._"}),
    ],
)
def test_a_model_converted_now_is_told(factory: type[SmallModel], expected: set[str]) -> None:
    """The names are still written as the files in `converted` have them."""
    model = seeded(factory)
    inputs = factory.sample_inputs()
    graph = OpGraph.read(litert.convert({litert.SIGNATURE: litert.Traced(model, inputs)}))
    entries = OpDtypeMap(graph, module_tree(model))
    told = {e.module for e in entries if e.op in ("CONV_2D", "FULLY_CONNECTED", "ADD")}
    assert expected <= told
    if not expected:
        assert {e.module for e in entries.ops("CONV_2D")} == {None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flow"),
    list(zip(sorted(stacks.MODELS), itertools.cycle(sorted(make.FLOWS)), strict=False)),
)
def test_the_converted_files_are_what_the_converter_writes(name: str, flow: str) -> None:
    """A release that writes other names must be seen: run `python -m fixtures.tflite.make` then."""
    kept = OpGraph.read(make.CONVERTED / f"{name}.{flow}.tflite")
    now = OpGraph.read(make.convert(name, make.FLOWS[flow]))
    assert [t.name for t in now.subgraphs[0].tensors] == [t.name for t in kept.subgraphs[0].tensors]
