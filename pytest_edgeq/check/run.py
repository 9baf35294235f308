"""Check a model: measure, judge, and fail with everything that does not hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_edgeq.check.gate import UNREMEMBERED, Gate
from pytest_edgeq.compare.file_health import state_findings
from pytest_edgeq.compare.parallel import on_one_thread
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.errors import failure, warn_user
from pytest_edgeq.localize.rows import LayerErrors
from pytest_edgeq.numerics.comparison import Comparison
from pytest_edgeq.numerics.findings import Finding
from pytest_edgeq.progress import Progress

if TYPE_CHECKING:
    from pytest_edgeq.compare.executors.engines import Engine

Claims = Callable[[Comparison | None], Iterable[Callable[[], None]]]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """
    What a check measured and found.

    Attributes:
        comparison: The errors; None where file and reference could not be compared.
        layers: The errors of each op; None where they could not be measured.
        findings: What is wrong, the most harmful first.
    """

    comparison: Comparison | None
    layers: LayerErrors | None
    findings: list[Finding]


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
    states: Mapping[str, str] | None = None,
) -> None:
    """
    Hold a model against everything that is known of it, in one pass over the samples.

    Raises:
        AssertionError: Lists all that is wrong.
        UnmatchedError: The file has no such output or input.
        ValueError, TypeError: No reference, no sample, or one that does not fit.
    """
    handed_on = state_findings(quantized.edge, states) if states else ()
    gate = Gate(quantized, runtime, keeps_points=keeps_points)
    with on_one_thread(), progress.step("check", quantized.name, inputs) as step:
        gate.look(inputs, threads, step, engine)
    verdict = gate.verdict
    verdict.add(*handed_on)
    unwritten = writes and bool(verdict.findings)
    if not unwritten:
        gate.hold_against(claims(gate.explained))
    on_result(CheckResult(gate.comparison, gate.layers, verdict.merged()))
    if verdict.findings:
        verdict.notes += gate.sample_notes
        raise failure(verdict.merged(), verdict.text(quantized.name, unwritten=unwritten))
    for note in dict.fromkeys(verdict.notes):
        # In a test the summary tells of few samples, and elsewhere this warning, which is given
        # anyway: a suite that turns warnings into errors must not fail of them.
        also = gate.sample_notes if note == UNREMEMBERED else []
        warn_user("; ".join([f"edgeq.check: {note}", *also]))
