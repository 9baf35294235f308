"""A user's own runner on its way to the child process."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


def sent(runner: Any) -> bytes:
    """Return a runner as the child can read it."""
    import cloudpickle

    module = sys.modules.get(getattr(runner, "__module__", None) or type(runner).__module__)
    with _by_value(module):
        content: bytes = cloudpickle.dumps(runner)
    return content


def source_file(runner: Any) -> str:
    """Return the path of the file that defines a runner; empty if unknown."""
    try:
        found = inspect.getsourcefile(runner if inspect.isroutine(runner) else type(runner))
    except TypeError:
        return ""
    return found or ""


@contextlib.contextmanager
def _by_value(module: ModuleType | None) -> Iterator[None]:
    """Pickle the members of a module by value if the child could not import it."""
    import cloudpickle

    if module is None or module.__name__ == "__main__" or _can_be_imported(module):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _can_be_imported(module: ModuleType) -> bool:
    if type(module.__loader__).__module__.startswith("_pytest."):
        return False  # importing it would bring pytest, and fixtures that are run by nobody
    try:
        spec = importlib.util.find_spec(module.__name__)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin == getattr(module, "__file__", None)
