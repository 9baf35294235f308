"""
Pickle objects of users for workers that lack their source code.

Functions, classes and type variables of modules that belong to no installed distribution, such as a
test module, are pickled by value; all others by their name.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from pytest_edgeq.runtimes.workers import by_value


class CannotSendError(TypeError):
    """A user's object cannot be sent to another process."""


_MOST_SHOWN = 60  # characters of what Python says of an object that cannot be pickled


def pickled(value: Any, what: str, fix: str, *, clones_views: bool = False) -> bytes:
    """Return the pickle of a user's object, or raise a CannotSendError."""
    try:
        return by_value.pickled(value, _is_users, clones_views=clones_views)
    except Exception as error:  # of whatever the object holds
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise CannotSendError(
            f"executor: {what} cannot be sent to a worker: {first[:_MOST_SHOWN]}\nfix: {fix}"
        ) from error


def _is_users(module: ModuleType) -> bool:
    """Whether a module comes of a working tree, and not of an installation."""
    path = getattr(module, "__file__", None)
    return isinstance(path, str) and bool(path) and not path.startswith(_installations())


@cache
def _installations() -> tuple[str, ...]:
    """Return the directories in which installed packages and the standard library lie."""
    paths = {sysconfig.get_paths()[each] for each in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages()}
    # Environments below this one: `uv run --with` adds theirs by a .pth file.
    paths |= {each for each in sys.path if Path(each).name in ("site-packages", "dist-packages")}
    return tuple({f"{Path(each)}{os.sep}" for each in paths | set(map(os.path.realpath, paths))})
