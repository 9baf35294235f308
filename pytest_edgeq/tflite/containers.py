"""Name the models inside files that hold several, such as MediaPipe's bundles."""

from __future__ import annotations

import io
import zipfile

from pytest_edgeq.names import printable
from pytest_edgeq.tflite.mapped import Buffer, MappedFile

_SHOWN = 8


def container_text(buffer: Buffer) -> str:
    """Describe a zip archive or a LiteRT-LM file; empty for others."""
    head = bytes(buffer[:8])
    if head == b"LITERTLM":
        return "it is a LiteRT-LM file (.litertlm)"
    if not head.startswith(b"PK\x03\x04"):
        return ""
    try:
        return f"it is {_zip_text(buffer)}"
    except Exception:  # whatever a damaged directory makes the reader raise
        return "it is a zip archive, whose directory cannot be read"


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


def _listed(names: list[str]) -> str:
    shown = [printable(name) for name in names[:_SHOWN]]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(shown) + more
