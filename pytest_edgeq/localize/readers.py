"""Check the range and the scale of a tensor by the ops that read it."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterator, Mapping, Sequence

import numpy as np
import torch

from pytest_edgeq.localize.measured import Codes, Measured, code_limits
from pytest_edgeq.numerics.calibration import Reason
from pytest_edgeq.numerics.findings import WRONG_OP, WRONG_QPARAMS, Finding
from pytest_edgeq.numerics.health import CLIPPED_LSB
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
from pytest_edgeq.tflite.roles import stored_constant
from pytest_edgeq.tflite.subgraph import Op, Subgraph, Tensor

# Shares that float32 adds to one another and to 1 without a trace: torch leaves such values out.
_NOTHING = 2.0**-24

# Half a step of a share in 8 bits, which any softmax may round away.
_LEAST_SHARE = 1 / 512

# A number that masks: what is so far below others gets `_NOTHING`.
MASKING = math.log(_NOTHING)

# Ratio of powers of one bit, 6.02 dB.
_BIT = 4.0

_SMALLER_MASK = "mask with −30, of which a softmax makes 1e-13, or leave that op in float"

_SUMMED_MASK = (
    "add a mask of −30 to the scores, as a sum has a range of its own, or leave it in float"
)

# Far beyond −30, which no mask needs.
_DEEP = -100.0


def masking_ops(whole: Subgraph) -> Iterator[list[Op]]:
    """Give, for each SOFTMAX, the ops that may mask its input, in execution order."""
    for softmax in whole.ops:
        if softmax.name == "SOFTMAX":
            size = whole.tensors[softmax.inputs[0]].shape[-1:]
            ops = {op.index: op for op in _masking(whole, softmax.inputs[0])}
            alike = [i for i in ops if whole.tensors[ops[i].outputs[0]].shape[-1:] == size]
            yield [ops[i] for i in sorted(alike)]


def _masking(whole: Subgraph, index: int) -> Iterator[Op]:
    """The ops in front of a tensor that may put a mask to it, up to what makes the scores."""
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


def what_is_lost(
    op: Op, wanted: torch.Tensor, file: torch.Tensor, tensor: Tensor, lowest: float
) -> Finding | None:
    """Return a finding on a mask that is lost, or that takes the range of the scores; else None."""
    # Where all of a row is masked no share is less than another: −inf gives NaN there.
    if (text := _is_flat(wanted, file, tensor, lowest)) is not None:
        return op.wrong(text.replace("-", "−"), fix=_SMALLER_MASK)
    if (text := _leaks(wanted, file)) is not None:
        fix = _SMALLER_MASK if lowest < _DEEP else _SUMMED_MASK
        return op.wrong(text.replace("-", "−"), fix=fix)
    return None


def _leaks(wanted: torch.Tensor, file: torch.Tensor) -> str | None:
    """Return a sentence if a mask lets masked values through, else None."""
    left_out = wanted.softmax(-1) < _NOTHING
    shares = file.softmax(-1).where(left_out, 0.0)
    most = int(shares.argmax())
    if not float(shares.max()) > _LEAST_SHARE:
        return None
    value = float(wanted.flatten()[most])
    # The converter clamps −inf to the least float32.
    clamped = " (or -inf)" if -math.inf < value <= float(np.finfo(np.float32).min) else ""
    return (
        f"the mask is lost: {value:.3g}{clamped} in torch is "
        f"{float(file.flatten()[most]):.3g} in the file, and what is masked keeps up to "
        f"{100 * float(shares.max()):.2g} % of the softmax"
    )


def _is_flat(wanted: torch.Tensor, file: torch.Tensor, tensor: Tensor, lowest: float) -> str | None:
    """Say that a mask's range rounds the scores to one value; else None."""
    limits = code_limits(tensor)
    if limits is None:
        return None
    _, high, step, zero_point = limits
    # Above, the range may cut. The kernel's own rounding is less than another half of a step.
    held = wanted.clamp(max=(high - zero_point) * step)
    if not float((file - held).abs().max()) <= step:
        return None
    shares, made = (each.softmax(-1).nan_to_num(0.0) for each in (wanted, file))
    signal, noise = float(shares.square().sum()), float((shares - made).square().sum())
    if not noise > signal / _BIT:
        return None
    return (
        f"the mask's {min(lowest, float(wanted.min())):.3g} takes the range: a step is {step:.3g}, "
        f"and of the scores the softmax gives {10 * math.log10(signal / noise):.1f} dB SQNR, not "
        "one bit"
    )


def changed_input(graph: OpGraph, op: Op, scale: float, written: float) -> Finding:
    """
    Return the finding on an op's input whose scale is not the one that its bias was written with.

    Its place is the op that makes the input, or this one where none does.
    """
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


def rule_findings(
    graph: OpGraph, subgraph: int, compared: Container[int]
) -> dict[int, tuple[Finding, ...]]:
    """
    Return the findings on ops whose quantization the kernels do not compute, by index.

    An output's zero point that only the specification forbids is one: no converter writes it.
    """
    found: dict[int, tuple[Finding, ...]] = {}
    for op in graph.subgraphs[subgraph].ops:
        told = tuple(
            op.wrong(
                each.symptom,
                kind=WRONG_QPARAMS if each.rule in (SAME_SCALE, OUTPUT_SCALE) else WRONG_OP,
                causes=(each.cause,),
                fix=each.fix,
            )
            for each in violations_of(graph, op)
            if not (each.is_warning and each.rule != OUTPUT_SCALE)
            and not (each.rule == BIAS_SCALE and op.index in compared)
        )
        if told:
            found[op.index] = told
    return found


# Of what values go beyond a range, the part that those whose range it is may go beyond it as well.
_CHANCE = 0.25

# Shares of a constant that its own rounding to 8 bits may take.
_ALIKE = 0.01


class Readers:
    """The ops of a subgraph, by what they take."""

    def __init__(self, graph: OpGraph, subgraph: int) -> None:
        self._graph = graph
        self._subgraph = graph.subgraphs[subgraph]

    def untaken(self, measured: Mapping[int, Sequence[tuple[int, Measured]]]) -> set[int]:
        """
        Ops whose losses a SELECT, a SLICE or a clamp behind does not take.

        That of a branch may be all in values that are never chosen (those of a softplus beyond 20,
        what is sliced from another copy in its own range), or beyond what is clamped, whose range a
        quantizer gives to what stands before it: what is lost there is not lost behind, where
        torch's whole model is held against it.

        Returns:
            Indices of ops.
        """
        found = set()
        for number, tensor, own in ((n, *each) for n, every in measured.items() for each in every):
            behind = self._of(tensor)
            # What is compared decides what is chosen, and shows there.
            compared = [op for op in behind if op.name in COMPARING]
            behind = [op for op in behind if op.name not in COMPARING]
            behind += [each for op in compared for each in self._of(op.outputs[0])]
            if not behind or any(op.name not in PICKING for op in behind):
                continue
            there = [each for op in behind for _, each in measured.get(op.index, ())]
            limits = code_limits(self._subgraph.tensors[tensor])
            if limits is not None and own.beyond_low + own.beyond_high:
                # No value that is cut is chosen.
                beyond = [_beyond(limits, x.whole_least, x.whole_greatest) for x in there]
                if there and max(beyond) <= _most_beyond(limits, [own]):
                    found.add(number)
                    continue
            # A quarter of the power is half of the size.
            most = 0.25 * own.noise / max(own.elements, 1)
            if there and all(
                each.cumulative_noise / max(each.elements, 1) < most for each in there
            ):
                found.add(number)
        return found

    def widens(self, op: Op) -> Reason | None:
        """Return whose range an op's output has, if not that of its values, and the way out."""
        tensor = self._graph.tensor(op, op.outputs[0])
        own = qparams(tensor)
        if own is None:
            return None
        ends = [(code - own[1]) * own[0] for code in code_range(tensor.dtype)]
        for reader in (op, *self._of(op.outputs[0])):
            for value in self._constants(reader):
                if any(abs(end) > 0 and abs(value - end) <= _ALIKE * abs(end) for end in ends):
                    constant = f"{value:.3g}".replace("-", "−")
                    cause = f"that is the constant {constant} of {reader.place}"
                    return Reason((cause,), _SMALLER_MASK)
            taken = [i for i in reader.inputs if stored_constant(self._subgraph, i) is None]
            scales = [qparams(self._graph.tensor(reader, i)) for i in taken if i >= 0]
            shares = facts_of(reader.name).shares_range == "all"
            if reader is not op and shares and scales.count(own) > 1:
                return Reason(
                    (f"{reader.place} has one scale for all of its operands",),
                    "bring these to like ranges, or leave it in float",
                )
        return None

    def narrows(
        self, op: Op, measured: Mapping[int, Sequence[tuple[int, Measured]]]
    ) -> Reason | None:
        """
        Return whose range an op's output has, if its values go beyond it, and the way out.

        The converter (litert-torch 0.10.0) gives the scale of what is chosen, pooled or averaged
        to all in front that the quantizer gave none. Of what is chosen or joined it gives the scale
        of one operand to the others.
        """
        own = code_limits(self._graph.tensor(op, op.outputs[0]))
        if own is None:
            return None
        most = _most_beyond(own, [each for _, each in measured[op.index]])
        left, seen = [op.outputs[0]], {op.outputs[0]}
        while left:
            for reader in self._subgraph.consumers[left.pop(0)]:
                made = [i for i in reader.outputs if i not in seen]
                made = [i for i in made if code_limits(self._subgraph.tensors[i]) == own]
                left += made
                seen.update(made)
                values = [each for tensor, each in measured.get(reader.index, ()) if tensor in made]
                for each in values if reader.name in NARROWING else ():
                    ends = each.whole_least, each.whole_greatest
                    # A range that its values fill is that of the op behind; one that both share is
                    # filled by this op's own.
                    if _beyond(own, *ends) <= most and _fills(own, *ends):
                        reach = f"[{each.whole_least:.3g}, {each.whole_greatest:.3g}]"
                        cause = (
                            f"its scale is that of {reader.place} behind, whose "
                            f"values reach {reach.replace('-', '−')}, and no calibration widens it"
                        )
                        return Reason(
                            (cause,),
                            "annotate this op's output in the quantizer, or leave "
                            f"{reader.place} in float",
                        )
                beside = self._operand_within(reader, own, most, measured, seen)
                if beside is not None:
                    cause = (
                        f"its scale is that of {beside.place}, which "
                        f"{reader.place} takes as well, and no calibration widens it"
                    )
                    return Reason(
                        (cause,),
                        f"leave {beside.place} in float, or quantize by a recipe "
                        "(recipe_static_wi8_ai8)",
                    )
        return None

    def _operand_within(
        self,
        reader: Op,
        own: Codes,
        most: float,
        measured: Mapping[int, Sequence[tuple[int, Measured]]],
        seen: Collection[int],
    ) -> Op | None:
        """Return the op whose values a range fits, of those that a reader joins with others."""
        for index in reader.inputs if facts_of(reader.name).shares_range == "all" else ():
            limits = None if index < 0 else code_limits(self._subgraph.tensors[index])
            maker = self._subgraph.producer.get(index)
            if maker is None or index in seen or limits != own:
                continue
            values = [each for tensor, each in measured.get(maker.index, ()) if tensor == index]
            if any(_beyond(own, each.smallest, each.largest) <= most for each in values):
                return maker
        return None

    def _of(self, tensor: int) -> list[Op]:
        """The ops that take a tensor, or its values as one op holds them in another way."""
        behind = self._subgraph.consumers[tensor]
        while len(behind) == 1 and behind[0].name in MOVING:
            behind = self._subgraph.consumers[behind[0].outputs[0]]
        return behind

    def _constants(self, op: Op) -> Iterator[float]:
        """The least and the greatest value of each constant that an op adds, joins or chooses."""
        for index in op.inputs if facts_of(op.name).shares_range else ():
            stored = stored_constant(self._subgraph, index)
            if stored is None or not stored.tensor.is_quantized:
                continue
            floats = read_constant(self._graph, op, stored).floats
            if floats.size:
                yield from (float(np.min(floats)), float(np.max(floats)))


def _beyond(codes: Codes, least: float, greatest: float) -> float:
    """By how much values go beyond what codes reach, at both ends together."""
    return max(codes.floor - least, 0.0) + max(greatest - codes.ceiling, 0.0)


def _fills(codes: Codes, least: float, greatest: float) -> bool:
    """Whether values reach half of what codes do, at either end."""
    return least <= codes.floor / 2 < 0 or greatest >= codes.ceiling / 2 > 0


def _most_beyond(codes: Codes, made: Sequence[Measured]) -> float:
    """By how much values behind may go beyond a range, and still be those that it was made for."""
    ours = max(_beyond(codes, each.smallest, each.largest) for each in made)
    return max(_CHANCE * ours, CLIPPED_LSB * codes.scale)
