"""Measure outputs, ops and runtimes in one pass over the samples of a check."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_edgeq.check.agreement.agreement import SAMPLES, Agreement, AgreementResult
from pytest_edgeq.check.clipping import clipping_findings
from pytest_edgeq.check.influence import Influence
from pytest_edgeq.check.near_ties import judge_choices
from pytest_edgeq.check.verdict import Verdict
from pytest_edgeq.compare.comparer import Comparer
from pytest_edgeq.compare.executors.remote import Reading
from pytest_edgeq.compare.executors.stream import Chunk, SampleError
from pytest_edgeq.compare.measurement import ReorderedError, SampleOutputs
from pytest_edgeq.compare.parallel import BackgroundThread, state_of
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.samples import Sample, read_samples
from pytest_edgeq.errors import UnreadableError, UnrunnableError, grouped
from pytest_edgeq.localize.localizer import Localizer
from pytest_edgeq.localize.on_workers import CheckedChunk, OpsJob, OpsPart, add_checked
from pytest_edgeq.localize.rows import LayerErrors
from pytest_edgeq.numerics.checks import Calibration
from pytest_edgeq.numerics.comparison import Comparison
from pytest_edgeq.numerics.findings import BLOCKING, CANNOT_RUN, FILE, MISFIT, Finding
from pytest_edgeq.numerics.metrics import Distances
from pytest_edgeq.progress import Step

if TYPE_CHECKING:
    from pytest_edgeq.compare.executors.engines import SampleExecutor


_CHOSEN = 2
"""Number of first samples on which the ops are always measured."""


class _SampleChoice:
    """
    Choice of the samples whose ops are measured, since this costs several runs.

    These are the first few, and each later one with an output that is further from torch than on
    all before it. Of n samples of like errors some 1 + ln n are selected. If a sample changes the
    results of the next one, all are.
    """

    def __init__(self, quantized: QuantizedModel) -> None:
        edges = (quantized.edge, quantized.float_edge)
        self._selects_all = any(edge is not None and edge.is_stateful for edge in edges)
        self._count = 0
        self._distances = Distances()

    @property
    def worst(self) -> list[float] | None:
        """The greatest distance of each output so far; None before the first sample."""
        return self._distances.worst

    def is_next(self, outcome: SampleOutputs | None) -> bool:
        """Whether to measure the ops on the next sample, which has these outputs."""
        if outcome is None:
            self._count += 1
            return True
        return self.selects(Distances.between(outcome.values["edge"], outcome.values["float"]))

    def selects(self, distances: Sequence[float]) -> bool:
        """Whether to measure the ops on the next sample, by its distances from torch."""
        self._count += 1
        is_furthest = self._distances.exceeds(distances)
        return self._selects_all or self._count <= _CHOSEN or is_furthest


@dataclass(frozen=True, slots=True)
class CheckMeasurement:
    """Results of a pass over the samples; None if not measured."""

    comparison: Comparison | None
    calibration: Calibration
    layers: LayerErrors | None
    agreed: AgreementResult
    findings: list[Finding]
    fits: bool


class Measuring:
    """One pass over the samples; what prevents a measurement becomes a finding or a note."""

    def __init__(
        self,
        quantized: QuantizedModel,
        runtime: str,
        verdict: Verdict,
        *,
        keeps_points: bool,
        by_sample: bool,
    ) -> None:
        self._quantized = quantized
        self._runtime = runtime
        self._verdict = verdict
        self._keeps_points = keeps_points
        self._comparer = Comparer(
            quantized, runtime, keeps_points=keeps_points, by_sample=by_sample
        )
        self._agreement = Agreement(quantized)
        self._choice = _SampleChoice(quantized)
        self._influence = Influence(quantized, runtime)
        self._localizer: Localizer | None = None
        """None where ops cannot be measured, or not any more."""
        self._refusals: list[UnrunnableError] = []
        self._runs = self._runtime in self._agreement.opened
        """Whether file and reference can be compared."""
        self._fits = True
        self._answers = True
        """Whether file and reference have answered each sample."""

    def measure(
        self, inputs: Iterable[Any], threads: int, step: Step, engine: SampleExecutor | None
    ) -> CheckMeasurement:
        """Measure everything, reading each sample once; ops in parallel with outputs."""
        samples = read_samples(inputs, self._quantized.spec, "evaluation")
        machines: tuple[str, ...] = ()
        with ExitStack() as stack:
            reading: Reading | None = None
            if engine is not None:
                reading = Reading(self._quantized, inputs, samples)
                samples = reading.items()
            stack.enter_context(self._comparer)
            self._localizer = self._open_localizer(stack)
            model = None if reading is None else reading.pickled(self._runtime)
            if engine is None or reading is None or model is None:
                self._measure_here(step.each(samples), threads, stack)
            else:
                # The samples that run on every runtime are measured in this process.
                self._measure_here(step.each(itertools.islice(samples, SAMPLES)), 1, stack)
                machines = self._measure_on_workers(engine, model, reading, step)
            localizer = self._localizer if self._answers else None
            runs = self._runs and self._fits
            findings = self._influence.findings(localizer) if runs else []
        if localizer is not None and not self._try_ops(localizer.settle):
            localizer = None
        comparison = self._comparer.result(machines) if self._runs else None
        if runs and localizer is not None and comparison is not None:
            findings += clipping_findings(
                self._quantized, self._runtime, localizer, comparison, self._comparer.calibration
            )
        if runs and comparison is not None:
            chosen, notes = judge_choices(self._quantized, localizer, comparison)
            findings += chosen
            self._verdict.notes += notes
        measured = CheckMeasurement(
            comparison=comparison,
            calibration=self._comparer.calibration,
            layers=None if localizer is None else localizer.result(),
            agreed=self._agreement.result(),
            findings=findings,
            fits=self._fits,
        )
        if localizer is not None:
            self._verdict.notes += localizer.notes
        refusals = [*self._refusals, *measured.agreed.unable]
        self._verdict.add(*grouped(refusals), *measured.agreed.differences)
        return measured

    def _measure_here(self, samples: Iterable[Sample], threads: int, stack: ExitStack) -> None:
        """Measure samples in this process, in order."""
        state = state_of(self._quantized) if threads > 1 else None
        beside: BackgroundThread | None = None
        pending: Callable[[], None] | None = None
        for sample in samples:
            if not self._fits:
                continue  # the remaining samples are still validated
            outcome = self._compare(sample) if self._runs else None
            self._runs = outcome is not None
            if outcome is not None:
                self._influence.note(sample, outcome)
            if pending is not None and not self._try_ops(pending):
                self._localizer = None
            pending = None
            if self._localizer is not None and self._answers:
                pending = self._localizing(self._localizer, sample, outcome)
                if beside is not None:
                    pending = beside.start(pending)
            if self._fits:
                known = None if outcome is None else outcome.values["float"]
                self._agreement.update(sample, known)
            if pending is not None and beside is None:
                self._localizer = self._localizer if self._try_ops(pending) else None
                pending = None
            if beside is None and state is not None and state == state_of(self._quantized):
                beside = stack.enter_context(contextlib.closing(BackgroundThread()))
            state = None
        if pending is not None and not self._try_ops(pending):
            self._localizer = None

    def _measure_on_workers(
        self, engine: SampleExecutor, model: bytes, reading: Reading, step: Step
    ) -> tuple[str, ...]:
        """Measure the remaining samples by an engine; return the machines that ran them."""
        if not (self._runs and self._fits and self._answers):
            self._measure_here(step.each(reading.items()), 1, ExitStack())
            return ()

        localizer = self._localizer
        ops = None if localizer is None else OpsPart.of(localizer, "builtin")
        job = OpsJob(reading.source, ops, compares=True, keeps_points=self._keeps_points)

        def merge(chunk: Chunk, found: CheckedChunk) -> None:
            assert found.measurement is not None, "unreachable because outputs are compared"
            assert found.tally is not None, "unreachable because outputs are compared"
            self._comparer.merge(found.measurement, found.tally)
            for each in found.samples:
                is_chosen = self._choice.selects(each.distances or ())
                if self._localizer is None:
                    continue
                add = partial(add_checked, self._localizer, each, is_chosen=is_chosen)
                if not self._try_ops(add):
                    self._localizer = None

        def extra() -> Any:
            has_diverged = localizer is None or localizer.against_torch.is_done
            return has_diverged, self._localizer is not None, self._choice.worst

        try:
            return reading.measure(
                engine,
                model,
                job,
                merge,
                step,
                on_read=lambda sample: self._comparer.pass_on(sample.arrays()),
                start=self._comparer.count,
                extra=extra,
                keeps_chunk=True,
            )
        except SampleError as failed:
            if failed.chunk is None:
                raise failed.error from None
            self._measure_failed(failed.chunk, failed.error, failed.index, reading)
            return ()

    def _measure_failed(
        self, chunk: Chunk, error: BaseException, index: int, reading: Reading
    ) -> None:
        """Measure a chunk's samples in this process, up to the failed one."""
        self._comparer.count = chunk.start
        samples = itertools.islice(reading.samples_of(chunk), index + 1 - chunk.start)
        self._measure_here(samples, 1, ExitStack())
        if self._runs:  # it fails only on the worker
            raise error
        for _ in reading.items() if reading.source is None else ():
            pass  # the remaining samples are still validated

    def _localizing(
        self, localizer: Localizer, sample: Sample, outcome: SampleOutputs | None
    ) -> Callable[[], None]:
        """Return the call that measures the ops on a sample, or compares outputs alone."""
        known = {} if outcome is None else outcome.values
        is_chosen = self._choice.is_next(outcome)
        return partial(
            localizer.update if is_chosen else localizer.compare_outputs, sample.clone(), known
        )

    def _compare(self, sample: Sample) -> SampleOutputs | None:
        """Return the outputs; None if file and reference cannot be compared."""
        try:
            return self._comparer.update(sample)
        except (ValueError, TypeError) as error:
            self._fits = False
            if isinstance(error, ReorderedError):
                self._localizer = None  # it would compare different outputs
            self._verdict.add(_stopped(MISFIT, error))
        except UnrunnableError as error:
            self._refusals.append(error)
        except RuntimeError as error:
            self._answers = False
            self._verdict.add(_stopped(CANNOT_RUN, error))
        return None

    def _open_localizer(self, stack: ExitStack) -> Localizer | None:
        """Return the localizer; None if torch or its runtime refuses the model."""
        try:
            localizer = Localizer(self._quantized)
            stack.enter_context(localizer)
        except UnrunnableError as error:
            self._note_refusal(error)
            return None
        except (ValueError, RuntimeError) as error:
            self._note_unmeasured(f": {error}")
            return None
        return localizer

    def _try_ops(self, measure: Callable[[], None]) -> bool:
        """Run a measurement of ops; return False and note why if it fails."""
        try:
            measure()
        except UnrunnableError as error:
            self._note_refusal(error)
            return False
        except (RuntimeError, UnreadableError) as error:
            self._note_unmeasured(f": {error}")
            return False
        except (ValueError, TypeError):
            if self._fits:
                raise
            return False  # inputs that do not fit are already a finding
        return True

    def _note_refusal(self, error: UnrunnableError) -> None:
        refuses = "lacks an op of the file" if error.is_lacking else "refuses the file"
        if not error.is_lacking:
            self._refusals.append(error)
        runtime = f"the {error.runtime} runtime, which keeps what is between them"
        self._note_unmeasured(f", as {runtime}, {refuses}")

    def _note_unmeasured(self, why: str) -> None:
        name = self._quantized.reference_name
        self._verdict.notes.append(f"ops were not compared with {name} one by one{why}")


def _stopped(kind: str, error: Exception) -> Finding:
    """Return the finding on an error that ended the comparison."""
    title, *lines = str(error).splitlines() or [type(error).__name__]
    return Finding(kind=kind, place=FILE, headline=title, evidence=tuple(lines), harm=BLOCKING)
