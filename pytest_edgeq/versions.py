"""Installed versions, read from metadata without an import, and the libraries that are missing."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
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
        StackError: In place of an AttributeError or ImportError, where a library lacks a name.
    """
    try:
        yield
    except (AttributeError, ImportError) as error:
        check_stack(error)
        if not isinstance(error, ModuleNotFoundError):
            raise
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


class StackError(RuntimeError):
    """A library lacks a name, often a private one, that pytest-edgeq uses."""


def check_stack(error: Exception) -> None:
    """
    Raise a StackError in place of an error that a name missing in a library made here.

    Releases rename private names of torch and of the converter.
    """
    missing = _missing_name(error)
    if missing is None or not _raised_here(error):
        return
    versions = producer()
    stack = ", ".join(
        f"{name} {version}"
        for name, version in versions.items()
        if version is not None and name != "pytest-edgeq"
    )
    new = ", ".join(untried(versions).values()) or "none"
    raise StackError(
        f"pytest-edgeq needs {missing}, which this stack does not have: {stack}; releases not "
        f"tried: {new}; tried stacks: edgeq docs reference/versions"
    ) from error


def _missing_name(error: Exception) -> str | None:
    """Return the name that a library of the extra `convert` lacks; None for another error."""
    if isinstance(error, AttributeError):
        holder = error.obj
        if not isinstance(holder, (type, ModuleType)):
            holder = type(holder)
        is_module = isinstance(holder, ModuleType)
        owner = holder.__name__ if is_module else f"{holder.__module__}.{holder.__qualname__}"
        missing = f"{owner}.{error.name}"
    elif isinstance(error, ImportError):
        missing = error.name or ""
        if not isinstance(error, ModuleNotFoundError):
            # `name_from` came with Python 3.12.
            found = re.match(r"cannot import name '(\w+)'", str(error))
            missing += f".{found[1]}" if found else ""
    else:
        return None
    package, _, rest = missing.partition(".")
    is_installed = package in _CONVERTING and importlib.util.find_spec(package) is not None
    return missing if rest and is_installed else None


def _raised_here(error: Exception) -> bool:
    """Return whether this package looked the name up, not a library or a user's model."""
    here = str(Path(__file__).parent)
    innermost = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        is_lookup = code.co_name == "__getattr__" or "importlib" in code.co_filename
        innermost = innermost if is_lookup else code.co_filename
    return innermost is not None and innermost.startswith(here)
