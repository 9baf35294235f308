"""The result of `edgeq.compare`: errors by stage, health, worst samples, chart points."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .findings import Finding, aligned
from .metric_table import LOWER_BOUNDED, UPPER_BOUNDED
from .metrics import json_number
from .results import OutputErrors, StageErrors
from .samples import NOT_COUNTED, EvaluatedSamples
from .target_machine import TargetMachine

_PER_SAMPLE = 256
_LIMIT = 2048


class PointSample:
    """Keeps evenly spaced elements of one output, those of the first samples up to a limit."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[str, npt.NDArray[np.float64]]] = {}

    def update(self, index: int, sides: Mapping[str, npt.NDArray[Any]]) -> None:
        """Add one sample."""
        size = next(iter(sides.values())).size
        chosen = np.linspace(0, size - 1, min(size, _PER_SAMPLE), dtype=np.intp)
        # By its index, however the samples are split.
        if (index + 1) * chosen.size <= _LIMIT:
            self._kept[index] = {
                name: array.reshape(-1)[chosen].astype(np.float64) for name, array in sides.items()
            }

    def merge(self, other: PointSample) -> None:
        """Add the samples of another one."""
        self._kept |= other._kept

    def result(self) -> dict[str, npt.NDArray[np.float64]]:
        """Return the elements by side, in the order of the samples."""
        ordered = [self._kept[index] for index in sorted(self._kept)]
        names = ordered[0] if ordered else ()
        return {name: np.concatenate([points[name] for points in ordered]) for name in names}


_STAGES = ("conversion", "quantization", "lowering", "total")  # in the order of the pipeline


@dataclass(frozen=True, slots=True)
class WorstSample:
    """
    A sample to look at.

    Attributes:
        index: its index among the samples.
        sqnr_db: its least SQNR over the outputs.
        inputs: a copy of what the model was given.
    """

    index: int
    sqnr_db: float
    inputs: Any

    def to_dict(self) -> dict[str, Any]:
        """Return plain, JSON-able data with sorted keys, without the inputs."""
        return {"index": self.index, "sqnr_db": json_number(self.sqnr_db)}


_Badness: TypeAlias = "tuple[float, bool, float, int]"


class WorstSamples:
    """
    Keeps the inputs of the worst few samples, in constant memory.

    NaN is the worst SQNR, then −inf. Of equals the sample with the least index is kept, in whatever
    order they come.
    """

    def __init__(self, limit: int = 3) -> None:
        self._limit = limit
        self._kept: list[tuple[_Badness, WorstSample]] = []

    def offer(
        self, index: int, sqnr_db: float, make_inputs: Callable[[], Any], *, lost: float = 0.0
    ) -> None:
        """
        Keep the sample if it is among the worst; only then are its inputs made (cloned).

        What is `lost` of a score comes before the SQNR.
        """
        ordered = not math.isnan(sqnr_db)
        badness = (-lost, ordered, sqnr_db if ordered else 0.0, index)
        if len(self._kept) < self._limit or badness < self._kept[-1][0]:
            self._keep([(badness, WorstSample(index, sqnr_db, make_inputs()))])

    def merge(self, other: WorstSamples) -> None:
        """Keep the worst of both."""
        self._keep(other._kept)

    def result(self) -> tuple[WorstSample, ...]:
        """Return the samples kept, the worst first."""
        return tuple(sample for _, sample in self._kept)

    def _keep(self, samples: list[tuple[_Badness, WorstSample]]) -> None:
        self._kept = sorted([*self._kept, *samples], key=itemgetter(0))[: self._limit]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """
    Errors of the edge model against torch, by stage; None for a stage that the flow lacks.

    Attributes:
        name: the model.
        flow: how the quantizer took it to the edge.
        runtime: the kernels that ran it.
        total: edge against float.
        quantization: simulated against float (in a recipe flow edge against float_tflite).
        lowering: edge against simulated.
        conversion: float_tflite against float.
        health: what is wrong whatever the budget says.
        worst_samples: the samples of the least SQNR, the worst first.
        evaluated: how many samples there were, and how many of them differ.
        fingerprint: SHA-256 over names, dtypes, shapes and bytes of the samples, in order; of
            samples of `edgeq.samples` over a digest of each.
        machines: hosts and processors of an executor that measured it; empty of this process.
        target: the machine whose kernels ran the file; None for this one.
        build: gives what of the file the errors may not show, which is remembered beside them.
        points: elements of each output by its name and side, of the first samples, where they were
            asked for; for charts.
        explain: finds the layer to blame for a check that fails; None where nothing can.
        quantized: the `QuantizedModel` that was compared; None where that is not known.
    """

    name: str
    flow: str
    runtime: str
    total: StageErrors
    quantization: StageErrors | None = None
    lowering: StageErrors | None = None
    conversion: StageErrors | None = None
    health: tuple[Finding, ...] = ()
    worst_samples: tuple[WorstSample, ...] = ()
    evaluated: EvaluatedSamples = NOT_COUNTED
    fingerprint: str = ""
    machines: tuple[str, ...] = field(default=(), compare=False)
    target: TargetMachine | None = field(default=None, compare=False)
    build: Callable[[], Mapping[str, Any]] = field(default=dict, repr=False, compare=False)
    points: Mapping[str, Mapping[str, npt.NDArray[np.float64]]] = field(
        default_factory=dict, repr=False, compare=False
    )
    explain: Callable[[], Finding] | None = field(default=None, repr=False, compare=False)
    quantized: Any = field(default=None, repr=False, compare=False)

    @property
    def stages(self) -> dict[str, StageErrors]:
        """The stages that this flow has, in the order of the pipeline."""
        stages = {name: getattr(self, name) for name in _STAGES}
        return {name: stage for name, stage in stages.items() if stage is not None}

    def to_dict(self) -> dict[str, Any]:
        """Return plain, JSON-able data with sorted keys, without the inputs of samples."""
        return {
            "flow": self.flow,
            "health": [finding.to_dict() for finding in self.health],
            "name": self.name,
            "runtime": self.runtime,
            "stages": {name: stage.to_dict() for name, stage in sorted(self.stages.items())},
            "worst_samples": [sample.to_dict() for sample in self.worst_samples],
        }

    def __str__(self) -> str:
        """Return a table with a row for each output of each stage, then the health findings."""
        metrics = (*UPPER_BOUNDED, *LOWER_BOUNDED)
        rows: list[tuple[str, ...]] = [("stage", "output", *metrics)]
        for stage, errors in self.stages.items():
            for output in errors.outputs.values():
                rows.append((stage, output.name, *(metric_cell(output, name) for name in metrics)))
        lines = [
            f"{self.name}: flow {self.flow}, runtime {self.runtime}, "
            f"{self.total.n_samples} sample(s), {self.total.nonfinite} non-finite element(s)",
            *aligned(rows, numeric=range(2, 2 + len(metrics))),
        ]
        lines += [f"health: {finding}" for finding in self.health] or ["health: nothing found"]
        return "\n".join(lines)


def metric_cell(output: OutputErrors, metric: str) -> str:
    """Return a metric as text, in the digits that are compared."""
    value = getattr(output, metric)
    if value is None:
        return "-"
    # 0.99987 and 0.99912 are far apart, and both read 0.9999 or 1 in few digits.
    return f"{value:.6f}" if metric == "cosine_similarity" else f"{value:.4g}"
