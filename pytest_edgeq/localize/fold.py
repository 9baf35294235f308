"""Constants beside a layer that the converter folds into its weight and bias, or does not."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx.node import map_arg

from pytest_edgeq.localize.kinds import IDENTITIES, VIEWS, base_name, is_heavy
from pytest_edgeq.localize.layouts import to_file_layout
from pytest_edgeq.localize.moves import MOVING
from pytest_edgeq.localize.stored import read_constant
from pytest_edgeq.tflite.graph import Op, OpGraph
from pytest_edgeq.tflite.roles import roles_of, stored_constant

__all__ = [
    "fold_batch_norms",
    "fold_in_front",
    "fold_signs",
    "is_subtracted",
    "join_biases",
    "move_biases",
    "sliced_joins",
    "turn_products",
]

Node = torch.fx.Node
_Stored = list[tuple[np.ndarray, "np.ndarray | None"]]
_Parts = tuple[Node, torch.Tensor, torch.Tensor, tuple[Node, ...], bool]
_Behind = tuple[torch.Tensor, torch.Tensor]

_PASSES_ON = ("dropout", "contiguous", "clone", "alias", "detach")


_FOLDABLE = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "linear")


def fold_batch_norms(module: torch.fx.GraphModule, graph: OpGraph, subgraph: int) -> None:
    """
    Fold a batch norm into the convolution or linear layer in front, wherever the file has it so.

    Behind a 1-D convolution, whose result is laid out anew, the converter leaves it alone.

    Args:
        module: An exported graph, changed in place.
        graph: The file.
        subgraph: Index of the subgraph.
    """
    stored = [*_layers(graph, subgraph)]
    for node in list(module.graph.nodes):
        if base_name(node) != "batch_norm" or node.args[5]:
            continue
        layer = node.args[0]
        if base_name(layer) not in _FOLDABLE or len(layer.users) > 1:
            continue
        bias = layer.args[2] if len(layer.args) > 2 else None
        given = [layer.args[1], *([bias] if bias is not None else []), *node.args[1:5]]
        held = [None if each is None else _attribute(module, each) for each in given]
        if any(each is not None and own is None for each, own in zip(given, held, strict=True)):
            continue
        new = _fused(node, held[0], held[1] if bias is not None else None, tuple(held[-4:]))
        if _stands_alone(layer, held[0], new[0], stored):
            continue
        taken = [
            _new_constant(module, layer, f"folded_{kind}", value.detach())
            for value, kind in zip(new, ("weight", "bias"), strict=True)
        ]
        layer.args = (layer.args[0], *taken, *layer.args[3:])
        node.replace_all_uses_with(layer)
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()


def turn_products(module: torch.fx.GraphModule) -> None:
    """
    Let addmm(b, x, W) of parameters be linear(x, Wᵀ, b): what is folded into one is into the other.

    Args:
        module: A graph whose parameters are attributes; changed in place.
    """
    for node in list(module.graph.nodes):
        if base_name(node) != "addmm" or len(node.args) != 3 or node.kwargs:
            continue
        bias, value, weight = node.args
        own, own_bias = (_attribute(module, each) for each in (weight, bias))
        if own is None or own_bias is None or own_bias.ndim != 1:
            continue
        turned = _new_constant(module, node, "turned_weight", own.t().contiguous())
        with module.graph.inserting_before(node):
            linear = module.graph.call_function(
                torch.ops.aten.linear.default, (value, turned, bias)
            )
        linear.meta.update(node.meta)
        node.replace_all_uses_with(linear)
        module.graph.erase_node(node)


def _fused(
    node: Node, weight: Any, bias: Any, norm: tuple[Any, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's weight and bias with its batch norm in them."""
    from torch.nn.utils import fusion

    gamma, beta, mean, variance = norm
    eps: Any = node.args[7]
    kind = base_name(node.args[0])
    if kind == "linear":
        return fusion.fuse_linear_bn_weights(weight, bias, mean, variance, eps, gamma, beta)
    turned = kind.startswith("conv_transpose")
    return fusion.fuse_conv_bn_weights(
        weight, bias, mean, variance, eps, gamma, beta, transpose=turned
    )


def _stands_alone(layer: Node, own: Any, folded: torch.Tensor, stored: list[_Layer]) -> bool:
    """Whether the file has a layer's batch norm as ops of its own."""
    found: list[tuple[float, float, float, bool]] = []
    for each in stored:
        apart = [_laid_apart(each, weight, base_name(layer)) for weight in (own, folded)]
        if min(apart) < math.inf:
            found.append((min(apart), apart[0], apart[1], each.scaled))
    if not found:
        return False
    _, plain, fused, scaled = min(found)
    # A norm that hardly changes the weight is told by what stands behind the layer.
    clear = max(plain, fused) > 4 * min(plain, fused)
    return plain < fused if clear else scaled


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """A matrix product of the file: its op, its weight, whether a MUL scales its result."""

    op: str
    weight: np.ndarray
    scaled: bool


def _layers(graph: OpGraph, subgraph: int) -> Iterator[_Layer]:
    whole = graph.subgraphs[subgraph]
    users: dict[int, list[Op]] = {}
    for op in whole.ops:
        for index in op.inputs:
            users.setdefault(index, []).append(op)
    for op in whole.ops:
        weights = [each for each in roles_of(graph, op).weights if each.tensor.is_constant]
        if not is_heavy(op.name) or len(weights) != 1 or weights[0].tensor.is_sparse:
            continue
        behind = users.get(op.outputs[0], [])
        while len(behind) == 1 and behind[0].name in IDENTITIES:
            behind = users.get(behind[0].outputs[0], [])
        scaled = any(
            each.name == "MUL" and any(stored_constant(whole, i) is not None for i in each.inputs)
            for each in behind
        )
        yield _Layer(op.name, read_constant(graph, op, weights[0]).floats, scaled)


def _laid_apart(layer: _Layer, weight: torch.Tensor, kind: str) -> float:
    """How far a weight is from one of the file's, in shares of its size."""
    laid_out = to_file_layout(layer.op, weight.double().numpy(), layer.weight.shape, torch_op=kind)
    return min((_share(layer.weight - each, each) for each in laid_out), default=math.inf)


def sliced_joins(graph: OpGraph, subgraph: int) -> set[tuple[int, int]]:
    """How many elements joins and slices have where the file slices the join, as torch does."""
    whole = graph.subgraphs[subgraph]
    slices = (op for op in whole.ops if op.name in ("SLICE", "STRIDED_SLICE"))
    makers = ((op, whole.producer.get(op.inputs[0])) for op in slices)
    return {
        (
            math.prod(whole.tensors[op.inputs[0]].shape),
            math.prod(whole.tensors[op.outputs[0]].shape),
        )
        for op, maker in makers
        if maker is not None and maker.name == "CONCATENATION"
    }


def move_biases(module: torch.fx.GraphModule, graph: OpGraph, subgraph: int) -> None:
    """
    Let (x·W + b) + c be x·W + (b + c) wherever the file has it so.

    The converter sums the two constants up, and leaves the layer without a bias: a linear one, or a
    convolution in front of a map of positions.

    Args:
        module: A graph whose parameters are attributes; changed in place.
        graph: The file.
        subgraph: Index of the subgraph.
    """
    stored = [*_added(graph, subgraph)]
    for node in list(module.graph.nodes):
        if base_name(node) != "add" or len(node.args) != 2:
            continue
        for value, other in (node.args, node.args[::-1]):
            constant, layer = _computed(module, other), _linear_above(value)
            held, spatial = stored, 0
            if _is_convolution(value):
                layer, spatial = value, len(_shape(value) or ()) - 2
                held = [np.moveaxis(each, -1, 1) for each in stored if each.ndim == spatial + 2]
            if constant is None or layer is None:
                continue
            bias = _attribute(module, layer.args[2]) if len(layer.args) > 2 else None
            if bias is None or len(layer.users) > 1 or not bias.any():
                continue
            summed = constant + bias.reshape(-1, *[1] * spatial)
            if _nearest(summed, held) < _nearest(constant, held):
                layer.args = (*layer.args[:2], None, *layer.args[3:])
                node.args = (value, _new_constant(module, node, "moved_bias", summed))
                break


def join_biases(module: torch.fx.GraphModule, graph: OpGraph, subgraph: int) -> None:
    """
    Let x·W + c be linear(x, Wᵀ, c) wherever the file has it so: c is a number or one a feature.

    Args:
        module: A graph whose parameters are attributes; changed in place.
        graph: The file.
        subgraph: Index of the subgraph.
    """
    stored, added = list(_stored(graph, subgraph)), [*_added(graph, subgraph)]
    for node in list(module.graph.nodes):
        if base_name(node) != "add" or len(node.args) != 2 or node.kwargs:
            continue
        for product, other in (node.args, node.args[::-1]):
            weight = _product_weight(module, product)
            bias = None if weight is None else _as_bias(module, other, weight.shape[0])
            if weight is None or bias is None or _shape(product) != _shape(node):
                continue
            apart = _apart(weight, torch.zeros_like(bias), stored)
            beside = min(_nearest(bias, added), _nearest(bias[:1], added)) < _ALIKE
            if _apart(weight, bias, stored) < apart or (apart < _ALIKE and not beside):
                _join(module, node, product, weight, bias)
                break
    module.graph.eliminate_dead_code()


def _product_weight(module: torch.fx.GraphModule, node: Any) -> torch.Tensor | None:
    """The matrix, as a linear layer has it, of a product that no other node takes."""
    if not isinstance(node, Node) or len(node.users) > 1 or len(node.args) != 2:
        return None
    if base_name(node) not in ("linear", "matmul", "mm"):
        return None
    own: torch.Tensor | None = _laid_out_constant(module, node.args[1])
    if own is None or own.ndim != 2:
        return None
    return own if base_name(node) == "linear" else own.t().contiguous()


def _as_bias(module: torch.fx.GraphModule, other: Any, size: int) -> torch.Tensor | None:
    """What is added, one a feature; None of what is not one number or one a feature."""
    if isinstance(other, (int, float)):
        return torch.full((size,), float(other))
    own = _computed(module, other)
    if own is None or own.numel() not in (1, size) or (own.ndim and own.shape[-1] != own.numel()):
        return None
    bias: torch.Tensor = own.reshape(-1).expand(size).clone()
    return bias


def _shape(node: Any) -> tuple[int, ...] | None:
    example = node.meta.get("val") if isinstance(node, Node) else None
    return tuple(example.shape) if isinstance(example, torch.Tensor) else None


def _join(
    module: torch.fx.GraphModule,
    node: Node,
    product: Any,
    weight: torch.Tensor,
    bias: torch.Tensor,
) -> None:
    constants = [
        _new_constant(module, node, f"joined_{kind}", value)
        for kind, value in (("weight", weight), ("bias", bias))
    ]
    linear: Any = torch.ops.aten.linear.default
    with module.graph.inserting_before(node):
        joined = module.graph.call_function(linear, (product.args[0], *constants))
    joined.meta.update(product.meta)
    node.replace_all_uses_with(joined)
    module.graph.erase_node(node)


def _linear_above(node: Any) -> Node | None:
    """The linear layer whose features a value has along its last axis, laid out anew at most."""
    while isinstance(node, Node) and node.op == "call_function":
        if base_name(node) == "linear":
            return node
        if base_name(node) not in VIEWS or len(node.users) > 1 or not _keeps_features(node):
            return None
        node = node.args[0]
    return None


def _is_convolution(node: Any) -> bool:
    return isinstance(node, Node) and base_name(node) in ("conv1d", "conv2d", "conv_transpose2d")


def _keeps_features(node: Node) -> bool:
    """Whether what is laid out anew has the same last axis as before."""
    if base_name(node) == "transpose":
        return _keeps_last(node)
    if base_name(node) == "permute":
        axes: Any = node.args[1]
        return axes[-1] in (-1, len(axes) - 1)
    shapes = [
        tuple(each.shape)
        for each in (node.args[0].meta.get("val"), node.meta.get("val"))  # type: ignore[union-attr]
        if isinstance(each, torch.Tensor)
    ]
    return len(shapes) == 2 and bool(shapes[0]) and shapes[0][-1:] == shapes[1][-1:]


def _laid_out_constant(module: torch.fx.GraphModule, node: Any) -> Any:
    """A parameter or a part of one, laid out anew; an attention has its weights in one."""
    if not isinstance(node, Node) or node.op != "call_function" or base_name(node) not in _LAID_OUT:
        return _attribute(module, node)
    if len(node.all_input_nodes) != 1:
        return None
    above = _laid_out_constant(module, node.all_input_nodes[0])
    target: Any = node.target
    return None if above is None else target(above, *node.args[1:], **node.kwargs)


_LAID_OUT = MOVING - {"quantize_per_tensor", "dequantize_per_tensor"}


_MADE_OF_NUMBERS = ("arange", "full", "linspace", "ones", "scalar_tensor", "zeros")


def _computed(module: torch.fx.GraphModule, node: Any, steps: int = 8) -> Any:
    """
    A constant, or what the graph computes of constants alone: what a batch norm scales by.

    In as many steps as γ / √(σ² + ε), laid out anew, takes: what is further off is none.
    """
    if not isinstance(node, Node) or node.op != "call_function":
        return _attribute(module, node)
    if not node.all_input_nodes and base_name(node) not in _MADE_OF_NUMBERS:
        return None
    values: dict[Node, Any] = {}
    for each in node.all_input_nodes:
        value = _computed(module, each, steps - 1) if steps else None
        if value is None:
            return None
        values[each] = value
    target: Any = node.target
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    return target(*args, **kwargs)


def is_subtracted(graph: OpGraph, subgraph: int) -> Callable[[torch.Tensor], bool]:
    """What tells whether the file subtracts a constant, up to what rounding makes of it."""
    stored = [*_added(graph, subgraph, "SUB")]
    # A coarse one, of 8 bits of a range that one channel may take alone.
    return lambda value: _nearest(value, stored) < _ALIKE


# Shares of a constant's size that rounding to 8 bits may take.
_ALIKE = 0.01


def _added(graph: OpGraph, subgraph: int, name: str = "ADD") -> Iterator[np.ndarray]:
    """The constants that the file's ops of a name take."""
    whole = graph.subgraphs[subgraph]
    for op in whole.ops:
        for index in op.inputs if op.name == name else ():
            stored = stored_constant(whole, index)
            if stored is not None and not stored.tensor.is_sparse:
                yield read_constant(graph, op, stored).floats


def _nearest(value: torch.Tensor, stored: list[np.ndarray]) -> float:
    """How far a constant is from the file's nearest, in shares of its size."""
    own = value.double().numpy()
    alike = [held.reshape(own.shape) for held in stored if held.size == own.size]
    return min((_share(held - own, own) for held in alike), default=math.inf)


def fold_in_front(module: torch.fx.GraphModule, graph: OpGraph, subgraph: int) -> None:
    """
    Let linear(x·γ + β, W, b) be linear(x, W·γ, b + W·β) wherever the file has it so.

    The converter does it to a normalisation's γ and β in front of a linear layer, and to the bias
    of another linear layer there; it has either form in the file, or both for two users. Which is
    told by the file's weights and biases.

    Args:
        module: A graph whose parameters are attributes; changed in place.
        graph: The file.
        subgraph: Index of the subgraph.
    """
    stored = list(_stored(graph, subgraph))
    layers = [n for n in module.graph.nodes if base_name(n) == "linear" and len(n.args) > 1]
    uses = {node: [each for each in layers if each.args[1] is node.args[1]] for node in layers}
    for node in layers:
        own = _laid_out_constant(module, node.args[1])
        bias = node.args[2] if len(node.args) > 2 else None
        own_bias = None if bias is None else _laid_out_constant(module, bias)
        if own is None or (bias is not None and own_bias is None):
            continue
        added = torch.zeros(own.shape[0], dtype=own.dtype) if own_bias is None else own_bias
        forms: list[_Parts] = [(node.args[0], own, added, (), False)]
        for source, scale, shift, turns, bare in _in_front(module, node.args[0], own.shape[1]):
            forms.append((source, own * scale, added + own @ shift, turns, bare))
        if len(forms) == 1:
            continue
        behind = _behind(module, node, own.shape[0])
        place = uses[node].index(node), len(uses[node])
        nearest = _nearest_form(forms, behind, _of_this_use(forms, behind, stored, *place))
        if nearest is not forms[0]:
            _replace(module, node, nearest)
    module.graph.eliminate_dead_code()


def fold_signs(module: torch.fx.GraphModule, graph: OpGraph, subgraph: int) -> None:
    """
    Let −linear(x, W, b) be linear(x, −W, −b) wherever the file has it so.

    The converter does it to the lower half of a PReLU, relu(x) − a·relu(−x), and leaves the upper
    half the layer as it is.

    Args:
        module: A graph whose parameters are attributes; changed in place.
        graph: The file.
        subgraph: Index of the subgraph.
    """
    stored = list(_stored(graph, subgraph))
    for node in list(module.graph.nodes):
        layer = node.args[0] if base_name(node) == "mul" and node.args[1] == -1 else None
        if not isinstance(layer, Node) or base_name(layer) != "linear":
            continue
        own, bias = (_laid_out_constant(module, each) for each in (*layer.args[1:], None)[:2])
        if own is None or (bias is None and len(layer.args) > 2):
            continue
        negated = torch.zeros(own.shape[0]) if bias is None else -bias
        if _apart(-own, negated, stored) >= _ALIKE:
            continue
        with module.graph.inserting_before(node):
            turned = module.graph.node_copy(layer)
        turned.args = (
            layer.args[0],
            _new_constant(module, turned, "negated_weight", -own),
            *(() if bias is None else (_new_constant(module, turned, "negated_bias", negated),)),
        )
        node.replace_all_uses_with(turned)
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()


def _nearest_form(forms: Sequence[_Parts], behind: Sequence[_Behind], stored: _Stored) -> _Parts:
    return min(forms, key=lambda form: _form_apart(form, behind, stored))


def _form_apart(form: _Parts, behind: Sequence[_Behind], stored: _Stored) -> float:
    """How far a form is from the file's nearest layer, with what may be folded in from behind."""
    return min(
        _apart(form[1] * scale[:, None], form[2] * scale + shift, stored) for scale, shift in behind
    )


def _of_this_use(
    forms: Sequence[_Parts], behind: Sequence[_Behind], stored: _Stored, which: int, uses: int
) -> _Stored:
    """
    Of a layer that is used several times, the file's for one of these, which are in order.

    One use may stand behind a norm and another not: all are near one of the forms.
    """
    near = [
        each for each in stored if min(_form_apart(form, behind, [each]) for form in forms) < _ALIKE
    ]
    return near[which : which + 1] if uses > 1 and len(near) == uses else stored


def _behind(module: torch.fx.GraphModule, node: Node, size: int) -> list[_Behind]:
    """
    What multiplies a layer's result and is added to it, which may be folded into it as well.

    Nothing first; then each with what stands before it, one number or one a feature.
    """
    found = [(torch.ones(size), torch.zeros(size))]
    while len(node.users) == 1:
        node = next(iter(node.users))
        name = base_name(node)
        if name in _PASSES_ON or (name in VIEWS and _keeps_features(node)):
            continue
        if name not in ("mul", "add") or len(node.args) != 2 or node.kwargs:
            break
        held = [own for each in node.args if (own := _as_bias(module, each, size)) is not None]
        if len(held) != 1:
            break
        scale, shift = found[-1]
        found.append(
            (scale * held[0], shift * held[0]) if name == "mul" else (scale, shift + held[0])
        )
    return found


def _stored(graph: OpGraph, subgraph: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Weight and bias of the file's linear layers, dequantized."""
    for op in graph.subgraphs[subgraph].ops:
        if op.name != "FULLY_CONNECTED":
            continue
        roles = roles_of(graph, op)
        weights = [each for each in roles.weights if each.tensor.is_constant]
        biases = [each for each in roles.biases if each.tensor.is_constant]
        if len(weights) != 1 or weights[0].tensor.is_sparse:
            continue
        bias = read_constant(graph, op, biases[0]).floats.reshape(-1) if biases else None
        yield read_constant(graph, op, weights[0]).floats, bias


def _in_front(module: torch.fx.GraphModule, node: Any, size: int) -> Iterator[_Parts]:
    """
    What x a value is x·scale + shift of, one scale and one shift a feature: nearest x first.

    With the nodes in between that turn other axes than that of the features, the last one first.
    Of a linear layer, which comes last, x is what it gives without its bias, as the last says.
    """
    scale, shift = torch.ones(size), torch.zeros(size)
    turns: list[Node] = []
    while isinstance(node, Node) and node.op == "call_function":
        name = base_name(node)
        if name in _PASSES_ON:
            node = node.args[0]
            continue
        if name in VIEWS and _keeps_features(node):
            turns.append(node)
            node = node.args[0]
            continue
        if name == "linear":
            bias = _laid_out_constant(module, node.args[2]) if len(node.args) > 2 else None
            if bias is not None and bias.numel() == size and bias.any():
                yield node, scale, shift + scale * bias, tuple(turns), True
            return
        if name not in ("mul", "add") or len(node.args) != 2:
            return
        constants = [_computed(module, each) for each in node.args]
        places = [i for i, each in enumerate(constants) if each is not None]
        if len(places) != 1 or len(node.kwargs):
            return
        value = constants[places[0]]
        assert value is not None, "chosen by it"
        if value.numel() != size or value.shape[-1] != size:
            return
        if name == "mul":
            scale = scale * value.reshape(-1)
        else:
            shift = shift + scale * value.reshape(-1)
        node = node.args[1 - places[0]]
        yield node, scale, shift, tuple(turns), False


def _keeps_last(node: Node) -> bool:
    """Whether a transpose leaves the last axis where it is."""
    example = node.meta.get("val")
    axes: Any = node.args[1:3]
    return isinstance(example, torch.Tensor) and all(
        axis % example.ndim != example.ndim - 1 for axis in axes
    )


def _new_constant(module: torch.fx.GraphModule, user: Node, name: str, value: torch.Tensor) -> Node:
    """A constant of the graph, in front of the node that it is named after."""
    attribute = f"{user.name}_{name}"
    module.register_buffer(attribute, value)
    with module.graph.inserting_before(user):
        return module.graph.get_attr(attribute)


def _attribute(module: torch.fx.GraphModule, node: Any) -> torch.Tensor | None:
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    value = operator.attrgetter(str(node.target))(module)
    return value.detach() if isinstance(value, torch.Tensor) else None


def _apart(
    weight: torch.Tensor,
    bias: torch.Tensor,
    stored: list[tuple[np.ndarray, np.ndarray | None]],
) -> float:
    """How far a layer is from the file's nearest, in shares of the weight's and the bias's size."""
    own, added = weight.double().numpy(), bias.double().numpy()
    found = [float("inf")]
    for held, held_bias in stored:
        if held.size != own.size or (held_bias is not None and held_bias.size != added.size):
            continue
        given = np.zeros_like(added) if held_bias is None else held_bias
        found.append(_share(held.reshape(own.shape) - own, own) + _share(given - added, added))
    return min(found)


def _share(difference: np.ndarray, value: np.ndarray) -> float:
    size = float(np.square(value).sum()) or 1.0
    return float(np.square(difference).sum()) / size


def _without_bias(module: torch.fx.GraphModule, layer: Node) -> Node:
    """The layer's product alone; to others that take the layer its bias is added behind."""
    with module.graph.inserting_after(layer):
        product = module.graph.node_copy(layer)
    product.args = layer.args[:2]
    with module.graph.inserting_after(product):
        add: Any = torch.ops.aten.add.Tensor
        whole = module.graph.call_function(add, (product, layer.args[2]))
    whole.meta.update(layer.meta)
    layer.replace_all_uses_with(whole)
    module.graph.erase_node(layer)
    return product


def _replace(module: torch.fx.GraphModule, node: Node, parts: _Parts) -> None:
    source, weight, bias, turns, bare = parts
    if bare:
        source = _without_bias(module, source)
    for turn in reversed(turns):
        with module.graph.inserting_before(node):
            before, source = source, module.graph.node_copy(turn)
        source.args = (before, *turn.args[1:])
    node.args = (
        source,
        _new_constant(module, node, "folded_weight", weight),
        _new_constant(module, node, "folded_bias", bias),
    )
