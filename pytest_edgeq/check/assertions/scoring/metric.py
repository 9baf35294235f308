"""Score by a torchmetrics Metric."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pytest_edgeq.check.assertions.scoring.scores import Floats, Scores
from pytest_edgeq.compare.samples import as_array, is_tensor
from pytest_edgeq.numerics.paired import SEED, Resampled, bootstrap_bounds

# pytest looks for it among a frame's globals, too: no frame of this module is shown.
__tracebackhide__ = True

METRIC_RESAMPLES = 1000
"""For a Metric of sums; each needs two `compute()`, some tenths of a millisecond."""

LIST_RESAMPLES = 200
"""For a Metric of lists; each needs two `compute()` over all samples."""

MOST_NUMBERS = 20_000
"""Maximum size of a Metric's sums; all copies need 2 × 1,000 × 20,000 × 8 bytes = 320 MB."""


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
        odd = [name for name in self._sums if _word(reductions.get(name)) != "dim_zero_sum"]
        odd += [
            name
            for name in self._lists
            if _word(reductions.get(name)) not in ("dim_zero_cat", "None")
        ]
        if odd or not self._defaults:
            what = (
                f"its state {odd[0]!r} is neither summed nor a list" if odd else "it has no state"
            )
            raise TypeError(
                f"{self.name}: {what}, so what one sample adds to it cannot be drawn anew: score "
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
            added.append(self._state())
        return ScoredSample((added[0], added[1]), (outputs[0], target))

    def lost(self, scored: ScoredSample) -> float:
        """Return 0: a Metric scores all samples together."""
        del scored
        return 0.0

    def add(self, scored: ScoredSample) -> None:
        """Draw the next sample for each resample, and add its states."""
        weights = np.concatenate([[1], self._random.poisson(1.0, len(self._times) - 1)])
        self._times += weights
        for side, (row, items) in enumerate(scored.added):
            at = np.flatnonzero(row)
            self._totals[side][:, at] += weights[:, None] * row[at]
            if self._lists:
                self._items[side].append(items)
        if self._lists:
            self._weights.append(weights.astype(np.uint8))
        self._n_changed += not _same(*scored.added)
        self._example = scored.example

    def _state(self) -> tuple[Floats, list[list[Any]]]:
        """Return the last sample's summands (flat) and list items."""
        rows = [
            as_array(getattr(self._metric, name) - self._defaults[name]).astype(np.float64).ravel()
            for name in self._sums
        ]
        # Copies, since the next reset clears the lists.
        items = [list(getattr(self._metric, name)) for name in self._lists]
        return np.concatenate([np.zeros(0), *rows]), items

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
            raise ValueError(f"{self.name}: gives {before:g} for both models, whatever comes")
        evidence = Resampled(n, drop, bootstrap_bounds(drop, resampled), per_sample)
        detail = f"paired bootstrap, {len(resampled)} resamples"
        return Scores(self.name, before, after, evidence, self._sign > 0, (), detail)

    def _resampled(self) -> Floats:
        """Return the drop of each resample, NaN for one without a score."""
        drops = np.full(len(self._times) - 1, np.nan)
        with warnings.catch_warnings():
            # A resample may lack a class, for which a Metric warns; the original samples have it.
            warnings.simplefilter("ignore")
            for row in range(1, len(self._times)):
                if self._times[row]:
                    drops[row - 1] = self._sign * (self._score(0, row) - self._score(1, row))
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


def _word(reduction: Any) -> str:
    return getattr(reduction, "__name__", str(reduction))


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


def _same(one: tuple[Floats, list[list[Any]]], two: tuple[Floats, list[list[Any]]]) -> bool:
    """Whether a sample adds the same to both models' states."""
    return np.array_equal(one[0], two[0]) and all(
        _equal_items(left, right) for left, right in zip(one[1], two[1], strict=True)
    )


def _equal_items(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(
        np.array_equal(as_array(a), as_array(b)) if is_tensor(a) and is_tensor(b) else a is b
        for a, b in zip(left, right, strict=True)
    )
