"""Executors that calls and sessions name: `processes:N`, `dask:ADDRESS`, or one of the user's."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from pytest_edgeq.compare.executors.sample_executor import SampleExecutor

NEEDS_DASK = (
    "dask:ADDRESS needs dask.distributed, which is not installed: pip install 'pytest-edgeq[dask]'"
)

_SPEC = re.compile(r"(?:processes:(?P<count>[1-9]\d*)|dask:(?P<address>\S+))")


def check_spec(text: str) -> str:
    """Return the name of a session's executor if it is valid, without importing dask."""
    match = _SPEC.fullmatch(text)
    if match is None:
        raise ValueError(
            f"executor: expected processes:N with N from 1, or dask:ADDRESS as in "
            f"dask:tcp://127.0.0.1:8786, got {text!r}"
        )
    if match["count"] and os.name != "posix":
        raise ValueError("executor: processes:N needs Linux or macOS; dask:ADDRESS does not")
    if match["address"] and importlib.util.find_spec("distributed") is None:
        raise ModuleNotFoundError(NEEDS_DASK)
    return text


def check_executor(executor: object) -> Executor:
    """Return an executor if it is one."""
    # Here, since the plugin imports this module in every run of pytest.
    from concurrent.futures import Executor

    if isinstance(executor, Executor):
        return executor
    hint = ""
    if hasattr(executor, "get_executor"):
        hint = ": pass client.get_executor()"
    elif isinstance(executor, str):
        hint = f": a session expects a name, Edgeq(executor={executor!r})"
    raise TypeError(
        f"executor: expected a concurrent.futures.Executor, got {type(executor).__name__}{hint}"
    )


class SessionExecutor:
    """The lazily created executor of a session, and wrappers of executors of calls."""

    def __init__(self, default: str | Executor | None = None) -> None:
        if isinstance(default, str):
            check_spec(default)
        elif default is not None:
            check_executor(default)
        self._default = default
        self._ends = contextlib.ExitStack()  # of what it has started
        self._engine: SampleExecutor | None = None
        self._last: tuple[Executor, SampleExecutor] | None = None

    def engine(self, executor: Executor | None = None) -> SampleExecutor | None:
        """Return the engine of a call."""
        if executor is None and self._default is None:
            return None
        from pytest_edgeq.compare.executors.sample_executor import sample_executor_for

        if executor is not None:
            # The same engine for the same executor: its workers have the models of calls before.
            if self._last is None or self._last[0] is not executor:
                self._last = executor, sample_executor_for(check_executor(executor))
                self._ends.callback(self._last[1].close)
            return self._last[1]
        if self._engine is None:
            self._engine = sample_executor_for(self._made())
            self._ends.callback(self._engine.close)
        return self._engine

    def _made(self) -> Executor:
        assert self._default is not None, "unreachable because engine() has looked"
        if not isinstance(self._default, str):
            return self._default
        kind, _, value = self._default.partition(":")
        if kind == "processes":
            from pytest_edgeq.compare.executors.local_pool import LocalPool

            pool = LocalPool(int(value))
            self._ends.callback(pool.shutdown)
            return pool
        from distributed import Client

        client = Client(value, set_as_default=False)
        self._ends.callback(client.close)
        own: Executor = client.get_executor()
        return own

    def close(self) -> None:
        """End the processes that the session has started, and its connection to a cluster."""
        self._engine = self._last = None
        self._ends.close()
