"""The sound `.tflite` files that mutations start from: small, of many ops and structures."""

from __future__ import annotations

import functools

import numpy as np

from fixtures.tflite import make
from fixtures.tflite.kinds import KINDS
from fixtures.tflite.single import FLOATS, HYBRID, QUANTIZED
from fixtures.tflite.stateful import counter
from fixtures.tflite.writer import FileWriter, chain, composite
from tests.tflite.one_op_files import KINDS as OPS
from tests.tflite.one_op_files import data_of, layer, write

_CONVERTED = (
    "activation_elsewhere.recipe_static_wi8_ai16",
    "add_then_relu.int8",
    "attention.int8",
    "batch_norms.float",
    "decomposed.int8",
    "functional_convs.int8",
    "functional_linears.recipe_dynamic_wi8_afp32",
    "nested.recipe_weight_only_wi4_afp32",
    "transposed.int8",
    "two_loops.int8",
)


@functools.cache
def tflite_seeds() -> dict[str, bytes]:
    """Return the files by name, the same in every process."""
    files = {name: (make.CONVERTED / f"{name}.tflite").read_bytes() for name in _CONVERTED}
    for name, (build, dtypes) in QUANTIZED.items():
        for dtype in dtypes:
            files[f"{name} {dtype}"] = build(np.random.default_rng(0), dtype).content
    for name, (hybrid, kinds) in HYBRID.items():
        for kind in kinds:
            files[f"{name} {kind}"] = hybrid(np.random.default_rng(0), kind).content
    for name, single in FLOATS.items():
        files[f"{name} float"] = single(np.random.default_rng(0), "float").content
    for op in OPS:
        if not any(name.startswith(f"{op} ") for name in files):
            count = len(data_of(op)) + 1
            files[op] = write(op, ["float32"] * count, [(1.0, 0)] * count)
    files["EMBEDDING_LOOKUP"] = layer("EMBEDDING_LOOKUP", weight="float32", output="float32")[1]
    files |= {name: kind().content for name, kind in KINDS.items()}
    return files | {
        "IF": _branch(),
        "STABLEHLO_COMPOSITE": _composite(),
        "CUSTOM": chain(("CUSTOM:Mine", "x", "y"), inputs="x", outputs="y"),
        "two signatures": _two_signatures(),
        "state": counter(),
    }


def _branch() -> bytes:
    """Either the negative or the root."""
    file = FileWriter()
    choice = ("IF", "choice x", "y", "IfOptions", {"thenSubgraphIndex": 1, "elseSubgraphIndex": 2})
    truth = {"dtype": "bool", "shape": (1,)}
    file.graph().fill(choice, inputs="choice x", outputs="y", choice=truth)
    for name, op in (("then", "NEG"), ("else", "ABS")):
        file.graph(name).fill((op, "x", "y"), inputs="x", outputs="y")
    return file.content()


def _composite() -> bytes:
    """A composite, and what it is made of."""
    file = FileWriter()
    file.graph().fill(composite("mine", "x", "y", 1), inputs="x", outputs="y")
    file.graph("inner").fill(("ABS", "x", "y"), inputs="x", outputs="y")
    return file.content()


def _two_signatures() -> bytes:
    """Two entry points of one file."""
    file = FileWriter()
    for op in ("NEG", "ABS"):
        file.graph(op).fill((op, "x", "y"), inputs="x", outputs="y", key=op.lower())
    return file.content()
