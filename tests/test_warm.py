"""Commands that are forked from a warm process are like processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.processes import left_after
from tests.waiting import line_of, running

pytestmark = pytest.mark.slow

TELLS = """
import os, sys
print(sys.argv[1:], __file__, sys.path[:2], os.getcwd(), os.environ["GIVEN"], input())
print("to stderr", file=sys.stderr)
sys.exit(7 if "torch" in sys.modules else 6)
"""

HANGS = """
import os, subprocess, time
print(os.getpid(), subprocess.Popen(["sleep", "1000"]).pid, flush=True)
time.sleep(1000)
"""


def test_a_command_is_what_it_would_be(warm: str, tmp_path: Path) -> None:
    """Apart from what is imported; a new process where a variable that a library reads differs."""
    (tmp_path / "tells.py").write_text(TELLS)
    told = []
    real = str(Path(sys.executable).parent)
    for commands, more in ((warm, {}), (warm, {"MKL_NUM_THREADS": "9"}), (real, {})):
        variables = {"PATH": f"{commands}:{os.environ['PATH']}", "PYTHONPATH": "/there", **more}
        done = subprocess.run(
            ["bash", "-c", "echo typed | GIVEN=1 python tells.py --word; echo $?"],
            cwd=tmp_path,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        )
        assert done.stderr == "to stderr\n"
        told.append(done.stdout.splitlines())
    assert [status for _, status in told] == ["7", "6", "6"]
    assert told[0][0] == told[1][0] == told[2][0]


def test_a_command_ends_with_who_started_it(warm: str, tmp_path: Path) -> None:
    """And so do the processes that it has started."""
    (tmp_path / "hangs.py").write_text(HANGS)
    command = [f"{warm}/python", str(tmp_path / "hangs.py")]
    with running(command, stdout=subprocess.PIPE, text=True) as client:
        started = [psutil.Process(int(each)) for each in line_of(client).split()]
        client.kill()
        assert len(started) == 2
        assert not left_after(started)
