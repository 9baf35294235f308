"""Tensors, ops, subgraphs and signatures of a `.tflite` file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.numerics.findings import WRONG_OP, Finding, Place


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """
    One tensor of a subgraph.

    Attributes:
        index: Position in the subgraph's tensor list.
        name: The name in the file.
        dtype: Lower-case name of the schema's `TensorType`, for instance `int8`, `int4`, `float32`.
        shape: As stored; a dynamic dimension is stored as 1.
        shape_signature: With −1 at each dynamic dimension.
        scales: One scale, or one a channel; empty where the tensor is not quantized. float32.
        zero_points: As many as scales. int64.
        quantized_dimension: The axis of the scales.
        block_size: Elements a scale for blockwise quantization, else 0.
        block_scales: Index of the tensor that holds the scales of blocks, else −1.
        block_zero_points: Index of the tensor that holds their zero points, −1 where all are 0.
        is_constant: Has data in the file.
        is_sparse: Stored in a sparse format.
        is_variable: Keeps its value from one run to the next.
        buffer: Index of its buffer in the file.
        is_external: Its data lies in a file of its own.
    """

    index: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    shape_signature: tuple[int, ...]
    scales: npt.NDArray[np.float32]
    zero_points: npt.NDArray[np.int64]
    quantized_dimension: int
    block_size: int
    block_scales: int
    block_zero_points: int
    is_constant: bool
    is_sparse: bool
    is_variable: bool
    buffer: int
    is_external: bool

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
    """
    One operator, in execution order.

    Attributes:
        index: Position in the subgraph.
        subgraph: Index of the subgraph.
        name: The schema's `BuiltinOperator`, or `CUSTOM:<code>`.
        inputs: Tensor indices; −1 stands for an optional input that was left out.
        outputs: Tensor indices.
        fused_activation: `RELU`, `RELU6`, …, or None.
    """

    index: int
    subgraph: int
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    fused_activation: str | None

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
    """
    An entry point of the file.

    Attributes:
        key: The signature's key, None for a file without signatures.
        subgraph: Index of the subgraph that it runs.
        inputs: In the subgraph's own order.
        outputs: In the subgraph's own order, which is the order of the torch model's outputs; the
            interpreter's signature runner sorts them by name instead.
    """

    key: str | None
    subgraph: int
    inputs: tuple[SignatureTensor, ...]
    outputs: tuple[SignatureTensor, ...]

    @property
    def has_free_shapes(self) -> bool:
        """
        Whether an axis of an input has any length.

        The file stores 1 for it, which its ops may refuse, so tensors are allocated for the shapes
        of a sample.
        """
        return any(-1 in each.tensor.shape_signature for each in self.inputs)
