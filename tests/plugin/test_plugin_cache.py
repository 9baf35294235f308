"""Finished conversions that runs and workers share."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pytest_edgeq.quantize.cache.directory import Store
from tests.projects import Project

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

GATED = (
    SUITE.replace("params=[8, 12]", "params=[8]").replace(
        "edgeq.check_op_dtypes(quantized)", "edgeq.check(quantized, images(8, 2))"
    )
    + """
        file.write(f"{sorted(map(repr, edgeq.localize(quantized, images(2, 3)).rows))}\\n")
"""
)


_COUNTED = """
    from pytest_edgeq import litert

    original = litert.convert

    def convert(signatures, **options):
        with open("conversions.txt", "a") as file:
            file.write(f"{sorted(signatures)} {options.get('static')}\\n")
        return original(signatures, **options)

    def pytest_configure(config):
        litert.convert = convert

    def pytest_unconfigure(config):
        litert.convert = original
"""


@pytest.fixture
def suite(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project with a model and a suite, importable, with a log of all conversions."""
    project.write({"net": MODEL, "test_net": SUITE, "conftest": _COUNTED})
    monkeypatch.syspath_prepend(str(project.path))
    monkeypatch.setenv("PYTHONPATH", str(project.path), prepend=os.pathsep)
    monkeypatch.setenv("TOLD", str(project.path / "told.txt"))
    return project


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
    suite: Project, warm: str
) -> None:
    """Baselines, figures and rows are equal to the last bit; conversions are shared."""
    runs = []
    for options, conversions in (
        # PT2E's reference is converted in float, too, for what checks it op by op.
        (["--edgeq-cache=off"], 4),
        ([], 2),  # one float file serves both recipes
        ([], 0),
        (["--edgeq-cache=refresh"], 2),
        (["-n", "2"], 0),
    ):
        update = ("--edgeq-update=new", *options)
        process = warm if "-n" in options else False
        suite.run(*update, files={"test_net": GATED}, process=process, passed=3)
        assert _conversions(suite.path) == conversions, options
        runs.append((_remembered(suite.path), _told(suite.path)))
    assert all(run == runs[0] for run in runs[1:])
    assert len(runs[0][0]) == 6


def test_the_header_tells_where_and_how_much(project: Project) -> None:
    """Below pytest's own cache directory; relative to the root where it lies there."""

    def header(*options: str) -> str:
        lines = project.run("--co", *options).outlines
        return next(line for line in lines if line.startswith("edgeq: conversion cache"))

    place = "edgeq: conversion cache: .pytest_cache/d/edgeq"
    assert header() == f"{place} (on, 0 entries, 0.0 MB)"
    directory = project.path / ".pytest_cache" / "d" / "edgeq"
    Store(directory, pytest.fail).write("convert", "a", {"tflite": bytes(1_200_000)})
    (directory / "convert" / "loop").symlink_to(directory / "convert" / "loop")
    (directory / "convert" / "nowhere.entry").symlink_to(directory / "gone")
    assert header() == f"{place} (on, 1 entry, 1.2 MB)"
    assert header("--edgeq-cache=refresh") == f"{place} (refresh, 1 entry, 1.2 MB)"
    assert header("--edgeq-cache=off") == "edgeq: conversion cache: off"
    nowhere = "edgeq: conversion cache: off (pytest's cache directory is turned off)"
    assert header("-p", "no:cacheprovider") == nowhere
    assert header("-o", "cache_dir=other").startswith("edgeq: conversion cache: other/d/edgeq (on")
    outside = project.path.parent / "out"
    found = header(f"--edgeq-cache-dir={outside}")
    assert found.startswith(f"edgeq: conversion cache: {outside} (")


@pytest.mark.slow
def test_what_is_wrong_with_an_entry_and_why_there_is_none_is_told(
    suite: Project, warm: str
) -> None:
    """It fails no test, even if warnings are errors; -v says why nothing is cached."""
    options = ("-k", "dynamic and 12")
    suite.run("--edgeq-update", *options, passed=1, deselected=5)
    for path in (suite.path / ".pytest_cache").rglob("*.entry"):
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
    told = "Warning: conversion cache: *.entry is damaged (it does not have the hash *"
    suite.run(*options, "-W", "error", ret=0, shows=told)
    suite.run(*options, ret=0, hides="Warning: conversion cache*")

    test = """
        import torch
        from net import Net, images

        def test_trained(edgeq):
            torch.manual_seed(0)
            edgeq.quantize(
                Net().eval(), (images(1, 0)[0],), quantizer="pt2e_qat_int8",
                train=lambda prepared: prepared(images(1, 0)[0]),
            )
    """
    line = "Info: Net: not kept in the conversion cache: train= may do something else each time"
    suite.run("test_x.py", files=test, passed=1, hides=f"{line}*")
    suite.run("test_x.py", "-v", "-n", "1", process=warm, shows=line)
