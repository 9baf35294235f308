"""Executors that calls and sessions name: `processes:N`, `dask:ADDRESS`, or one of the user's."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

from pytest_edgeq.compare.executors.names import SPEC, check_spec

if TYPE_CHECKING:
    from pytest_edgeq.compare.executors.engines import SampleExecutor


def check_executor(executor: object) -> Executor:
    """
    Return an executor if it is one.

    Raises:
        TypeError: It is none.
    """
    if isinstance(executor, Executor):
        return executor
    hint = ""
    if hasattr(executor, "get_executor"):
        hint = ": pass client.get_executor()"
    elif isinstance(executor, str):
        hint = f": a session takes a name, Edgeq(executor={executor!r})"
    raise TypeError(
        f"executor: expected a concurrent.futures.Executor, got {type(executor).__name__}{hint}"
    )


class SessionExecutor:
    """
    The lazily created executor of a session, and wrappers of executors of calls.

    Raises:
        ValueError, ModuleNotFoundError, TypeError: As `check_spec` and `check_executor` do.
    """

    def __init__(self, default: str | Executor | None = None) -> None:
        if isinstance(default, str):
            check_spec(default)
        elif default is not None:
            check_executor(default)
        self._default = default
        self._own: Executor | None = None
        self._client: Any = None
        self._engine: SampleExecutor | None = None
        self._last: tuple[Executor, SampleExecutor] | None = None

    def engine(self, executor: Executor | None = None) -> SampleExecutor | None:
        """
        Return the engine of a call.

        Raises:
            TypeError: Not an executor.
            OSError: No scheduler answers at the address.
        """
        if executor is None and self._default is None:
            return None
        from pytest_edgeq.compare.executors.engines import engine_for

        if executor is not None:
            # The same engine for the same executor: its workers have the models of calls before.
            if self._last is None or self._last[0] is not executor:
                self._last = executor, engine_for(check_executor(executor))
            return self._last[1]
        if self._engine is None:
            self._engine = engine_for(self._made())
        return self._engine

    def _made(self) -> Executor:
        if isinstance(self._default, Executor):
            return self._default
        match = SPEC.fullmatch(self._default or "")
        assert match is not None, "unreachable because __init__ has looked"
        if match["count"]:
            from pytest_edgeq.compare.executors.local_pool import LocalPool

            self._own = LocalPool(int(match["count"]))
            return self._own
        from distributed import Client

        self._client = Client(match["address"], set_as_default=False)
        own: Executor = self._client.get_executor()
        return own

    def close(self) -> None:
        """End the processes that the session has started, and its connection to a cluster."""
        engines = [self._engine, None if self._last is None else self._last[1]]
        self._engine = self._last = None
        for engine in engines:
            if engine is not None:
                engine.close()
        own, self._own = self._own, None
        if own is not None:
            own.shutdown()
        client, self._client = self._client, None
        if client is not None:
            client.close()
