"""
Bundles: LiteRT-LM's `.litertlm` and MediaPipe's `.task`, several models in one file.

Each model is copied to a temporary file, which is mapped and run like any `.tflite`.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import hashlib
import io
import os
import shutil
import tempfile
import threading
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from pytest_edgeq.names import nearest, readable

_LITERTLM, _ZIP = b"LITERTLM", b"PK\x03\x04"  # first bytes
_HEADER_END = 24  # where the header of a `.litertlm` says where it ends
_CHUNK = 1 << 20
_MODEL = "TFLiteModel"  # LiteRT-LM's name of the type

_lock = threading.Lock()  # held while a copy is made


@dataclass(frozen=True, slots=True)
class BundleSection:
    """A section of a bundle: a model or other data."""

    name: str
    kind: str  # type in LiteRT-LM's words; of members of a zip archive `TFLiteModel` or `file`
    size: int  # in bytes
    place: int | tuple[zipfile.ZipInfo, ...]  # offset in the file, or member and its member

    @property
    def is_model(self) -> bool:
        """Whether it is a `.tflite` file."""
        return self.kind == _MODEL


@dataclass(frozen=True, slots=True)
class LmMetadata:
    """Special tokens of a language model, each as text or as ids."""

    start_token: str | tuple[int, ...] | None
    stop_tokens: tuple[str | tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class BundleTokenizer:
    """The tokenizer of a bundle: a SentencePiece model or the text of a `tokenizer.json`."""

    kind: str  # `sentencepiece` or `huggingface`
    content: bytes


class Bundle:
    """A file that holds several models."""

    def __init__(self, path: Path, stamp: tuple[int, int], label: str) -> None:
        self.path, self._stamp = path, stamp
        self.label = label  # the path in texts, or the length of bytes
        with path.open("rb") as file, self._described("its list of sections"):
            is_zip = file.read(len(_ZIP)) == _ZIP
            found = [*(_members(file) if is_zip else _sections(path, stamp[0]))]
        names: Counter[str] = Counter()
        for at, each in enumerate(found):
            names[each.name] += 1
            if (number := names[each.name]) > 1:
                found[at] = replace(each, name=f"{each.name}_{number}")
        self.sections = tuple(found)  # in the order of the file
        self.names = tuple(each.name for each in found if each.is_model)
        self._copies = Path(tempfile.mkdtemp(dir=_folder()))

    def model(self, name: str) -> Path:
        """Return the path of a copy of a model, which is made once."""
        path = self._copies / f"{self.names.index(name)}.tflite"
        section = next(each for each in self.sections if each.name == name)
        if not section.size:
            raise ValueError(f"{self.label}:{name} is empty: 0 bytes are no .tflite file")
        with _lock:
            if not path.exists():
                try:
                    with path.open("wb") as file:
                        file.writelines(self.chunks(section))
                except BaseException:
                    path.unlink()
                    raise
        return path

    @functools.cached_property
    def metadata(self) -> LmMetadata | None:
        """The tokens of a language model; None if the bundle has no metadata."""
        content = self._content("LlmMetadataProto")
        if content is None:
            return None
        from litert_lm_builder.runtime.proto import llm_metadata_pb2

        with self._described("LlmMetadataProto"):
            found = llm_metadata_pb2.LlmMetadata.FromString(content)
            start, stops = _token(found.start_token), tuple(map(_token, found.stop_tokens))
            return LmMetadata(start or None, stops)

    @functools.cached_property
    def tokenizer(self) -> BundleTokenizer | None:
        """The tokenizer of a language model; None if the bundle has none."""
        if (content := self._content("SP_Tokenizer")) is not None:
            return BundleTokenizer("sentencepiece", content)
        if (content := self._content("HF_Tokenizer_Zlib")) is None:
            return None
        with self._described("HF_Tokenizer_Zlib"):
            size = int.from_bytes(content[:8], "little")  # of the text, which follows compressed
            text = zlib.decompressobj().decompress(content[8:], size)
            if len(text) != size:
                raise ValueError(f"{size - len(text):,} bytes are missing")
        return BundleTokenizer("huggingface", text)

    def choose(self, section: str | None) -> str:
        """Return the name of the model to open: the requested one, or the only one."""
        known = ", ".join(self.names) or "none"
        if section is None and len(self.names) != 1:
            first = next(iter(self.names), "NAME")
            raise ValueError(
                f"{self.label} is a bundle; its models: {known}. Choose one: "
                f"edgeq.load(path, section={first!r}), or --section {first} on the command line"
            )
        name = self.names[0] if section is None else section
        if name not in self.names:
            hint = nearest(str(name), self.names)
            raise ValueError(f"{self.label} has no model {name!r}{hint}; its models: {known}")
        return name

    def _content(self, kind: str) -> bytes | None:
        """Return the content of the first section of a type."""
        found = (each for each in self.sections if each.kind == kind)
        return next((b"".join(self.chunks(each)) for each in found), None)

    def chunks(self, section: BundleSection) -> Iterator[bytes]:
        """Read a section piece by piece."""
        status = self.path.stat()
        if (status.st_size, status.st_mtime_ns) != self._stamp:
            raise ValueError(f"{self.label} was written anew since it was opened: open it again")
        with contextlib.ExitStack() as stack, self._described(section.name):
            content: IO[bytes] = stack.enter_context(self.path.open("rb"))
            if isinstance(section.place, int):
                content.seek(section.place)
            else:
                for member in section.place:
                    content = stack.enter_context(zipfile.ZipFile(content).open(member))
            left = section.size
            while left:
                chunk = content.read(min(left, _CHUNK))
                if not chunk:
                    raise ValueError(f"{left:,} bytes are missing")
                left -= len(chunk)
                yield chunk

    @contextlib.contextmanager
    def _described(self, part: str) -> Iterator[None]:
        """Name file and section in the error of a damaged bundle."""
        try:
            yield
        except ModuleNotFoundError:
            raise
        except Exception as error:  # whatever damaged bytes make the readers raise
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise  # and no offset before the file
            raise ValueError(
                f"{self.label}: damaged bundle or archive: {part} cannot be read ({error}). It "
                "was truncated or overwritten; build or download it again"
            ) from None


def open_bundle(source: str | os.PathLike[str] | bytes) -> Bundle | None:
    """
    Open a bundle, once for each state of a file; return None if it is another file.

    Raises:
        ValueError: Truncated or damaged.
        ModuleNotFoundError: The package that reads `.litertlm` is not installed.
    """
    if isinstance(source, bytes):
        head, label = source[: len(_LITERTLM)], f"{len(source)} bytes"
    elif (path := Path(source).absolute()).is_file():
        with path.open("rb") as file:
            head, label = file.read(len(_LITERTLM)), str(path)
    else:
        return None
    if head != _LITERTLM and not head.startswith(_ZIP):
        return None
    with _lock:
        if isinstance(source, bytes):
            path = _folder() / hashlib.sha256(source).hexdigest()
            if not path.exists():
                path.write_bytes(source)
        status = path.stat()
        bundle = _opened(path, (status.st_size, status.st_mtime_ns), label)
    return bundle if bundle.names or head == _LITERTLM else None


_opened = functools.cache(Bundle)


def _sections(path: Path, size: int) -> Iterator[BundleSection]:
    """Yield the sections of a `.litertlm` file."""
    try:
        from litert_lm_builder import litertlm_header_schema_py_generated as schema
        from litert_lm_builder import litertlm_peek as peek
    except ModuleNotFoundError as error:
        text = f"{path} is a LiteRT-LM bundle, which a missing package reads"
        raise ModuleNotFoundError(f"{text}: pip install litert-lm-builder") from error
    with path.open("rb") as file:
        file.seek(_HEADER_END)
        if (end := int.from_bytes(file.read(8), "little")) > size:
            raise ValueError(f"it ends at byte {end:,} of {size:,}")
    kinds = {number: kind for kind, number in vars(schema.AnySectionDataType).items()}
    listed = peek.read_litertlm_header(str(path), io.StringIO()).SectionMetadata()
    for each in map(listed.Objects, range(listed.ObjectsLength())):
        begin, end = each.BeginOffset(), each.EndOffset()
        name = kind = kinds.get(each.DataType(), f"type {each.DataType()}")
        if kind == _MODEL:
            name = readable((peek.get_model_type(each) or "model").removeprefix("tf_lite_"))
        if not begin <= end <= size:
            raise ValueError(f"{name} ends at byte {end:,} of {size:,}")
        yield BundleSection(name, kind, end - begin, begin)


def _members(file: IO[bytes], outer: tuple[zipfile.ZipInfo, ...] = ()) -> Iterator[BundleSection]:
    """Yield the members of a zip archive, and those of archives in it."""
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            place = (*outer, member)
            if member.filename.endswith(".task") and not outer:
                with archive.open(member) as inner:
                    yield from _members(inner, place)
            elif not member.is_dir():
                # Language models have names such as TF_LITE_PREFILL_DECODE.
                is_model = member.filename.endswith(".tflite")
                is_model |= member.filename.startswith("TF_LITE_")
                name = readable("/".join(each.filename for each in place))
                yield BundleSection(name, _MODEL if is_model else "file", member.file_size, place)


def _token(token: Any) -> str | tuple[int, ...]:
    return tuple(token.token_ids.ids) if token.HasField("token_ids") else str(token.token_str)


@functools.cache
def _folder() -> Path:
    """Return the folder of this process for copies; it is removed at exit."""
    folder = Path(tempfile.mkdtemp(prefix="edgeq-bundles-"))
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # and not a fork of it
        shutil.rmtree(folder, ignore_errors=True)
