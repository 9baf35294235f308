"""
Map tensor names of a converted file to the modules of the torch model.

litert-torch names a tensor after the stack of modules that its op was called in:
`pkg.Net/torch.nn.modules.container.Sequential_layer1/pkg.Block_0/…Conv2d_conv;`, one
`<class>_<last part of the attribute path>` a module, `;` behind each stack and a counter behind
the last `;` (litert_torch/backend/debuginfo/_build.py, 0.10).

- Names have underscores, and a container whose children are called one by one is not in the stack.
  So every reading that the live model allows is tried, and it counts only if one is left.
- An op that several torch ops were merged into has all their stacks, in an order that depends on
  the converter's rewrite. The order is used for two kinds only: elementwise functions, which
  precede the ops across which they were moved, and ops that one module's stacks enclose.
- The result of the graph is named after the output, not after a module.

If several modules are left that may have called the op, the result is None.

`litert_torch.generative.export_hf` wraps a language model and exchanges classes of its modules:
there the attributes alone name a module, see `ExportedModules`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.ops import CLAMPING, QDQ, facts_of
from pytest_edgeq.tflite.roles import StoredTensor, roles_of
from pytest_edgeq.tflite.subgraph import Op, Subgraph

_CLAMP_CLASSES = {f"torch.nn.modules.activation.{name}" for name in ("ReLU", "ReLU6", "Hardtanh")}

# torch's own layers without a matrix product, whatever is folded into them.
_WITHOUT_MATRIX = tuple(
    f"torch.nn.modules.{name}." for name in ("activation", "batchnorm", "dropout", "padding")
)
_WITH_MATRIX_ALL_THE_SAME = ("torch.nn.modules.activation.MultiheadAttention",)

# torch's own matrix layers.
_MATRIX_CLASSES = ("torch.nn.modules.conv.", "torch.nn.modules.linear.Linear")

# Its forward calls each child and nothing else.
_SEQUENTIAL = "torch.nn.modules.container.Sequential"


@dataclass(slots=True, eq=False)
class ModuleNode:
    """One module of the live model."""

    path: str  # as in `named_modules()`; `""` for the model itself
    attribute: str  # the last part of the path
    class_name: str  # full name of its class
    # `conv`, `conv_transpose`, `linear`, `embedding`, `prelu`, `list` (a container that cannot be
    # called), or None
    kind: str | None
    children: list[ModuleNode] = field(default_factory=list)  # its direct submodules

    @property
    def label(self) -> str:
        """The converter's name for it in a stack."""
        return f"{self.class_name}_{self.attribute}" if self.attribute else self.class_name


@dataclass(frozen=True, slots=True)
class _ModuleReading:
    """The modules that a tensor name refers to."""

    nodes: tuple[ModuleNode, ...] = ()  # the modules of its stacks, in the order written
    is_ambiguous: bool = False  # whether one of its stacks has no unique reading

    def paths(self) -> set[str]:
        return {node.path for node in self.nodes}


class ModulePaths(Protocol):
    """A mapping of ops to the torch modules that called them."""

    def path_of(self, graph: OpGraph, op: Op) -> str | None:
        """Return the module's path, or None if unknown."""


class SignatureModules:
    """The modules of a file with a model for each signature."""

    def __init__(self, trees: Mapping[str | None, ModuleTree]) -> None:
        self._trees = trees

    def path_of(self, graph: OpGraph, op: Op) -> str | None:
        """Return the module's path of an op in a signature's own subgraph."""
        keys = [each.key for each in graph.signatures if each.subgraph == op.subgraph]
        tree = self._trees.get(keys[0]) if keys else None
        return None if tree is None else tree.path_of(graph, op)


class ModuleTree:
    """A torch model's modules, by which names in a `.tflite` file are resolved."""

    def __init__(self, root: ModuleNode) -> None:
        self.root = root
        self._found: dict[tuple[int, str], list[tuple[ModuleNode, tuple[ModuleNode, ...]]]] = {}
        self._graph: OpGraph | None = None  # whose names are known
        self._known: dict[str, ModuleNode | None] = {}

    def __reduce__(self) -> tuple[type[ModuleTree], tuple[ModuleNode]]:
        """Leave out the cache, which is valid in this process only."""
        return ModuleTree, (self.root,)

    def path_of(self, graph: OpGraph, op: Op) -> str | None:
        """Return an op's module path, the first of several, as in `named_modules()`."""
        if graph is not self._graph:
            self._resolve(graph)
            self._graph = graph
        subgraph = graph.subgraphs[op.subgraph]
        reading = self._read(
            subgraph.tensors[i].name
            for i in op.outputs
            # The result's own name is the signature's.
            if i >= 0 and _stacks(subgraph.tensors[i].name)
        )
        kind = facts_of(op.name).module
        if kind is None:
            return self._without_weights(subgraph, op, reading)
        roles = roles_of(graph, op)
        for operands, needs_one_owner in ((roles.weights, False), (roles.biases, True)):
            stored = self._read_stored(graph, op, operands)
            if not stored.nodes and not stored.is_ambiguous:
                continue
            # A constant has the names of its own layer and of those folded into it.
            owners = {node.path: node.kind for node in stored.nodes if _has_matrix(node)}
            if owners and reading.nodes and not owners.keys() & reading.paths():
                return None
            of_kind = [path for path, owner in owners.items() if owner == kind]
            if (
                len(of_kind) == 1
                and not stored.is_ambiguous
                and (not needs_one_owner or len(owners) == 1)
            ):
                return of_kind[0] if not reading.nodes or of_kind[0] in reading.paths() else None
            break
        return _only(reading, [node for node in reading.nodes if _has_matrix(node)])

    def _resolve(self, graph: OpGraph) -> None:
        """Resolve the tensor names of a file."""
        called_whole: set[str] = set()
        names = (tensor.name for subgraph in graph.subgraphs for tensor in subgraph.tensors)
        stacks = {stack for name in names for stack in _stacks(name)}
        ways = {stack: self._readings(stack.split("/")) for stack in stacks}
        for readings in ways.values():
            if len({called[-1].path for called, _ in readings}) == 1:
                # A Sequential that was called as a whole has called its children itself.
                called_whole |= {
                    node.path for node in readings[0][0] if node.class_name == _SEQUENTIAL
                }
        self._known = {}
        for stack, readings in ways.items():
            left = {
                called[-1].path: called[-1]
                for called, left_out in readings
                if not left_out & called_whole
            }
            self._known[stack] = next(iter(left.values())) if len(left) == 1 else None

    def _readings(self, labels: Sequence[str]) -> list[tuple[tuple[ModuleNode, ...], set[str]]]:
        """Return every reading of a stack: modules called, and paths of modules left out."""
        if labels[0] != self.root.label:
            return []
        ways: list[tuple[tuple[ModuleNode, ...], set[str]]] = [((self.root,), set())]
        for label in labels[1:]:
            ways = [
                ((*called, node), left_out | {skipped.path for skipped in between})
                for called, left_out in ways
                for node, between in self._below(called[-1], label)
            ]
        return ways

    def _below(
        self, caller: ModuleNode, label: str
    ) -> list[tuple[ModuleNode, tuple[ModuleNode, ...]]]:
        """Return the submodules of this label that `caller` may call, and those between."""
        key = (id(caller), label)
        if key not in self._found:
            self._found[key] = list(
                _search(caller, label, (), direct=caller.class_name == _SEQUENTIAL)
            )
        return self._found[key]

    def _without_weights(self, subgraph: Subgraph, op: Op, reading: _ModuleReading) -> str | None:
        computed = all(i >= 0 and not subgraph.tensors[i].is_constant for i in op.inputs)
        left = [node for node in reading.nodes if _may_call(node, op.name, computed=computed)]
        if (
            left
            and not reading.is_ambiguous
            and op.fused_activation is None
            and facts_of(op.name).unary
        ):
            return left[0].path
        nodes = reading.nodes
        if op.fused_activation is not None and len(nodes) == 3 and nodes[0].path == nodes[2].path:
            # The activation's caller, where its lowering was first traced, and the op's caller:
            # `layer1.0;;(the model's first relu);;layer1.0`.
            return None if reading.is_ambiguous else nodes[0].path
        return _only(reading, left)

    def _read(self, names: Iterable[str]) -> _ModuleReading:
        nodes: list[ModuleNode] = []
        is_ambiguous = False
        for name in names:
            for stack in _stacks(name):
                if stack not in self._known:
                    is_ambiguous = True
                    continue
                node = self._known[stack]
                is_ambiguous = is_ambiguous or node is None
                nodes += [] if node is None else [node]
        return _ModuleReading(tuple(nodes), is_ambiguous)

    def _read_stored(
        self, graph: OpGraph, op: Op, operands: Iterable[StoredTensor]
    ) -> _ModuleReading:
        """
        Read the names of constants that only this op uses.

        A constant that two layers share has the name of one of them. PT2E's weights are named after
        the export's wrapper, and are ignored.
        """
        consumers = graph.subgraphs[op.subgraph].consumers
        names = [
            stored.tensor.name
            for stored in operands
            if len({each.index for each in consumers[stored.tensor.index]}) < 2
        ]
        return self._read(
            name
            for name in names
            if any(self._readings(stack.split("/")[:1]) for stack in _stacks(name))
        )


class ExportedModules:
    """
    The modules of a language model in a file of `litert_torch.generative.export_hf`.

    With a model's tree paths are as in `named_modules()`. Without one they are those of the names,
    which leave out lists: that of the decoder layers is assumed to be `layers`.
    """

    def __init__(self, tree: ModuleTree | None = None) -> None:
        self._tree = tree
        self._paths = {} if tree is None else dict(_paths_without_lists(tree.root, ()))
        self._graph: OpGraph | None = None  # whose ops are known
        self._known: dict[tuple[int, int], str | None] = {}

    def __reduce__(self) -> tuple[type[ExportedModules], tuple[ModuleTree | None]]:
        """Leave out the cache, which is valid in this process only."""
        return ExportedModules, (self._tree,)

    def path_of(self, graph: OpGraph, op: Op) -> str | None:
        """Return the path of an op's module in the model that was exported."""
        if graph is not self._graph:
            self._graph, self._known = graph, {}
            for subgraph in graph.subgraphs:
                self._resolve(graph, subgraph)
        return self._known[op.subgraph, op.index]

    def _resolve(self, graph: OpGraph, subgraph: Subgraph) -> None:
        """Find the modules of a subgraph's ops, in order."""
        layers = set[str]()  # whose ops with weights are known
        logits = {
            each.tensor.index
            for signature in graph.signatures
            for each in signature.outputs
            if signature.subgraph == subgraph.index and each.name == "logits"
        }
        for op in subgraph.ops:
            path: str | None
            has_weights = facts_of(op.name).module is not None
            operands = [each.tensor for each in roles_of(graph, op).weights] if has_weights else []
            results = [subgraph.tensors[i] for i in op.outputs if i >= 0]
            stacks = [stack for each in (*operands, *results) for stack in _stacks(each.name)]
            paths = [path for stack in stacks if (path := self._path(stack)) is not None]
            if has_weights and not paths and op.outputs[0] in logits:
                path = "lm_head"  # tied to the embedding: its weight has no name of its own
            elif has_weights:
                # A product is named after the first traced one as well, and a caller of it.
                own = [p for p in paths if not any(each.startswith(f"{p}.") for each in paths)]
                path = next((p for p in own if p not in layers), next(iter(own), None))
                layers.update([] if path is None else [path])
            elif paths:
                path = paths[0]  # those behind it are of ops that were traced before it
            else:
                makers = (subgraph.producer.get(i) for i in op.inputs)
                known = (self._known[op.subgraph, m.index] for m in makers if m is not None)
                path = next((each for each in known if each is not None), None)
            self._known[op.subgraph, op.index] = path

    def _path(self, stack: str) -> str | None:
        labels = stack.split("/")
        if not labels[0].startswith(_EXPORTER):
            return None
        models = [at for at, label in enumerate(labels) if _MODEL.search(label)]
        if not models and len(labels) > 1:
            return None
        found = map(_LABEL.fullmatch, labels[models[0] + 1 :] if models else [])
        pairs = [each.groups() for each in found if each is not None]
        called = tuple(attribute for _, attribute in pairs)
        listed = (f"layers.{each}" if owner.endswith("Layer") else each for owner, each in pairs)
        return self._paths.get(called) or ".".join(listed)


_EXPORTER = "litert_torch.generative.export_hf."
_MODEL = re.compile(r"For(CausalLM|ConditionalGeneration)_")
_LABEL = re.compile(r"(.*?)_([a-z0-9_]+)")  # class and attribute


def exported_modules(graph: OpGraph, tree: ModuleTree | None = None) -> ExportedModules | None:
    """Return the modules of a file of `export_hf` by their names; None for other files."""
    names = (tensor.name for subgraph in graph.subgraphs for tensor in subgraph.tensors)
    stacks = (stack for name in names for stack in _stacks(name))
    found = any(stack.startswith(_EXPORTER) and _MODEL.search(stack) for stack in stacks)
    return ExportedModules(tree) if found else None


def _paths_without_lists(
    node: ModuleNode, called: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield paths by the attributes of the modules that are called."""
    yield called, node.path
    for each in node.children:
        yield from _paths_without_lists(
            each, called if each.kind == "list" else (*called, each.attribute)
        )


def _search(
    node: ModuleNode, label: str, between: tuple[ModuleNode, ...], *, direct: bool
) -> Iterable[tuple[ModuleNode, tuple[ModuleNode, ...]]]:
    for child in node.children:
        if child.label == label:
            yield child, between
        if not direct:
            # A list cannot be called, so it is never missing from a stack.
            left_out = between if child.kind == "list" else (*between, child)
            yield from _search(child, label, left_out, direct=False)


def _stacks(name: str) -> list[str]:
    # Behind the last `;` are a counter and a suffix of ai-edge-quantizer.
    return [stack for stack in name.split(";")[:-1] if stack and not stack.isdigit()]


def _only(reading: _ModuleReading, left: Sequence[ModuleNode]) -> str | None:
    paths = {node.path for node in left}
    return next(iter(paths)) if len(paths) == 1 and not reading.is_ambiguous else None


def _has_matrix(node: ModuleNode) -> bool:
    return (
        not node.class_name.startswith(_WITHOUT_MATRIX)
        or node.class_name in _WITH_MATRIX_ALL_THE_SAME
    )


def _may_call(node: ModuleNode, op: str, *, computed: bool) -> bool:
    if node.class_name in _CLAMP_CLASSES:
        return op in CLAMPING or op in QDQ
    if node.class_name.startswith(_MATRIX_CLASSES):
        facts = facts_of(op)
        never = facts.unary or facts.not_in_layers == "ever"
        return not never and not (computed and facts.not_in_layers == "computed")
    return True
