"""All plugins that a team may use, loaded together in one run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.ecosystem.overlay import ROOT, Overlay
from tests.shared_cache import shared_cache

# An environment is installed, and a suite runs in it.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

PLUGINS = (
    *("xdist", "randomly", "cov", "html", "timeout", "rerunfailures", "benchmark", "syrupy"),
    *("regressions", "edgeq"),
)
"""As the header of a run names them: each is loaded because it is installed."""

_OTHERS = ("anyio", "hypothesispytest", "jaxtyping")
"""Plugins that come with what tests and the converter need."""

PROJECT = """
import pytest
from fixtures.models import ConvBnRelu, samples, seeded
from pytest_edgeq import assert_input_dtypes

runs = []


def quantize(edgeq):
    return edgeq.quantize(
        seeded(ConvBnRelu), ConvBnRelu.sample_inputs(), calibration=samples(ConvBnRelu, 8)
    )


@pytest.fixture(scope="module")
def quantized(edgeq):
    return quantize(edgeq)


@pytest.fixture(scope="module")
def built_once(edgeq):
    return quantize(edgeq)


@pytest.fixture
def built_each_time(edgeq):
    return edgeq.load(quantize(edgeq).path)


def test_rerun(edgeq, built_once, built_each_time):
    edgeq.compare(built_once, samples(ConvBnRelu, 4, seed=1))
    edgeq.check_op_dtypes(built_once)
    runs.append("run")
    assert len(runs) == 2, "fails the first time"


@pytest.mark.timeout(300)
def test_timeout(quantized):
    assert_input_dtypes(quantized, "int8")


def test_benchmark(benchmark, quantized):
    assert benchmark(quantized.run, *ConvBnRelu.sample_inputs())


def test_syrupy(quantized, snapshot):
    assert quantized.op_dtypes.to_dict() == snapshot


def test_regressions(quantized, data_regression):
    data_regression.check(quantized.op_dtypes.to_dict())
"""

TESTS = ("test_rerun", "test_timeout", "test_benchmark", "test_syrupy", "test_regressions")

INI = """
[pytest]
addopts = --strict-markers --strict-config
filterwarnings =
    error
    ignore:LSTM with projections is not supported with oneDNN:UserWarning
"""


def run_project(overlay: Overlay, folder: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """Run the project's tests with each plugin in use; return what was printed and the record."""
    (folder / "pytest.ini").write_text(INI, "utf-8")
    (folder / "test_model.py").write_text(PROJECT, "utf-8")
    others = [word for name in _OTHERS for word in ("-p", f"no:{name}")]
    used = (
        *("--cov=test_model", "--cov-report=json", "--html=report.html", "--self-contained-html"),
        *("--timeout=200", "--reruns=1", "--benchmark-disable", "--edgeq-json=run.json"),
        *(f"--edgeq-cache-dir={shared_cache() or 'cache'}", "-v"),
    )
    run = overlay.run(
        *("-m", "pytest", *others, *used, *options),
        cwd=folder,
        # The models of this repository.
        imports=ROOT,
    )
    told = run.stdout + run.stderr
    (header,) = [line for line in told.splitlines() if line.startswith("plugins: ")] or [told]
    assert {name for name in PLUGINS if f" {name}-" not in header} == set(), told
    assert (folder / "run.json").exists(), told
    return told, json.loads((folder / "run.json").read_text("utf-8"))


def assert_recorded(told: str, record: dict[str, Any]) -> None:
    """Compare the record with the run: each test once, with the events of its last run."""
    tests = {each["test"].partition("::")[2]: each for each in record["tests"]}
    assert len(record["tests"]) == len(tests), told
    assert sorted(tests) == sorted(TESTS), told
    assert {each["outcome"] for each in record["tests"]} == {"passed"}, told
    rerun = tests["test_rerun"]
    events = [event["event"] for event in rerun["events"]]
    assert events == ["quantize", "quantize", "load", "compare"], told
    assert [claim["kind"] for claim in rerun["claims"]] == ["op_dtype_map"], told


def test_all_plugins_in_one_run(newest: Overlay, tmp_path: Path) -> None:
    """Baselines are written, and read by two workers; a rerun counts once, and nothing warns."""
    told, record = run_project(
        newest, tmp_path, "--edgeq-update=new", "--snapshot-update", "--force-regen"
    )
    # pytest-regressions fails a test whose data it wrote, which is then run again.
    assert "5 passed, 2 rerun" in told
    assert_recorded(told, record)

    told, record = run_project(newest, tmp_path, "-n", "2")
    assert "5 passed, 1 rerun" in told
    assert_recorded(told, record)
    covered = json.loads((tmp_path / "coverage.json").read_text("utf-8"))
    assert covered["files"]["test_model.py"]["summary"]["percent_covered"] == 100
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "test_regressions" in page
    # The worst samples of test_rerun.
    assert re.search(r"sample \d, input 0: \d+\.\d dB", page)
    assert "data:image/png;base64," in page
