"""The sound baselines, cache entries and records of runs that the mutations start from."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from fixtures.tflite import make
from pytest_edgeq.baselines.paths import Layout
from pytest_edgeq.baselines.record import Owner
from pytest_edgeq.baselines.session import SnapshotSession
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.op_dtypes import OpDtypeMap

OWNER_TEST = "test_y"

_KINDS = {"op_dtype_map": "op_dtypes", "errors": "errors"}
"""Name of the claim of each kind of baseline."""


@functools.cache
def measured() -> dict[str, dict[str, Any]]:
    """Return what a test claims, by kind of baseline."""
    graph = OpGraph.read(make.CONVERTED / "activation_elsewhere.int8.tflite")

    def row(metric: str, value: Any, worst: Any, best: Any, stage: str) -> dict[str, Any]:
        limits = {"value": value, "worst": worst, "best": best}
        return {"stage": stage, "output": "logits", "metric": metric, **limits}

    errors = {
        "flow": "pt2e",
        "runtime": "xnnpack",
        "n_samples": 64,
        "fingerprint": "ab" * 32,
        "margin": {"bootstrap": {"resamples": 1000, "seed": 0, "level": 0.9999}},
        "scales": {"ADD #1 (block)": 0.5, "CONV_2D #0 (stem)": 0.25},
        "n_calibrated": 8,
        "calibration": "cd" * 32,
        "weights": "ef" * 32,
        "int16": ["ADD #1 (block)"],
        "asymmetric": ["CONV_2D #0 (stem)"],
        "shared": ["ADD #1 (block)"],
        "errors": [
            row("sqnr_db", "inf", 52.5, "inf", "lowering"),
            {**row("sqnr_db", 36.5, 35.0, 38.0, "total"), "samples": [1.5, 2.5, 3.5]},
            row("max_lsb_error", 4.0, 7.5, 0.5, "total"),
        ],
    }
    return {"op_dtype_map": OpDtypeMap(graph).to_dict(), "errors": errors}


@functools.cache
def baseline_seeds() -> dict[str, bytes]:
    """Return the stored files by kind."""
    files = {}
    with tempfile.TemporaryDirectory() as folder:
        owner = Owner(Path(folder) / "test_x.py", OWNER_TEST)
        memory = SnapshotSession(Layout(Path(folder)), update=["new"])
        for kind, name in _KINDS.items():
            with memory.running(owner, "call"):
                memory.check(kind, name, measured()[kind])
            files[kind] = Layout(Path(folder)).path(owner, name).read_bytes()
    return files


@functools.cache
def report_seeds() -> dict[str, bytes]:
    """Return records of runs, by what they hold."""
    from tests.report.runs import full_run

    return {
        "full": json.dumps(full_run().data).encode(),
        "obsolete": json.dumps(
            {**full_run().data, "baselines": {"obsolete": ["a.json"], "pruned": ["b.json"]}}
        ).encode(),
    }


@functools.cache
def cache_seeds() -> dict[str, dict[str, bytes]]:
    """Return the parts of an entry of each kind."""
    import numpy as np
    import torch

    from pytest_edgeq import litert
    from pytest_edgeq.quantize.cache.parts import Simulation, write_ranges, write_simulation

    with litert.quiet():
        program = torch.export.export(torch.nn.Linear(2, 3).eval(), (torch.zeros(1, 2),))
    graph: Any = program.module()
    return {
        "export": {"key": b"ab" * 32},
        "calibrate": write_simulation(Simulation(lambda: graph, True, False, frozenset())),
        "ranges": write_ranges({"x": {"min": np.zeros(1), "max": np.ones(1)}}),
        "quantize": {"tflite": (make.CONVERTED / "tied.int8.tflite").read_bytes()},
    }
