"""Rules of recipes, as ai-edge-quantizer reads them."""

from __future__ import annotations

from typing import Any


def _rule(
    weights: str,
    regex: str,
    operation: str,
    *,
    bits: int = 8,
    algorithm: str = "min_max_uniform_quantize",
    activation: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    plain = {"num_bits": bits, "symmetric": True, "granularity": "CHANNELWISE", "dtype": "INT"}
    config = {
        **({"activation_tensor_config": activation} if activation else {}),
        "weight_tensor_config": plain | options,
        "compute_precision": "FLOAT" if weights == "dequantized" else "INTEGER",
        "explicit_dequantize": weights == "dequantized",
    }
    return {"regex": regex, "operation": operation, "algorithm_key": algorithm, "op_config": config}


def dynamic(regex: str = ".*", operation: str = "*", **options: Any) -> dict[str, Any]:
    """Float activations, integer weights."""
    return _rule("integer", regex, operation, **options)


def weight_only(regex: str = ".*", operation: str = "*", **options: Any) -> dict[str, Any]:
    """Weights behind an explicit DEQUANTIZE."""
    return _rule("dequantized", regex, operation, **options)


def float16(operation: str = "*") -> dict[str, Any]:
    """Weights of float16 behind a DEQUANTIZE."""
    options = {"bits": 16, "dtype": "FLOAT", "granularity": "TENSORWISE"}
    return weight_only(".*", operation, algorithm="float_casting", **options)


def static(
    regex: str = ".*", operation: str = "*", *, activation: int = 8, dtype: str = "INT", **more: Any
) -> dict[str, Any]:
    """Integer activations and weights."""
    config = {
        "num_bits": activation,
        "symmetric": activation == 16,
        "granularity": "TENSORWISE",
        "dtype": dtype,
    }
    return _rule("integer", regex, operation, activation=config, **more)


def left(regex: str, operation: str = "*") -> dict[str, Any]:
    """Leave in float."""
    return {"regex": regex, "operation": operation, "algorithm_key": "no_quantize"}
