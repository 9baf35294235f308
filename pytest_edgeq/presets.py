"""
The words that options, markers and `edgeq.quantize` share.

This module is cheap to import: the plugin reads it before any test runs, so it must bring neither
torch nor a converter with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

from pytest_edgeq.suggest import nearest

PRESETS: tuple[str, ...] = (
    "pt2e_static_int8",
    "pt2e_static_int8_per_tensor",
    "pt2e_dynamic_int8",
    "pt2e_qat_int8",
    "recipe_static_wi8_ai8",
    "recipe_static_wi8_ai16",
    "recipe_dynamic_wi8_afp32",
    "recipe_weight_only_wi8_afp32",
    "recipe_dynamic_wi4_afp32",
    "recipe_weight_only_wi4_afp32",
)
DEFAULT_PRESET = "pt2e_static_int8"

CACHE_MODES: tuple[str, ...] = ("on", "off", "refresh")

ISOLATE_MODES: tuple[str, ...] = ("auto", "on", "off")

RUNTIMES: tuple[str, ...] = ("xnnpack", "builtin", "reference", "compiled", "tensorflow")
DEFAULT_RUNTIME = "xnnpack"
NEEDS_TENSORFLOW = (
    "the runtime 'tensorflow' needs TensorFlow, which is not installed: "
    "pip install 'pytest-edgeq[tensorflow]'"
)
NEEDS_REPORT = (
    "charts and pictures of a report need packages that are not installed: "
    "pip install 'pytest-edgeq[report]'"
)


def unknown_preset(name: str) -> str:
    """
    Say that no preset has this name, and which ones there are.

    Returns:
        A text whose first line names the nearest presets, if any, and whose second lists all.
    """
    return (
        f"unknown quantizer preset {name!r}{nearest(name, PRESETS)}\n"
        f"  presets: {', '.join(PRESETS)}"
    )


def quantizer_ids(quantizers: Iterable[object]) -> list[str]:
    """
    Name quantizers for the ids of tests.

    Returns:
        One name each: the preset, the stem of a recipe's path, `none`, `recipe` for a recipe
        that is a list, else the name of the class. Where two are the same, all of these are
        counted from 0, because pytest's strict mode refuses equal ids.
    """
    names = [_quantizer_id(quantizer) for quantizer in quantizers]
    unique: list[str] = []
    for name in names:
        numbered = (f"{name}{number}" for number in itertools.count())
        free = (candidate for candidate in numbered if candidate not in (*names, *unique))
        unique.append(name if names.count(name) == 1 else next(free))
    return unique


def _quantizer_id(quantizer: object) -> str:
    if quantizer is None:
        return "none"
    if isinstance(quantizer, (str, Path)):
        text = str(quantizer)
        return Path(text).stem if text.endswith(".json") else text
    if isinstance(quantizer, (list, tuple)):
        return "recipe"
    return type(quantizer).__name__ if not isinstance(quantizer, type) else quantizer.__name__
