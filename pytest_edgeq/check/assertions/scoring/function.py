"""Score by a function of outputs and label."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from numbers import Real
from typing import Any

import numpy as np

from pytest_edgeq.check.assertions.scoring.scores import Floats, Scores
from pytest_edgeq.compare.samples import as_array, is_tensor
from pytest_edgeq.numerics.paired import (
    Resampled,
    RightWrong,
    acceleration_of_mean,
    bootstrap_bounds,
    resampled_means,
)

# pytest looks for it among a frame's globals, too: no frame of this module is shown.
__tracebackhide__ = True

RESAMPLES = 2000
"""For means; the error of a 95 % bound is then some 4 % of the standard error."""


class CallableScorer:
    """Scores by `metric(outputs, label)`: higher is better."""

    wants_tensors = False

    def __init__(self, metric: Callable[[Any, Any], Any]) -> None:
        self._metric = metric
        self.name = _name(metric)
        self._scores = array("d"), array("d")
        self._index = array("q")

    def score(
        self, index: int, outputs: tuple[Any, Any], label: Any, batch: set[int]
    ) -> tuple[int, list[Floats]]:
        """Return the index and both models' scores, of the sample or of each item."""
        scores = [
            _checked(self._metric(given, label), f"{self.name}, sample {index}, {side}", batch)
            for side, given in zip(("float", "edge"), outputs, strict=True)
        ]
        if len(scores[0]) != len(scores[1]):
            raise ValueError(
                f"{self.name}, sample {index}: expected as many scores for both models, got "
                f"{len(scores[0])} for float and {len(scores[1])} for edge"
            )
        return index, scores

    def lost(self, scored: tuple[int, list[Floats]]) -> float:
        """Return the greatest loss of an item of the sample; 0 if none."""
        before, after = scored[1]
        return float(np.max(before - after, initial=0.0))

    def add(self, scored: tuple[int, list[Floats]]) -> None:
        """Add the scores of the next sample."""
        index, scores = scored
        for kept, given in zip(self._scores, scores, strict=True):
            kept.extend(given)
        self._index.extend([index] * len(scores[0]))

    def result(self) -> Scores:
        """Return exact bounds for scores of 0 and 1, else bootstrap bounds."""
        before, after = (np.frombuffer(scores, np.float64) for scores in self._scores)
        lost = before - after
        order = np.argsort(-lost, kind="stable")[:5]
        worst = tuple(
            (self._index[i], float(before[i]), float(after[i])) for i in order if lost[i] > 0
        )
        is_right_wrong = bool(np.isin(before, (0, 1)).all() and np.isin(after, (0, 1)).all())
        if is_right_wrong:
            _refuse_nothing_right(self.name, before)
            evidence: RightWrong | Resampled = RightWrong(
                len(lost), int(np.count_nonzero(lost > 0)), int(np.count_nonzero(lost < 0))
            )
            detail = "exact bounds of paired shares"
        else:
            evidence = _bootstrap(self.name, before, after)
            detail = f"paired bootstrap, {RESAMPLES} resamples"
        return Scores(
            self.name, float(before.mean()), float(after.mean()), evidence, True, worst, detail
        )


def _name(metric: Any) -> str:
    while isinstance(metric, functools.partial):
        metric = metric.func
    name = getattr(metric, "__name__", type(metric).__name__)
    return "the score" if name == "<lambda>" else str(name)


def _checked(score: Any, where: str, batch: set[int]) -> Floats:
    """Return one score, or one per item, as float64."""
    if is_tensor(score) or hasattr(score, "__array__"):
        values = as_array(score) if is_tensor(score) else np.asarray(score)
    elif isinstance(score, Real):
        values = np.asarray(score)
    else:
        raise TypeError(
            f"{where}: expected a bool or a number, or a tensor of one for each item of the batch, "
            f"got {score!r}"
        )
    if values.dtype.kind not in "biuf":
        raise TypeError(f"{where}: expected a bool or a number, got {score!r}")
    if values.size != 1 and (values.ndim != 1 or len(values) not in batch or not values.size):
        raise ValueError(
            f"{where}: expected one score, or one for each item of the batch, got shape "
            f"{list(values.shape)}: reduce what belongs to one item, for instance by .mean()"
        )
    floats = values.reshape(-1).astype(np.float64)
    if not np.isfinite(floats).all():
        raise ValueError(f"{where}: expected a finite score, got {floats.tolist()}")
    return floats


def _refuse_nothing_right(name: str, before: Floats) -> None:
    if not before.any():
        raise ValueError(
            f"{name}: the float model has none of {len(before)} samples right, so no drop can be "
            "seen: do labels and outputs belong together (order of classes, shapes, preprocessing)?"
        )


def _bootstrap(name: str, before: Floats, after: Floats) -> Resampled:
    lost = before - after
    seen = np.concatenate([before, after])
    changed = float(np.abs(lost).max())
    per_sample = changed or float(seen.max() - seen.min())
    if not per_sample:
        raise ValueError(
            f"{name}: gives {seen[0]:g} for every sample of both models, so no drop can be seen: "
            "does it look at the outputs?"
        )
    drop = float(lost.mean())
    spread = bootstrap_bounds(drop, resampled_means(lost, RESAMPLES), acceleration_of_mean(lost))
    return Resampled(len(lost), drop, spread, per_sample)
