"""The layers of a file with the constants that they take, and which of them is one of torch's."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pytest_edgeq.localize.layouts import to_file_layout
from pytest_edgeq.localize.parameters import share_of
from pytest_edgeq.tflite.constants import read_constant
from pytest_edgeq.tflite.graph import Op, OpGraph
from pytest_edgeq.tflite.roles import roles_of

__all__ = ["StoredLayer", "layers_apart", "stored_layers", "weights_apart"]


@dataclass(frozen=True, slots=True, eq=False)
class StoredLayer:
    """
    A matrix product of the file with its constants, dequantized.

    Attributes:
        op: Which op it is.
        weight: As the op takes it.
        bias: One number a channel; None without one that is a constant.
    """

    op: Op
    weight: np.ndarray
    bias: np.ndarray | None


def stored_layers(graph: OpGraph, subgraph: int, names: Container[str]) -> Iterator[StoredLayer]:
    """
    Read the matrix products of the file that take one constant weight, in execution order.

    Args:
        graph: The file.
        subgraph: Index of the subgraph.
        names: Of the ops that are wanted.
    """
    for op in graph.subgraphs[subgraph].ops:
        if op.name not in names:
            continue
        roles = roles_of(graph, op)
        weights, biases = (
            [each for each in held if each.tensor.is_constant]
            for held in (roles.weights, roles.biases)
        )
        if len(weights) != 1 or weights[0].tensor.is_sparse:
            continue
        bias = read_constant(graph, op, biases[0]).floats.reshape(-1) if biases else None
        yield StoredLayer(op, read_constant(graph, op, weights[0]).floats, bias)


def weights_apart(layer: StoredLayer, weight: torch.Tensor, kind: str) -> float:
    """
    How far a weight is from one of the file's, in shares of its size.

    Args:
        layer: Of the file.
        weight: As torch has it.
        kind: The torch op's name without overload.

    Returns:
        Infinity where it does not fit.
    """
    if layer.weight.size != weight.numel():
        return math.inf
    own = weight.double().numpy()
    laid_out = to_file_layout(layer.op.name, own, layer.weight.shape, torch_op=kind)
    return min((share_of(layer.weight - each, each) for each in laid_out), default=math.inf)


def layers_apart(
    weight: torch.Tensor, bias: torch.Tensor, stored: Sequence[StoredLayer], kind: str = "linear"
) -> float:
    """How far a layer is from the file's nearest, in shares of the weight's and the bias's size."""
    added = bias.double().numpy()
    found = [math.inf]
    for each in stored:
        given = np.zeros_like(added) if each.bias is None else each.bias
        if given.shape == added.shape:
            found.append(weights_apart(each, weight, kind) + share_of(given - added, added))
    return min(found)
