"""Convert the layers that a search chooses, until a file meets the goal."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.numerics.comparison import Comparison
from pytest_edgeq.numerics.findings import input_findings
from pytest_edgeq.quantize.mixed.criteria import Criterion
from pytest_edgeq.quantize.mixed.engine import FLOAT
from pytest_edgeq.quantize.mixed.results import MixedPrecisionPlan, PlannedLayer, Sensitivity
from pytest_edgeq.quantize.mixed.search import FEW, OutOfTimeError, Search
from pytest_edgeq.quantize.request import Request, fresh
from pytest_edgeq.quantize.resolve import describe, run_flow
from pytest_edgeq.tflite.ops import QDQ

_CONVERSIONS = 4  # plans that are converted, at most, where files differ from their simulation


class Planner:
    """Converts the layers that a search chooses, until the file keeps the goal."""

    def __init__(
        self,
        quantized: QuantizedModel,
        request: Request,
        goal: Criterion,
        search: Search,
        measure: Callable[[QuantizedModel], Comparison],
    ) -> None:
        self._quantized, self._request, self._goal = quantized, request, goal
        self._search, self._measure = search, measure
        self._made: dict[tuple[str, ...], Comparison | RuntimeError] = {}
        self._known: dict[tuple[str, ...], Any] = {}
        self._gained: dict[str, float] = {}
        self._refused: dict[str, list[str]] = {}  # layers by why they cannot be left in float
        self._seconds = self._scoring = 0.0  # that the slowest file, and score, took

    def plan(self, known: Sensitivity, before: Comparison, start: float) -> MixedPrecisionPlan:
        """Search, convert and measure."""
        search, goal = self._search, self._goal
        self._made[()] = before
        chosen: list[str] = []
        limits: list[str] = []
        for _ in range(_CONVERSIONS):
            try:
                found = self._convertible(chosen)
                chosen = self._most() if found is None else found
                simulated, file = search.measured(chosen), self._judged(chosen)
            except OutOfTimeError:
                limits.append("the time was over before a choice of layers met the goal")
                break
            if goal.accepts(file):
                chosen = self._without_needless(chosen, goal.looser(simulated, file))
                break
            if found is None:
                limits += self._left(chosen)
                break
            stricter = search.criterion.stricter(goal, simulated, file)
            if stricter is None:
                break
            search.criterion = stricter
        refused = (
            f"{', '.join(layers)} cannot be left in float: {text}"
            for text, layers in self._refused.items()
        )
        comparison = self._file(chosen)
        is_met = goal.accepts(self._judged(chosen))
        if not is_met:
            chosen, comparison = self._best()
        elif not search.is_pruned:
            limits.append("the time was over before each layer was quantized again in a file")
        return MixedPrecisionPlan(
            name=self._quantized.name,
            goal=str(goal),
            is_met=is_met,
            precision=search.engine.precision,
            layers=self._planned(chosen),
            code=search.engine.code(chosen),
            quantized=comparison.quantized,
            comparison=comparison,
            before=before,
            sensitivity=known,
            steps=tuple(search.steps),
            limits=(*refused, *limits, *(() if is_met else _limits(comparison))),
            seconds=time.monotonic() - start,
        )

    def _best(self) -> tuple[list[str], Comparison]:
        """Return the file that is nearest to torch, and its layers."""
        files = [(key, made) for key, made in self._made.items() if isinstance(made, Comparison)]
        key, comparison = max(files, key=lambda each: each[1].total.sqnr_db)
        return list(key), comparison

    def _convertible(self, first: Sequence[str]) -> list[str] | None:
        """Choose layers whose file can be converted and run; None if none meet the goal."""
        while (found := self._search.choose(first)) is not None:
            if self._refusal(found) is None:
                break
            self._refuse_one_of(found)
            first = [each for each in first if each not in self._search.refused]
        return found

    def _most(self) -> list[str]:
        """Return all layers that can be left in float together, in execution order."""
        search = self._search
        while self._refusal(most := search.ordered(search.most())) is not None:
            self._refuse_one_of(most)
        return most

    def _refuse_one_of(self, chosen: Sequence[str]) -> None:
        """Leave a layer quantized: the last of the first ones that cannot be in float together."""
        converted, refused = 0, len(chosen)  # how many of the first
        while refused - converted > 1:
            self._search.check_time()
            middle = (converted + refused) // 2
            if self._refusal(chosen[:middle]) is None:
                converted = middle
            else:
                refused = middle
        layer = chosen[refused - 1]
        self._search.refused.add(layer)
        text = str(self._refusal(chosen[:refused])).splitlines()[0]
        self._refused.setdefault(text, []).append(layer)

    def _refusal(self, chosen: Sequence[str]) -> RuntimeError | None:
        """Return why there is no file with a choice of layers in float, or None if there is."""
        made = self._outcome(chosen)
        return made if isinstance(made, RuntimeError) else None

    def _file(self, chosen: Sequence[str]) -> Comparison:
        """Return the errors of a file that is not refused, on all samples."""
        made = self._outcome(chosen)
        assert isinstance(made, Comparison), "unreachable because refused layers are not chosen"
        return made

    def _outcome(self, chosen: Sequence[str]) -> Comparison | RuntimeError:
        """Convert with a choice of layers, and compare, once; or return why that is refused."""
        key = tuple(chosen)
        if key not in self._made:
            start = time.monotonic()
            try:
                self._made[key] = self._measure(self._converted(chosen))
            except RuntimeError as refused:  # of the converter, the quantizer or a runtime
                self._made[key] = refused
            self._seconds = max(self._seconds, time.monotonic() - start)
        return self._made[key]

    def _judged(self, chosen: Sequence[str]) -> Any:
        """Return what the goal is judged by, of the file; a score runs all samples, so once."""
        key = tuple(chosen)
        if key not in self._known:
            file, start = self._file(chosen), time.monotonic()
            self._known[key] = self._goal.of_file(file)
            self._scoring = max(self._scoring, time.monotonic() - start)
        return self._known[key]

    def _converted(self, chosen: Sequence[str]) -> QuantizedModel:
        quantizer = self._search.engine.quantizer(chosen)
        entries = tuple(map(fresh, self._request.entries))
        request = dataclasses.replace(self._request, entries=entries, quantizer=describe(quantizer))
        return run_flow(request, quantizer)

    def _without_needless(self, chosen: list[str], possible: Criterion) -> list[str]:
        """Quantize layers again where the simulation is not sure that the file needs them."""
        search = self._search

        def meets(modules: Iterable[str]) -> bool:
            rest = search.ordered(modules)
            if not possible.accepts(search.measured(rest)):
                return False
            if tuple(rest) not in self._made:
                search.check_time(self._seconds + self._scoring)
            return self._refusal(rest) is None and self._goal.accepts(self._judged(rest))

        gains = self._gains(chosen, FEW)
        return search.prune(sorted(chosen, key=lambda each: -gains[each]), meets)

    def _gains(self, chosen: Sequence[str], count: int | None = None) -> dict[str, float]:
        """
        Return the SQNR that each layer gains, in dB, measured on files where they are known.

        Others are simulated, on all samples or on the first few.

        When the time is over, figures measured with more layers in float, or on few samples, stand
        for others; NaN if there are none.
        """
        measured, file = self._search.measured, self._file(chosen).total.sqnr_db
        for module in chosen:
            rest = [each for each in chosen if each != module]
            made = self._made.get(tuple(rest))
            with contextlib.suppress(OutOfTimeError):
                self._gained[module] = (
                    file - made.total.sqnr_db
                    if isinstance(made, Comparison)
                    else measured(chosen, count).sqnr_db - measured(rest, count).sqnr_db
                )
        return {module: self._gained.get(module, math.nan) for module in chosen}

    def _left(self, chosen: Sequence[str]) -> list[str]:
        """Return the ops that stay quantized with all layers in float, if any."""
        layers = set(self._search.engine.layers)
        left = [
            f"{entry.op} ({entry.module})" if entry.module else entry.op
            for entry in self._file(chosen).quantized.op_dtypes
            if entry.scheme not in ("float", "integer")
            and entry.op not in QDQ
            and entry.module not in layers
        ]
        if not left or self._search.engine.precision != FLOAT:
            return []
        return [
            f"{len(left)} ops stay quantized, which belong to no module that could be left in "
            f"float: {', '.join(left[:3])}"
        ]

    def _planned(self, chosen: Sequence[str]) -> tuple[PlannedLayer, ...]:
        gains, layers = self._gains(chosen), self._search.engine.layers
        planned = [PlannedLayer(module, gains[module], layers[module].weights) for module in chosen]
        return tuple(sorted(planned, key=lambda each: -each.gain_db))


def _limits(comparison: Comparison) -> list[str]:
    """Return what keeps a file from its goal."""
    found = [each.sentence for each in input_findings(comparison.health)]
    stages = {
        stage: errors.sqnr_db for stage, errors in comparison.stages.items() if stage != "total"
    }
    if stages:
        worst = min(stages, key=stages.__getitem__)
        found.append(f"{worst} loses most ({stages[worst]:.4g} dB SQNR)")
    return found
