"""Installed versions, read without an import, stacks that were tried, and missing libraries."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_PACKAGES: Mapping[str, str] = {
    "torch": "torch",
    "torchao": "torchao",
    "litert-torch": "litert_torch",
    "litert-converter": "litert_converter",
    "ai-edge-litert": "ai_edge_litert",
    "ai-edge-quantizer": "ai_edge_quantizer",
    "litert-quantizer": "litert_quantizer",
}
"""Imported packages by distribution, of which nightlies with names of their own exist."""

_ONE: Mapping[str, str] = {
    "litert-torch": "0.10",
    "litert-converter": "0.5",
    "ai-edge-litert": "2.3",
    "torch": "2.13",
    "torchao": "0.18",
    "ai-edge-quantizer": "0.10",
}

STACKS: Sequence[Mapping[str, str]] = (
    _ONE,
    {**_ONE, "torch": "2.14"},
    {**_ONE, "litert-quantizer": "0.11"},
    {
        **_ONE,
        "litert-torch": "0.9",
        "litert-converter": "0.4",
        "ai-edge-litert": "2.2",
        "ai-edge-quantizer": "0.9",
    },
    {**_ONE, "litert-torch": "0.11", "litert-converter": "0.6", "ai-edge-litert": "2.4"},
    {"ai-edge-litert": "2.1"},
)
"""
Releases that pytest-edgeq was run with together, by their first two numbers.

litert-torch 0.9.4 and the nightlies of 26 October 2026 are run by tests/ecosystem/test_stacks.py.
"""


@functools.cache
def version_of(distribution: str) -> str | None:
    """Return the installed version of a distribution, read once; None if it is not installed."""
    package = _PACKAGES.get(distribution)
    if package is None:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None
    spec = _spec_of(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    # A nightly overwrites the files of a release, whose metadata stay.
    owner = owner_of(distribution, Path(spec.submodule_search_locations[0]))
    return None if owner is None else owner.version


def owner_of(distribution: str, folder: Path) -> importlib.metadata.Distribution | None:
    """Return the release or nightly that has written a package's folder: the last installed."""
    stem = distribution.replace("-", "_")
    metadata = [*folder.parent.glob(f"{stem}_nightly-*.dist-info")]
    metadata += folder.parent.glob(f"{stem}-*.dist-info")
    newest = max(metadata, key=lambda path: path.stat().st_mtime, default=None)
    if newest is not None:
        return importlib.metadata.Distribution.at(newest)
    try:  # of the system's packages, which have metadata of another form
        return importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def loaded_torch() -> Any:
    """Return torch, or None where nothing has imported it: then no object is a module of it."""
    # The import waits for another thread that is in the middle of it.
    return None if sys.modules.get("torch") is None else importlib.import_module("torch")


def import_torch() -> bool:
    """Import torch if it is installed; return whether it is."""
    if _spec_of("torch") is None:
        return False
    importlib.import_module("torch")
    return True


def _spec_of(package: str) -> ModuleSpec | None:
    """Return the spec of an installed package; None of a stub, or of a folder of its name."""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # somebody has put an object without a spec in its place
        return None
    return spec if spec is not None and spec.origin is not None else None


def library_versions() -> dict[str, str | None]:
    """Return the versions of the libraries that convert, quantize and run."""
    return {name: version_of(name) for name in _PACKAGES}


def producer() -> dict[str, str | None]:
    """Return the versions of everything that a baseline may depend on."""
    return {"pytest-edgeq": version_of("pytest-edgeq"), **library_versions()}


class Untried(NamedTuple):
    """A release that pytest-edgeq was not run with, in this stack."""

    name: str
    version: str
    tried: str | None  # of the nearest stack, by its first two numbers; None if it has none

    def __str__(self) -> str:
        return f"{self.name} {self.version} (tried: {self.tried or 'without it'})"

    @property
    def requirement(self) -> str:
        """The requirement of the nearest stack, for pip; empty if it has none."""
        return "" if self.tried is None else f"'{self.name}=={self.tried}.*'"


def untried(versions: Mapping[str, str | None]) -> list[Untried]:
    """Return the releases by which a stack differs from the nearest one of `STACKS`."""

    def strange(row: Mapping[str, str]) -> list[Untried]:
        return [
            Untried(name, version, row.get(name))
            for name, version in versions.items()
            if name in _PACKAGES
            and version is not None
            and ".".join(version.split(".")[:2]) != row.get(name)
        ]

    return min(map(strange, STACKS), key=len)


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


_PLAIN = frozenset(
    {
        *("ai_edge_litert", "cloudpickle", "filelock", "flatbuffers", "ml_dtypes", "numpy"),
        "scipy",
    }
)
"""Packages of the plain install; distributions have hyphens in their names instead."""

_CONVERTING = frozenset(
    {
        *("torch", "torchao", "litert_torch", "litert_converter", "ai_edge_quantizer"),
        *("litert_quantizer", "jax", "jaxlib"),
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
    """Raise a StackError in place of an error that a name missing in a library made here."""
    missing = _missing_name(error)
    if missing is None or not _raised_here(error):
        return
    versions = library_versions()
    installed = {name: version for name, version in versions.items() if version is not None}
    stack = ", ".join(f"{name} {version}" for name, version in installed.items())
    new = ", ".join(map(str, untried(versions))) or "none"
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
