"""`edgeq.check` by an engine: the first few samples here, all others on workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from pytest_edgeq.compare import Comparer
from pytest_edgeq.executors.carriers import Engine
from pytest_edgeq.executors.chunks import Chunk
from pytest_edgeq.executors.localizing import OpsFolder
from pytest_edgeq.executors.ops_job import CheckedChunk, CheckedSample, OpsJob, ops_part, samples_of
from pytest_edgeq.executors.parcel import Parcel
from pytest_edgeq.executors.reading import Reading, streamed
from pytest_edgeq.executors.tasks import unpacked
from pytest_edgeq.localize.localizer import Localizer
from pytest_edgeq.numerics.machine import Machine
from pytest_edgeq.progress import Step
from pytest_edgeq.quantized import QuantizedModel
from pytest_edgeq.samples import Sample


class _Choice(Protocol):
    @property
    def worst(self) -> list[float] | None:
        """The greatest distance of each output so far."""


Held = Callable[[CheckedSample, Callable[[bool], None]], None]
"""Called with a sample, and what adds it to the localizer: with its ops, or its outputs alone."""


class CheckingElsewhere:
    """Measures samples of a check by an engine."""

    def __init__(self, engine: Engine, reading: Reading, runtime: str, keeps_points: bool) -> None:
        self.reading = reading
        self._engine, self._runtime, self._keeps_points = engine, runtime, keeps_points
        self._parcel: Parcel | None = None

    def prepares(self) -> bool:
        """
        Make the parcel of the model, and return whether there is one.

        Raises:
            CannotTravelError: As `Reading.prepared` does.
        """
        self._parcel = self.reading.prepared(self._runtime)
        return self._parcel is not None

    def samples_of(self, chunk: Chunk, quantized: QuantizedModel) -> Iterator[Sample]:
        """Read the samples of a chunk here."""
        return samples_of(chunk, quantized, self.reading.source)

    def measure(
        self,
        comparer: Comparer,
        localizer: Localizer | None,
        choice: _Choice,
        held: Held,
        step: Step,
    ) -> Sequence[Machine] | None:
        """
        Measure the samples that are left.

        Returns:
            The machines that have measured; None where the ops cannot be measured elsewhere, so
            that all is left to be measured in this process.

        Raises:
            SampleError, ExecutorError: As `Stream.run` does.
        """
        reading = self.reading
        assert self._parcel is not None, "unreachable because it was prepared"
        assert reading.probe is not None, "unreachable because it was prepared"
        ops = None if localizer is None else ops_part(localizer, "builtin", reading.probe)
        if localizer is not None and ops is None:
            return None
        job = OpsJob(reading.source, ops, compares=True, keeps_points=self._keeps_points)
        folder = None
        if localizer is not None and ops is not None:
            folder = OpsFolder(localizer, comparer.quantized, job)

        def fold(chunk: Chunk, found: CheckedChunk) -> None:
            assert found.measurement is not None, "unreachable because outputs are compared"
            assert found.tally is not None, "unreachable because outputs are compared"
            comparer.merge(found.measurement, found.tally)
            for place, each in enumerate(found.samples):
                held(each, _adding(folder, chunk, place, each))

        def extra() -> Any:
            is_parted = folder is None or folder.is_parted
            return is_parted, folder is not None, choice.worst

        stream = streamed(
            self._engine,
            self._parcel,
            job,
            reading,
            fold,
            step,
            on_read=lambda sample: comparer.pass_on(sample.arrays()),
            start=comparer.count,
            in_order=True,
            extra=extra,
            keeps_errors=True,
        )
        return stream.machines


def _adding(
    folder: OpsFolder | None, chunk: Chunk, place: int, each: CheckedSample
) -> Callable[[bool], None]:
    def add(is_chosen: bool) -> None:
        if each.failure is not None:
            raise unpacked(each.failure)
        if folder is not None:
            folder.add(chunk, place, each, is_chosen=is_chosen)

    return add
