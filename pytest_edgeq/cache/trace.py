"""Hashes of an exported program and of a graph with observers."""

from __future__ import annotations

import hashlib

import torch

from pytest_edgeq import litert
from pytest_edgeq.cache.digest import digest_of, feed, feed_graph

__all__ = ["graph_digest", "program_digest", "state_digest"]


def state_digest(program: torch.export.ExportedProgram) -> str:
    """
    Return a hash of the weights and buffers of an exported program.

    Raises:
        UnknownError: One of them cannot be read.
    """
    return digest_of(dict(sorted(program.state_dict.items())))


def program_digest(program: torch.export.ExportedProgram, state: str) -> str:
    """
    Return a hash of an exported program: graph, weights, buffers, constants and signature.

    Args:
        program: As torch.export returns it.
        state: What `state_digest` returns of it.

    Raises:
        UnknownError: A part of it cannot be identified.
    """
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
    return hasher.hexdigest()


def graph_digest(module: torch.fx.GraphModule, *, values: bool = True) -> str:
    """
    Return a hash of a graph with observers: nodes, annotations, observers and constants.

    Args:
        module: The graph.
        values: Whether the elements of its constants count, or their shapes alone.

    Raises:
        UnknownError: A part of it cannot be identified.
    """
    hasher = hashlib.sha256()
    feed_graph(hasher, module, litert.NODE_METADATA, values=values)
    info = getattr(module.graph._codegen, "pytree_info", None)
    feed(hasher, str(info))
    return hasher.hexdigest()
