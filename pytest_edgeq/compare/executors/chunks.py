"""Split samples into chunks, lazily, of a size that suits their cost."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from pytest_edgeq.compare.executors.pickled import packed
from pytest_edgeq.compare.executors.tasks import Answer
from pytest_edgeq.compare.sample_source import SampleSource

_SECONDS = 0.5
"""
How long a chunk should take.

To send a chunk, to answer and to merge it takes 2 to 5 ms, at most 1 % of that.
"""

_MOST_BYTES = 1 << 22
"""Of the samples of a chunk, which the client keeps until it is merged."""

_MOST_SAMPLES = 512
"""Of a chunk, whatever they cost."""


def chunk_size(seconds: float | None, left: int | None, workers: int) -> int:
    """Return the number of samples of the next chunk."""
    if seconds is None:
        return 1
    size = _MOST_SAMPLES if not seconds else min(_MOST_SAMPLES, int(_SECONDS / seconds))
    if left is not None:
        size = min(size, -(-left // (2 * workers)))
    return max(size, 1)


@dataclass(slots=True, eq=False)
class Chunk:
    """Samples that are measured together; their pickles, unless the workers read them."""

    start: int
    stop: int
    samples: tuple[bytes, ...] | None
    extra: Any = None
    future: Future[Answer] | None = None
    answer: Answer | None = None
    was_sent_again: bool = False

    @property
    def named(self) -> str:
        """Which samples, for texts."""
        last = self.stop - 1
        return f"sample {self.start}" if last == self.start else f"samples {self.start}…{last}"

    def read(self, source: SampleSource | None) -> Iterator[Any]:
        """Read the samples in this process."""
        if source is not None:
            yield from source.read(range(self.start, self.stop))
        for content in self.samples or ():
            yield pickle.loads(content)


class SampleError(Exception):
    """Reading or measuring a sample failed; all chunks before its own are merged."""

    def __init__(self, error: BaseException, index: int, chunk: Chunk | None) -> None:
        super().__init__(str(error))
        self.error, self.index, self.chunk = error, index, chunk


@dataclass(slots=True)
class Chunks:
    """Chunks of the samples, read when they are asked for."""

    inputs: Iterator[Any] | SampleSource
    on_read: Callable[[Any], None] = lambda sample: None
    next_index: int = 0
    error: Exception | None = None
    _is_over: bool = field(default=False, init=False)

    @property
    def total(self) -> int | None:
        """How many samples there are; None where that is not known."""
        return len(self.inputs) if isinstance(self.inputs, SampleSource) else None

    def take(self, size: int) -> Chunk | None:
        """Return the next chunk, of so many samples at the most; None where there are no more."""
        start = self.next_index
        if isinstance(self.inputs, SampleSource):
            stop = min(start + size, len(self.inputs))
            self.next_index = stop
            return Chunk(start, stop, None) if stop > start else None
        if self._is_over:
            return None
        samples: list[bytes] = []
        n_bytes = 0
        while len(samples) < size and n_bytes < _MOST_BYTES:
            try:
                sample = next(self.inputs)
            except StopIteration:
                self._is_over = True
                break
            except Exception as error:  # raised once the samples before have been measured
                self._is_over, self.error = True, error
                break
            self.on_read(sample)
            samples.append(packed(sample, start + len(samples)))
            n_bytes += len(samples[-1])
            del sample  # before the next one is made
        self.next_index = start + len(samples)
        return Chunk(start, self.next_index, tuple(samples)) if samples else None
