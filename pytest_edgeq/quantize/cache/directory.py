"""The cache directory: verified reads, atomic writes, eviction, and one lock for each key."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, ClassVar, Final, NamedTuple

from pytest_edgeq.baselines.regular_files import NotRegularError, open_regular

if TYPE_CHECKING:
    from filelock import BaseFileLock

# Bytes above which the entries that were used longest ago are deleted.
DEFAULT_LIMIT: Final = 2 << 30

_SUFFIX = ".entry"
_LONGEST_HEADER = 1 << 16

_TEMPORARY = re.compile(r"\..+\.entry\.[0-9]+-[0-9a-f]+")

_GITIGNORE = "# Created by pytest-edgeq: finished conversions, safe to delete.\n*\n"

# Errors of functions that take a path; ValueError if the path contains a NUL.
_REFUSALS = (OSError, ValueError)

Report = Callable[[str], None]


def _warn_user(text: str) -> None:
    # Here, since the plugin counts entries in every run of pytest.
    from pytest_edgeq.errors import warn_user

    warn_user(text)


class CacheLog(NamedTuple):
    """Receivers of messages; not Python warnings in pytest, where a suite may make them errors."""

    warn: Report = _warn_user
    note: Report = lambda text: None


class _DamagedError(Exception):
    """The file of an entry has other content; the text has the reason."""


_THREAD: Final = threading.local()


class Store:
    """Entries of named byte strings, a file each; one that cannot be read or written is a miss."""

    # Bytes that this process may write to a directory before it lists the files there again, which
    # takes a `stat` of each.
    _room: ClassVar[dict[Path, int]] = {}

    def __init__(self, directory: Path, warn: Report, *, limit: int = DEFAULT_LIMIT) -> None:
        self.directory = directory
        self._warn = warn
        self._limit = limit
        self._warned: set[str] = set()

    def read(self, kind: str, key: str) -> dict[str, bytes] | None:
        """Return the parts of an entry; None if it is missing or damaged."""
        path = self._path(kind, key)
        try:
            with open_regular(path) as file:
                parts = _unpack(file, f"{kind}/{key}", self._limit)
        except FileNotFoundError:
            return None
        except (_DamagedError, NotRegularError) as error:
            self.report_damage(kind, key, str(error))
            return None
        except _REFUSALS as error:
            self.report(f"{path} cannot be read ({error}); the step runs again")
            return None
        with contextlib.suppress(OSError):  # last use, for the eviction; the content is at hand
            os.utime(path)
        return parts

    def write(self, kind: str, key: str, parts: Mapping[str, bytes]) -> None:
        """Store an entry atomically, and evict others if the directory may be too large."""
        path = self._path(kind, key)
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(8).hex()}")
        try:
            self._make_folder(path.parent)
            try:
                with temporary.open("wb") as file:
                    file.writelines(_pack(f"{kind}/{key}", parts))
                    size = file.tell()
                temporary.replace(path)
            except BaseException:
                # The first error is reported; eviction deletes what is left.
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
                raise
        except _REFUSALS as error:
            self.report(f"{path} cannot be written ({error}); the result is not kept")
            return
        room = self._room.get(self.directory, 0) - size
        if room < 0:  # other processes write, too
            room = min(self._limit - self._evict(), self._limit // 64)
        self._room[self.directory] = room

    def keys(self, kind: str, prefix: str) -> list[str]:
        """Return the keys of a kind that begin with a prefix, sorted."""
        try:
            names = [path.name for path in (self.directory / kind).iterdir()]
        except _REFUSALS:
            return []
        found = (name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))
        return sorted(name for name in found if name.startswith(prefix))

    @contextlib.contextmanager
    def lock(self, kind: str, key: str) -> Iterator[None]:
        """
        Acquire the exclusive lock of a key, which a thread may acquire repeatedly.

        Lock files are never deleted: a process that has opened a deleted file and one that makes a
        new one would both get the lock.
        """
        path = self.directory / "locks" / f"{kind}-{key}.lock"
        lock, name = None, ""
        held: set[str] = vars(_THREAD).setdefault("held", set())  # lock files of this thread
        try:
            self._make_folder(path.parent)
            name = os.path.realpath(path)
            if name not in held:
                lock = _acquired(path)
                held.add(name)
        except (*_REFUSALS, NotImplementedError) as error:
            self.report(
                f"{path} cannot be locked ({error}); two processes may convert the same model"
            )
        try:
            yield
        finally:
            if lock is not None:
                with contextlib.suppress(OSError):  # then held, as waiting for it would deadlock
                    lock.release()
                    held.discard(name)

    def report_damage(self, kind: str, key: str, why: str) -> None:
        """Report that the content of an entry is damaged."""
        path = self._path(kind, key)
        self.report(f"{path} is damaged ({why}); the step runs again and replaces it")

    def report(self, text: str) -> None:
        """Report a problem, once for equal texts."""
        if text not in self._warned:
            self._warned.add(text)
            self._warn(f"conversion cache: {text}")

    def _path(self, kind: str, key: str) -> Path:
        return self.directory / kind / f"{key}{_SUFFIX}"

    def _make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        ignore = self.directory / ".gitignore"
        if not ignore.exists():
            ignore.write_text(_GITIGNORE, encoding="utf-8")

    def _evict(self) -> int:
        """Delete the least recently used entries, and return the bytes of the others."""
        total = 0
        entries: list[tuple[int, Path, int]] = []
        for path, status in _files(self.directory):
            if path.suffix == _SUFFIX:
                entries.append((status.st_mtime_ns, path, status.st_size))
                total += status.st_size
            elif _TEMPORARY.fullmatch(path.name) and status.st_mtime < time.time() - 3600:
                with contextlib.suppress(OSError):
                    path.unlink()  # of a writer that has died
        for _, path, size in sorted(entries):
            if total <= self._limit:
                break
            with contextlib.suppress(OSError):  # else others go in its place
                path.unlink(missing_ok=True)
                total -= size
        return total


def size_of(directory: Path) -> tuple[int, int]:
    """Return the number of entries below a directory, and their bytes."""
    sizes = [status.st_size for path, status in _files(directory) if path.suffix == _SUFFIX]
    return len(sizes), sum(sizes)


def is_cache(directory: Path) -> bool:
    """Return whether a directory was made by a `Store`."""
    try:
        return (directory / ".gitignore").read_text(encoding="utf-8") == _GITIGNORE
    except _REFUSALS:
        return False


def clear(directory: Path) -> tuple[int, int]:
    """Delete all entries below a directory; return their number and their bytes."""
    sizes = []
    for path, status in _files(directory):
        if path.suffix == _SUFFIX:
            path.unlink(missing_ok=True)
            sizes.append(status.st_size)
    return len(sizes), sum(sizes)


def _files(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield every readable file in the folders of a directory."""
    for folder, its_status in _listed(directory):
        if stat.S_ISDIR(its_status.st_mode):
            for path, status in _listed(folder):
                if stat.S_ISREG(status.st_mode):
                    yield path, status


def _listed(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """List a folder's files and folders; skip those that vanish or cannot be read."""
    with contextlib.suppress(*_REFUSALS), os.scandir(folder) as found:
        for each in list(found):
            with contextlib.suppress(OSError):  # deleted by another process since it was listed
                yield Path(each.path), each.stat(follow_symlinks=False)


def _acquired(path: Path) -> BaseFileLock:
    """Wait for the lock of a file, and return it."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    with warnings.catch_warnings():
        # A newer one warns and makes a lock that survives a killed process.
        warnings.filterwarnings("error", "flock not supported", UserWarning)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            pass  # and wait below: warning filters apply to all threads
        except UserWarning as error:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from error
        else:
            return lock
    lock.acquire()
    return lock


def _pack(name: str, parts: Mapping[str, bytes]) -> Iterator[bytes]:
    """Yield a JSON line with the parts' lengths, the parts, and a hash."""
    header = json.dumps([name, [[part, len(content)] for part, content in parts.items()]])
    hasher = hashlib.sha256()
    for piece in (header.encode() + b"\n", *parts.values()):
        hasher.update(piece)
        yield piece
    yield hasher.digest()


def _unpack(file: BinaryIO, name: str, limit: int) -> dict[str, bytes]:
    """Read an entry and verify its lengths and its hash, or raise a _DamagedError."""
    size = os.fstat(file.fileno()).st_size
    if size > limit:
        raise _DamagedError("larger than the whole cache may be")
    header = file.readline(_LONGEST_HEADER)
    try:
        owner, table = json.loads(header)
        lengths = {str(part): int(count) for part, count in table}
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise _DamagedError("not an entry of this cache") from error
    hasher = hashlib.sha256(header)
    expected = file.tell() + sum(lengths.values()) + hasher.digest_size
    if min(lengths.values(), default=0) < 0 or size != expected:
        raise _DamagedError(f"expected {expected} bytes, got {size}")
    parts = {}
    for part, count in lengths.items():
        parts[part] = file.read(count)
        hasher.update(parts[part])
    if file.read() != hasher.digest():
        raise _DamagedError("it does not have the hash that it should")
    if owner != name:
        raise _DamagedError(f"it is the entry {owner}")
    return parts
