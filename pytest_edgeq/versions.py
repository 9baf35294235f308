"""Installed versions, read from metadata without an import, and the libraries that are missing."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

DISTRIBUTIONS = (
    "pytest-edgeq",
    "torch",
    "torchao",
    "litert-torch",
    "litert-converter",
    "ai-edge-litert",
    "ai-edge-quantizer",
    "litert-quantizer",
)

TRIED: Mapping[str, tuple[str, ...]] = {
    "torch": ("2.9", "2.13", "2.14"),
    "torchao": ("0.18",),
    "litert-torch": ("0.9", "0.10"),
    "litert-converter": ("0.5",),
    "ai-edge-litert": ("2.3",),
    "ai-edge-quantizer": ("0.10",),
    "litert-quantizer": ("0.11",),
}  # releases that pytest-edgeq was run with, by their first two numbers


@functools.cache
def version_of(distribution: str) -> str | None:
    """Return the installed version of a distribution, read once; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def loaded_torch() -> Any:
    """Return torch, or None where nothing has imported it: then no object is a module of it."""
    # The import waits for another thread that is in the middle of it.
    return None if sys.modules.get("torch") is None else importlib.import_module("torch")


def producer() -> dict[str, str | None]:
    """Return the versions of everything that a baseline may depend on."""
    return {name: version_of(name) for name in DISTRIBUTIONS}


def untried(versions: Mapping[str, str | None]) -> dict[str, str]:
    """Return the releases that pytest-edgeq was not run with."""
    return {
        name: f"{name} {version} (tried: {', '.join(TRIED[name])})"
        for name, version in versions.items()
        if version is not None
        and name in TRIED
        and ".".join(version.split(".")[:2]) not in TRIED[name]
    }


def version_changes(before: Mapping[str, str | None], after: Mapping[str, str | None]) -> list[str]:
    """Return the upgrades since a file was written."""
    return [
        f"{name} {before[name] or 'none'} → {version or 'none'}"
        for name, version in after.items()
        if name in before and _release(before[name]) != _release(version)
    ]


def _release(version: str | None) -> str:
    return (version or "").partition("+")[0]


def requirement(distribution: str) -> str:
    """Return pytest-edgeq's requirement on a distribution, or its bare name."""
    try:
        required = importlib.metadata.requires("pytest-edgeq") or []
    except importlib.metadata.PackageNotFoundError:
        required = []
    for each in required:
        name, _, extra = each.partition(";")
        if re.match(rf"{re.escape(distribution)}\b(?!-)", name) and not extra:
            return name.strip()
    return distribution


_PLAIN = frozenset({"ai_edge_litert", "cloudpickle", "filelock", "flatbuffers", "numpy", "scipy"})
"""Packages of the plain install; distributions have hyphens in their names instead."""

_CONVERTING = frozenset(
    {
        *("torch", "torchao", "litert_torch", "litert_converter", "ai_edge_quantizer"),
        *("litert_quantizer", "jax", "jaxlib", "ml_dtypes"),
    }
)
"""Packages of the extra `convert`."""


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
        if package not in _PLAIN | _CONVERTING:
            raise
        distribution = package.replace("_", "-")
        is_plain = package in _PLAIN
        wanted = requirement(distribution) if is_plain else "pytest-edgeq[convert]"
        text = (
            f"pytest-edgeq needs {distribution}, and the package {package} cannot be imported: "
            f"pip install '{wanted}'"
        )
        raise ModuleNotFoundError(text, name=error.name) from error


def names_missing_libraries(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function in `naming_missing_libraries`, with a frame that tracebacks hide."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with naming_missing_libraries():
            return function(*args, **kwargs)

    return wrapped
