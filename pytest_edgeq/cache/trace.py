"""Hashes of an exported program and of a graph with observers."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch

from pytest_edgeq import litert
from pytest_edgeq.cache.digest import digest_of, feed, feed_graph


class ProgramDigest(NamedTuple):
    """
    Hashes of an exported program.

    Attributes:
        state: Of its weights and buffers.
        whole: Of graph, weights, buffers, constants and signature.
    """

    state: str
    whole: str


def program_digest(program: torch.export.ExportedProgram) -> ProgramDigest:
    """
    Return the hashes of an exported program.

    Raises:
        UnknownError: A part of it cannot be identified.
    """
    state = digest_of(dict(sorted(program.state_dict.items())))
    hasher = hashlib.sha256()
    feed_graph(hasher, program.graph_module)
    signature = program.graph_signature
    for spec in (*signature.input_specs, *signature.output_specs):
        feed(hasher, str(spec))
    feed(hasher, state)
    feed(hasher, dict(sorted(program.constants.items())))
    feed(
        hasher, sorted(f"{symbol} {bounds}" for symbol, bounds in program.range_constraints.items())
    )
    feed(hasher, (str(program.call_spec.in_spec), str(program.call_spec.out_spec)))
    return ProgramDigest(state, hasher.hexdigest())


def graph_digest(module: torch.fx.GraphModule, *, values: bool = True) -> str:
    """
    Return a hash of a graph with observers: nodes, annotations, observers and constants.

    Raises:
        UnknownError: A part of it cannot be identified.
    """
    hasher = hashlib.sha256()
    feed_graph(hasher, module, litert.NODE_METADATA, values=values)
    info = getattr(module.graph._codegen, "pytree_info", None)
    feed(hasher, str(info))
    return hasher.hexdigest()
