"""Tensors, ops, subgraphs and signatures of a `.tflite` file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.numerics.findings import WRONG_OP, Finding, Place


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Tensor:
    """One tensor of a subgraph."""

    index: int  # position in the subgraph's tensor list
    name: str  # the name in the file
    # Lower-case name of the schema's `TensorType`, for instance `int8`, `int4`, `float32`
    dtype: str
    shape: tuple[int, ...]  # as stored; a dynamic dimension is stored as 1
    shape_signature: tuple[int, ...]  # with −1 at each dynamic dimension
    # One scale, or one a channel; empty where the tensor is not quantized. float32.
    scales: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    # as many as scales. int64.
    zero_points: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    quantized_dimension: int = 0  # the axis of the scales
    block_size: int = 0  # elements a scale for blockwise quantization
    block_scales: int = -1  # index of the tensor that holds the scales of blocks
    block_zero_points: int = -1  # index of the tensor that holds their zero points; −1: all are 0
    is_constant: bool  # has data in the file
    is_sparse: bool  # stored in a sparse format
    is_variable: bool  # keeps its value from one run to the next
    buffer: int  # index of its buffer in the file
    is_external: bool  # its data lies in a file of its own

    @property
    def is_quantized(self) -> bool:
        """Whether it is an integer tensor with scales, or with a tensor of scales."""
        return (len(self.scales) > 0 or self.block_scales >= 0) and self.dtype.startswith(
            ("int", "uint")
        )

    @property
    def is_floating_point(self) -> bool:
        """Whether its elements are real or complex floats of any width."""
        return self.dtype.startswith(("float", "bfloat", "complex"))

    @property
    def granularity(self) -> str | None:
        """`per_tensor`, `per_channel`, `blockwise_<size>`, `multi_axis`; None if not quantized."""
        if not self.is_quantized:
            return None
        if self.block_scales >= 0:
            return f"blockwise_{self.block_size}" if self.block_size else "multi_axis"
        return "per_tensor" if len(self.scales) == 1 else "per_channel"


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One operator, in execution order."""

    index: int  # position in the subgraph
    subgraph: int  # index of the subgraph
    name: str  # the schema's `BuiltinOperator`, or `CUSTOM:<code>`
    inputs: tuple[int, ...]  # tensor indices; −1 stands for an optional input that was left out
    outputs: tuple[int, ...]  # tensor indices
    fused_activation: str | None  # `RELU`, `RELU6`, …, or None

    @property
    def place(self) -> Place:
        """The op as the place of a finding, without its module."""
        return Place("op", self.name, self.index, subgraph=self.subgraph)

    def wrong(self, symptom: str, **known: Any) -> Finding:
        """Return a finding on this op: of kind `WRONG_OP`, unless `known` has another."""
        return Finding(**{"kind": WRONG_OP, "place": self.place, "symptom": symptom, **known})


@dataclass(frozen=True, slots=True, eq=False)
class Subgraph:
    """
    Tensors, ops, inputs and outputs of one subgraph.

    `producer` maps a tensor to the op that computes it, `consumers` to the ops that read it, once
    for each operand, in execution order; every tensor is in it.
    """

    index: int
    name: str
    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    producer: dict[int, Op] = field(repr=False)
    consumers: dict[int, list[Op]] = field(repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class SignatureTensor:
    """An input or output of a signature, with its name for users."""

    name: str
    tensor: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """An entry point of the file."""

    key: str | None  # the signature's key, None for a file without signatures
    subgraph: int  # index of the subgraph that it runs
    inputs: tuple[SignatureTensor, ...]  # in the subgraph's own order
    # In the subgraph's own order, which is the order of the torch model's outputs; the
    # interpreter's signature runner sorts them by name instead
    outputs: tuple[SignatureTensor, ...]

    @property
    def has_free_shapes(self) -> bool:
        """Whether an axis of an input has any length, stored as 1, which ops may refuse."""
        return any(-1 in each.tensor.shape_signature for each in self.inputs)
