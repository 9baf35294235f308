"""Quantize a model once, and gather what a first test of it can assert today."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_edgeq.cli.placeholders import Placeholders
from pytest_edgeq.tflite.ops import QDQ

if TYPE_CHECKING:
    import torch

    from pytest_edgeq.compare.quantized import QuantizedModel
    from pytest_edgeq.edgeq import Edgeq
    from pytest_edgeq.numerics.budget import Budget
    from pytest_edgeq.numerics.comparison import Comparison
    from pytest_edgeq.tflite.op_dtypes import OpDtypes

__all__ = ["CALIBRATION", "CHECKED", "COMPARED", "Measured", "WeightedOps", "measure"]

CALIBRATION, COMPARED, CHECKED = 32, 64, 16
"""Samples that calibrate, that errors are measured on, and that the gate is given."""


@dataclass(frozen=True, slots=True)
class WeightedOps:
    """
    Ops of one name, whose weights are alike.

    Attributes:
        op: The operator.
        scheme: What they compute in.
        weight: dtype of the weights.
        granularity: Of the weights; None where they are in float.
        count: How many there are.
    """

    op: str
    scheme: str
    weight: str
    granularity: str | None
    count: int


@dataclass(frozen=True, slots=True)
class Measured:
    """
    What holds for a quantized model.

    Attributes:
        inputs: dtypes of the file's inputs, in order.
        outputs: dtypes of its outputs.
        weighted: Ops with weights, by name; those whose weights differ are left out.
        float_ops: Names of ops with a float among operands or results.
        all_float: Whether each op has one, so that nothing can be asserted by them.
        budget: What the errors support; None where no bound could fail.
        figures: SQNR of each stage in dB.
        health: Findings, one text each.
        refused: The first line of what `edgeq.check` finds; empty where it passes.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weighted: tuple[WeightedOps, ...]
    float_ops: tuple[str, ...]
    all_float: bool
    budget: Budget | None
    figures: dict[str, float]
    health: tuple[str, ...]
    refused: str


def measure(model: torch.nn.Module, samples: Placeholders, quantizer: str) -> Measured:
    """
    Quantize, compare and check a model on random samples.

    Raises:
        ValueError, TypeError, RuntimeError: As `Edgeq.quantize` and `Edgeq.compare` say, or an
            output that is not finite or always zero.
    """
    from pytest_edgeq.edgeq import Edgeq

    edgeq = Edgeq()
    [traced] = samples.samples(1, seed=0)
    inputs: dict[str, Any] = (
        {"sample_inputs": traced} if samples.by_name is None else {"sample_kwargs": traced}
    )
    quantized = edgeq.quantize(
        model,
        quantizer=quantizer,
        calibration=samples.samples(CALIBRATION, seed=1),
        **inputs,
    )
    comparison = edgeq.compare(quantized, samples.samples(COMPARED, seed=2))
    entries = [e for e in quantized.op_dtypes if e.op not in QDQ]
    floats = [e for e in entries if _has_float(quantized, e)]
    return Measured(
        inputs=tuple(border.dtype for border in quantized.inputs),
        outputs=tuple(border.dtype for border in quantized.outputs),
        weighted=_weighted(entries),
        float_ops=tuple(sorted({entry.op for entry in floats})),
        all_float=len(floats) == len(entries),
        budget=_budget(comparison),
        figures={name: stage.sqnr_db for name, stage in comparison.stages.items()},
        health=tuple(str(finding) for finding in comparison.health),
        refused=_refused(edgeq, quantized, samples),
    )


def _has_float(quantized: QuantizedModel, entry: OpDtypes) -> bool:
    graph = quantized.graph
    op = graph.subgraphs[entry.subgraph].ops[entry.index]
    indices = [index for index in (*op.inputs, *op.outputs) if index >= 0]
    return any(graph.tensor(op, index).is_floating_point for index in indices)


def _weighted(entries: Sequence[OpDtypes]) -> tuple[WeightedOps, ...]:
    found = []
    for name in sorted({entry.op for entry in entries if entry.weight is not None}):
        ops = [entry for entry in entries if entry.op == name]
        kinds = {(each.scheme, each.weight, each.granularity) for each in ops}
        if len(kinds) == 1:
            [(scheme, weight, granularity)] = kinds
            assert weight is not None, "unreachable because one of the ops has a weight"
            found.append(WeightedOps(name, scheme, weight, granularity, len(ops)))
    return tuple(found)


def _budget(comparison: Comparison) -> Budget | None:
    from pytest_edgeq.check.remember import budget_to_suggest

    try:
        return budget_to_suggest(comparison)[0]
    except AssertionError as error:
        raise RuntimeError(f"{error}\nThe samples are random; look at the model first.") from None
    except ValueError:
        return None  # the text of the test says so


def _refused(edgeq: Edgeq, quantized: QuantizedModel, samples: Placeholders) -> str:
    try:
        with warnings.catch_warnings():
            # Baselines are not checked outside of a test, which the test itself will do.
            warnings.simplefilter("ignore")
            edgeq.check(quantized, samples.samples(CHECKED, seed=3))
    except AssertionError as error:
        return str(error).partition("\n")[0]
    return ""
