"""Rewrite the quantized graph of PT2E for the converter."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pytest_edgeq.litert.annotations import is_constant
from pytest_edgeq.litert.configs import LEFT_IN_FLOAT, WEIGHT_ALONE, RefusedError, op_name
from pytest_edgeq.litert.exported import DROPOUTS
from pytest_edgeq.litert.libraries import converter_module, quiet

# Names of torch's ops with a weight, and the ops to which they are lowered.
_FAMILIES = {
    "conv1d": ("CONV_2D", "DEPTHWISE_CONV_2D"),
    "conv2d": ("CONV_2D", "DEPTHWISE_CONV_2D"),
    "conv_transpose1d": ("TRANSPOSE_CONV",),
    "conv_transpose2d": ("TRANSPOSE_CONV",),
    "linear": ("FULLY_CONNECTED",),
}

_WEIGHTED = (*_FAMILIES, "conv3d", "addmm", "mm", "matmul", "embedding")

# Ops that return the values of their operand, perhaps in another shape; dropouts in eval mode.
_SAME_VALUES = {
    *("alias", "clone", "contiguous", "detach", "detach_", "flatten", "reshape", "reshape_as"),
    *("squeeze", "to", "unflatten", "unsqueeze", "view", "view_as"),
    *DROPOUTS,
}

# Suffix of a weight that was rounded here.
_ROUNDED = "_rounded"


def refuse_lost_writes(graph: torch.fx.GraphModule, *, clones: bool = False) -> None:
    """
    Refuse writes into a part of a quantized tensor that is read later.

    torchao 0.18.0 gives each consumer of a quantized tensor its own copy, so that `y[:, 0] = x`
    silently changes one copy alone; where all consumers read that copy, litert-torch 0.10.0 joins
    both parts with the scale of one. With `clones` writes into other tensors are lost, too.
    """
    origins: dict[Any, Any] = {}  # the tensor of a view or a copy
    memories: dict[Any, Any] = {}  # the tensor or the copy that a view is of
    writes: dict[Any, Any] = {}  # the last write and its memory, by origin
    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        aliases = [each.alias_info for each in schema.returns if each.alias_info] if schema else []
        if node.target is operator.getitem or any(not each.is_write for each in aliases):
            origins[node], memories[node] = origins[node.args[0]], memories[node.args[0]]
            continue
        for each in node.all_input_nodes:
            write, memory = writes.get(origins[each], (None, None))
            lossy = clones or memory is not origins[each] or any(map(_is_quantize, memory.users))
            if write and lossy:
                lines = (write.meta.get("stack_trace") or "").splitlines()
                code = [line.strip() for line in lines if line.strip(" ~^")]
                raise RefusedError(
                    f"{write.name} ({write.target}) writes into a part of a tensor that {node.name}"
                    f" reads later{': '.join(['', *code[-1:]])}. In a quantized graph this write "
                    "is lost, or gets the scale of the rest: compute the tensor by torch.cat or "
                    "torch.where, or quantize by a recipe (recipe_static_wi8_ai8)"
                )
        origins[node], memories[node] = origins[node.args[0]] if _is_qdq(node) else node, node
        # A call may leave out the last arguments of its schema.
        for target, argument in zip(node.args, schema.arguments if schema else (), strict=False):
            if argument.alias_info and argument.alias_info.is_write:
                writes[origins[target]] = node, memories[target]


def fold_constants(simulated: torch.fx.GraphModule) -> None:
    """
    Replace quantized constants by equal rounded ones where the converter chooses codes.

    litert-torch 0.10.0 cannot write a bias that the graph quantizes to int32 (`Failed to export
    flatbuffer`), but assigns each bias of an op that it quantizes the scale input × weight, the
    only one that kernels support: a bias with another scale is refused. And it reverses the weight
    of a transposed convolution twice, which it cannot do with a quantized one, so that the op
    silently stays in float; a weight that is a plain constant it quantizes itself, with a scale for
    each output channel.
    """
    for node in list(simulated.graph.nodes):
        if _family(node) is None:
            continue
        if len(node.args) > 2 and _is_quantized_constant(node.args[2]):
            _check_bias_scale(simulated, node)
            _fold(simulated, node, 2)
        neighbours = [node.args[0], *_users_behind_relus(node)]
        if (
            _family(node) == ("TRANSPOSE_CONV",)
            and _is_quantized_constant(node.args[1])
            and all(_is_dequantized(each) or _is_quantize(each) for each in neighbours)
        ):
            _fold(simulated, node, 1)
    simulated.graph.eliminate_dead_code()
    simulated.recompile()


def unfold_weights(simulated: torch.fx.GraphModule) -> None:
    """
    Replace weights stored as integers by their dequantized values, which are quantized.

    torchao's `convert_pt2e` folds them by default, and the converter refuses such a graph
    (`'stablehlo.uniform_dequantize' op operand #0 must be ranked tensor of per-tensor integer`;
    litert-torch 0.9.4 and 0.10.0).
    """
    ops = torch.ops.quantized_decomposed
    rounds = {
        ops.dequantize_per_channel.default: ops.quantize_per_channel.default,
        ops.dequantize_per_tensor.default: ops.quantize_per_tensor.default,
    }
    for node in list(simulated.graph.nodes):
        if node.target not in rounds or getattr(node.args[0], "op", "") != "get_attr":
            continue
        floats = _inserted(simulated, node, f"{node.name}_unfolded", _value(simulated, node))
        with simulated.graph.inserting_before(node):
            codes = simulated.graph.call_function(rounds[node.target], (floats, *node.args[1:]))
        for added in (floats, codes):
            added.meta.update(node.meta)
        node.update_arg(0, codes)
    simulated.graph.eliminate_dead_code()
    simulated.recompile()


def share_scales(simulated: torch.fx.GraphModule) -> None:
    """
    Quantize a tensor with one scale on both sides of a no-op.

    litert-torch 0.10.0 removes such an op (a dropout, `detach`, `clone`, `squeeze` of `unsqueeze`),
    and of the two quantize nodes keeps the first for the tensor and the second for the bias of the
    layer behind: the bias is read in another scale than it was written in (0.8 dB, no warning).

    If the shape changes, a RESHAPE stays in the file, and a QUANTIZE behind it.
    """
    for node in simulated.graph.nodes:
        before: Any = node.args[0].args[0] if _is_dequantized(node) else None
        source = before
        while _changes_nothing(source):
            source = source.args[0]
        # Of one dtype and one range of codes, per tensor.
        if (
            source is not before
            and _is_dequantized(source)
            and _quantized_shape(source) == _quantized_shape(node)
            and source.target is node.target
            and op_name(node) == "dequantize_per_tensor"
            and source.args[3:6] == node.args[3:6]
        ):
            node.args[0].args = (node.args[0].args[0], *source.args[0].args[1:])
            node.args = (node.args[0], *source.args[1:])
    simulated.recompile()


def _quantized_shape(dequantize: Any) -> tuple[int, ...] | None:
    """Return the shape of the quantized value; None if the graph lacks it."""
    value = dequantize.args[0].args[0].meta.get("val")
    return None if value is None else tuple(value.shape)


def _changes_nothing(node: Any) -> bool:
    if op_name(node) == "pad":
        return not any(node.args[1])
    if op_name(node) not in _SAME_VALUES:
        return False
    dtypes = [each for each in node.args[1:] if isinstance(each, torch.dtype)]
    return all(each is torch.float32 for each in dtypes)


def isolate_float_ops(simulated: torch.fx.GraphModule) -> None:
    """
    Prevent the converter from quantizing ops that should compute in float.

    Between two quantized tensors litert-torch 0.10.0 quantizes an op whether it was annotated or
    not, and its weight by itself; and an op with only its weight annotated gets an integer input
    and a float output, which no kernel supports. It has a barrier op that it removes in the end.

    Convolutions and linear layers that a quantizer skipped are to stay in float, too. Transposed
    convolutions, which no config reaches, cannot be distinguished from those to be quantized. Joins
    of tensors with different scales are isolated as well: the converter would use the scale of the
    first for all, and clip the others.
    """
    barriers = converter_module("backend.optimization_barrier")
    for node in list(simulated.graph.nodes):
        checks = (_has_weight_alone, _has_float_weight, _joins_scales)
        isolated = node.meta.get(LEFT_IN_FLOAT) or any(check(node) for check in checks)
        for operand in node.all_input_nodes if isolated else ():
            if _is_dequantized(operand) and not _is_quantized_constant(operand):
                with simulated.graph.inserting_before(node):
                    # It cannot read the result of a barrier for one tensor.
                    both = simulated.graph.call_function(
                        barriers.optimization_barrier_op, ([operand, operand],)
                    )
                    first = simulated.graph.call_function(operator.getitem, (both, 0))
                first.meta.update(operand.meta)
                node.replace_input_with(operand, first)
    simulated.recompile()


def _copied(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a copy with nodes of its own, which shares the original's tensors."""
    with quiet():  # torch 2.13 warns of its own use of LeafSpec
        return torch.fx.GraphModule(module, copy.deepcopy(module.graph))


def _inserted(
    module: torch.fx.GraphModule, before: torch.fx.Node, name: str, value: torch.Tensor
) -> torch.fx.Node:
    """Return a new constant of a graph."""
    module.register_buffer(name, value.detach().clone())
    with module.graph.inserting_before(before):
        return module.graph.get_attr(name)


def copied_to_run(simulated: torch.nn.Module) -> torch.nn.Module:
    """
    Return a faster copy of a quantized graph with results equal to the bit.

    Its weights are rounded once, not at each call, and activations in place: torch 2.13 allocates
    seven tensors to round one and to scale it back, which for large ones takes longer than the
    convolution before them. Anything but a graph is returned unchanged.
    """
    if not isinstance(simulated, torch.fx.GraphModule):
        return simulated
    in_place: dict[Any, Callable[..., Any]] = {
        torch.ops.quantized_decomposed.quantize_per_tensor.default: _quantize_in_place,
        torch.ops.quantized_decomposed.dequantize_per_tensor.default: _dequantize_in_place,
    }
    copied = _copied(simulated)
    for node in list(copied.graph.nodes):
        if _is_quantized_constant(node):
            computed = _inserted(copied, node, f"{node.name}_computed", _value(copied, node))
            node.replace_all_uses_with(computed)
    copied.graph.eliminate_dead_code()
    for node in copied.graph.nodes:
        node.target = in_place.get(node.target, node.target)
    copied.recompile()
    return copied


def _quantize_in_place(
    values: torch.Tensor, scale: float, zero_point: int, low: int, high: int, dtype: torch.dtype
) -> torch.Tensor:
    """Compute `quantized_decomposed.quantize_per_tensor`, in the same steps."""
    codes = values.float() * (1.0 / scale)  # torch, too, rounds half precision as float32
    return codes.round_().add_(zero_point).clamp_(low, high).to(dtype)


def _dequantize_in_place(
    codes: torch.Tensor, scale: float, zero_point: int, *_: Any, out_dtype: Any = None
) -> torch.Tensor:
    """Compute `quantized_decomposed.dequantize_per_tensor`, in the same steps."""
    return codes.to(out_dtype or torch.float32).sub_(zero_point).mul_(scale)


def without_rounding(simulated: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a copy of a quantized graph that rounds nothing."""
    copied = _copied(simulated)
    for node in list(copied.graph.nodes):
        if _is_dequantized(node):
            node.replace_all_uses_with(node.args[0].args[0])
    copied.graph.eliminate_dead_code()
    copied.recompile()
    return copied


def in_float(simulated: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return a copy of a quantized graph without rounding; weights keep their codes' values."""
    plain = _copied(simulated)
    unfold_weights(plain)
    return without_rounding(plain)


def activation_scales(simulated: torch.fx.GraphModule) -> set[tuple[float, int]]:
    """Return scale and zero point of each tensor quantized per tensor."""
    found = set()
    for node in simulated.graph.nodes:
        if op_name(node) == "quantize_per_tensor":
            scale, zero_point = (
                _value(simulated, each) if hasattr(each, "op") else each for each in node.args[1:3]
            )
            found.add((float(scale), int(zero_point)))
    return found


def constants_of(simulated: torch.fx.GraphModule) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a graph's floating-point constants, with and without rounding."""
    rounded: dict[torch.fx.Node, Any] = {}
    exact: dict[torch.fx.Node, Any] = {}
    for node in simulated.graph.nodes:
        if node.op == "get_attr":
            rounded[node] = exact[node] = operator.attrgetter(node.target)(simulated)
        elif node.op == "call_function" and all(each in rounded for each in node.all_input_nodes):
            with torch.no_grad():
                rounded[node] = _called(node, rounded)
                exact[node] = exact[node.args[0]] if _is_qdq(node) else _called(node, exact)
    return [
        (value.detach(), exact[node].detach())
        for node, value in rounded.items()
        if isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and isinstance(exact[node], torch.Tensor)
    ]


def _called(node: Any, values: Mapping[Any, Any]) -> Any:
    args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    return node.target(*args, **kwargs)


def is_static(simulated: torch.fx.GraphModule) -> bool:
    """Return whether a graph rounds any activation, which the converter's STATIC mode is for."""
    return any(_is_quantize(n) and not is_constant(n.args[0]) for n in simulated.graph.nodes)


def holds_weights_alone(simulated: torch.fx.GraphModule) -> bool:
    """
    Return whether any op has a quantized weight and a float input.

    The converter's STATIC mode silently leaves such an op in float (litert-torch 0.10.0). Its
    DYNAMIC mode quantizes it, and the ops that are quantized statically as well; for those, only
    the file's inputs and outputs stay in float, with QUANTIZE and DEQUANTIZE.
    """
    return any(map(_has_weight_alone, simulated.graph.nodes))


def _has_weight_alone(node: Any) -> bool:
    if op_name(node) not in _WEIGHTED:
        return False
    constants = [each for each in node.all_input_nodes if _is_quantized_constant(each)]
    operands = [each for each in node.all_input_nodes if _is_dequantized(each)]
    # A dynamic op may follow a static one.
    return bool(constants) and (len(constants) == len(operands) or WEIGHT_ALONE in node.meta)


def _has_float_weight(node: Any) -> bool:
    if op_name(node) not in ("conv1d", "conv2d", "linear"):
        return False
    between = any(map(_is_quantize, _users_behind_relus(node)))
    return between and is_constant(node.args[1]) and not _is_quantized_constant(node.args[1])


def _joins_scales(node: Any) -> bool:
    if op_name(node) not in ("cat", "stack"):
        return False
    return len({each.args[1:3] for each in node.all_input_nodes if _is_dequantized(each)}) > 1


def quantized_weights(simulated: torch.fx.GraphModule) -> set[tuple[str, str]]:
    """Return module path and TFLite op of layers whose weights are all quantized."""
    found: dict[tuple[str, str], bool] = {}
    for node in simulated.graph.nodes:
        stack = list(node.meta.get("nn_module_stack", {}).values())
        for op in _family(node) or ():
            key = (stack[-1][0] if stack else "", op)
            weight = node.args[1]
            quantized = _is_quantized_constant(weight) or str(weight.target).endswith(_ROUNDED)
            found[key] = found.get(key, True) and quantized
    return {key for key, quantized in found.items() if quantized}


def modules_left_in_float(simulated: torch.fx.GraphModule) -> set[str]:
    """Return the paths of the modules with a config of None."""
    nodes = [node for node in simulated.graph.nodes if node.meta.get(LEFT_IN_FLOAT)]
    stacks = [list(node.meta.get("nn_module_stack", {}).values()) for node in nodes]
    # A function called by the model itself does not apply to its other ops.
    return {stack[-1][0] for stack in stacks if stack} - {""}


def _family(node: Any) -> tuple[str, ...] | None:
    return _FAMILIES.get(op_name(node))


def _is_quantize(node: Any) -> bool:
    return op_name(node).startswith("quantize_per_")


def _is_qdq(node: Any) -> bool:
    return _is_quantize(node) or op_name(node).startswith("dequantize_per_")


def _is_dequantized(node: Any) -> bool:
    """Return whether a node is a dequantize of a quantize node."""
    return op_name(node).startswith("dequantize_per_") and _is_quantize(node.args[0])


def _is_quantized_constant(node: Any) -> bool:
    return _is_dequantized(node) and is_constant(node.args[0].args[0])


def _users_behind_relus(node: Any) -> list[Any]:
    """Return the users of an op's result, skipping ReLUs, which are fused."""
    users = []
    for user in node.users:
        users += _users_behind_relus(user) if op_name(user) in ("relu", "relu_") else [user]
    return users


def _value(graph: torch.fx.GraphModule, node: Any) -> Any:
    """Compute the value of a node whose operands, also in lists, are constants."""
    if node.op == "get_attr":
        return operator.attrgetter(node.target)(graph)
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda each: _value(graph, each))
    if op_name(node) == "dequantize_per_channel" and not args[2].any():
        # Zero points of 0 change no bit, and torch 2.13 subtracts them in int64: ten times as long.
        args = (*args[:2], None, *args[3:])
    with torch.no_grad():
        return node.target(*args, **kwargs)


def _fold(graph: torch.fx.GraphModule, node: Any, place: int) -> None:
    constant = node.args[place]
    name = f"{node.name}_{'weight' if place == 1 else 'bias'}{_ROUNDED}"
    folded = _inserted(graph, node, name, _value(graph, constant))
    folded.meta.update(constant.meta)
    node.update_arg(place, folded)


def _check_bias_scale(graph: torch.fx.GraphModule, node: Any) -> None:
    def scale(operand: Any) -> Any:
        value = operand.args[1]
        value = _value(graph, value) if isinstance(value, torch.fx.Node) else value
        return torch.as_tensor(value, dtype=torch.float64).reshape(-1)

    source, weight, bias = node.args[:3]
    where = f"{node.name} ({node.target})"
    if not (_is_dequantized(source) and _is_dequantized(weight)):
        raise RefusedError(
            f"{where}: its bias is annotated as int32, but its input or its weight is not "
            "quantized: annotate all three, or leave the bias out"
        )
    wanted, actual = scale(source) * scale(weight), scale(bias)
    # float32 rounds a product by 6e-8 of it.
    if wanted.shape != actual.expand_as(wanted).shape or not torch.allclose(
        actual.expand_as(wanted), wanted, rtol=1e-6, atol=0
    ):
        raise RefusedError(
            f"{where}: its bias is annotated with scale {float(actual[0]):.6g}, but kernels take "
            f"input × weight only, {float(wanted[0]):.6g}: derive it with DerivedQuantizationSpec "
            "from the edges of both, or leave the bias out"
        )
