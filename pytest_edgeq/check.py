"""`edgeq.check`: everything that must hold of a model that ships, and all that does not in one."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from pytest_edgeq.agree import Agreement
from pytest_edgeq.compare import Comparer
from pytest_edgeq.localize.localizer import Localizer
from pytest_edgeq.localize.rows import LOWERING, LayerErrors
from pytest_edgeq.numerics.comparison import Comparison
from pytest_edgeq.numerics.findings import CALIBRATION_OVERLAP, Finding
from pytest_edgeq.quantized import QuantizedModel
from pytest_edgeq.samples import Sample, read_samples
from pytest_edgeq.snapshots.compare import describe_change
from pytest_edgeq.tflite.edge import EdgeFile
from pytest_edgeq.tflite.same import border_differences, op_differences
from pytest_edgeq.warn import warn_user

__all__ = ["check"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True

Claims = Callable[[Comparison | None], Iterable[Callable[[], None]]]

_SHOWN = 4
"""How many more differences of one kind a text lists."""

# The order in which findings are told: the ones that explain the others first.
_ORIGIN, _LAYERS, _RUNS, _RUNTIMES, _DATA, _HEALTH, _MEMORY = range(7)


@dataclass(frozen=True, slots=True)
class _Trouble:
    rank: int
    text: str


def check(
    quantized: QuantizedModel,
    inputs: Iterable[Any],
    *,
    runtime: str,
    claims: Claims,
    writes: bool,
) -> None:
    """
    Hold a model against everything that is known of it, in one pass over the samples.

    Args:
        quantized: The file and its references.
        inputs: Samples, read once, in order, one held at a time.
        runtime: Kernels that the errors are measured on.
        claims: Gives, for what was measured, the checks of what is remembered, which raise.
        writes: Whether those write what is new or changed.

    Raises:
        AssertionError: Lists all that is wrong.
        ValueError, TypeError: No reference, no sample, or one that does not fit.
    """
    gate = _Gate(quantized, runtime)
    gate.look(inputs)
    unwritten = writes and bool(gate.findings)
    if not unwritten:
        gate.hold_against(claims(gate.comparison))
    if gate.findings:
        raise AssertionError(gate.text(unwritten=unwritten))
    for note in dict.fromkeys(gate.notes):
        warn_user(f"edgeq.check: {note}")


@dataclass(slots=True, eq=False)
class _Gate:
    """Gathers what is wrong."""

    quantized: QuantizedModel
    runtime: str
    findings: list[_Trouble] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    comparison: Comparison | None = None
    layers: LayerErrors | None = None
    fits: bool = True

    def look(self, inputs: Iterable[Any]) -> None:
        """Measure everything, each sample once."""
        quantized = self.quantized
        # First, as it says what is wrong with the call.
        comparer = Comparer(quantized, self.runtime)
        self._look_at_origin()
        agreement = Agreement(quantized)
        runs = self.runtime in agreement.opened
        with ExitStack() as stack:
            stack.enter_context(comparer)
            localizer = self._localizer(stack)
            for sample in read_samples(inputs, quantized.spec, "evaluation"):
                if not self.fits:
                    continue  # the samples are read all the same: one may not be a sample at all
                expected = self._compare(comparer, sample) if runs else None
                runs = expected is not None
                if not self.fits:
                    continue
                agreement.update(sample, expected)
                localizer = self._localize(localizer, sample)
        if runs:
            self.comparison = comparer.result()
            self._look_at_health(self.comparison.health)
        if localizer is not None and self.fits:
            self.layers = localizer.result()
            if any(row.verdict == LOWERING for row in self.layers.rows):
                self._add(_LAYERS, str(self.layers))
            unjudged = [
                row.name
                for row in self.layers.rows
                if row.matched and row.excess_lsb is None and row.local_lsb_error is not None
            ]
            if unjudged:
                self.notes.append(
                    f"{len(unjudged)} ops stand for one torch call together with others that round "
                    f"between, which no bound is known for: {', '.join(unjudged[:4])}"
                )
            unmatched = [row.name for row in self.layers.rows if not row.matched]
            if unmatched:
                more = f" and {len(unmatched) - 4} more" if len(unmatched) > 4 else ""
                self.notes.append(
                    f"{len(unmatched)} of {len(self.layers.rows)} ops were not held against torch, "
                    f"as no nodes match them: {', '.join(unmatched[:4])}{more}"
                )
        agreed = agreement.result()
        self._add(_RUNS, *agreed.unable)
        self._add(_RUNTIMES, *agreed.apart)
        self.notes += agreed.notes

    def hold_against(self, claims: Iterable[Callable[[], None]]) -> None:
        """Hold the model against what was accepted before."""
        for claim in claims:
            try:
                claim()
            except AssertionError as error:
                self._add(_MEMORY, str(error))
            except RuntimeError as error:  # there is no body of a test to remember by
                self.notes.append(f"nothing was held against a memory: {error}")
                return

    def text(self, *, unwritten: bool) -> str:
        """All that is wrong, the most telling first; what is told twice is told once."""
        ordered = sorted(self.findings, key=lambda each: each.rank)
        texts = list(dict.fromkeys(each.text for each in ordered))
        first, *lines = texts[0].splitlines()
        if len(texts) > 1:
            first += f" [1 of {len(texts)} findings on {self.quantized.name}]"
        told = [first, *lines]
        for number, text in enumerate(texts[1:], 2):
            told += ["", *textwrap.indent(f"[{number}] {text}", "    ").lstrip().splitlines()]
        ranks = {each.rank for each in self.findings}
        if self.layers is not None and ranks & {_HEALTH, _MEMORY} and _LAYERS not in ranks:
            told += ["", f"which layer: {self.layers}"]
        if self.notes:
            told += ["", *(f"not looked at: {note}" for note in dict.fromkeys(self.notes))]
        if unwritten:
            told += ["", "Nothing was remembered: what is to be remembered must be sound first."]
        return "\n".join(told)

    def _add(self, rank: int, *texts: str) -> None:
        self.findings += [_Trouble(rank, text) for text in texts]

    def _compare(self, comparer: Comparer, sample: Sample) -> Any:
        """What the reference gives; None where file and reference cannot be compared."""
        try:
            return comparer.update(sample)
        except (ValueError, TypeError) as error:
            self.fits = False
            self._add(_RUNS, str(error))
        except RuntimeError as error:
            self._add(_RUNS, str(error))
        return None

    def _look_at_health(self, health: Sequence[Finding]) -> None:
        """One finding a kind: what is wrong with one output is often wrong with all."""
        for kind in dict.fromkeys(each.kind for each in health):
            first, *others = [each for each in health if each.kind == kind]
            count = f" ({len(others) + 1} of them)" if others else ""
            lines = [f"health: {kind}{count}: {first.where}: {first.message}"]
            self._add(
                _DATA if kind == CALIBRATION_OVERLAP else _HEALTH,
                "\n".join(
                    _shortened(lines + [f"  {each.where}: {each.message}" for each in others])
                ),
            )

    def _localizer(self, stack: ExitStack) -> Localizer | None:
        """What looks at each op; None where torch or the kernels that it needs cannot run."""
        if not hasattr(Localizer, "result"):
            return None  # XXX seam
        try:
            return stack.enter_context(Localizer(self.quantized))
        except (ValueError, RuntimeError) as error:
            self.notes.append(f"ops were not held against torch one by one: {error}")
            return None

    def _localize(self, localizer: Localizer | None, sample: Sample) -> Localizer | None:
        try:
            if localizer is not None:
                localizer.update(sample)
        except RuntimeError as error:
            self.notes.append(f"ops were not held against torch one by one: {error}")
            return None
        return localizer

    def _look_at_origin(self) -> None:
        """Hold a file that claims to be what the flow made against what it made."""
        origin, edge = self.quantized.origin, self.quantized.edge
        if origin is None:
            return
        found = border_differences(origin.graph, edge.graph)
        if _dtypes(origin) != _dtypes(edge):
            found.append(describe_change(origin.op_dtypes.to_dict(), edge.op_dtypes.to_dict()))
        elif not found:
            found = op_differences(origin.graph, edge.graph, origin.op_dtypes)
        if found:
            first = f"not the file that the {self.quantized.flow} flow made: {found[0]}"
            lines = _shortened([first, *(f"  {each}" for each in found[1:])])
            self._add(_ORIGIN, "\n".join(lines))


def _shortened(lines: list[str]) -> list[str]:
    kept, left = lines[: _SHOWN + 1], lines[_SHOWN + 1 :]
    return [*kept, f"  … and {len(left)} more"] if left else kept


def _dtypes(edge: EdgeFile) -> list[dict[str, Any]]:
    """The map without the modules: a file that ships may have lost its names."""
    return [entry.to_dict() | {"module": None} for entry in edge.op_dtypes]
