"""Projects that write many baselines without a model, and sessions of pytest that are killed."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pytest_edgeq.baselines import store
from tests import projects
from tests.waiting import output_of, wait_until

ROOT = Path(__file__).parents[2]

SCHEMES = ("int8", "float")
"""What baselines hold, one after the other; each is written whole or not at all."""

_OPS = 150
"""Rows of a baseline, which make 30 kB, as of a large model."""

CONFTEST = f"""
import os
import pytest
from pytest_edgeq.plugin.state import memory_of


def op_map(scheme):
    dtype = "float32" if scheme == "float" else scheme
    row = {{
        "subgraph": 0, "op": "ADD", "module": "layer1.0", "inputs": [dtype, dtype],
        "weight": None, "bias": None, "outputs": [dtype], "granularity": None, "scheme": scheme,
    }}
    side = [{{"name": "x", "dtype": "int8", "shape": [1, 8]}}]
    return {{"inputs": side, "outputs": side, "ops": [row] * {_OPS}}}


@pytest.fixture(scope="session")
def remember(request):
    def check(name="op_dtypes"):
        __tracebackhide__ = True
        try:
            open("began", "a").close()
        except OSError:
            pass  # a folder that is full or read-only
        memory_of(request.config).check("op_dtype_map", name, op_map(os.environ["SCHEME"]))

    return check
"""

SUITE = """
import pytest


@pytest.mark.parametrize("number", range(COUNT))
def test_it(remember, number):
    remember()
"""

# Other plugins would take most of the time of a session that is killed.
_PLUGINS = ("-p", "edgeq", "-p", "xdist")


class Project:
    """An empty folder that gets so many tests, which hold baselines, and nothing else."""

    def __init__(self, folder: Path, count: int = 30) -> None:
        self.folder = folder
        self.count = count
        (folder / "conftest.py").write_text(CONFTEST, "utf-8")
        (folder / "pytest.ini").write_text("[pytest]\n", "utf-8")
        (folder / "test_it.py").write_text(SUITE.replace("COUNT", str(count)), "utf-8")
        self.baselines = folder / "__edgeq__" / "test_it"

    def start(self, scheme: str, *options: str) -> subprocess.Popen[str]:
        """Start a session in a process group of its own; returns at once."""
        with contextlib.suppress(OSError):  # a folder that is read-only
            (self.folder / "began").unlink(missing_ok=True)
        return subprocess.Popen(
            [*(sys.executable, "-m", "pytest", "-q"), *_PLUGINS, *options],
            cwd=self.folder,
            env=environment(SCHEME=scheme),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, scheme: str, *options: str) -> tuple[int, str]:
        """Run a session to its end; return its exit status and what it printed."""
        process = self.start(scheme, *options)
        text = output_of(process, 120)
        return process.returncode, text

    def wait_until_it_writes(self, process: subprocess.Popen[str]) -> None:
        """Wait until the session has begun with its tests."""
        wait_until((self.folder / "began").exists, process)

    def schemes(self) -> dict[str, str]:
        """Return what each baseline, whole and of one session, holds, by its file's name."""
        found = {}
        for path in sorted(self.baselines.glob("*.json")):
            data = store.read(path, path.name).data
            (scheme,) = {row["scheme"] for row in data["ops"]}
            dtype = "float32" if scheme == "float" else scheme
            assert {dtype} == {each for row in data["ops"] for each in row["inputs"]}
            assert len(data["ops"]) == _OPS
            found[path.name] = scheme
        return found

    def other_files(self) -> list[str]:
        """Return the names of files in the folder of baselines that are none."""
        if not self.baselines.exists():
            return []
        return [path.name for path in self.baselines.iterdir() if path.suffix != ".json"]


def environment(**variables: str) -> dict[str, str]:
    """Return the variables of a shell that is no CI, without the pytest around it."""
    return {
        **projects.environment(),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(ROOT),
        **variables,
    }


def moments(seed: int, count: int, longest: float) -> Iterator[tuple[int, float]]:
    """Yield numbered moments within so many seconds, printed so that a failure can be repeated."""
    generator: Any = random.Random(seed)
    print(f"seed {seed}: {count} moments within {longest:.3g} s")
    for number in range(count):
        yield number, generator.uniform(0, longest)
