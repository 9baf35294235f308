"""Take apart torch nodes that the converter takes apart, so that each part meets its op."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from pytest_edgeq.localize.kinds import HEAVY, VIEWS, base_name

__all__ = ["decompose"]

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
        *("softmax", "log_softmax", "einsum"),
        "scaled_dot_product_attention",
        "addmm",
        "mish",
        *("var", "std", "var_mean", "std_mean", "stack", "avg_pool2d", "clamp", "clip", "hardtanh"),
    ),
}


def decompose(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    is_subtracted: Callable[[torch.Tensor], bool] = lambda _: False,
) -> torch.fx.GraphModule:
    """
    A graph of the same values in smaller steps; the module itself is left as it was.

    Args:
        module: An exported graph.
        inputs: One for each placeholder: what gives examples of the nodes' values, which the graph
            may not hold (as after training), or hold for any size.
        is_subtracted: Whether the file subtracts this constant, the mean of a batch norm, which it
            does where it holds images with channels last; elsewhere it is a part of what is added.
    """
    examples = _Examples(module)
    with torch.no_grad():
        examples.run(*(_cloned(each) for each in inputs))
    graph = torch.fx.Graph()
    known: dict[torch.fx.Node, Any] = {}
    added: dict[str, torch.Tensor] = {}
    for node in module.graph.nodes:
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
        parts = None
        if _functional(node) in _COMPOSED:
            function = _function(module, node, is_subtracted)
            parts = _parts(node, function, examples.known)
        if parts is None:
            known[node] = graph.node_copy(node, known.__getitem__)
            if isinstance(examples.known.get(node), torch.Tensor):
                known[node].meta["val"] = examples.known[node]
        else:
            known[node] = _inline(graph, node, parts, known, added)
    _hoist_scales(graph)
    _merge_equals(graph)
    _share_means(graph)
    held = {str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")}
    own = {name: operator.attrgetter(name)(module) for name in held - set(added)}
    return torch.fx.GraphModule({**own, **added}, graph)


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
        if base_name(node) != "mul" or not isinstance(node.args[1], (int, float)):
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


def _share_means(graph: torch.fx.Graph) -> None:
    """Let a mean be that over the same axes which keeps these: the file has one of them."""
    means: dict[tuple[torch.fx.Node, str], list[torch.fx.Node]] = {}
    for node in graph.nodes:
        if base_name(node) == "mean" and len(node.args) > 1 and not node.kwargs:
            means.setdefault((node.args[0], repr(node.args[1])), []).append(node)
    for nodes in means.values():
        keeping = [node for node in nodes if node.args[2:] == (True,)]
        bare = [node for node in nodes if node not in keeping]
        if not keeping or not bare:
            continue
        with graph.inserting_before(nodes[0]):
            whole = graph.node_copy(keeping[0])
        for node in nodes:
            same = whole
            if node in bare:
                shape = list(node.meta["val"].shape)
                with graph.inserting_before(node):
                    same = graph.call_function(torch.ops.aten.reshape.default, (whole, shape))
                same.meta.update(node.meta)
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _merge_equals(graph: torch.fx.Graph) -> None:
    """Let calls of one function on the same values be one node, as the converter lets them."""
    known: dict[tuple[Any, ...], torch.fx.Node] = {}
    for node in list(graph.nodes):
        if node.op not in ("call_function", "get_attr") or _is_random(node):
            continue
        # As text 1 and 1.0 are two, and nodes have names of their own.
        key = (node.target, repr(node.args), repr(node.kwargs))
        first = known.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _is_random(node: torch.fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


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
) -> Any:
    """What a node computes, in the converter's steps where these are known here."""
    name = _functional(node)
    if name == "batch_norm" and isinstance(mean := node.args[3], torch.fx.Node):
        held = operator.attrgetter(str(mean.target))(module) if mean.op == "get_attr" else None
        if held is not None and is_subtracted(held.detach()):
            return _batch_norm_in_steps
    if name in _OURS:
        return _OURS[name]
    return node.target if name == base_name(node) else getattr(torch.ops.aten, name).default


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
            return make_fx(call, decomposition_table=_table())(*given)
    finally:
        torch.backends.mkldnn.set_flags(enabled)  # type: ignore[no-untyped-call]


@functools.cache
def _table() -> dict[Any, Callable[..., Any]]:
    from torch._decomp import core_aten_decompositions, get_decompositions

    aten = torch.ops.aten
    table = dict(core_aten_decompositions())
    table |= get_decompositions([aten.native_layer_norm, aten.native_group_norm, aten.silu])
    table[aten.var_mean.correction] = _var_mean
    for kept in (aten.addmm.default, aten.linear.default, aten._softmax.default):
        table.pop(kept, None)
    return table


def _var_mean(
    value: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    assert correction == 0, "normalisations divide by the number of elements"
    mean = value.mean(dim, keepdim=True)
    apart = value - mean
    return (apart * apart).mean(dim, keepdim=keepdim), mean if keepdim else value.mean(dim)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """As torch documents `scaled_dot_product_attention`, of a model in eval mode."""
    if enable_gqa:
        groups = query.size(-3) // key.size(-3)
        key, value = (each.repeat_interleave(groups, -3) for each in (key, value))
    # Half of the scale on either side, as torch's own decomposition has it.
    root = (query.size(-1) ** -0.5 if scale is None else scale) ** 0.5
    scores = (query * root) @ (key.transpose(-2, -1) * root)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
        scores = scores + mask
    return torch.softmax(scores, -1) @ value


def _layer_norm(
    value: torch.Tensor,
    shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> torch.Tensor:
    """As the converter has it: x·r − mean·r, where torch subtracts first."""
    dims = list(range(-len(shape), 0))
    mean = value.mean(dims, keepdim=True)
    apart = value - mean
    inverse = torch.rsqrt((apart * apart).mean(dims, keepdim=True) + eps)
    normal = value * inverse + (0 - inverse * mean)
    scaled = normal if weight is None else normal * weight
    return scaled if bias is None else scaled + bias


def _instance_norm(
    value: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    """A mean and a variance for each channel of each image."""
    if not use_input_stats:
        return torch.instance_norm(
            value, weight, bias, mean, variance, False, momentum, eps, cudnn_enabled
        )
    dims = list(range(2, value.ndim))
    apart = value - value.mean(dims, keepdim=True)
    normal = apart * torch.rsqrt((apart * apart).mean(dims, keepdim=True) + eps)
    channels = [1, -1, *[1] * len(dims)]
    scaled = normal if weight is None else normal * weight.reshape(channels)
    return scaled if bias is None else scaled + bias.reshape(channels)


def _prelu(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As the converter has it, so that each part of it meets its op."""
    slope = weight if weight.numel() == 1 else weight.reshape(-1, *(1,) * (value.ndim - 2))
    return torch.relu(value) - torch.relu(value * -1.0) * slope


def _batch_norm(
    value: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    """As the converter has it, of a model in eval mode: x·(γ/σ) + (β − μ·γ/σ)."""
    if training or mean is None or variance is None:
        return torch.batch_norm(
            value, weight, bias, mean, variance, training, momentum, eps, cudnn_enabled
        )
    channels = [1, -1, *[1] * (value.ndim - 2)]
    scale = torch.rsqrt(variance + eps)
    scale = scale if weight is None else scale * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    return value * scale.reshape(channels) + shift.reshape(channels)


def _batch_norm_in_steps(
    value: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    """As the converter has it of images: (x − μ)·(1/σ)·γ + β."""
    channels = [1, -1, *[1] * (value.ndim - 2)]
    found = (value - mean.reshape(channels)) * torch.rsqrt(variance + eps).reshape(channels)
    found = found if weight is None else found * weight.reshape(channels)
    return found if bias is None else found + bias.reshape(channels)


def _vector_norm(
    value: torch.Tensor,
    order: float = 2.0,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """As the converter has those of the first and second order."""
    if order not in (1, 2) or dtype is not None:
        found: torch.Tensor = torch.linalg.vector_norm(value, order, dim, keepdim, dtype=dtype)
        return found
    size = torch.abs(value)
    dims = list(range(value.ndim)) if dim is None else dim
    if order == 1:
        return size.sum(dims, keepdim)
    return torch.sqrt((size * size).sum(dims, keepdim))


def _elu(
    value: torch.Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0
) -> torch.Tensor:
    """As the converter has it, in steps."""
    low = torch.exp(_times(value, input_scale)) - 1
    return torch.where(value >= 0, _times(value, scale), _times(low, alpha * scale))


def _selu(value: torch.Tensor) -> torch.Tensor:
    """As torch documents it."""
    return _elu(value, 1.6732632423543772, 1.0507009873554805)


def _celu(value: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    """As the converter has it: ELU with another comparison."""
    low = torch.exp(_times(value, 1 / alpha)) - 1
    return torch.where(value > 0, value, _times(low, alpha))


def _softplus(value: torch.Tensor, beta: float = 1.0, threshold: float = 20.0) -> torch.Tensor:
    """As the converter has it, in steps."""
    scaled = _times(value, beta)
    soft = _times(torch.log(torch.exp(scaled) + 1), 1 / beta)
    return torch.where(scaled > threshold, value, soft)


def _mish(value: torch.Tensor) -> torch.Tensor:
    """As torch documents it."""
    return value * torch.tanh(_softplus(value))


def _glu(value: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """As torch documents it."""
    half = value.shape[dim] // 2
    return value.narrow(dim, 0, half) * torch.sigmoid(value.narrow(dim, half, half))


def _threshold(value: torch.Tensor, threshold: float, other: float) -> torch.Tensor:
    """As the converter has it."""
    return torch.where(value <= threshold, other, value)


def _erf(value: torch.Tensor) -> torch.Tensor:
    """As the converter has it: Eigen's quotient of polynomials, with constants in float32."""
    value = value.clamp_max(4.0).clamp_min(-4.0)
    square = value * value
    found = value * _polynomial(square, _ERF_ABOVE) / _polynomial(square, _ERF_BELOW)
    return found.clamp(-1.0, 1.0)


def _var_and_mean(
    value: torch.Tensor,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the converter has it, which shares the mean and the differences with others of them."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    dims = list(range(value.ndim)) if dim is None or dim == [] else dim
    mean = value.mean(dims, keepdim=True)
    apart = value - mean
    square = apart * apart
    less = correction if correction is not None else int(unbiased)
    if less:
        count = math.prod(value.shape[each] for each in dims)
        found = square.sum(dims, keepdim=keepdim) * (1 / max(count - less, 0))
    else:
        found = square.mean(dims, keepdim=keepdim)
    return found, mean if keepdim else mean.squeeze(dims)


def _std_and_mean(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    variance, mean = _var_and_mean(*args, **kwargs)
    return torch.sqrt(variance), mean


def _softmax(value: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """As the converter has it over any axis but the last one, for which there is an op."""
    if dim % value.ndim == value.ndim - 1 or dtype not in (None, value.dtype):
        return torch.softmax(value, dim, dtype)
    size = torch.exp(value - value.amax(dim, keepdim=True))
    return size / size.sum(dim, keepdim=True)


def _log_softmax(value: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """As `_softmax`."""
    if dim % value.ndim == value.ndim - 1 or dtype not in (None, value.dtype):
        return torch.log_softmax(value, dim, dtype)
    apart = value - value.amax(dim, keepdim=True)
    return apart - torch.log(torch.exp(apart).sum(dim, keepdim=True))


def _clamp(value: torch.Tensor, low: Any = None, high: Any = None) -> torch.Tensor:
    """As the converter has it, which makes one op of some pairs of bounds: what holds both."""
    if any(isinstance(each, torch.Tensor) for each in (low, high)):
        value = value if low is None else torch.maximum(value, torch.as_tensor(low))
        return value if high is None else torch.minimum(value, torch.as_tensor(high))
    value = value if low is None else value.clamp_min(low)
    return value if high is None else value.clamp_max(high)


def _stack(values: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """As the converter has it: side by side, and laid out anew."""
    last = values[0].ndim
    dim = dim % (last + 1)
    if dim == last:
        return torch.cat([each.unsqueeze(dim) for each in values], dim)
    shape = values[0].shape
    return torch.cat(list(values), dim).view(*shape[:dim], len(values), *shape[dim:])


def _avg_pool(
    value: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> torch.Tensor:
    """As the converter has it where windows end beyond the padding: these count what is inside."""
    kernel, padding = (list(each) * (2 // len(each)) for each in (kernel, padding))
    stride = list(stride) * (2 // len(stride)) if stride else kernel
    sizes = [size + 2 * pad for size, pad in zip(value.shape[-2:], padding, strict=True)]
    starts = [
        [i for i in range(0, size - k + s, s) if i < size - pad]
        for size, k, s, pad in zip(sizes, kernel, stride, padding, strict=True)
    ]
    # How many places of a window are inside, by axis.
    inside = [
        torch.tensor([min(i + k, size) - i for i in each], dtype=torch.float64)
        for each, size, k in zip(starts, sizes, kernel, strict=True)
    ]
    pool: Callable[..., torch.Tensor] = torch.ops.aten.avg_pool2d.default
    beyond = [each[-1] + k - size for each, size, k in zip(starts, sizes, kernel, strict=True)]
    if not (ceil_mode and count_include_pad and divisor is None and max(beyond) > 0):
        return pool(value, kernel, stride, padding, ceil_mode, count_include_pad, divisor)
    ends = [(pad, pad + max(more, 0)) for pad, more in zip(padding, beyond, strict=True)]
    value = torch.constant_pad_nd(value, [*ends[1], *ends[0]])
    shares = math.prod(kernel) / (inside[0][:, None] * inside[1])
    return pool(value, kernel, stride) * torch.tensor([[shares.tolist()]])


_ERF_ABOVE = (
    *(-2.726142367404094e-10, 2.7706814620387377e-08, -2.101023937939317e-06),
    *(-5.692506238119677e-05, -0.0007349906372837722, -0.0029545999132096767),
    -0.01609603315591812,
)
_ERF_BELOW = (
    *(-1.4566071513399947e-05, -0.00021337404905352741, -0.001682827016338706),
    *(-0.007373329252004623, -0.014264739118516445),
)


def _polynomial(value: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
    # As tensors: some are so small that the file's own rounding of them counts.
    first, *others = (torch.tensor(factor) for factor in factors)
    found = value * first
    for factor in others[:-1]:
        found = (found + factor) * value
    return found + others[-1]


def _times(value: torch.Tensor, factor: float) -> torch.Tensor:
    """A product of which no op is left where it changes nothing."""
    return value if factor == 1 else value * factor


_OURS: dict[str, Callable[..., Any]] = {
    "batch_norm": _batch_norm,
    "linalg_vector_norm": _vector_norm,
    "elu": _elu,
    "selu": _selu,
    "celu": _celu,
    "softplus": _softplus,
    "mish": _mish,
    "glu": _glu,
    "threshold": _threshold,
    "erf": _erf,
    "var": lambda *args, **kwargs: _var_and_mean(*args, **kwargs)[0],
    "std": lambda *args, **kwargs: _std_and_mean(*args, **kwargs)[0],
    "var_mean": _var_and_mean,
    "std_mean": _std_and_mean,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "stack": _stack,
    "clamp": _clamp,
    "clip": _clamp,
    "hardtanh": lambda value, low=-1.0, high=1.0: _clamp(value, low, high),
    "avg_pool2d": _avg_pool,
    "expm1": lambda value: torch.exp(value) - 1,
    "log1p": lambda value: torch.log(value + 1),
    "prelu": _prelu,
    "scaled_dot_product_attention": _attention,
    "layer_norm": _layer_norm,
    "instance_norm": _instance_norm,
}


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
