"""Reports that are written to a link, a pipe or a device."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from pytest_edgeq.report.whole_files import write_json, write_whole

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no such files")


def test_a_link_stays_one(tmp_path: Path) -> None:
    """Its target is written, in a folder that is made."""
    link, target = tmp_path / "run.json", tmp_path / "else" / "run.json"
    link.symlink_to(target)

    write_whole(link, "{}\n")

    assert link.is_symlink()
    assert target.read_text("utf-8") == "{}\n"


def test_a_lone_surrogate_is_escaped(tmp_path: Path) -> None:
    """As of half an emoji in a text that a test quotes; JSON reads it back."""
    write_json(tmp_path / "run.json", {"message": "cut \ud83d"})
    assert json.loads((tmp_path / "run.json").read_text("utf-8")) == {"message": "cut \ud83d"}


def test_a_pipe_stays_one(tmp_path: Path) -> None:
    """It is written to if somebody reads it; nobody is waited for."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match=r"No such device or address|not configured"):
        write_whole(pipe, "{}\n")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "{}\n")
        assert os.read(reader, 100) == b"{}\n"
    finally:
        os.close(reader)

    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    assert pipe.is_fifo()
