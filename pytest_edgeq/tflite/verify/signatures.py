"""Check entry points: each has a key of its own and names tensors that a caller can set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_edgeq.tflite.verify.damage import damaged

if TYPE_CHECKING:
    from pytest_edgeq.tflite.subgraph import Signature, Subgraph


def _output_problem(signature: Signature, subgraph: Subgraph) -> str:
    """Say which output the interpreter cannot hand out without ending the process, else ""."""
    for border in signature.outputs:
        tensor = border.tensor
        # Of numbers that are missing it says so; a list of strings it reads from nowhere.
        if tensor.dtype == "string" and not (
            tensor.is_constant
            or tensor.index in subgraph.producer
            or tensor.index in subgraph.inputs
        ):
            return f"its output {border.name[:80]!r} is computed by no op"
    return ""


def verify_signatures(signatures: Sequence[Signature], subgraphs: Sequence[Subgraph]) -> None:
    """
    Check the signatures of a file.

    Raises:
        ValueError: Names the signature and what is wrong with it.
    """
    keys: set[str | None] = set()
    for signature in signatures:
        where = f"signature {(signature.key or '')[:80]!r}"
        if signature.key in keys:
            raise damaged(where, "there are two of this key")
        keys.add(signature.key)
        if problem := _output_problem(signature, subgraphs[signature.subgraph]):
            raise damaged(where, problem)
        inputs = set(subgraphs[signature.subgraph].inputs)
        for border in signature.inputs:
            if border.tensor.index not in inputs:
                raise damaged(
                    where,
                    f"its input {border.name[:80]!r} is tensor {border.tensor.index}, which is no "
                    f"input of subgraph {signature.subgraph}",
                )
