"""
The torch graph that a file's ops are matched to, run node by node.

Of a PT2E flow it is the simulated graph, which holds the float parameters as well; otherwise the
exported float model, with eval-mode batch norms folded into the layer in front as the converter
does it.
"""

from __future__ import annotations

import heapq
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_arg

from pytest_edgeq.localize.calls import Call, Values, straightened
from pytest_edgeq.localize.kinds import CLAMPS, HEAVY, VIEWS, base_name, is_dequantize, is_quantize
from pytest_edgeq.localize.programs import Program, Routine

__all__ = ["Reached", "ReferenceGraph", "export"]

Node = torch.fx.Node

# The file's values are read with their axes turned, which a view refuses.
_RESHAPED: dict[Any, Any] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}


@dataclass(frozen=True, slots=True, eq=False)
class Reached:
    """
    A node that can be computed from what a file's op takes.

    Attributes:
        node: The node.
        value: What it gives.
        heavy: How many matrix products lie on the way to it.
        sources: Which of the given values it depends on, a bit each.
    """

    node: Node
    value: Any
    heavy: int
    sources: int


class ReferenceGraph:
    """
    A torch graph whose nodes are run one by one, activations without their quantize nodes.

    Args:
        module: A graph module, exported or made by PT2E.
    """

    def __init__(self, module: torch.fx.GraphModule) -> None:
        self._module = module
        self.nodes = [node for node in module.graph.nodes if node.op != "call_module"]
        self._order = {node: position for position, node in enumerate(self.nodes)}
        self.placeholders = [node for node in self.nodes if node.op == "placeholder"]
        self._constants: dict[tuple[Node, bool, bool], Any] = {}
        self._passing = {n for n in self.nodes if is_quantize(n) or is_dequantize(n)}
        self._varying: set[Node] = set()
        for node in self.nodes:
            taken = any(n in self._varying for n in node.all_input_nodes)
            if node.op == "placeholder" or (taken and not self._is_zero(node)):
                self._varying.add(node)

    def _is_zero(self, node: Node) -> bool:
        """Whether it multiplies by zeros, as a recurrent layer does at first: no op is left."""
        example = node.meta.get("val")
        if base_name(node) not in ("mul", "mul_") or not isinstance(example, torch.Tensor):
            return False
        constants = [n for n in node.all_input_nodes if n not in self._varying]
        zeros = [n for n in constants if not torch.any(self.constant(n, quantized=False))]
        # Behind what PT2E quantizes a number is a factor of the file's, too.
        if not zeros and (0 not in node.args or is_dequantize(node.all_input_nodes[0])):
            return False
        for quantized in (False, True):
            value = torch.zeros(example.shape, dtype=example.dtype)
            self._constants[node, quantized, False] = value
        return True

    def order(self, node: Node) -> int:
        """Position in the order of execution."""
        return self._order[node]

    def kind(self, node: Node) -> str:
        """What the last node at or before this one that computes calls."""
        return base_name(self.computing(node))

    def computing(self, node: Node) -> Node:
        """The last node at or before this one that computes."""
        while (
            base_name(node) in CLAMPS | VIEWS or is_quantize(node) or is_dequantize(node)
        ) and self.varies(node.all_input_nodes[0]):
            if node.all_input_nodes[0].op == "placeholder":
                break
            node = node.all_input_nodes[0]
        return node

    def varies(self, node: Node) -> bool:
        """Whether it depends on the inputs, or the file computes it at each run."""
        return node in self._varying

    def origin(self, node: Node) -> Node:
        """Where a value comes from that this node may only hand on."""
        while self._hands_on(node):
            node = node.all_input_nodes[0]
        return node

    def _hands_on(self, node: Node) -> bool:
        return node in self._varying and (node in self._passing or _is_idle(node))

    def compute_anew(self, nodes: Iterable[Node]) -> None:
        """Take constants that the file computes at each run for what varies."""
        self._varying.update(nodes)

    def constant(self, node: Node, *, quantized: bool, double: bool = False) -> Any:
        """
        What a node gives that depends on no input.

        Args:
            node: The node.
            quantized: As the quantizer left it, else as the float model has it.
            double: In float64.
        """
        key = (node, quantized, double)
        if key not in self._constants:
            if double:
                value = _double(self.constant(node, quantized=quantized))
            elif node.op == "get_attr":
                value = operator.attrgetter(str(node.target))(self._module)
                value = value.detach() if isinstance(value, torch.Tensor) else value
            elif not quantized and node in self._passing:
                value = self.constant(node.all_input_nodes[0], quantized=False)
            else:
                value = self.call(node, (), quantized=quantized).run({})
            self._constants[key] = laid_out(node, value)
        return self._constants[key]

    def is_rounded(self, node: Node) -> bool:
        """Whether the quantizer has rounded what this constant is made of."""
        if is_dequantize(node):
            return True
        return any(map(self.is_rounded, node.all_input_nodes))

    def compute(
        self,
        node: Node,
        values: Mapping[Node, Any],
        *,
        quantized: bool,
        double: bool = False,
        weights: Mapping[Node, torch.Tensor] | None = None,
    ) -> Any:
        """
        Run one node.

        Activations pass their quantize nodes as they are: what a quantize node makes of a value is
        the file's to show.

        Args:
            node: The node.
            values: Of the nodes that it takes; constants may be left out.
            quantized: With the quantizer's parameters, else with the float model's.
            double: In float64.
            weights: Quantized parameters, for a graph that has none.
        """
        call = self.call(node, values, quantized=quantized, double=double, weights=weights)
        return call.run(values)

    def call(
        self,
        node: Node,
        given: Container[Node],
        *,
        quantized: bool,
        double: bool = False,
        weights: Mapping[Node, torch.Tensor] | None = None,
    ) -> Call:
        """
        Look up once what a node takes beside the values that are given.

        Args:
            node: The node.
            given: The nodes whose values it will be given.
            quantized: With the quantizer's parameters, else with the float model's.
            double: In float64.
            weights: Quantized parameters, for a graph that has none.
        """
        if self._hands_on(node):
            return Call(node, None, [node.all_input_nodes[0]], {})
        if node.op != "call_function":
            raise NotImplementedError(f"{node.op} node {node.name}")

        def look(argument: Node) -> Any:
            if argument in given:
                return argument
            if quantized and weights and argument in weights:
                return _double(weights[argument]) if double else weights[argument]
            return self.constant(argument, quantized=quantized, double=double)

        args, kwargs = map_arg(node.args, look), map_arg(node.kwargs, look)
        if double:
            args, kwargs = _widen(args), _widen(kwargs)
        function, mutating = _functional(_RESHAPED.get(node.target, node.target))
        return Call(node, function, list(args), dict(kwargs), mutating)

    def program(self, uses: Mapping[Node, int]) -> Program:
        """
        The float model, ready to run.

        Args:
            uses: How often each node's value will be taken from a run.
        """
        nodes = [n for n in self.nodes if n in self._varying and n.op == "call_function"]
        calls, held = straightened(
            (self.call(node, self._varying, quantized=False) for node in nodes), uses
        )
        left = Counter(taken for call in calls for taken in call.taken)
        for node, times in uses.items():
            left[held.get(node, node)] += times
        wanted = dict.fromkeys(held.get(node, node) for node in uses)
        routine = Routine(self.placeholders, calls, list(wanted))
        return Program(self.placeholders, calls, held, left, routine)

    def reach(
        self,
        given: Mapping[Node, Any],
        bits: Mapping[Node, int],
        heavy: int,
        weights: Mapping[Node, torch.Tensor],
        limit: int = 120,
    ) -> Iterator[Reached]:
        """
        Every node that can be computed from some values, in order.

        Args:
            given: The values.
            bits: Which source each of them comes from, a bit each.
            heavy: How many matrix products may lie on the way.
            weights: Quantized parameters, for a graph that has none.
            limit: How many nodes are looked at.
        """
        values: Values = dict(given)
        depth = dict.fromkeys(given, 0)
        sources = dict(bits)
        queue: list[int] = []
        seen = set(given)

        def push(node: Node) -> None:
            for user in node.users:
                # What multiplies by zeros is a constant, and no op stands for it.
                if user in seen or user.op != "call_function" or not self.varies(user):
                    continue
                if all(n in values or not self.varies(n) for n in user.all_input_nodes):
                    seen.add(user)
                    heapq.heappush(queue, self._order[user])

        for node in given:
            push(node)
        while queue and limit:
            node = self.nodes[heapq.heappop(queue)]
            taken = [n for n in node.all_input_nodes if n in values]
            at = max(depth[n] for n in taken) + HEAVY.get(base_name(node), 0)
            if at > heavy:
                continue
            values[node] = self.compute(node, values, quantized=True, weights=weights)
            depth[node] = at
            sources[node] = 0
            for n in taken:
                sources[node] |= sources[n]
            limit -= 1
            push(node)
            yield Reached(node, values[node], at, sources[node])

    def between(self, node: Node, given: set[Node]) -> list[Node]:
        """The nodes to run, in order, to get `node` from the given ones; constants left out."""
        found: set[Node] = set()
        stack = [node]
        while stack:
            each = stack.pop()
            if each in found or each in given or not self.varies(each):
                continue
            found.add(each)
            stack += each.all_input_nodes
        return sorted(found, key=self._order.__getitem__)

    def quantization(self, node: Node) -> tuple[float, int] | None:
        """Scale and zero point of a quantize node of one activation, else None."""
        if base_name(node) != "quantize_per_tensor" or not self.varies(node):
            return None
        given: Sequence[Any] = node.args[1:3]
        scale, zero_point = (
            self.constant(n, quantized=True) if isinstance(n, Node) else n for n in given
        )
        return float(scale), int(zero_point)


def _functional(target: Any) -> tuple[Callable[..., Any], bool]:
    """What gives the same without writing over what it takes, and whether there is no such op."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return target, False
    # torch calls what writes over its first argument as the op itself, and an underscore.
    name = schema.name.removeprefix("aten::")
    plain = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    other = getattr(plain, schema.overload_name or "default", None)
    return (target, True) if other is None else (other, False)


def _is_idle(node: Node) -> bool:
    """Whether it gives what it takes: padding by nothing, and what only training drops."""
    name = base_name(node)
    if name in ("pad", "constant_pad_nd"):
        amounts: Any = node.args[1]
        return not any(isinstance(each, Node) or each for each in amounts)
    return name in ("dropout", "dropout_") and node.args[2:] == (False,) and not node.kwargs


def laid_out(node: Node, value: Any) -> Any:
    """
    A constant, with its channels last in memory where it is the weight of 2-D convolutions alone.

    The file's images have them last, and oneDNN takes half the time where both are alike.
    """
    if not isinstance(value, torch.Tensor) or value.ndim != 4 or not node.users:
        return value
    if any(base_name(user) not in ("conv2d", "convolution") for user in node.users):
        return value
    return value.contiguous(memory_format=torch.channels_last)


def export(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.fx.GraphModule:
    """
    Export a float model for one sample's shapes.

    Raises:
        Exception: Whatever torch.export raises.
    """
    # Of one tensor that stands for two inputs torch makes one.
    args = tuple(each.clone() if isinstance(each, torch.Tensor) else each for each in args)
    kwargs = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    with warnings.catch_warnings():
        # Recurrent layers look their weights up anew; what is exported are the parameters.
        warnings.filterwarnings("ignore", "The tensor attributes? .*_flat_weights", UserWarning)
        program = torch.export.export(model, args, kwargs, strict=False)
    module = program.module()
    assert isinstance(module, torch.fx.GraphModule), "torch.export gives graph modules"
    return module


def _double(value: Any) -> Any:
    return (
        value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
    )


def _widen(arguments: Any) -> Any:
    if isinstance(arguments, (tuple, list)):
        return type(arguments)(_widen(each) for each in arguments)
    if isinstance(arguments, dict):
        return {key: _widen(each) for key, each in arguments.items()}
    return torch.float64 if arguments is torch.float32 else arguments
