"""The job of `assert_accuracy_drop`: both models and the metric, on workers."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from pytest_edgeq.assertions.scoring import Scorer, scorer_for
from pytest_edgeq.assertions.scoring.both_models import bound_pair, outcome_of, score
from pytest_edgeq.assertions.scoring.metric import ScoredSample
from pytest_edgeq.executors.carriers import Engine
from pytest_edgeq.executors.parcel import Parcel
from pytest_edgeq.executors.reading import Reading, streamed
from pytest_edgeq.numerics.comparison import WorstSamples
from pytest_edgeq.progress import Step
from pytest_edgeq.quantized import QuantizedModel
from pytest_edgeq.sample_source import SampleSource
from pytest_edgeq.samples import Sample


@dataclass(frozen=True)
class AccuracyJob:
    """
    Score both models.

    Attributes:
        source: Where workers read pairs; None where the tasks bring them.
        metric: As the user gave it.
    """

    source: SampleSource | None
    metric: Any
    what: str = "the metric, or the factory of the samples,"

    def station(self, model: QuantizedModel, runtime: str) -> _AccuracyStation:
        """Return what scores samples of a model."""
        del runtime
        return _AccuracyStation(model, self.metric)

    def bound(self, model: QuantizedModel, given: Any, index: int) -> tuple[Sample, Any]:
        """Return sample and label of a pair that the user's factory gave."""
        return bound_pair(model, given, index)


class _AccuracyStation:
    def __init__(self, model: QuantizedModel, metric: Any) -> None:
        self._model, self._edge = model, model.edge.apart()
        self._scorer = scorer_for(metric)

    def run(self, items: Iterable[tuple[int, Any]], extra: Any) -> tuple[list[Any], WorstSamples]:
        del extra
        found: list[Any] = []
        worst = WorstSamples()
        for item in items:
            if found and isinstance(found[-1], ScoredSample):
                # The last one of all is used, which may be the last one here.
                found[-1] = found[-1]._replace(example=None)
            outcome = outcome_of(self._model, self._edge, item, self._scorer, nullcontext())
            found.append(score(self._scorer, outcome, worst))
        return found, worst


def score_by(
    engine: Engine,
    parcel: Parcel,
    metric: Any,
    reading: Reading,
    name: str,
    scorer: Scorer,
    worst: WorstSamples,
) -> int:
    """
    Score all samples, and return their number.

    Raises:
        CannotTravelError: The metric or the factory cannot be pickled.
        Exception: As `Stream.run` does.
    """

    def add(_: object, scored: tuple[list[Any], WorstSamples]) -> None:
        for each in scored[0]:
            scorer.add(each)
        worst.merge(scored[1])

    step = Step("accuracy", name, None)
    job = AccuracyJob(reading.source, metric)
    streamed(engine, parcel, job, reading, add, step, in_order=True)
    return step.done
