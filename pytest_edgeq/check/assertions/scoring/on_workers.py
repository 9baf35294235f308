"""Score both models by an executor."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_edgeq.check.assertions.scoring.both_models import (
    bound_pair,
    run_both,
    score,
    scorer_for,
)
from pytest_edgeq.check.assertions.scoring.metric import ScoredSample
from pytest_edgeq.check.assertions.scoring.scores import Scorer
from pytest_edgeq.compare.executors.remote import OpenModel, Reading
from pytest_edgeq.compare.sample_source import SampleSource
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.numerics.comparison import WorstSamples
from pytest_edgeq.progress import Step

if TYPE_CHECKING:
    from pytest_edgeq.compare.executors.engines import SampleExecutor


@dataclass(frozen=True)
class AccuracyJob:
    """Job that scores both models."""

    source: SampleSource | None
    metric: Any
    what: str = "the metric, or the factory of the samples,"

    def runner(self, model: OpenModel) -> _AccuracyRunner:
        """Return a runner on a model."""
        return _AccuracyRunner(model, self.metric)

    def bound(self, model: OpenModel, item: Any, index: int) -> tuple[Sample, Any]:
        """Return sample and label of a pair of the user's factory."""
        return bound_pair(model.quantized, item, index)


class _AccuracyRunner:
    def __init__(self, model: OpenModel, metric: Any) -> None:
        self._model, self._edge = model.quantized, model.quantized.edge.clone()
        self._scorer = scorer_for(metric)

    def run(self, items: Iterable[tuple[int, Any]], extra: Any) -> tuple[list[Any], WorstSamples]:
        """Score samples."""
        del extra
        found: list[Any] = []
        worst = WorstSamples()
        for item in items:
            if found and isinstance(found[-1], ScoredSample):
                # Only the last example of all is used, which may be this chunk's last.
                found[-1] = found[-1]._replace(example=None)
            outcome = run_both(self._model, self._edge, item, self._scorer, nullcontext())
            found.append(score(self._scorer, outcome, worst))
        return found, worst


def score_by(
    engine: SampleExecutor,
    model: bytes,
    metric: Any,
    reading: Reading,
    name: str,
    scorer: Scorer,
    worst: WorstSamples,
) -> int:
    """Score all samples by an engine, and return their number."""

    def merge(_: object, scored: tuple[list[Any], WorstSamples]) -> None:
        for each in scored[0]:
            scorer.add(each)
        worst.merge(scored[1])

    step = Step("accuracy", name, None)
    reading.measure(engine, model, AccuracyJob(reading.source, metric), merge, step)
    return step.done
