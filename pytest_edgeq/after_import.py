"""Run a function once a module of another library has been imported."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


def after_import(names: Sequence[str], call: Callable[[ModuleType], None]) -> None:
    """Call a function with each of these modules, now or as soon as it has been imported."""
    for name in names:
        if name in sys.modules:
            call(sys.modules[name])
    sys.meta_path.insert(0, _Finder(frozenset(names), call))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, names: frozenset[str], call: Callable[[ModuleType], None]) -> None:
        self._names = names
        self._call = call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the next finder finds, with a loader that calls the function at its end."""
        if fullname not in self._names:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._extend(spec.loader)
                return spec
        return None

    def _extend(self, loader: importlib.abc.Loader) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            self._call(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
