"""How far a long step is: export, calibration, conversion, comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sized
from typing import TypeVar

_Sample = TypeVar("_Sample")


class Step:
    """A step that is running; `in_flight` are the chunks that an executor has, None without one."""

    def __init__(self, what: str, model: str, total: int | None) -> None:
        self.what = what
        self.model = model
        self.total = total
        self.done = 0
        self.in_flight: int | None = None

    def advance(self, count: int = 1) -> None:
        """Count samples."""
        self.done += count

    def each(self, samples: Iterator[_Sample]) -> Iterator[_Sample]:
        """Count samples when they are read; none is kept."""
        return map(self._counted, samples)

    def _counted(self, sample: _Sample) -> _Sample:
        self.advance()
        return sample


class Progress:
    """Interface for progress of steps; reports nothing. The plugin's subclass prints them."""

    def begin(self, step: Step) -> None:
        """Note a step that begins, in whichever thread."""

    def end(self, step: Step) -> None:
        """Note that a step has ended, or failed."""

    @contextlib.contextmanager
    def step(self, what: str, model: str, *sources: object) -> Iterator[Step]:
        """Report a step while it is running."""
        step = Step(what, model, _total(sources))
        self.begin(step)
        try:
            yield step
        finally:
            self.end(step)


def _total(sources: tuple[object, ...]) -> int | None:
    total = 0
    for source in sources:
        if not isinstance(source, Sized):
            return None
        try:
            total += len(source)
        except TypeError:  # as torch's DataLoader raises for an IterableDataset
            return None
    return total if sources else None
