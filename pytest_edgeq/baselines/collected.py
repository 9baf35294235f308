"""
The collected tests of a module, and the reason where the run did not select all of them.

Obsolete baselines are looked for only in modules that ran completely.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TypedDict

from pytest_edgeq.baselines.paths import Layout


class CollectedModule(TypedDict):
    """The tests of a module that one process collected, as plain data for xdist."""

    module: str  # its path, relative to rootdir where it is below
    tests: dict[str, str]  # the part of each test's name behind the module, by node id
    gap: str  # why the run did not select all of its tests; empty where it did


def collected_modules(
    layout: Layout,
    collected: Mapping[Path, Mapping[str, str]],
    selected: AbstractSet[str],
    *,
    named: Collection[Path],
    absent: Mapping[Path, str],
    narrowed: str,
) -> list[CollectedModule]:
    """Describe the modules that have baselines."""
    found: list[CollectedModule] = []
    for module, names in collected.items():
        left = len(names.keys() & selected)
        if module in named:
            gap = "only tests named on the command line were collected"
        elif left < len(names):
            gone, tests = len(names) - left, "test" if len(names) == 1 else "tests"
            gap = f"{gone} of {len(names)} {tests} {'was' if gone == 1 else 'were'} deselected"
        else:
            gap = narrowed
        found.append({"module": layout.shown(module), "tests": dict(names), "gap": gap})
    found += [
        {"module": layout.shown(module), "tests": {}, "gap": gap}
        for module, gap in absent.items()
        if layout.has_baselines(module)
    ]
    return found


def merged(reports: Iterable[Iterable[CollectedModule]]) -> list[CollectedModule]:
    """Merge the collections of several processes; a gap in one is a gap."""
    modules: dict[str, CollectedModule] = {}
    for report in reports:
        for each in report:
            known = modules.setdefault(
                each["module"], {"module": each["module"], "tests": {}, "gap": ""}
            )
            known["tests"] |= each["tests"]
            known["gap"] = known["gap"] or each["gap"]
    return [modules[name] for name in sorted(modules)]
