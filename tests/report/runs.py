"""Records of runs with made-up numbers, quantized here, for the tests of views."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.baselines.op_changes import describe_change
from pytest_edgeq.numerics.error_sums import IOSpec, StageAccumulator
from pytest_edgeq.numerics.findings import Finding
from pytest_edgeq.report.run import Run

Record = dict[str, Any]

SCALE, ZERO_POINT = 0.05, -10
"""Of every output: qmin = −5.9, qmax = 6.85."""


def changed_map() -> Finding:
    """Return the change of an op-dtype map of which an op came, one went, and one is in float."""

    def op(name: str, module: str | None, dtype: str = "int8") -> Record:
        dtypes = [dtype] * (2 if name == "ADD" else 1)
        plain = {"subgraph": 0, "weight": None, "bias": None, "granularity": None}
        scheme = "float" if dtype == "float32" else dtype
        others = {"module": module, "inputs": dtypes, "outputs": [dtype], "scheme": scheme}
        return {"op": name, **plain, **others}

    before = [op("MEAN", f"stem.{i}") for i in range(4)]
    behind = [op("TANH", f"head.{i}") for i in range(6)]
    added = op("ADD", "layer1.0"), op("ADD", "layer1.0", "float32")
    old = [*before, added[0], op("RELU", None), *behind]
    new = [*before, added[1], op("QUANTIZE", "layer1.0"), *behind]
    found = describe_change(*({"inputs": [], "outputs": [], "ops": ops} for ops in (old, new)))
    assert found is not None
    return found


def run_of(models: dict[str, Record], tests: Sequence[Record], **more: Any) -> Run:
    """Return a record."""
    data = {
        "format": "pytest-edgeq run",
        "version": 1,
        "started": "2026-11-25T09:25:19+00:00",
        "seconds": 12.5,
        "python": "3.11.7",
        "machine": "x86_64",
        "versions": {"pytest-edgeq": "0.1.0", "torch": "2.13.0", "litert-quantizer": None},
        "models": models,
        "tests": list(tests),
        "baselines": {"obsolete": [], "pruned": []},
        **more,
    }
    return Run(data)


def model(
    name: str = "Net", *, outputs: Sequence[str] = ("logits",), ops: int = 6, **changed: Any
) -> Record:
    """Return a model whose ops are convolutions and sums in turn, the last one in float."""
    rows = [
        {
            "op": ("CONV_2D", "ADD")[i % 2],
            "module": f"layer{i // 2}.{('conv', 'add')[i % 2]}",
            "inputs": ["int8"] * (1 + i % 2),
            "weight": "int8" if not i % 2 else None,
            "bias": "int32" if not i % 2 else None,
            "outputs": ["int8"],
            "granularity": "per_channel" if not i % 2 else None,
            "scheme": "int8" if i < ops - 1 else "float",
            "subgraph": 0,
        }
        for i in range(ops)
    ]
    return {
        "name": name,
        "flow": "pt2e",
        "quantizer": "pt2e_static_int8",
        "sha256": "0123456789abcdef" * 4,
        "replaces": None,
        "size_bytes": 11448,
        "float_size": {"size_bytes": 21432, "of": "the float .tflite"},
        "inputs": [border("image", None)],
        "outputs": [border(output, SCALE) for output in outputs],
        "ops": rows,
        **changed,
    }


def border(name: str, scale: float | None) -> Record:
    """Return an input or output: int8 with a scale, else float32."""
    return {
        "signature": None,
        "name": name,
        "dtype": "float32" if scale is None else "int8",
        "shape": [1, 10],
        "scale": scale,
        "zero_point": None if scale is None else ZERO_POINT,
    }


def outcome(
    nodeid: str, models: Sequence[str], *events: Record, failure: str | None = None, **more: Any
) -> Record:
    """Return a test that passed, or failed with this text."""
    failed = {"phase": "call", "message": failure, "path": "test_x.py", "line": 7}
    return {
        "test": nodeid,
        "outcome": "passed" if failure is None else "failed",
        "seconds": 0.25,
        "models": list(models),
        "events": list(events),
        "claims": [],
        "failure": None if failure is None else failed,
        **more,
    }


def event(kind: str, key: str, **more: Any) -> Record:
    """Return a call."""
    return {"event": kind, "model": key, "seconds": 0.1, "error": None, **more}


def claim(change: Finding | None = None, **changed: Any) -> Record:
    """Return a baseline of an op-dtype map that differs."""
    return {
        "path": "__edgeq__/test_x/test_map.op_dtypes.json",
        "kind": "op_dtype_map",
        "category": "changed",
        "change": None if change is None else change.to_dict(),
        "written": False,
        "note": "",
        "since": ["torch 2.12.0 → 2.13.0"],
        "stored": "",
        "remarks": [],
        **changed,
    }


def compared(key: str, **sqnr_db: float | str) -> Record:
    """Return a comparison of one output whose stages have these SQNR."""
    stages = {}
    for stage, each in sqnr_db.items():
        stages[stage] = errors(y=(np.ones(4), np.zeros(4))) | {"sqnr_db": each}
        stages[stage]["outputs"]["y"]["sqnr_db"] = each
    return event("compare", key, comparison=comparison() | {"stages": stages, "points": {}})


def comparison(
    outputs: Sequence[str] = ("logits",), *, count: int = 2048, noise: float = 0.1, side: int = 0
) -> Record:
    """
    Return a comparison of a PT2E model, whose lowering is noisier from output to output.

    `side` is the height and width of the pictures of samples; 0 for samples that are none.
    """
    rng = np.random.default_rng(0)
    points: dict[str, Record] = {}
    sides: dict[str, dict[str, Any]] = {"quantization": {}, "lowering": {}, "total": {}}
    for i, name in enumerate(outputs):
        floats = rng.normal(0, 2, count)
        simulated = quantized(floats)
        edge = quantized(simulated + rng.normal(0, noise * (i + 1), count))
        points[name] = {"float": plain(floats), "simulated": plain(simulated), "edge": plain(edge)}
        sides["quantization"][name] = floats, simulated
        sides["lowering"][name] = simulated, edge
        sides["total"][name] = floats, edge
    return {
        "name": "Net",
        "flow": "pt2e",
        "runtime": "xnnpack",
        "stages": {stage: errors(**found) for stage, found in sides.items()},
        "health": [],
        "worst_samples": [
            {"index": i, "sqnr_db": 20.0 + i, "pictures": pictures(side, rng)} for i in (7, 3, 5)
        ],
        "fingerprint": "ab" * 32,
        "points": points,
    }


def quantized(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return values rounded to the scale and clipped to int8."""
    codes = np.clip(np.rint(values / SCALE) + ZERO_POINT, -128, 127)
    return np.asarray((codes - ZERO_POINT) * SCALE)


def plain(values: npt.NDArray[np.float64]) -> list[Any]:
    """Return values as the record has them."""
    return [float(f"{v:.5g}") if np.isfinite(v) else str(v) for v in values.tolist()]


def errors(**outputs: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]) -> Record:
    """Return the errors of a stage by the reference and the actual values of each output."""
    stage = StageAccumulator([IOSpec(name, SCALE) for name in outputs])
    references, actuals = zip(*outputs.values(), strict=True)
    stage.update(references, actuals)
    found = stage.result().to_dict()
    # As of 16 samples with classes.
    for each in (found, *found["outputs"].values()):
        each |= {"n_samples": 16, "top1_agreement": 0.875}
    return found


def pictures(side: int, rng: np.random.Generator) -> Record:
    """Return one picture of noise, which no format makes small; none for a side of 0."""
    if not side:
        return {}
    pixels = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
    return {
        "0": {
            "height": side,
            "width": side,
            "channels": 3,
            "low": -1.0,
            "high": 1.0,
            "pixels": base64.b64encode(pixels.tobytes()).decode("ascii"),
        }
    }


def layers(ops: Sequence[Record], culprit: int | None = 2) -> Record:
    """Return errors by layer: one to blame, one without an error, one that was not matched."""
    rows = [
        {
            "index": i,
            "op": op["op"],
            "module": op["module"],
            "verdict": "lowering" if i == culprit else "sound",
            "matched": True,
            "local_sqnr_db": 5.5 if i == culprit else 40.0 + i,
            "cumulative_sqnr_db": 30.0 - i,
            "local_lsb_error": 3.0,
            "cumulative_lsb_error": 4.0,
            "clipped": 0.25,
        }
        for i, op in enumerate(ops)
    ]
    rows[0] |= {"local_sqnr_db": "inf", "local_lsb_error": 0.0}
    unmatched = dict.fromkeys(
        f"{which}_{error}"
        for which in ("local", "cumulative")
        for error in ("sqnr_db", "lsb_error")
    )
    rows[1] |= {"matched": False, "verdict": "unmatched", "clipped": None, **unmatched}
    return {
        "cause": "CONV_2D #2 (layer1.conv): the weights differ" if culprit else "no single layer",
        "coverage": 0.75,
        "culprit": culprit,
        "rows": rows,
    }


def sensitivity(*modules: str, **changed: Any) -> Record:
    """Return sensitivities of these layers; the first loses nothing when quantized alone."""
    rows = [
        {
            "gain_db": 0.5 * i - 0.2,
            "in_float_db": 30 + 0.5 * i,
            "module": module,
            "ops": ["CONV_2D", "RELU"],
            "quantized_db": 35.0 + i if i else "inf",
            "readers": [f"ADD ({module})"],
            "weights": 1152,
        }
        for i, module in enumerate(modules)
    ]
    return {"groups": [], "n_samples": 8, "name": "Net", "rows": rows, "sqnr_db": 30.2} | changed


def plan(*modules: str, **changed: Any) -> Record:
    """Return a plan that misses its budget with these layers in float."""
    sizes = {6: (24000, 44.0), 0: (11400, 30.2), 3: (17000, 41.5), 2: (17500, 38.0)}
    return {
        "code": "".join(f'quantizer.set_module_name("{module}", None)\n' for module in modules),
        "goal": "Budget(sqnr_db=60)",
        "is_met": False,
        "layers": [{"gain_db": "nan", "module": module, "weights": 1152} for module in modules],
        "limits": [f"1 ops stay quantized: ADD ({module})" for module in modules],
        "name": "Net",
        "precision": "float",
        "sensitivity": sensitivity(*modules),
        "size_bytes": 17120,
        "sqnr_db": 41.25,
        "steps": [
            {"layers": layers, "size_bytes": size, "sqnr_db": sqnr}
            for layers, (size, sqnr) in sizes.items()
        ],
        "summary": f"does not meet Budget(sqnr_db=60) with {', '.join(modules)} in float",
    } | changed


def full_run(**names: str) -> Run:
    """Return a run of two models, `bad` and `good` or so named, with everything to show."""
    bad, good = (
        model(names.get("bad", "bad"), outputs=("scores", "boxes")),
        model(names.get("good", "good")),
    )
    return run_of(
        {"good-1": good, "bad-1": bad},
        [
            outcome("test_x.py::test_good", ["good-1"], event("quantize", "good-1", steps=[])),
            outcome(
                "test_x.py::test_errors",
                ["bad-1"],
                event("compare", "bad-1", comparison=comparison(("scores", "boxes"), side=12)),
                event("localize", "bad-1", layers=layers(bad["ops"])),
                failure="sqnr_db: expected at least 30, got 12",
            ),
            outcome("test_x.py::test_map", ["bad-1"], claims=[claim(changed_map())]),
        ],
    )
