"""A memory-mapped file, never read whole."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import TypeAlias

Buffer: TypeAlias = "bytes | MappedFile"

Source: TypeAlias = Path | bytes
"""The path of a mapped file, or the content of one in memory."""


class MappedFile(mmap.mmap):
    """
    A file mapped for reading that detects later changes of the file.

    Overwriting a mapped file changes it for its readers, and truncating it kills a process that
    reads on.
    """

    path: Path
    label: str  # names the file in texts, such as `model.litertlm:embedder`
    section: str | None  # of the bundle that it is a copy of; None of another file
    _stamp: tuple[int, int, int]

    @classmethod
    def open(cls, path: Path, bundle: str = "", section: str | None = None) -> MappedFile:
        """Map a file, or the copy of a section of the bundle of this label."""
        with path.open("rb") as file:
            mapped = cls(file.fileno(), 0, access=mmap.ACCESS_READ)
        # So that the path stays valid in another working directory.
        mapped.path = path.absolute()
        mapped.section = section
        mapped.label = f"{bundle}:{section}" if bundle else str(mapped.path)
        mapped._stamp = _stamp(mapped.path)
        return mapped

    def check(self) -> None:
        """Check that the file is still the one that was opened."""
        if not self.path.exists():
            raise FileNotFoundError(f"{self.label} is gone since it was loaded; keep the file")
        if _stamp(self.path) != self._stamp:
            raise ValueError(
                f"{self.label} was written anew since it was loaded: load it again, or load its "
                "bytes (path.read_bytes()) if it is meant to change"
            )


def source_of(buffer: Buffer) -> Source:
    """Return the path of a mapped file, or the content of one in memory."""
    return buffer.path if isinstance(buffer, MappedFile) else buffer


def _stamp(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
