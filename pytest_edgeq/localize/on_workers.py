"""Measure ops by an executor; the first sample runs in this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pytest_edgeq.compare.executors.remote import (
    PickledReference,
    Reading,
    pickled_reference,
    unpickled_reference,
)
from pytest_edgeq.compare.executors.worker import Failure, packed_failure
from pytest_edgeq.compare.measurement import Arrays, Measurement, SampleRunner
from pytest_edgeq.compare.parallel import on_one_thread
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.localize.against_torch import OutputCheck
from pytest_edgeq.localize.localizer import Localizer, OpSampleErrors
from pytest_edgeq.numerics.metrics import Distances
from pytest_edgeq.progress import Step
from pytest_edgeq.runtimes.edge import EdgeFile

if TYPE_CHECKING:
    from pytest_edgeq.compare.executors.sample_executor import SampleExecutor


_Packed: TypeAlias = tuple[bytes, str | None]
"""Content of a float file, and the chosen signature."""


@dataclass(frozen=True)
class OpsPart:
    """Parts that workers need to measure ops; `reference` only if not the model's own."""

    runtime: str
    form: _Packed
    checked: _Packed | None  # the form whose outputs are compared, if it is another one
    is_kept: bool  # whether that is the flow's own file, whose outputs a comparison has
    noise: Mapping[str, float]
    reference: PickledReference | None

    @classmethod
    def of(cls, localizer: Localizer, runtime: str) -> OpsPart:
        """Return the parts of a localizer that has measured a sample."""
        against, form = localizer.against_torch, localizer.form
        other = against.other_reference
        return cls(
            runtime,
            _packed(form),
            None if against.form is form else _packed(against.form),
            against.is_kept,
            against.tolerance.noise,
            None if other is None else pickled_reference(other),
        )


def _packed(form: EdgeFile) -> _Packed:
    return bytes(form.graph.buffer[:]), form.key


def _unpacked(form: _Packed) -> EdgeFile:
    content, key = form
    return EdgeFile(content).at(key)


class CheckedSample(NamedTuple):
    """Results of one sample; `differing` is the sample if the client must examine it."""

    is_known: bool
    errors: OpSampleErrors | None
    differing: Sample | None
    peaks: Sequence[float]
    distances: list[float] | None
    failure: Failure | None


class CheckedChunk(NamedTuple):
    """Results of a chunk; without measurement if outputs are not compared."""

    samples: list[CheckedSample]
    measurement: Measurement | None


class OpsRunner:
    """Measures ops, outputs, or both on a worker."""

    def __init__(
        self,
        model: QuantizedModel,
        *,
        ops: OpsPart | None,
        compares: bool = False,
        keeps_points: bool = False,
    ) -> None:
        self._model, self._keeps_points = model.clone(), keeps_points
        self._runner: SampleRunner | None = None
        if compares:
            self._runner = SampleRunner(self._model, model.runtime)
        self._localizer: Localizer | None = None
        if ops is not None:
            self._localizer = Localizer(self._model, ops.runtime)
            self._localizer.prepare(_unpacked(ops.form))
            self._is_one_form = ops.checked is None
            form = _unpacked(ops.checked or ops.form)
            reference = self._model.float_model
            if ops.reference is not None:
                reference = unpickled_reference(ops.reference)
            self._check = OutputCheck(self._model, form, reference, ops.noise, is_kept=ops.is_kept)

    def __call__(self, items: Iterable[tuple[int, Any]], extra: Any) -> CheckedChunk:
        """Measure samples."""
        has_diverged, measures_ops, worst = extra
        furthest = Distances(worst)
        measurement: Measurement | None = None
        if self._runner is not None:
            measurement = Measurement.of(self._model, keeps_points=self._keeps_points)
        found = []
        for index, sample in items:
            known: Mapping[str, Arrays] = {}
            distances: list[float] | None = None
            is_candidate = True
            if self._runner is not None and measurement is not None:
                outcome = self._runner.run(sample, index)
                measurement.update(index, sample, outcome)
                known = outcome.values
                distances = Distances.between(known["edge"], known["float"])
                is_candidate = furthest.exceeds(distances)
            errors, differing, failure = None, None, None
            peaks: Sequence[float] = ()
            if measures_ops and self._localizer is not None:
                try:
                    errors, differs = self._measure_ops(sample, known, is_candidate, has_diverged)
                    differing = sample.clone() if differs else None
                    peaks = () if has_diverged else self._check.peaks
                except (RuntimeError, ValueError, TypeError) as error:
                    if self._runner is None:
                        raise
                    failure = packed_failure(index, error)
            is_known = sample.arrays() in self._model.ledger
            found.append(CheckedSample(is_known, errors, differing, peaks, distances, failure))
        return CheckedChunk(found, measurement)

    def _measure_ops(
        self, sample: Sample, known: Mapping[str, Arrays], is_candidate: bool, has_diverged: bool
    ) -> tuple[OpSampleErrors | None, bool]:
        assert self._localizer is not None, "the caller has looked"
        errors = self._localizer.measure(sample) if is_candidate else None
        differs = False
        if not has_diverged:
            made = {"form": errors.form} if errors is not None and self._is_one_form else {}
            differs = self._check.differs(sample, {**known, **made})
        return None if errors is None else replace(errors, form=()), differs


def localize_by(
    engine: SampleExecutor, localizer: Localizer, runtime: str, reading: Reading, step: Step
) -> bool:
    """Measure the ops on all samples by an engine; return False if it cannot."""
    model = reading.pickled(runtime)
    if model is None:
        return False
    with on_one_thread():
        localizer.update(next(reading.items))
        step.advance()
        runner = partial(OpsRunner, ops=OpsPart.of(localizer, runtime))

        def merge(found: CheckedChunk) -> None:
            for each in found.samples:
                localizer.add_checked(each)

        def extra() -> Any:
            return localizer.against_torch.is_done, True, None

        reading.measure(engine, model, runner, merge, step, start=1, extra=extra)
    return True
