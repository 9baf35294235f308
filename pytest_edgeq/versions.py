"""Installed versions, read from metadata without an import, and the libraries that are missing."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import re
from collections.abc import Callable, Iterator, Mapping
from typing import ParamSpec, TypeVar

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


_PACKAGES = frozenset(
    {
        *("ai_edge_litert", "ai_edge_quantizer", "filelock", "flatbuffers", "jax", "jaxlib"),
        *("cloudpickle", "litert_converter", "litert_torch", "ml_dtypes", "numpy"),
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
