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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.node import map_arg

from pytest_edgeq.localize.kinds import HEAVY, base_name

__all__ = ["Reached", "ReferenceGraph", "export"]

Node = torch.fx.Node
Values = dict[Node, Any]

_QUANTIZE = ("quantize_per_tensor", "quantize_per_channel", "quantize_per_token")
_DEQUANTIZE = ("dequantize_per_tensor", "dequantize_per_channel", "dequantize_per_token")

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
        self.outputs = _leaves(next(n for n in self.nodes if n.op == "output").args)
        self._constants: dict[tuple[Node, bool, bool], Any] = {}
        self._passing = {n for n in self.nodes if base_name(n) in (*_QUANTIZE, *_DEQUANTIZE)}
        self._mutating = {
            n
            for n in self.nodes
            if getattr(getattr(n.target, "_schema", None), "is_mutable", False)
        }
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
        for each in node.all_input_nodes:
            if each not in self._varying and not torch.any(self.constant(each, quantized=False)):
                for quantized in (False, True):
                    zeros = torch.zeros(example.shape, dtype=example.dtype)
                    self._constants[node, quantized, False] = zeros
                return True
        return False

    def order(self, node: Node) -> int:
        """Position in the order of execution."""
        return self._order[node]

    def varies(self, node: Node) -> bool:
        """Whether it depends on the inputs."""
        return node in self._varying

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
            elif not quantized and base_name(node) in (*_QUANTIZE, *_DEQUANTIZE):
                value = self.constant(node.all_input_nodes[0], quantized=False)
            else:
                value = self._call(node, lambda n: self.constant(n, quantized=quantized))
            self._constants[key] = laid_out(node, value)
        return self._constants[key]

    def is_rounded(self, node: Node) -> bool:
        """Whether the quantizer has rounded what this constant is made of."""
        if base_name(node) in _DEQUANTIZE:
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
        if node in self._passing:
            return values[node.all_input_nodes[0]]

        def look(argument: Node) -> Any:
            if argument in values:
                return values[argument]
            if quantized and weights and argument in weights:
                return _double(weights[argument]) if double else weights[argument]
            return self.constant(argument, quantized=quantized, double=double)

        return self._call(node, look, double=double)

    def _call(self, node: Node, look: Callable[[Node], Any], *, double: bool = False) -> Any:
        if node.op != "call_function":
            raise NotImplementedError(f"{node.op} node {node.name}")
        mutable = node in self._mutating

        def value(argument: Node) -> Any:
            found = look(argument)
            return found.clone() if mutable and isinstance(found, torch.Tensor) else found

        args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
        if double:
            args, kwargs = _widen(args), _widen(kwargs)
        with torch.no_grad():
            return _RESHAPED.get(node.target, node.target)(*args, **kwargs)

    def run(self, inputs: Sequence[Any], wanted: set[Node]) -> dict[Node, Any]:
        """
        Run the float model once and keep what is wanted.

        Args:
            inputs: One for each placeholder.
            wanted: Nodes whose values are given back.
        """
        last = {n: node for node in self.nodes for n in node.all_input_nodes}
        values: Values = dict(zip(self.placeholders, inputs, strict=True))
        kept = {node: values[node] for node in wanted if node in values}
        for node in self.nodes:
            if node.op in ("placeholder", "output") or node not in self._varying:
                continue
            values[node] = self.compute(node, values, quantized=False)
            if node in wanted:
                kept[node] = values[node]
            for used in node.all_input_nodes:
                if last[used] is node:
                    values.pop(used, None)
        return kept

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
                if user in seen or user.op != "call_function":
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

    def quantization(self, node: Node) -> tuple[float, int, str] | None:
        """Scale, zero point and dtype of a quantize node of one activation, else None."""
        if base_name(node) != "quantize_per_tensor" or not self.varies(node):
            return None
        given: Sequence[Any] = node.args[1:3]
        scale, zero_point = (
            self.constant(n, quantized=True) if isinstance(n, Node) else n for n in given
        )
        dtype = str(node.args[-1] if len(node.args) > 5 else node.kwargs["dtype"])
        return float(scale), int(zero_point), dtype.removeprefix("torch.")


def is_quantize(node: Node) -> bool:
    """Whether it turns floats to codes."""
    return base_name(node) in _QUANTIZE


def is_dequantize(node: Node) -> bool:
    """Whether it turns codes to floats."""
    return base_name(node) in _DEQUANTIZE


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
    Export a float model for one sample's shapes, with its batch norms folded.

    Raises:
        Exception: Whatever torch.export raises.
    """
    with warnings.catch_warnings():
        # Recurrent layers look their weights up anew; what is exported are the parameters.
        warnings.filterwarnings("ignore", "The tensor attributes? .*_flat_weights", UserWarning)
        program = torch.export.export(model, args, dict(kwargs), strict=False)
    module = program.module()
    assert isinstance(module, torch.fx.GraphModule), "torch.export gives graph modules"
    _fold_batch_norms(module)
    return module


def _fold_batch_norms(module: torch.fx.GraphModule) -> None:
    """Fold a batch norm into the convolution or linear layer in front, where that has one user."""
    from torch.nn.utils import fusion

    for node in list(module.graph.nodes):
        if base_name(node) != "batch_norm" or node.args[5]:
            continue
        layer = node.args[0]
        name = base_name(layer)
        if name not in _FOLDABLE or len(layer.users) > 1:
            continue
        weight, bias = layer.args[1], layer.args[2] if len(layer.args) > 2 else None
        constants = [weight, *([bias] if bias is not None else []), *node.args[1:5]]
        if any(each is not None and each.op != "get_attr" for each in constants):
            continue
        held: list[Any] = [
            None if n is None else operator.attrgetter(n.target)(module) for n in node.args[1:5]
        ]
        own = operator.attrgetter(weight.target)(module)
        own_bias = None if bias is None else operator.attrgetter(bias.target)(module)
        gamma, beta, mean, variance = held
        eps: Any = node.args[7]
        if name == "linear":
            new = fusion.fuse_linear_bn_weights(own, own_bias, mean, variance, eps, gamma, beta)
        else:
            new = fusion.fuse_conv_bn_weights(
                own,
                own_bias,
                mean,
                variance,
                eps,
                gamma,
                beta,
                transpose=name.startswith("conv_transpose"),
            )
        taken = []
        for value, kind in zip(new, ("weight", "bias"), strict=True):
            attribute = f"{layer.name}_folded_{kind}"
            module.register_buffer(attribute, value.detach())
            with module.graph.inserting_before(layer):
                taken.append(module.graph.get_attr(attribute))
        layer.args = (layer.args[0], *taken, *layer.args[3:])
        node.replace_all_uses_with(layer)
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()


_FOLDABLE = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "linear")


def _leaves(value: Any) -> list[Node]:
    found: list[Node] = []
    map_arg(value, lambda node: found.append(node))
    return found


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
