"""Measure outputs, ops and runtimes in one pass over the samples of a check."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_edgeq.check.agreement import SAMPLES, Agreement
from pytest_edgeq.check.clipping import clipping_findings
from pytest_edgeq.check.influence import Influence
from pytest_edgeq.check.near_ties import judge_choices
from pytest_edgeq.check.verdict import Verdict
from pytest_edgeq.compare.comparer import Comparer
from pytest_edgeq.compare.executors.remote import Reading
from pytest_edgeq.compare.executors.stream import SampleError
from pytest_edgeq.compare.measurement import ReorderedError, SampleOutputs
from pytest_edgeq.compare.parallel import state_of, torch_pool
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.samples import Sample, SampleSource, read_samples
from pytest_edgeq.errors import UnreadableError, UnrunnableError, grouped
from pytest_edgeq.localize.localizer import Localizer
from pytest_edgeq.localize.on_workers import CheckedChunk, OpsPart, OpsRunner
from pytest_edgeq.localize.rows import LayerErrors
from pytest_edgeq.numerics.comparison import Comparison
from pytest_edgeq.numerics.findings import BLOCKING, CANNOT_RUN, FILE, MISFIT, Finding
from pytest_edgeq.numerics.metrics import Distances
from pytest_edgeq.progress import Step

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from pytest_edgeq.compare.executors.sample_executor import SampleExecutor


_CHOSEN = 2  # number of first samples on which the ops are always measured

# Times the noise of the samples on which the ops were measured that another one needs: 3 dB. A
# worker, which knows fewer samples, measures those with more noise than any before in its chunk.
_FURTHER = 2.0


class Measuring:
    """One pass over the samples; what prevents a measurement becomes a finding or a note."""

    def __init__(
        self,
        quantized: QuantizedModel,
        runtime: str,
        verdict: Verdict,
        inputs: Iterable[Any],
        *,
        keeps_points: bool,
    ) -> None:
        self.comparison: Comparison | None = None
        self.layers: LayerErrors | None = None
        self.findings: list[Finding] = []
        self.fits = True
        """Whether every sample fits file and reference."""
        self._quantized = quantized
        self._runtime = runtime
        self._verdict = verdict
        self._inputs = inputs
        self._keeps_points = keeps_points
        by_sample = isinstance(inputs, SampleSource)
        self._comparer = Comparer(
            quantized, runtime, keeps_points=keeps_points, by_sample=by_sample
        )
        self._agreement = Agreement(quantized)
        edges = (quantized.edge, quantized.float_edge)
        self._is_stateful = any(edge is not None and edge.graph.is_stateful for edge in edges)
        self._n_asked = 0
        self._distances = Distances(factor=_FURTHER)
        self._influence = Influence(quantized, runtime)
        self._localizer: Localizer | None = None
        """None where ops cannot be measured, or not any more."""
        self._refusals: list[UnrunnableError] = []
        self._runs = self._runtime in self._agreement.opened
        """Whether file and reference can be compared."""
        self._answers = True
        """Whether file and reference have answered each sample."""

    def measure(self, threads: int, step: Step, engine: SampleExecutor | None) -> None:
        """Measure everything, reading each sample once; ops in parallel with outputs."""
        quantized, comparer = self._quantized, self._comparer
        samples = read_samples(self._inputs, quantized.spec, "evaluation")
        machines: tuple[str, ...] = ()
        with ExitStack() as stack:
            stack.enter_context(comparer)
            reading = None if engine is None else Reading(quantized, self._inputs, samples)

            def open_localizer() -> None:
                self._localizer = stack.enter_context(Localizer(quantized))

            self._try_ops(open_localizer, (RuntimeError, ValueError))
            model = None if reading is None else reading.pickled(self._runtime)
            samples = samples if reading is None else reading.items
            if engine is None or reading is None or model is None:
                self._measure_here(step.each(samples), threads, stack)
            else:
                # The samples that run on every runtime are measured in this process.
                self._measure_here(step.each(itertools.islice(samples, SAMPLES)), 1, stack)
                machines = self._measure_on_workers(engine, model, reading, step)
            localizer = self._localizer = self._localizer if self._answers else None
            runs = self._runs and self.fits
            self.findings = self._influence.findings(localizer) if runs else []
        if localizer is not None:
            self._try_ops(localizer.settle)
            localizer = self._localizer
        self.comparison = comparer.result(machines) if self._runs else None
        self.calibration = comparer.calibration
        if runs and self.comparison is not None:
            if localizer is not None:
                self.findings += clipping_findings(
                    quantized, self._runtime, localizer, self.comparison, self.calibration
                )
            chosen, notes = judge_choices(quantized, localizer, self.comparison)
            self.findings += chosen
            self._verdict.notes += notes
        if localizer is not None:
            self.layers = localizer.result()
            self._verdict.notes += localizer.notes
        # Its interpreters are released before the runtimes' are opened again.
        localizer = self._localizer = None
        self.agreed = self._agreement.result()
        refusals = [*self._refusals, *self.agreed.unable]
        self._verdict.add(*grouped(refusals), *self.agreed.differences)

    def _measure_here(self, samples: Iterable[Sample], threads: int, stack: ExitStack) -> None:
        """Measure samples in this process, in order."""
        state = state_of(self._quantized) if threads > 1 else None
        background: ThreadPoolExecutor | None = None
        pending: Callable[[], None] = _nothing
        for sample in samples:
            if not self.fits:
                continue  # the remaining samples are still validated
            outcome = self._compare(sample) if self._runs else None
            self._runs = outcome is not None
            if outcome is not None:
                self._influence.note(sample, outcome)
            self._try_ops(pending)
            pending = self._localizing(sample, outcome)
            if background is not None:
                pending = background.submit(pending).result
            if self.fits:
                known = None if outcome is None else outcome.values["float"]
                self._agreement.update(sample, known)
            if background is None:
                self._try_ops(pending)
                pending = _nothing
                if state is not None and state == state_of(self._quantized):
                    background = stack.enter_context(torch_pool(1))
            state = None
        self._try_ops(pending)

    def _measure_on_workers(
        self, engine: SampleExecutor, model: bytes, reading: Reading, step: Step
    ) -> tuple[str, ...]:
        """Measure the remaining samples by an engine; return the machines that ran them."""
        if not (self._runs and self.fits and self._answers):
            self._measure_here(step.each(reading.items), 1, ExitStack())
            return ()

        localizer = self._localizer
        ops = None if localizer is None else OpsPart.of(localizer, "builtin")
        runner = partial(OpsRunner, ops=ops, compares=True, keeps_points=self._keeps_points)

        def merge(found: CheckedChunk) -> None:
            assert found.measurement is not None, "unreachable because outputs are compared"
            self._comparer.measurement.merge(found.measurement)
            for each in found.samples:
                is_chosen = self._selects(each.distances or ())
                if self._localizer is not None:
                    add = partial(self._localizer.add_checked, each, is_chosen=is_chosen)
                    self._try_ops(add)

        def extra() -> Any:
            has_diverged = localizer is None or localizer.against_torch.is_done
            return has_diverged, self._localizer is not None, self._distances.worst

        try:
            return reading.measure(
                engine,
                model,
                runner,
                merge,
                step,
                on_read=lambda sample: self._comparer.pass_on(sample.arrays()),
                start=self._comparer.count,
                extra=extra,
                keeps_task=True,
            )
        except SampleError as failed:
            task = failed.task
            if task is None:
                raise failed.error from None
            # Its chunk is measured in this process, up to the failed sample.
            self._comparer.count = task.start
            samples = itertools.islice(reading.samples_of(task), failed.index + 1 - task.start)
            self._measure_here(samples, 1, ExitStack())
            if self._runs:  # it fails only on the worker
                raise failed.error from failed.error.__cause__
            for _ in reading.items if reading.source is None else ():
                pass  # the remaining samples are still validated
            return ()

    def _selects(self, distances: Sequence[float] | None) -> bool:
        """Whether to measure the ops on the next sample, by its distances from torch if known."""
        # This costs several runs, which add nothing on samples with similar errors. With a state,
        # each sample changes the results of the next one.
        self._n_asked += 1
        is_furthest = distances is None or self._distances.exceeds(distances)
        return self._is_stateful or self._n_asked <= _CHOSEN or is_furthest

    def _localizing(self, sample: Sample, outcome: SampleOutputs | None) -> Callable[[], None]:
        """Return the call that measures the ops on a sample, or compares outputs alone."""
        localizer = self._localizer
        if localizer is None or not self._answers:
            return _nothing
        known = {} if outcome is None else outcome.values
        distances = Distances.between(known["edge"], known["float"]) if known else None
        is_chosen = self._selects(distances)
        measure = localizer.update if is_chosen else localizer.compare_outputs
        return partial(measure, sample.clone(), known)

    def _compare(self, sample: Sample) -> SampleOutputs | None:
        """Return the outputs; None if file and reference cannot be compared."""
        try:
            return self._comparer.update(sample)
        except (ValueError, TypeError) as error:
            self.fits = False
            if isinstance(error, ReorderedError):
                self._localizer = None  # it would compare different outputs
            self._verdict.add(_stopped(MISFIT, error))
        except UnrunnableError as error:
            self._refusals.append(error)
        except RuntimeError as error:
            self._answers = False
            self._verdict.add(_stopped(CANNOT_RUN, error))
        return None

    def _try_ops(
        self,
        measure: Callable[[], None],
        noted: tuple[type[Exception], ...] = (RuntimeError, UnreadableError),
    ) -> None:
        """Run a measurement of ops; if it fails, measure no more of them, and note why."""
        try:
            return measure()
        except UnrunnableError as error:
            refuses = "lacks an op of the file" if error.is_lacking else "refuses the file"
            self._refusals += [] if error.is_lacking else [error]
            runtime = f"the {error.runtime} runtime, which keeps intermediate tensors"
            why = f", as {runtime}, {refuses}"
        except noted as error:
            why = f": {error}"
        except (ValueError, TypeError):
            if self.fits:
                raise
            why = ""  # inputs that do not fit are already a finding
        self._localizer = None
        if why:
            name = self._quantized.reference_name
            self._verdict.notes.append(f"ops were not compared with {name} one by one{why}")
        return None


def _nothing() -> None:
    """Measure nothing."""


def _stopped(kind: str, error: Exception) -> Finding:
    """Return the finding on an error that ended the comparison."""
    title, *lines = str(error).splitlines() or [type(error).__name__]
    return Finding(kind=kind, place=FILE, headline=title, evidence=tuple(lines), harm=BLOCKING)
