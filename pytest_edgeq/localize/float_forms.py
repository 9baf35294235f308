"""Choose the float files that a quantized file is held against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from pytest_edgeq import litert
from pytest_edgeq.localize.file_constants import unrounded_constants
from pytest_edgeq.localize.pairs import Pairs, pair_ops
from pytest_edgeq.localize.structure import ConstantPair, Structure
from pytest_edgeq.tflite.edge import EdgeFile
from pytest_edgeq.tflite.float_form import write_in_float
from pytest_edgeq.tflite.graph import OpGraph, Signature
from pytest_edgeq.tflite.roles import stored_constant

if TYPE_CHECKING:
    from pytest_edgeq.quantized import QuantizedModel

__all__ = ["Forms", "by_name", "forms_of", "paired"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Forms:
    """
    Float files of a model, each with interpreters of its own.

    Attributes:
        exact: With torch's constants, as far as these are known.
        rounded: With constants as the quantized file rounds them: what torch is held against where
            its weights are rounded, too. It may be the same one.
        constants: Of the file that the flow made, with those of `rounded`.
    """

    exact: EdgeFile
    rounded: EdgeFile
    constants: Sequence[ConstantPair] = ()


def forms_of(quantized: QuantizedModel) -> Forms:
    """
    Return the float files of a model that a flow has made.

    A recipe quantizes a float file, which is kept. Of other flows the file that they made is
    written in float: with its own constants, and with those of torch that these were rounded from.

    Raises:
        ValueError: A constant of the file cannot be read.
    """
    if quantized.float_edge is not None:
        form = quantized.float_edge.apart()
        return Forms(form, form)
    made = quantized.origin or quantized.edge
    rounded = EdgeFile(write_in_float(made.graph).content)
    if made.key is not None:
        rounded = rounded.at(made.key)
    candidates = _candidates(quantized)
    if not candidates:
        return Forms(rounded, rounded)
    pairs = paired(made, rounded)
    subgraphs = (made.signature.subgraph, rounded.signature.subgraph)
    structure = Structure(made.graph, rounded.graph, subgraphs, pairs)
    found = unrounded_constants(candidates, structure.constants)
    constants = _by_tensor(made.graph, made.signature, found)
    exact = EdgeFile(write_in_float(made.graph, constants).content)
    if made.key is not None:
        exact = exact.at(made.key)
    return Forms(exact, rounded, structure.constants)


def paired(file: EdgeFile, form: EdgeFile) -> Pairs:
    """Pair the ops of two files, whose inputs are told by name, or by position."""
    ours, theirs = file.signature, form.signature
    return pair_ops(
        file.graph.subgraphs[ours.subgraph],
        form.graph.subgraphs[theirs.subgraph],
        by_name(ours, theirs, "inputs"),
    )


def by_name(ours: Signature, theirs: Signature, side: str) -> dict[int, int]:
    """
    Pair inputs or outputs by name where both files know the names, else by position.

    A different number of them is reported by `same.border_differences`.
    """
    one, two = getattr(ours, side), getattr(theirs, side)
    names = {border.name: border.tensor.index for border in two}
    known = names.keys() == {border.name for border in one}
    return {
        here.tensor.index: names[here.name] if known else there.tensor.index
        for here, there in zip(one, two, strict=False)
    }


def _candidates(quantized: QuantizedModel) -> list[tuple[Array, Array]]:
    """Return torch's constants, as the flow rounded them and as they were."""
    simulated = quantized.simulated
    if isinstance(simulated, torch.fx.GraphModule):
        return [(_array(one), _array(two)) for one, two in litert.constants_of(simulated)]
    reference = quantized.float_model
    if simulated is None or not isinstance(reference, torch.nn.Module):
        return []
    plain, known = litert.dequantized(simulated), dict(_tensors(reference))
    return [
        (_array(value), _array(known[name]))
        for name, value in _tensors(plain)
        if name in known and known[name].shape == value.shape
    ]


def _tensors(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return [(name, value) for name, value in named if value.is_floating_point()]


def _array(value: torch.Tensor) -> Array:
    array: Array = value.detach().to(torch.float64).numpy()
    return array


def _by_tensor(
    graph: OpGraph, signature: Signature, found: dict[tuple[int, int], Array]
) -> dict[tuple[int, int], Array]:
    """Map constants by tensor; skip those that a RESHAPE or TRANSPOSE changes before the op."""
    subgraph = graph.subgraphs[signature.subgraph]
    constants: dict[tuple[int, int], Array] = {}
    for (number, place), values in found.items():
        stored = stored_constant(subgraph, subgraph.ops[number].inputs[place])
        assert stored is not None, "found as a constant"
        if stored.tensor.is_quantized and values.shape == stored.tensor.shape:
            constants[subgraph.index, stored.tensor.index] = values.astype(np.float32)
    return constants
