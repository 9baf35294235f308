"""The versions that made a measurement, read from metadata: nothing is imported for them."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

DISTRIBUTIONS = (
    "pytest-edgeq",
    "torch",
    "torchao",
    "litert-torch",
    "litert-converter",
    "ai-edge-litert",
    "ai-edge-quantizer",
)


def version_of(distribution: str) -> str | None:
    """Tell the installed version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def producer() -> dict[str, str | None]:
    """Tell the versions of everything that a baseline may depend on."""
    return {name: version_of(name) for name in DISTRIBUTIONS}


def version_changes(before: Mapping[str, str | None], after: Mapping[str, str | None]) -> list[str]:
    """
    Tell what was upgraded since a file was written.

    Returns:
        Texts such as `torch 2.13.0 → 2.14.0`, of the distributions whose versions differ.
    """
    return [
        f"{name} {before.get(name) or 'none'} → {version or 'none'}"
        for name, version in after.items()
        if name in before and before[name] != version
    ]
