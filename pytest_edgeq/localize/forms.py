"""Functions of torch in the steps that the converter makes of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["FORMS", "addmm_in_steps", "batch_norm_in_steps", "decompositions"]


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """What torch takes apart as the converter does, by its operator."""
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


def batch_norm_in_steps(
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


def _pairwise_distance(
    one: torch.Tensor,
    two: torch.Tensor,
    order: float = 2.0,
    eps: float = 1e-6,
    keepdim: bool = False,
) -> torch.Tensor:
    return _vector_norm(one - two + eps, order, -1, keepdim)


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


def _lerp(start: torch.Tensor, end: torch.Tensor, weight: Any) -> torch.Tensor:
    """From one value towards another, whichever is nearer."""
    value: torch.Tensor = start + (end - start) * weight
    return value


def addmm_in_steps(
    value: torch.Tensor,
    one: torch.Tensor,
    other: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> torch.Tensor:
    """As the converter has it where it folds no factor into a constant."""
    return _times(torch.mm(one, other), alpha) + _times(value, beta)


FORMS: dict[str, Callable[..., Any]] = {
    "batch_norm": _batch_norm,
    "linalg_vector_norm": _vector_norm,
    "pairwise_distance": _pairwise_distance,
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
    "lerp": _lerp,
    "expm1": lambda value: torch.exp(value) - 1,
    "log1p": lambda value: torch.log(value + 1),
    "prelu": _prelu,
    "scaled_dot_product_attention": _attention,
    "layer_norm": _layer_norm,
    "instance_norm": _instance_norm,
}
"""Functions as the converter has them, by name."""
