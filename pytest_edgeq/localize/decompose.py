"""Take apart torch nodes that the converter takes apart, so that each part meets its op."""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from pytest_edgeq.localize.forms import (
    FORMS,
    addmm_in_steps,
    batch_norm_in_steps,
    decompositions,
)
from pytest_edgeq.localize.grouped import part_groups
from pytest_edgeq.localize.kinds import HEAVY, VIEWS, base_name, is_dequantize, is_quantize
from pytest_edgeq.localize.parameters import shape_of
from pytest_edgeq.localize.shared import merge_equals, share_maxima, share_means
from pytest_edgeq.tflite.graph import OpGraph

__all__ = ["decompose", "sliced_joins"]

# What the converter lowers to several ops, each with a tensor of its own between.
_COMPOSED = {
    *("layer_norm", "group_norm", "instance_norm", "rms_norm", "native_layer_norm", "batch_norm"),
    *(
        "silu",
        "hardswish",
        "hardsigmoid",
        *("elu", "selu", "celu", "softplus", "linalg_vector_norm"),
        *("expm1", "log1p", "glu", "threshold", "erf"),
        "prelu",
        *("lstm", "gru", "rnn_tanh", "rnn_relu"),
        *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
        *("softmax", "log_softmax", "logsumexp", "einsum"),
        "scaled_dot_product_attention",
        *("addmm", "baddbmm", "lerp", "cosine_similarity", "pairwise_distance"),
        "mish",
        *("var", "std", "var_mean", "std_mean", "stack", "avg_pool2d", "clamp", "clip", "hardtanh"),
    ),
}


def decompose(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    is_subtracted: Callable[[torch.Tensor], bool] = lambda _: False,
    *,
    sliced: Container[tuple[int, int]] = (),
) -> torch.fx.GraphModule:
    """
    A graph of the same values in smaller steps; the module itself is left as it was.

    Args:
        module: An exported graph.
        inputs: One for each placeholder: what gives examples of the nodes' values, which the graph
            may not hold (as after training), or hold for any size.
        is_subtracted: Whether the file subtracts this constant, the mean of a batch norm, which it
            does where it holds images with channels last; elsewhere it is a part of what is added.
        sliced: How many elements joins and slices of them have where the file slices the join, and
            not a part of it.
    """
    examples = _Examples(module)
    with torch.no_grad():
        examples.run(*(_cloned(each) for each in inputs))
    graph = torch.fx.Graph()
    known: dict[torch.fx.Node, Any] = {}
    added: dict[str, torch.Tensor] = {}
    varying: set[torch.fx.Node] = set()
    for node in module.graph.nodes:
        if node.op == "placeholder" or not varying.isdisjoint(node.all_input_nodes):
            varying.add(node)
        if isinstance(number := examples.known.get(node), (int, float)):
            # A size, say, that the graph holds for any: what is made of it alone is a constant.
            known[node] = number
            continue
        if base_name(node) == "_assert_tensor_metadata":
            # One more user of a value, of which no op is left.
            continue
        if node.target is operator.getitem and isinstance(known[node.args[0]], (tuple, list)):
            # Of what was taken apart: the one result alone, which needs none of the others.
            known[node] = known[node.args[0]][node.args[1]]
            continue
        if base_name(node) in _FILLED:
            known[node] = _filled(graph, node, examples.known[node])
            continue
        if base_name(node) in _AS_ANOTHER:
            known[node] = _shaped_as(graph, node, examples.known, known)
            continue
        if _is_cut(node, examples.known):
            known[node] = _cut(graph, node, examples.known[node], known)
            continue
        parts = None
        if _functional(node) in _COMPOSED:
            function = _function(module, node, is_subtracted, varying)
            parts = _parts(node, function, examples.known)
        if parts is None:
            known[node] = graph.node_copy(node, known.__getitem__)
            if isinstance(examples.known.get(node), torch.Tensor):
                known[node].meta["val"] = examples.known[node]
        else:
            given = _with_bare_bias(node, known) if base_name(node) == "addmm" else known
            known[node] = _inline(graph, node, parts, given, added)
    _hoist_scales(graph)
    part_groups(graph)
    _slice_parts(graph, sliced)
    held = {str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")}
    own = {name: operator.attrgetter(name)(module) for name in held - set(added)}
    merge_equals(graph, {n: own[n] for n in own if n.startswith(_LIFTED) and own[n].numel() == 1})
    share_means(graph)
    share_maxima(graph)
    return torch.fx.GraphModule({**own, **added}, graph)


def _is_cut(node: torch.fx.Node, examples: Mapping[torch.fx.Node, Any]) -> bool:
    """Whether a node cuts floats to whole numbers, and does not only hold what it takes."""
    if base_name(node) not in ("to", "_to_copy") or not isinstance(node.args[0], torch.fx.Node):
        return False
    before, after = (examples.get(each) for each in (node.args[0], node))
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return before.is_floating_point() and not (
        after.is_floating_point() or after.dtype == torch.bool
    )


def _cut(
    graph: torch.fx.Graph,
    node: torch.fx.Node,
    example: torch.Tensor,
    known: Mapping[torch.fx.Node, Any],
) -> torch.fx.Node:
    """The same by a name of its own."""
    taken: Any = node.args[0]
    convert: Any = torch.ops.prims.convert_element_type.default
    cut = graph.call_function(convert, (known[taken], example.dtype))
    cut.meta.update(node.meta)
    cut.meta["val"] = example
    return cut


# What torch.export calls the numbers and tensors that a forward itself makes.
_LIFTED = ("_tensor_constant", "lifted_tensor")

# Nodes that take of their second tensor its shape or dtype alone.
_AS_ANOTHER: dict[str, Any] = {
    "view_as": torch.ops.aten.reshape.default,
    "reshape_as": torch.ops.aten.reshape.default,
    "expand_as": torch.ops.aten.expand.default,
    "type_as": torch.ops.aten.to.dtype,
}


# Nodes that take of their tensor its shape or dtype alone, with what they fill theirs with.
_FILLED = {
    **dict.fromkeys(("zeros_like", "new_zeros"), 0),
    **dict.fromkeys(("ones_like", "new_ones"), 1),
}


def _filled(graph: torch.fx.Graph, node: torch.fx.Node, example: torch.Tensor) -> torch.fx.Node:
    """A constant, which does not change with what has the shape."""
    value = _FILLED[base_name(node)]
    constant = graph.call_function(
        torch.ops.aten.full.default, (list(example.shape), value), {"dtype": example.dtype}
    )
    constant.meta.update(node.meta)
    constant.meta["val"] = example
    return constant


def _shaped_as(
    graph: torch.fx.Graph,
    node: torch.fx.Node,
    examples: Mapping[torch.fx.Node, Any],
    known: Mapping[torch.fx.Node, Any],
) -> torch.fx.Node:
    """The same with a shape or a dtype in place of the tensor that has it."""
    value, like = node.all_input_nodes[0], node.all_input_nodes[-1]
    example = examples[like]
    given = example.dtype if base_name(node) == "type_as" else list(example.shape)
    shaped = graph.call_function(_AS_ANOTHER[base_name(node)], (known[value], given))
    shaped.meta.update(node.meta)
    shaped.meta["val"] = examples[node]
    return shaped


def _hoist_scales(graph: torch.fx.Graph) -> None:
    """
    Scale right behind a matrix product what is only laid out anew before it is scaled.

    So the converter has it, which folds the scale into the product's weight.
    """
    for node in list(graph.nodes):
        if base_name(node) not in ("mul", "div") or node.kwargs:
            continue
        if not isinstance(node.args[1], (int, float)):
            continue
        before = node.args[0]
        above = before
        while base_name(above) in VIEWS and len(above.users) == 1:
            above = above.all_input_nodes[0]
        if above is before or base_name(above) not in HEAVY or len(above.users) > 1:
            continue
        below = next(iter(above.users))
        with graph.inserting_after(above):
            scaled = graph.call_function(node.target, (above, node.args[1]))
        scaled.meta.update(above.meta)
        below.replace_input_with(above, scaled)
        node.replace_all_uses_with(before)
        graph.erase_node(node)


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


def _slice_parts(graph: torch.fx.Graph, sliced: Container[tuple[int, int]]) -> None:
    """
    Slice of what is joined the one part that has all of a slice, in place of the whole.

    So the converter has it, as of the end of a cache that the input was joined to. What no other
    op takes is joined of the parts alone that a slice has elements of.
    """
    for node in list(graph.nodes):
        part = _alone(node)
        if part is not None:
            node.replace_all_uses_with(part)
            graph.erase_node(node)
            continue
        joined = node.args[0] if base_name(node) in ("slice", "select", "narrow") else None
        if not isinstance(joined, torch.fx.Node):
            continue
        if base_name(joined) in ("view", "reshape"):
            _take_step(graph, node, joined, sliced)
        if base_name(joined) != "cat":
            continue
        whole, parts = shape_of(joined), list(joined.args[0])  # type: ignore[arg-type]
        shapes = [shape_of(part) for part in parts]
        # torch leaves out of a join what is empty, whatever its shape.
        if not whole or any(len(each) != len(whole) for each in shapes):
            continue
        if (math.prod(whole), math.prod(shape_of(node))) in sliced:
            continue
        axis: Any = (joined.args[1] if len(joined.args) > 1 else 0) % len(whole)  # type: ignore[operator]
        start, end = _reach(node, axis, whole)
        if start >= end:
            continue
        ends = list(itertools.accumulate(shape[axis] for shape in shapes))
        first, last = bisect.bisect_right(ends, start), bisect.bisect_left(ends, end)
        offset, source = ends[first] - shapes[first][axis], parts[first]
        if last > first:
            if len(joined.users) > 1 or last - first + 1 == len(parts):
                continue
            joined.args, source = (parts[first : last + 1], axis), joined
            size = [ends[last] - offset if i == axis else n for i, n in enumerate(whole)]
            joined.meta["val"] = joined.meta["val"].new_empty(size)
        bounds = (start - offset, end - offset) if base_name(node) == "slice" else (start - offset,)
        node.args = (source, axis, *bounds, *node.args[2 + len(bounds) :])


def _alone(node: torch.fx.Node) -> torch.fx.Node | None:
    """The one value that is joined to no other, as the states of a recurrence of one layer."""
    values: Any = node.args[0] if base_name(node) == "cat" else ()
    return values[0] if len(values) == 1 else None


def _take_step(
    graph: torch.fx.Graph,
    node: torch.fx.Node,
    stacked: torch.fx.Node,
    sliced: Container[tuple[int, int]],
) -> None:
    """Take one step of several that are stacked by a join and a view, as recurrent layers do it."""
    joined = stacked.all_input_nodes[0]
    if base_name(joined) != "cat" or joined.args[1:] not in ((), (0,)):
        return
    steps, whole = list(joined.args[0]), shape_of(stacked)  # type: ignore[arg-type]
    if any((len(steps), *shape_of(step)) != whole for step in steps):
        return
    if (math.prod(whole), math.prod(shape_of(node))) in sliced:
        return
    start, end = _reach(node, 0, whole)
    if end - start != 1:
        return
    with graph.inserting_before(node):
        step = graph.call_function(torch.ops.aten.reshape.default, (steps[start], shape_of(node)))
    step.meta.update(node.meta)
    node.replace_all_uses_with(step)
    graph.erase_node(node)


def _reach(node: torch.fx.Node, axis: int, whole: tuple[int, ...]) -> tuple[int, int]:
    """Where a slice along an axis begins and ends; an empty reach where that is not known."""
    dim, *bounds = (*node.args[1:], None, None)[:3] if len(node.args) > 1 else (0, None, None)
    if not isinstance(dim, int) or dim % len(whole) != axis:
        return 0, 0
    (first, second), length = bounds, whole[axis]
    if base_name(node) == "slice":
        first, second = (0 if first is None else first), (length if second is None else second)
    elif base_name(node) == "select":
        second = 1
    if not isinstance(first, int) or not isinstance(second, int):
        return 0, 0
    if base_name(node) == "slice":
        start, end, _ = slice(first, second).indices(length)
        return start, end
    start = first % length
    return start, start + second


class _Examples(torch.fx.Interpreter):
    """Runs a graph and keeps what each node gives; of tensors their shapes and dtypes."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.known: dict[torch.fx.Node, Any] = {}

    def run_node(self, n: torch.fx.Node) -> Any:
        """As its base does."""
        value = super().run_node(n)
        self.known[n] = value.to("meta") if isinstance(value, torch.Tensor) else value
        return value

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Guards of the export, which may well be of other sizes, give nothing."""
        return None


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _functional(node: torch.fx.Node) -> str:
    """Its name, of an activation in place that of the one which is not."""
    return base_name(node).removesuffix("_")


def _function(
    module: torch.fx.GraphModule,
    node: torch.fx.Node,
    is_subtracted: Callable[[torch.Tensor], bool],
    varying: Container[torch.fx.Node],
) -> Any:
    """What a node computes, in the converter's steps where these are known here."""
    name = _functional(node)
    if name == "batch_norm" and isinstance(mean := node.args[3], torch.fx.Node):
        held = operator.attrgetter(str(mean.target))(module) if mean.op == "get_attr" else None
        if held is not None and is_subtracted(held.detach()):
            return batch_norm_in_steps
    if name == "addmm" and (node.kwargs or node.args[0] in varying):
        return addmm_in_steps
    if name in FORMS:
        return FORMS[name]
    return node.target if name == base_name(node) else getattr(torch.ops.aten, name).default


def _with_bare_bias(
    node: torch.fx.Node, known: dict[torch.fx.Node, Any]
) -> dict[torch.fx.Node, Any]:
    """
    What nodes are known as, of a constant that is added the one that PT2E has not rounded yet.

    The converter writes it as any bias, whatever scale an observer gave it.
    """
    chain: list[Any] = [node.args[0]]
    while is_quantize(chain[-1]) or is_dequantize(chain[-1]):
        chain.append(chain[-1].args[0])
    return {**known, chain[0]: known[chain[-1]]} if chain[-1].op == "get_attr" else known


def _parts(
    node: torch.fx.Node, function: Any, known: Mapping[torch.fx.Node, Any]
) -> torch.fx.GraphModule | None:
    """The node's own graph, with a placeholder for each tensor that it takes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    for i, leaf in enumerate(leaves):
        number = known.get(leaf) if isinstance(leaf, torch.fx.Node) else None
        leaves[i] = number if isinstance(number, (int, float)) else leaf
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.fx.Node)]
    examples: list[Any] = [known.get(leaves[i]) for i in places]
    if not all(isinstance(each, torch.Tensor) for each in examples):
        return None

    def call(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return function(*args, **kwargs)

    given = [torch.ones(each.shape, dtype=each.dtype) for each in examples]
    # With it, recurrent layers stay whole. Its context manager sets TF32 too, and warns of that.
    enabled = torch.backends.mkldnn.set_flags(False)[0]  # type: ignore[no-untyped-call]
    try:
        with torch.no_grad():
            return make_fx(call, decomposition_table=decompositions())(*given)
    finally:
        torch.backends.mkldnn.set_flags(enabled)  # type: ignore[no-untyped-call]


def _inline(
    graph: torch.fx.Graph,
    node: torch.fx.Node,
    parts: torch.fx.GraphModule,
    known: dict[torch.fx.Node, Any],
    added: dict[str, torch.Tensor],
) -> Any:
    """Put a node's own graph in its place; gives what stands for its result."""
    leaves, _ = pytree.tree_flatten((node.args, node.kwargs))
    given = [known[leaf] for leaf in leaves if isinstance(leaf, torch.fx.Node)]
    taken = iter([each for each in given if isinstance(each, torch.fx.Node)])
    inner: dict[torch.fx.Node, Any] = {}
    for part in parts.graph.nodes:
        if part.op == "placeholder":
            inner[part] = next(taken)
        elif part.op == "output":
            return map_arg(part.args[0], inner.__getitem__)
        elif part.op == "get_attr":
            name = f"{node.name}_{part.target}"
            added[name] = getattr(parts, str(part.target))
            inner[part] = graph.get_attr(name)
        else:
            inner[part] = graph.node_copy(part, inner.__getitem__)
            for kind in ("nn_module_stack", "stack_trace"):
                if kind in node.meta:
                    inner[part].meta[kind] = node.meta[kind]
    raise AssertionError("a graph has an output")
