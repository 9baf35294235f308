"""The oldest versions that `pyproject.toml` allows of what pytest-edgeq itself depends on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pytest_edgeq.versions import version_of
from tests.ecosystem.overlay import PYPROJECT, ROOT, Overlay, fetch
from tests.ecosystem.test_plugins_together import assert_recorded, run_project
from tests.roots import Provide

# Environments are installed, and parts of this suite run in them.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ISOLATED = "tests/runtimes/isolate/test_isolate_crashes.py"
SUBSET = (
    *("tests/plugin/test_plugin_loading.py", "tests/plugin/test_plugin_options.py"),
    *("tests/plugin/test_plugin_obsolete.py", "tests/plugin/test_plugin_errors.py"),
    *("tests/numerics", "tests/baselines/test_baselines_store.py"),
    *("tests/tflite/test_tflite_schemes.py", "tests/tflite/test_tflite_source.py"),
    ISOLATED,
)

# pytest reads `[tool.pytest]` from 9.0 on.
SETTINGS = (
    *("-m", "not slow", "--import-mode=importlib", "-p", "no:anyio"),
    *("-W", "error", "-W", "ignore::pytest.PytestUnknownMarkWarning"),
    # pytest 7 refuses options in a hook that pluggy warns of.
    *("-W", "ignore::pluggy.PluggyTeardownRaisedWarning"),
    # ai-edge-litert 2.1 ends the child process where later releases refuse.
    *("--deselect", f"{ISOLATED}::test_kernels_that_meet_the_bound_on_memory"),
)

VERSIONS = """
import importlib.metadata, json, sys
print(json.dumps({name: importlib.metadata.version(name) for name in sys.argv[1:]}))
"""


@pytest.fixture(scope="module")
def pins(newest: Overlay) -> dict[str, str]:
    """The oldest versions that go together with the newest of what they depend on themselves."""
    options = ("--resolution=lowest-direct", "--annotation-style=line", "--no-header", "--quiet")
    uv = (str(newest.python), "-m", "uv", "pip", "compile", "--python", sys.executable)
    told = fetch(*uv, *options, str(PYPROJECT))
    direct = [line.split()[0] for line in told.splitlines() if "pytest-edgeq" in line]
    return dict(requirement.split("==") for requirement in direct)


@pytest.fixture(scope="module")
def lowest(newest: Overlay, once_a_run: Provide, pins: dict[str, str]) -> Overlay:
    """An environment of these versions, with the plugins of `newest`."""

    def make(folder: Path) -> None:
        other = [
            f"{name}=={version}"
            for name, version in pins.items()
            # Builds of one version are alike: 2.13.0+cpu.
            if (version_of(name) or "").partition("+")[0] != version
        ]
        # What they need is here: the newest versions of it.
        Overlay.make(folder, newest).install("--no-deps", *other)

    return Overlay(once_a_run("lowest", make))


def test_all_plugins_with_the_oldest_versions(
    lowest: Overlay, pins: dict[str, str], tmp_path: Path
) -> None:
    """The oldest pytest among them."""
    told = lowest.run("-c", VERSIONS, *pins, cwd=tmp_path).stdout
    found = {name: version.partition("+")[0] for name, version in json.loads(told).items()}
    assert found == pins
    assert pins["pytest"].startswith("7.4")

    told, record = run_project(
        lowest, tmp_path, "--edgeq-update=new", "--snapshot-update", "--force-regen"
    )
    assert "5 passed, 2 rerun" in told
    assert_recorded(told, record)


def test_the_oldest_versions_pass_the_tests(lowest: Overlay) -> None:
    """Of the plugin, the numbers, the baselines and the file format."""
    run = lowest.run("-m", "pytest", "-q", *SETTINGS, *SUBSET, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr


def test_each_flow_with_the_oldest_versions(lowest: Overlay, tmp_path: Path) -> None:
    """A conversion by each, and its errors."""
    (tmp_path / "test_flows.py").write_text(FLOWS, "utf-8")
    run = lowest.run("-m", "pytest", "-q", cwd=tmp_path, imports=ROOT)
    assert "4 passed" in run.stdout, run.stdout + run.stderr


FLOWS = """
import pytest
from torchao.quantization import Int8WeightOnlyConfig

from fixtures.models import LayerNormGelu, samples, seeded
from pytest_edgeq import Budget, assert_within_budget

QUANTIZERS = {
    "pt2e": "pt2e_static_int8",
    "recipe": "recipe_static_wi8_ai8",
    "torchao": Int8WeightOnlyConfig(),
}


@pytest.mark.parametrize("flow", [*QUANTIZERS, "prebuilt"])
def test_flow(edgeq, flow):
    model = seeded(LayerNormGelu)
    quantized = edgeq.quantize(
        model,
        LayerNormGelu.sample_inputs(),
        quantizer=QUANTIZERS.get(flow, "pt2e_static_int8"),
        calibration=samples(LayerNormGelu, 8),
    )
    if flow == "prebuilt":
        quantized = edgeq.load(quantized.path, reference=model)
    assert quantized.flow == flow
    comparison = edgeq.compare(quantized, samples(LayerNormGelu, 4, seed=1))
    assert_within_budget(comparison, Budget(sqnr_db=20))
"""
