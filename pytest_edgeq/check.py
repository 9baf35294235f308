"""`edgeq.check`: everything that must hold of a model that ships, and all that does not in one."""

from __future__ import annotations

import contextlib
import itertools
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pytest_edgeq.agree import SAMPLES, Agreement
from pytest_edgeq.compare import Comparer
from pytest_edgeq.evaluation import notes_on
from pytest_edgeq.executors.chunks import SampleError
from pytest_edgeq.localize.cause import WAYS_OUT
from pytest_edgeq.localize.localizer import Localizer
from pytest_edgeq.localize.rows import LOWERING, SPREAD, LayerError, LayerErrors
from pytest_edgeq.measurement import Outcome
from pytest_edgeq.numerics.calibration import Calibration
from pytest_edgeq.numerics.comparison import Comparison
from pytest_edgeq.numerics.distances import Distances
from pytest_edgeq.numerics.findings import (
    CALIBRATION_OVERLAP,
    INPUT_KINDS,
    NONFINITE,
)
from pytest_edgeq.numerics.machine import Machine
from pytest_edgeq.numerics.metrics import ONE_BIT_DB
from pytest_edgeq.numerics.results import StageErrors
from pytest_edgeq.numerics.wiped import is_below_a_step
from pytest_edgeq.parallel import Beside, on_one_thread, state_of
from pytest_edgeq.progress import Progress, Step
from pytest_edgeq.quantized import QuantizedModel
from pytest_edgeq.sample_source import SampleSource
from pytest_edgeq.samples import Sample, read_samples
from pytest_edgeq.snapshots.errors import REGRESSED, is_explained
from pytest_edgeq.snapshots.op_changes import describe_change
from pytest_edgeq.snapshots.session import is_change, is_missing, without_command
from pytest_edgeq.tflite.edge import EdgeFile
from pytest_edgeq.tflite.origin import origin_findings
from pytest_edgeq.tflite.same import border_differences, op_differences
from pytest_edgeq.unrunnable import UnrunnableError, grouped
from pytest_edgeq.warn import warn_user

if TYPE_CHECKING:
    from pytest_edgeq.executors.carriers import Engine
    from pytest_edgeq.executors.checking import CheckingElsewhere
    from pytest_edgeq.executors.chunks import Chunk
    from pytest_edgeq.executors.ops_job import CheckedSample

__all__ = ["CheckResult", "check"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True

Claims = Callable[[Comparison | None], Iterable[Callable[[], None]]]

_SHOWN = 4
"""How many more differences of one kind a text lists."""

_UNREMEMBERED = "baselines were not checked: outside a test nothing is remembered"

_SHIP = (
    "fix: ship what the flow made, quantized.path; a file that was changed on purpose is held "
    "against torch alone by edgeq.load(path, reference=model)"
)

# The order in which findings are told: the ones that explain the others first.
_ORIGIN, _FIT, _INPUTS, _LAYERS, _RUNS, _RUNTIMES, _DATA, _HEALTH, _MEMORY = range(9)

_RANKS = {
    **dict.fromkeys(INPUT_KINDS, _INPUTS),
    CALIBRATION_OVERLAP: _DATA,
}
"""Of findings on health."""

_CHOSEN = 2
"""Samples on which the ops are measured in any case."""

_FEW_CALIBRATED = 8
"""
Different calibration samples that are few.

A value of a new sample lies beyond the least and greatest of n with a probability of 2/(n + 1): a
fifth of all that are extreme in their sample.
"""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """
    What a check measured and found.

    Attributes:
        comparison: The errors; None where file and reference could not be compared.
        layers: The errors of each op; None where they could not be measured.
        findings: What is wrong, the most telling first.
    """

    comparison: Comparison | None
    layers: LayerErrors | None
    findings: list[str]


@dataclass(frozen=True, slots=True)
class _Trouble:
    rank: int
    text: str


def check(
    quantized: QuantizedModel,
    inputs: Iterable[Any],
    *,
    runtime: str,
    threads: int,
    claims: Claims,
    writes: bool,
    progress: Progress,
    on_result: Callable[[CheckResult], None] = lambda result: None,
    keeps_points: bool = False,
    engine: Engine | None = None,
) -> None:
    """
    Hold a model against everything that is known of it, in one pass over the samples.

    Args:
        quantized: The file and its references.
        inputs: Samples, read once, in order, one held at a time.
        runtime: Kernels that the errors are measured on.
        threads: Cores that may be used; the figures are the same for any number.
        claims: Gives, for what was measured, the checks of what is remembered, which raise.
        writes: Whether those write what is new or changed.
        progress: Told of the samples.
        on_result: Called with what was measured and found, whatever it is.
        keeps_points: Whether to keep elements of the outputs, for charts.
        engine: Measures the samples behind the first few elsewhere, to the same figures; None for
            this process.

    Raises:
        AssertionError: Lists all that is wrong.
        ValueError, TypeError: No reference, no sample, or one that does not fit.
    """
    gate = _Gate(quantized, runtime, keeps_points)
    with on_one_thread(), progress.step("check", quantized.name, inputs) as step:
        gate.look(inputs, threads, step, engine)
    unwritten = writes and bool(gate.findings)
    if not unwritten:
        gate.hold_against(claims(gate.comparison))
    on_result(CheckResult(gate.comparison, gate.layers, gate.texts()))
    if gate.findings:
        gate.notes += gate.sample_notes
        raise AssertionError(gate.text(unwritten=unwritten))
    for note in dict.fromkeys(gate.notes):
        # In a test the summary tells of few samples, and elsewhere this warning, which is given
        # anyway: a suite that turns warnings into errors must not fail of them.
        also = gate.sample_notes if note == _UNREMEMBERED else []
        warn_user("; ".join([f"edgeq.check: {note}", *also]))


class _Choice:
    """
    Chooses the samples whose ops are measured one by one: it takes several times as long as a run.

    These are the first few, and each later one with an output that is further from torch than on
    all before it. Of n samples of like errors some 1 + ln n are chosen. Where a sample changes
    what the next one gives, all are.
    """

    def __init__(self, quantized: QuantizedModel) -> None:
        edges = (quantized.edge, quantized.float_edge)
        self._takes_all = any(edge is not None and edge.is_stateful for edge in edges)
        self._count = 0
        self._distances = Distances()

    @property
    def worst(self) -> list[float] | None:
        """The greatest distance of each output so far; None before the first sample."""
        return self._distances.worst

    def is_next(self, outcome: Outcome | None) -> bool:
        """Whether to measure the ops on the next sample, which gave these outputs."""
        if outcome is None:
            self._count += 1
            return True
        return self.takes(Distances.between(outcome.values["edge"], outcome.values["float"]))

    def takes(self, distances: Sequence[float]) -> bool:
        """Whether to measure the ops on the next sample, whose outputs are so far from torch's."""
        self._count += 1
        is_furthest = self._distances.exceeds(distances)
        return self._takes_all or self._count <= _CHOSEN or is_furthest


@dataclass(slots=True, eq=False)
class _Pass:
    """
    One pass over the samples.

    Attributes:
        comparer: Measures outputs.
        localizer: Measures ops; None where that is not possible, or not any more.
        agreement: Runs every runtime.
        choice: Of the samples whose ops are measured.
        runs: Whether file and reference can be compared.
    """

    comparer: Comparer
    localizer: Localizer | None
    agreement: Agreement
    choice: _Choice
    runs: bool = True


@dataclass(slots=True, eq=False)
class _Gate:
    """Gathers what is wrong."""

    quantized: QuantizedModel
    runtime: str
    keeps_points: bool = False
    findings: list[_Trouble] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refusals: list[UnrunnableError] = field(default_factory=list)
    comparison: Comparison | None = None
    layers: LayerErrors | None = None
    fits: bool = True
    answers: bool = True
    of_torch: bool = False

    def look(
        self, inputs: Iterable[Any], threads: int, step: Step, engine: Engine | None = None
    ) -> None:
        """Measure everything, each sample once: from the second one on ops beside the outputs."""
        quantized = self.quantized
        # First, as it says what is wrong with the call.
        comparer = Comparer(
            quantized,
            self.runtime,
            keeps_points=self.keeps_points,
            by_sample=isinstance(inputs, SampleSource),
        )
        self._look_at_origin()
        agreement = Agreement(quantized)
        samples = read_samples(inputs, quantized.spec, "evaluation")
        machines: Sequence[Machine] = ()
        with ExitStack() as stack:
            by: CheckingElsewhere | None = None
            if engine is not None:
                from pytest_edgeq.executors.checking import CheckingElsewhere
                from pytest_edgeq.executors.reading import Reading

                reading = Reading(quantized, inputs, samples)
                by = CheckingElsewhere(engine, reading, self.runtime, self.keeps_points)
                samples = reading.items()
            stack.enter_context(comparer)
            localizer = self._localizer(stack)
            pass_ = _Pass(comparer, localizer, agreement, _Choice(quantized))
            pass_.runs = self.runtime in agreement.opened
            if by is None or not by.prepares():
                self._measure(pass_, step.each(samples), threads, stack)
            else:
                # What is run on every runtime is run here.
                self._measure(pass_, step.each(itertools.islice(samples, SAMPLES)), 1, stack)
                machines = self._measure_elsewhere(by, pass_, step)
            localizer = pass_.localizer if self.answers else None
        if pass_.runs:
            self.comparison = comparer.result(machines)
            self._look_at_health(self.comparison)
            self._look_at_total(self.comparison.total, comparer.calibration)
        if localizer is not None:
            self._look_at_layers(localizer.result())
        elif not self.fits:
            self._look_at_constants()
        self._look_at_calibration()
        agreed = agreement.result()
        self._add(_RUNS, *grouped([*self.refusals, *agreed.unable]))
        self._add(_RUNTIMES, *agreed.apart)
        self.notes += agreed.notes

    def _measure(
        self, pass_: _Pass, samples: Iterable[Sample], threads: int, stack: ExitStack
    ) -> None:
        """Measure samples here, in order."""
        state = state_of(self.quantized) if threads > 1 else None
        beside: Beside | None = None
        pending: Callable[[], None] | None = None
        for sample in samples:
            if not self.fits:
                continue  # the samples are read all the same: one may not be a sample at all
            outcome = self._compare(pass_.comparer, sample) if pass_.runs else None
            pass_.runs = outcome is not None
            if pending is not None and not self._is_held(pending):
                pass_.localizer = None
            pending = None
            if pass_.localizer is not None and self.answers:
                pending = self._localizing(pass_.localizer, pass_.choice, sample, outcome)
                if beside is not None:
                    pending = beside.start(pending)
            if self.fits:
                known = None if outcome is None else outcome.values["float"]
                pass_.agreement.update(sample, known)
            if pending is not None and beside is None:
                pass_.localizer = pass_.localizer if self._is_held(pending) else None
                pending = None
            if beside is None and state is not None and state == state_of(self.quantized):
                beside = stack.enter_context(contextlib.closing(Beside()))
            state = None
        if pending is not None and not self._is_held(pending):
            pass_.localizer = None

    def _measure_elsewhere(
        self, by: CheckingElsewhere, pass_: _Pass, step: Step
    ) -> Sequence[Machine]:
        """Measure the samples that are left elsewhere; return the machines."""
        if not (pass_.runs and self.fits and self.answers):
            self._measure(pass_, step.each(by.reading.items()), 1, ExitStack())
            return ()

        def held(each: CheckedSample, add: Callable[[bool], None]) -> None:
            """Add the ops of one sample to the localizer, if there is one."""
            is_chosen = pass_.choice.takes(each.distances or ())
            if pass_.localizer is not None and not self._is_held(lambda: add(is_chosen)):
                pass_.localizer = None

        try:
            machines = by.measure(pass_.comparer, pass_.localizer, pass_.choice, held, step)
        except SampleError as failed:
            if failed.chunk is None:
                raise failed.error from None
            self._look_at_failed(failed.chunk, failed.error, failed.index, by, pass_)
            return ()
        if machines is None:
            self._measure(pass_, step.each(by.reading.items()), 1, ExitStack())
        return machines or ()

    def _look_at_failed(
        self, chunk: Chunk, error: BaseException, index: int, by: CheckingElsewhere, pass_: _Pass
    ) -> None:
        """Measure the samples of a chunk here, up to the one that failed."""
        pass_.comparer.count = chunk.start
        samples = by.samples_of(chunk, self.quantized)
        self._measure(pass_, itertools.islice(samples, index + 1 - chunk.start), 1, ExitStack())
        if pass_.runs:  # it fails on the worker alone
            raise error
        for _ in by.reading.items() if by.reading.source is None else ():
            pass  # one may not be a sample at all

    @staticmethod
    def _localizing(
        localizer: Localizer, choice: _Choice, sample: Sample, outcome: Outcome | None
    ) -> Callable[[], None]:
        """Return the call that measures the ops on a sample, or holds its outputs alone."""
        known = {} if outcome is None else outcome.values
        is_chosen = choice.is_next(outcome)
        return partial(localizer.update if is_chosen else localizer.hold, sample.clone(), known)

    def hold_against(self, claims: Iterable[Callable[[], None]]) -> None:
        """Hold the model against what was accepted before."""
        for claim in claims:
            try:
                claim()
            except AssertionError as error:
                self._add(_MEMORY, str(error))
            except RuntimeError:  # there is no body of a test to remember by
                self.notes.append(_UNREMEMBERED)
                return

    @property
    def sample_notes(self) -> list[str]:
        """Notes on the evaluation samples."""
        return [] if self.comparison is None else notes_on(self.comparison.evaluated)

    def texts(self) -> list[str]:
        """Return the findings, the most telling first, each once."""
        ordered = sorted(self.findings, key=lambda each: each.rank)
        return list(dict.fromkeys(each.text for each in ordered))

    def text(self, *, unwritten: bool) -> str:
        """Return the text of the failure: all findings, the cause, the notes."""
        texts = self.texts()
        if not all(map(is_missing, texts)):
            # What is to be accepted must be sound first: its numbers are none to read now.
            texts = [_put_off(each) if is_missing(each) else each for each in texts]
        if any(each.rank != _MEMORY for each in self.findings):
            texts = [_not_yet(each) for each in texts]
        first, *lines = texts[0].splitlines()
        if len(texts) > 1:
            first += f" [1 of {len(texts)} findings on {self.quantized.name}]"
        if cause := self._cause():
            cause = f"layer to blame: {cause}"
            place = self._explained(texts)
            texts[place] = _under_the_first_line(texts[place], cause)
            lines = [*([] if place else [cause]), *lines]
        told = [first, *lines]
        for number, text in enumerate(texts[1:], 2):
            told += ["", *textwrap.indent(f"[{number}] {text}", "    ").lstrip().splitlines()]
        if self.layers is not None and self._tells_errors():
            told += ["", self.layers.overview]
        if self.notes:
            told += ["", *(f"note: {note}" for note in dict.fromkeys(self.notes))]
        if unwritten:
            told += ["", "no baseline was stored: a model must be sound first"]
        return "\n".join(told)

    def _explained(self, texts: Sequence[str]) -> int:
        """Which text the layers explain: the first one, or that of errors where no layer does."""
        if self.layers is not None and self.layers.culprit is None:
            ranks = {each.text: each.rank for each in self.findings}
            for place, text in enumerate(texts):
                if text.startswith(REGRESSED) or ranks.get(text) == _HEALTH:
                    return place
        return 0

    def _cause(self) -> str:
        """What localizing says of errors that nothing has explained yet, or of a changed op."""
        if self.layers is None or self._tells(_INPUTS):
            return ""
        if not (self._tells_errors() or self.layers.culprit):
            return ""
        unexplained = any(
            each.rank == _HEALTH or (each.rank == _MEMORY and is_change(each.text))
            for each in self.findings
        )
        return self.layers.cause if unexplained and not self._tells(_LAYERS) else ""

    def _tells_errors(self) -> bool:
        """Whether errors are told of, and not yet what makes them."""
        if self._tells(_LAYERS) or self._tells(_INPUTS):
            return False
        explained = any(is_explained(each.text) for each in self.findings)
        if explained and self.layers is not None and self.layers.cause == SPREAD:
            return False
        regressed = any(each.text.startswith(REGRESSED) for each in self.findings)
        return regressed or self._tells(_HEALTH)

    def _tells(self, rank: int) -> bool:
        return any(each.rank == rank for each in self.findings)

    def _add(self, rank: int, *texts: str) -> None:
        self.findings += [_Trouble(rank, text) for text in texts]

    def _compare(self, comparer: Comparer, sample: Sample) -> Outcome | None:
        """Return the outputs; None where file and reference cannot be compared."""
        try:
            return comparer.update(sample)
        except (ValueError, TypeError) as error:
            self.fits = False
            self._add(_FIT, str(error))
        except UnrunnableError as error:
            self.refusals.append(error)
        except RuntimeError as error:
            self.answers = False
            self._add(_RUNS, str(error))
        return None

    def _look_at_calibration(self) -> None:
        """Note that few different samples were calibrated with."""
        known = self.quantized.ledger
        if 0 < len(known) < _FEW_CALIBRATED:
            given = f", of {known.n_added} given" if known.n_added > len(known) else ""
            self.notes.append(
                f"calibrated on {len(known)} different sample{'s' if len(known) > 1 else ''}{given}"
                ": ranges cut off what these do not reach; give dozens for PT2E, 100 or more for "
                "static recipes"
            )

    def _look_at_health(self, comparison: Comparison) -> None:
        """One finding a kind: what is wrong with one output is often wrong with all."""
        health = comparison.health
        if any(each.nonfinite_reference for each in comparison.total.outputs.values()):
            self.of_torch = True
        for kind in dict.fromkeys(each.kind for each in health):
            first, *others = [each for each in health if each.kind == kind]
            count = f" ({len(others) + 1} of them)" if others else ""
            lines = [f"health: {kind}{count}: {first.where}: {first.message}"]
            first_of_all = kind == NONFINITE and self.of_torch
            self._add(
                _INPUTS if first_of_all else _RANKS.get(kind, _HEALTH),
                "\n".join(
                    _shortened(lines + [f"  {each.where}: {each.message}" for each in others])
                ),
            )

    def _look_at_total(self, total: StageErrors, calibration: Calibration) -> None:
        """Outputs of which less than a bit is left."""
        for name, errors in total.outputs.items():
            rms = errors.rmse * 10 ** (errors.sqnr_db / 20)
            if not errors.sqnr_db < ONE_BIT_DB or is_below_a_step(errors):
                continue
            tiny = errors.scale is not None and rms < errors.scale
            text = (
                f"output {name!r}: expected {ONE_BIT_DB:.3g} dB SQNR or more, which is one bit of "
                f"it, got {errors.sqnr_db:.3g} dB (rms {rms:.3g} in torch, rms error "
                f"{errors.rmse:.3g})"
            )
            if tiny:
                text += (
                    f"\ncause: its values are less than a step of its scale, {errors.scale:.3g}: "
                    f"its range is too wide; {calibration.too_wide(errors.scale)}"
                )
            self._add(_HEALTH, text)

    def _look_at_layers(self, layers: LayerErrors) -> None:
        self.layers = layers
        # An op that gives NaN where torch itself does is none to blame.
        blamed = [row for row in layers.rows if row.verdict == LOWERING]
        if any(row.findings or not self.of_torch for row in blamed):
            self._add(_LAYERS, self._blaming(layers.cause, layers))
        # One step is what any kernel rounds.
        unjudged = [
            row
            for row in layers.rows
            if row.matched and row.excess_lsb is None and row.verdict != LOWERING
            if row.local_lsb_error is not None and not row.local_lsb_error <= 1
        ]
        if unjudged:
            self.notes.append(
                f"{_ops(len(unjudged), 'has', 'have')} a kernel of which no bound is known, and "
                f"{'is' if len(unjudged) == 1 else 'are'} more than a step off: {_names(unjudged)}"
            )
        self._look_at_unmatched(layers)

    def _look_at_unmatched(self, layers: LayerErrors) -> None:
        """Note the ops that were not measured."""
        unmatched = [row for row in layers.rows if not row.matched]
        if unmatched:
            self.notes.append(
                f"{len(unmatched)} of {_ops(len(layers.rows), 'was', 'were')} not held against "
                f"torch one by one, as float32 has nothing like them: {_names(unmatched)}"
            )

    def _blaming(self, sentence: str, layers: LayerErrors) -> str:
        """The sentence, why, and the way out, and then the rows."""
        return f"{sentence}{self._why(layers)}\n{layers.overview}"

    def _why(self, layers: LayerErrors) -> str:
        """Say who wrote what is wrong, and the way out."""
        if self.quantized.origin is not None:
            return "" if self._tells(_ORIGIN) else f"\n{_SHIP}"
        if layers.culprit is not None and layers.culprit.op in WAYS_OUT:
            return ""  # it has said the way out
        if self.quantized.flow != "prebuilt":
            return (
                "\nfix: the converter wrote this: take another quantizer, or leave the op in "
                "float, and report it with a model of this op alone"
            )
        if not layers.of_another_model:
            return (
                "\nfix: correct the tool that wrote the file, or pass the reference that it was "
                "made from"
            )
        return (
            f"\ncause: {layers.of_another_model} than the file was made from\n"
            "fix: give the reference that it was made from"
        )

    def _localizer(self, stack: ExitStack) -> Localizer | None:
        """What looks at each op; None where torch or the kernels that it needs cannot run."""
        try:
            localizer = Localizer(self.quantized)
            stack.enter_context(localizer)
        except UnrunnableError as error:
            self._not_localized(error)
            return None
        except (ValueError, RuntimeError) as error:
            self.notes.append(f"ops were not held against torch one by one: {error}")
            return None
        return localizer

    def _is_held(self, measure: Callable[[], None]) -> bool:
        """Whether ops can be held against torch; why not is told."""
        try:
            measure()
        except UnrunnableError as error:
            self._not_localized(error)
            return False
        except RuntimeError as error:
            self.notes.append(f"ops were not held against torch one by one: {error}")
            return False
        except (ValueError, TypeError):
            if self.fits:
                raise
            return False  # of inputs that do not fit, which was told
        return True

    def _not_localized(self, error: UnrunnableError) -> None:
        self.refusals.append(error)
        self.notes.append(
            f"ops were not held against torch one by one, as the {error.runtime} runtime, which "
            "keeps what is between them, refuses the file"
        )

    def _look_at_origin(self) -> None:
        """Hold a file that claims to be what the flow made against what it made."""
        origin, edge = self.quantized.origin, self.quantized.edge
        if origin is None:
            return
        borders = border_differences(origin.graph, edge.graph)
        if _dtypes(origin) != _dtypes(edge):
            found = describe_change(origin.op_dtypes.to_dict(), edge.op_dtypes.to_dict())
            # Dtypes and shapes of inputs and outputs stand in there.
            self._add_origin([found, *([] if "inputs and outputs:" in found else borders)])
        elif borders:
            self._add_origin(borders)
        else:
            self._add_origin(op_differences(origin.graph, edge.graph, origin.op_dtypes))

    def _look_at_constants(self) -> None:
        """Of a file that cannot be localized, as its outputs are none to compare."""
        origin, edge = self.quantized.origin, self.quantized.edge
        if origin is None or self._tells(_ORIGIN):
            return
        where = {each.index: each.where for each in edge.op_dtypes if not each.subgraph}
        found = origin_findings(edge, origin)
        self._add_origin([f"{where[index]}: {each}" for index in found for each in found[index]])

    def _add_origin(self, found: list[str]) -> None:
        if not found:
            return
        first = f"not the file that the {self.quantized.flow} flow made: {found[0]}"
        lines = _shortened([first, *(f"  {each}" for each in found[1:])])
        lines.append(_SHIP)
        self._add(_ORIGIN, "\n".join(lines))


def _under_the_first_line(text: str, sentence: str) -> str:
    first, *lines = text.splitlines()
    return "\n".join([first, sentence, *lines])


def _put_off(missing: str) -> str:
    return f"{missing.partition(chr(10))[0]}; update it once the other findings are fixed"


def _not_yet(text: str) -> str:
    """Of a change: no command that accepts it, while another finding says what is wrong."""
    kept = without_command(text)
    return text if kept == text else f"{kept}\nupdate: once the other findings are fixed"


def _names(rows: Sequence[LayerError]) -> str:
    more = f" and {len(rows) - 4} more" if len(rows) > 4 else ""
    return ", ".join(row.name for row in rows[:4]) + more


def _ops(count: int, one: str, several: str) -> str:
    return f"{count} op {one}" if count == 1 else f"{count} ops {several}"


def _shortened(lines: list[str]) -> list[str]:
    kept, left = lines[: _SHOWN + 1], lines[_SHOWN + 1 :]
    return [*kept, f"  … and {len(left)} more"] if left else kept


def _dtypes(edge: EdgeFile) -> list[dict[str, Any]]:
    """The map without the modules: a file that ships may have lost its names."""
    return [entry.to_dict() | {"module": None} for entry in edge.op_dtypes]
