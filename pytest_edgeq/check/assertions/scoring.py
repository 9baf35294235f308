"""Score two models on the same samples, by a function or by a torchmetrics Metric."""

from __future__ import annotations

import copy
import functools
import warnings
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pytest_edgeq.compare.samples import as_array, is_tensor
from pytest_edgeq.numerics.arrays import short_repr
from pytest_edgeq.numerics.paired import (
    SEED,
    Resampled,
    RightWrong,
    acceleration_of_mean,
    bootstrap_bounds,
    resampled_means,
)

Floats = npt.NDArray[np.float64]

RESAMPLES = 2000  # for means; the error of a 95 % bound is then some 4 % of the standard error
# For a Metric of sums; each needs two `compute()`, some tenths of a millisecond.
METRIC_RESAMPLES = 1000
LIST_RESAMPLES = 200  # for a Metric of lists; each needs two `compute()` over all samples
# Maximum size of a Metric's sums; all copies need 2 × 1,000 × 20,000 × 8 bytes = 320 MB.
MOST_NUMBERS = 20_000


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of both models, and the confidence of their difference."""

    name: str
    float_score: float  # of the reference
    edge_score: float  # of the file
    evidence: RightWrong | Resampled  # the drop, counted so that more is worse, with its bounds
    higher_is_better: bool  # else the drop is a rise
    worst: tuple[tuple[int, float, float], ...]  # up to five samples that lost most
    detail: str  # how the bounds were found, for texts


def scorer_for(metric: Any) -> Scorer:
    """Return the scorer for a callable or a Metric."""
    if isinstance(metric, type) or not callable(metric):
        way_out = (
            f"type: make one, {metric.__name__}(…)"
            if isinstance(metric, type)
            else f"{type(metric).__name__} {metric!r}"
        )
        raise TypeError(
            "metric: expected a callable metric(outputs, label) that returns a bool or a number, "
            f"or a torchmetrics Metric, got a {way_out}"
        )
    if all(hasattr(metric, name) for name in ("update", "compute", "reset")):
        return MetricScorer(metric)
    return CallableScorer(metric)


class CallableScorer:
    """Scores by `metric(outputs, label)`: higher is better."""

    wants_tensors = False

    def __init__(self, metric: Callable[[Any, Any], Any]) -> None:
        self._metric: Any = metric
        while isinstance(metric, functools.partial):
            metric = metric.func
        name = str(getattr(metric, "__name__", type(metric).__name__))
        self.name = "the score" if name == "<lambda>" else name
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
        evidence: RightWrong | Resampled
        if np.isin(before, (0, 1)).all() and np.isin(after, (0, 1)).all():
            if not before.any():
                raise ValueError(
                    f"{self.name}: the float model has none of {len(before)} samples right, so no "
                    "drop can be seen: do labels and outputs belong together (order of classes, "
                    "shapes, preprocessing)?"
                )
            n_lost, n_gained = int(np.count_nonzero(lost > 0)), int(np.count_nonzero(lost < 0))
            evidence = RightWrong(len(lost), n_lost, n_gained)
            detail = "exact bounds of paired shares"
        else:
            evidence = self._bootstrap(before, after)
            detail = f"paired bootstrap, {RESAMPLES} resamples"
        means = float(before.mean()), float(after.mean())
        return Scores(self.name, *means, evidence, True, worst, detail)

    def _bootstrap(self, before: Floats, after: Floats) -> Resampled:
        lost = before - after
        seen = np.concatenate([before, after])
        per_sample = float(np.abs(lost).max()) or float(seen.max() - seen.min())
        if not per_sample:
            raise ValueError(
                f"{self.name}: returns {seen[0]:g} for every sample of both models, so no drop can "
                "be seen: does it look at the outputs?"
            )
        drop = float(lost.mean())
        means = resampled_means(lost, RESAMPLES)
        spread = bootstrap_bounds(drop, means, acceleration_of_mean(lost))
        return Resampled(len(lost), drop, spread, per_sample)


def _checked(score: Any, where: str, batch: set[int]) -> Floats:
    """Return one score, or one per item, as float64."""
    if is_tensor(score) or isinstance(score, Real) or hasattr(score, "__array__"):
        values = as_array(score) if is_tensor(score) else np.asarray(score)
    else:
        raise TypeError(
            f"{where}: expected a bool or a number, or a tensor of one for each item of the batch, "
            f"got {short_repr(score)}"
        )
    if values.dtype.kind not in "biuf":
        raise TypeError(f"{where}: expected a bool or a number, got {short_repr(score)}")
    if values.size != 1 and (values.ndim != 1 or len(values) not in batch or not values.size):
        raise ValueError(
            f"{where}: expected one score, or one for each item of the batch, got shape "
            f"{list(values.shape)}: reduce what belongs to one item, for instance by .mean()"
        )
    floats = values.reshape(-1).astype(np.float64)
    if not np.isfinite(floats).all():
        raise ValueError(f"{where}: expected a finite score, got {floats.tolist()}")
    return floats


class ScoredSample(NamedTuple):
    """State that a Metric accumulates on one sample."""

    added: tuple[tuple[Floats, list[list[Any]]], tuple[Floats, list[list[Any]]]]
    example: tuple[Any, Any] | None  # outputs and target, by which a Metric counts as updated


class MetricScorer:
    """
    Scores by a torchmetrics Metric, or an object with its interface.

    A copy of it is updated with one sample at a time; the change of its states is added to those of
    each resample. It is a Poisson bootstrap (each resample includes each sample Poisson(1) times;
    Hanley & MacGibbon, Computer Methods and Programs in Biomedicine 83, 2006) with the same draws
    for both models, which makes it paired. So sums need memory that does not grow with the samples.
    """

    wants_tensors = True

    def __init__(self, metric: Any) -> None:
        self.name = type(metric).__name__
        better = getattr(metric, "higher_is_better", None)
        if better is None:
            raise ValueError(
                f"{self.name}: does not say which way is better (higher_is_better is None), so a "
                "drop of it has no sign: give a subclass that sets higher_is_better, or a callable "
                "metric(outputs, label), of which more is better. A collection holds several: give "
                "one of them"
            )
        self._sign = 1 if better else -1
        self._metric = copy.deepcopy(metric)
        self._metric.reset()
        self._defaults: dict[str, Any] = dict(getattr(metric, "_defaults", {}))
        self._sums = [name for name, value in self._defaults.items() if is_tensor(value)]
        self._lists = [name for name in self._defaults if name not in self._sums]
        self._check_states(getattr(metric, "_reductions", {}))
        numbers = sum(self._defaults[name].numel() for name in self._sums)
        if numbers > MOST_NUMBERS:
            raise ValueError(
                f"{self.name}: sums {numbers:,} numbers, and a bootstrap keeps them once for each "
                f"resample; {MOST_NUMBERS:,} at most. Give a metric averaged over classes, or a "
                "callable metric(outputs, label)"
            )
        resamples = LIST_RESAMPLES if self._lists else METRIC_RESAMPLES
        self._random = np.random.default_rng(SEED)
        # The first row is for the original samples.
        self._totals = tuple(np.zeros((resamples + 1, numbers)) for _ in range(2))
        self._times = np.zeros(resamples + 1)
        self._weights: list[npt.NDArray[np.uint8]] = []
        self._items: tuple[list[Any], list[Any]] = ([], [])
        self._n_changed = 0
        self._example: tuple[Any, Any] | None = None

    def _check_states(self, reductions: dict[str, Any]) -> None:
        def reduction(name: str) -> str:
            found = reductions.get(name)
            return getattr(found, "__name__", str(found))

        odd = [name for name in self._sums if reduction(name) != "dim_zero_sum"]
        odd += [name for name in self._lists if reduction(name) not in ("dim_zero_cat", "None")]
        if odd or not self._defaults:
            what = (
                f"its state {odd[0]!r} is neither summed nor a list" if odd else "it has no state"
            )
            raise TypeError(
                f"{self.name}: {what}, so one sample's contribution cannot be resampled: score "
                "each sample by a callable metric(outputs, label)"
            )

    def score(
        self, index: int, outputs: tuple[Any, Any], label: Any, batch: set[int]
    ) -> ScoredSample:
        """Update the Metric with one sample of each model, and return its states."""
        del batch
        target = _target(label)
        added = []
        for given in outputs:
            self._metric.reset()
            try:
                self._metric.update(given, target)
            except Exception as error:
                raise ValueError(
                    f"{self.name}.update(outputs, label) fails on sample {index}, with outputs "
                    f"{_described(given)} and label {_described(target)}: {error}\nA label has the "
                    "batch dimension that the outputs have. Of several outputs choose one in a "
                    "subclass of the Metric, or score by a callable metric(outputs, label)"
                ) from error
            rows = [
                as_array(getattr(self._metric, name) - self._defaults[name]) for name in self._sums
            ]
            sums = np.concatenate([np.zeros(0), *(row.astype(np.float64).ravel() for row in rows)])
            # Copies, since the next reset clears the lists.
            added.append((sums, [list(getattr(self._metric, name)) for name in self._lists]))
        return ScoredSample((added[0], added[1]), (outputs[0], target))

    def lost(self, scored: ScoredSample) -> float:
        """Return 0: a Metric scores all samples together."""
        del scored
        return 0.0

    def add(self, scored: ScoredSample) -> None:
        """Draw the next sample for each resample, and add its states."""
        weights = np.concatenate([[1], self._random.poisson(1.0, len(self._times) - 1)])
        self._times += weights
        self._weights += [weights.astype(np.uint8)] if self._lists else []
        for totals, kept, (row, items) in zip(self._totals, self._items, scored.added, strict=True):
            at = np.flatnonzero(row)
            totals[:, at] += weights[:, None] * row[at]
            kept += [items] if self._lists else []
        (one, items), (two, others) = scored.added
        self._n_changed += not (np.array_equal(one, two) and _equal(items, others))
        self._example = scored.example

    def result(self) -> Scores:
        """Return the bounds by a bootstrap over the samples."""
        before, after = self._score(0, 0), self._score(1, 0)
        for side, score in (("float", before), ("edge", after)):
            if not np.isfinite(score):
                raise ValueError(f"{self.name}, {side}: expected a finite score, got {score}")
        low, high = (getattr(self._metric, f"plot_{end}_bound", None) for end in ("lower", "upper"))
        floor, ceiling = (low, high) if self._sign > 0 else (high, low)
        if floor is not None and before == floor:
            raise ValueError(
                f"{self.name}: the float model scores {before:g}, the worst there is, so no drop "
                "can be seen: do labels and outputs belong together?"
            )
        # The first row has each sample once.
        n, drop = int(self._times[0]), self._sign * (before - after)
        resampled = self._resampled()
        known = resampled[~np.isnan(resampled)]
        deviation = float(known.std()) if len(known) else 0.0
        if self._n_changed and deviation:
            per_sample = deviation * n / self._n_changed**0.5
        else:
            whole = None if floor is None or ceiling is None else abs(ceiling - floor)
            per_sample = abs(before) if whole is None else float(whole)
        if not per_sample:
            raise ValueError(f"{self.name}: returns {before:g} for both models, on any samples")
        evidence = Resampled(n, drop, bootstrap_bounds(drop, resampled), per_sample)
        detail = f"paired bootstrap, {len(resampled)} resamples"
        return Scores(self.name, before, after, evidence, self._sign > 0, (), detail)

    def _resampled(self) -> Floats:
        """Return the drop of each resample, NaN for one without a score."""
        drops = np.full(len(self._times) - 1, np.nan)
        with warnings.catch_warnings():
            # A resample may lack a class, for which a Metric warns; the original samples have it.
            warnings.simplefilter("ignore")
            for row in map(int, np.flatnonzero(self._times[1:])):
                drops[row] = self._sign * (self._score(0, row + 1) - self._score(1, row + 1))
        drops[~np.isfinite(drops)] = np.nan
        return drops

    def _score(self, side: int, row: int) -> float:
        import torch

        metric = self._metric
        metric.reset()
        # So that it counts as updated and has attributes that its update sets.
        assert self._example is not None, "unreachable because there is a sample"
        metric.update(*self._example)
        start = 0
        for name in self._sums:
            default = self._defaults[name]
            total = self._totals[side][row, start : start + default.numel()]
            start += default.numel()
            filled = torch.from_numpy(total).reshape(default.shape).to(default.dtype)
            setattr(metric, name, default + filled)
        for position, name in enumerate(self._lists):
            drawn = (
                item
                for weights, items in zip(self._weights, self._items[side], strict=True)
                for _ in range(weights[row])
                for item in items[position]
            )
            setattr(metric, name, list(drawn))
        value = metric.compute()
        if not is_tensor(value) or value.numel() != 1:
            what = f"shape {list(value.shape)}" if is_tensor(value) else type(value).__name__
            raise TypeError(
                f"{self.name}.compute(): expected one number, got {what}: choose an average, such "
                "as average='macro', or a subclass whose compute() picks one"
            )
        return float(value)


Scorer: TypeAlias = "CallableScorer | MetricScorer"


def _target(label: Any) -> Any:
    """Return a label as a tensor with a batch dimension."""
    import torch

    if isinstance(label, Real):
        return torch.tensor([label])
    if isinstance(label, (np.ndarray, np.generic)):
        label = torch.from_numpy(np.array(label))
    return label.reshape(1) if isinstance(label, torch.Tensor) and label.ndim == 0 else label


def _described(value: Any) -> str:
    if is_tensor(value):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__


def _equal(left: Any, right: Any) -> bool:
    """Whether two items of lists, or lists of such, are equal."""
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    if is_tensor(left) and is_tensor(right):
        return np.array_equal(as_array(left), as_array(right))
    return left is right
