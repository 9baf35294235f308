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

from fixtures.tflite import make, stacks
from fixtures.tflite.writer import FileWriter, chain, constant
from pytest_edgeq.compare.reference import module_tree
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.modules import ExportedModules, ModuleNode, ModuleTree, exported_modules
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


_NET = ModuleNode("", "", "Net", None)
for _path, _class, _kind in (
    ("a", "torch.nn.modules.linear.Linear", "linear"),
    ("b", "torch.nn.modules.linear.Linear", "linear"),
    ("own", "Block", None),
    ("relu", "torch.nn.modules.activation.ReLU", None),
):
    _NET.children.append(ModuleNode(_path, _path, _class, _kind))


def _name(paths: str) -> str:
    """A tensor's name as the converter writes it; `?` is a module that the model does not have."""
    labels = {child.path: f"Net/{child.label};" for child in _NET.children}
    return ";".join(labels.get(path, "Net/Gone_gone;") for path in paths.split())


@pytest.mark.parametrize(
    ("output", "weight", "bias", "expected"),
    [
        ("relu own", "", "", "own"),
        ("own ?", "", "", None),
        ("a own", "", "", None),
        # A weight's name, where the op's does not contradict it, and then a bias's.
        ("a own", "a", "", "a"),
        ("own", "a", "", None),
        ("", "own a", "", "a"),
        ("", "a b", "", None),
        ("", "a ?", "", None),
        ("", "", "a relu", "a"),
        ("", "", "a own", None),
        ("", "b", "a", "b"),
        ("", "own", "a", None),
    ],
)
def test_names_of_a_layer_are_weighed(
    output: str, weight: str, bias: str, expected: str | None
) -> None:
    """What the names of an op with weights tell together, and where they contradict."""
    content = chain(
        ("FULLY_CONNECTED", "x w bias", "y"),
        inputs="x",
        outputs="y",
        y={"name": _name(output) or "result"},
        w=constant(np.ones((4, 4)), name=_name(weight) or "w"),
        bias=constant(np.ones(4), name=_name(bias) or "bias"),
    )
    [entry] = OpDtypeMap(OpGraph.read(content), ModuleTree(_NET))
    assert entry.module == expected


@pytest.mark.sweep(0, slow=12)
@pytest.mark.parametrize(
    ("name", "flow"),
    list(zip(sorted(stacks.MODELS), itertools.cycle(sorted(make.FLOWS)), strict=False)),
)
def test_the_converted_files_are_what_the_converter_writes(name: str, flow: str) -> None:
    """A release that writes other names must be seen: run `python -m fixtures.tflite.make` then."""
    kept = OpGraph.read(make.CONVERTED / f"{name}.{flow}.tflite")
    now = OpGraph.read(make.convert(name, make.FLOWS[flow]))
    assert [t.name for t in now.subgraphs[0].tensors] == [t.name for t in kept.subgraphs[0].tensors]


_EXPORTED = (
    "litert_torch.generative.export_hf.core.exportable_module."
    "LiteRTExportableModuleForDecoderOnlyLMGenerate/net.TinyForCausalLM_model"
)
_LAYER = f"{_EXPORTED}/net.TinyModel_model/net.TinyDecoderLayer_1"
_Q = f"{_LAYER}/net.Attention_self_attn/torch.nn.modules.linear.Linear_q_proj"


def _linear(path: str, operand: str, result: str) -> tuple[str, str, str, str]:
    return "FULLY_CONNECTED", f"{operand} {path} -", result, "FullyConnectedOptions"


def test_modules_of_an_exported_language_model_are_read_from_names_alone() -> None:
    """A product has the names of the first traced one and of its caller as well."""
    q = f"{_Q};1"
    k = f"{_LAYER}/net.Attention_self_attn;;{_Q};;{_Q.replace('q_proj', 'k_proj')};2"
    norm = f"{_LAYER}/export_hf.patches.RMSNorm_input_layernorm;"
    weight = constant(np.ones((4, 4)))
    file = FileWriter()
    file.graph().fill(
        ("ABS", "x", norm),
        _linear("wq", norm, q),
        _linear("wk", norm, k),
        ("ADD", f"{q} {k}", "cache", "AddOptions"),
        _linear("tied", "cache", "logits"),
        inputs="x",
        outputs="logits",
        key="decode",
        **dict.fromkeys(("wq", "wk", "tied"), weight),
    )
    graph = OpGraph.read(file.content())
    expected = [
        "model.layers.1.input_layernorm",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.k_proj",
        "model.layers.1.self_attn.q_proj",
        "lm_head",
    ]

    assert [entry.module for entry in OpDtypeMap(graph, exported_modules(graph))] == expected

    # A live model tells how its lists are called.
    attention = ModuleNode("model.h.1.self_attn", "self_attn", "net.Attention", None)
    attention.children = [ModuleNode(f"{attention.path}.q_proj", "q_proj", "Linear", "linear")]
    layer = ModuleNode("model.h.1", "1", "net.TinyDecoderLayer", None, [attention])
    blocks = ModuleNode("model.h", "h", "ModuleList", "list", [layer])
    root = ModuleNode("", "", "net.TinyForCausalLM", None)
    root.children = [ModuleNode("model", "model", "net.TinyModel", None, [blocks])]
    live = ExportedModules(ModuleTree(root))
    assert live.path_of(graph, graph.ops[1]) == "model.h.1.self_attn.q_proj"


def test_other_files_have_no_modules_by_names_alone() -> None:
    """Names of other exports leave out modules that were not called."""
    graph = OpGraph.read(
        chain(("ABS", "x", "net.Net/net.Layer_0;"), inputs="x", outputs="net.Net/net.Layer_0;")
    )
    assert exported_modules(graph) is None
