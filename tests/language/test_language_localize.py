"""Localize names the module of a language model's file on states that the file itself reached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from flatbuffers import flexbuffers  # type: ignore[import-untyped] # ships no types

from fixtures.language import models
from fixtures.tflite.writer import chain
from pytest_edgeq import Budget, assert_within_budget
from pytest_edgeq.compare.language.model import LanguageModel
from pytest_edgeq.edgeq import Edgeq
from pytest_edgeq.localize.language import states
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.modules import exported_modules
from pytest_edgeq.tflite.roles import roles_of
from pytest_edgeq.tflite.subgraph import Op, Tensor
from pytest_edgeq.tflite.writing import add_buffer, packed, unpacked

from .defects import OF_THE_REFERENCE, changed

SOUND = "no single layer stands out"
Change = Callable[[OpGraph, Any, Op], None]


def _load(maker: Edgeq, name: str, quantization: str = "wi8") -> LanguageModel:
    files = (models.exported(name, each) for each in (quantization, "float"))
    model = maker.load(next(files), float_tflite=next(files))
    assert isinstance(model, LanguageModel)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "quantization"), [("llama", "wi4"), ("qwen3", "wi8"), ("gemma3", "wi8")]
)
def test_no_layer_of_a_sound_file_is_to_blame(maker: Edgeq, family: str, quantization: str) -> None:
    """Every op is compared, composites as one op, and named by its module."""
    model = _load(maker, family, quantization)

    found = maker.localize(model, models.sequences(2, 60, 3))

    assert found.cause.startswith(SOUND)
    assert found.culprit is None
    assert {row.verdict for row in found.rows} == {"sound"}
    assert found.coverage == 1
    assert all(row.local_sqnr_db is not None for row in found.rows)
    by_module = {row.module: row.op for row in found.rows}
    assert by_module["model.norm"] == "STABLEHLO_COMPOSITE"
    layers = {f"model.layers.{n}.mlp.down_proj" for n in (0, 1)}
    assert {*layers, "model.embed_tokens", "lm_head"} <= by_module.keys()
    # Prefills compute nothing behind their last cache.
    assert len(model.op_dtypes.ops("FULLY_CONNECTED", "model.layers.1.*")) == 7 + 2 * 2


def test_the_live_module_names_the_same_modules(maker: Edgeq) -> None:
    """Its classes are not those in the file."""
    path = models.exported("gemma3", "float")
    module = models.tiny("gemma3")

    named = {entry.module for entry in maker.load(path, reference=module).op_dtypes}

    assert named == {entry.module for entry in maker.load(path).op_dtypes}
    assert named <= {name for name, _ in module.named_modules()}


def test_each_part_of_a_split_cache_is_fed(maker: Edgeq) -> None:
    """Embeddings, masks and rotary angles are of other sections."""
    found = maker.localize(_load(maker, "llama_split"), models.sequences(1, 40, 3))

    assert found.cause.startswith(SOUND)
    assert found.coverage == 1


def _replace(model: Any, graph: OpGraph, op: Op, tensor: Tensor, values: npt.NDArray[Any]) -> None:
    buffer = add_buffer(model, values.view(np.uint8))
    model.subgraphs[op.subgraph].tensors[tensor.index].buffer = buffer


def _scaled(factor: float, channel: int | slice) -> Change:
    def change(graph: OpGraph, model: Any, op: Op) -> None:
        index = roles_of(graph, op).weights[0].tensor.index
        quantization = model.subgraphs[op.subgraph].tensors[index].quantization
        quantization.scale = np.array(quantization.scale, np.float32)
        quantization.scale[channel] *= factor

    return change


def _negated_weight(graph: OpGraph, model: Any, op: Op) -> None:
    tensor = graph.tensor(op, op.inputs[1])
    _replace(model, graph, op, tensor, -graph.constant(tensor).view(np.float32))


def _epsilon(graph: OpGraph, model: Any, op: Op) -> None:
    parts = graph.decomposition(op)
    assert parts is not None
    add = next(each for each in parts.ops if each.name == "ADD")
    _replace(model, graph, add, graph.tensor(add, add.inputs[1]), np.full(1, 1e-5, np.float32))


def _epsilon_for_gpu(graph: OpGraph, model: Any, op: Op) -> None:
    options = model.subgraphs[op.subgraph].operators[op.index].builtinOptions2
    options.compositeAttributes = np.frombuffer(flexbuffers.Dumps({"epsilon": 0.5}), np.uint8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "change", "cause"),
    [
        ("model.layers.1.mlp.down_proj", _scaled(1.1, slice(None)), "the scale is 1.1 × the refe"),
        ("model.layers.0.self_attn.o_proj", _scaled(2, 3), "output channel 3 has a scale of 2 ×"),
        ("model.layers.0.post_attention_layernorm", _negated_weight, "constant operand 1"),
        (
            "model.layers.1.input_layernorm",
            _epsilon,
            "its ADD #2: operand 1: expected 1e-06, got 1e-05",
        ),
        ("model.norm", _epsilon_for_gpu, "epsilon: expected 1e-06, got 0.5"),
    ],
    ids=["scale", "channel", "norm", "epsilon", "attribute"],
)
def test_a_defect_is_named_by_its_module(
    maker: Edgeq, module: str, change: Change, cause: str
) -> None:
    """Also in what a composite consists of, and in what other kernels read of it."""
    file = _planted(_load(maker, "llama").graph, module, change)
    model = maker.load(file, float_tflite=models.exported("llama", "float"))

    found = maker.localize(model, models.sequences(1, 40, 3), positions=[3, 30])

    assert found.culprit is not None
    assert found.culprit.module == module
    assert cause in found.cause
    assert found.others == ()


def test_an_embedder_of_its_own_is_measured(maker: Edgeq) -> None:
    """Its defect reaches `decode` as an input, of which no op there is to blame."""
    model = _load(maker, "llama_split")
    graph = model.sections["embedder"].graph
    content = unpacked(graph)
    for op in graph.ops:
        if op.name == "EMBEDDING_LOOKUP":
            _scaled(1.5, slice(None))(graph, content, op)
    sections = {**model.sections, "embedder": EdgeFile(packed(content))}
    model._open(sections, model.float_sections)

    found = maker.localize(model, models.sequences(1, 30, 3), positions=[3, 20])

    assert found.culprit is not None
    assert found.culprit.op == "EMBEDDING_LOOKUP"
    assert "the scale is 1.5 × the reference's" in found.cause


def _planted(graph: OpGraph, module: str, change: Change) -> bytes:
    """Return the file with a change of the module's op in `decode`."""
    modules = exported_modules(graph)
    assert modules is not None
    subgraph = next(each.subgraph for each in graph.signatures if each.key == "decode")
    op = next(
        op
        for op in graph.subgraphs[subgraph].ops
        if op.name in ("FULLY_CONNECTED", "STABLEHLO_COMPOSITE")
        and modules.path_of(graph, op) == module
    )
    model = unpacked(graph)
    change(graph, model, op)
    return packed(model)


def test_a_failed_budget_names_the_layer(maker: Edgeq) -> None:
    """On the worst position of the worst sequences."""
    module = "model.layers.1.mlp.down_proj"
    file = _planted(_load(maker, "llama").graph, module, _scaled(1.5, slice(None)))
    model = maker.load(file, float_tflite=models.exported("llama", "float"))
    comparison = maker.compare(model, models.sequences(2, 30, 3))
    worst = comparison.positions["quantization"].worst[0]

    with pytest.raises(AssertionError, match="expected at least 60") as caught:
        assert_within_budget(comparison, total=Budget(sqnr_db=60))

    text = str(caught.value)
    assert f"({module}): the weight's codes: the scale is 1.5 × the reference's" in text
    assert f"localized on the worst 2 samples, at position {worst}:" in text


def test_a_conversion_that_lost_more_is_not_blamed_on_a_layer(maker: Edgeq) -> None:
    """Ops are compared with those of the float file, which is another model here."""
    files = (models.exported("llama", each) for each in ("wi8", "float"))
    other = changed(models.tiny("llama"), OF_THE_REFERENCE["GELU for SiLU in layer 0"])
    model = maker.load(next(files), float_tflite=next(files), reference=other)
    comparison = maker.compare(model, models.sequences(2, 30, 3))

    with pytest.raises(AssertionError, match="layer to blame: not known: ops are compared with"):
        assert_within_budget(comparison, total=Budget(sqnr_db=60))


def test_states_are_those_that_the_file_reached(maker: Edgeq) -> None:
    """By default the first, the last and three between them."""
    model = _load(maker, "llama")
    sequence = model.spec.bind(models.sequences(1, 21, 3)[0], "")

    reached = list(states(model, [sequence], None))

    tokens = sequence.arrays()[0][0]
    assert [int(each["input_pos"][0]) for each in reached] == [0, 5, 10, 15, 20]
    for each in reached:
        position = int(each["input_pos"][0])
        assert int(each["tokens"].reshape(-1)[0]) == tokens[position]
        is_filled = each["kv_cache_k_1"].any(axis=(0, 1, 3))
        assert is_filled.tolist() == [n < position for n in range(is_filled.size)]


@pytest.mark.parametrize(("positions", "got"), [([3, 40], "40"), ([-1], "-1"), ([], "none")])
def test_a_position_that_a_sequence_does_not_have_is_refused(
    maker: Edgeq, positions: list[int], got: str
) -> None:
    """No position counts from the end."""
    expected = f"from 0 to 39 for sequence 0 of 40 tokens, got {got}"
    with pytest.raises(ValueError, match=expected):
        maker.localize(_load(maker, "llama"), models.sequences(1, 40, 3), positions=positions)


def test_positions_are_for_language_models(maker: Edgeq) -> None:
    """Samples of others have none."""
    file = chain(("NEG", "x", "y"), inputs="x", outputs="y", key="only")
    model = maker.load(file, reference=np.negative, name="plain")
    with pytest.raises(ValueError, match="positions: plain is no language model"):
        maker.localize(model, [np.zeros((1, 4), np.float32)], positions=[0])


def test_a_module_alone_is_not_enough(maker: Edgeq) -> None:
    """Ops have partners in the float file only."""
    model = maker.load(models.exported("llama"), reference=models.tiny("llama"), name="lm")
    with pytest.raises(
        ValueError, match=r"lm: localize needs the float file .*, float_tflite=path\)"
    ):
        maker.localize(model, models.sequences(1, 40, 3))
