"""
Code that runs in a worker that isolates files, and how a user's own runner gets there.

It imports little at module level.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
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
    """Return a runner as the child can read it: by value where that could not import it."""
    import cloudpickle

    module = sys.modules.get(getattr(runner, "__module__", None) or type(runner).__module__)
    by_value = module is not None and module.__name__ != "__main__" and not _is_found(module)
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        content: bytes = cloudpickle.dumps(runner)
        return content
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)


def source_file(runner: Any) -> str:
    """Return the path of the file that defines a runner; empty if unknown."""
    try:
        found = inspect.getsourcefile(runner if inspect.isroutine(runner) else type(runner))
    except TypeError:
        return ""
    return found or ""


def _is_found(module: ModuleType) -> bool:
    if type(module.__loader__).__module__.startswith("_pytest."):
        return False  # importing it would bring pytest, and fixtures that are run by nobody
    try:
        spec = importlib.util.find_spec(module.__name__)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin == getattr(module, "__file__", None)
