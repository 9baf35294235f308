"""
Names: of options, of `edgeq.quantize`, from outside; and suggestions of near ones.

Names from outside are those of models, modules and signatures, and names in files. This module is
cheap to import: the plugin reads it before any test runs.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import re
from collections.abc import Iterable
from pathlib import Path

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

#: Kernels of LiteRT's GPU engine, in the precision that it chooses (float16) and in float32.
GPU_KERNELS: tuple[str, ...] = ("gpu", "gpu_f32")
RUNTIMES: tuple[str, ...] = (
    *("xnnpack", "builtin", "reference", "compiled", "tensorflow"),
    *GPU_KERNELS,
)
DEFAULT_RUNTIME = "xnnpack"
NEEDS_TENSORFLOW = (
    "the runtime 'tensorflow' needs TensorFlow, which is not installed: "
    "pip install 'pytest-edgeq[tensorflow]'"
)
NEEDS_REPORT = (
    "charts and pictures of a report need packages that are not installed: "
    "pip install 'pytest-edgeq[report]'"
)

LONGEST_NAME = 200  # characters in texts; a path of modules is rarely as long


def printable(line: str) -> str:
    """Return a line with escapes of what a terminal, XML or a log would obey or break at."""
    if line.isprintable():
        return line
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in line)


def readable(name: str) -> str:
    """Return a name in printable form; one that is too long ends in a part of its hash."""
    shown = printable(name)
    if len(shown) <= LONGEST_NAME:
        return shown
    end = f"…{hashlib.sha256(shown.encode()).hexdigest()[:8]}"
    return shown[: LONGEST_NAME - len(end)] + end


def nearest(name: str, known: Iterable[str]) -> str:
    """
    Return ` (did you mean a or b?)`, or an empty string where nothing is near.

    Near are names that are spelt alike, else those that contain each word of the one given.
    """
    # The module path "" (the model itself) is nothing to suggest.
    folded = {candidate.lower(): candidate for candidate in known if candidate}
    # A lower cutoff than difflib's 0.6: 'CONV2D' against 'DEPTHWISE_CONV_2D' is worth showing.
    found = difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.5)
    if not found:
        words = re.findall(r"[a-z0-9]{3,}", name.lower())
        found = [each for each in folded if words and all(word in each for word in words)][:3]
    return hint([folded[match] for match in found])


def hint(found: Iterable[str]) -> str:
    """Return ` (did you mean a or b?)` of names; an empty string of none."""
    names = " or ".join(found)
    return f" (did you mean {names}?)" if names else ""


def unknown_preset(name: str) -> str:
    """Return a text whose first line names the nearest presets, and whose second all."""
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
    numbers = {name: itertools.count() for name in names}
    return [n if names.count(n) == 1 else f"{n}{next(numbers[n])}" for n in names]


def _quantizer_id(quantizer: object) -> str:
    if quantizer is None:
        return "none"
    if isinstance(quantizer, (str, Path)):
        text = str(quantizer)
        return Path(text).stem if text.endswith(".json") else text
    if isinstance(quantizer, (list, tuple)):
        return "recipe"
    return type(quantizer).__name__ if not isinstance(quantizer, type) else quantizer.__name__
