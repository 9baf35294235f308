"""Criteria that a file with layers in float must meet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.numerics.budget import Budget
from pytest_edgeq.numerics.comparison import Comparison
from pytest_edgeq.numerics.metric_table import UPPER_BOUNDED
from pytest_edgeq.numerics.results import StageErrors
from pytest_edgeq.quantize.mixed.engine import LayerEngine

_SHARES = ("cosine_similarity", "top1_agreement")  # metrics that are 1 at best

_MORE = 1.1  # times the difference of a file from its simulation, by which a bound is moved


class Measured(Protocol):
    """Errors of a model, by which a criterion judges it."""

    @property
    def sqnr_db(self) -> float:
        """The SQNR of the worst output."""
        ...


class Criterion(Protocol):
    """A condition on a model, on the samples of the search."""

    @property
    def least_sqnr_db(self) -> float | None:
        """The SQNR below which the model is refused, whatever else it keeps; None without."""
        ...

    def simulated(
        self, engine: LayerEngine, modules: frozenset[str], samples: Sequence[Sample]
    ) -> Measured:
        """Measure the model with some modules in float."""
        ...

    def of_file(self, comparison: Comparison) -> Measured:
        """Return the errors of a converted file."""
        ...

    def accepts(self, measured: Any) -> bool:
        """Return whether the model meets the condition."""
        ...

    def stricter(self, goal: Any, simulated: Any, file: Any) -> Criterion | None:
        """Return what a simulation must keep so that the file keeps the goal; None if nothing."""
        ...

    def looser(self, simulated: Any, file: Any) -> Criterion:
        """Return what a simulation keeps whenever its file keeps this."""
        ...


@dataclass(frozen=True, slots=True)
class BudgetCriterion:
    """A budget for the stage `total`."""

    budget: Budget

    def __str__(self) -> str:
        return repr(self.budget)

    @property
    def least_sqnr_db(self) -> float | None:
        """The bound of the SQNR."""
        return self.budget.sqnr_db

    def simulated(
        self, engine: LayerEngine, modules: frozenset[str], samples: Sequence[Sample]
    ) -> StageErrors:
        """Measure the model with some modules in float."""
        return engine.errors(modules, samples)

    def of_file(self, comparison: Comparison) -> StageErrors:
        """Return the errors of a converted file."""
        return comparison.total

    def accepts(self, measured: StageErrors) -> bool:
        """Return whether no bound is violated."""
        return not self.budget.violations(measured, "total")

    def stricter(
        self, goal: Any, simulated: StageErrors, file: StageErrors
    ) -> BudgetCriterion | None:
        """Move each bound by what the file is worse than its simulation."""
        bounds = self.budget.bounds()
        for metric, bound in goal.budget.bounds().items():
            worse = _worse(metric, simulated, file)
            if worse > 0:
                bounds[metric] = _moved(metric, bound, -worse * _MORE)
                if metric in _SHARES and bounds[metric] > 1:
                    return None
        return None if bounds == self.budget.bounds() else replace(self, budget=Budget(**bounds))

    def looser(self, simulated: StageErrors, file: StageErrors) -> BudgetCriterion:
        """Move each bound the other way, by what the file differs from its simulation."""
        bounds = {
            metric: _moved(metric, bound, abs(_worse(metric, simulated, file)) * _MORE)
            for metric, bound in self.budget.bounds().items()
        }
        return replace(self, budget=Budget(**bounds))


def _worse(metric: str, simulated: StageErrors, file: StageErrors) -> float:
    """Return how much worse a metric of the file is than that of its simulation."""
    difference = float(getattr(simulated, metric)) - float(getattr(file, metric))
    if not math.isfinite(difference):
        return 0.0
    return -difference if metric in UPPER_BOUNDED else difference


def _moved(metric: str, bound: float, room: float) -> float:
    """Return a bound with more room, or with less if it is negative."""
    moved = bound + room if metric in UPPER_BOUNDED else bound - room
    least = 0.0 if metric in UPPER_BOUNDED else bound / 100  # any valid one
    return max(moved, least)
