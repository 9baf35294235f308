"""Name the models inside files that hold several, such as MediaPipe's bundles."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from typing import Any

from pytest_edgeq.names import printable
from pytest_edgeq.tflite.mapped import Buffer, MappedFile

_SHOWN = 8

_SECTIONS = (
    *("NONE", "GenericBinaryData", "Deprecated", "TFLiteModel", "SP_Tokenizer"),
    *("LlmMetadataProto", "HF_Tokenizer_Zlib", "TFLiteWeights", "EmbeddingMetadataProto"),
    *("ExecutorMetadataProto", "TtsMetadataProto", "AsrMetadataProto"),
)
"""`AnySectionDataType` of LiteRT-LM's litertlm_header_schema.fbs, version 1.7."""

_LITERTLM = "a LiteRT-LM file (.litertlm)"

_HEADER_AT, _MOST = 32, 1 << 20
"""Where the flatbuffer of a LiteRT-LM file's header begins, and bytes that are read of it."""


def container_text(buffer: Buffer) -> str:
    """Describe a zip archive or a LiteRT-LM file and its content; empty for others."""
    head = bytes(buffer[:8])
    kinds = {b"PK\x03\x04": ("a zip archive", _zip_text), b"LITERTLM": (_LITERTLM, _litertlm_text)}
    for magic, (kind, text) in kinds.items():
        if head.startswith(magic):
            try:
                return f"it is {text(buffer)}"
            except Exception:  # whatever a damaged directory makes the readers raise
                return f"it is {kind}, whose directory cannot be read"
    return ""


def _litertlm_text(buffer: Buffer) -> str:
    return f"{_LITERTLM} with the sections {_listed(list(_sections(buffer)))}"


def _zip_text(buffer: Buffer) -> str:
    source = buffer.path if isinstance(buffer, MappedFile) else io.BytesIO(buffer)
    with zipfile.ZipFile(source) as archive:
        names = archive.namelist()
    if any(name.rpartition("/")[2] == "data.pkl" for name in names):
        return "a zip archive, a torch checkpoint"
    models = [name for name in names if name.endswith((".tflite", ".task"))]
    if models:
        return (
            f"a zip archive of models, as MediaPipe's .task files are, with "
            f"{_listed(models)}: unpack it, and give one of these"
        )
    return f"a zip archive with {_listed(names)}"


def _sections(buffer: Buffer) -> Iterator[str]:
    """
    Yield the kinds of a LiteRT-LM file's sections, with the type of models.

    The tables are those of litertlm_header_schema.fbs: metadata, sections, and pairs of key and
    value.
    """
    from flatbuffers.number_types import Uint8Flags  # type: ignore[import-untyped] # ships no types
    from flatbuffers.table import Table  # type: ignore[import-untyped]

    end = min(int.from_bytes(buffer[24:_HEADER_AT], "little"), _HEADER_AT + _MOST)
    content = bytes(buffer[_HEADER_AT:end])

    def member(table: Any, slot: int) -> Any:
        return Table(content, table.Indirect(table.Pos + table.Offset(slot)))

    def members(table: Any, slot: int) -> Iterator[Any]:
        offset = table.Offset(slot)
        if offset:
            start = table.Vector(offset)
            for place in range(table.VectorLen(offset)):
                yield Table(content, table.Indirect(start + 4 * place))

    root = Table(content, int.from_bytes(content[:4], "little"))
    for section in members(member(root, 6), 4):
        offset = section.Offset(10)
        number = section.Get(Uint8Flags, offset + section.Pos) if offset else 0
        name = _SECTIONS[number] if number < len(_SECTIONS) else f"section type {number}"
        for item in members(section, 4):
            if item.String(item.Pos + item.Offset(4)) == b"model_type":
                value = member(item, 8)
                name += f" ({value.String(value.Pos + value.Offset(4)).decode()})"
        yield name


def _listed(names: list[str]) -> str:
    shown = [printable(name) for name in names[:_SHOWN]]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(shown) + more
