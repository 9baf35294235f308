"""Rows as tests of what is done with them need them."""

from __future__ import annotations

from typing import Any

from pytest_edgeq.localize.rows import LayerError, LayerErrors
from pytest_edgeq.numerics.findings import WRONG_OP, Finding, Place


def wrong(symptom: str, kind: str = WRONG_OP, **known: Any) -> Finding:
    """Return a finding on an op."""
    return Finding(
        **{"kind": kind, "place": Place("op", "CONV_2D", 0), "symptom": symptom, **known}
    )


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
    records = [
        each if isinstance(each, Finding) else wrong(each) for each in changes.pop("findings", ())
    ]
    return LayerError(**(values | changes | {"records": tuple(records)}))


def culprit(errors: LayerErrors) -> LayerError:
    """Return the row to blame, which there must be."""
    assert errors.culprit is not None, errors
    return errors.culprit
