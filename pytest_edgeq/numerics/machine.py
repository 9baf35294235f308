"""A machine that measured, as far as the last bits of its figures may depend on it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, order=True)
class Machine:
    """
    Kernels and CPU of a machine.

    Attributes:
        hosts: Names of the machines that are alike.
        processes: How many processes measured on them.
        machine: Of the processor, such as `x86_64`.
        cpu: The processor's name.
        features: Of its instruction set, as far as kernels are chosen by them.
        kernels: What torch chooses, such as `AVX512`.
        versions: Releases of Python and of the libraries that compute, as JSON.
    """

    hosts: tuple[str, ...]
    processes: int
    machine: str
    cpu: str
    features: tuple[str, ...]
    kernels: str
    versions: str

    @property
    def kind(self) -> tuple[object, ...]:
        """What figures may depend on."""
        return self.machine, self.cpu, self.features, self.kernels, self.versions

    def to_dict(self) -> dict[str, Any]:
        """Return plain, JSON-able data."""
        told: Mapping[str, Any] = asdict(self)
        return {
            **told,
            "hosts": list(self.hosts),
            "features": list(self.features),
            "versions": json.loads(self.versions),
        }


def told_mixture(machines: Iterable[Machine]) -> str:
    """Say that machines are of different kinds, and in what; empty where they are alike."""
    known = list(machines)
    if len({each.kind for each in known}) < 2:
        return ""
    lines = [
        f"  {', '.join(each.hosts)} ({each.processes} process(es)): {each.cpu or each.machine}, "
        f"kernels {each.kernels}, {_versions(each)}"
        for each in known
    ]
    first, *others = known
    apart = {name for each in others for name in set(first.features) ^ set(each.features)}
    if apart:
        lines.append(f"  CPU features that not all have: {', '.join(sorted(apart))}")
    return "\n".join(
        [
            f"measured on {len(known)} kinds of machine, which may round differently: the last "
            "digits depend on which of them measured which sample",
            *lines,
        ]
    )


def _versions(machine: Machine) -> str:
    return " ".join(f"{name} {text}" for name, text in json.loads(machine.versions).items())
