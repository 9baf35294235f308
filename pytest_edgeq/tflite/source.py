"""
Open a `.tflite` file or a model of a bundle, or refuse it with the reason.

A file is mapped, never read whole; bytes are not copied.
"""

from __future__ import annotations

import io
import os
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from pytest_edgeq.errors import UnrunnableError
from pytest_edgeq.names import printable
from pytest_edgeq.tflite.bundles import open_bundle
from pytest_edgeq.tflite.mapped import Buffer, MappedFile, Source, source_of

TflitePath: TypeAlias = "str | os.PathLike[str]"

_IDENTIFIER = b"TFL3"
# Root offset (4 bytes) and file identifier (4 bytes): the least that a flatbuffer can hold.
_HEADER_BYTES = 8

_LISTED = 8

# Errors of the interpreter for an undamaged file that is newer than its kernels, or has custom
# ops: the graph can be read nevertheless, and a runtime reports missing kernels when it runs it.
_LACKS_KERNELS = (
    "builtin_code out of range",
    "Didn't find op",
    "Unsupported data type",
    "nresolved custom op",
)


def build_interpreter(source: Source) -> None:
    """
    Build an interpreter without allocating it, in 0.5 ms for any file size.

    Raises:
        ValueError, RuntimeError: It refuses the file.
    """
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    where: dict[str, Any] = (
        {"model_content": source} if isinstance(source, bytes) else {"model_path": str(source)}
    )
    Interpreter(**where, experimental_op_resolver_type=OpResolverType.BUILTIN_REF)


def open_tflite(
    source: TflitePath | bytes,
    build: Callable[[Buffer], None] | None = None,
    section: str | None = None,
) -> Buffer:
    """
    Return the bytes of a `.tflite` file, or of a model in a bundle, after checking that it is one.

    The interpreter's own verifier (`CreateWrapperFromBuffer` runs `tflite::VerifyModelBuffer`)
    finds tables that do not lie inside the file, such as in a truncated download.

    Raises:
        OSError, TypeError, ValueError, ModuleNotFoundError: It cannot be opened, or is no model.
        UnrunnableError: The process ended in which it was built.
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        buffer: Buffer = bytes(source)
        where = f"{len(buffer)} bytes"
    elif isinstance(source, (str, os.PathLike)):
        path = Path(source)
        where = str(path)
        try:
            buffer = _mapped(path)
        except OSError as error:
            if error.errno is None:  # raised here, with a sentence
                raise
            raise type(error)(f"{path} cannot be opened: {error.strerror}") from error
    else:
        raise TypeError(
            f"expected the path or the bytes of a .tflite file, got {type(source).__name__}"
        )
    bundle = open_bundle(source_of(buffer))
    if bundle is not None:
        name = bundle.choose(section)
        buffer = MappedFile.open(bundle.model(name), bundle.label, name)
        where = buffer.label
    _check(buffer, where, build or (lambda each: build_interpreter(source_of(each))))
    return buffer


def _mapped(path: Path) -> MappedFile:
    if not path.exists():
        near = sorted(p.name for p in path.parent.glob("*.tflite")) if path.parent.is_dir() else []
        hint = f"; {path.parent} holds {', '.join(near[:5])}" if near else ""
        raise FileNotFoundError(f"no .tflite file at {path}{hint}")
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(f"{path} is a folder, not a .tflite file")
    if not stat.S_ISREG(status.st_mode):
        # Opening a pipe would block, and none of them can be mapped.
        raise ValueError(f"{path} is no regular file, but a pipe, a socket or a device")
    if status.st_size == 0:
        raise ValueError(f"{path} is empty: 0 bytes are no .tflite file")
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{os.fsencode(path)!r}: the interpreter opens paths of UTF-8 only: rename the file, "
            "or load its bytes (path.read_bytes())"
        ) from None
    return MappedFile.open(path)


def _check(buffer: Buffer, where: str, build: Callable[[Buffer], None]) -> None:
    if len(buffer) < _HEADER_BYTES:
        raise ValueError(
            f"{where}: {len(buffer)} bytes are no .tflite file; was it written to the end?"
        )
    identifier = bytes(buffer[4:8])
    if identifier != _IDENTIFIER:
        if bytes(buffer[:4]) == b"PK\x03\x04":
            raise ValueError(f"{where}: not a .tflite file: it is {_zip_text(buffer)}")
        raise ValueError(
            f"{where}: not a .tflite file: file identifier {identifier!r}, expected {_IDENTIFIER!r}"
            f"{_guess_format(bytes(buffer[:8]))}"
        )
    try:
        build(buffer)
    except UnrunnableError:
        raise
    except (ValueError, RuntimeError) as error:
        error_text = str(error).strip()
        if any(symptom in error_text for symptom in _LACKS_KERNELS):
            return
        if "not a valid Flatbuffer" not in error_text:
            raise ValueError(
                f"{where}: no usable .tflite file: the interpreter says {error_text!r}; build or "
                "download it again"
            ) from None
        raise ValueError(
            f"{where}: damaged .tflite file: it has the identifier {_IDENTIFIER!r}, but its "
            f"{len(buffer):,} bytes are not a whole flatbuffer. It was truncated or overwritten; "
            "build or download it again."
        ) from None


def _guess_format(head: bytes) -> str:
    known = {
        b"\x08": "protocol buffers, such as ONNX",
        b"version ": "a Git LFS pointer: run `git lfs pull`",
        b"\x89HDF": "HDF5, such as a Keras model",
        b"<!DOCTY": "an HTML page, such as a failed download",
        b"<html": "an HTML page, such as a failed download",
    }
    for magic, meaning in known.items():
        if head.startswith(magic):
            return f" (it looks like {meaning})"
    return ""


def _zip_text(buffer: Buffer) -> str:
    """Describe a zip archive without models."""
    source = buffer.path if isinstance(buffer, MappedFile) else io.BytesIO(buffer)
    with zipfile.ZipFile(source) as archive:  # `open_bundle` has read it, too
        names = archive.namelist()
    if any(name.rpartition("/")[2] == "data.pkl" for name in names):
        return "a zip archive, a torch checkpoint"
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"a zip archive with {', '.join(map(printable, names[:_LISTED]))}{more}"
