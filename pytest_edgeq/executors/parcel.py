"""Content that travels to each worker once, known by its hash."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import weakref
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Parcel:
    """
    What workers need beside the samples.

    Attributes:
        content: A pickle, which `worker` opens.
        key: SHA-256 of the content.
    """

    content: bytes = field(repr=False)
    key: str

    @classmethod
    def of(cls, content: bytes) -> Parcel:
        """Return a parcel of this content."""
        return cls(content, hashlib.sha256(content).hexdigest())


@dataclass(frozen=True, slots=True)
class Label:
    """
    What a task carries in place of a parcel.

    Attributes:
        key: Of the parcel.
        path: Where processes of the same machine read it.
        content: The parcel's own, for a worker that could not read it.
    """

    key: str
    path: str
    content: bytes | None = field(default=None, repr=False)


class Shelf:
    """Parcels as files in a directory of this user alone, which goes with the object."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="edgeq-parcels-"))
        self.close = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def label(self, parcel: Parcel) -> Label:
        """Put a parcel on the shelf, once, and return its label."""
        path = self._folder / parcel.key
        if not path.exists():
            path.write_bytes(parcel.content)
        return Label(parcel.key, str(path))
