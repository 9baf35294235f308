"""
Which ops of a file run on the GPU, found by compiling the file, and single ops of it.

The engine prints the ops that it does not support by name and reason, and how many ops it runs. It
runs only one group of connected supported ops, as TFLite partitions a graph. Which one is computed
here, and stated only if its size agrees with the engine's number.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pytest_edgeq.errors import CrashedError, UnrunnableError
from pytest_edgeq.names import GPU_KERNELS, printable
from pytest_edgeq.numerics.findings import Place, aligned
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.runtimes.engines import Opening
from pytest_edgeq.runtimes.workers.gpu_engine import GpuEngine, shared_ops
from pytest_edgeq.tflite.cut import cut_ops
from pytest_edgeq.tflite.subgraph import Op, Subgraph

RunsOn = Literal["GPU", "CPU", "unknown", "nothing"]

_TEXTS: Final = {"GPU": "on the GPU", "CPU": "on the CPU", "unknown": "not known"}

_REFUSED: Final = "the engine rejects the whole file"
_NO_REASON: Final = "the engine does not support it and names no reason"
_SMALLER: Final = (
    "supported, but unsupported ops split the graph, and only the largest part runs on the GPU"
)
_EQUAL: Final = (
    "supported, but unsupported ops split the graph into parts of equal size, and only one of them "
    "runs on the GPU"
)
_UNCLEAR: Final = "supported, but the engine does not say which of the supported ops it runs"

SUPPORTED: Final = (_SMALLER, _EQUAL, _UNCLEAR)
"""Reasons of ops that the engine supports, and does not run, or may not run."""

_UNSUPPORTED: Final = re.compile(
    r"not supported by GPU delegate:\n(.*?)\n[^\n]* operations will", re.S
)

_TENSOR: Final = re.compile(r" ((in|out)_\d+_\d+|constant_\d+)$")
"""The name of a tensor, in a file in which ops are isolated."""


@dataclass(frozen=True, slots=True)
class OpDelegation:
    """
    Where one op runs.

    Attributes:
        place: The op, with its torch module where known.
        runs_on: `GPU`, `CPU`, `unknown`, or `nothing` in a file that the engine rejects.
        words: Why it does not run on the GPU: the engine's message if it does not support the op.
    """

    place: Place
    runs_on: RunsOn
    words: str = ""

    def __str__(self) -> str:
        """Return `on the GPU`, or `on the CPU: ` and why."""
        return ": ".join(filter(None, (_TEXTS.get(self.runs_on, ""), self.words)))


@dataclass(frozen=True, slots=True)
class Delegation:
    """
    Which ops of a file run on the GPU, and why others do not; `str` is a table of them.

    Attributes:
        runtime: The runtime that compiled the file.
        ops: All ops, in the order of the op-dtype map.
        n_on_gpu: How many ops run on the GPU, by the engine's own count.
        refusal: Why the engine rejects the whole file; None if it does not.
    """

    runtime: str
    ops: tuple[OpDelegation, ...]
    n_on_gpu: int
    refusal: UnrunnableError | None = field(default=None, compare=False)

    @property
    def not_on_gpu(self) -> tuple[OpDelegation, ...]:
        """The ops that do not run on the GPU, or may not."""
        return tuple(each for each in self.ops if each.runs_on != "GPU")

    @property
    def reasons(self) -> list[str]:
        """The number of ops on the GPU, and the reasons of the others; or the refusal."""
        if self.refusal is not None:
            return str(self.refusal).splitlines()
        ops: dict[str, list[str]] = {}
        for each in sorted(self.not_on_gpu, key=lambda each: each.words in SUPPORTED):
            ops.setdefault(str(each), []).append(str(each.place))
        count = f"{self.runtime}: {self.n_on_gpu} of {len(self.ops)} ops run on the GPU"
        return [count, *(f"{runs} ({', '.join(names)})" for runs, names in ops.items())]

    def to_dict(self) -> dict[str, Any]:
        """Return a sorted, JSON-able dict."""
        return {
            "n_on_gpu": self.n_on_gpu,
            "ops": [
                {"op": str(each.place), "runs_on": each.runs_on, "words": each.words}
                for each in self.ops
            ],
            "refusal": None if self.refusal is None else str(self.refusal),
            "runtime": self.runtime,
        }

    def __str__(self) -> str:
        """Return the count and a line for each op, or the refusal."""
        if self.refusal is not None:
            return str(self.refusal)
        rows = [("op", "module", "runs")]
        for each in self.ops:
            name = str(each.place._replace(module=None))
            rows.append((name, each.place.module or "-", str(each)))
        return "\n".join((self.reasons[0], *aligned(rows, indent="  ")))


def delegation_of(edge: EdgeFile, runtime: str) -> Delegation:
    """
    Return which ops run on the GPU, found once for a file and a runtime.

    Raises:
        ValueError: The runtime is unknown, or does not run on a GPU.
        UnrunnableError: There is no GPU, or its process ended.
    """
    if edge.runtimes.kernels_of(edge.runtimes.check(runtime)) not in GPU_KERNELS:
        known = [each for each in edge.runtimes.names if each.endswith(GPU_KERNELS)]
        raise ValueError(f"the {runtime} runtime does not use a GPU; these do: {', '.join(known)}")
    edge = edge.at(edge.signatures[0].key)
    opening = edge.opening(runtime)
    if runtime not in edge.delegations:
        edge.delegations[runtime] = _delegation(edge, opening)
    return edge.delegations[runtime]


def _delegation(edge: EdgeFile, opening: Opening) -> Delegation:
    runtime = opening.runtime
    places = [entry.place for entry in edge.op_dtypes]
    printed, is_compiled = _compile(opening)
    shared = shared_ops(printed)
    n_on_cpu = sum(on_cpu for _, on_cpu in shared)
    if not is_compiled and n_on_cpu < len(places):
        try:
            edge.runner(runtime)
        except CrashedError:
            raise
        except UnrunnableError as refusal:
            nowhere = tuple(OpDelegation(place, "nothing", _REFUSED) for place in places)
            return Delegation(runtime, nowhere, 0, refusal)
    refused = _unsupported_ops(opening, unsupported(printed))
    states = delegated(edge.graph.subgraphs, refused, shared)
    ops = (OpDelegation(place, *state) for place, state in zip(places, states, strict=True))
    return Delegation(runtime, tuple(ops), len(places) - n_on_cpu)


def _compile(opening: Opening) -> tuple[str, bool]:
    """Compile a file; return what the engine printed, and whether it can run the file."""
    assert opening.target is not None, "a GPU is that of a target"
    try:
        return GpuEngine(opening, opening.target).printed, True
    except UnrunnableError:
        raise
    except RuntimeError as error:
        return str(error), False


def _unsupported_ops(opening: Opening, names: Container[str]) -> dict[Op, str]:
    """Return the unsupported ops of these names with the engine's messages, if isolated ones."""
    graph = opening.graph
    found: dict[Op, str] = {}
    for op in (each for each in graph.ops if each.name in names):
        cut = cut_ops(graph, op.subgraph, wanted={op.index})
        if all(isolated is not op for isolated, _ in cut.outputs):
            continue  # it is computed from constants
        said = unsupported(_compile(opening.of_copy(cut.content))[0])
        if op.name in said:
            found[op] = said[op.name]
    return found


def unsupported(printed: str) -> dict[str, str]:
    """Return the engine's messages, by the names of the ops that it does not support."""
    found: dict[str, dict[str, None]] = {}
    for lines in _UNSUPPORTED.findall(printed):
        for line in lines.splitlines():
            name, _, words = line.partition(":")
            reason = printable(_TENSOR.sub("", words.strip())) or _NO_REASON
            found.setdefault(name, {})[reason] = None
    return {name: "; ".join(reasons) for name, reasons in found.items()}


def delegated(
    subgraphs: Sequence[Subgraph],
    refused: Mapping[Op, str],
    shared: Sequence[tuple[int, int]],
) -> list[tuple[RunsOn, str]]:
    """
    Return where each op runs, and why, from the unsupported ops and the engine's messages.

    `shared` has the numbers of ops on the GPU and on the CPU of each subgraph that is split. They
    differ from those of the groups if not all unsupported ops are known.
    """
    largest: dict[int, list[frozenset[Op]]] = {}
    counts = []
    for subgraph in subgraphs:
        if not refused.keys().isdisjoint(subgraph.ops):
            groups = supported_groups(subgraph, refused)
            size = max(map(len, groups), default=0)
            largest[subgraph.index] = [each for each in groups if len(each) == size]
            counts.append((size, len(subgraph.ops) - size))
    is_known = counts == shared

    def state(op: Op) -> tuple[RunsOn, str]:
        if op in refused:
            return "CPU", refused[op]
        if not is_known:
            return "unknown", _UNCLEAR
        groups = largest.get(op.subgraph)
        if groups is None:
            return "GPU", ""
        if not any(op in group for group in groups):
            return "CPU", _SMALLER
        return ("unknown", _EQUAL) if len(groups) > 1 else ("GPU", "")

    return [state(op) for subgraph in subgraphs for op in subgraph.ops]


def supported_groups(subgraph: Subgraph, refused: Container[Op]) -> list[frozenset[Op]]:
    """
    Return the groups of supported ops, as TFLite's partitioning makes them.

    From the first op whose operands are ready, a group has all ops of the same kind (supported or
    not) that can be computed without an op of the other kind; then follows a group of the other.
    """
    left, ready = list(subgraph.ops), set(range(len(subgraph.tensors))) - {*subgraph.producer}
    groups = []
    while left:
        kind: bool | None = None
        group, later = [], []
        for op in left:
            is_ready = all(at < 0 or at in ready for at in op.inputs)
            if is_ready and kind in (None, op in refused):
                kind = op in refused
                group.append(op)
                ready.update(op.outputs)
            else:
                later.append(op)
        if not group:
            break  # a cycle, of which no order is known
        if not kind:
            groups.append(frozenset(group))
        left = later
    return groups
