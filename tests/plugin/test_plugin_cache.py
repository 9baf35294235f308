"""Finished conversions that runs and workers share."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_edgeq.quantize.cache.directory import Store
from tests.waiting import running, wait_until

# Suites that convert models run in processes of their own.
pytestmark = pytest.mark.timeout(400)

MODEL = """
import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


def images(n, seed):
    # Not by torch.randn, which draws other numbers with other vector extensions.
    generator = np.random.default_rng(seed)
    draw = generator.standard_normal
    return [torch.from_numpy(draw((1, 3, 8, 8), np.float32)) for _ in range(n)]
"""

SUITE = """
import os
import pytest

from tests.waiting import running, wait_until
import torch
from net import Net, images

FLOWS = ["pt2e_static_int8", "recipe_static_wi8_ai8", "recipe_dynamic_wi8_afp32"]


@pytest.fixture(scope="module", params=[8, 12])
def model(request):
    torch.manual_seed(0)
    return Net(request.param).eval()


@pytest.mark.edgeq(quantizers=FLOWS)
def test_it_may_ship(edgeq, edgeq_quantizer, model):
    quantized = edgeq.quantize(
        model, (torch.randn(1, 3, 8, 8),), quantizer=edgeq_quantizer, calibration=images(16, 1)
    )
    edgeq.check_op_dtypes(quantized)
    comparison = edgeq.compare(quantized, images(8, 2))
    with open(os.environ["TOLD"], "a") as file:
        file.write(f"{comparison} {comparison.to_dict()}\\n")
"""

REPEATS = 2

# Each repeat has an empty cache of its own; neighbours in the list want the same conversions.
REPEATED = (
    SUITE.replace("import torch\n", "import torch\nfrom pytest_edgeq import Edgeq\n")
    .replace("def test_it_may_ship(edgeq,", "def test_it(repeat,")
    .replace(
        "@pytest.mark.edgeq",
        f'@pytest.mark.parametrize("repeat", range({REPEATS}))\n@pytest.mark.edgeq',
    )
    .replace("edgeq.quantize", 'Edgeq(cache_dir=f"kept{repeat}").quantize')
    .partition("    edgeq.check_op_dtypes")[0]
)

GATED = (
    SUITE.replace("params=[8, 12]", "params=[8]").replace(
        "edgeq.check_op_dtypes(quantized)", "edgeq.check(quantized, images(8, 2))"
    )
    + """
        file.write(f"{sorted(map(repr, edgeq.localize(quantized, images(2, 3)).rows))}\\n")
"""
)


@pytest.fixture
def cache_option() -> str:
    """Each test has a directory of its own."""
    return ""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a model and a suite, importable, with a log of all conversions."""
    pytester.makepyfile(net=MODEL, test_net=SUITE)
    monkeypatch.syspath_prepend(str(pytester.path))
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=os.pathsep)
    monkeypatch.setenv("TOLD", str(pytester.path / "told.txt"))
    pytester.makeconftest(
        """
        import os
        from pytest_edgeq import litert

        original = litert.convert

        def convert(signatures, **options):
            with open("conversions.txt", "a") as file:
                file.write(f"{sorted(signatures)} {options.get('static')}\\n")
            if os.environ.get("DIE") == os.environ.get("PYTEST_XDIST_WORKER", ""):
                os.kill(os.getpid(), 9)
            return original(signatures, **options)

        def pytest_configure(config):
            litert.convert = convert

        def pytest_unconfigure(config):
            litert.convert = original
        """
    )
    return pytester.path


def _conversions(project: Path) -> int:
    path = project / "conversions.txt"
    count = len(path.read_text().splitlines()) if path.exists() else 0
    path.unlink(missing_ok=True)
    return count


def _told(project: Path) -> list[str]:
    path = project / "told.txt"
    lines = path.read_text().splitlines()
    path.unlink()
    return sorted(lines)


def _remembered(project: Path) -> dict[str, Any]:
    folder = project / "__edgeq__"
    found = {str(p.relative_to(folder)): json.loads(p.read_text()) for p in folder.rglob("*.json")}
    shutil.rmtree(folder)
    return found


@pytest.mark.slow
def test_a_suite_gives_the_same_records_with_and_without_the_cache(
    pytester: pytest.Pytester, project: Path, run_here: Callable[..., pytest.RunResult]
) -> None:
    """Baselines, figures and rows are equal to the last bit; conversions are shared."""
    project.joinpath("test_net.py").write_text(GATED)
    runs = []
    for arguments, conversions in (
        # PT2E's reference is converted in float, too, for what checks it op by op.
        (["--edgeq-cache=off"], 4),
        ([], 2),  # one float file serves both recipes
        ([], 0),
        (["--edgeq-cache=refresh"], 2),
        (["-n", "2"], 0),
    ):
        run = pytester.runpytest_subprocess if "-n" in arguments else run_here
        run("--edgeq-update=new", *arguments).assert_outcomes(passed=3)
        assert _conversions(project) == conversions, arguments
        runs.append((_remembered(project), _told(project)))
    assert all(run == runs[0] for run in runs[1:])
    assert len(runs[0][0]) == 6


@pytest.mark.slow
def test_two_workers_convert_each_model_once(pytester: pytest.Pytester, project: Path) -> None:
    """Several times over an empty directory."""
    project.joinpath("test_net.py").write_text(REPEATED)
    pytester.runpytest_subprocess("-n", "2").assert_outcomes(passed=6 * REPEATS)
    assert _conversions(project) == 4 * REPEATS


@pytest.mark.slow
def test_a_worker_that_is_killed_while_it_converts_holds_nobody_up(
    pytester: pytest.Pytester, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other takes its place; what the first had begun is not to be seen."""
    monkeypatch.setenv("DIE", "gw0")
    result = pytester.runpytest_subprocess("-n", "2", "--max-worker-restart=0", "--edgeq-update")
    outcomes = result.parseoutcomes()
    assert outcomes["failed"] >= 1
    assert outcomes["passed"] >= 1
    monkeypatch.delenv("DIE")
    _conversions(project)

    again = pytester.runpytest_subprocess("-n", "2", "--edgeq-update=new,changed")
    again.assert_outcomes(passed=6)
    assert _conversions(project) <= 3
    again.stdout.no_fnmatch_line("*Warning: conversion cache*")


@pytest.mark.slow
def test_a_killed_run_leaves_whole_entries_only(project: Path) -> None:
    """Killed as soon as it has kept one; then all is well."""
    command = [sys.executable, "-m", "pytest", "-q", "--edgeq-cache-dir=kept", "--edgeq-update"]
    with running(command, cwd=project, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: list(project.glob("kept/*/*.entry")), process, 200)
    _conversions(project)
    shutil.rmtree(project / "__edgeq__", ignore_errors=True)

    done = subprocess.run(
        command, cwd=project, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout
    assert "Warning: conversion cache" not in done.stdout


def test_the_header_tells_where_and_how_much(pytester: pytest.Pytester) -> None:
    """Below pytest's own cache directory; relative to the root where it lies there."""

    def header(*arguments: str) -> str:
        lines = pytester.runpytest("--co", *arguments).outlines
        return next(line for line in lines if line.startswith("edgeq: conversion cache"))

    place = "edgeq: conversion cache: .pytest_cache/d/edgeq"
    assert header() == f"{place} (on, 0 entries, 0.0 MB)"
    store = Store(pytester.path / ".pytest_cache" / "d" / "edgeq", pytest.fail)
    store.write("convert", "a", {"tflite": bytes(1_200_000)})
    assert header() == f"{place} (on, 1 entry, 1.2 MB)"
    assert header("--edgeq-cache=refresh") == f"{place} (refresh, 1 entry, 1.2 MB)"
    assert header("--edgeq-cache=off") == "edgeq: conversion cache: off"
    nowhere = "edgeq: conversion cache: off (pytest's cache directory is turned off)"
    assert header("-p", "no:cacheprovider") == nowhere
    assert header("-o", "cache_dir=other").startswith("edgeq: conversion cache: other/d/edgeq (on")
    folder = pytester.path / ".pytest_cache" / "d" / "edgeq" / "convert"
    folder.joinpath("loop").symlink_to(folder / "loop")
    folder.joinpath("nowhere.entry").symlink_to(folder / "gone")
    assert header() == f"{place} (on, 1 entry, 1.2 MB)"
    outside = pytester.path.parent / "out"
    assert header(f"--edgeq-cache-dir={outside}").startswith(
        f"edgeq: conversion cache: {outside} ("
    )


@pytest.mark.slow
def test_a_damaged_entry_is_told_and_fails_nothing(
    pytester: pytest.Pytester, project: Path, run_here: Callable[..., pytest.RunResult]
) -> None:
    """Also where warnings are errors, and from workers."""
    chosen = ("-k", "dynamic and 12")
    run_here("--edgeq-update", *chosen).assert_outcomes(passed=1, deselected=5)
    told = "Warning: conversion cache: *.entry is damaged (it does not have the hash *"
    for arguments in (("-W", "error"), ("-n", "2")):
        for path in (project / ".pytest_cache").rglob("*.entry"):
            path.write_bytes(path.read_bytes()[:-1] + b"\0")
        run = pytester.runpytest_subprocess if "-n" in arguments else run_here
        result = run(*chosen, *arguments)
        assert result.ret == 0
        result.stdout.fnmatch_lines([told])
        result = run(*chosen, *arguments)
        assert result.ret == 0
        result.stdout.no_fnmatch_line("Warning: conversion cache*")


@pytest.mark.slow
def test_why_nothing_is_kept_is_told_with_v(
    pytester: pytest.Pytester, project: Path, run_here: Callable[..., pytest.RunResult]
) -> None:
    """Quietly otherwise."""
    project.joinpath("test_net.py").write_text(
        """
import torch
from net import Net, images

def test_trained(edgeq):
    torch.manual_seed(0)
    edgeq.quantize(
        Net().eval(), (images(1, 0)[0],), quantizer="pt2e_qat_int8",
        train=lambda prepared: prepared(images(1, 0)[0]),
    )
"""
    )
    line = "Info: Net: not kept in the conversion cache: train= may do something else each time"
    quiet = run_here()
    quiet.assert_outcomes(passed=1)
    quiet.stdout.no_fnmatch_line(f"{line}*")
    pytester.runpytest_subprocess("-v", "-n", "1").stdout.fnmatch_lines([line])


@pytest.mark.slow
def test_a_changed_model_with_equal_weights_is_built_anew(
    project: Path, run_here: Callable[..., pytest.RunResult]
) -> None:
    """Its code is edited between two runs; the records are those of the new model."""
    edits = [
        ("torch.relu(self.conv(x))", "(torch.relu(self.conv(x)) * 1.5)"),
        ("torch.relu(self.conv(x))", "torch.sigmoid(self.conv(x))"),
    ]
    arguments = ("-k", "not 12 and (pt2e or dynamic)", "--edgeq-update=new")
    run_here(*arguments).assert_outcomes(passed=2, deselected=4)
    first = _remembered(project), _told(project)
    for before, after in edits:
        assert before in MODEL
        project.joinpath("net.py").write_text(MODEL.replace(before, after))
        runs = []
        for mode in ("on", "off"):
            result = run_here(*arguments, f"--edgeq-cache={mode}")
            result.assert_outcomes(passed=2, deselected=4)
            runs.append((_remembered(project), _told(project)))
        assert runs[0] == runs[1] != first
