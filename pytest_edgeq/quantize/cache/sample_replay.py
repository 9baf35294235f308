"""Calibration samples, hashed as they are read and kept for a later run."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from pytest_edgeq.compare.samples import Sample, as_array
from pytest_edgeq.litert.digest import feed
from pytest_edgeq.litert.graphs import decode_tensors, encode_tensors

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
    kept: list[tuple[str, Sample | Callable[[], Sample]]] = []
    size, is_refused = 0, False
    with contextlib.ExitStack() as stack:
        file: io.FileIO | None = None
        for signature, sample in samples:
            copy: Sample | Callable[[], Sample] = sample.clone()
            size += sum(value.nbytes for value in sample.tensors)
            try:
                if size > _IN_MEMORY and not is_refused:
                    if file is None:
                        # Unbuffered: a buffer keeps data that a full disk has refused.
                        file = stack.enter_context(tempfile.TemporaryFile(buffering=0))
                    copy = _stored(sample, file)
            except OSError as error:
                is_refused = True
                report(
                    f"calibration samples cannot be written to a temporary file ({error}); they "
                    "are kept in memory"
                )
            kept.append((signature, copy))
        stack = stack.pop_all()

    def replayed() -> Iterator[Tagged]:
        kept.reverse()
        while kept:
            signature, copy = kept.pop()
            yield signature, copy() if callable(copy) else copy

    copies = replayed()
    weakref.finalize(copies, stack.close)  # samples of a stored run are never read again
    return copies


def _stored(sample: Sample, file: io.FileIO) -> Callable[[], Sample]:
    """Write a sample to a file, and return a function that reads it."""
    values = {str(i): torch.as_tensor(value) for i, value in enumerate(sample.tensors)}
    table, raw = encode_tensors(values)
    are_arrays = sample.mapped(lambda value: isinstance(value, np.ndarray))
    start, rest = file.seek(0, io.SEEK_END), memoryview(raw)
    while rest:
        rest = rest[file.write(rest) :]

    def read() -> Sample:
        file.seek(start)
        tensors = iter(decode_tensors(table, file.read(len(raw))).values())
        return are_arrays.mapped(lambda is_array: _as(next(tensors), is_array=is_array))

    return read


def _as(tensor: torch.Tensor, *, is_array: bool) -> Any:
    return tensor.numpy() if is_array else tensor


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
