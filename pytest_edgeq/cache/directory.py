"""The cache directory: verified reads, atomic writes, eviction, and one lock for each key."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

__all__ = ["DEFAULT_LIMIT", "Store", "size_of"]

DEFAULT_LIMIT: Final = 2 << 30
"""Bytes above which the entries that were used longest ago are deleted."""

_MAGIC = b"edgeq-cache 1 "
_SUFFIX = ".entry"
_DIGITS = 64  # of a SHA-256 in hexadecimal
_LONGEST_LINE = len(_MAGIC) + _DIGITS + 22  # a blank, the length of the header, and the line's end

_ABANDONED_S = 3600.0
"""Age in seconds of a temporary file whose writer has died."""

_UNCOUNTED = 1 / 16
"""Share of the limit after which a process that writes recounts the size of the directory."""

_GITIGNORE = "# Created by pytest-edgeq: finished conversions, safe to delete.\n*\n"

Report = Callable[[str], None]


class Store:
    """
    Entries of named byte strings, one file each, below one directory.

    Nothing here raises: an entry that cannot be read or written is a miss, and is reported.

    Args:
        directory: Made with the first write; it may be deleted at any time.
        warn: Called with a sentence for each problem, once for equal sentences.
        limit: Bytes that all entries may take.
    """

    def __init__(self, directory: Path, warn: Report, *, limit: int = DEFAULT_LIMIT) -> None:
        self.directory = directory
        self._warn = warn
        self._limit = limit
        self._warned: set[str] = set()
        self._counted: int | None = None
        self._written = 0

    def read(self, kind: str, key: str) -> dict[str, bytes] | None:
        """
        Return the parts of an entry; None where there is none or it is damaged.

        Args:
            kind: The step, such as `convert`.
            key: Of the entry: letters, digits and dots.
        """
        path = self._path(kind, key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._problem(f"{path} cannot be read ({error}); the step runs again")
            return None
        try:
            parts = _unpack(content, f"{kind}/{key}")
        except ValueError as error:
            self._problem(f"{path} is damaged ({error}); the step runs again and replaces it")
            return None
        with contextlib.suppress(OSError):  # last use, for the eviction; the content is at hand
            os.utime(path)
        return parts

    def write(self, kind: str, key: str, parts: Mapping[str, bytes]) -> None:
        """Store an entry atomically, and evict others where the directory grows too large."""
        path = self._path(kind, key)
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(8).hex()}")
        try:
            self._make_folder(path.parent)
            try:
                with temporary.open("wb") as file:
                    for piece in _pack(f"{kind}/{key}", parts):
                        file.write(piece)
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            self._written += path.stat().st_size
            if (
                self._counted is None
                or self._counted + self._written > self._limit
                or self._written > self._limit * _UNCOUNTED
            ):
                self._evict()
        except OSError as error:
            self._problem(f"{path} cannot be written ({error}); the result is not kept")

    def keys(self, kind: str, prefix: str) -> list[str]:
        """Return the keys of a kind that begin with a prefix, sorted."""
        try:
            names = [path.name for path in (self.directory / kind).iterdir()]
        except OSError:
            return []
        found = (name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))
        return sorted(name for name in found if name.startswith(prefix))

    @contextlib.contextmanager
    def lock(self, kind: str, key: str) -> Iterator[None]:
        """
        Hold the only lock of a key; wait while another process holds it.

        The operating system releases the lock of a process that dies.
        """
        from filelock import FileLock

        path = self.directory / "locks" / f"{kind}-{key}.lock"
        lock = None
        try:
            self._make_folder(path.parent)
            lock = FileLock(path)
            lock.acquire()
        except (OSError, NotImplementedError) as error:
            lock = None
            self._problem(
                f"{path} cannot be locked ({error}); two processes may convert the same model"
            )
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def _path(self, kind: str, key: str) -> Path:
        return self.directory / kind / f"{key}{_SUFFIX}"

    def _make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        ignore = self.directory / ".gitignore"
        if not ignore.exists():
            ignore.write_text(_GITIGNORE, encoding="utf-8")

    def _evict(self) -> None:
        entries, total = [], 0
        for path, status in _files(self.directory):
            if path.name.startswith(".") and path.name != ".gitignore":
                if time.time() - status.st_mtime > _ABANDONED_S:
                    path.unlink(missing_ok=True)
            elif path.suffix == _SUFFIX:
                entries.append((status.st_mtime_ns, path, status.st_size))
                total += status.st_size
        for _, path, size in sorted(entries):
            if total <= self._limit:
                break
            path.unlink(missing_ok=True)
            total -= size
        self._counted, self._written = total, 0

    def _problem(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._warn(f"conversion cache: {text}")


def size_of(directory: Path) -> tuple[int, int]:
    """Return the number of entries below a directory, and their bytes."""
    sizes = [status.st_size for path, status in _files(directory) if path.suffix == _SUFFIX]
    return len(sizes), sum(sizes)


def _files(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every file below a directory; those that vanish meanwhile are left out."""
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder, name)
            with contextlib.suppress(FileNotFoundError):
                yield path, path.stat()


def _pack(name: str, parts: Mapping[str, bytes]) -> Iterator[bytes]:
    table = [
        [part, len(content), hashlib.sha256(content).hexdigest()] for part, content in parts.items()
    ]
    header = json.dumps({"name": name, "parts": table}).encode()
    yield _MAGIC + hashlib.sha256(header).hexdigest().encode() + b" %d\n" % len(header)
    yield header
    yield from parts.values()


def _unpack(content: bytes, name: str) -> dict[str, bytes]:
    """
    Read an entry and verify every byte of it.

    Raises:
        ValueError: Not an entry, another one's, cut off, or changed.
    """
    end = content.find(b"\n", 0, _LONGEST_LINE)
    line, rest = content[: max(end, 0)], memoryview(content)[end + 1 :]
    start = len(_MAGIC) + _DIGITS
    magic, separator, length = line[: len(_MAGIC)], line[start : start + 1], line[start + 1 :]
    if end < 0 or magic != _MAGIC or separator != b" " or not length.isdigit():
        raise ValueError("not an entry of this cache")
    size = int(length)
    header = bytes(rest[:size])
    if hashlib.sha256(header).hexdigest().encode() != line[len(_MAGIC) : start]:
        raise ValueError("its header does not have the hash that it should")
    told = json.loads(header)
    if told["name"] != name:
        raise ValueError(f"it is the entry {told['name']}")
    view, parts = rest[size:], {}
    for part, count, digest in told["parts"]:
        taken = bytes(view[:count])
        if len(taken) < count:
            raise ValueError("it is cut off")
        if hashlib.sha256(taken).hexdigest() != digest:
            raise ValueError(f"its part {part!r} does not have the hash that it should")
        parts[part] = taken
        view = view[count:]
    if len(view):
        raise ValueError(f"{len(view)} bytes follow it")
    return parts
