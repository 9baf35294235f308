"""Assert error budgets and the size of the file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from pytest_edgeq.check.assertions.expect import (
    Model,
    edge_of,
    failed,
    parse_number,
    require_comparison,
    spread,
    table,
)
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.errors import UnmatchedError, failure
from pytest_edgeq.numerics.arrays import short_repr
from pytest_edgeq.numerics.budget import Budget
from pytest_edgeq.numerics.comparison import Comparison
from pytest_edgeq.numerics.findings import (
    NONFINITE,
    OVER_BUDGET,
    PREFILL_DIFFERS,
    Finding,
    Place,
    input_findings,
)
from pytest_edgeq.numerics.metrics import ONE_BIT_DB
from pytest_edgeq.numerics.results import OutputErrors, StageErrors
from pytest_edgeq.numerics.token_errors import PositionErrors

_STAGE_MEANS = {
    "conversion": "float .tflite against torch: the converter changed what the model computes",
    "quantization": "quantization error (ranges, granularity, bit width), before lowering",
    "lowering": "the file against the simulated graph: the converter or the kernels differ from it",
}


def assert_within_budget(
    comparison: Comparison,
    budget: Budget | Mapping[str, Budget | None] | None = None,
    *,
    total: Budget | Mapping[str, Budget | None] | None = None,
    quantization: Budget | Mapping[str, Budget | None] | None = None,
    lowering: Budget | Mapping[str, Budget | None] | None = None,
    conversion: Budget | Mapping[str, Budget | None] | None = None,
) -> None:
    """
    Assert that errors stay within their bounds.

    Anything non-finite fails by itself, in whatever stage and output. So does an output with a
    budget that is zero on both sides.

    Args:
        comparison: From `edgeq.compare`.
        budget: For the stage `total`.
        total: The same by name.
        quantization: For that stage.
        lowering: For that stage.
        conversion: For that stage. A budget is a `Budget` for every output, or a dict by output
            name (None: any error that is finite).

    Raises:
        AssertionError: A bound is violated, an output's name does not match, or the comparison
            lacks the stage or an output the metric.
        TypeError: Not a comparison, or not a budget.
        ValueError: No budget given, or `total` given twice.
    """
    is_swapped = isinstance(budget, Comparison)
    require_comparison(
        comparison,
        "; the arguments are swapped: assert_within_budget(comparison, budget)" * is_swapped,
    )
    if budget is not None and total is not None:
        raise ValueError("the budget of the stage 'total' is given twice: by position and by name")
    given = {
        "conversion": conversion,
        "quantization": quantization,
        "lowering": lowering,
        "total": budget if budget is not None else total,
    }
    asked = {stage: wanted for stage, wanted in given.items() if wanted is not None}
    if not asked:
        raise ValueError(
            "assert_within_budget was given no budget: assert_within_budget(comparison, "
            "Budget(sqnr_db=30)), or total=, quantization=, lowering=, conversion="
        )
    judged = [each for stage, wanted in asked.items() for each in _judge(comparison, stage, wanted)]
    # No budget accepts values that are not finite, in whatever stage.
    violations = [
        violation
        for stage, errors in comparison.stages.items()
        for output in errors.outputs.values()
        if output.nonfinite
        for violation in Budget(max_abs_error=0).violations(output, stage)
    ]
    violations += [v for each in judged for v in each.violations if v.kind != NONFINITE]
    if violations:
        of_total = asked.get("total")
        if not isinstance(of_total, Budget) or not any(
            each.violations for each in judged if each.where == "total"
        ):
            of_total = None
        raise _over_budget(comparison, judged, violations, of_total)


_ALIKE = "calibrate with samples like those evaluated, preprocessed alike, and then set the budget"


class _Judgement(NamedTuple):
    """Comparison of one budget with one stage, or with one output of it."""

    where: str  # the stage, and the output if it is one
    needed: Budget | None
    violations: list[Finding]
    refusal: str  # why no budget is suggested; empty if one is

    @property
    def advice(self) -> str:
        """The line of a text that says which budget the measurement needs."""
        if self.refusal:
            return f"{self.where}: {self.refusal}"
        return f"update ({self.where}): this measurement needs {self.needed!r}"


def _judge(comparison: Comparison, stage: str, wanted: Any) -> list[_Judgement]:
    errors: StageErrors | None = getattr(comparison, stage)
    if errors is None:
        raise UnmatchedError(
            f"the {comparison.flow} flow of {comparison.name} has no stage {stage!r}, so its "
            f"budget would judge nothing; it has {', '.join(comparison.stages)}"
        )
    positions = comparison.positions.get(stage)
    if isinstance(wanted, Budget):
        return [_compare(wanted, errors, stage, stage, positions)]
    if not isinstance(wanted, Mapping):
        raise TypeError(
            f"{stage}: expected a Budget or a dict of Budgets, got {short_repr(wanted)}"
        )
    if not any(value is not None for value in wanted.values()):
        raise ValueError(f"{stage}: {dict(wanted)!r} bounds no output")
    judged = []
    names = list(errors.outputs)
    for name, value in zip(names, spread(wanted, names, "output"), strict=True):
        where = f"{stage}, output {name!r}"
        if value is None:
            continue
        if not isinstance(value, Budget):
            raise TypeError(f"{where}: expected a Budget, got {short_repr(value)}")
        judged.append(_compare(value, errors.outputs[name], stage, where, positions))
    return judged


def _compare(
    budget: Budget,
    errors: StageErrors | OutputErrors,
    stage: str,
    where: str,
    positions: PositionErrors | None,
) -> _Judgement:
    try:
        needed = budget.needed(errors)
        violations = budget.violations(errors, stage, positions)
    except ValueError as error:
        raise UnmatchedError(str(error)) from None
    refusal = ""
    if needed is None:
        refusal = "no budget accepts this measurement; the output is broken"
    elif errors.sqnr_db < ONE_BIT_DB:
        refusal = (
            f"less than one bit of the output is left ({errors.sqnr_db:.3g} dB SQNR): it is "
            "broken, so that no budget is given"
        )
    return _Judgement(where, needed, violations, refusal)


def _over_budget(
    comparison: Comparison,
    judged: list[_Judgement],
    violations: list[Finding],
    total: Budget | None,
) -> AssertionError:
    first, *others = violations
    explained = input_findings(comparison.health)
    if explained:
        first = replace(first, fix=_ALIKE)
        none = "no budget is given, as it would accept inputs that do not fit"
        judged = [each._replace(refusal=each.refusal or none) for each in judged]
    elif explained := tuple(each for each in comparison.health if each.kind == PREFILL_DIFFERS):
        none = "no budget is given, as it would accept prefill signatures that differ from decode"
        judged = [each._replace(refusal=each.refusal or none) for each in judged]
    stage = "" if explained else _stage_to_blame(comparison)
    # A loss by inputs unlike the calibration's shows in all layers, and no layer causes it.
    of_torch = any(each.nonfinite_reference for each in comparison.total.outputs.values())
    is_of_layers = not (explained or of_torch)
    if comparison.explain is not None and is_of_layers:
        explained = (comparison.explain(),)
    violated = [judgement for judgement in judged if judgement.violations]
    measured = str(comparison).splitlines()
    worst = [f"{sample.index} ({sample.sqnr_db:.3g} dB)" for sample in comparison.worst_samples]
    if worst:
        measured.append(
            f"worst samples: {', '.join(worst)}; comparison.worst_samples keeps their inputs"
        )
    found = replace(first, explained_by=explained, causes=(stage,) if stage else ())
    lines = [f"{first.title}{f' (and {len(others)} more)' if others else ''}"]
    lines += [f"  {each.title}" for each in others[:5]]
    lines += [f"  … and {len(others) - 5} more"] if len(others) > 5 else []
    lines += found.reasons
    if not (explained or of_torch):
        found = replace(found, fix="find the layer: print(edgeq.localize(model, samples))")
        lines.append(found.fix)
    lines += [*(each.advice for each in violated), "", *measured]
    behind = [line for each in explained for line in each.evidence]
    if total is not None and comparison.suggest is not None and is_of_layers:
        behind += [*([""] if behind else []), *comparison.suggest(total).splitlines()]
    text = "\n".join([*lines, *([""] if behind else []), *behind])
    refused = [each.advice for each in violated if each.refusal]
    accepted = [f"{each.needed!r} ({each.where})" for each in violated if not each.refusal]
    found = replace(found, evidence=(*refused, *measured), command="; ".join(accepted))
    return failure([found, *others], text)


def _stage_to_blame(comparison: Comparison) -> str:
    """Return a text on the stage that loses most; empty without stages."""
    if comparison.total.nonfinite:
        outputs = comparison.total.outputs.values()
        if any(output.nonfinite_reference for output in outputs):
            return "the reference itself has NaN or infinities: look at the model and the samples"
        if len(comparison.stages) == 1:
            return "the reference is finite; the file has NaN or infinities"
        first = next(name for name, stage in comparison.stages.items() if stage.nonfinite)
        return f"the reference is finite; {first} is the first stage with NaN or infinities"
    stages = {name: stage.sqnr_db for name, stage in comparison.stages.items() if name != "total"}
    ranked = sorted((sqnr_db, name) for name, sqnr_db in stages.items() if not math.isnan(sqnr_db))
    if not ranked:
        return ""
    sqnr_db, name = ranked[0]
    others = ", ".join(f"{other} {value:.3g} dB" for value, other in ranked[1:])
    return (
        f"{name} loses most ({sqnr_db:.3g} dB SQNR{f'; {others}' if others else ''}): "
        + (_STAGE_MEANS[name])
    )


def assert_size(model: Model, max_bytes: int | None = None, max_ratio: float | None = None) -> None:
    """
    Assert that the file is small enough.

    Args:
        model: QuantizedModel, path or bytes.
        max_bytes: Greatest size of the file.
        max_ratio: Greatest size of the file as a share of the float model: of its float `.tflite`
            if the flow has one, else of the torch model's parameters and buffers.

    Raises:
        AssertionError: The file is larger.
        ValueError, TypeError: No bound, one that is not positive and finite, or a ratio to a float
            model that is not known.
    """
    for name, bound in (("max_bytes", max_bytes), ("max_ratio", max_ratio)):
        if bound is None:
            continue
        if not 0 < parse_number(name, bound) < math.inf:
            raise ValueError(f"{name}: expected more than 0, and finite, got {bound!r}")
    if max_bytes is None and max_ratio is None:
        raise ValueError("assert_size expects nothing: give max_bytes= or max_ratio=")
    edge = edge_of(model)
    if any(tensor.is_external for graph in edge.graph.subgraphs for tensor in graph.tensors):
        raise UnmatchedError(
            "constants of the model lie in a file of their own: the size of this one says nothing"
        )
    size = len(edge.graph.buffer)
    wrong = []
    if max_bytes is not None and size > max_bytes:
        wrong.append((f"at most {max_bytes:,} bytes", f"{size:,}"))
    if max_ratio is not None:
        known = model.float_size if isinstance(model, QuantizedModel) else None
        if known is None:
            raise ValueError(
                "max_ratio: the size of the float model is not known here; give max_bytes, or a "
                "model from edgeq.quantize or edgeq.load(tflite, reference=model)"
            )
        base, what = known
        if size > max_ratio * base:
            expected = f"at most {max_ratio:g} of {what} ({base:,} bytes)"
            wrong.append((expected, f"{size / base:.3g} ({size:,} bytes)"))
    if not wrong:
        return
    # Several tensors may share one buffer.
    constants = {
        tensor.buffer: (edge.graph.stored(tensor).size, tensor)
        for subgraph in edge.graph.subgraphs
        for tensor in subgraph.tensors
        if tensor.is_constant
    }
    largest = sorted(constants.values(), key=lambda pair: (-pair[0], pair[1].index))
    in_float = sum(n for n, tensor in largest if tensor.is_floating_point)
    stored = sum(n for n, _ in largest)
    rows = [(f"{n:,}", t.dtype, "×".join(map(str, t.shape)), t.name[-60:]) for n, t in largest]
    (expected, got), *more = wrong
    raise failed(
        Finding(
            kind=OVER_BUDGET,
            place=Place("file", "size"),
            expected=expected,
            got=got,
            evidence=(
                *(f"size: expected {expected}, got {got}" for expected, got in more),
                *table(rows, ("bytes", "dtype", "shape", "constant")),
            ),
            causes=(
                f"constants take {stored:,} bytes, {in_float:,} of them in float, which is four "
                f"times the size of int8; the other {size - stored:,} are ops, names and "
                "parameters, as many for weights of any size",
            ),
            command=f"max_bytes={size}",
        )
    )
