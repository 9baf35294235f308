"""Hashes of an exported program and of a graph with observers."""

from __future__ import annotations

import hashlib

import torch

from pytest_edgeq import litert
from pytest_edgeq.litert.digest import feed, feed_graph


def program_digest(program: torch.export.ExportedProgram, *, lines: bool = False) -> str:
    """
    Return a hash of an exported program, optionally with its nodes' source lines.

    Raises:
        UnhashableError: A part of it cannot be identified.
    """
    hasher = hashlib.sha256()
    feed_graph(hasher, program.graph_module, ("stack_trace",) if lines else ())
    signature = program.graph_signature
    for spec in (*signature.input_specs, *signature.output_specs):
        feed(hasher, str(spec))
    feed(hasher, dict(sorted(program.state_dict.items())))
    feed(hasher, dict(sorted(program.constants.items())))
    feed(
        hasher, sorted(f"{symbol} {bounds}" for symbol, bounds in program.range_constraints.items())
    )
    feed(hasher, (str(program.call_spec.in_spec), str(program.call_spec.out_spec)))
    return hasher.hexdigest()


def graph_digest(module: torch.fx.GraphModule) -> str:
    """
    Return a hash of a graph with observers: nodes, annotations, observers and constants.

    Raises:
        UnhashableError: A part of it cannot be identified.
    """
    hasher = hashlib.sha256()
    feed_graph(hasher, module, litert.NODE_METADATA)
    info = getattr(module.graph._codegen, "pytree_info", None)
    feed(hasher, str(info))
    return hasher.hexdigest()
