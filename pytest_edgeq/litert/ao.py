"""torchao's `quantize_`: modules with quantized weights, and their limits in files."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pytest_edgeq.litert.libraries import quiet
from pytest_edgeq.litert.weights import QuantizedWeight
from pytest_edgeq.names import nearest
from pytest_edgeq.versions import check_stack

_INSTEAD = (
    "use IntxWeightOnlyConfig or Int8DynamicActivationIntxWeightConfig (int4: "
    "weight_dtype=torch.int4) in their default packing, Int8WeightOnlyConfig or "
    "Int8DynamicActivationInt8WeightConfig"
)


def is_ao_config(thing: object) -> bool:
    """Return whether something is a config for torchao's `quantize_`."""
    # Without an import: owners of a config have torchao, and others need not have it.
    return any(
        kind.__name__ == "AOBaseConfig" and kind.__module__.startswith("torchao.")
        for kind in type(thing).__mro__
    )


def ao_config_of(config: Any, quantized: Sequence[str], floats: Sequence[str]) -> Any:
    """Return a config that quantizes some modules as another config, and leaves others in float."""
    from torchao.quantization import FqnToConfig

    if not isinstance(config, FqnToConfig):
        return FqnToConfig(dict.fromkeys(quantized, config))
    with quiet():  # of a `_default`, which is deprecated
        return FqnToConfig({**config.fqn_to_config, **_entries(config, floats)})


def ao_config_code(config: Any, quantized: Sequence[str], floats: Sequence[str]) -> str:
    """Return the Python code of `ao_config_of`."""
    from torchao.quantization import FqnToConfig

    entries = ["**config.fqn_to_config"]
    if isinstance(config, FqnToConfig):
        entries += [f'"{name}": None' for name in _entries(config, floats)]
    else:
        entries = [f'"{module}": config' for module in quantized]
    lines = [f"    {entry}," for entry in entries]
    return "\n".join(
        ["from torchao.quantization import FqnToConfig", "", "config = FqnToConfig({", *lines, "})"]
    )


def _entries(config: Any, floats: Sequence[str]) -> dict[str, None]:
    """Return entries that leave modules in float, and their weights where these have entries."""
    weights = [f"{module}.weight" for module in floats]
    return dict.fromkeys([*floats, *(each for each in weights if each in config.fqn_to_config)])


def holds_ao_weights(model: torch.nn.Module) -> bool:
    """Return whether a model's weights are torchao's quantized tensors."""
    return bool(_quantized_parameters(model))


def _quantized_parameters(model: torch.nn.Module) -> list[tuple[str, Any]]:
    return [(name, each) for name, each in model.named_parameters() if _is_quantized(each)]


def _is_quantized(parameter: torch.nn.Parameter) -> bool:
    return type(parameter).__module__.startswith("torchao")


def quantize_ao(model: torch.nn.Module, config: Any, name: str) -> torch.nn.Module:
    """
    Quantize a copy of a model by torchao's `quantize_`.

    In the weights of ops that quantize their activations, the lowest code (−128 of int8, −8 of
    int4) becomes its neighbour: LiteRT's weights end at −127 and −7, and its builtin kernels
    compute wrong results with lower ones (ai-edge-litert 2.3.0: 15 dB instead of 40). By torchao's
    default mapping such a weight lies half-way between the two, so the error does not grow.
    """
    with quiet():
        from torchao.quantization import FqnToConfig, quantize_

        options = {}
        if isinstance(config, FqnToConfig):
            _check_keys(config, model, name)
            options = {"filter_fn": None}
        try:
            quantized = copy.deepcopy(model)
            quantize_(quantized, config, **options)
        except Exception as error:
            check_stack(error)
            # Configs for GPUs raise ImportError, AssertionError or an error of their kernels.
            raise RuntimeError(
                f"torchao cannot apply {type(config).__name__} to {name} here: it asks for another "
                "device or library, for calibration, for other shapes, or for weights that are "
                "parameters (remove weight_norm, spectral_norm and pruning before). Otherwise, "
                f"{_INSTEAD}\n"
                f"{type(error).__name__}: {error}"
            ) from error
        if not holds_ao_weights(quantized):
            raise ValueError(_nothing_quantized(quantized, config, name))
        with torch.no_grad():
            for _, weight in _quantized_parameters(quantized):
                if _is_integer(weight) and _is_dynamic(weight) and _stored_bits(weight) > 2:
                    weight.qdata.clamp_(min=1 - 2 ** (_stored_bits(weight) - 1))
    return quantized


def _check_keys(config: Any, model: torch.nn.Module, name: str) -> None:
    # Tied parameters have several names, all of which torchao accepts.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = {*dict(model.named_modules(remove_duplicate=False)), *parameters} - {""}
    for key in config.fqn_to_config:
        if key.startswith("re:"):
            matches = any(re.fullmatch(key[3:], each) for each in names)
        else:
            matches = key in names or key == "_default"
        if not matches:
            raise ValueError(
                f"{type(config).__name__}: {key!r} matches no module and no parameter of "
                f"{name}{nearest(key.removeprefix('re:'), names)}; a regex starts with 're:' and "
                "must match the whole name"
            )


def _nothing_quantized(quantized: torch.nn.Module, config: Any, name: str) -> str:
    kind = type(config).__name__
    kinds = {type(module).__module__ for module in quantized.modules()}
    if any(each.startswith("torchao.quantization.qat") for each in kinds):
        return (
            f"{kind} prepares {name} for training and quantizes nothing yet: call "
            "quantize_(model, config) yourself, train the model, and pass it with "
            "quantizer=QATConfig(base_config, step='convert')"
        )
    return (
        f"nothing of {name} was quantized by {kind}: torchao quantizes the weights of nn.Linear, "
        "and of the modules that an FqnToConfig names. For other layers use a PT2E quantizer or a "
        "recipe"
    )


def ao_weights(quantized: torch.nn.Module, name: str) -> list[QuantizedWeight]:
    """Read the quantized weights of a module."""
    weights = []
    for path, tensor in _quantized_parameters(quantized):
        where = f"{name}: {path}"
        if not _is_integer(tensor):
            raise ValueError(
                f"{where} is a {type(tensor).__name__}, which no .tflite can hold; {_INSTEAD}"
            )
        if _has_any(tensor, "act_quant_scale", "act_pre_scale"):
            raise ValueError(
                f"{where} multiplies or quantizes its activations by fixed scales and leaves its "
                "output in float, which no .tflite op does; for static int8 use "
                "quantizer='pt2e_static_int8'"
            )
        weight = _read(path, tensor)
        refusal = _why_not(weight, tuple(tensor.block_size))
        if refusal is not None:
            raise ValueError(f"{where}: {refusal}")
        weights.append(weight)
    return weights


def _is_integer(tensor: Any) -> bool:
    with quiet():
        from torchao.quantization import Int8Tensor, IntxUnpackedToInt8Tensor
    return isinstance(tensor, (Int8Tensor, IntxUnpackedToInt8Tensor))


def _is_dynamic(tensor: Any) -> bool:
    # Each of the two kinds of tensor has one of the two attributes.
    return _has_any(tensor, "activation_quantization", "act_quant_kwargs")


def _has_any(tensor: Any, *names: str) -> bool:
    return any(getattr(tensor, name, None) is not None for name in names)


def _stored_bits(tensor: Any) -> int:
    """Return the width of the narrowest integers of a file that hold the codes."""
    target = str(getattr(tensor, "target_dtype", "torch.int8"))
    bits = int(target.removeprefix("torch.int"))
    return next(stored for stored in (2, 4, 8) if bits <= stored)


def _read(path: str, tensor: Any) -> QuantizedWeight:
    codes = tensor.qdata.detach().numpy()
    sizes = zip(codes.shape, tensor.block_size, strict=True)
    split = [axis for axis, (size, block) in enumerate(sizes) if size // block > 1]
    last = codes.ndim - 1
    axis, block = (split[0] if split else None), 0
    if last in split and tensor.block_size[last] > 1:
        axis, block = last, tensor.block_size[last]
    scales = tensor.scale.detach().float().numpy().reshape(-1)
    zero_points = np.zeros(scales.shape, np.int64)
    if tensor.zero_point is not None:
        zero_points = tensor.zero_point.detach().long().numpy().reshape(-1)
    return QuantizedWeight(
        name=path,
        codes=codes,
        scales=scales,
        zero_points=zero_points,
        values=tensor.dequantize().detach().float().numpy(),
        bits=_stored_bits(tensor),
        axis=axis,
        block=block,
        dynamic=_is_dynamic(tensor),
    )


def _why_not(weight: QuantizedWeight, block_size: tuple[int, ...]) -> str | None:
    if weight.codes.ndim != 2:
        return (
            f"a weight of {weight.codes.ndim} dimensions; torchao's kernels and ours take those of "
            "Linear and Embedding. For convolutions use a PT2E quantizer or a recipe"
        )
    if weight.block and block_size[0] != 1:
        return f"blocks of {block_size[0]}×{block_size[1]}; a .tflite holds blocks within a row"
    if not weight.dynamic:
        return None
    if weight.zero_points.any():
        return (
            "zero points other than 0, which no op that quantizes its activations supports: use "
            "weight_mapping_type=MappingType.SYMMETRIC, or a weight-only config"
        )
    if weight.axis == 0 or weight.axis is None:
        return None
    if not weight.block:
        return "scales along the inputs, which no op that quantizes its activations supports"
    if weight.bits != 4 or weight.block % 32:
        return (
            f"int{weight.bits} in groups of {weight.block} with quantized activations, which "
            "XNNPACK does not take and LiteRT's builtin kernels get wrong: groups must be int4 and "
            "a multiple of 32. Use weight_granularity=PerAxis(0), weight_dtype=torch.int4, or a "
            "weight-only config"
        )
    return None


def dequantized(quantized: torch.nn.Module) -> torch.nn.Module:
    """Return a copy with dequantized float parameters."""
    with quiet():
        plain = copy.deepcopy(quantized)
        for module in plain.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if _is_quantized(parameter):
                    values = torch.nn.Parameter(parameter.dequantize(), requires_grad=False)
                    setattr(module, name, values)
    return plain
