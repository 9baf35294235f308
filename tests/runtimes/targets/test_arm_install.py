"""The wheel on 64-bit ARM: pip installs it there, and it checks files without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ecosystem.overlay import ROOT, fetch
from tests.ecosystem.test_without_torch import TESTS
from tests.projects import environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

# The emulator runs no processes of its own Python: neither the isolation's child nor workers. One
# process for both runs: what it imports takes most of its time.
RUNS = """
import sys
sys.path.insert(0, {site!r})
import pytest
for update in (["--edgeq-update=new"], []):
    pytest.main([*update, *{options!r}])
"""
OPTIONS = ["-q", "--edgeq-isolate=off", "-k", "not processes and not target", "test_files.py"]


def test_the_wheel_checks_files_on_arm(
    arm64_root: Path, arm64_command: list[str], tmp_path: Path
) -> None:
    """By kernels of ARM, against baselines that the first run stores."""
    fetch(
        *(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT))
    )
    (wheel,) = tmp_path.glob("*.whl")
    python = json.loads((arm64_root / "edgeq-root.json").read_text("utf-8"))["python"]
    platforms = [f"--platform=manylinux_2_{minor}_aarch64" for minor in range(28, 16, -1)]
    fetch(
        *(sys.executable, "-m", "pip", "install", "-q", "--target", str(tmp_path / "site")),
        *("--only-binary=:all:", "--implementation=cp", f"--python-version={python}"),
        *(*platforms, "--platform=manylinux2014_aarch64", str(wheel)),
    )
    (tmp_path / "test_files.py").write_text(TESTS, "utf-8")
    # On CI the first run would refuse to write its baselines.
    run = subprocess.run(
        [*arm64_command, "-c", RUNS.format(site=str(tmp_path / "site"), options=OPTIONS)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert run.stdout.count("5 passed, 3 deselected") == 2, run.stdout + run.stderr
