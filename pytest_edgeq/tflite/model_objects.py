"""A `.tflite` file as objects of ai-edge-litert's schema, which can be changed and written."""

from __future__ import annotations

from typing import Any

from pytest_edgeq.tflite.graph import OpGraph


def unpacked(file: OpGraph) -> Any:
    """Return the `ModelT` of a file, made anew: changes of it are the caller's."""
    from ai_edge_litert import schema_py_generated as schema

    return schema.ModelT.InitFromObj(schema.Model.GetRootAs(file.buffer, 0))


def packed(model: Any, n_bytes: int = 1024) -> bytes:
    """Return the file of a `ModelT`."""
    import flatbuffers  # type: ignore[import-untyped] # ships no types

    builder = flatbuffers.Builder(n_bytes)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(memoryview(builder.Bytes)[builder.Head() :])
