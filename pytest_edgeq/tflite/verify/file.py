"""All checks of a file, each tensor and each op once; constants are measured, not copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_edgeq.tflite.verify.calls import verify_calls
from pytest_edgeq.tflite.verify.op_options import verify_options
from pytest_edgeq.tflite.verify.operands import verify_ops
from pytest_edgeq.tflite.verify.signatures import verify_signatures
from pytest_edgeq.tflite.verify.tensors import verify_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_edgeq.tflite.mapped import Buffer
    from pytest_edgeq.tflite.subgraph import Signature, Subgraph


def verify(
    model: Any,
    subgraphs: Sequence[Subgraph],
    signatures: Sequence[Signature],
    content: Buffer,
) -> None:
    """
    Check what the interpreter takes for granted of a flatbuffer that is whole.

    Raises:
        ValueError: Names the tensor, op or signature and what is wrong with it.
    """
    for subgraph in subgraphs:
        raw = model.Subgraphs(subgraph.index)
        verify_tensors(model, raw, subgraph, content)
        verify_ops(raw, subgraph)
        verify_options(raw, subgraph)
    verify_calls(model, subgraphs)
    verify_signatures(signatures, subgraphs)
