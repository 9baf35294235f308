"""Localize by an engine: the first sample here, all others on workers."""

from __future__ import annotations

from typing import Any

from pytest_edgeq.executors.carriers import Engine
from pytest_edgeq.executors.chunks import Chunk
from pytest_edgeq.executors.ops_job import CheckedChunk, CheckedSample, OpsJob, ops_part, samples_of
from pytest_edgeq.executors.reading import Reading, streamed
from pytest_edgeq.localize.localizer import Localizer
from pytest_edgeq.parallel import on_one_thread
from pytest_edgeq.progress import Step
from pytest_edgeq.quantized import QuantizedModel


class OpsFolder:
    """Adds what workers measured of ops to a localizer, in the order of the samples."""

    def __init__(self, localizer: Localizer, quantized: QuantizedModel, job: OpsJob) -> None:
        self._localizer, self._quantized, self._job = localizer, quantized, job

    @property
    def is_parted(self) -> bool:
        """Whether the form has left torch, so that nothing more is held against it."""
        return self._localizer.against_torch.is_done

    def add(self, chunk: Chunk, place: int, each: CheckedSample, *, is_chosen: bool = True) -> None:
        """
        Add one sample.

        Raises:
            RuntimeError: torch or the kernels fail.
        """
        differing = None if self.is_parted else each.differing
        if differing is None and not self.is_parted and self._has_changed():
            # The worker has looked with other eyes: constants of torch are in use since then.
            samples = samples_of(chunk, self._quantized, self._job.source)
            differing = next(s for i, s in enumerate(samples) if i == place)
        errors = each.errors if is_chosen else None
        self._localizer.take(
            is_known=each.is_known, errors=errors, differing=differing, peaks=each.peaks
        )

    def _has_changed(self) -> bool:
        ops = self._job.ops
        assert ops is not None, "unreachable because ops are measured"
        return self._localizer.against_torch.state != ops.standard.state


def localize_by(
    engine: Engine, localizer: Localizer, runtime: str, reading: Reading, step: Step
) -> bool:
    """
    Measure the ops on all samples.

    Returns:
        Whether that was done; else the samples that are left are to be measured in this process.

    Raises:
        CannotTravelError: A reference or a factory cannot be pickled.
        Exception: As `Stream.run` does.
    """
    quantized = localizer.quantized
    parcel = reading.prepared(runtime)
    if parcel is None:
        return False
    assert reading.probe is not None, "unreachable because the model is prepared"
    with on_one_thread():
        localizer.update(next(reading.items()))
        step.advance()
        ops = ops_part(localizer, runtime, reading.probe)
        if ops is None:
            return False
        job = OpsJob(reading.source, ops)
        folder = OpsFolder(localizer, quantized, job)

        def fold(chunk: Chunk, found: CheckedChunk) -> None:
            for place, each in enumerate(found.samples):
                folder.add(chunk, place, each)

        def extra() -> Any:
            return folder.is_parted, True, None

        streamed(engine, parcel, job, reading, fold, step, start=1, in_order=True, extra=extra)
    return True
