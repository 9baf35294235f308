"""Records of runs, put together by hand for tests of the views."""

from __future__ import annotations

from typing import Any

from pytest_edgeq.report.run import FORMAT, VERSION, Run


def model(name: str, **changed: Any) -> dict[str, Any]:
    """Return a model of one op in int8."""
    op = {
        "op": "ADD",
        "module": "head",
        "inputs": ["int8", "int8"],
        "weight": None,
        "bias": None,
        "outputs": ["int8"],
        "granularity": None,
        "scheme": "int8",
        "subgraph": 0,
    }
    border = {"signature": None, "name": "x", "dtype": "int8", "shape": [1, 8]}
    return {
        "name": name,
        "flow": "pt2e",
        "quantizer": "pt2e_static_int8",
        "sha256": "0" * 64,
        "replaces": None,
        "size_bytes": 2500,
        "float_size": {"size_bytes": 10_000, "of": "the torch model's parameters and buffers"},
        "inputs": [{**border, "scale": 0.5, "zero_point": 0}],
        "outputs": [{**border, "name": "output_0", "scale": 0.5, "zero_point": 0}],
        "ops": [op],
        **changed,
    }


def stage(sqnr_db: float | str, **changed: Any) -> dict[str, Any]:
    """Return the errors of a stage with one output."""
    metrics = {
        "max_abs_error": 0.1,
        "mean_abs_error": 0.01,
        "rmse": 0.02,
        "max_lsb_error": 1.0,
        "sqnr_db": sqnr_db,
        "worst_sample_sqnr_db": sqnr_db,
        "cosine_similarity": 0.99,
        "top1_agreement": 1.0,
        "n_samples": 4,
        "n_elements": 32,
        "nonfinite": 0,
        "degenerate": False,
        **changed,
    }
    return {**metrics, "outputs": {"output_0": metrics}}


def compared(key: str, **stages: float | str) -> dict[str, Any]:
    """Return the event of a comparison whose stages have these SQNR."""
    return {
        "event": "compare",
        "model": key,
        "seconds": 0.5,
        "error": None,
        "comparison": {
            "name": key,
            "flow": "pt2e",
            "runtime": "xnnpack",
            "stages": {name: stage(value) for name, value in stages.items()},
            "health": [],
            "worst_samples": [],
            "fingerprint": "0" * 64,
            "points": {},
        },
    }


def run_test(
    name: str, *models: str, failure: str = "", events: Any = (), claims: Any = ()
) -> dict[str, Any]:
    """Return a test that used models; it failed if there is the text of a failure."""
    failed = {"phase": "call", "message": failure, "path": "tests/test_x.py", "line": 7}
    return {
        "test": name,
        "outcome": "failed" if failure else "passed",
        "seconds": 1.0,
        "models": list(models),
        "events": list(events),
        "claims": list(claims),
        "failure": failed if failure else None,
    }


def claim(path: str, **changed: Any) -> dict[str, Any]:
    """Return a baseline that was found unchanged."""
    return {
        "path": path,
        "kind": "op_dtype_map",
        "category": "unchanged",
        "change": None,
        "written": False,
        "note": "",
        "since": [],
        "stored": "",
        "remarks": [],
        **changed,
    }


def record(
    models: dict[str, dict[str, Any]], tests: list[dict[str, Any]], *, obsolete: Any = ()
) -> Run:
    """Return a record of these models and tests."""
    return Run(
        {
            "format": FORMAT,
            "version": VERSION,
            "started": "2026-01-01T00:00:00+00:00",
            "seconds": 2.0,
            "python": "3.11.7",
            "machine": "x86_64",
            "versions": {"pytest-edgeq": "0.1.0", "torch": "2.13.0"},
            "models": models,
            "tests": tests,
            "baselines": {"obsolete": list(obsolete), "pruned": []},
        }
    )
