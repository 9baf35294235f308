"""Samples that are read where they are used: `edgeq.samples(factory, n)`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

_TOGETHER = 16  # samples requested from the factory at once when all are read in order


class SampleSource:
    """An iterable of n samples, of which any process can read any range."""

    def __init__(self, factory: Callable[[range], Iterable[Any]], n: int) -> None:
        if not callable(factory):
            raise TypeError(
                "samples: expected a factory that is called with a range of indices and gives "
                f"their samples, got {type(factory).__name__}"
            )
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"samples: expected the number of samples, got {n!r}")
        if n < 0:
            raise ValueError(f"samples: expected 0 samples or more, got {n}")
        self.factory = factory
        self._n = n

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._n

    def __iter__(self) -> Iterator[Any]:
        """Read all samples in order, a few at a time."""
        for start in range(0, self._n, _TOGETHER):
            yield from self.read(range(start, min(start + _TOGETHER, self._n)))

    def read(self, indices: range) -> Iterator[Any]:
        """Read the samples of a range, in order."""
        count = 0
        for sample in self.factory(indices):
            if count == len(indices):
                raise ValueError(_wrong_count(indices, "more"))
            yield sample
            count += 1
        if count < len(indices):
            raise ValueError(_wrong_count(indices, str(count)))


def _wrong_count(indices: range, got: str) -> str:
    return (
        f"samples: expected {len(indices)} samples of the factory for {indices!r}, got {got}\n"
        "cause: the factory is called with a range of indices, and gives one sample for each"
    )
