"""Check a model: measure, judge, and fail with all findings."""

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
    from pytest_edgeq.compare.executors.engines import SampleExecutor

Claims = Callable[[Comparison | None], Iterable[Callable[[], None]]]


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
    gate = Gate(quantized, runtime, keeps_points=keeps_points)
    with on_one_thread(), progress.step("check", quantized.name, inputs) as step:
        gate.judge(inputs, threads, step, engine)
    verdict = gate.verdict
    verdict.add(*about_states)
    unwritten = writes and bool(verdict.findings)
    if not unwritten:
        gate.check_baselines(claims(gate.explained))
    on_result(CheckResult(gate.comparison, gate.layers, verdict.merged()))
    if verdict.findings:
        verdict.notes += gate.sample_notes
        raise failure(verdict.merged(), verdict.text(quantized.name, unwritten=unwritten))
    for note in dict.fromkeys(verdict.notes):
        # In a test the summary reports few samples, elsewhere only a warning that is raised anyway:
        # a suite that turns warnings into errors must not fail because of them.
        also = gate.sample_notes if note == UNREMEMBERED else []
        warn_user("; ".join([f"edgeq.check: {note}", *also]))
