"""Write a copy of a `.tflite` file with ops replaced by another file's."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pytest_edgeq.tflite.flatbuffer import aligned_buffer
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.model_objects import packed, unpacked
from pytest_edgeq.tflite.subgraph import Op


@dataclass(frozen=True, slots=True)
class Graft:
    """The parts of an op that are replaced by those of another file's op."""

    op: Op  # the op of the file
    donor: Op  # the op of the other file
    replaces_kind: bool = False  # whether operator code and options are replaced
    # By position, the tensor of the file to read instead
    operands: Mapping[int, int] = field(default_factory=dict)
    # Positions of the operands that are replaced by the donor's constants
    constants: frozenset[int] = frozenset()

    def parts(self) -> Iterable[Graft]:
        """Split it into grafts of one part each."""
        if self.replaces_kind:
            yield Graft(self.op, self.donor, replaces_kind=True)
        for place, tensor in self.operands.items():
            yield Graft(self.op, self.donor, operands={place: tensor})
        for place in sorted(self.constants):
            yield Graft(self.op, self.donor, constants=frozenset({place}))


def write_with(file: OpGraph, donor: OpGraph, grafts: Iterable[Graft]) -> bytes:
    """Write a file with parts of its ops replaced."""
    model, other = unpacked(file), unpacked(donor)
    for graft in grafts:
        subgraph = model.subgraphs[graft.op.subgraph]
        theirs = other.subgraphs[graft.donor.subgraph]
        own, replacement = subgraph.operators[graft.op.index], theirs.operators[graft.donor.index]
        if graft.replaces_kind:
            model.operatorCodes.append(other.operatorCodes[replacement.opcodeIndex])
            own.opcodeIndex = len(model.operatorCodes) - 1
            for name in vars(replacement):
                if "ption" in name:  # builtinOptions, builtinOptions2Type, customOptionsFormat, …
                    setattr(own, name, getattr(replacement, name))
        own.inputs = [
            _constant(model, subgraph, donor, graft.donor, theirs, place)
            if place in graft.constants
            else graft.operands.get(place, int(index))
            for place, index in enumerate(own.inputs)
        ]
    return packed(model)


def _constant(model: Any, subgraph: Any, donor: OpGraph, op: Op, theirs: Any, place: int) -> int:
    """Add a constant operand of the donor to a file; return its index."""
    index = op.inputs[place]
    tensor = copy.copy(theirs.tensors[index])
    model.buffers.append(aligned_buffer(np.asarray(donor.stored(donor.tensor(op, index)))))
    tensor.buffer = len(model.buffers) - 1
    subgraph.tensors.append(tensor)
    return len(subgraph.tensors) - 1
