"""Calibration samples, hashed as they are read and kept for a later run."""

from __future__ import annotations

import collections
import hashlib
import io
import itertools
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

import torch

from pytest_edgeq.compare.samples import Sample, as_array
from pytest_edgeq.litert.digest import feed

Tagged = tuple[str, Sample]
"""A signature and a sample of it."""

_IN_MEMORY = 1 << 26
"""Bytes of samples kept in memory; more are written to a temporary file."""


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
    """Read all samples, and return an iterator over copies of them."""
    spool = _Spool(report)
    for tagged in samples:
        spool.add(*tagged)
    return spool.replayed()


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


class _Head(NamedTuple):
    """Placeholder in a sample for a value stored in the file."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    is_tensor: bool


class _Spool:
    """Copies of samples, in memory up to a limit, then in a file."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._kept: collections.deque[Tagged] = collections.deque()
        self._in_memory = 0
        self._file: io.FileIO | None = None
        self._is_refused = False

    def add(self, signature: str, sample: Sample) -> None:
        """Keep a copy of a sample."""
        copy = sample.clone()
        size = sum(value.nbytes for value in copy.tensors)
        if self._is_refused or self._in_memory + size <= _IN_MEMORY:
            self._in_memory += size
        else:
            copy = self._stored(copy)
        self._kept.append((signature, copy))

    def replayed(self) -> Iterator[Tagged]:
        """Yield the samples, once."""
        file = None
        if self._file is not None:
            self._file.seek(0)
            file = io.BufferedReader(self._file)
        while self._kept:
            signature, sample = self._kept.popleft()
            yield signature, sample.mapped(lambda value: _read(value, file))

    def _stored(self, sample: Sample) -> Sample:
        """Return the sample with values in the file, or unchanged if writing fails."""
        try:
            if self._file is None:
                # Unbuffered: data refused by a full disk would stay in the buffer, and fail again.
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 # the finalizer closes it
                # Samples of a stored run are never read again.
                weakref.finalize(self, self._file.close)
            file = self._file
            return sample.mapped(lambda value: _write(value, file))
        except OSError as error:
            self._is_refused = True
            self._report(
                f"calibration samples cannot be written to a temporary file ({error}); they are "
                "kept in memory"
            )
            return sample


def _write(value: Any, file: io.FileIO) -> _Head:
    is_tensor = isinstance(value, torch.Tensor)
    tensor = value if is_tensor else torch.from_numpy(value)
    rest = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    while rest:
        rest = rest[file.write(rest) :]
    return _Head(tensor.dtype, tensor.shape, tensor.stride(), is_tensor)


def _read(value: Any, file: BinaryIO | None) -> Any:
    if not isinstance(value, _Head):
        return value
    assert file is not None, "unreachable because a head is made by writing"
    tensor = torch.empty_strided(value.shape, value.stride, dtype=value.dtype)
    raw = bytearray(file.read(tensor.nbytes))
    if raw:
        tensor.copy_(torch.frombuffer(raw, dtype=value.dtype).reshape(value.shape))
    return tensor if value.is_tensor else tensor.numpy()
