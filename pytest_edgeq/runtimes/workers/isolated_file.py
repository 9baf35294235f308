"""
Code that runs in a worker that isolates files, and how a user's own runner gets there.

It imports little at module level.
"""

from __future__ import annotations

import importlib.util
import inspect
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_edgeq.runtimes.engines import Engine
    from pytest_edgeq.tflite.mapped import Source


def open_file(
    source: Source,
    signature: str | None,
    runtime: str,
    threads: int,
    keep: bool,
    own: bytes | None,
) -> Engine:
    """Open a file in the child; `own` is the pickle of a user's runtime."""
    from pytest_edgeq.runtimes.engines import Opening
    from pytest_edgeq.runtimes.runner import open_here
    from pytest_edgeq.tflite.graph import OpGraph

    runner = None
    if own is not None:
        import cloudpickle

        runner = cloudpickle.loads(own)
    graph = OpGraph.read(source)
    (chosen,) = (each for each in graph.signatures if each.key == signature)
    return open_here(Opening(graph, chosen, runtime, threads, runner, keep=keep))


def sent(runner: Any) -> bytes:
    """Return a runner as the child can read it."""
    from pytest_edgeq.runtimes.workers.by_value import pickled

    return pickled(runner, _is_lacking)


def source_file(runner: Any) -> str:
    """Return the path of the file that defines a runner; empty if unknown."""
    try:
        found = inspect.getsourcefile(runner if inspect.isroutine(runner) else type(runner))
    except TypeError:
        return ""
    return found or ""


def _is_lacking(module: ModuleType) -> bool:
    """Return whether the child cannot import a module, or would import pytest with it."""
    if type(getattr(module, "__loader__", None)).__module__.startswith("_pytest."):
        return True  # with fixtures that are run by nobody
    try:
        spec = importlib.util.find_spec(module.__name__)
    except (ImportError, ValueError):
        return True
    # Modules of the interpreter itself have no file.
    return spec is None or (spec.has_location and spec.origin != getattr(module, "__file__", None))
