"""From what was measured to a row for every op of the file, and the one that is to blame."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from pytest_edgeq.localize.biases import is_of_parameters
from pytest_edgeq.localize.cause import blame
from pytest_edgeq.localize.findings import constant_findings
from pytest_edgeq.localize.foreign import clamp_findings, foreign_findings, pad_findings
from pytest_edgeq.localize.groups import group_bound
from pytest_edgeq.localize.kinds import IDENTITIES
from pytest_edgeq.localize.local import Step
from pytest_edgeq.localize.masks import is_mask_cut
from pytest_edgeq.localize.matches import Match, module_of
from pytest_edgeq.localize.measured import channel_maxima, is_at_limit
from pytest_edgeq.localize.origins import origin_findings
from pytest_edgeq.localize.programs import Program
from pytest_edgeq.localize.readers import Readers
from pytest_edgeq.localize.reference import ReferenceGraph
from pytest_edgeq.localize.rows import Evidence, LayerError, LayerErrors
from pytest_edgeq.localize.scales import moved_findings, parameter_findings
from pytest_edgeq.tflite.constants import read_constant
from pytest_edgeq.tflite.graph import Op, OpGraph
from pytest_edgeq.tflite.op_dtypes import OpDtypes
from pytest_edgeq.tflite.roles import roles_of, stored_constant

if TYPE_CHECKING:
    from pytest_edgeq.quantized import QuantizedModel

__all__ = ["Plan", "layer_errors"]

# Samples that are measured together at most, which makes the time for a call small; elements of
# the largest tensor of them all, beyond which memory takes longer than calls; and of all tensors,
# 32 MB.
_SAMPLES = 64
_LARGEST = 1 << 20
_ALL = 1 << 23


@dataclass(slots=True, eq=False)
class Plan:
    """
    How samples of certain shapes are measured.

    Attributes:
        reference: The torch graph.
        matches: What each matched tensor stands for.
        steps: What is measured, in the order of the file.
        program: The float model, held against the file at every step.
        broken: Ops whose result has another size than torch's, that are wired to another output,
            mask nothing or move what they take otherwise, with a sentence.
        computed: The tensors that the file computes from constants alone.
        tensors: Those of the file that are measured, or that others are measured by.
        together: How many samples are measured together.
    """

    reference: ReferenceGraph
    matches: dict[int, Match]
    steps: list[Step]
    program: Program
    broken: dict[int, str]
    computed: set[int]
    tensors: frozenset[int] = field(init=False)
    together: int = field(init=False)

    def __post_init__(self) -> None:
        read = {source.tensor for step in self.steps for source in step.sources}
        self.tensors = frozenset(read | {step.match.tensor for step in self.steps})
        sizes = [1, *(step.elements for step in self.steps)]
        self.together = max(1, min(_SAMPLES, _LARGEST // max(sizes), _ALL // sum(sizes)))


def layer_errors(quantized: QuantizedModel, plans: Sequence[Plan]) -> LayerErrors:
    """
    A row for every op.

    Args:
        quantized: The file and its references.
        plans: One for each set of shapes that samples had.
    """
    graph, plan = quantized.graph, plans[0]
    subgraph = graph.subgraphs[quantized.edge.signature.subgraph]
    steps: dict[int, list[Step]] = {}
    for each in plans:
        for step in each.steps:
            steps.setdefault(step.op.index, []).append(step)
    # What a group of ops makes together stands at its last op.
    grouped = {index: step for step in plan.steps for index in step.match.ops}
    entries = {
        entry.index: entry for entry in quantized.op_dtypes if entry.subgraph == subgraph.index
    }
    rows, evidence = [], []
    carriers = _carriers(subgraph.ops, plan.computed)
    readers = Readers(graph, subgraph.index)
    untaken = readers.untaken(
        {
            index: [(step.match.tensor, step.measured) for step in own]
            for index, own in steps.items()
        }
    )
    found = _findings(quantized, plan, untaken)
    for op in subgraph.ops:
        entry = entries[op.index]
        own = steps.get(op.index, [])
        group = grouped.get(op.index) or grouped.get(carriers.get(op.index, -1))
        told = tuple(sorted(found.get(op.index, ()), key=is_of_parameters))
        rows.append(_row(op, entry, own, group, told))
        given = _evidence(graph, op, entry, own, averaged=quantized.flow in _AVERAGING)
        taken = [i for i in op.inputs if i >= 0 and stored_constant(subgraph, i) is None]
        stranger = group is None and bool(taken) and all(i in plan.matches for i in taken)
        evidence.append(
            replace(
                given,
                stranger=stranger,
                untaken=op.index in untaken or _cuts_mask(graph, op, own, plan.reference),
                widened=readers.widens(op) if own else None,
                group=_group(subgraph.ops, own),
                together=_together(graph, own),
            )
        )
    return blame(rows, evidence)


def _findings(
    quantized: QuantizedModel, plan: Plan, untaken: Container[int]
) -> Mapping[int, tuple[str, ...]]:
    graph, signature = quantized.graph, quantized.edge.signature
    dynamic = {entry.index for entry in quantized.op_dtypes if entry.scheme == "dynamic"}
    found = constant_findings(graph, plan.steps, plan.reference, narrowed=dynamic)
    for position, text in plan.broken.items():
        found[position] = (*found.get(position, ()), text)
    vague = {step.match.tensor for step in plan.steps if _is_vague(step)}
    told = parameter_findings(
        graph,
        plan.matches,
        plan.reference,
        signature.subgraph,
        vague=vague,
        rms={step.match.tensor: step.measured.rms for step in plan.steps},
        beyond={step.match.tensor: step.measured.beyond for step in plan.steps},
        untaken={step.match.tensor for step in plan.steps if step.op.index in untaken},
    )
    for index, texts in told.items():
        op = plan.matches[index].op
        if op is not None:
            found[op.index] = (*texts, *found.get(op.index, ()))
    foreign = foreign_findings(graph, signature.subgraph, plan.matches, plan.reference, vague)
    clamps, pads = clamp_findings(plan.steps), pad_findings(graph, plan.steps)
    for position, texts in (*foreign.items(), *pads.items()):
        found[position] = (*texts, *found.get(position, ()))
    for position, texts in clamps.items():
        # Another layer's weights are more telling than that it clamps and this one does not.
        found[position] = (*found.get(position, ()), *texts)
    subgraph = graph.subgraphs[signature.subgraph]
    for position, texts in moved_findings(graph, signature.subgraph).items():
        if subgraph.ops[position].name == "BATCH_MATMUL":
            # What its kernels make of scales by channel looks like another constant.
            found[position] = (*texts, *found.get(position, ()))
            continue
        # Either side may be the wrong one: what is known of what makes its input comes first.
        maker = subgraph.producer.get(subgraph.ops[position].inputs[0])
        if maker is None or maker.index not in found:
            found[position] = (*found.get(position, ()), *texts)
    if quantized.origin is not None:
        for position, texts in origin_findings(quantized.edge, quantized.origin).items():
            if position not in found:
                found[position] = texts
    return found


def _cuts_mask(graph: OpGraph, op: Op, own: Sequence[Step], reference: ReferenceGraph) -> bool:
    return bool(own) and is_mask_cut(graph, op, own[0].reading.node, reference)


def _group(ops: Sequence[Op], own: Sequence[Step]) -> tuple[int, ...]:
    """The ops that compute what an op closes, where they are several."""
    found = sorted({index for step in own for index in step.match.ops})
    found = [index for index in found if ops[index].name not in {*IDENTITIES, "PAD"}]
    return tuple(found) if len(found) > 1 else ()


def _together(graph: OpGraph, own: Sequence[Step]) -> float | None:
    """How far ops are off together at most, where their weights are no other ones than torch's."""
    if not own or any(step.bound is not None or step.differs for step in own):
        return None
    ops = graph.subgraphs[own[0].op.subgraph].ops
    bounds = [group_bound(graph, [ops[index] for index in step.match.ops]) for step in own]
    known = [each + 0.5 for each in bounds if each is not None]
    return max(known) if len(known) == len(bounds) else None


_LEAST_LEVELS = 16
"""So many codes must be in use for values to tell their node: 4 bits, of which rounding takes 1."""


def _is_vague(step: Step) -> bool:
    """Whether what an op gives uses too few codes to be told from other values."""
    levels = step.measured.greatest - step.measured.least + 1
    return step.limits is not None and not levels >= _LEAST_LEVELS


def _carriers(ops: Sequence[Op], computed: Container[int]) -> dict[int, int]:
    """Ops that only hand a constant on, such as the DEQUANTIZE of a weight, with what takes it."""
    taker: dict[int, int] = {}
    users: dict[int, int] = {}
    for op in ops:
        for index in op.inputs:
            users.setdefault(index, op.index)
    for op in ops:
        if op.outputs and op.outputs[0] in computed and op.outputs[0] in users:
            taker[op.index] = users[op.outputs[0]]
    return {index: _last(taker, index) for index in taker}


def _last(taker: Mapping[int, int], index: int) -> int:
    while index in taker:
        index = taker[index]
    return index


def _row(
    op: Op,
    entry: OpDtypes,
    own: Sequence[Step],
    group: Step | None,
    findings: tuple[str, ...],
) -> LayerError:
    measured = [step.measured for step in own]
    nodes = tuple(dict.fromkeys(_names(own or ([] if group is None else [group]))))
    # An op with several outputs shows the worst of them.
    worst = max(measured, key=lambda each: (each.excess_lsb, each.loss), default=None)
    step = None if worst is None else next(each for each in own if each.measured is worst)
    scale = None if step is None or step.limits is None else step.limits[2]
    judged = step is not None and step.bound is not None
    module = entry.module
    if module is None and step is not None:
        # The file has lost its names; a layer with its activation is the layer's.
        modules = map(module_of, step.nodes or [step.reading.node])
        module = next(filter(None, modules), "")
    return LayerError(
        index=op.index,
        op=op.name,
        module=module,
        dtypes=_dtypes(entry),
        local_lsb_error=None if scale is None or worst is None else worst.local_lsb,
        local_sqnr_db=None if worst is None else -worst.loss,
        local_rmse_lsb=None if worst is None else worst.rmse(scale),
        cumulative_lsb_error=None if scale is None or worst is None else worst.cumulative_lsb,
        cumulative_sqnr_db=(None if worst is None else -worst.cumulative_loss),
        cumulative_rmse_lsb=None if worst is None else worst.rmse(scale, cumulative=True),
        clipped=(
            None
            if scale is None or worst is None or not worst.elements
            else (worst.low + worst.high) / worst.elements
        ),
        matched=group is not None,
        nodes=nodes,
        excess_lsb=worst.excess_lsb if worst is not None and judged else None,
        findings=findings,
    )


def _names(steps: Sequence[Step]) -> list[str]:
    return [
        node.name
        for step in steps
        for node in (step.nodes or [step.reading.node])
        if not node.name.startswith(("quantize_per_", "dequantize_per_"))
    ]


def _dtypes(entry: OpDtypes) -> dict[str, str]:
    given = {
        "input": ",".join(entry.inputs),
        "weight": entry.weight,
        "bias": entry.bias,
        "output": ",".join(entry.outputs),
    }
    return {role: dtype for role, dtype in given.items() if dtype}


# Flows whose ranges are averages over the samples, or may be: those of a file that was given.
_AVERAGING = ("recipe", "prebuilt")


def _evidence(
    graph: OpGraph, op: Op, entry: OpDtypes, own: Sequence[Step], *, averaged: bool
) -> Evidence:
    roles = roles_of(graph, op)
    limited = tuple(
        int(channel)
        for stored in roles.biases
        if stored.tensor.is_constant and stored.tensor.dtype == "int32"
        for channel in np.flatnonzero(is_at_limit(read_constant(graph, op, stored).values))
    )
    maxima: tuple[float, ...] = ()
    weights = [each for each in roles.weights if each.tensor.is_constant]
    if entry.granularity == "per_tensor" and len(weights) == 1 and not weights[0].tensor.is_sparse:
        maxima = channel_maxima(op, read_constant(graph, op, weights[0]).floats)
    if not own:
        return Evidence(scheme=entry.scheme, bias_limited=limited, weight_maxima=maxima)
    step = max(own, key=lambda each: each.measured.loss)
    measured = step.measured
    low, high, scale, zero_point = step.limits or (0, 0, None, None)
    count = max(measured.elements, 1)
    size = max(math.prod(graph.subgraphs[op.subgraph].tensors[step.match.tensor].shape), 1)
    noise = measured.channel_noise
    has_codes = step.limits is not None and measured.least <= measured.greatest
    return Evidence(
        scale=scale,
        zero_point=zero_point,
        code_range=None if step.limits is None else (low, high),
        elements=measured.elements,
        averaged=-(-measured.elements // size) if averaged else 0,
        codes=(int(measured.least), int(measured.greatest)) if has_codes else None,
        beyond=(measured.beyond_low / count, measured.beyond_high / count),
        reference=(measured.smallest, measured.largest) if has_codes else None,
        channel_noise=() if noise is None else tuple(noise.tolist()),
        weight_maxima=maxima,
        weight_granularity=entry.granularity,
        bias_limited=limited,
        nonfinite=measured.nonfinite,
        scheme=entry.scheme,
    )
