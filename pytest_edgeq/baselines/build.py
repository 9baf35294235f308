"""
Changes of a build that its errors may not show: ranges, weight schemes, shared scales.

A much wider range improves the errors of one that was too narrow, and leaves few codes. Asymmetric
weights lose less, but int8 kernels and accelerators reject them (the quantization specification of
TensorFlow Lite: the zero point of int8 weights is 0).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from pytest_edgeq.baselines.align import common
from pytest_edgeq.baselines.shape import ShapeCheck, is_number
from pytest_edgeq.numerics.findings import Place, first_of

UNDO = "undo what changed since the baseline"  # the fix where it is known what changed

# A setting by module or op, which a quantizer does not have by itself; None is float.
_CONFIG = re.compile(
    r"quantizer\..*?(?P<of>module_name|module_type|operator_type)_config\.(?P<name>.+?)"
    r"(\.(?P<setting>((in|out)put_activation|weight|bias|fixed_qparams|is_qat|is_dynamic)\b.*))?"
)
_RULE = re.compile(r"quantizer\.\[(?P<name>\d+)\]\.(?P<setting>.+)")  # of a rule of a recipe

# How to describe a module, the ops of a type, or a rule that the quantizer has settings for.
_FLOAT, _OWN, _ADDED = "left in float", "with settings of its own", "added"

_SAME = 0.02  # relative difference of two scales of one range, as of another order of samples
_HALF = 0.5  # a bit: another order of the same data moves averaged ranges by some per cent


_RANGE = ShapeCheck(
    lambda value: isinstance(value, list) and len(value) == 2 and all(map(is_number, value)),
    "a least and a greatest value",
)
BUILD = {
    "scales?": {"*": ShapeCheck(lambda value: is_number(value) and value >= 0, "a scale")},
    "n_calibrated?": int,
    "inputs?": {"*": _RANGE},
    **dict.fromkeys(("calibration?", "weights?"), str),
    **{key: [str] for key in ("int16?", "asymmetric?", "shared?")},
}
"""The shape of what is remembered of a build."""


def other_input(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return the input whose evaluated values span another range; empty where none does."""
    before, after = old.get("inputs", {}), new.get("inputs", {})
    for name in sorted(before.keys() & after.keys()):
        spans = [max(map(abs, side[name])) for side in (before, after)]
        if min(spans) < _HALF * max(spans):
            ends = ["[{:.3g}, {:.3g}]".format(*side[name]) for side in (before, after)]
            return f"input {name!r}: expected values within {ends[0]}, got {ends[1]}"
    return ""


def is_known(options: Mapping[str, str]) -> bool:
    """Whether the options are complete: the quantizer is not of a user's own class."""
    return bool(options) and "unknown" not in options.values()


def option_changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """
    Return the options of `quantize` that changed, such as `strict_export: True → False`.

    Empty for a baseline that was stored without options, and for a loaded file. If the quantizer
    changed, only settings by module or op are listed, as all others depend on its class.
    """
    if not old or not new:
        return []
    names = list(dict.fromkeys(key for key in (*old, *new) if old.get(key) != new.get(key)))
    if "quantizer" in names:
        both = old.keys() & new.keys()
        names = [key for key in names if _CONFIG.fullmatch(key) or ("." not in key and key in both)]
    sides = _subjects(old), _subjects(new)
    return list(dict.fromkeys(_option_change(key, (old, new), sides) for key in names))


def _option_change(
    key: str, options: tuple[Mapping[str, str], ...], subjects: tuple[Mapping[str, str], ...]
) -> str:
    """Describe how an option changed; a group that was added or removed is one change."""
    before, after = (each.get(key, "not set") for each in options)
    subject, setting = _parts(key)
    was, now = (each.get(subject, "") for each in subjects)
    if not subject:
        return f"{key}: {before} → {after}"
    if was == now:
        return f"quantizer: {subject}: {setting}: {before} → {after}"
    gone = "removed" if was == _ADDED else f"no longer {was}"
    return f"quantizer: {subject} {now or gone}"


def _subjects(options: Mapping[str, str]) -> dict[str, str]:
    """Return how each module, op type and rule that the quantizer configures is described."""
    found = {}
    for key in options:
        subject, setting = _parts(key)
        if subject:
            of_own = _ADDED if _RULE.fullmatch(key) else _OWN
            found[subject] = of_own if setting else _FLOAT
    return found


def _parts(key: str) -> tuple[str, str]:
    """Split an option into module, op or rule, and setting; both may be empty."""
    if rule := _RULE.fullmatch(key):
        return f"rule {int(rule['name']) + 1}", rule["setting"]
    if config := _CONFIG.fullmatch(key):
        name = repr(config["name"]) if config["of"] == "module_name" else config["name"]
        return name, config["setting"] or ""
    return "", ""


def describe_build(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a line for each property of the build that differs from the baseline."""
    return [*_ranges(old, new), *_weights(old, new), *_sharing(old, new)]


def data_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str | None]:
    """Return how weights and calibration samples differ from those of the baseline."""
    weights, samples = (
        old[key] != new[key] if old.get(key) and new.get(key) else None
        for key in ("weights", "calibration")
    )
    found: dict[str, str | None] = {"weights": None, "calibration samples": None}
    if weights is not None:
        found["weights"] = "weights or buffers: changed" if weights else ""
    before, after = (side.get("n_calibrated", 0) for side in (old, new))
    if before and after and before != after:
        found["calibration samples"] = f"calibration: {before} → {after} samples"
    elif samples is not None:
        found["calibration samples"] = "calibration: other samples" if samples else ""
    elif not (old.get("calibration") or new.get("calibration")):
        del found["calibration samples"]
    return found


def has_range_of(op: Place, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether the output of an op has the scale that the baseline has."""
    before, after = old.get("scales", {}), new.get("scales", {})
    return any(
        math.isclose(before[one], after[other], rel_tol=_SAME)
        for one, other in _paired(before, after).items()
        if _position(other) == (op.subgraph, op.op)
    )


def _ranges(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Report activations whose range changed by a factor of two; for ops in both builds."""
    before, after = old.get("scales", {}), new.get("scales", {})
    pairs = _paired(before, after)
    wide = [set(side.get("int16", [])) for side in (old, new)]
    ratios = {
        one: after[other] / before[one]
        for one, other in pairs.items()
        # Scales of int8 and int16 differ for equal ranges.
        if before[one] and (one in wide[0]) == (other in wide[1])
    }
    moved = {where: ratio for where, ratio in ratios.items() if not _HALF <= ratio <= 1 / _HALF}
    if not moved:
        return []
    where = max(moved, key=lambda each: abs(math.log(moved[each] or math.ulp(0.0))))
    return [
        f"activation ranges moved: {where}: expected a scale within 2 × of {before[where]:.4g}, "
        f"got {after[pairs[where]]:.4g} ({len(moved)} of {len(ratios)} activations)"
    ]


def _position(where: str) -> tuple[int, int]:
    """Return subgraph and index of an op by its name."""
    place = Place.of_op(where)
    return place.subgraph, -1 if place.op is None else place.op


def _unplaced(where: str) -> Place:
    """Return the place of an op without its position."""
    return Place.of_op(where)._replace(op=None, subgraph=0)


def _paired(names: Iterable[str], others: Iterable[str]) -> dict[str, str]:
    """
    Pair the names of ops of two builds in the order of execution.

    An op without a module has no name but its kind: it is paired only where both builds have as
    many of the kind.
    """
    before, after = sorted(names, key=_position), sorted(others, key=_position)
    one, other = (list(map(_unplaced, side)) for side in (before, after))
    numbers = Counter(one), Counter(other)
    return {
        before[i]: after[j]
        for i, j in common(one, other)
        if one[i].module or numbers[0][one[i]] == numbers[1][one[i]]
    }


def fewer_samples(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Calibration samples of which less than half are left; a loaded file has none."""
    before, after = old.get("n_calibrated", 0), new.get("n_calibrated", 0)
    if not after or 2 * after >= before:
        return []
    return [
        "expected at least half of the baseline's different calibration samples, got "
        f"{after / before:.0%}: what they do not reach will be clipped"
    ]


def _weights(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    before, after = old.get("asymmetric", []), new.get("asymmetric", [])
    return [
        f"weights {symptom} asymmetric: {first_of(changed)}: expected {differs}"
        for changed, symptom, differs in (
            (_beyond(after, before), "became", "symmetric ones, got zero points other than 0"),
            (_beyond(before, after), "are no longer", "zero points other than 0, got none"),
        )
        if changed
    ]


def _beyond(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return the ops that others lack, whatever their positions."""
    left = Counter(map(_unplaced, others))
    found = []
    for each in sorted(names, key=_position):
        left[_unplaced(each)] -= 1
        if left[_unplaced(each)] < 0:
            found.append(each)
    return found


def _sharing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Report known ops that no longer keep the scale and zero point of their input."""
    pairs = _paired(old.get("scales", {}), new.get("scales", {}))
    shared = new.get("shared", [])
    parted = [op for op in old.get("shared", []) if op in pairs and pairs[op] not in shared]
    if not parted:
        return []
    return [
        f"parameters no longer shared: {first_of(parted)}: expected the scale and zero point of "
        "its input, got others: it rounds once more"
    ]
