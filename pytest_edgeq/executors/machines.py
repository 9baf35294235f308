"""Describe the machine that this process runs on."""

from __future__ import annotations

import functools
import json
import platform
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from pytest_edgeq.numerics.machine import Machine
from pytest_edgeq.versions import version_of

_CPU_INFO = Path("/proc/cpuinfo")

_FEATURES = re.compile(
    r"(amx|avx|f16c|fma|s?sse|asimd|bf16|fphp|i8mm|neon|sve|vsx)\w*|sme(2\w*|_\w+|)"
)
"""Names of instruction sets that kernels are chosen by."""

_COMPUTING = ("ai-edge-litert", "numpy", "torch")
"""Distributions whose kernels compute figures."""


@functools.cache
def this_machine() -> Machine:
    """Return the machine of this process."""
    import torch

    lines = _CPU_INFO.read_text().splitlines() if _CPU_INFO.exists() else []
    told = {name.strip(): text.strip() for name, _, text in (each.partition(":") for each in lines)}
    words = (told.get("flags") or told.get("Features") or "").split()
    versions = {"python": platform.python_version()}
    versions |= {name: version_of(name) or "" for name in _COMPUTING}
    return Machine(
        (platform.node(),),
        1,
        platform.machine(),
        told.get("model name") or platform.processor(),
        tuple(sorted({each for each in words if _FEATURES.fullmatch(each)})),
        torch.backends.cpu.get_cpu_capability(),
        json.dumps(versions),
    )


def gathered(processes: Iterable[Machine]) -> tuple[Machine, ...]:
    """Put the machines of processes together that are alike."""
    kinds: dict[object, list[Machine]] = defaultdict(list)
    for each in processes:
        kinds[each.kind].append(each)
    found = []
    for alike in kinds.values():
        first = alike[0]
        hosts = tuple(sorted({host for each in alike for host in each.hosts}))
        found.append(
            Machine(
                hosts,
                len(alike),
                first.machine,
                first.cpu,
                first.features,
                first.kernels,
                first.versions,
            )
        )
    return tuple(sorted(found))
