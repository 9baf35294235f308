"""Open regular files only: a path may lead to a link, a pipe or a device."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


class NotRegularError(Exception):
    """A pipe, a socket or a device."""


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; unlike `open` alone, never wait for the writer of a pipe."""
    file = open(path, "rb", opener=open_at_once)  # noqa: SIM115 # Path.open has no opener
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NotRegularError("not a regular file")
    return file


def open_at_once(path: str, flags: int) -> int:
    """Open a file as an `opener` of `open`; never wait for the other end of a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
