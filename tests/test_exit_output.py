"""What native code writes to stderr when Python has ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import ctypes
import os
import sys
from pytest_edgeq.runtimes.process_state import destructors_without_stderr

process, texts = ctypes.CDLL(None), [b"before", b"inside", b"after"]
for text in texts:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(text))


def write_at_exit(text):
    process.__cxa_atexit(process.perror, ctypes.c_char_p(text), None)


write_at_exit(texts[0])
if sys.argv[1] == "captured":
    kept, file = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(file, 2)
with destructors_without_stderr():
    write_at_exit(texts[1])
if sys.argv[1] == "captured":
    os.dup2(kept, 2)
write_at_exit(texts[2])
"""


@pytest.mark.parametrize("where", ["captured", "on stderr"])
def test_stderr_is_closed_to_the_destructors_of_the_block_alone(where: str) -> None:
    """Exit functions that were registered before and after it write where stderr goes then."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, where],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
        timeout=100,
    )
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["after", "before"]
