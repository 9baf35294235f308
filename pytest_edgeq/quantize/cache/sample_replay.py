"""Calibration samples, hashed as they are read and kept for a later run."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import pickle
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch

from pytest_edgeq.compare.samples import Sample, as_array
from pytest_edgeq.litert.digest import feed

Tagged = tuple[str, Sample]  # a signature and a sample of it

_IN_MEMORY = 1 << 26  # bytes of samples kept in memory; more are written to a temporary file


class Recording:
    """Samples in order, hashed as they are read."""

    def __init__(self, samples: Iterable[Tagged]) -> None:
        self._samples = iter(samples)
        self._hasher = hashlib.sha256()

    @property
    def digest(self) -> str:
        """A hash of the samples read so far."""
        return self._hasher.hexdigest()

    def __iter__(self) -> Iterator[Tagged]:
        return self

    def __next__(self) -> Tagged:
        signature, sample = next(self._samples)
        feed(self._hasher, (signature, len(sample.args), list(sample.kwargs)))
        for value in sample.tensors:
            feed(self._hasher, value if isinstance(value, torch.Tensor) else as_array(value))
        return signature, sample


def spooled(samples: Iterable[Tagged], report: Callable[[str], None]) -> Iterator[Tagged]:
    """Read all samples, and return an iterator over copies: in memory, then in a file."""
    kept: list[Tagged | int] = []  # a sample, or its place in the file
    size, is_refused = 0, False
    with contextlib.ExitStack() as stack:
        file: io.FileIO | None = None
        for signature, sample in samples:
            copy: Tagged | int = signature, sample.clone()
            size += sum(value.nbytes for value in sample.tensors)
            try:
                if size > _IN_MEMORY and not is_refused:
                    if file is None:
                        # Unbuffered: a buffer keeps data that a full disk has refused.
                        file = stack.enter_context(tempfile.TemporaryFile(buffering=0))
                    start, rest = file.seek(0, io.SEEK_END), memoryview(pickle.dumps(copy))
                    while rest:
                        rest = rest[file.write(rest) :]
                    copy = start
            except OSError as error:
                is_refused = True
                report(
                    f"calibration samples cannot be written to a temporary file ({error}); they "
                    "are kept in memory"
                )
            kept.append(copy)
        stack = stack.pop_all()

    def replayed() -> Iterator[Tagged]:
        kept.reverse()
        while kept:
            copy = kept.pop()
            if isinstance(copy, int):
                assert file is not None
                file.seek(copy)
                copy = pickle.load(file)
            yield copy

    copies = replayed()
    weakref.finalize(copies, stack.close)  # samples of a stored run are never read again
    return copies


def streams_of(samples: Iterator[Tagged], signatures: Iterable[str]) -> dict[str, Iterator[Sample]]:
    """Return a stream for each signature, to be read in order."""
    pending: list[Tagged] = []

    def stream(signature: str) -> Iterator[Sample]:
        for tagged in itertools.chain(pending[:], samples):
            pending.clear()
            if tagged[0] != signature:
                pending.append(tagged)
                return
            yield tagged[1]

    return {signature: stream(signature) for signature in signatures}
