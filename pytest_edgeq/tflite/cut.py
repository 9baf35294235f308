"""
Cut a `.tflite` file into isolated ops, to run each on its own inputs.

All of them are in one file and run in one invocation, on any runtime: the operands of an op are
inputs of the file, its results are outputs. So each is judged independently of the ops before it.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pytest_edgeq.numerics.arrays import contiguous
from pytest_edgeq.tflite.boundary import numpy_dtype
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.ops import MOVING, facts_of
from pytest_edgeq.tflite.subgraph import Op, Subgraph, Tensor
from pytest_edgeq.tflite.writing import add_buffer, add_tensor, packed, unpacked

# The offsets of a flatbuffer are signed, of 32 bits; all but the data fits into the rest.
_MOST_BYTES = 2**31 - 2**26


# Bytes of the tensors of a group of ops, unless one op alone needs more.
_MOST_OF_A_GROUP = 1 << 25

KEPT_GROUPS = 4
"""Groups of ops that callers keep open between samples; if more, each is closed after its run."""

ALONE = "a copy of the file in which its ops are isolated"
"""Name of such a file in texts."""

# Initial room for all but the data.
_SMALL_PARTS = 1 << 16

# Ops that only prepare constants.
_PREPARES = MOVING - {"SQUEEZE"}


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A file of isolated ops."""

    content: bytes  # the file, with one signature, `cut`
    # By the names of its inputs, the op of the whole file that reads each, and the tensor there
    inputs: Mapping[str, tuple[Op, int]]
    # In the order of its outputs, the op and the tensor of the whole file that each output is
    outputs: tuple[tuple[Op, int], ...]
    left_out: tuple[tuple[Op, str], ...]  # ops that cannot be isolated, and why
    ops: tuple[Op, ...]  # ops of the whole file, in the order of the file's own


def cut_ops(
    graph: OpGraph,
    subgraph: int,
    shape_of: Callable[[int], tuple[int, ...]] | None = None,
    wanted: Container[int] | None = None,
    constants: Mapping[tuple[int, int], npt.NDArray[np.float32]] | None = None,
) -> Cut:
    """
    Write a file in which every op of a subgraph is isolated.

    A constant behind a DEQUANTIZE or a layout op stays with its consumer, because kernels may treat
    constant operands differently; the ops between are not isolated. Other ops on constants are.
    """
    return _Cutter(graph, graph.subgraphs[subgraph], shape_of, wanted, constants or {}).cut()


def first_op_that(
    graph: OpGraph,
    subgraph: int,
    holds: Callable[[Cut], bool],
    shape_of: Callable[[int], tuple[int, ...]] | None = None,
) -> Op | None:
    """Return the first op whose isolated form satisfies a predicate, or None."""

    def fails(ops: Sequence[Op]) -> bool:
        cut = cut_ops(graph, subgraph, shape_of, {op.index for op in ops})
        return bool(cut.outputs) and holds(cut)

    return first_failing(graph.subgraphs[subgraph].ops, fails)


def first_failing(ops: Sequence[Op], fails: Callable[[Sequence[Op]], bool]) -> Op | None:
    """Return the first op that fails even alone, by bisection, or None."""
    if not (is_known := fails(ops)):
        return None
    while len(ops) > 1:
        half = ops[: len(ops) // 2]
        is_known = fails(half)
        ops = half if is_known else ops[len(half) :]
    return ops[0] if is_known or fails(ops) else None


def grouped_ops(
    graph: OpGraph, ops: Iterable[Op], shape_of: Callable[[int], tuple[int, ...]]
) -> list[tuple[Op, ...]]:
    """Split ops into groups, in order, each of bounded memory."""
    groups: list[list[Op]] = []
    total = 0
    for op in ops:
        size = 0
        # Interpreters have no memory for what a WHILE passes through and nothing reads.
        is_left_out = op.index in _facts_of(graph, graph.subgraphs[op.subgraph]).causes
        for index in () if is_left_out else (*op.inputs, *op.outputs):
            if index >= 0:
                tensor = graph.tensor(op, index)
                dtype = numpy_dtype(tensor.dtype)
                if dtype is not None:  # a handle of a variable must not be read
                    shape = tensor.shape if tensor.is_constant else shape_of(index)
                    size += math.prod(shape) * dtype.itemsize
        if not groups or total + size > _MOST_OF_A_GROUP:
            groups.append([])
            total = 0
        groups[-1].append(op)
        total += size
    return [tuple(each) for each in groups]


@dataclass(eq=False)
class _Cutter:
    """Builder of the file of isolated ops."""

    graph: OpGraph
    subgraph: Subgraph
    shape_of: Callable[[int], tuple[int, ...]] | None
    wanted: Container[int] | None
    constants: Mapping[tuple[int, int], npt.NDArray[np.float32]]

    def __post_init__(self) -> None:
        from ai_edge_litert import schema_py_generated as schema

        self.inputs: dict[str, tuple[Op, int]] = {}
        self.outputs: list[tuple[Op, int]] = []
        self._fixed: dict[int, int] = {}
        self._buffers: dict[int, int] = {}
        self._opcodes: dict[int, int] = {}
        self._n_bytes = 0
        self.raw = _unpacked(self.graph)
        self.source = self.raw.subgraphs[self.subgraph.index]
        self.main = schema.SubGraphT([], [], [], [], "cut")
        self.model = schema.ModelT(
            version=self.raw.version,
            description="ops standing alone",
            buffers=[schema.BufferT()],
            operatorCodes=[],
            subgraphs=[self.main],
        )

    def cut(self) -> Cut:
        facts = _facts_of(self.graph, self.subgraph)
        ops: list[Op] = []
        needed: set[int] = set()  # ops that may prepare constants of isolated ones
        for op in reversed(self.subgraph.ops):
            is_wanted = self.wanted is None or op.index in self.wanted
            if op.index in facts.fixed:
                is_wanted = op.index in needed
            if is_wanted and op.index not in facts.causes:
                ops.insert(0, op)
                producers = (self.subgraph.producer.get(index) for index in op.inputs)
                needed.update(each.index for each in producers if each is not None)
        for op in ops:
            self._add(op, facts)
        left_out = tuple((self.subgraph.ops[at], cause) for at, cause in facts.causes.items())
        return Cut(self._content(), self.inputs, tuple(self.outputs), left_out, tuple(ops))

    def _add(self, op: Op, facts: _Facts) -> None:
        raw = self.source.operators[op.index]
        isolated = copy.copy(raw)
        isolated.opcodeIndex = self._opcode(raw.opcodeIndex)
        isolated.mutatingVariableInputs = None
        isolated.debugMetadataIndex = -1
        self._add_decomposition(op, isolated)
        own: dict[int, int] = {-1: -1}
        isolated.inputs = []
        for position, index in enumerate(op.inputs):
            if (op.index, position) in self.constants:
                isolated.inputs.append(self._replaced(op, position))
                continue
            if index not in own:
                is_input = index in facts.computed
                own[index] = self._input(op, index) if is_input else self._constant(index)
            isolated.inputs.append(own[index])
        if raw.intermediates is not None:
            isolated.intermediates = [self._tensor(index) for index in raw.intermediates]
        made = {index: -1 for index in op.outputs if index < 0}
        for index in (i for i in op.outputs if i >= 0):
            if op.index in facts.fixed:
                made[index] = self._fixed[index] = self._tensor(index)
            else:
                made[index] = self._tensor(index, f"out_{op.index}_{index}")
                self.main.outputs.append(made[index])
                self.outputs.append((op, index))
        isolated.outputs = [made[index] for index in op.outputs]
        self.main.operators.append(isolated)

    def _add_decomposition(self, op: Op, raw: Any) -> None:
        """Add the subgraph that a composite consists of, and those of composites in it."""
        subgraph = self.graph.decomposition(op)
        if subgraph is None:
            return
        copied = copy.copy(self.raw.subgraphs[subgraph.index])
        raw.builtinOptions2 = copy.copy(raw.builtinOptions2)
        raw.builtinOptions2.decompositionSubgraphIndex = len(self.model.subgraphs)
        self.model.subgraphs.append(copied)
        copied.tensors = [copy.copy(each) for each in copied.tensors]
        for tensor, own in zip(subgraph.tensors, copied.tensors, strict=True):
            own.buffer = self._buffer(tensor) if tensor.is_constant else 0
        copied.operators = [copy.copy(each) for each in copied.operators]
        for part, own in zip(subgraph.ops, copied.operators, strict=True):
            own.opcodeIndex = self._opcode(own.opcodeIndex)
            own.debugMetadataIndex = -1
            self._add_decomposition(part, own)

    def _input(self, op: Op, index: int) -> int:
        name = f"in_{op.index}_{index}"
        tensor = self._tensor(index, name)
        if self.shape_of is not None:
            self.main.tensors[tensor].shape = list(self.shape_of(index))
        self.main.inputs.append(tensor)
        self.inputs[name] = op, index
        return tensor

    def _constant(self, index: int) -> int:
        if index not in self._fixed:
            self._fixed[index] = self._tensor(index)
        return self._fixed[index]

    def _replaced(self, op: Op, position: int) -> int:
        """Add a constant that replaces a constant operand."""
        from ai_edge_litert import schema_py_generated as schema

        index = op.inputs[position]
        tensor = copy.copy(self.source.tensors[index])
        tensor.name = f"constant_{index}_of_{op.index}"
        tensor.type, tensor.quantization = schema.TensorType.FLOAT32, None
        tensor.sparsity = None
        content = self.constants[op.index, position]
        tensor.buffer = self._add_buffer(contiguous(content).reshape(-1).view(np.uint8))
        return add_tensor(self.main, tensor)

    def _tensor(self, index: int, name: str = "") -> int:
        """Copy a tensor of the subgraph, with its own and its referenced constants."""
        tensor = self.subgraph.tensors[index]
        copied = copy.copy(self.source.tensors[index])
        copied.name = name or f"constant_{index}"
        copied.buffer = self._buffer(tensor) if tensor.is_constant else 0
        if tensor.block_scales >= 0:
            copied.quantization = copy.copy(copied.quantization)
            details = copied.quantization.details = copy.copy(copied.quantization.details)
            details.scales = self._constant(tensor.block_scales)
            details.zeroPoints = (
                self._constant(tensor.block_zero_points) if tensor.block_zero_points >= 0 else -1
            )
        return add_tensor(self.main, copied)

    def _buffer(self, tensor: Tensor) -> int:
        if tensor.buffer not in self._buffers:
            content = np.asarray(self.graph.stored(tensor))
            self._buffers[tensor.buffer] = self._add_buffer(content)
        return self._buffers[tensor.buffer]

    def _add_buffer(self, content: npt.NDArray[np.uint8]) -> int:
        self._n_bytes += content.size
        if self._n_bytes > _MOST_BYTES:
            raise ValueError(
                f"the constants of the file take more than {_MOST_BYTES} bytes, which are too "
                "many for a file in which its ops stand alone"
            )
        return add_buffer(self.model, content)

    def _opcode(self, index: int) -> int:
        # Only those in use: kernels refuse a file for an op that it does not run, too.
        if index not in self._opcodes:
            self.model.operatorCodes.append(self.raw.operatorCodes[index])
            self._opcodes[index] = len(self.model.operatorCodes) - 1
        return self._opcodes[index]

    def _content(self) -> bytes:
        from ai_edge_litert import schema_py_generated as schema

        def named(names: Iterable[str], indices: Iterable[int]) -> list[Any]:
            pairs = zip(names, indices, strict=True)
            return [schema.TensorMapT(name=name, tensorIndex=index) for name, index in pairs]

        names = (f"out_{op.index}_{index}" for op, index in self.outputs)
        signature = schema.SignatureDefT(signatureKey="cut", subgraphIndex=0)
        signature.inputs = named(self.inputs, self.main.inputs)
        signature.outputs = named(names, self.main.outputs)
        self.model.signatureDefs = [signature]
        return packed(self.model, self._n_bytes + _SMALL_PARTS)


class _Facts(NamedTuple):
    """Facts of a subgraph by which any of its ops are cut."""

    causes: dict[int, str]  # why ops cannot be isolated, by op index
    fixed: set[int]  # ops that prepare constants
    computed: set[int]  # tensors that depend on inputs, on state or on chance


def _facts_of(graph: OpGraph, subgraph: Subgraph) -> _Facts:
    """Return the facts of a subgraph, found once: each op of a file is cut for itself."""
    known = _facts.setdefault(graph, {})
    if subgraph.index in known:
        return known[subgraph.index]
    causes, fixed = dict[int, str](), set[int]()
    # Until it is known, for a composite that runs itself.
    known[subgraph.index] = _Facts({-1: "it runs itself"}, set(), set())
    computed = {i for i in subgraph.inputs if not subgraph.tensors[i].is_constant}
    computed |= {tensor.index for tensor in subgraph.tensors if tensor.is_variable}
    operators = _unpacked(graph).subgraphs[subgraph.index].operators
    for op in subgraph.ops:
        cause = _why_not_isolated(graph, op, operators[op.index], computed)
        if cause:
            causes[op.index] = cause
        elif op.name in _PREPARES and not any(index in computed for index in op.inputs):
            fixed.add(op.index)
            continue
        computed.update(index for index in op.outputs if index >= 0)
    known[subgraph.index] = _Facts(causes, fixed, computed)
    return known[subgraph.index]


def _why_not_isolated(graph: OpGraph, op: Op, raw: Any, computed: set[int]) -> str:
    """Return why an op cannot be isolated; empty if it can."""
    subgraph = graph.subgraphs[op.subgraph]
    options = (raw.builtinOptions, raw.builtinOptions2)
    parts = graph.decomposition(op)
    if parts is not None:
        if cause := next(iter(_facts_of(graph, parts).causes.values()), ""):
            return cause
    elif any("subgraph" in key.lower() for each in options if each for key in vars(each)):
        return "it runs other subgraphs"
    if facts_of(op.name).random:
        return "it returns other values in every run"
    if raw.largeCustomOptionsSize:
        return "its options lie behind the flatbuffer"
    operands = [subgraph.tensors[index] for index in op.inputs if index >= 0]
    results = [subgraph.tensors[index] for index in op.outputs if index >= 0]
    if any(tensor.is_variable for tensor in (*operands, *results)):
        return "it keeps state from run to run"
    for tensor in (*(t for t in operands if t.index in computed), *results):
        if tensor.dtype in ("resource", "variant"):
            return "it keeps state from run to run"
        if numpy_dtype(tensor.dtype) is None:
            return f"numpy holds no {tensor.dtype}"
    if any(tensor.is_external for tensor in operands):
        return "its constants lie in a file of their own"
    return "" if operands else "it takes nothing"


_facts: weakref.WeakKeyDictionary[OpGraph, dict[int, _Facts]] = weakref.WeakKeyDictionary()
_models: weakref.WeakKeyDictionary[OpGraph, Any] = weakref.WeakKeyDictionary()


def _unpacked(graph: OpGraph) -> Any:
    """Return a file's objects, cached and read-only: unpacking is slower than a small cut."""
    if graph not in _models:
        _models[graph] = unpacked(graph)
    return _models[graph]
