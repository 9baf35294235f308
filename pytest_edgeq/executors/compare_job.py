"""The job of a comparison: errors, health and digests of some samples, to be merged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pytest_edgeq.measurement import Measurement, SampleRunner
from pytest_edgeq.quantized import QuantizedModel
from pytest_edgeq.sample_source import SampleSource
from pytest_edgeq.samples import Sample
from pytest_edgeq.tally import Tally


@dataclass(frozen=True)
class CompareJob:
    """
    Compare the file with its references.

    Attributes:
        source: Where workers read samples; None where the tasks bring them.
        keeps_points: Whether to keep elements of the outputs, for charts.
    """

    source: SampleSource | None
    keeps_points: bool
    what: str = "the factory of the samples"

    def station(self, model: QuantizedModel, runtime: str) -> _CompareStation:
        """Return what compares samples of a model."""
        return _CompareStation(model, runtime, self.keeps_points)

    def bound(self, model: QuantizedModel, given: Any, index: int) -> Sample:
        """Return a sample that the user's factory gave, bound."""
        return bound(model, given, index)


class _CompareStation:
    def __init__(self, model: QuantizedModel, runtime: str, keeps_points: bool) -> None:
        self._model, self._keeps_points = model, keeps_points
        self._runner = SampleRunner(model, runtime).apart()
        self._runner.prepare()

    def run(self, items: Iterable[tuple[int, Any]], extra: Any) -> tuple[Measurement, Tally]:
        del extra
        measurement = Measurement.of(self._model, keeps_points=self._keeps_points)
        tally = Tally()
        for index, sample in items:
            outcome = self._runner.run(sample, index)
            measurement.update(index, sample.arrays(), outcome, sample.clone)
            tally.add(index, sample.arrays(), self._model.ledger)
        return measurement, tally


def bound(model: QuantizedModel, given: Any, index: int) -> Sample:
    """
    Return a sample that the user's factory gave, bound.

    Raises:
        TypeError, ValueError: It does not fit the model.
    """
    return model.spec.bind(given, f"evaluation sample {index}")
