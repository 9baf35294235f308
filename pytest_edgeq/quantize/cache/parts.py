"""Encode and decode stored results: quantized graphs, ranges, files and keys."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from pytest_edgeq.errors import Warned
from pytest_edgeq.litert.digest import UnhashableError, digest_of
from pytest_edgeq.litert.graphs import decode_graph, encode_graph


@dataclasses.dataclass(frozen=True)
class Simulation:
    """A quantized torch graph, built at first use, with facts for the flow."""

    graph: Callable[[], torch.fx.GraphModule]  # return the graph, always the same one
    static: bool  # whether activations are quantized statically
    weights_alone: bool  # whether an op has a quantized weight and a float input
    # module and op type of the weights that the quantizer annotated
    annotated: frozenset[tuple[str, str]]
    strict_refusal: str | None = None  # why strict export refused the model, if it did
    warned: tuple[Warned, ...] = ()  # warnings of the libraries during calibration, each text once
    digest: str | None = None  # a hash of the graph; None where the graph cannot be stored


def write_simulation(simulation: Simulation) -> dict[str, bytes]:
    """Encode a quantized graph, or raise an UnhashableError."""
    parts = encode_graph(simulation.graph())
    facts = {**vars(simulation), "annotated": sorted(simulation.annotated)}
    del facts["graph"]
    facts["digest"] = digest_of(parts["graph"], parts["tensors"])
    return {**parts, "facts": json.dumps(facts).encode()}


def read_simulation(parts: Mapping[str, bytes]) -> Simulation:
    """Decode a quantized graph of `write_simulation`; it is built at first use."""
    facts = json.loads(parts["facts"])
    # Checked now, because when the graph is built it is too late to calibrate again.
    if facts["digest"] != digest_of(parts["graph"], parts["tensors"]):
        raise ValueError("its graph does not have the hash that it should")

    @functools.cache
    def graph() -> torch.fx.GraphModule:
        return decode_graph(parts)

    facts["annotated"] = frozenset((module, op) for module, op in facts["annotated"])
    facts["warned"] = tuple(Warned(*each) for each in facts["warned"])
    return Simulation(graph, **facts)


def write_ranges(ranges: Mapping[str, Mapping[str, Any]]) -> dict[str, bytes]:
    """Encode ranges by tensor name, or raise an UnhashableError."""
    values = [value for each in ranges.values() for value in each.values()]
    for value in values:
        if not isinstance(value, (np.ndarray, np.generic)) or value.dtype.hasobject:
            raise UnhashableError(f"a range that is a {type(value).__name__}")
    arrays = io.BytesIO()
    np.savez(arrays, *values)
    names = [[name, list(each)] for name, each in ranges.items()]
    return {"ranges": json.dumps(names).encode(), "arrays": arrays.getvalue()}


def read_ranges(parts: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """Decode the ranges of `write_ranges`; those without dimensions are numpy's scalars."""
    with np.load(io.BytesIO(parts["arrays"])) as arrays:
        values = iter([arrays[name][()] for name in arrays.files])
    return {
        name: {kind: next(values) for kind in kinds} for name, kinds in json.loads(parts["ranges"])
    }


def read_file(parts: Mapping[str, bytes]) -> bytes:
    """Return a `.tflite` file."""
    if parts["tflite"][4:8] != b"TFL3":
        raise ValueError("its part 'tflite' is no such file")
    return parts["tflite"]


def read_key(parts: Mapping[str, bytes]) -> bytes:
    """Return a key, in hexadecimal."""
    if not re.fullmatch(rb"[0-9a-f]{64}", parts["key"]):
        raise ValueError("its part 'key' is none")
    return parts["key"]
