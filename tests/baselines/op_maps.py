"""Op-dtype maps to compare, built by hand."""

from __future__ import annotations

from typing import Any

OpMap = dict[str, Any]


def op(name: str, module: str | None = None, scheme: str = "int8", **fields: Any) -> dict[str, Any]:
    """Make a row: an op whose activations and outputs are of its scheme's dtype."""
    dtype = {"float": "float32", "integer": "int32"}.get(scheme, scheme)
    weighted = name in ("CONV_2D", "FULLY_CONNECTED")
    row = {
        "subgraph": 0,
        "op": name,
        "module": module,
        "inputs": [dtype] * (2 if name == "ADD" else 1),
        "weight": dtype if weighted else None,
        "bias": ("float32" if scheme == "float" else "int32") if weighted else None,
        "outputs": [dtype],
        "granularity": "per_channel" if weighted and scheme != "float" else None,
        "scheme": scheme,
    }
    assert set(fields) <= {*row, "delegation"}, "a field that rows do not have"
    return {**row, **fields}


def op_map(*ops: dict[str, Any]) -> OpMap:
    """Make a map of these ops with one input and one output."""
    return {
        "inputs": [{"name": "args_0", "dtype": "int8", "shape": [1, 3, 32, 32]}],
        "outputs": [{"name": "output_0", "dtype": "int8", "shape": [1, 10]}],
        "ops": list(ops),
    }


def residual(blocks: int = 2) -> OpMap:
    """Make the map of a small residual network."""
    ops = [op("CONV_2D", "stem")]
    for block in range(blocks):
        path = f"layer1.{block}"
        ops += [op("CONV_2D", f"{path}.conv"), op("ADD", path), op("RELU", f"{path}.relu")]
    return op_map(*ops, op("MEAN", "pool"), op("FULLY_CONNECTED", "fc"))


def borders(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Make what a converter puts around an op that it leaves in float."""
    into = op("DEQUANTIZE", row["module"], outputs=["float32"])
    out_of = op("QUANTIZE", row["module"], inputs=["float32"])
    in_float = op(row["op"], row["module"], "float")
    return [*(into for _ in row["inputs"]), in_float, out_of]
