"""Check the range and the scale of a tensor by its consumers."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import softmax as softmax_of

from pytest_edgeq.localize.measured import Codes, TensorErrors, code_limits
from pytest_edgeq.numerics.findings import WRONG_OP, WRONG_QPARAMS, Finding
from pytest_edgeq.numerics.health import CLIPPED_LSB
from pytest_edgeq.numerics.static_health import Reason
from pytest_edgeq.tflite.boundary import code_range, qparams
from pytest_edgeq.tflite.conformance import (
    BIAS_SCALE,
    OUTPUT_SCALE,
    SAME_SCALE,
    passes_codes_through,
    violations_of,
)
from pytest_edgeq.tflite.constants import read_constant
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.ops import (
    CLAMPING,
    COMPARING,
    INPUT_AT,
    MOVING,
    NARROWING,
    PICKING,
    facts_of,
)
from pytest_edgeq.tflite.roles import roles_of, stored_constant
from pytest_edgeq.tflite.subgraph import Op, Subgraph, Tensor

Floats = npt.NDArray[np.float64]

# Shares of a softmax that vanish in a float32 sum with 1: torch ignores such values.
_NOTHING = 2.0**-24

_LEAST_SHARE = 1 / 512  # half a step of an 8-bit share, which any softmax may round to 0
MASKING = math.log(_NOTHING)  # scores so far below others that their share is `_NOTHING`
_BIT = 4.0  # ratio of powers of one bit, 6.02 dB

_SMALLER_MASK = "mask with −30, which a softmax maps to 1e-13, or leave that op in float"

_SUMMED_MASK = (
    "add a mask of −30 to the scores, as a sum has a range of its own, or leave it in float"
)

_DEEP = -100.0  # far beyond −30, which no mask needs


def masking_ops(whole: Subgraph) -> Iterator[list[Op]]:
    """Yield, for each SOFTMAX, the ops that may mask its input, in execution order."""
    for softmax in whole.ops:
        if softmax.name == "SOFTMAX":
            size = whole.tensors[softmax.inputs[0]].shape[-1:]
            ops = {op.index: op for op in _masking(whole, softmax.inputs[0])}
            alike = [i for i in ops if whole.tensors[ops[i].outputs[0]].shape[-1:] == size]
            yield [ops[i] for i in sorted(alike)]


def _masking(whole: Subgraph, index: int) -> Iterator[Op]:
    """Yield the ops that may mask a tensor, back to the scores."""
    left, seen = [index], {index}
    while left:
        maker = whole.producer.get(left.pop())
        # Behind a TRANSPOSE another axis is the last one.
        if maker is None or maker.name == "TRANSPOSE":
            continue
        masks = facts_of(maker.name).masks
        if masks:
            yield maker
        if masks or maker.name in MOVING or maker.name in CLAMPING:
            left += [each for each in maker.inputs if each not in seen]
            seen.update(maker.inputs)


def mask_finding(
    op: Op, wanted: Floats, file: Floats, tensor: Tensor, lowest: float
) -> Finding | None:
    """Return a finding on a lost mask, or on one that flattens the scores."""
    # In a fully masked row all shares are equal: −inf results in NaN there.
    flat = _flat_text(wanted, file, tensor, lowest)
    text = flat or _leak_text(wanted, file)
    fix = _SMALLER_MASK if flat or lowest < _DEEP else _SUMMED_MASK
    return op.wrong(text.replace("-", "−"), fix=fix) if text else None


def _leak_text(wanted: Floats, file: Floats) -> str | None:
    """Return a sentence if masked values keep a share of the softmax, else None."""
    with np.errstate(invalid="ignore"):
        left_out = softmax_of(wanted, -1) < _NOTHING
        shares = np.where(left_out, softmax_of(file, -1), 0.0)
    most = int(shares.argmax())
    if not float(shares.max()) > _LEAST_SHARE:
        return None
    value = float(wanted.flat[most])
    # The converter clamps −inf to the least float32.
    clamped = " (or -inf)" if -math.inf < value <= float(np.finfo(np.float32).min) else ""
    return (
        f"the mask is lost: {value:.3g}{clamped} in torch is "
        f"{float(file.flat[most]):.3g} in the file, and what is masked keeps up to "
        f"{100 * float(shares.max()):.2g} % of the softmax"
    )


def _flat_text(wanted: Floats, file: Floats, tensor: Tensor, lowest: float) -> str | None:
    """Return a sentence if a mask's range flattens the scores, else None."""
    limits = code_limits(tensor)
    if limits is None:
        return None
    step = limits.scale
    # The range may clip values above. The kernel's rounding is less than another half step.
    clamped = np.minimum(wanted, limits.ceiling)
    if not float(np.abs(file - clamped).max()) <= step:
        return None
    with np.errstate(invalid="ignore"):
        shares, made = (np.nan_to_num(softmax_of(each, -1)) for each in (wanted, file))
    signal, noise = float(np.square(shares).sum()), float(np.square(shares - made).sum())
    if not noise > signal / _BIT:
        return None
    return (
        f"the mask value {min(lowest, float(wanted.min())):.3g} widens the range: a step is "
        f"{step:.3g}, and the softmax has {10 * math.log10(signal / noise):.1f} dB SQNR, less than "
        "one bit"
    )


def changed_input(graph: OpGraph, op: Op, scale: float, written: float) -> Finding:
    """Return the finding, at the producer, on an input scale that differs from the bias's."""
    producer = graph.subgraphs[op.subgraph].producer
    maker = producer.get(op.inputs[INPUT_AT[op.name]])
    while maker is not None and maker.inputs[0] in producer and passes_codes_through(graph, maker):
        maker = producer[maker.inputs[0]]
    whose = "its input" if maker is None else "its output"
    text = (
        f"{whose} has scale {scale:.6g}, which is {scale / written:.4g} × the one that the bias of "
        f"{op.place} was written with ({written:.6g})"
    )
    return (op if maker is None else maker).wrong(text, kind=WRONG_QPARAMS)


def rule_findings(graph: OpGraph, subgraph: int, compared: Container[int]) -> Iterator[Finding]:
    """
    Yield the findings on ops whose quantization violates a kernel rule.

    An output's zero point that only the specification forbids counts, since no converter writes it.
    """
    for op in graph.subgraphs[subgraph].ops:
        for each in violations_of(graph, op):
            if each.is_warning and each.rule != OUTPUT_SCALE:
                continue
            if each.rule != BIAS_SCALE or op.index not in compared:
                is_scale = each.rule in (SAME_SCALE, OUTPUT_SCALE)
                yield each.finding(kind=WRONG_QPARAMS if is_scale else WRONG_OP)


_CHANCE = 0.25  # share of an overshoot by which the range's own values may exceed it as well
_FAR_ABOVE = 10.0  # ratio of the weights of one channel to the median channel's
_ALIKE = 0.01  # relative error of a constant by its own rounding to 8 bits


class Consumers:
    """Consumers of the tensors of a subgraph."""

    def __init__(self, graph: OpGraph, subgraph: int) -> None:
        self._graph = graph
        self._subgraph = graph.subgraphs[subgraph]

    def unused(self, measured: Mapping[int, TensorErrors]) -> set[int]:
        """
        Return the tensors whose losses a selection or a clamp discards.

        The loss of a branch may lie in values that are never selected (of a softplus beyond 20, or
        of a slice from another copy with its own range), or beyond a clamp whose range the
        quantizer assigns to its input. Such a loss does not show behind the consumer, in comparison
        with torch's whole model.
        """
        found = set()
        for tensor, own in measured.items():
            behind = self._consumers(tensor)
            # Errors of a compared value show in the selection.
            compared = [op for op in behind if op.name in COMPARING]
            behind = [op for op in behind if op.name not in COMPARING]
            behind += [each for op in compared for each in self._consumers(op.outputs[0])]
            if not behind or any(op.name not in PICKING for op in behind):
                continue
            there = [measured[i] for op in behind for i in op.outputs if i in measured]
            limits = code_limits(self._subgraph.tensors[tensor])
            if limits is not None and own.beyond_low + own.beyond_high:
                # No clipped value is selected.
                beyond = [_beyond(limits, x.whole_least, x.whole_greatest) for x in there]
                # A range that was made for the consumer's values may be exceeded by chance.
                chance = _CHANCE * _beyond(limits, own.smallest, own.largest)
                if there and max(beyond) <= max(chance, CLIPPED_LSB * limits.scale):
                    found.add(tensor)
                    continue
            # A quarter of the power is half of the size.
            most = 0.25 * own.noise / max(own.elements, 1)
            if there and all(
                each.cumulative_noise / max(each.elements, 1) < most for each in there
            ):
                found.add(tensor)
        return found

    def widening_reason(self, op: Op) -> Reason | None:
        """Return why an output has a wider range than its values, and the fix."""
        tensor = self._graph.tensor(op, op.outputs[0])
        own = qparams(tensor)
        if own is None:
            return None
        ends = [(code - own[1]) * own[0] for code in code_range(tensor.dtype)]
        for reader in (op, *self._consumers(op.outputs[0])):
            for value in self._constants(reader):
                if any(abs(end) > 0 and abs(value - end) <= _ALIKE * abs(end) for end in ends):
                    constant = f"{value:.3g}".replace("-", "−")
                    cause = f"an end of the range is the constant {constant} of {reader.place}"
                    return Reason((cause,), _SMALLER_MASK)
            operands = [i for i in reader.inputs if stored_constant(self._subgraph, i) is None]
            scales = [qparams(self._graph.tensor(reader, i)) for i in operands if i >= 0]
            shares = facts_of(reader.name).shares_range == "all"
            if reader is not op and shares and scales.count(own) > 1:
                made = (self._subgraph.producer.get(i) for i in operands)
                fixed = (f", that of {i.place}" for i in made if i and facts_of(i.name).outputs)
                return Reason(
                    (f"{reader.place} has one scale for all of its operands{next(fixed, '')}",),
                    "scale the operand with the smaller values up in the model and its consumers "
                    f"down, or leave {reader.place} in float",
                )
        return self._observed_before_clamp(op, ends)

    def _observed_before_clamp(self, op: Op, ends: Sequence[float]) -> Reason | None:
        """Return that a range exceeds what the op's fused activation can return, and the fix."""
        low, high = facts_of(op.fused_activation or "").ends or (-math.inf, math.inf)
        if 2 * (min(ends[1], high) - max(ends[0], low)) > ends[1] - ends[0]:
            return None
        causes = [
            f"the fused {op.fused_activation} of {op.place} clamps to [{low:g}, {high:g}], so its "
            "range was observed before the activation"
        ]
        for scales in (each.tensor.scales for each in roles_of(self._graph, op).weights):
            if len(scales) > 3 and (ratio := scales.max() / np.median(scales)) > _FAR_ABOVE:
                causes.append(f"channel {scales.argmax()} has {ratio:.3g} × the others' weights")
        return Reason(
            tuple(causes),
            f"have the quantizer observe the output of {op.fused_activation}, annotated together "
            "with this layer, or quantize by a recipe (recipe_static_wi8_ai8), which does",
        )

    def narrowing_reason(self, op: Op, measured: Mapping[int, TensorErrors]) -> Reason | None:
        """
        Return why an output has a narrower range than its values, and the fix.

        The converter (litert-torch 0.10.0) gives tensors that the quantizer left without a scale
        that of the selection, pooling or average behind them, and an operand of a selection or a
        concatenation that of another operand.
        """
        own = code_limits(self._graph.tensor(op, op.outputs[0]))
        if own is None:
            return None
        known = (measured[index] for index in op.outputs if index in measured)
        ours = max(_beyond(own, each.smallest, each.largest) for each in known)
        most = max(_CHANCE * ours, CLIPPED_LSB * own.scale)
        alike = [op.outputs[0]]  # grows by what is behind and has the same range
        for reader in (each for tensor in alike for each in self._subgraph.consumers[tensor]):
            behind = [i for i in reader.outputs if i not in alike and self._codes(i) == own]
            alike += behind
            for made in (measured[i] for i in behind if i in measured and reader.name in NARROWING):
                ends = made.whole_least, made.whole_greatest
                # Otherwise the range is that of the op's own values, which are chosen from.
                is_filled = ends[0] <= own.floor / 2 < 0 or ends[1] >= own.ceiling / 2 > 0
                if is_filled and _beyond(own, *ends) <= most:
                    reach = f"[{ends[0]:.3g}, {ends[1]:.3g}]".replace("-", "−")
                    return Reason(
                        (
                            f"its scale is that of {reader.place} downstream, whose values reach "
                            f"{reach}; calibration cannot widen it",
                        ),
                        "annotate this op's output in the quantizer, or leave "
                        f"{reader.place} in float",
                    )
            for index in reader.inputs if facts_of(reader.name).shares_range == "all" else ():
                if index not in measured or index in alike or self._codes(index) != own:
                    continue
                if _beyond(own, measured[index].smallest, measured[index].largest) <= most:
                    other = self._subgraph.producer[index].place
                    return Reason(
                        (
                            f"its scale is that of {other}, another operand of {reader.place}; "
                            "calibration cannot widen it",
                        ),
                        f"leave {other} in float, or quantize by a recipe (recipe_static_wi8_ai8)",
                    )
        return None

    def _codes(self, tensor: int) -> Codes | None:
        return code_limits(self._subgraph.tensors[tensor])

    def _consumers(self, tensor: int) -> list[Op]:
        """Return the consumers of a tensor, behind ops that only move values."""
        behind = self._subgraph.consumers[tensor]
        while len(behind) == 1 and behind[0].name in MOVING:
            behind = self._subgraph.consumers[behind[0].outputs[0]]
        return behind

    def _constants(self, op: Op) -> Iterator[float]:
        """Yield the extremes of each constant that an op adds, concatenates or selects."""
        for index in op.inputs if facts_of(op.name).shares_range else ():
            stored = stored_constant(self._subgraph, index)
            if stored is None or not stored.tensor.is_quantized:
                continue
            floats = read_constant(self._graph, op, stored).floats
            if floats.size:
                yield from (float(np.min(floats)), float(np.max(floats)))


def _beyond(codes: Codes, least: float, greatest: float) -> float:
    """Return how far values exceed the range of codes, both ends together."""
    return max(codes.floor - least, 0.0) + max(greatest - codes.ceiling, 0.0)
