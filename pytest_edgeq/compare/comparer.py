"""Compare a file with its references on samples: the errors of every stage."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_edgeq.compare.executors.remote import Reading
from pytest_edgeq.compare.executors.worker import JobRunner
from pytest_edgeq.compare.file_health import build_of, runtime_findings, static_findings
from pytest_edgeq.compare.language.encoder_decoder import EncoderDecoder, EncoderDecoderRunner
from pytest_edgeq.compare.language.model import LanguageModel
from pytest_edgeq.compare.language.runner import LanguageMeasurement, LanguageRunner
from pytest_edgeq.compare.measurement import Arrays, Measurement, SampleOutputs, SampleRunner
from pytest_edgeq.compare.parallel import InFlight, begin, in_order, on_one_thread
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.reference import undisturbed
from pytest_edgeq.compare.samples import Sample, SampleSource, read_samples
from pytest_edgeq.numerics.arrays import contiguous
from pytest_edgeq.numerics.comparison import Comparison
from pytest_edgeq.numerics.findings import BLOCKING, STATEFUL_REFERENCE, Finding, Place
from pytest_edgeq.numerics.samples import overlap_finding, repeated_finding
from pytest_edgeq.numerics.static_health import Calibration
from pytest_edgeq.progress import Progress
from pytest_edgeq.versions import loaded_torch

if TYPE_CHECKING:
    from pytest_edgeq.compare.executors.sample_executor import SampleExecutor


def compare(
    quantized: QuantizedModel,
    inputs: Iterable[Any],
    *,
    runtime: str,
    threads: int = 1,
    progress: Progress | None = None,
    keeps_points: bool = False,
    engine: SampleExecutor | None = None,
) -> Comparison:
    """Measure the errors of every stage; of an encoder with a decoder both, in this process."""
    if both := EncoderDecoder.of(quantized):
        quantized, engine = both, None
    progress = Progress() if progress is None else progress
    comparer = Comparer(
        quantized, runtime, keeps_points=keeps_points, by_sample=isinstance(inputs, SampleSource)
    )
    machines: tuple[str, ...] = ()
    with progress.step("compare", quantized.name, inputs) as step, comparer:
        reading = Reading(quantized, inputs, read_samples(inputs, quantized.spec, "evaluation"))
        model = None if engine is None else reading.pickled(runtime)
        if engine is not None and model is not None:
            machines = reading.measure(
                engine,
                model,
                functools.partial(_job_runner, keeps_points=keeps_points),
                comparer.measurement.merge,
                step,
                on_read=lambda sample: comparer.pass_on(sample.arrays()),
            )
        else:
            comparer.update_all(step.each(reading.items), threads)
    return comparer.result(machines)


def runner_of(quantized: QuantizedModel, runtime: str) -> SampleRunner:
    """Return what runs one sample through a model and its references."""
    if isinstance(quantized, LanguageModel):
        return LanguageRunner(quantized, runtime)  # type: ignore[return-value] # the same protocol
    if isinstance(quantized, EncoderDecoder):
        return EncoderDecoderRunner(quantized, runtime)  # type: ignore[return-value] # the same
    return SampleRunner(quantized, runtime)


def measurement_of(quantized: QuantizedModel, *, keeps_points: bool) -> Measurement:
    """Return an empty measurement of a model and its references."""
    if isinstance(quantized, (LanguageModel, EncoderDecoder)):
        return LanguageMeasurement(quantized)  # type: ignore[return-value] # the same
    return Measurement.of(quantized, keeps_points=keeps_points)


class Comparer:
    """Errors of every stage; update it inside `with`, which restores the reference's buffers."""

    def __init__(
        self,
        quantized: QuantizedModel,
        runtime: str,
        *,
        keeps_points: bool = False,
        by_sample: bool = False,
    ) -> None:
        quantized.edge.runtimes.check(runtime)
        if not quantized.has_reference:
            raise ValueError(
                f"{quantized.name} has no reference to compare with: load it with "
                "edgeq.load(tflite, reference=model), or float_tflite=; without any there are "
                "edgeq.check_op_dtypes, assert_conforms, assert_runtimes_agree, assert_size, the "
                "assertions on dtypes, and the command edgeq show"
            )
        self._quantized = quantized
        self._runtime = runtime
        self._runner = runner_of(quantized, runtime)
        self._new_measurement = functools.partial(
            measurement_of, quantized, keeps_points=keeps_points
        )
        self.measurement = self._new_measurement()
        self._by_sample = by_sample
        self.count = 0
        self._digest = hashlib.sha256()
        self._open = contextlib.ExitStack()
        self._changed: Sequence[str] = ()
        self._is_random = False  # whether a second call of the reference differs

    def __enter__(self) -> Comparer:  # noqa: PYI034 # Self came with Python 3.11
        quantized = self._quantized
        for edge in (quantized.edge, quantized.float_edge):
            if edge is not None:
                edge.restart()
        if (reference := quantized.float_model) is not None:
            self._changed = self._open.enter_context(undisturbed(reference, quantized.name))
        return self

    def __exit__(self, *raised: object) -> None:
        self._open.close()

    def update(self, sample: Sample) -> SampleOutputs:
        """Measure one sample."""
        outcome = self._runner.run(sample, self.count) if self.count else self._run_first(sample)
        self.measurement.update(self.count, sample, outcome)
        self.pass_on(sample.arrays())
        return outcome

    def _run_first(self, sample: Sample) -> SampleOutputs:
        """Run the first sample, and its reference again if that has drawn random numbers."""
        torch = loaded_torch()
        state = torch and torch.get_rng_state()
        outcome = self._runner.run(sample, 0)
        draws = torch and not state.equal(torch.get_rng_state())  # as HF's layerdrop does in eval
        if draws and isinstance(self._runner, SampleRunner):
            pairs = zip(outcome.values["float"], self._runner.reference(sample, 0), strict=True)
            self._is_random = not all(np.array_equal(*pair, equal_nan=True) for pair in pairs)
        return outcome

    def update_all(self, samples: Iterator[Sample], threads: int) -> None:
        """Measure samples, in order if the first one changes the reference's state."""
        in_flight = InFlight(1, is_remote=False)
        if isinstance(self._runner, SampleRunner):
            self._runner.prepare()  # on all cores, as no sum is in it
            is_remote = self._quantized.edge.runtimes.target_of(self._runtime) is not None
            in_flight = InFlight(threads, is_remote=is_remote)
        # A language model one by one: each interpreter holds its weights, and uses all cores.
        with on_one_thread():
            if begin(samples, self._quantized, in_flight.workers, self.update):
                self._update_together(samples, in_flight)

    def _update_together(self, samples: Iterator[Sample], in_flight: InFlight) -> None:
        workers: list[tuple[SampleRunner, Measurement]] = []

        def worker() -> tuple[SampleRunner, Measurement]:
            workers.append((self._runner.clone(in_flight.cores), self._new_measurement()))
            return workers[-1]

        def measure(worker: tuple[SampleRunner, Measurement], numbered: tuple[int, Sample]) -> None:
            (runner, measurement), (index, sample) = worker, numbered
            outcome = runner.run(sample, index)
            measurement.update(index, sample, outcome)

        def numbered() -> Iterator[tuple[int, Sample]]:
            for sample in samples:
                yield self.count, sample.clone()
                self.pass_on(sample.arrays())

        for _ in in_order(numbered(), worker, measure, in_flight.workers):
            pass
        for _, measurement in workers:
            self.measurement.merge(measurement)

    def pass_on(self, arrays: Arrays) -> None:
        """Count a sample and add it to the fingerprint, without measuring it."""
        if not self._by_sample:
            for name, array in zip(self._quantized.input_names, arrays, strict=True):
                # repr of the names, so that no two lists of inputs read the same.
                head = repr((self.count, name, array.dtype.str, array.shape))
                self._digest.update(head.encode())
                self._digest.update(contiguous(array).data)
        self.count += 1

    @property
    def calibration(self) -> Calibration:
        """How the measured samples relate to those of the calibration."""
        evaluated, averages = self.measurement.evaluated.result(), self._quantized.flow == "recipe"
        return Calibration(evaluated.given, self.measurement.overlap, averages)

    def result(self, machines: tuple[str, ...] = ()) -> Comparison:
        """Return the comparison."""
        quantized, measurement = self._quantized, self.measurement
        findings = measurement.findings(self.calibration)
        count, overlap, _ = self.calibration
        met_again = overlap_finding(overlap, count, chance=quantized.ledger.chance)
        findings += [each for each in (met_again, repeated_finding(quantized.ledger)) if each]
        findings += _stateful(quantized.name, self._changed, is_random=self._is_random)
        fingerprint = self._digest.hexdigest()
        if self._by_sample:
            fingerprint = measurement.evaluated.fingerprint(quantized.input_names)
        return Comparison(
            name=quantized.name,
            flow=quantized.flow,
            runtime=self._runtime,
            health=(
                *findings,
                *static_findings(quantized.edge),
                *runtime_findings(quantized.edge, self._runtime),
            ),
            worst_samples=measurement.worst.result(),
            evaluated=measurement.evaluated.result(),
            fingerprint=fingerprint,
            machines=machines,
            target=quantized.edge.runtimes.machine_of(self._runtime),
            build=functools.partial(
                build_of,
                quantized.edge,
                quantized.ledger,
                quantized.float_model,
                dict(zip(quantized.input_names, measurement.ranges, strict=True)),
            ),
            quantized=quantized,
            **measurement.results(),
        )


def _job_runner(model: QuantizedModel, *, keeps_points: bool) -> JobRunner:
    runner = runner_of(model.clone(), model.runtime)

    def run(items: Iterable[tuple[int, Any]], _: Any) -> Measurement:
        measurement = measurement_of(model, keeps_points=keeps_points)
        for index, sample in items:
            outcome = runner.run(sample, index)
            measurement.update(index, sample, outcome)
        return measurement

    return run


def _stateful(name: str, changed: Sequence[str], *, is_random: bool) -> Iterator[Finding]:
    place = Place("file", name)
    if is_random:
        symptom = "its forward draws random numbers: a second call on sample 0 differs"
        fix = "draw none in eval mode, as F.dropout(x, p, training=self.training) does"
        yield Finding(kind=STATEFUL_REFERENCE, place=place, symptom=symptom, fix=fix, harm=BLOCKING)
    if changed:
        symptom = (
            f"its forward changes the buffer {changed[0]!r} ({len(changed)} in all), so the "
            "outputs of a sample depend on those before it; the buffers were restored afterwards"
        )
        yield Finding(kind=STATEFUL_REFERENCE, place=place, symptom=symptom)
