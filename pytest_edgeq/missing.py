"""Name the distribution to install where an import of a library fails."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from pytest_edgeq.versions import requirement

P = ParamSpec("P")
R = TypeVar("R")


_PACKAGES = frozenset(
    {
        *("ai_edge_litert", "ai_edge_quantizer", "filelock", "flatbuffers", "jax", "jaxlib"),
        *("cloudpickle", "litert_converter", "litert_torch", "ml_dtypes", "numpy", "pebble"),
        *("torch", "torchao"),
    }
)
"""Packages that pytest-edgeq and the converter import; distributions have hyphens instead."""


@contextlib.contextmanager
def naming_missing_libraries() -> Iterator[None]:
    """
    Name the distribution of a package that cannot be imported, and the command that installs it.

    Raises:
        ModuleNotFoundError: In place of Python's own, which names the package alone.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _PACKAGES:
            raise
        distribution = package.replace("_", "-")
        text = (
            f"pytest-edgeq needs {distribution}, and the package {package} cannot be imported: "
            f"pip install '{requirement(distribution)}'"
        )
        raise ModuleNotFoundError(text, name=error.name) from error


def names_missing_libraries(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function in `naming_missing_libraries`, with a frame that tracebacks hide."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with naming_missing_libraries():
            return function(*args, **kwargs)

    return wrapped
