"""Choose the layers to leave in float: by noise per byte, then without those not needed."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.numerics.results import StageErrors
from pytest_edgeq.quantize.mixed.criteria import Criterion, standard_error_db
from pytest_edgeq.quantize.mixed.engine import FLOAT, LayerEngine, LayerNoise
from pytest_edgeq.quantize.mixed.results import SearchStep

FEW = 8  # samples that sensitivities are measured on, and that refuse what is far from a bound

# Bytes that QUANTIZE and DEQUANTIZE with their tensors add to a file (litert-torch 0.10.0: 300 to
# 600, by the length of the names).
_QDQ_BYTES = 500

_FLOAT_WEIGHT = 3  # bytes of a float32 weight more than of an int8 one


class OutOfTimeError(Exception):
    """The time of the search is over."""


@dataclass(slots=True)
class Search:
    """Chooses layers of an engine so that a criterion is met on samples."""

    engine: LayerEngine
    criterion: Criterion
    samples: Sequence[Sample]
    noise: LayerNoise
    size_bytes: int  # of the quantized file
    deadline: float = math.inf
    refused: set[str] = field(default_factory=set)  # layers that cannot be left in float
    is_pruned: bool = True  # whether the time sufficed to try each layer
    steps: list[SearchStep] = field(default_factory=list)
    _known: dict[tuple[frozenset[str], int], Any] = field(default_factory=dict)
    # errors of the last choice that was measured on all samples, on a few of them and on all
    _nearest: tuple[Any, Any] | None = None
    # by layer: what it gained in dB, on a few samples, when it was added to others
    _gained: dict[str, float] = field(default_factory=dict)

    def measured(self, chosen: Iterable[str], count: int | None = None) -> Any:
        """Measure with some layers in float, on all samples or on the first few."""
        modules = frozenset(chosen)
        count = min(count or len(self.samples), len(self.samples))
        if (modules, count) not in self._known:
            self.check_time()
            found = self.criterion.simulated(self.engine, modules, self.samples[:count])
            self._known[modules, count] = found
            if count == len(self.samples):
                size = self.size_bytes + sum(map(self._cost, modules))
                self.steps.append(SearchStep(len(modules), size, found.sqnr_db))
        return self._known[modules, count]

    def check_time(self, seconds: float = 0.0) -> None:
        """Raise `OutOfTimeError` if the deadline is passed in so many seconds."""
        if time.monotonic() + seconds > self.deadline:
            raise OutOfTimeError

    def ordered(self, chosen: Iterable[str]) -> list[str]:
        """Return layers in execution order."""
        return sorted(chosen, key=list(self.engine.layers).index)

    def meets(self, chosen: Iterable[str]) -> bool:
        """
        Return whether the criterion is met with some layers in float.

        A few samples decide if their SQNR misses the bound by more than it varies with samples.
        """
        modules = frozenset(chosen)
        bound = self.criterion.least_sqnr_db
        if bound is None or len(self.samples) <= 2 * FEW:
            return self.criterion.accepts(self.measured(modules))
        few = self.measured(modules, FEW)
        if _highest_db(few, self._nearest) < bound:
            return False
        errors = self.measured(modules)
        self._nearest = few, errors
        return self.criterion.accepts(errors)

    def choose(self, first: Sequence[str] = ()) -> list[str] | None:
        """
        Return layers that meet the criterion; None if none do.

        A few samples choose the first ones. Each layer that is added is also tried in int8.

        Args:
            first: Layers that nearly meet it, to which few others are added.
        """
        most = self.most()
        if not self.meets(most):
            return None
        if not first and len(self.samples) > 2 * FEW:
            # The copy shares the measurements; the curve has no points on few samples.
            few = replace(self, samples=self.samples[:FEW], steps=[], _nearest=None)
            if few.meets(most):
                first = few.prune(few._enough(most), few.meets, repeats=False)
        added = [each for each in self._enough(most, first) if each not in first]
        kept = self.prune(added, lambda rest: self.meets([*first, *rest]), repeats=False)
        return self.ordered([*first, *kept])

    def _enough(self, most: Sequence[str], first: Sequence[str] = ()) -> list[str]:
        """Return few of all these layers that meet the criterion, those that lose most first."""
        rest = [each for each in most if each not in first]
        if first and not self.meets(first):
            rest = self._by_gain(first, rest)
        ranked = [*first, *rest]
        # `high` layers are enough; few more than the first ones are the likeliest.
        low, high, step = len(first), len(first) or 1, 1
        while high < len(ranked) and not self.meets(ranked[:high]):
            low, high = high + 1, min(high + step, len(ranked))
            step *= 2
        with contextlib.suppress(OutOfTimeError):
            while low < high:
                middle = (low + high) // 2
                if self.meets(ranked[:middle]):
                    high = middle
                else:
                    low = middle + 1
        chosen = set(ranked[:high])
        return [each for each in self._ranked() if each in chosen]

    def prune(
        self,
        chosen: Sequence[str],
        meets: Callable[[Iterable[str]], bool],
        *,
        repeats: bool = True,
    ) -> list[str]:
        """
        Quantize layers again, the last first, until the criterion needs each that is left.

        Errors of layers cancel each other, so a layer that was needed may not be any more when
        others are quantized: if it repeats, each is tried again after every change.
        """
        kept = list(chosen)
        needed = 0  # of the layers that were tried last, since the last change
        try:
            while needed < len(kept):
                *rest, module = kept
                if meets(rest):
                    kept, needed = rest, 0 if repeats else needed
                else:
                    kept, needed = [module, *rest], needed + 1
        except OutOfTimeError:
            self.is_pruned = False  # what is left meets the criterion
        return self.ordered(kept)

    def most(self) -> list[str]:
        """Return all layers, or all but those whose loss is least, so that some are quantized."""
        ranked = self._ranked()
        while ranked and not self.engine.is_quantized(frozenset(ranked)):
            ranked.remove(min(ranked, key=lambda each: self.noise.alone[each].share))
        return ranked

    def _ranked(self) -> list[str]:
        """
        Return all layers, those that lose most for each byte first.

        Layers of a group that gains more in float than any of them, for each byte, come together.
        """
        layers = self.engine.layers
        own = {module: self.noise.alone[module].share for module in layers}
        # A tensor is rounded until the layer that computes it and those that read it are in float.
        shared = dict(own)
        for module, layer in layers.items():
            for reader in layer.readers:
                if reader.module in shared:
                    shared[reader.module] += own[module]
        possible = [each for each in layers if each not in self.refused]
        rates = {each: shared[each] / self._cost(each) for each in possible}
        for name, members in self.engine.groups.items():
            if rates.keys() >= {*members}:
                together = self._gain(name, members)
                if together > max(self._gain(each, [each]) for each in members):
                    rates |= {each: max(rates[each], together) for each in members}
        return sorted(rates, key=lambda each: (-rates[each], each))

    def _gain(self, candidate: str, layers: Iterable[str]) -> float:
        """Return by how much the noise falls with a candidate alone in float, for each byte."""
        before, after = self.noise.quantized.share, self.noise.in_float[candidate].share
        return (before - after) / sum(map(self._cost, layers))

    def _by_gain(self, first: Sequence[str], rest: Sequence[str]) -> list[str]:
        """
        Sort layers by the gain per byte of each together with the first, on a few samples.

        Each is measured once: a later search has few more layers in float.
        """
        gained = self._gained
        with contextlib.suppress(OutOfTimeError):  # those not measured come last, small ones first
            base = self.measured(first, FEW).sqnr_db
            for module in (each for each in rest if each not in gained):
                gained[module] = self.measured([*first, module], FEW).sqnr_db - base
        per_byte = {each: max(gain, 0.0) / self._cost(each) for each, gain in gained.items()}
        return sorted(rest, key=lambda each: (-per_byte.get(each, 0.0), self._cost(each)))

    def _cost(self, module: str) -> int:
        """Return the bytes by which a layer in the other precision makes the file larger."""
        weights = self.engine.layers[module].weights if self.engine.precision == FLOAT else 0
        return _FLOAT_WEIGHT * weights + _QDQ_BYTES


def _highest_db(few: StageErrors, nearest: tuple[StageErrors, StageErrors] | None) -> float:
    """
    Return the highest SQNR on all samples that errors on a few of them allow, in dB.

    It lies three standard errors above the estimate. The noise of two choices of layers differs
    less than that of two samples, so it is estimated by the ratio to that of another choice, whose
    noise on all samples is known.

    Args:
        few: Errors of a choice of layers on a few samples.
        nearest: Errors of another choice on the same few samples, and on all.
    """
    name, worst = min(few.outputs.items(), key=lambda item: item[1].sqnr_db)
    noises = [each.noise for each in worst.samples]
    noise = statistics.fmean(noises or [math.nan])
    if len(noises) < 2 or not 0 < noise < math.inf:
        return math.inf
    estimate, off = worst.sqnr_db, noises
    known = [each.noise for each in nearest[0].outputs[name].samples] if nearest else []
    if nearest and len(known) == len(noises) and sum(known):
        ratio = sum(noises) / sum(known)
        off = [one - ratio * other for one, other in zip(noises, known, strict=True)]
        estimate = nearest[1].outputs[name].sqnr_db - 10 * math.log10(ratio)
    return estimate + 3 * standard_error_db(off, noise)
