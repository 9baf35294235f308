"""The words of a refusal: which tensor, op or signature, and what is wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_edgeq.tflite.subgraph import Op, Subgraph, Tensor


_NAME_CHARACTERS = 80


def damaged(where: str, what: str) -> ValueError:
    """Return the error of a file that was written wrong or damaged since."""
    return ValueError(f"damaged .tflite file: {where}: {what}; build or download it again")


def tensor_place(subgraph: Subgraph, tensor: Tensor) -> str:
    """Return how a tensor is named in a refusal."""
    name = f" ({tensor.name[:_NAME_CHARACTERS]!r})" if tensor.name else ""
    # Most files have one subgraph, of which nothing need be said.
    end = f" of subgraph {subgraph.index}" if subgraph.index else ""
    return f"tensor {tensor.index}{name}{end}"


def op_place(op: Op) -> str:
    """Return how an op is named in a refusal."""
    return str(op.place._replace(name=op.name[:_NAME_CHARACTERS]))
