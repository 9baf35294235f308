"""Run each op of the float form on the inputs of the file's op."""

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
class OpOutput:
    """
    One output of an op, with the float results to compare it with.

    All arrays have the output's shape.
    """

    op: Op
    place: int
    codes: Array  # the output as stored
    value: Array  # the dequantized codes, float32; integers as they are
    rounded: Array  # result of the float op with the file's constants
    exact: Array  # result with the constants of the float form; may be the same array
    whole: Array  # result in a run of the whole float form
    input_peak: float  # greatest magnitude of the op's float inputs
    halves: tuple[Array, Halves] | None = None  # for a kernel that quantizes its own input


class Execution:
    """Runs the file and its float form, and the form's ops one by one."""

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
        self._groups: dict[tuple[tuple[int, ...], ...], list[_OpGroup]] = {}
        self.refused: dict[int, str] = {}
        """By index, ops of the file that kernels refuse where their partners stand alone."""

    def clone(self, runtime: str) -> Execution:
        """Return a copy with interpreters of its own."""
        other = copy.copy(self)
        other._file, other._form = self._file.clone(), self._form.clone()
        other._runner = other._file.runner(runtime, keep=True)
        other._whole = other._form.runner("builtin", keep=True)
        other._groups = {}
        return other

    def form_outputs(self) -> list[Array]:
        """Return the form's outputs of the last run, in the order of the file."""
        tensor = self._whole.tensor
        made = [(each.name, tensor(each.tensor.index)) for each in self._form.signature.outputs]
        wanted = [border.name for border in self._file.signature.outputs]
        return in_file_order(made, wanted, "the float form")

    def run(self, names: Sequence[str], arrays: Sequence[Array]) -> Iterator[OpOutput]:
        """Run one sample and yield the outputs of the paired ops in order."""
        self._runner.run(self._file.encode(names, arrays))
        self._whole.run(self._form.encode(names, arrays))
        shapes = tuple(array.shape for array in arrays)
        if shapes not in self._groups:
            self._groups[shapes] = self._grouped()
        groups = self._groups[shapes]
        for group in groups:
            values = _DequantizedValues(self._file.graph, self._ours.index, self._runner)
            yield from self._run_group(group, values)
            if len(groups) > KEPT_GROUPS:
                group.files = None

    def _grouped(self) -> list[_OpGroup]:
        """Split the ops into groups whose partners run in bounded memory."""
        ours = [op for op in self._ours.ops if op.name in HOLDING or op.index in self._pairs.ops]
        partners = [self._pairs.ops[op.index] for op in ours if op.index in self._pairs.ops]
        split = grouped_ops(
            self._form.graph, partners, lambda index: self._whole.tensor(index).shape
        )
        places = {partner.index: n for n, group in enumerate(split) for partner in group}
        groups = [_OpGroup([]) for _ in split or [()]]
        place = 0
        for op in ours:
            if op.index in self._pairs.ops:
                place = places[self._pairs.ops[op.index].index]
            groups[place].ops.append(op)
        return groups

    def _run_group(self, group: _OpGroup, values: _DequantizedValues) -> Iterator[OpOutput]:
        made, wanted, halves = self._results(group, values)
        for op in group.ops:
            if op.name in HOLDING:
                yield from self._holding_output(op, values)
            else:
                yield from self._paired_outputs(op, values, made, wanted, halves.get(op.index))

    def _results(self, group: _OpGroup, values: _DequantizedValues) -> _Results:
        """Run the partners of a group, except those that the kernels refuse."""
        while True:
            try:
                return self._run_partners(group, values)
            except CopyError as error:
                self._exclude_refused(group, values, error)

    def _exclude_refused(
        self, group: _OpGroup, values: _DequantizedValues, error: CopyError
    ) -> None:
        """Exclude the op that kernels refuse, or the group if it is unknown."""
        ops = [op for op in group.ops if op.index in self._pairs.ops]
        errors = {tuple(ops): error}

        def fails(chosen: Sequence[Op]) -> bool:
            try:
                self._run_partners(_OpGroup(list(chosen)), values)
            except CopyError as error:
                errors[tuple(chosen)] = error
                return True
            return False

        found = first_failing(ops, fails)
        refused = ops if found is None else [found]
        self.refused |= {op.index: str(errors[tuple(refused)]) for op in refused}
        group.ops = [op for op in group.ops if op not in refused]
        group.files = None

    def _run_partners(self, group: _OpGroup, values: _DequantizedValues) -> _Results:
        if group.files is None:
            group.files = self._cut(group.ops, values)
        rounded, exact = group.files
        inputs = {each.name: each.fitted(values) for each in rounded.operands}
        seen, halves = dict(inputs), dict[int, tuple[Array, Halves]]()
        for each in rounded.operands:
            hybrid = self.hybrids.get(each.op.index)
            if hybrid is None or each.position != hybrid_position(self._file.graph, each.op):
                continue
            floats = contiguous(values[each.op.inputs[each.position]], np.float32)
            if hybrid.accepts(floats.shape) and floats.size == inputs[each.name].size:
                quantized, found = hybrid.fake_quantize_with_halves(floats)
                seen[each.name] = quantized.reshape(inputs[each.name].shape)
                halves[each.op.index] = floats, found
        made = rounded.run(seen)
        wanted = made if exact is None else made | exact.run(inputs)
        return made, wanted, halves

    def _holding_output(self, op: Op, values: _DequantizedValues) -> Iterator[OpOutput]:
        partner = self._pairs.partner(op.outputs[0])
        if partner is None:
            return
        value, source = values[op.outputs[0]], values[op.inputs[0]]
        whole = self._whole.tensor(partner)
        if value.size == source.size == whole.size:
            source, whole = source.reshape(value.shape), whole.reshape(value.shape)
            codes = self._runner.tensor(op.outputs[0])
            yield OpOutput(op, 0, codes, value, source, source, whole, _peak(source))

    def _paired_outputs(
        self,
        op: Op,
        values: _DequantizedValues,
        made: Mapping[tuple[int, int], Array],
        wanted: Mapping[tuple[int, int], Array],
        halves: tuple[Array, Halves] | None,
    ) -> Iterator[OpOutput]:
        partner = self._pairs.ops[op.index]
        input_peak = max((_peak(values[i]) for i in op.inputs if i in values), default=0.0)
        # In a damaged file an op may have fewer outputs: `same` reports that.
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
                yield OpOutput(op, place, codes, value, rounded, exact, whole, input_peak, halves)

    def _cut(
        self, ops: Sequence[Op], values: _DequantizedValues
    ) -> tuple[_IsolatedOps, _IsolatedOps | None]:
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

        def isolated(
            chosen: Mapping[int, Op], constants: Mapping[tuple[int, int], Array]
        ) -> _IsolatedOps:
            graph, theirs = self._file.graph, self._theirs.index
            return _IsolatedOps(graph, self._form, theirs, self._whole, chosen, constants)

        return isolated(partners, constants), isolated(differing, {}) if differing else None

    def _in_form(self, pair: ConstantPair, values: _DequantizedValues) -> Array:
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


class _DequantizedValues(dict[int, Array]):
    """Values of the file's tensors in one run, dequantized on first access."""

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
class _OperandSource:
    """Where the value of an operand of a float op comes from."""

    name: str  # input of the file with isolated ops
    op: Op  # the consumer's partner in the file
    position: int
    default: Array  # the form's own value, with its shape and dtype

    def fitted(self, values: _DequantizedValues) -> Array:
        """Return the file's operand in the shape and the dtype of the form."""
        index = self.op.inputs[self.position] if self.position < len(self.op.inputs) else -1
        if index < 0:
            return self.default
        value = values[index]
        if value.size != self.default.size:
            return self.default
        return contiguous(value.reshape(self.default.shape), self.default.dtype)


@dataclass(slots=True, eq=False)
class _OpGroup:
    """Ops of the file that are run together."""

    ops: list[Op]
    files: tuple[_IsolatedOps, _IsolatedOps | None] | None = None


class _IsolatedOps:
    """Ops of the float form, isolated from each other, for inputs of certain shapes."""

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
            _OperandSource(
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
        fed = {name: value for name, value in inputs.items() if name in self._names}
        return dict(zip(self._outputs, self._runner.run(fed), strict=True))


def _peak(value: Array) -> float:
    """Return the greatest magnitude of finite floats; 0 for integers."""
    if value.dtype.kind != "f" or not value.size:
        return 0.0
    least, greatest = float(value.min()), float(value.max())
    peak = max(-least, greatest)
    if np.isfinite(peak):
        return peak
    return float(np.abs(value[np.isfinite(value)]).max(initial=0.0))
