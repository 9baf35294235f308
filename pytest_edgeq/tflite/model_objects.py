"""A `.tflite` file as objects of ai-edge-litert's schema, to change and to write."""

from __future__ import annotations

from typing import Any

from pytest_edgeq.tflite.graph import OpGraph


def unpacked(file: OpGraph) -> Any:
    """Return a new `ModelT` of a file, which the caller may change."""
    from ai_edge_litert import schema_py_generated as schema

    return schema.ModelT.InitFromObj(schema.Model.GetRootAs(file.buffer, 0))


def packed(model: Any, n_bytes: int = 1024) -> bytes:
    """Serialize a `ModelT` to the content of a file."""
    import flatbuffers  # type: ignore[import-untyped] # ships no types

    builder = flatbuffers.Builder(n_bytes)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(memoryview(builder.Bytes)[builder.Head() :])
