"""How each matched tensor is measured: what is run, what its kernel may round, who asks for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pytest_edgeq.localize.biases import SAME_SCALE, written_scale
from pytest_edgeq.localize.codes import code_limits
from pytest_edgeq.localize.kernels import (
    HybridInput,
    float_bound,
    float_reach,
    hybrid_position,
    rounding_bound,
)
from pytest_edgeq.localize.kinds import base_name
from pytest_edgeq.localize.local import Hybrid, Step
from pytest_edgeq.localize.matches import Match, Reading
from pytest_edgeq.localize.measured import Measured
from pytest_edgeq.localize.reference import ReferenceGraph, laid_out
from pytest_edgeq.localize.scales import is_shared
from pytest_edgeq.localize.sums import Codes
from pytest_edgeq.tflite.constants import read_constant
from pytest_edgeq.tflite.graph import Op, OpGraph, Tensor
from pytest_edgeq.tflite.roles import StoredTensor, roles_of

__all__ = ["make_steps"]

Node = torch.fx.Node

# Of an op whose kernel's arithmetic is not known here: one more rounding, of ½ LSB.
_UNKNOWN = 0.5


def make_steps(
    graph: OpGraph,
    matches: dict[int, Match],
    reference: ReferenceGraph,
    weights_of: Callable[[Op, Iterable[Node]], Mapping[Node, torch.Tensor]],
    measured: dict[int, Measured],
) -> list[Step]:
    """
    Return a step for each matched tensor, in the order of the file.

    Args:
        graph: The file's.
        matches: By tensor, the torch nodes that it corresponds to.
        reference: The torch graph.
        weights_of: Quantized parameters that an op needs and the reference lacks.
        measured: Errors by tensor, shared by the steps for all input shapes; missing ones are
            added.
    """
    steps = []
    read: dict[int, Node] = {}
    for match in matches.values():
        op = match.op
        if op is None:
            continue
        subgraph = graph.subgraphs[op.subgraph]
        tensor = subgraph.tensors[match.tensor]
        limits = _limits(tensor)
        sources = tuple(matches[index] for index in match.sources)
        given = {reading.node for source in sources for reading in source.readings}
        reading = match.last
        if match.same is not None:
            reading = [each for each in match.readings if each.node in given][-1]
        nodes = reference.between(reading.node, given)
        made_by = [subgraph.ops[index] for index in match.ops]
        bound = _bound(graph, made_by, op, match.tensor, limits is not None)
        if bound is not None and limits is not None and len(made_by) == 1:
            bound += _number_slack(graph, op, nodes)
        rounds = (each for each in made_by if hybrid_position(graph, each) is not None)
        hybrid = next((_hybrid(graph, each) for each in rounds), None)
        taken_shapes = [subgraph.tensors[source.tensor].shape for source in sources]
        if hybrid is not None and not all(map(hybrid.input.takes, taken_shapes)):
            # It takes what others make of them, and what that is rounded to is not known.
            hybrid = bound = None
        weights: dict[Node, torch.Tensor] = {}
        for each in made_by:
            for node, weight in weights_of(each, given).items():
                weights.setdefault(node, weight)
        used = {each for node in nodes for each in node.all_input_nodes}
        taken = tuple(
            (source.tensor, tuple(r for r in source.readings if r.node in {*used, reading.node}))
            for source in sources
        )
        weights = {node: laid_out(node, weight) for node, weight in weights.items() if node in used}
        rounded = (node for node in used if not reference.varies(node))
        differs = bool(weights) or any(map(reference.is_rounded, rounded))
        handed_on: Reading | None = None
        border: tuple[int, ...] = ()
        if len(sources) == 1 and hybrid is None:
            border = _border(reference, nodes, read.get(sources[0].tensor))
            if border or not nodes:
                handed_on = _handed_on(tensor, subgraph.tensors[sources[0].tensor], taken[0][1])
        read[match.tensor] = reading.node
        steps.append(
            Step(
                match,
                reading,
                op,
                nodes,
                differs,
                hybrid,
                bound,
                limits,
                sources,
                taken,
                weights,
                handed_on,
                border,
                False,
                measured.setdefault(match.tensor, Measured()),
                float(tensor.scales.max()) / 2 if len(tensor.scales) > 1 else 0.0,
                max(float_reach(graph, each) for each in made_by),
            )
        )
    steps.sort(key=lambda step: (step.op.index, step.match.tensor))
    asked_for: set[int] = set()
    alike: set[int] = set()
    for step in reversed(steps):
        step.own = step.match.tensor in alike
        if step.border or not step.nodes:
            alike.update(source.tensor for source in step.sources)
        last = {step.match.tensor, *(source.tensor for source in step.sources)} - asked_for
        step.done = tuple(last)
        asked_for |= last
    return steps


def _limits(tensor: Tensor) -> Codes | None:
    limits = code_limits(tensor)
    return None if limits is None else Codes(*limits)


def _handed_on(tensor: Tensor, source: Tensor, readings: Sequence[Reading]) -> Reading | None:
    """How the source is read, where the tensor may hold the same codes with the same meaning."""
    alike = tensor.dtype == source.dtype and code_limits(tensor) == code_limits(source)
    return readings[0] if alike and len(readings) == 1 else None


def _border(
    reference: ReferenceGraph, nodes: Sequence[Node], source: Node | None
) -> tuple[int, ...]:
    """By how much nodes pad the value that their source is measured at, where they do no more."""
    pads = [node for node in nodes if reference.origin(node) is node]
    if source is None or len(pads) != 1 or base_name(pads[0]) not in ("pad", "constant_pad_nd"):
        return ()
    taken, *rest = pads[0].args
    amounts: Any = rest.pop(0)
    zeros = rest in _ZEROS and not pads[0].kwargs
    given = isinstance(taken, Node) and reference.origin(taken) is reference.origin(source)
    # Less than nothing cuts values off.
    if not zeros or not given or any(isinstance(n, Node) or n < 0 for n in amounts):
        return ()
    return tuple(amounts)


def _hybrid(graph: OpGraph, op: Op) -> Hybrid:
    stored = [each for each in roles_of(graph, op).weights if each.tensor.is_constant]
    peaks = [float(np.abs(read_constant(graph, op, each).floats).max()) for each in stored]
    return Hybrid(
        HybridInput(graph, op),
        float_bound(graph, op),
        float_bound(graph, op, exact=True),
        max(peaks, default=math.inf),
    )


def _bound(
    graph: OpGraph, made_by: Sequence[Op], op: Op, tensor: int, has_codes: bool
) -> float | None:
    if not has_codes:
        return sum(float_bound(graph, each) for each in made_by)
    # What rounds between is carried on by what follows, by factors that are not known here.
    for each in made_by[:-1]:
        if graph.tensor(each, each.outputs[0]).is_quantized and rounding_bound(graph, each) != 0:
            return None
    bound = rounding_bound(graph, op, output=op.outputs.index(tensor))
    if bound is None:
        return _UNKNOWN
    return bound + sum(_bias_slack(graph, each) for each in made_by)


def _bias_slack(graph: OpGraph, op: Op) -> float:
    """
    What it moves an output, in LSB, that a bias was written by another input scale.

    Told of by `findings` where it is more than observers differ, and costs a bit.
    """
    scales, made = written_scale(graph, op), graph.tensor(op, op.outputs[0])
    if scales is None or len(made.scales) != 1:
        return 0.0
    apart = abs(scales[0] / scales[1] - 1)
    if not apart or (apart > SAME_SCALE and not is_shared(graph, op)):
        return 0.0
    (stored,) = (each for each in roles_of(graph, op).biases if each.tensor.is_constant)
    bias = read_constant(graph, op, stored).floats
    return float(np.abs(bias).max(initial=0.0)) * apart / float(made.scales[0])


def _number_slack(graph: OpGraph, op: Op, nodes: Sequence[Node]) -> float:
    """
    What it moves an output, in LSB, that a number in torch's code is a code in the file.

    Constants that are tensors in torch are rounded for it as the file rounds them.
    """
    numbers = [(base_name(n), n.args[1]) for n in nodes if base_name(n) in _BY_NUMBERS]
    operands = [graph.tensor(op, index) for index in op.inputs[:2]]
    held = [each for each in operands if each.is_constant and math.prod(each.shape) == 1]
    taken = [code_limits(each) for each in operands if not each.is_constant]
    if op.name not in _TAKES_NUMBERS or len(numbers) != 1 or len(held) != 1 or not taken:
        return 0.0
    (name, number), limits = numbers[0], taken[0]
    if not isinstance(number, (int, float)) or not number or limits is None:
        return 0.0
    stored = read_constant(graph, op, StoredTensor(held[0], False, held[0]))
    wanted = 1 / number if name.startswith("div") and op.name == "MUL" else number
    # Signs are the op's: SUB takes off what torch adds the negative of.
    apart = abs(abs(float(stored.floats.flat[0])) - abs(wanted))
    if stored.scales is None or not apart <= float(stored.scales.max()) * (0.5 + 2.0**-10):
        return 0.0
    low, high, scale, point = limits
    reach = max(high - point, point - low) * scale if op.name == "MUL" else 1.0
    return apart * reach / float(graph.tensor(op, op.outputs[0]).scales[0])


# What `pad` and `constant_pad_nd` take behind the amounts, to pad with zeros.
_ZEROS: list[list[Any]] = [[], [0], ["constant"], ["constant", None], ["constant", 0]]

_BY_NUMBERS = {"add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_"}
_TAKES_NUMBERS = ("ADD", "SUB", "MUL")
