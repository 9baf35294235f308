"""The op-dtype map: the dtypes in which each op of a `.tflite` file computes."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pytest_edgeq.numerics.findings import Place
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.modules import ModulePaths
from pytest_edgeq.tflite.ops import QDQ
from pytest_edgeq.tflite.roles import Roles, roles_of, stored_constant
from pytest_edgeq.tflite.subgraph import Op, Tensor

_QUANTIZED = ("int16x8", "int8", "uint8", "int4", "int2", "uint4", "int32")
SCHEMES = (*_QUANTIZED, "dynamic", "weight_only", "float16", "float", "integer")
"""Quantization schemes of ops; see `OpDtypes.scheme`."""


@dataclass(frozen=True, slots=True)
class OpDtypes:
    """
    One op of the map.

    Attributes:
        index: Position in its subgraph, in execution order.
        subgraph: Index of the subgraph.
        op: The operator's name in the schema, for instance `CONV_2D`.
        module: Path of the torch module (`""` is the model itself), None if unknown.
        inputs: dtypes of the data operands; shapes, axes and other arguments are left out.
        weight: dtype of the weight as stored in the file; several kinds are joined with `+`.
        bias: dtype of the bias as stored in the file.
        outputs: dtypes of the results.
        granularity: `per_tensor`, `per_channel` or `blockwise_<size>` of a quantized weight.
        scheme: `int8` (integer activations; `uint8` in older files, other widths by their own
            name), `int16x8`, `dynamic` (float activations, integer weights), `weight_only`
            (integer weights behind a DEQUANTIZE), `float16` (float16 weights or activations),
            `float`, or `integer` (no quantization, such as indices).
    """

    index: int
    subgraph: int
    op: str
    module: str | None
    inputs: tuple[str, ...]
    weight: str | None
    bias: str | None
    outputs: tuple[str, ...]
    granularity: str | None
    scheme: str

    @property
    def where(self) -> str:
        """The name of the op in texts: `CONV_2D #3 (layer1.0.conv)`."""
        return str(self.place)

    @property
    def place(self) -> Place:
        """The op as the place of a finding."""
        return Place("op", self.op, self.index, self.module, self.subgraph)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-able dict with sorted keys."""
        values = {name: getattr(self, name) for name in sorted(self.__slots__) if name != "index"}
        return values | {"inputs": list(self.inputs), "outputs": list(self.outputs)}


class OpDtypeMap:
    """
    The dtypes of every op and of the file's inputs and outputs.

    dtypes are those of the flatbuffer (numpy has no int4).

    Args:
        graph: The file's graph.
        modules: The torch model's modules, to name the ops after; None leaves every module None.
    """

    def __init__(self, graph: OpGraph, modules: ModulePaths | None = None) -> None:
        self._graph = graph
        self._entries = tuple(entry_of(graph, op, modules) for op in graph.ops)

    def __iter__(self) -> Iterator[OpDtypes]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpDtypeMap) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment] # compares by value

    def __repr__(self) -> str:
        schemes = Counter(entry.scheme for entry in self._entries)
        counts = ", ".join(f"{count} {scheme}" for scheme, count in sorted(schemes.items()))
        return f"<OpDtypeMap of {len(self)} ops: {counts}>"

    def ops(self, op: str | None = None, module: str | None = None) -> tuple[OpDtypes, ...]:
        """
        Select entries.

        Args:
            op: The operator's name, exactly.
            module: A glob (`fnmatch`) on the torch module path; an op of unknown module matches
                none.
        """
        return tuple(
            entry
            for entry in self._entries
            if (op is None or entry.op == op)
            and (
                module is None
                or (entry.module is not None and fnmatch.fnmatchcase(entry.module, module))
            )
        )

    def counts(self) -> dict[str, int]:
        """Return the number of ops, by name."""
        return dict(sorted(Counter(entry.op for entry in self._entries).items()))

    def to_dict(self) -> dict[str, Any]:
        """Return a sorted, JSON-able dict: `inputs`, `outputs` and `ops` in execution order."""
        return {
            "inputs": self._io_tensors("inputs"),
            "ops": [entry.to_dict() for entry in self._entries],
            "outputs": self._io_tensors("outputs"),
        }

    def _io_tensors(self, side: str) -> list[dict[str, Any]]:
        return [
            {
                "dtype": io_tensor.tensor.dtype,
                "name": io_tensor.name,
                "shape": list(io_tensor.tensor.shape_signature),
                "signature": signature.key,
            }
            for signature in self._graph.signatures
            for io_tensor in getattr(signature, side)
        ]


def entry_of(graph: OpGraph, op: Op, modules: ModulePaths | None = None) -> OpDtypes:
    """Return the entry of one op."""
    roles = roles_of(graph, op)
    return OpDtypes(
        index=op.index,
        subgraph=op.subgraph,
        op=op.name,
        module=None if modules is None else modules.path_of(graph, op),
        inputs=tuple(tensor.dtype for tensor in roles.inputs),
        weight=_joined(stored.tensor.dtype for stored in roles.weights),
        bias=_joined(stored.tensor.dtype for stored in roles.biases),
        outputs=tuple(tensor.dtype for tensor in roles.outputs),
        granularity=_joined(
            stored.tensor.granularity
            for stored in roles.weights
            if stored.tensor.granularity is not None
        ),
        scheme=_scheme(graph, op, roles),
    )


def _joined(kinds: Any) -> str | None:
    return "+".join(sorted(set(kinds))) or None


def _scheme(graph: OpGraph, op: Op, roles: Roles) -> str:
    activations = [*roles.inputs, *roles.outputs]
    dtypes = {tensor.dtype for tensor in activations if tensor.is_quantized}
    quantized = {"int16x8" if dtype == "int16" else dtype for dtype in dtypes}
    # Between two of them (a requantize) the first in this order.
    first = next((scheme for scheme in _QUANTIZED if scheme in quantized), None)
    if op.name == "DEQUANTIZE":
        stored = stored_constant(graph.subgraphs[op.subgraph], op.inputs[0])
        if stored is not None and not stored.dequantized:
            return "float16" if stored.tensor.dtype == "float16" else "weight_only"
    if any(tensor.is_floating_point for tensor in activations):
        if op.name in QDQ and first is not None:
            return first
        return _float_scheme(op, activations, roles)
    return first or min(quantized, default="integer")


def _float_scheme(op: Op, activations: list[Tensor], roles: Roles) -> str:
    for stored in roles.weights:
        if stored.operand.is_quantized:
            return "dynamic"
        if stored.tensor.is_quantized:
            return "weight_only"
        if stored.tensor.dtype == "float16":
            return "float16"
    floats = {tensor.dtype for tensor in activations if tensor.is_floating_point}
    if floats == {"float16"}:
        return "float16"
    if op.name.startswith(_OF_UNKNOWN_OPERANDS) and any(
        tensor.is_constant and tensor.is_quantized for tensor in roles.inputs
    ):
        return "dynamic"
    return "float"


# The table has no positions of their weights.
_OF_UNKNOWN_OPERANDS = ("BIDIRECTIONAL_SEQUENCE_", "CUSTOM:", "UNKNOWN_")
