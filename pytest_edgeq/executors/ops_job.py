"""The job of `localize` and `check`: ops one by one, and outputs beside them, on workers."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pytest_edgeq.executors.chunks import Chunk
from pytest_edgeq.executors.compare_job import bound
from pytest_edgeq.executors.tasks import Failure, packed_failure
from pytest_edgeq.executors.travel import Part, Probe, opened_part, other_reference
from pytest_edgeq.localize.against_torch import OutputCheck, Standard
from pytest_edgeq.localize.localizer import Localizer, SampleErrors
from pytest_edgeq.measurement import Arrays, Measurement, SampleRunner
from pytest_edgeq.numerics.distances import Distances
from pytest_edgeq.quantized import QuantizedModel
from pytest_edgeq.sample_source import SampleSource
from pytest_edgeq.samples import Sample
from pytest_edgeq.tally import Tally
from pytest_edgeq.tflite.edge import EdgeFile
from pytest_edgeq.warn import warn_user


@dataclass(frozen=True)
class OpsPart:
    """
    What workers need to measure ops.

    Attributes:
        runtime: Kernels that keep intermediate tensors.
        form: Content of the file in float, and the signature that was chosen of it.
        standard: What outputs of the form are held against.
        reference: What the form should compute, where that is not the model's own reference.
    """

    runtime: str
    form: tuple[bytes, str | None]
    standard: Standard
    reference: Part | None


def ops_part(localizer: Localizer, runtime: str, probe: Probe) -> OpsPart | None:
    """
    Return what workers need to measure ops as a localizer does that has seen a sample.

    Raises:
        CannotTravelError: That graph cannot be pickled.
    """
    against, form = localizer.against_torch, localizer.form
    other, part = against.reference_elsewhere, None
    if other is not None:
        part = other_reference(other, probe)
        if part is None:
            warn_user(
                f"executor: {localizer.quantized.name} was measured in this process, in order: a "
                "copy of the torch graph that its ops are held against gives other figures"
            )
            return None
    return OpsPart(runtime, (bytes(form.graph.buffer[:]), form.key), against.standard, part)


class CheckedSample(NamedTuple):
    """
    What is known of one sample.

    Attributes:
        is_known: Whether the file was calibrated on it.
        errors: Of its ops, if they were measured.
        differing: The sample, where outputs have to be held against torch's in the client.
        peaks: Greatest magnitudes of torch's outputs; empty where these are not held.
        distances: Of each output to torch's; None where nothing is compared.
        failure: Why its ops could not be measured.
    """

    is_known: bool
    errors: SampleErrors | None
    differing: Sample | None
    peaks: Sequence[float]
    distances: list[float] | None
    failure: Failure | None


class CheckedChunk(NamedTuple):
    """
    What is known of a chunk.

    Attributes:
        samples: In order.
        measurement: Errors of the outputs; None where nothing is compared.
        tally: Of the samples; None likewise.
    """

    samples: list[CheckedSample]
    measurement: Measurement | None
    tally: Tally | None


@dataclass(frozen=True)
class OpsJob:
    """
    Measure ops, outputs, or both.

    Attributes:
        source: Where workers read samples; None where the tasks bring them.
        ops: What is needed to measure ops; None where they are not measured.
        compares: Whether outputs are compared; ops are measured on samples that may be chosen then.
        keeps_points: Whether to keep elements of the outputs, for charts.
    """

    source: SampleSource | None
    ops: OpsPart | None
    compares: bool = False
    keeps_points: bool = False
    what: str = "the factory of the samples"

    def station(self, model: QuantizedModel, runtime: str) -> _OpsStation:
        """Return what measures samples of a model."""
        return _OpsStation(self, model, runtime)

    def bound(self, model: QuantizedModel, given: Any, index: int) -> Sample:
        """Return a sample that the user's factory gave, bound."""
        return bound(model, given, index)


class _OpsStation:
    def __init__(self, job: OpsJob, model: QuantizedModel, runtime: str) -> None:
        self._job, self._model = job, model.apart()
        self._runner: SampleRunner | None = None
        if job.compares:
            self._runner = SampleRunner(self._model, runtime)
            self._runner.prepare()
        self._localizer: Localizer | None = None
        if job.ops is not None:
            ops = job.ops
            content, key = ops.form
            form = EdgeFile(content)
            self._localizer = Localizer(self._model, ops.runtime)
            self._localizer.prepare(form if key is None else form.at(key))
            reference = None if ops.reference is None else opened_part(ops.reference)
            self._check = OutputCheck(self._model, ops.standard, reference)

    def run(self, items: Iterable[tuple[int, Any]], extra: Any) -> CheckedChunk:
        """Measure samples."""
        is_parted, measures_ops, worst = extra
        distances = Distances(worst)
        measurement = tally = None
        if self._runner is not None:
            measurement = Measurement.of(self._model, keeps_points=self._job.keeps_points)
            tally = Tally()
        found = []
        for index, sample in items:
            known: Mapping[str, Arrays] = {}
            apart: list[float] | None = None
            is_candidate = True
            if self._runner is not None and measurement is not None and tally is not None:
                outcome = self._runner.run(sample, index)
                measurement.update(index, sample.arrays(), outcome, sample.clone)
                tally.add(index, sample.arrays(), self._model.ledger)
                known = outcome.values
                apart = Distances.between(known["edge"], known["float"])
                is_candidate = distances.exceeds(apart)
            errors, differing, failure = None, None, None
            peaks: Sequence[float] = ()
            if measures_ops and self._localizer is not None:
                try:
                    errors, differs = self._looked_at(sample, known, is_candidate, is_parted)
                    differing = sample.clone() if differs else None
                    peaks = () if is_parted else self._check.peaks
                except (RuntimeError, ValueError, TypeError) as error:
                    if self._runner is None:
                        raise
                    failure = packed_failure(index, error)
            is_known = sample.arrays() in self._model.ledger
            found.append(CheckedSample(is_known, errors, differing, peaks, apart, failure))
        return CheckedChunk(found, measurement, tally)

    def _looked_at(
        self, sample: Sample, known: Mapping[str, Arrays], is_candidate: bool, is_parted: bool
    ) -> tuple[SampleErrors | None, bool]:
        assert self._localizer is not None, "the caller has looked"
        errors = self._localizer.measure(sample) if is_candidate else None
        differs = False
        if not is_parted:
            differs = self._check.differs(sample, known, None if errors is None else errors.form)
        return None if errors is None else dataclasses.replace(errors, form=()), differs


def samples_of(
    chunk: Chunk, model: QuantizedModel, source: SampleSource | None
) -> Iterator[Sample]:
    """Read the samples of a chunk here."""
    if source is None:
        for content in chunk.samples or ():
            yield pickle.loads(content)
        return
    indices = range(chunk.start, chunk.stop)
    for index, given in zip(indices, source.read(indices), strict=True):
        yield bound(model, given, index)
