"""
Score two models on the same samples.

- `scores`: the protocol of a scorer, and its result.
- `function`: by a function of outputs and label. `metric`: by a torchmetrics Metric.
"""

from __future__ import annotations

from typing import Any

from pytest_edgeq.check.assertions.scoring.function import CallableScorer
from pytest_edgeq.check.assertions.scoring.metric import MetricScorer
from pytest_edgeq.check.assertions.scoring.scores import Scorer, Scores

__all__ = ["CallableScorer", "MetricScorer", "Scorer", "Scores", "scorer_for"]

# pytest looks for it among a frame's globals, too: no frame of this module is shown.
__tracebackhide__ = True


def scorer_for(metric: Any) -> Scorer:
    """Return the scorer for a callable or a Metric."""
    if isinstance(metric, type) or not callable(metric):
        way_out = (
            f"type: make one, {metric.__name__}(…)"
            if isinstance(metric, type)
            else f"{type(metric).__name__} {metric!r}"
        )
        raise TypeError(
            "metric: expected a callable metric(outputs, label) that gives a bool or a number, or "
            f"a torchmetrics Metric, got a {way_out}"
        )
    if all(hasattr(metric, name) for name in ("update", "compute", "reset")):
        return MetricScorer(metric)
    return CallableScorer(metric)
