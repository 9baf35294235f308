"""Commands that are forks of one process, which has imported the libraries: 3 s less for each."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def warm() -> Iterator[str]:
    """
    Make a folder of commands, which a test puts in front of PATH or calls by path.

    Tests of imports, of a start, of settings of libraries and of kills run real processes.
    """
    from tests.waiting import line_of, running  # needs psutil, which the examples do without

    variables = {name: each for name, each in os.environ.items() if name != "PYTHONPATH"}
    # Not below pytest's own folder: the name of a socket has at most 107 characters.
    with tempfile.TemporaryDirectory() as folder:
        client = f"#!{sys.executable} -IS\n{HERE.joinpath('client.py').read_text('utf-8')}"
        for name in ("edgeq", "pytest", "python"):
            Path(folder, name).write_text(client, "utf-8")
            Path(folder, name).chmod(0o755)
        command = [sys.executable, str(HERE / "server.py"), folder]
        with running(command, env=variables, stdin=PIPE, stdout=PIPE, stderr=PIPE) as server:
            assert line_of(server, 300), server.stderr and server.stderr.read()
            yield folder
            assert server.poll() is None, server.stderr and server.stderr.read()
