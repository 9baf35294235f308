"""Run a file beside its float form: each op of the form on the values that the file's op took."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.compare.reference import in_file_order
from pytest_edgeq.errors import CopyError
from pytest_edgeq.localize.measured import by_channel, code_limits
from pytest_edgeq.localize.structure import ConstantPair, Pairs
from pytest_edgeq.numerics.arrays import contiguous
from pytest_edgeq.runtimes.bounds import Halves, HybridInput, hybrid_position
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.runtimes.runner import Copied, Runner
from pytest_edgeq.tflite.constants import dequantized
from pytest_edgeq.tflite.cut import ALONE, KEPT_GROUPS, cut_ops, first_failing, grouped_ops
from pytest_edgeq.tflite.float_form import bias_scales
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.op_dtypes import entry_of
from pytest_edgeq.tflite.ops import HOLDING
from pytest_edgeq.tflite.subgraph import Op

Array = npt.NDArray[Any]

_Results = tuple[
    Mapping[tuple[int, int], Array],
    Mapping[tuple[int, int], Array],
    Mapping[int, tuple[Array, Halves]],
]
"""
Outputs of ops with the file's constants and with the form's, by index of the op and of the tensor;
inputs of kernels that quantize their own, by index of the file's op.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """
    One output of one op of the file, and what it is held against; all of the output's shape.

    Attributes:
        op: Of the file.
        place: Which of its outputs.
        codes: As the file has it.
        value: What the codes stand for, float32; whole numbers as they are.
        rounded: What the float op gives with the file's constants.
        exact: What it gives with the constants of the float form; may be the same array.
        whole: What the float form gives by itself.
        taken: The greatest magnitude of the floats that the op took.
        halves: Of a kernel that quantizes its own input: that input, and where it lies between two
            codes.
    """

    op: Op
    place: int
    codes: Array
    value: Array
    rounded: Array
    exact: Array
    whole: Array
    taken: float
    halves: tuple[Array, Halves] | None = None


class Execution:
    """Runs both files, and the float form's ops one by one."""

    def __init__(
        self,
        file: EdgeFile,
        form: EdgeFile,
        pairs: Pairs,
        constants: Sequence[ConstantPair],
        runner: Runner,
    ) -> None:
        self._file, self._form = file, form
        self._ours = file.graph.subgraphs[file.signature.subgraph]
        self._theirs = form.graph.subgraphs[form.signature.subgraph]
        self._pairs = pairs
        self._runner = runner
        self._whole = form.runner("builtin", keep=True)
        self._constants = [
            pair
            for pair in constants
            if form.graph.tensor(pair.partner, pair.partner.inputs[pair.place]).dtype == "float32"
        ]
        self.hybrids = {
            number: HybridInput(file.graph, self._ours.ops[number])
            for number in pairs.ops
            if hybrid_position(file.graph, self._ours.ops[number]) is not None
        }
        differing = {
            pair.partner.index
            for pair in constants
            if not np.array_equal(pair.stored.floats, pair.floats)
        }
        self.differing = frozenset(differing | {pairs.ops[number].index for number in self.hybrids})
        """Ops of the form whose result is another with the file's constants, or its codes."""
        self._groups: dict[tuple[tuple[int, ...], ...], list[_Group]] = {}
        self.refused: dict[int, str] = {}
        """By index, ops of the file that kernels refuse where their partners stand alone."""

    def apart(self, runtime: str) -> Execution:
        """Return the same on interpreters of its own."""
        other = copy.copy(self)
        other._file, other._form = self._file.clone(), self._form.clone()
        other._runner = other._file.runner(runtime, keep=True)
        other._whole = other._form.runner("builtin", keep=True)
        other._groups = {}
        return other

    def form_outputs(self) -> list[Array]:
        """Return what the form gave in the last run, in the order of the file's outputs."""
        tensor = self._whole.tensor
        made = [(each.name, tensor(each.tensor.index)) for each in self._form.signature.outputs]
        wanted = [border.name for border in self._file.signature.outputs]
        return in_file_order(made, wanted, "the float form")

    def run(self, names: Sequence[str], arrays: Sequence[Array]) -> Iterator[Made]:
        """
        Run one sample, and give the outputs of the ops that are known, in the order of the file.

        Raises:
            ValueError, TypeError: The inputs do not fit.
            RuntimeError: The kernels fail.
        """
        self._runner.run(self._file.encode(names, arrays))
        self._whole.run(self._form.encode(names, arrays))
        shapes = tuple(array.shape for array in arrays)
        if shapes not in self._groups:
            self._groups[shapes] = self._grouped()
        groups = self._groups[shapes]
        for group in groups:
            values = _Values(self._file.graph, self._ours.index, self._runner)
            yield from self._run_group(group, values)
            if len(groups) > KEPT_GROUPS:
                group.files = None

    def _grouped(self) -> list[_Group]:
        """Split the ops of the file so that the partners of a group run in bounded memory."""
        held = [op for op in self._ours.ops if op.name in HOLDING or op.index in self._pairs.ops]
        partners = [self._pairs.ops[op.index] for op in held if op.index in self._pairs.ops]
        split = grouped_ops(
            self._form.graph, partners, lambda index: self._whole.tensor(index).shape
        )
        places = {partner.index: n for n, group in enumerate(split) for partner in group}
        groups = [_Group([]) for _ in split or [()]]
        place = 0
        for op in held:
            if op.index in self._pairs.ops:
                place = places[self._pairs.ops[op.index].index]
            groups[place].ops.append(op)
        return groups

    def _run_group(self, group: _Group, values: _Values) -> Iterator[Made]:
        made, wanted, halves = self._results(group, values)
        for op in group.ops:
            if op.name in HOLDING:
                yield from self._held(op, values)
            else:
                yield from self._made(op, values, made, wanted, halves.get(op.index))

    def _results(self, group: _Group, values: _Values) -> _Results:
        """Run the partners of a group, without those that the kernels refuse."""
        while True:
            try:
                return self._run_partners(group, values)
            except CopyError as error:
                self._leave_out(group, values, error)

    def _leave_out(self, group: _Group, values: _Values, error: CopyError) -> None:
        """Leave out the op of a group that kernels refuse, or all where it cannot be told."""
        ops = [op for op in group.ops if op.index in self._pairs.ops]
        told = {tuple(ops): error}

        def fails(chosen: Sequence[Op]) -> bool:
            try:
                self._run_partners(_Group(list(chosen)), values)
            except CopyError as error:
                told[tuple(chosen)] = error
                return True
            return False

        found = first_failing(ops, fails)
        refused = ops if found is None else [found]
        self.refused |= {op.index: str(told[tuple(refused)]) for op in refused}
        group.ops = [op for op in group.ops if op not in refused]
        group.files = None

    def _run_partners(self, group: _Group, values: _Values) -> _Results:
        if group.files is None:
            group.files = self._cut(group.ops, values)
        rounded, exact = group.files
        inputs = {each.name: each.fitted(values) for each in rounded.operands}
        seen, halves = dict(inputs), dict[int, tuple[Array, Halves]]()
        for each in rounded.operands:
            hybrid = self.hybrids.get(each.op.index)
            if hybrid is None or each.position != hybrid_position(self._file.graph, each.op):
                continue
            given = contiguous(values[each.op.inputs[each.position]], np.float32)
            if hybrid.accepts(given.shape) and given.size == inputs[each.name].size:
                looked, found = hybrid.fake_quantize_with_halves(given)
                seen[each.name] = looked.reshape(inputs[each.name].shape)
                halves[each.op.index] = given, found
        made = rounded.run(seen)
        wanted = made if exact is None else made | exact.run(inputs)
        return made, wanted, halves

    def _held(self, op: Op, values: _Values) -> Iterator[Made]:
        partner = self._pairs.partner(op.outputs[0])
        if partner is None:
            return
        value, given = values[op.outputs[0]], values[op.inputs[0]]
        whole = self._whole.tensor(partner)
        if value.size == given.size == whole.size:
            given, whole = given.reshape(value.shape), whole.reshape(value.shape)
            codes = self._runner.tensor(op.outputs[0])
            yield Made(op, 0, codes, value, given, given, whole, _peak(given))

    def _made(
        self,
        op: Op,
        values: _Values,
        made: Mapping[tuple[int, int], Array],
        wanted: Mapping[tuple[int, int], Array],
        halves: tuple[Array, Halves] | None,
    ) -> Iterator[Made]:
        partner = self._pairs.ops[op.index]
        taken = max((_peak(values[i]) for i in op.inputs if i in values), default=0.0)
        # A damaged file may give an op fewer outputs: `same` tells of that.
        for place, (here, there) in enumerate(zip(op.outputs, partner.outputs, strict=False)):
            key = (partner.index, there)
            if key not in made:
                continue
            value = values[here]
            results = (made[key], wanted[key], self._whole.tensor(there))
            if all(each.size == value.size for each in results):
                rounded, exact, whole = (each.reshape(value.shape) for each in results)
                exact = rounded if results[0] is results[1] else exact
                codes = self._runner.tensor(here)
                yield Made(op, place, codes, value, rounded, exact, whole, taken, halves)

    def _cut(self, ops: Sequence[Op], values: _Values) -> tuple[_OpsApart, _OpsApart | None]:
        partners = {
            partner.index: op
            for op in ops
            if (partner := self._pairs.ops.get(op.index)) is not None
        }
        constants = {
            (pair.partner.index, pair.place): self._in_form(pair, values)
            for pair in self._constants
            if pair.partner.index in partners
        }
        differing = {number: partners[number] for number in partners.keys() & self.differing}

        def apart(
            chosen: Mapping[int, Op], constants: Mapping[tuple[int, int], Array]
        ) -> _OpsApart:
            graph, theirs = self._file.graph, self._theirs.index
            return _OpsApart(graph, self._form, theirs, self._whole, chosen, constants)

        return apart(partners, constants), apart(differing, {}) if differing else None

    def _in_form(self, pair: ConstantPair, values: _Values) -> Array:
        """Return the values that the file's kernel reads, in the shape of the form."""
        index = pair.op.inputs[pair.place]
        tensor = self._ours.tensors[index]
        if tensor.is_constant:
            scales = bias_scales(self._file.graph, self._ours, tensor)
            floats = pair.stored.floats if scales is None else pair.stored.values * scales
        else:
            floats = values[index]  # a constant that is quantized when the file runs
        shape = self._form.graph.tensor(pair.partner, pair.partner.inputs[pair.place]).shape
        return contiguous(floats.astype(np.float32).reshape(shape))


class _Values(dict[int, Array]):
    """Values of the file's tensors in one run, dequantized when they are asked for."""

    def __init__(self, graph: OpGraph, subgraph: int, runner: Runner) -> None:
        super().__init__()
        self._graph, self._subgraph = graph, subgraph
        self._tensors = graph.subgraphs[subgraph].tensors
        self._runner = runner

    def __missing__(self, index: int) -> Array:
        tensor = self._tensors[index]
        if tensor.is_constant and tensor.is_quantized:
            value = dequantized(self._graph, self._subgraph, tensor).astype(np.float32)
        else:
            value = self._runner.tensor(index)
            limits = code_limits(tensor)
            if limits is not None:
                scale, zero_point = limits[2:]
                value = (value.astype(np.float32) - np.float32(zero_point)) * np.float32(scale)
            elif tensor.is_quantized and len(tensor.scales) > 1:
                value = by_channel(tensor, value)
        self[index] = value
        return value


@dataclass(frozen=True, slots=True, eq=False)
class _Operand:
    """
    What an op of the float form takes.

    Attributes:
        name: Of the input of the cut.
        op: The op of the file that stands for it.
        position: Of the operand.
        default: The form's own value: it tells shape and dtype, and stands in where the file lacks
            the operand or has it in another size.
    """

    name: str
    op: Op
    position: int
    default: Array

    def fitted(self, values: _Values) -> Array:
        """Return the value that the file's op took, in the shape and the dtype of the form."""
        index = self.op.inputs[self.position] if self.position < len(self.op.inputs) else -1
        if index < 0:
            return self.default
        value = values[index]
        if value.size != self.default.size:
            return self.default
        return contiguous(value.reshape(self.default.shape), self.default.dtype)


@dataclass(slots=True, eq=False)
class _Group:
    """
    Ops of the file that are run together.

    Attributes:
        ops: In order.
        files: The partners with the file's constants, and those that have others in the form with
            these; None while they are not open.
    """

    ops: list[Op]
    files: tuple[_OpsApart, _OpsApart | None] | None = None


class _OpsApart:
    """Ops of the float form, each standing alone, for inputs of certain shapes."""

    def __init__(
        self,
        graph: OpGraph,
        form: EdgeFile,
        subgraph: int,
        whole: Runner,
        partners: Mapping[int, Op],
        constants: Mapping[tuple[int, int], Array],
    ) -> None:
        cut = cut_ops(
            form.graph, subgraph, lambda index: whole.tensor(index).shape, partners, constants
        )
        self._outputs = [(op.index, index) for op, index in cut.outputs]
        names = {
            (0, number): entry_of(graph, partners[op.index]).where
            for number, op in enumerate(cut.ops)
            if op.index in partners
        }
        copied = Copied(ALONE, names)
        file = EdgeFile(cut.content, runtimes=form.runtimes, copied=copied)
        self._runner = file.runner("builtin")
        self.operands = [
            _Operand(
                name,
                partners[cut.consumers[name].index],
                cut.consumers[name].inputs.index(index),
                whole.tensor(index),
            )
            for name, index in cut.inputs.items()
        ]
        self._names = frozenset(cut.inputs)

    def run(self, inputs: Mapping[str, Array]) -> dict[tuple[int, int], Array]:
        """Return the outputs by number of the op and of the tensor."""
        given = {name: value for name, value in inputs.items() if name in self._names}
        return dict(zip(self._outputs, self._runner.run(given), strict=True))


def _peak(value: Array) -> float:
    """The greatest magnitude of finite floats; 0 of whole numbers."""
    if value.dtype.kind != "f" or not value.size:
        return 0.0
    least, greatest = float(value.min()), float(value.max())
    peak = max(-least, greatest)
    if np.isfinite(peak):
        return peak
    return float(np.abs(value[np.isfinite(value)]).max(initial=0.0))
