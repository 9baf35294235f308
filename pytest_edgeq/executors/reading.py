"""Measure a model by an engine, or say why it has to be measured in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pytest_edgeq.executors.carriers import Engine
from pytest_edgeq.executors.chunks import Chunk, Chunks, SampleError
from pytest_edgeq.executors.machines import this_machine
from pytest_edgeq.executors.parcel import Parcel
from pytest_edgeq.executors.pickled import CannotTravelError, pickled
from pytest_edgeq.executors.stream import Stream
from pytest_edgeq.executors.tasks import Job
from pytest_edgeq.executors.travel import Probe, dependent, model_parcel, probe_of
from pytest_edgeq.numerics.machine import told_mixture
from pytest_edgeq.progress import Step
from pytest_edgeq.quantized import QuantizedModel
from pytest_edgeq.sample_source import SampleSource
from pytest_edgeq.samples import Sample
from pytest_edgeq.warn import warn_user


class Reading:
    """
    Samples that are read once, here or by workers.

    Attributes:
        source: Where workers read the items; None where they are read here.
        probe: What the reference was tried on, once the model is prepared.
    """

    def __init__(
        self,
        quantized: QuantizedModel,
        inputs: object,
        items: Iterator[Any],
        sample_of: Callable[[Any], Sample] = lambda item: item,
    ) -> None:
        self._quantized = quantized
        self.source = inputs if isinstance(inputs, SampleSource) else None
        self._items, self._sample_of = items, sample_of
        self._head: list[Any] = []
        self.probe: Probe | None = None

    def items(self) -> Iterator[Any]:
        """Read the items that are left here."""
        while self._head:
            yield self._head.pop(0)
        for item in self._items:  # noqa: UP028 # which would close it with this generator
            yield item

    def first(self) -> Sample:
        """
        Read the first sample; its item is left all the same.

        Raises:
            ValueError, TypeError: There is none, or it does not fit.
        """
        if not self._head:
            self._head.append(next(self._items))
        return self._sample_of(self._head[0])

    def prepared(self, runtime: str) -> Parcel | None:
        """
        Make the parcel of the model.

        Returns:
            None where samples depend on those before them, which a warning tells: they are to be
            measured in this process, in order.

        Raises:
            CannotTravelError: The reference, or a runtime of the user's own, cannot be pickled.
        """
        quantized = self._quantized
        if self.source is not None and not len(self.source):
            self.first()  # raises
        probe, why = self._probed()
        self.probe = probe
        parcel = None
        if not why:
            parcel, why = model_parcel(quantized, runtime, probe)
        if why:
            warn_user(
                f"executor: {quantized.name} was measured in this process, in order: {why}, so "
                "other processes would give other figures"
            )
            return None
        return parcel

    def _probed(self) -> tuple[Probe, str]:
        """Return a sample that the reference takes, and why samples depend on each other."""
        probe = probe_of(self._quantized.spec)
        if probe is not None:
            try:
                return probe, dependent(self._quantized, probe)
            except CannotTravelError:
                raise
            except Exception:  # of a reference that takes no noise: a sample of the user's will do
                pass
        probe = self.first()
        return probe, dependent(self._quantized, probe)


def job_parcel(job: Job) -> Parcel:
    """
    Make the parcel of a job.

    Raises:
        CannotTravelError: A factory or a metric of the user's cannot be pickled.
    """
    return Parcel.of(
        pickled(
            job,
            job.what,
            "let it open files when it is called, and hold paths, not handles or generators",
        )
    )


def streamed(
    engine: Engine,
    model: Parcel,
    job: Job,
    reading: Reading,
    fold: Callable[[Chunk, Any], None],
    step: Step,
    *,
    on_read: Callable[[Any], None] = lambda sample: None,
    start: int = 0,
    in_order: bool = False,
    extra: Callable[[], Any] = lambda: None,
    keeps_errors: bool = False,
) -> Stream:
    """
    Measure samples by an engine; a mixture of machines is told by a warning.

    Raises:
        Exception: What the first sample that failed raised.
        ExecutorError: As `Stream.run` says.
    """
    stream = Stream(engine, model, job_parcel(job), step, in_order)
    if start:
        stream.note("this process", this_machine())
    inputs = reading.items() if reading.source is None else reading.source
    try:
        stream.run(Chunks(inputs, on_read, start), fold, extra)
    except SampleError as failed:
        if keeps_errors:
            raise
        raise failed.error from failed.error.__cause__
    if told := told_mixture(stream.machines):
        warn_user(f"executor: {told}")
    return stream
