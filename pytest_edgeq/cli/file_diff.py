"""Differences of two `.tflite` files in parameters and constants."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.baselines.align import Alignment, align
from pytest_edgeq.errors import UnreadableError
from pytest_edgeq.numerics.metrics import json_number
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.constants import Constant, dequantized, read_constant
from pytest_edgeq.tflite.differences import pair_of
from pytest_edgeq.tflite.roles import role_of, roles_of
from pytest_edgeq.tflite.same import changed_options, signature_pairs, source_of
from pytest_edgeq.tflite.subgraph import Op, SignatureTensor, Tensor

Array = npt.NDArray[Any]

_HALF_A_STEP = 0.5 + 2.0**-9  # with the rounding of float32 scales


@dataclass(frozen=True, slots=True)
class Change:
    """One difference at an op, an input or an output."""

    where: str  # the op by its number in the new file, the input or the output
    what: str  # the option, operand, parameter or constant
    old: str  # its value in the old file, for people
    new: str  # its value in the new file


@dataclass(frozen=True, slots=True)
class WeightRounding:
    """How far the codes of a quantized weight are the rounding of the old file's float values."""

    where: str  # the op by its number in the new file
    codes: int  # how many there are; 0 where the shapes differ
    equal: int  # how many are the float value in steps, rounded either way at a half, and clipped
    channel: int  # the channel with the fewest equal codes
    channel_codes: int
    channel_equal: int
    furthest: float  # the greatest distance of a code from the float value, in steps

    @property
    def is_of_floats(self) -> bool:
        """Whether most codes agree: otherwise the values are others, or in another order."""
        return 2 * self.equal > self.codes

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        more = {"furthest": json_number(self.furthest), "is_of_floats": self.is_of_floats}
        return asdict(self) | more


class FileDiff:
    """Two files, op by op as baselines are aligned."""

    def __init__(self, old: EdgeFile, new: EdgeFile) -> None:
        self.rows = old.op_dtypes.to_dict(), new.op_dtypes.to_dict()
        self._old, self._new = old.graph, new.graph
        ops = self.rows[0]["ops"], self.rows[1]["ops"]
        self.alignment: Alignment = align(*ops)
        self._partner: dict[tuple[int, int], tuple[int, int]] = {}
        self._seen: set[Hashable] = set()
        self.changes = list(self._changes())

    def roundings(self) -> Iterator[WeightRounding]:
        """Compare the codes of weights with the float values of the old file."""
        seen = set()
        for before, after in self.alignment.pairs:
            one, two = self._old.ops[before], self._new.ops[after]
            weights = (roles_of(self._old, one).weights, roles_of(self._new, two).weights)
            for left, right in zip(*weights, strict=False):
                key = (two.subgraph, right.tensor.index)
                if (
                    key in seen
                    or not left.tensor.is_floating_point
                    or not right.tensor.is_quantized
                ):
                    continue
                seen.add(key)
                try:
                    floats = read_constant(self._old, one, left).floats
                    stored = read_constant(self._new, two, right)
                except UnreadableError:
                    continue
                yield _rounding(two, stored, floats)

    def _changes(self) -> Iterator[Change]:
        pairs = self.alignment.pairs
        ops = [(self._old.ops[before], self._new.ops[after]) for before, after in pairs]
        signatures = list(signature_pairs(self._old, self._new))
        for ours, theirs in signatures:
            for left, right in _entry_pairs(ours.inputs, theirs.inputs):
                self._pair(ours.subgraph, left.tensor.index, theirs.subgraph, right.tensor.index)
                yield from _parameters(f"input {right.name!r}", "", left.tensor, right.tensor)
        for one, two in ops:
            # The op-dtype map reports another number of outputs.
            for before, after in zip(one.outputs, two.outputs, strict=False):
                self._pair(one.subgraph, before, two.subgraph, after)
        for one, two in ops:
            yield from self._op_changes(one, two)
        for ours, theirs in signatures:
            for left, right in _entry_pairs(ours.outputs, theirs.outputs):
                yield from self._source_change(
                    f"output {right.name!r}",
                    "source",
                    (ours.subgraph, left.tensor.index),
                    (theirs.subgraph, right.tensor.index),
                )

    def _pair(self, old_subgraph: int, before: int, new_subgraph: int, after: int) -> None:
        if before >= 0 and after >= 0:
            self._partner[old_subgraph, before] = new_subgraph, after

    def _op_changes(self, one: Op, two: Op) -> Iterator[Change]:
        where = str(two.place)
        if one.index != two.index:
            where += f" (old {one.place.number})"
        if one.name == two.name:
            for key, before, after in changed_options(self._old, self._new, one, two):
                yield Change(where, f"option {key}", str(before), str(after))
        if len(one.inputs) != len(two.inputs):
            yield Change(where, "number of operands", str(len(one.inputs)), str(len(two.inputs)))
        for position, (left, right) in enumerate(zip(one.inputs, two.inputs, strict=False)):
            if (left < 0) != (right < 0):
                texts = ("none" if index < 0 else "given" for index in (left, right))
                yield Change(where, f"operand {position}", *texts)
            elif left >= 0:
                yield from self._operand_changes(where, position, (one, left), (two, right))
        # As above.
        for position, (left, right) in enumerate(zip(one.outputs, two.outputs, strict=False)):
            if left >= 0 and right >= 0:
                what = "output" if len(two.outputs) == 1 else f"output {position}"
                tensors = self._old.tensor(one, left), self._new.tensor(two, right)
                yield from _parameters(where, what, *tensors)

    def _operand_changes(
        self, where: str, position: int, one: tuple[Op, int], two: tuple[Op, int]
    ) -> Iterator[Change]:
        (old_op, left), (new_op, right) = one, two
        ours, theirs = self._old.tensor(old_op, left), self._new.tensor(new_op, right)
        what = role_of(self._new, new_op, right) or f"operand {position}"
        sources = (old_op.subgraph, left), (new_op.subgraph, right)
        if not (ours.is_constant and theirs.is_constant):
            yield from self._source_change(where, what, *sources)
            return
        # A constant that several ops read is reported once.
        if sources in self._seen:
            return
        self._seen.add(sources)
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            texts = (f"{each.dtype} {list(each.shape)}" for each in (ours, theirs))
            yield Change(where, what, *texts)
            return
        yield from _parameters(where, what, ours, theirs)
        yield from self._value_changes(where, what, (old_op, ours), (new_op, theirs))

    def _source_change(
        self, where: str, what: str, old: tuple[int, int], new: tuple[int, int]
    ) -> Iterator[Change]:
        """Yield a change where another op, input or constant produces a tensor."""
        if self._partner.get(old, new) == new:
            return
        texts = source_of(self._old, *old), source_of(self._new, *new)
        if texts[0] == texts[1]:
            # Ops of one name and number that are not the same op.
            texts = f"{texts[0]} in the old file", f"{texts[1]} in the new file"
        yield Change(where, what, *texts)

    def _value_changes(
        self, where: str, what: str, one: tuple[Op, Tensor], two: tuple[Op, Tensor]
    ) -> Iterator[Change]:
        (old_op, ours), (new_op, theirs) = one, two
        codes = self._old.constant(ours), self._new.constant(theirs)
        if np.array_equal(*codes):
            return  # a change of scale alone is reported as such
        try:
            before = dequantized(self._old, old_op.subgraph, ours)
            after = dequantized(self._new, new_op.subgraph, theirs)
        except ValueError:
            # A sparse tensor, or one of strings, has no values to show.
            texts = (f"{each.size} bytes" for each in codes)
            yield Change(where, f"{what} content", *texts)
            return
        differ = ~((before == after) | (np.isnan(before) & np.isnan(after)))
        if not differ.any():
            return
        with np.errstate(invalid="ignore"):
            apart = np.where(differ, np.abs(after - before), -1.0)
        # NaN against a number is the furthest.
        at = np.unravel_index(int(np.nan_to_num(apart, nan=np.inf).argmax()), apart.shape)
        index = [int(i) for i in at]
        number = f"{np.count_nonzero(differ)} of {differ.size}"
        texts = (f"{float(values[at]):.6g}" for values in (before, after))
        yield Change(where, f"{what}, {number} values, the furthest at {index}", *texts)


def _rounding(op: Op, stored: Constant, floats: Array) -> WeightRounding:
    if stored.values.shape != floats.shape or not floats.size or stored.scales is None:
        return WeightRounding(str(op.place), 0, 0, 0, 0, 0, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        pair = pair_of(op.name, stored, floats / stored.scales, _HALF_A_STEP)
    aside = tuple(axis for axis in range(floats.ndim) if axis != pair.channel_axis)
    by_channel = pair.holds.sum(axis=aside)
    worst = int(by_channel.argmin())
    distance = np.abs(pair.actual - np.clip(pair.target, pair.low, pair.high))
    return WeightRounding(
        where=str(op.place),
        codes=pair.holds.size,
        equal=int(by_channel.sum()),
        channel=worst,
        channel_codes=pair.holds.size // len(by_channel),
        channel_equal=int(by_channel[worst]),
        furthest=float(np.nan_to_num(distance, nan=np.inf).max(axis=aside)[worst]),
    )


def _parameters(where: str, what: str, ours: Tensor, theirs: Tensor) -> Iterator[Change]:
    """Compare scales and zero points of two tensors of the same dtype."""
    if ours.dtype != theirs.dtype:
        return
    prefix = f"{what} " if what else ""
    for name, before, after in (
        ("scale", ours.scales, theirs.scales),
        ("zero point", ours.zero_points, theirs.zero_points),
    ):
        if len(before) != len(after):
            yield Change(where, f"{prefix}{name}s", str(len(before)), str(len(after)))
            continue
        differ = np.flatnonzero(before != after)
        if differ.size:
            first = int(differ[0])
            # As many digits of a scale as distinguish it from any other float32.
            texts = (str(values[first]) for values in (before, after))
            many = f", {differ.size} of {len(before)} channels, the first {first}"
            yield Change(where, f"{prefix}{name}{many if len(before) > 1 else ''}", *texts)
    if len(ours.scales) > 1 and ours.quantized_dimension != theirs.quantized_dimension:
        axes = str(ours.quantized_dimension), str(theirs.quantized_dimension)
        yield Change(where, f"{prefix}axis of the scales", *axes)


def _entry_pairs(
    old: Sequence[SignatureTensor], new: Sequence[SignatureTensor]
) -> list[tuple[SignatureTensor, SignatureTensor]]:
    """Pair inputs or outputs by name; by position where all were renamed."""
    by_name = {entry.name: entry for entry in new}
    named = [(entry, by_name[entry.name]) for entry in old if entry.name in by_name]
    if named or len(old) != len(new):
        return named
    return list(zip(old, new, strict=True))
