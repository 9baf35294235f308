"""Encode and decode stored results: quantized graphs, ranges, files and keys."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from pytest_edgeq.errors import Warned
from pytest_edgeq.litert.digest import UnhashableError, digest_of
from pytest_edgeq.litert.graphs import decode_graph, decode_tensors, encode_graph, encode_tensors


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
    facts = {
        "static": simulation.static,
        "weights_alone": simulation.weights_alone,
        "annotated": sorted(simulation.annotated),
        "strict_refusal": simulation.strict_refusal,
        "warned": simulation.warned,
        "digest": digest_of(parts["graph"], parts["tensors"]),
    }
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

    return Simulation(
        graph,
        facts["static"],
        facts["weights_alone"],
        frozenset((module, op) for module, op in facts["annotated"]),
        facts["strict_refusal"],
        tuple(Warned(*each) for each in facts["warned"]),
        facts["digest"],
    )


def write_ranges(ranges: Mapping[str, Mapping[str, Any]]) -> dict[str, bytes]:
    """Encode ranges by tensor name, or raise an UnhashableError."""
    arrays: dict[str, torch.Tensor] = {}
    scalars: list[str] = []
    for i, each in enumerate(ranges.values()):
        for j, value in enumerate(each.values()):
            if not isinstance(value, (np.ndarray, np.generic)):
                raise UnhashableError(f"a range that is a {type(value).__name__}")
            arrays[f"{i} {j}"] = torch.from_numpy(np.array(value))
            if isinstance(value, np.generic):  # a tensor without dimensions
                scalars.append(f"{i} {j}")
    table, raw = encode_tensors(arrays)
    names = [[name, list(each)] for name, each in ranges.items()]
    content = {"names": names, "tensors": table, "scalars": scalars}
    return {"ranges": json.dumps(content).encode(), "tensors": raw}


def read_ranges(parts: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    """Decode the ranges of `write_ranges`."""
    content = json.loads(parts["ranges"])
    arrays = {
        place: tensor.numpy()[()] if place in content["scalars"] else tensor.numpy()
        for place, tensor in decode_tensors(content["tensors"], parts["tensors"]).items()
    }
    return {
        name: {kind: arrays[f"{i} {j}"] for j, kind in enumerate(kinds)}
        for i, (name, kinds) in enumerate(content["names"])
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
