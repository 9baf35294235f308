"""Check a model: measure, judge, and fail with all findings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pytest_edgeq.baselines.op_changes import describe_change
from pytest_edgeq.check.language import check_language
from pytest_edgeq.check.measuring import Measuring
from pytest_edgeq.check.remember import notes_on
from pytest_edgeq.check.verdict import Verdict
from pytest_edgeq.compare.file_health import state_findings
from pytest_edgeq.compare.language.model import LanguageModel
from pytest_edgeq.compare.parallel import on_one_thread
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.errors import failure, findings_of, warn_user
from pytest_edgeq.localize.origin import origin_findings
from pytest_edgeq.localize.rows import LOWERING, LayerError, LayerErrors
from pytest_edgeq.numerics.comparison import Comparison
from pytest_edgeq.numerics.findings import (
    BIAS_AT_INT32_LIMIT,
    CANNOT_RUN,
    FILE,
    LOST_OUTPUT,
    OTHER_FILE,
    USELESS,
    WRONG_OUTPUT,
    ZERO_OUTPUT,
    Finding,
    Harm,
    Place,
    counted,
    input_findings,
)
from pytest_edgeq.numerics.metrics import ONE_BIT_DB
from pytest_edgeq.numerics.results import StageErrors, is_below_a_step
from pytest_edgeq.numerics.static_health import Calibration
from pytest_edgeq.progress import Progress
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.conformance import RULE_NAMES
from pytest_edgeq.tflite.same import io_differences, op_differences

if TYPE_CHECKING:
    from pytest_edgeq.compare.executors.sample_executor import SampleExecutor

Claims = Callable[[Comparison | None], Iterable[Callable[[], None]]]

_UNREMEMBERED = "baselines were not checked: outside a test nothing is remembered"
_SHOWN = 4  # how many more differences of one kind a text lists
_SHIP = (
    "ship what the flow made, quantized.path; a file that was changed on purpose is compared with "
    "torch alone by edgeq.load(path, reference=model)"
)

# SQNR that a file of float32, or with float16 constants, has at least: RAFT has 110 dB.
_FLOAT32_DB, _FLOAT16_DB = 60.0, 40.0
# A spread SQNR below the first is noted if the samples' mean, as the output, exceeds the second.
_LITTLE_DB, _CONSTANT_DB = 20.0, 40.0
# Number of different calibration samples below which they are few.
# A value of a new sample lies beyond the least and greatest of n with a probability of 2/(n + 1): a
# fifth of all that are extreme in their sample.
_FEW_CALIBRATED = 8


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check measured and found."""

    comparison: Comparison | None
    layers: LayerErrors | None
    findings: list[Finding]  # the defects, the most harmful first


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
    engine: SampleExecutor | None = None,
    states: Mapping[str, str] | None = None,
) -> None:
    """Run all checks of a model in one pass; `Edgeq.check` documents the errors."""
    about_states = state_findings(quantized.edge, states) if states else ()
    verdict = Verdict()
    layers: LayerErrors | None = None
    if isinstance(quantized, LanguageModel):
        comparison = check_language(
            quantized, inputs, verdict, runtime=runtime, progress=progress, engine=engine
        )
    else:
        gate = _Gate(quantized, verdict)
        # First, since it validates the call.
        measuring = Measuring(quantized, runtime, verdict, inputs, keeps_points=keeps_points)
        gate.check_origin()
        with on_one_thread(), progress.step("check", quantized.name, inputs) as step:
            measuring.measure(threads, step, engine)
        gate.judge(measuring)
        comparison, layers = measuring.comparison, measuring.layers
    verdict.add(*about_states)
    unwritten = writes and bool(verdict.findings)
    if not unwritten:
        explained = comparison
        if comparison is not None and verdict.layers is not None:
            # Errors that regressed are blamed on it.
            explained = replace(comparison, explain=verdict.explain)
        _check_baselines(verdict, claims(explained))
    on_result(CheckResult(comparison, layers, verdict.merged()))
    sample_notes = [] if comparison is None else notes_on(comparison)
    if verdict.findings:
        verdict.notes += sample_notes
        raise failure(verdict.merged(), verdict.text(quantized.name, unwritten=unwritten))
    for note in dict.fromkeys(verdict.notes):
        # In a test the summary reports few samples, elsewhere only a warning that is raised anyway:
        # a suite that turns warnings into errors must not fail because of them.
        also = sample_notes if note == _UNREMEMBERED else []
        warn_user("; ".join([f"edgeq.check: {note}", *also]))


def _check_baselines(verdict: Verdict, claims: Iterable[Callable[[], None]]) -> None:
    """Compare the model with its baselines; differences become findings."""
    for claim in claims:
        try:
            claim()
        except AssertionError as error:
            found = findings_of(error)
            if not found:  # raised by the user's iterator of samples
                raise
            verdict.add(*found)
        except RuntimeError:  # no test is running
            verdict.notes.append(_UNREMEMBERED)
            return


class _Gate:
    """Judges the measurements of a model."""

    def __init__(self, quantized: QuantizedModel, verdict: Verdict) -> None:
        self._quantized = quantized
        self._verdict = verdict
        self._is_torch_nonfinite = False
        """Whether torch itself gives values that are not finite."""

    def judge(self, measured: Measuring) -> None:
        """Add the findings on the measurements."""
        if measured.comparison is not None:
            total = measured.comparison.total
            self._check_health(measured.comparison, measured.layers)
            self._check_total(total, measured.calibration)
            self._check_spread(total)
            if measured.layers is None:
                self._check_float(total)
        self._verdict.add(*measured.findings)
        if measured.layers is not None:
            self._check_layers(measured.layers)
        elif not measured.fits:
            self._check_constants()
        known = self._quantized.ledger
        if 0 < len(known) < _FEW_CALIBRATED:
            given = f", of {known.n_added} given" if known.n_added > len(known) else ""
            self._verdict.notes.append(
                f"calibrated on {counted(len(known), 'different sample')}{given}: ranges cut off "
                "what these do not reach; give dozens for PT2E, 100 or more for static recipes"
            )
        self._verdict.notes += measured.agreed.notes

    def check_origin(self) -> None:
        """Compare a replaced file with the flow's own file."""
        origin, edge = self._quantized.origin, self._quantized.edge
        if origin is None:
            return
        io_changes = io_differences(origin.graph, edge.graph)
        if _dtypes(origin) != _dtypes(edge):
            maps = origin.op_dtypes.to_dict(), edge.op_dtypes.to_dict()
            change = describe_change(*maps)
            # The map includes dtypes and shapes of inputs and outputs.
            is_same = all(maps[0][part] == maps[1][part] for part in ("inputs", "outputs"))
            self._add_origin([*([] if change is None else change.lines), *(io_changes * is_same)])
        else:
            found = io_changes or op_differences(origin.graph, edge.graph, origin.op_dtypes)
            self._add_origin(found)

    def _check_health(self, comparison: Comparison, layers: LayerErrors | None) -> None:
        """Add one finding per kind, without violated kernel rules that others report."""
        rules = RULE_NAMES if layers is not None else ()
        refused = {
            (each.kind, each.place.op)
            for found in self._verdict.findings
            if found.kind == CANNOT_RUN
            for each in found.explained_by
        }
        health = [
            each
            for each in comparison.health
            if each.kind not in rules and (each.kind, each.place.op) not in refused
        ]
        outputs = comparison.total.outputs.values()
        self._is_torch_nonfinite = any(each.nonfinite_reference for each in outputs)
        for kind in dict.fromkeys(each.kind for each in health):
            alike = [each for each in health if each.kind == kind]
            first, *others = sorted(alike, key=lambda each: each.harm, reverse=True)
            count = f" ({len(alike)} of them)" if others else ""
            same = first.causes, first.fix
            lines = [
                each.title if (each.causes, each.fix) == same else each.sentence for each in others
            ]
            title = f"health: {kind}{count}: {first.title}"
            found = replace(first, headline=title, evidence=_shortened(lines))
            if layers is not None and kind == BIAS_AT_INT32_LIMIT:
                # If the bias does not fit for another reason, its op is to blame.
                is_starved = all(each.place.op in layers.starved for each in alike)
                behind = input_findings([layers.finding]) if is_starved else ()
                found = replace(found, explained_by=behind)
            self._verdict.add(found)

    def _check_total(self, total: StageErrors, calibration: Calibration) -> None:
        """Add a finding on each output of which less than a bit is left."""
        for name, errors in total.outputs.items():
            if errors.degenerate and not self._verdict.has(ZERO_OUTPUT):
                self._verdict.notes.append(
                    f"output {name!r} is zero in the reference and in the file on all samples: "
                    "nothing of it was compared; use samples for which it is not zero"
                )
            rms = errors.rmse * 10 ** (errors.sqnr_db / 20)
            # `near_ties` judges selections.
            if errors.chosen or not errors.sqnr_db < ONE_BIT_DB or is_below_a_step(errors):
                continue
            causes: tuple[str, ...] = ()
            fix = ""
            if errors.scale is not None and rms < errors.scale:
                reason = calibration.too_wide(errors.scale)
                step = f"its values are less than a step of its scale, {errors.scale:.3g}"
                causes, fix = (f"{step}: its range is too wide", *reason.causes), reason.fix
            self._verdict.add(
                Finding(
                    kind=LOST_OUTPUT,
                    place=Place("output", name),
                    expected=f"{ONE_BIT_DB:.3g} dB SQNR or more, which is one bit of it",
                    got=f"{errors.sqnr_db:.3g} dB (rms of {self._quantized.reference_name} "
                    f"{rms:.3g}, of the error {errors.rmse:.3g})",
                    harm=USELESS,
                    causes=causes,
                    fix=fix,
                )
            )

    def _check_spread(self, total: StageErrors) -> None:
        """Note an SQNR that is high only because the output is nearly constant."""
        for name, errors in total.outputs.items():
            left = errors.spread_db
            if not (left < _LITTLE_DB and errors.sqnr_db - left > _CONSTANT_DB):
                continue
            rms = errors.rmse * 10 ** (errors.sqnr_db / 20)
            self._verdict.notes.append(
                f"output {name!r} varies between the samples by {errors.spread:.3g} (rms) around "
                f"values of {rms:.3g}; the error is {errors.rmse:.3g}: the variation has "
                f"{left:.3g} dB SQNR, the whole output {errors.sqnr_db:.3g} dB; let the model "
                "return the difference from a constant, or use samples that differ more"
            )

    def _check_float(self, total: StageErrors) -> None:
        """Compare the outputs of an unquantized file whose ops could not be measured."""
        tensors = [each for graph in self._quantized.graph.subgraphs for each in graph.tensors]
        if any(each.is_quantized for each in tensors):
            return
        least = _FLOAT16_DB if any(each.dtype == "float16" for each in tensors) else _FLOAT32_DB
        for name, errors in total.outputs.items():
            if ONE_BIT_DB <= errors.sqnr_db < least:
                self._verdict.add(
                    Finding(
                        kind=WRONG_OUTPUT,
                        place=Place("output", name),
                        expected=f"{least:g} dB SQNR or more, as the file quantizes nothing",
                        got=f"{errors.sqnr_db:.3g} dB",
                        harm=Harm.decibels(least - errors.sqnr_db),
                    )
                )

    def _check_layers(self, layers: LayerErrors) -> None:
        self._verdict.layers = None if self._is_torch_nonfinite else layers
        # An op that returns NaN as torch does is not to blame.
        blamed = [row for row in layers.rows if row.verdict == LOWERING]
        if any(row.records or not self._is_torch_nonfinite for row in blamed):
            first, *others = (self._explained(each, layers) for each in layers.wrong)
            first = layers.with_source(first)
            evidence = (*first.evidence, *layers.overview.splitlines())
            self._verdict.add(replace(first, evidence=evidence))
            self._verdict.add(*(others if not layers.of_another_model else ()))
        # Any kernel may round by one step.
        unjudged = [
            row
            for row in layers.rows
            if row.matched and row.excess_lsb is None and row.verdict != LOWERING
            if row.local_lsb_error is not None and not row.local_lsb_error <= 1
        ]
        if unjudged:
            have, are = ("op has", "is") if len(unjudged) == 1 else ("ops have", "are")
            self._verdict.notes.append(
                f"{len(unjudged)} {have} a kernel without a known tolerance, and {are} more than a "
                f"step off: {_names(unjudged)}"
            )
        for index, reason in layers.refused.items():
            name = next(row.name for row in layers.rows if row.index == index)
            self._verdict.notes.append(f"{name} was not compared with the reference: {reason}")
        unmatched = [
            row for row in layers.rows if not row.matched and row.index not in layers.refused
        ]
        if unmatched:
            have, were = ("has", "was") if len(unmatched) == 1 else ("have", "were")
            self._verdict.notes.append(
                f"{len(unmatched)} of {counted(len(layers.rows), 'op')} {have} no counterpart in "
                f"the float model and {were} not checked: {_names(unmatched)}"
            )

    def _explained(self, found: Finding, layers: LayerErrors) -> Finding:
        """Add which tool wrote the wrong op, and how to fix it."""
        if self._quantized.origin is not None:
            return found if self._verdict.has(OTHER_FILE) else replace(found, fix=_SHIP)
        if found.fix:
            return found
        if self._quantized.flow != "prebuilt":
            by_quantizer = self._quantized.flow == "recipe" and found.place.op != layers.differing
            fix = (
                f"{'ai-edge-quantizer' if by_quantizer else 'the converter'} wrote this: take "
                "another quantizer, or leave the op in float, and report it with a model of this "
                "op alone"
            )
        elif other := layers.of_another_model:
            fix = "give the reference that it was made from"
            return replace(found, causes=(*found.causes, other), fix=fix)
        else:
            fix = (
                "correct the tool that wrote the file, or pass the reference that it was made from"
            )
        return replace(found, fix=fix)

    def _check_constants(self) -> None:
        """Compare constants with the flow's own if outputs cannot be compared."""
        origin, edge = self._quantized.origin, self._quantized.edge
        if origin is None or self._verdict.has(OTHER_FILE):
            return
        where = {each.index: each.where for each in edge.op_dtypes if not each.subgraph}
        found = origin_findings(edge, origin)
        self._add_origin([f"{where[i]}: {each.message}" for i in found for each in found[i]])

    def _add_origin(self, found: list[str]) -> None:
        if found:
            headline = f"not the file that the {self._quantized.flow} flow made: {found[0]}"
            evidence = _shortened(found[1:])
            self._verdict.add(
                Finding(
                    kind=OTHER_FILE, place=FILE, headline=headline, evidence=evidence, fix=_SHIP
                )
            )


def _names(rows: Sequence[LayerError]) -> str:
    more = f" and {len(rows) - 4} more" if len(rows) > 4 else ""
    return ", ".join(row.name for row in rows[:4]) + more


def _shortened(lines: list[str]) -> tuple[str, ...]:
    left = len(lines) - _SHOWN
    return (*(f"  {each}" for each in lines[:_SHOWN]), *([f"  … and {left} more"] * (left > 0)))


def _dtypes(edge: EdgeFile) -> list[dict[str, Any]]:
    """Return the op-dtype map without modules, since a shipped file may lack names."""
    return [entry.to_dict() | {"module": None} for entry in edge.op_dtypes]
