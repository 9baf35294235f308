"""Another CPU: torch's kernels without vector extensions, and on two threads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.plugin.test_plugin_cache import GATED, MODEL
from tests.projects import ROOT, Project
from tests.shared_cache import shared_cache

# What a worker of pytest-xdist has on most machines, and what it starts; one adds in one order.
THIS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# On an x86 with AVX2 or AVX-512 the first of these has other kernels.
OTHER = {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}

# The tests of figures run once more: minutes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def test_the_other_kernels_round_otherwise() -> None:
    """So that the tests below are of two CPUs: a convolution differs in its last bits."""
    script = (
        "import torch; g = torch.Generator().manual_seed(0); x = torch.randn(64, 777, generator=g);"
        "y = torch.nn.functional.gelu(x).softmax(-1).log().sum(1);"
        "print(torch.backends.cpu.get_cpu_capability(), y.double().sum().item())"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | settings,
            capture_output=True,
            text=True,
            check=True,
            timeout=1200,
        ).stdout.split()
        for settings in (THIS, OTHER)
    ]
    if told[0][0] == "DEFAULT":
        pytest.skip("this CPU has no vector extensions that torch knows: there is no other setting")
    assert told[1][0] == "DEFAULT"
    assert told[0][1] != told[1][1]


@pytest.mark.full
def test_figures_hold_with_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test that compares figures passes once more, with the plugins that this suite needs."""
    for variable in ("PYTEST_ADDOPTS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        monkeypatch.delenv(variable)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "figures and not slow", "--tb=short"]
    if directory := shared_cache():
        command.append(f"--edgeq-cache-dir={directory}")
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | OTHER,
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


def test_a_baseline_of_one_cpu_holds_on_the_other(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Op dtypes, errors and the gate, for PT2E, a static and a dynamic recipe, both ways."""
    project.write({"net": MODEL, "test_net": GATED})
    monkeypatch.setenv("PYTHONPATH", str(project.path), prepend=os.pathsep)
    monkeypatch.setenv("TOLD", str(project.path / "told.txt"))
    for first, second in ((THIS, OTHER), (OTHER, THIS)):
        for settings, options in ((first, ["--edgeq-update"]), (second, [])):
            with monkeypatch.context() as patch:
                for name, value in settings.items():
                    patch.setenv(name, value)
                project.run(*options, process=True, passed=3)
        shutil.rmtree(project.path / "__edgeq__")
