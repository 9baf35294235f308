"""Rows as tests of what is done with them need them."""

from __future__ import annotations

from typing import Any

from pytest_edgeq.localize.rows import LayerError


def row(index: int, **changes: Any) -> LayerError:
    """Give a sound row."""
    values: dict[str, Any] = {
        "index": index,
        "op": "CONV_2D",
        "module": f"layer{index}",
        "dtypes": {"input": "int8", "weight": "int8", "output": "int8"},
        "local_lsb_error": 1.0,
        "local_sqnr_db": 40.0,
        "local_rmse_lsb": 0.29,
        "cumulative_lsb_error": 3.0,
        "cumulative_sqnr_db": 33.0,
        "cumulative_rmse_lsb": 0.8,
        "clipped": 0.01,
        "matched": True,
        "excess_lsb": -0.1,
    }
    return LayerError(**(values | changes))
