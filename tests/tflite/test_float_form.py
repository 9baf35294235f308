"""A file written in float computes what the float file of the same model does."""

from __future__ import annotations

import numpy as np
import pytest

from fixtures.tflite import make, stacks
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.float_form import write_in_float
from tests.bench.detection.edits import ops_of, zeroed_channel
from tests.bench.detection.flatfile import FlatFile

APART_DB = 30.0
"""Weights of 8 bits, which are rounded on one side, leave more; a lost channel leaves less."""

NAMES = ("activation_elsewhere", "attention", "batch_norms", "decomposed", "nested", "transposed")
RECIPES = ("static_wi8_ai16", "weight_only_wi8_afp32", "dynamic_wi8_afp32")


def sqnr_db(name: str, content: bytes) -> float:
    """Return the SQNR in dB of a file's outputs to those of the float file, the worst of all."""
    arrays = [each.numpy() for each in stacks.MODELS[name][1]]
    names = [f"args_{i}" for i in range(len(arrays))]
    expected, actual = (
        EdgeFile(source).run(names, arrays, "builtin")
        for source in (make.CONVERTED / f"{name}.float.tflite", content)
    )
    return min(
        float(10 * np.log10((one**2).sum() / max(((one - two) ** 2).sum(), 1e-30)))
        for one, two in zip(expected, actual, strict=True)
    )


@pytest.mark.parametrize(
    "file", [*(f"{name}.int8" for name in NAMES), *(f"nested.recipe_{each}" for each in RECIPES)]
)
def test_it_computes_what_the_float_file_does(file: str) -> None:
    """But for its weights, which are rounded; also biases of int64, and behind a DEQUANTIZE."""
    content = write_in_float(EdgeFile(make.CONVERTED / f"{file}.tflite").graph)
    assert not any(tensor.is_quantized for tensor in EdgeFile(content).graph.subgraphs[0].tensors)
    assert sqnr_db(file.split(".")[0], content) > APART_DB


def test_a_broken_file_is_as_broken_in_float() -> None:
    """One channel of one weight is enough to tell."""
    file = FlatFile((make.CONVERTED / "nested.int8.tflite").read_bytes())
    zeroed_channel(file, ops_of(file)[0], 1)
    assert sqnr_db("nested", write_in_float(EdgeFile(file.content()).graph)) < APART_DB
