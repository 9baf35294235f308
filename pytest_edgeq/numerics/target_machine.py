"""The machine that a target's kernels run on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

_KERNELS = re.compile(
    r"AVX2?|F16C|FMA3|AVX512(F|VNNI|_FP16)|AMX\w*|NEON|ASIMD(DP|HP)?|FPHP|SVE\w*|I8MM|VSX\w*|RVV"
)
"""Instruction sets that are shown; the record has all."""

_OF_GPU = ("adapter", "precision")

PRECISIONS = {"gpu": "float16", "gpu_f32": "float32"}
"""In which kernels of the GPU compute."""


@dataclass(frozen=True, slots=True)
class TargetMachine:
    """
    The machine of a target, as its worker describes it.

    Attributes:
        target: The target's name.
        machine: Of the processor, such as `aarch64`.
        cpu: The processor's name, as far as it is known.
        features: Instruction sets that kernels are chosen by.
        package: That runs the files, such as `ai-edge-litert`.
        release: Of the package.
        python: Release of Python.
        numpy: Release of numpy.
        adapter: The GPU and its driver, as LiteRT's engine names them; empty for a CPU.
        precision: In which the engine computes floats there, `float16` or `float32`.
    """

    target: str
    machine: str
    cpu: str
    features: tuple[str, ...]
    package: str
    release: str
    python: str
    numpy: str
    adapter: str = ""
    precision: str = ""

    @classmethod
    def of(cls, target: str, facts: Mapping[str, Any]) -> TargetMachine:
        """Make one of the facts that a worker sends."""
        names = ("machine", "cpu", "features", "package", "release", "python", "numpy")
        known: Any = {name: str(facts[name]) for name in names}
        known |= {name: str(facts.get(name, "")) for name in _OF_GPU}
        return cls(target, **{**known, "features": tuple(map(str, facts["features"]))})

    def __str__(self) -> str:
        """Return the machine, its releases and the instruction sets of kernels in one line."""
        cpu = f" ({self.cpu})" if self.cpu else ""
        kernels = " ".join(filter(_KERNELS.fullmatch, self.features)) or "no vector instructions"
        if self.adapter:
            kernels = ", ".join(filter(None, (f"GPU {self.adapter}", self.precision)))
        return (
            f"{self.machine}{cpu}, {self.package} {self.release}, Python {self.python}, "
            f"numpy {self.numpy}, {kernels}"
        )

    @property
    def kernels(self) -> dict[str, Any]:
        """Return the fields that identify the kernels, as plain, JSON-able data for a baseline."""
        known = self.to_dict()
        names = ("machine", "features", "package", "release", *_OF_GPU)
        return {name: known[name] for name in names if name in known}

    def to_dict(self) -> dict[str, Any]:
        """Return plain, JSON-able data; what only a GPU has is left out for a CPU."""
        known = {**asdict(self), "features": list(self.features)}
        return {name: value for name, value in known.items() if value or name not in _OF_GPU}
