"""The result of `edgeq.compare`: errors by stage, health, worst samples, chart points."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pytest_edgeq.names import nearest

from .findings import Finding, aligned
from .metrics import json_number
from .results import StageErrors, measured_metrics, metric_cell
from .samples import NOT_COUNTED, EvaluatedSamples
from .target_machine import TargetMachine

if TYPE_CHECKING:
    from .budget import Budget
    from .token_errors import CacheErrors, PositionErrors

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


_WORST = 3  # how many samples are kept
_Badness: TypeAlias = "tuple[float, bool, float, int]"


class WorstSamples:
    """
    Keeps the inputs of the worst few samples, in constant memory.

    NaN is the worst SQNR, then −inf. Of equals the sample with the least index is kept, in whatever
    order they come.
    """

    def __init__(self) -> None:
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
        if len(self._kept) < _WORST or badness < self._kept[-1][0]:
            self._keep([(badness, WorstSample(index, sqnr_db, make_inputs()))])

    def merge(self, other: WorstSamples) -> None:
        """Keep the worst of both."""
        self._keep(other._kept)

    def result(self) -> tuple[WorstSample, ...]:
        """Return the samples kept, the worst first."""
        return tuple(sample for _, sample in self._kept)

    def _keep(self, samples: list[tuple[_Badness, WorstSample]]) -> None:
        self._kept = sorted([*self._kept, *samples], key=itemgetter(0))[:_WORST]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """
    Errors of the edge model against torch, by stage; None for a stage that the flow lacks.

    Attributes:
        name: the model.
        flow: the flow that made the file, such as `pt2e` or `recipe`.
        runtime: the kernels that ran it.
        total: edge against float.
        quantization: simulated against float (in a recipe flow edge against float_tflite).
        lowering: edge against simulated.
        conversion: float_tflite against float.
        health: what is wrong whatever the budget says.
        worst_samples: the samples of the least SQNR, the worst first.
        evaluated: how many samples there were, and how many of them differ.
        notes: what a check found that is no fault, for the summary of the session.
        fingerprint: SHA-256 over names, dtypes, shapes and bytes of the samples, in order; of
            samples of `edgeq.samples` over a digest of each.
        machines: hosts and processors of an executor that measured it; empty of this process.
        target: the machine whose kernels ran the file; None for this one.
        build: returns properties of the build that errors may not show, for the baseline.
        points: elements of each output by its name and side, of the first samples, where they were
            asked for; for charts.
        positions: errors of the logits of a language model by position, of each stage; empty of
            other models.
        caches: errors of its cache by tensor and position, of each stage.
        explain: finds the layer to blame for a check that fails; None where nothing can.
        suggest: returns what to say of layers to leave in float where a budget fails; None where
            no layer can be.
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
    notes: tuple[str, ...] = field(default=(), compare=False)
    fingerprint: str = ""
    positions: Mapping[str, PositionErrors] = field(default_factory=dict, compare=False)
    caches: Mapping[str, CacheErrors] = field(default_factory=dict, compare=False)
    machines: tuple[str, ...] = field(default=(), compare=False)
    target: TargetMachine | None = field(default=None, compare=False)
    build: Callable[[], Mapping[str, Any]] = field(default=dict, repr=False, compare=False)
    points: Mapping[str, Mapping[str, npt.NDArray[np.float64]]] = field(
        default_factory=dict, repr=False, compare=False
    )
    explain: Callable[[], Finding] | None = field(default=None, repr=False, compare=False)
    suggest: Callable[[Budget], str] | None = field(default=None, repr=False, compare=False)
    quantized: Any = field(default=None, repr=False, compare=False)

    @property
    def stages(self) -> dict[str, StageErrors]:
        """The stages that this flow has, in the order of the pipeline."""
        stages = {name: getattr(self, name) for name in _STAGES}
        return {name: stage for name, stage in stages.items() if stage is not None}

    def by_position(self, stage: str = "total") -> PositionErrors:
        """
        Return the errors of a language model's logits by position.

        Raises:
            ValueError: The model is no language model, or has no such stage.
        """
        if not self.positions:
            raise ValueError(
                f"{self.name} has no errors by position: it is not measured as a language model, "
                "whose samples are sequences of tokens"
            )
        if stage not in self.positions:
            raise ValueError(
                f"by_position({stage!r}): {self.name} has no such stage"
                f"{nearest(stage, self.positions)}; it has {', '.join(self.positions)}"
            )
        return self.positions[stage]

    def to_dict(self) -> dict[str, Any]:
        """Return plain, JSON-able data with sorted keys, without the inputs of samples."""
        caches = {name: each.to_dict() for name, each in sorted(self.caches.items())}
        positions = {name: each.to_dict() for name, each in sorted(self.positions.items())}
        return {
            "flow": self.flow,
            "health": [finding.to_dict() for finding in self.health],
            "name": self.name,
            **({"positions": positions} if positions else {}),
            **({"caches": caches} if caches else {}),
            "runtime": self.runtime,
            "stages": {name: stage.to_dict() for name, stage in sorted(self.stages.items())},
            "worst_samples": [sample.to_dict() for sample in self.worst_samples],
        }

    def __str__(self) -> str:
        """Return a table with a row for each output of each stage, then the health findings."""
        all_outputs = (each for errors in self.stages.values() for each in errors.outputs.values())
        metrics = measured_metrics(all_outputs)
        rows: list[tuple[str, ...]] = [("stage", "output", *metrics)]
        for stage, errors in self.stages.items():
            for output in errors.outputs.values():
                rows.append((stage, output.name, *(metric_cell(output, name) for name in metrics)))
        lines = [
            f"{self.name}: flow {self.flow}, runtime {self.runtime}, "
            f"{self.total.n_samples} sample(s), {self.total.nonfinite} non-finite element(s)",
            *aligned(rows, numeric=range(2, 2 + len(metrics))),
        ]
        lines += [f"{stage} cache: worst {each.worst}" for stage, each in self.caches.items()]
        lines += [f"{stage} by position: {each.summary}" for stage, each in self.positions.items()]
        lines += [f"health: {finding}" for finding in self.health] or ["health: nothing found"]
        return "\n".join(lines)
