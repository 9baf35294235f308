"""Run each op of the float form on the inputs of the file's op."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.compare.reference import in_file_order
from pytest_edgeq.errors import CopyError
from pytest_edgeq.localize.measured import channel_steps, code_limits, peak
from pytest_edgeq.localize.single_ops import OpGroup, in_turn
from pytest_edgeq.localize.structure import ConstantPair, Structure
from pytest_edgeq.numerics.arrays import contiguous
from pytest_edgeq.runtimes.bounds import Halves, HybridInput, hybrid_position
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.runtimes.runner import Runner
from pytest_edgeq.tflite.constants import dequantized
from pytest_edgeq.tflite.cut import first_failing, grouped_ops
from pytest_edgeq.tflite.float_form import bias_scales
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.op_dtypes import entry_of
from pytest_edgeq.tflite.ops import HOLDING, facts_of
from pytest_edgeq.tflite.subgraph import Op

Array = npt.NDArray[Any]

# Outputs of ops with the file's constants and with the form's, by index of the op and of the
# tensor; inputs of kernels that quantize their own, by index of the file's op.
_Results = tuple[
    Mapping[tuple[int, int], Array],
    Mapping[tuple[int, int], Array],
    Mapping[int, tuple[Array, Halves]],
]


@dataclass(frozen=True, slots=True, eq=False)
class OpOutput:
    """One output of an op, and the float results to compare it with, all of one shape."""

    op: Op
    tensor: int
    codes: Array  # the output as stored
    value: Array  # the dequantized codes, float32; integers as they are
    rounded: Array  # result of the float op with the file's constants
    exact: Array  # result with the constants of the float form; may be the same array
    whole: Array  # result in a run of the whole float form
    input_peak: float  # greatest magnitude of the op's float inputs
    halves: tuple[Array, Halves] | None = None  # for a kernel that quantizes its own input


def kept_outputs(form: EdgeFile, kept: Runner, file: EdgeFile) -> list[Array]:
    """Return a float file's outputs of the last run, in the order of the quantized file."""
    return [kept.tensor(index) for index in output_tensors(form, file)]


def output_tensors(form: EdgeFile, file: EdgeFile) -> list[int]:
    """Return a float file's output tensors in the order of the quantized file."""
    named = [(each.name, np.array(each.tensor.index)) for each in form.signature.outputs]
    wanted = [io_tensor.name for io_tensor in file.signature.outputs]
    return list(map(int, in_file_order(named, wanted, "the float form")))


class Execution:
    """Runs the file and its float form, and the form's ops one by one."""

    def __init__(
        self, file: EdgeFile, form: EdgeFile, structure: Structure, runner: Runner
    ) -> None:
        self._file, self._form = file, form
        self._ours = file.subgraph
        self._theirs = form.subgraph
        self._pairs = pairs = structure.pairs
        self._runner = runner
        self._whole = form.runner("builtin", keep=True)
        self._constants = [
            pair
            for pair in structure.constants
            if form.graph.tensor(pair.partner, pair.partner.inputs[pair.place]).dtype == "float32"
        ]
        self.hybrids = {
            number: HybridInput(file.graph, self._ours.ops[number])
            for number in pairs.ops
            if hybrid_position(file.graph, self._ours.ops[number]) is not None
        }
        differing = {
            pair.partner.index
            for pair in structure.constants
            if not np.array_equal(pair.stored.floats, pair.floats)
        }
        self.differing = frozenset(differing | {pairs.ops[number].index for number in self.hybrids})
        """Ops of the form whose result is another with the file's constants, or its codes."""
        # Of the last sample's shapes alone: each further size would keep files of its own open.
        self._groups: list[_PairedGroup] = []
        self._shapes: tuple[tuple[int, ...], ...] | None = None
        self.refused: dict[int, str] = {}
        """By index, ops of the file that kernels refuse where their partners stand alone."""

    def clone(self, runtime: str) -> Execution:
        """Return a copy with interpreters of its own."""
        other = copy.copy(self)
        other._file, other._form = self._file.clone(), self._form.clone()
        other._runner = other._file.runner(runtime, keep=True)
        other._whole = other._form.runner("builtin", keep=True)
        other._groups, other._shapes = [], None
        return other

    def form_outputs(self) -> list[Array]:
        """Return the form's outputs of the last run, in the order of the file."""
        return kept_outputs(self._form, self._whole, self._file)

    def run(self, names: Sequence[str], arrays: Sequence[Array]) -> Iterator[OpOutput]:
        """Run one sample and yield the outputs of the paired ops in order."""
        self._runner.run(self._file.encode(names, arrays))
        self._whole.run(self._form.encode(names, arrays))
        shapes = tuple(array.shape for array in arrays)
        if shapes != self._shapes:
            for group in self._groups:
                group.close()
            self._groups, self._shapes = self._grouped(), shapes
        for group in in_turn(self._groups):
            values = _DequantizedValues(self._file.graph, self._ours.index, self._runner)
            made, wanted, halves = self._results(group, values)
            for op in group.ops:
                if op.name in HOLDING:
                    yield from self._holding_output(op, values)
                else:
                    yield from self._paired_outputs(op, values, made, wanted, halves.get(op.index))

    def _grouped(self) -> list[_PairedGroup]:
        """Split the ops into groups whose partners run in bounded memory."""
        ours = [op for op in self._ours.ops if op.name in HOLDING or op.index in self._pairs.ops]
        partners = [self._pairs.ops[op.index] for op in ours if op.index in self._pairs.ops]
        split = grouped_ops(
            self._form.graph, partners, lambda index: self._whole.tensor(index).shape
        )
        places = {partner.index: n for n, group in enumerate(split) for partner in group}
        groups: list[list[Op]] = [[] for _ in split or [()]]
        place = 0
        for op in ours:
            if op.index in self._pairs.ops:
                place = places[self._pairs.ops[op.index].index]
            groups[place].append(op)
        return [self._group(ops) for ops in groups]

    def _group(self, ops: Sequence[Op]) -> _PairedGroup:
        by_partner = {
            self._pairs.ops[op.index].index: op for op in ops if op.index in self._pairs.ops
        }
        partners = [self._theirs.ops[number] for number in by_partner]
        form, whole, differing = self._form, self._whole, self.differing
        # Without `self`: a circle of references would keep interpreters until it is collected.
        graph, subgraph, runner = self._file.graph, self._ours.index, self._runner
        pairs = [pair for pair in self._constants if pair.partner.index in by_partner]

        def where(partner: Op) -> str:
            op = by_partner.get(partner.index)
            return partner.name if op is None else entry_of(graph, op).where

        def constants(chosen: Sequence[Op]) -> dict[tuple[int, int], Array]:
            values = _DequantizedValues(graph, subgraph, runner)
            return {
                (pair.partner.index, pair.place): _in_form(graph, form.graph, pair, values)
                for pair in pairs
                if pair.partner in chosen
            }

        rounded, exact = [], []
        # Sums in any order differ by rounding alone: XNNPACK's are the fastest. Ops with the same
        # constants in both files run in the same kernels as those of the file.
        for runtime in ("xnnpack", "builtin"):
            own = [
                each
                for each in partners
                if (runtime == "xnnpack")
                == (each.index in differing and bool(facts_of(each.name).summed))
            ]
            changed = [each for each in own if each.index in differing]
            if own:
                made = OpGroup(form, whole, own, where, functools.partial(constants, own))
                rounded.append((made, runtime))
            if changed:
                exact.append((OpGroup(form, whole, changed, where), runtime))
        return _PairedGroup(list(ops), by_partner, rounded, exact)

    def _results(self, group: _PairedGroup, values: _DequantizedValues) -> _Results:
        """Run the partners of a group, except those that the kernels refuse."""
        while True:
            try:
                return self._run_partners(group, values)
            except CopyError as error:
                self._exclude_refused(group, values, error)

    def _exclude_refused(
        self, group: _PairedGroup, values: _DequantizedValues, error: CopyError
    ) -> None:
        """Exclude the op that kernels refuse, or the group if it is unknown."""
        ops = [op for op in group.ops if op.index in self._pairs.ops]
        errors = {tuple(ops): error}

        def fails(chosen: Sequence[Op]) -> bool:
            try:
                self._run_partners(self._group(chosen), values)
            except CopyError as error:
                errors[tuple(chosen)] = error
                return True
            return False

        found = first_failing(ops, fails)
        refused = ops if found is None else [found]
        self.refused |= {op.index: str(errors[tuple(refused)]) for op in refused}
        left = self._group([op for op in group.ops if op not in refused])
        group.ops, group.by_partner = left.ops, left.by_partner
        group.rounded, group.exact = left.rounded, left.exact

    def _run_partners(self, group: _PairedGroup, values: _DequantizedValues) -> _Results:
        inputs, seen = dict[str, Array](), dict[str, Array]()
        halves = dict[int, tuple[Array, Halves]]()
        read = dict[str, tuple[Op, int]]()
        for part, _ in group.rounded:
            read |= part.cut.inputs
        for name, (consumer, tensor) in read.items():
            op, position = group.by_partner[consumer.index], consumer.inputs.index(tensor)
            default = self._whole.tensor(tensor)
            seen[name] = inputs[name] = _operand(op, position, default, values)
            hybrid = self.hybrids.get(op.index)
            if hybrid is None or position != hybrid_position(self._file.graph, op):
                continue
            floats = contiguous(values[op.inputs[position]], np.float32)
            if hybrid.accepts(floats.shape) and floats.size == inputs[name].size:
                quantized, found = hybrid.fake_quantize_with_halves(floats)
                seen[name] = quantized.reshape(inputs[name].shape)
                halves[op.index] = floats, found
        made = dict[tuple[int, int], Array]()
        for part, runtime in group.rounded:
            made |= part.run(runtime, seen)
        wanted = dict(made)
        for part, runtime in group.exact:
            wanted |= part.run(runtime, inputs)
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
            yield OpOutput(op, op.outputs[0], codes, value, source, source, whole, peak(source))

    def _paired_outputs(
        self,
        op: Op,
        values: _DequantizedValues,
        made: Mapping[tuple[int, int], Array],
        wanted: Mapping[tuple[int, int], Array],
        halves: tuple[Array, Halves] | None,
    ) -> Iterator[OpOutput]:
        partner = self._pairs.ops[op.index]
        input_peak = max((peak(values[i]) for i in op.inputs if i in values), default=0.0)
        # In a damaged file an op may have fewer outputs: `same` reports that.
        for here, there in zip(op.outputs, partner.outputs, strict=False):
            key = (partner.index, there)
            if key not in made:
                continue
            value = values[here]
            results = (made[key], wanted[key], self._whole.tensor(there))
            if all(each.size == value.size for each in results):
                rounded, exact, whole = (each.reshape(value.shape) for each in results)
                exact = rounded if results[0] is results[1] else exact
                codes = self._runner.tensor(here)
                yield OpOutput(op, here, codes, value, rounded, exact, whole, input_peak, halves)


def _in_form(
    graph: OpGraph, form: OpGraph, pair: ConstantPair, values: _DequantizedValues
) -> Array:
    """Return the values that the file's kernel reads, in the shape of the form."""
    index = pair.op.inputs[pair.place]
    subgraph = graph.subgraphs[pair.op.subgraph]
    tensor = subgraph.tensors[index]
    if tensor.is_constant:
        scales = bias_scales(graph, subgraph, tensor)
        floats = pair.stored.floats if scales is None else pair.stored.values * scales
    else:
        floats = values[index]  # a constant that is quantized when the file runs
    shape = form.tensor(pair.partner, pair.partner.inputs[pair.place]).shape
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
                scales = channel_steps(tensor)
                points = tensor.zero_points.astype(np.float32).reshape(scales.shape)
                value = (value.astype(np.float32) - points) * scales
        self[index] = value
        return value


@dataclass(slots=True, eq=False)
class _PairedGroup:
    """Ops of the file that are compared together, and the form's ops that are run for them."""

    ops: list[Op]
    by_partner: Mapping[int, Op]
    rounded: Sequence[tuple[OpGroup, str]]  # with the file's constants, and the runtime
    exact: Sequence[tuple[OpGroup, str]]  # those that the form's own constants change

    def close(self) -> None:
        """Close both files."""
        for part, _ in (*self.rounded, *self.exact):
            part.close()


def _operand(op: Op, position: int, default: Array, values: _DequantizedValues) -> Array:
    """Return an operand of the file's op in the form's shape; the form's own if none fits."""
    index = op.inputs[position] if position < len(op.inputs) else -1
    if index < 0 or values[index].size != default.size:
        return default
    return contiguous(values[index].reshape(default.shape), default.dtype)
