"""The plain install: files are loaded, compared, checked and shown where there is no torch."""

from __future__ import annotations

import importlib.metadata
import re
import venv
from collections.abc import Iterable
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement

from fixtures.tflite.make import CONVERTED
from tests.ecosystem.overlay import PYPROJECT, ROOT, Overlay
from tests.roots import Provide

INT8 = CONVERTED / "batch_norms.int8.tflite"
FLOAT = CONVERTED / "batch_norms.float.tflite"

MOST_PACKAGES = 25
"""A plain install is small; litert-torch alone brings 90."""


def _closure(requirements: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """Return the installed distributions that requirements need, by name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    left = list(requirements)
    while left:
        requirement = Requirement(left.pop())
        is_needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_needed and requirement.name not in found:
            found[requirement.name] = importlib.metadata.distribution(requirement.name)
            left += found[requirement.name].requires or []
    return found


@pytest.fixture(scope="session")
def plain(once_a_run: Provide) -> Overlay:
    """An environment of the plain requirements alone, linked from this one."""

    def make(folder: Path) -> None:
        venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
        (site,) = (folder / "lib").glob("python*/site-packages")
        project = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]
        distributions = _closure(project["dependencies"])
        assert len(distributions) < MOST_PACKAGES, sorted(distributions)
        for distribution in distributions.values():
            for path in distribution.files or ():
                top = path.parts[0]
                if top not in ("..", "__pycache__") and not (site / top).exists():
                    (site / top).symlink_to(Path(str(distribution.locate_file(top))))

    return Overlay(once_a_run("plain", make))


TESTS = f"""
import sys

import numpy as np
import pytest

import pytest_edgeq as eq

INT8, FLOAT = {str(INT8)!r}, {str(FLOAT)!r}


@pytest.fixture
def float_file(edgeq):
    return edgeq.load(FLOAT)


def samples(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.uniform(-1, 1, SHAPE).astype(np.float32) for _ in range(count)]


SHAPE = (1, 3, 8, 8)


@pytest.mark.parametrize("kind", ["file", "model", "function"])
def test_a_file_is_checked(edgeq, float_file, kind):
    known = {{"file": FLOAT, "model": float_file, "function": lambda x: float_file.run(x)}}
    quantized = edgeq.load(INT8, reference=known[kind])
    comparison = edgeq.compare(quantized, samples(8))
    eq.assert_within_budget(comparison, eq.Budget(sqnr_db=40))
    with pytest.raises(AssertionError, match="layer"):
        eq.assert_within_budget(comparison, eq.Budget(sqnr_db=60))
    eq.assert_healthy(comparison)
    eq.assert_conforms(quantized)
    eq.assert_runtimes_agree(quantized, samples(2), max_lsb_error=1)
    eq.assert_op_dtypes(quantized, "CONV_2D", weight="int8")
    edgeq.check(quantized, samples(40))
    assert edgeq.localize(quantized, samples(2))
    assert "torch" not in sys.modules


def test_a_damaged_file_is_blamed(edgeq):
    content = bytearray(open(INT8, "rb").read())
    quantized = edgeq.load(INT8)
    subgraph = quantized.edge.subgraph
    op = next(op for op in subgraph.ops if op.name == "CONV_2D")
    weight = subgraph.tensors[op.inputs[1]]
    codes = quantized.edge.graph.constant(weight).tobytes()
    place = bytes(content).index(codes)
    content[place : place + len(codes)] = codes[::-1]
    with pytest.raises(AssertionError, match="CONV_2D"):
        edgeq.check(edgeq.load(bytes(content), reference=FLOAT), samples(40))


@pytest.mark.parametrize("executor", [None, "processes:2"])
def test_other_processes_measure_it(executor):
    edgeq = eq.Edgeq(executor=executor)
    comparison = edgeq.compare(edgeq.load(INT8, reference=FLOAT), samples(8))
    eq.assert_within_budget(comparison, eq.Budget(sqnr_db=40))


def test_a_target_runs_it():
    edgeq = eq.Edgeq(targets={{"pi": [sys.executable]}})
    eq.assert_runtimes_agree(edgeq.load(INT8), samples(2), 1, runtimes=["xnnpack", "pi"])


def test_quantize_names_the_command(edgeq):
    with pytest.raises(ModuleNotFoundError) as caught:
        edgeq.quantize(object(), (samples(1)[0],))
    assert str(caught.value) == (
        "pytest-edgeq needs torch, and the package torch cannot be imported: "
        "pip install 'pytest-edgeq[convert]'"
    )
"""


@pytest.mark.slow
def test_the_file_side_works_without_torch(plain: Overlay, tmp_path: Path) -> None:
    """By every kind of reference that a machine without torch has, in processes and on a target."""
    (tmp_path / "test_files.py").write_text(TESTS, "utf-8")
    options = ("-m", "pytest", "-p", "pytest_edgeq.plugin", "-q", "--edgeq-update=new")
    run = plain.run(*options, cwd=tmp_path, imports=ROOT)
    assert "8 passed" in run.stdout, run.stdout + run.stderr
    stored = plain.run(*options[:-1], cwd=tmp_path, imports=ROOT)
    assert "8 passed" in stored.stdout, stored.stdout + stored.stderr


@pytest.mark.parametrize(
    ("command", "code", "shows"),
    [
        (("show", str(INT8)), 0, "health: nothing found"),
        (("diff", str(FLOAT), str(INT8)), 1, r"weight: float32 .* → int8"),
        (("docs", "how-to/ci-and-xdist"), 0, "xdist"),
    ],
    ids=["show", "diff", "docs"],
)
def test_commands_work_without_torch(
    plain: Overlay, tmp_path: Path, command: tuple[str, ...], code: int, shows: str
) -> None:
    """They show, compare and explain files."""
    run = plain.run("-m", "pytest_edgeq", *command, cwd=tmp_path, imports=ROOT)
    assert run.returncode == code, run.stderr
    assert re.search(shows, run.stdout)
