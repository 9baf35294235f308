"""Calibration samples that may have to run later: hashed as they come, kept on disk meanwhile."""

from __future__ import annotations

import hashlib
import itertools
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import torch

from pytest_edgeq.cache.digest import feed
from pytest_edgeq.samples import Sample, as_array

__all__ = ["Recording", "Tagged", "find_equal", "streams_of"]

Tagged = tuple[str, Sample]
"""The signature that a sample is for, and the sample."""

_IN_MEMORY = 1 << 26
"""Bytes of samples that are held in memory; what is more goes to a temporary file."""


class Recording:
    """
    Samples in order, with a running hash after each.

    Args:
        samples: Read once.

    Attributes:
        hashes: One for each sample read so far, of it and of all before it.
    """

    def __init__(self, samples: Iterable[Tagged]) -> None:
        self._samples = iter(samples)
        self.hashes: list[str] = []

    def __iter__(self) -> Iterator[Tagged]:
        return self

    def __next__(self) -> Tagged:
        signature, sample = next(self._samples)
        hasher = hashlib.sha256(self.hashes[-1].encode() if self.hashes else b"")
        feed(hasher, (signature, len(sample.args), list(sample.kwargs)))
        for value in sample.tensors:
            feed(hasher, value if isinstance(value, torch.Tensor) else as_array(value))
        self.hashes.append(hasher.hexdigest())
        return signature, sample


def find_equal(
    recording: Recording, stored: Mapping[str, Sequence[str]]
) -> tuple[str | None, Iterator[Tagged]]:
    """
    Read samples until no stored run began with the same ones.

    Args:
        recording: The samples.
        stored: By key, the running hashes of a stored run.

    Returns:
        The key of the run on just these samples, or None; and all samples, to be run where nothing
        is stored: those that were read here come from a file.
    """
    candidates = {key: list(hashes) for key, hashes in stored.items()}
    spool = _Spool()
    while candidates:
        tagged = next(recording, None)
        count = len(recording.hashes)
        if tagged is None:
            equal = [key for key, hashes in candidates.items() if len(hashes) == count]
            return (equal[0] if equal else None), spool.replayed()
        spool.add(*tagged)
        del tagged  # before the next one is made
        latest = recording.hashes[-1]
        candidates = {
            key: hashes
            for key, hashes in candidates.items()
            if len(hashes) >= count and hashes[count - 1] == latest
        }
    return None, itertools.chain(spool.replayed(), recording)


def streams_of(samples: Iterator[Tagged], signatures: Iterable[str]) -> dict[str, Iterator[Sample]]:
    """Return a stream for each signature, to be read one after the other."""
    held: list[Tagged] = []

    def stream(signature: str) -> Iterator[Sample]:
        for tagged in itertools.chain(held[:], samples):
            held.clear()
            if tagged[0] != signature:
                held.append(tagged)
                return
            yield tagged[1]

    return {signature: stream(signature) for signature in signatures}


class _Spool:
    """Samples in a file, which is deleted when they have been read."""

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115
        # Samples that are equal to a stored run's are never read again.
        self._close = weakref.finalize(self, self._file.close)
        self._heads: list[tuple[str, list[Any], dict[str, Any]]] = []

    def add(self, signature: str, sample: Sample) -> None:
        """Keep a copy of a sample."""
        copy = sample.clone()
        args = [self._write(value) for value in copy.args]
        kwargs = {name: self._write(value) for name, value in copy.kwargs.items()}
        self._heads.append((signature, args, kwargs))

    def _write(self, value: Any) -> tuple[torch.dtype, torch.Size, tuple[int, ...], bool]:
        is_tensor = isinstance(value, torch.Tensor)
        tensor = value if is_tensor else torch.from_numpy(value)
        self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return tensor.dtype, tensor.shape, tensor.stride(), is_tensor

    def replayed(self) -> Iterator[Tagged]:
        """Give the samples again, once."""
        self._file.seek(0)
        for signature, args, kwargs in self._heads:
            yield (
                signature,
                Sample(
                    tuple(map(self._read, args)),
                    {name: self._read(head) for name, head in kwargs.items()},
                ),
            )
        self._close()

    def _read(self, head: tuple[torch.dtype, torch.Size, tuple[int, ...], bool]) -> Any:
        dtype, shape, stride, is_tensor = head
        made = torch.empty_strided(shape, stride, dtype=dtype)
        raw = bytearray(self._file.read(made.numel() * made.element_size()))
        if raw:
            made.copy_(torch.frombuffer(raw, dtype=dtype).reshape(shape))
        return made if is_tensor else made.numpy()
