"""Calibration samples, hashed as they are read and kept for a later run."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import pickle
import tempfile
import weakref
from collections.abc import Iterable, Iterator

import torch

from pytest_edgeq.compare.samples import Sample, as_array
from pytest_edgeq.litert.digest import feed

Tagged = tuple[str, Sample]  # a signature and a sample of it

_IN_MEMORY = 1 << 26  # bytes of copies kept in memory; more are written to a temporary file


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


def spooled(samples: Iterable[Tagged]) -> Iterator[Tagged]:
    """Read all samples, and return an iterator over copies: from memory, or from a file."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(tempfile.SpooledTemporaryFile(_IN_MEMORY))
        count = 0
        for signature, sample in samples:
            pickle.dump((signature, sample.clone()), file)
            count += 1
        file.seek(0)
        copies = (pickle.load(file) for _ in range(count))
        # Samples of a stored run are never read again.
        weakref.finalize(copies, stack.pop_all().close)
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
