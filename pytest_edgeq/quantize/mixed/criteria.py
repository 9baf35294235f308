"""Criteria that a file with layers in float must meet."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.numerics.budget import Budget
from pytest_edgeq.numerics.comparison import Comparison
from pytest_edgeq.numerics.metric_table import METRICS, UPPER_BOUNDED
from pytest_edgeq.numerics.results import StageErrors
from pytest_edgeq.quantize.mixed.engine import LayerEngine

_MORE = 1.1  # times the difference of a file from its simulation, by which a bound is moved


class Criterion(Protocol):
    """A condition on a model, on the samples of the search."""

    @property
    def least_sqnr_db(self) -> float | None:
        """The SQNR below which the model is refused, whatever else it keeps; None without."""

    def simulated(
        self, engine: LayerEngine, modules: frozenset[str], samples: Sequence[Sample]
    ) -> Any:
        """Measure the model with some modules in float."""

    def of_file(self, comparison: Comparison) -> Any:
        """Return the errors of a converted file."""

    def accepts(self, measured: Any) -> bool:
        """Return whether the model meets the condition."""

    def stricter(self, goal: Any, simulated: Any, file: Any) -> Criterion | None:
        """Return what to search for in place of this, whose file missed the goal; None if none."""

    def looser(self, simulated: Any, file: Any) -> Criterion:
        """Return a criterion that a simulation meets if its file meets this one."""


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
        self, goal: BudgetCriterion, simulated: StageErrors, file: StageErrors
    ) -> BudgetCriterion | None:
        """Move the bounds that the file misses by its difference from the simulation, or leave."""
        bounds = self.budget.bounds()
        for metric, bound in goal.budget.bounds().items():
            is_upper = metric in UPPER_BOUNDED
            value = float(getattr(file, metric))
            if value > bound if is_upper else value < bound:
                moved = _moved(metric, bound, -_room(metric, simulated, file))
                bounds[metric] = (min if is_upper else max)(moved, bounds[metric])
                if METRICS[metric].is_share and bounds[metric] > 1:
                    return None
        return None if bounds == self.budget.bounds() else replace(self, budget=Budget(**bounds))

    def looser(self, simulated: StageErrors, file: StageErrors) -> BudgetCriterion:
        """Move each bound the other way, by what the file differs from its simulation."""
        bounds = self.budget.bounds()
        for metric, bound in self.budget.bounds().items():
            bounds[metric] = _moved(metric, bound, _room(metric, simulated, file))
        return replace(self, budget=Budget(**bounds))


def standard_error_db(differences: Sequence[float], noise: float) -> float:
    """
    Return the standard error of an SQNR from one difference of noise a sample, in dB.

    Args:
        differences: At least two; the noise itself for the error of one SQNR.
        noise: The mean noise of a sample.
    """
    variance = statistics.variance(differences) / len(differences)
    return 10 / math.log(10) * math.sqrt(variance) / noise


def _difference_db(simulated: StageErrors, file: StageErrors) -> float:
    """
    Return two standard errors of the difference of the SQNR of a file and its simulation, in dB.

    Kernels round some results to another code. In a deep network these codes change most of the
    later ones, so the noise of a file is another draw than the noise of its simulation, even
    where the two SQNRs agree.
    """
    name, worst = min(file.outputs.items(), key=lambda item: item[1].sqnr_db)
    others = {each.sample: each.noise for each in simulated.outputs[name].samples}
    noises = [each for each in worst.samples if each.sample in others]
    mean = math.fsum(each.noise for each in noises) / max(len(noises), 1)
    if len(noises) < 2 or not mean:
        return 0.0
    return 2 * standard_error_db([each.noise - others[each.sample] for each in noises], mean)


def _room(metric: str, simulated: StageErrors, file: StageErrors) -> float:
    """Return by how much a metric of a file may differ from that of its simulation."""
    difference = abs(float(getattr(simulated, metric)) - float(getattr(file, metric)))
    room = difference * _MORE if math.isfinite(difference) else 0.0
    return max(room, _difference_db(simulated, file)) if metric == "sqnr_db" else room


def _moved(metric: str, bound: float, room: float) -> float:
    """Return a bound with more room, or with less if it is negative."""
    moved = bound + room if metric in UPPER_BOUNDED else bound - room
    least = 0.0 if metric in UPPER_BOUNDED else bound / 100  # any valid one
    return max(moved, least)
