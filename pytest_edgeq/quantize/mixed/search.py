"""Choose the layers to leave in float: by noise per byte, then without those not needed."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.quantize.mixed.criteria import Criterion, standard_error_db
from pytest_edgeq.quantize.mixed.engine import FLOAT, LayerEngine, LayerNoise
from pytest_edgeq.quantize.mixed.results import SearchStep

FEW = 8  # samples that sensitivities are measured on, and that refuse what is far from a bound

# Bytes that QUANTIZE and DEQUANTIZE with their tensors add to a file (litert-torch 0.10.0: 300 to
# 600, by the length of the names).
_BORDERS = 500

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

    def measured(self, chosen: Iterable[str], count: int | None = None) -> Any:
        """Measure with some layers in float, on all samples or on the first few."""
        modules = self.minimal(chosen)
        count = min(count or len(self.samples), len(self.samples))
        if (modules, count) not in self._known:
            self.check_time()
            found = self.criterion.simulated(self.engine, modules, self.samples[:count])
            self._known[modules, count] = found
            if count == len(self.samples):
                size = self.size_bytes + sum(map(self._cost, modules))
                self.steps.append(SearchStep(len(modules), size, found.sqnr_db))
        return self._known[modules, count]

    def check_time(self) -> None:
        """Raise `OutOfTimeError` if the time is over."""
        if time.monotonic() > self.deadline:
            raise OutOfTimeError

    def minimal(self, chosen: Iterable[str]) -> frozenset[str]:
        """Return layers without those that lie in a chosen block."""
        modules = frozenset(chosen)
        return modules.difference(*(self.engine.layers[each].includes for each in modules))

    def ordered(self, chosen: Iterable[str]) -> list[str]:
        """Return layers without those that lie in a chosen block, in execution order."""
        return sorted(self.minimal(chosen), key=list(self.engine.layers).index)

    def meets(self, chosen: Iterable[str]) -> bool:
        """
        Return whether the criterion is met with some layers in float.

        A few samples decide if their SQNR misses the bound by more than it varies with samples.
        """
        modules = self.minimal(chosen)
        bound = self.criterion.least_sqnr_db
        if bound is not None and len(self.samples) > 2 * FEW:
            first = self.measured(modules, FEW)
            if first.sqnr_db < bound - _spread_db(first):
                return False
        return self.criterion.accepts(self.measured(modules))

    def choose(self, first: Sequence[str] = ()) -> list[str] | None:
        """
        Return layers that meet the criterion, each of which is needed; None if none do.

        Args:
            first: Layers to try before all others: those that nearly meet it.
        """
        most = self.most()
        if not self.meets(most):
            return None
        ranked = [*first, *(each for each in most if each not in first)]
        # `high` layers are enough; few more than the first ones are the likeliest.
        low, high, step = len(first), min(len(first) + 1, len(ranked)), 1
        while high < len(ranked) and not self.meets(ranked[:high]):
            step *= 2
            low, high = high + 1, min(high + step, len(ranked))
        with contextlib.suppress(OutOfTimeError):
            while low < high:
                middle = (low + high) // 2
                if self.meets(ranked[:middle]):
                    high = middle
                else:
                    low = middle + 1
        return self.prune(ranked[:high], self.meets)

    def prune(self, chosen: Sequence[str], meets: Callable[[Iterable[str]], bool]) -> list[str]:
        """
        Quantize layers again, the last first, until the criterion needs each that is left.

        Errors of layers cancel each other, so a layer that was needed may not be any more when
        others are quantized: each is tried again after every change.
        """
        kept = list(chosen)
        needed = 0  # of the layers that were tried last, since the last change
        try:
            while needed < len(kept):
                *rest, module = kept
                if self.minimal(rest) == self.minimal(kept) or meets(rest):
                    kept, needed = rest, 0
                else:
                    kept, needed = [module, *rest], needed + 1
        except OutOfTimeError:
            self.is_pruned = False  # what is left meets the criterion
        return self.ordered(kept)

    def most(self) -> list[str]:
        """Return all layers, or all but those whose loss is least, so that some are quantized."""
        ranked = self._ranked()
        while ranked and not self.engine.is_quantized(self.minimal(ranked)):
            ranked.remove(min(ranked, key=lambda each: self.noise.alone[each].share))
        return ranked

    def _ranked(self) -> list[str]:
        """Return all layers, those that lose most for each byte first."""
        layers = self.engine.layers
        own = {module: noise.share for module, noise in self.noise.alone.items()}
        # A tensor is rounded until the layer that computes it and those that read it are in float.
        shared = dict(own)
        for module, layer in layers.items():
            for reader in layer.readers:
                if reader.module in shared:
                    shared[reader.module] += own[module]
        possible = [each for each in layers if each not in self.refused]
        return sorted(possible, key=lambda each: (-shared[each] / self._cost(each), each))

    def _cost(self, module: str) -> int:
        """Return the bytes by which a layer in the other precision makes the file larger."""
        weights = self.engine.layers[module].weights if self.engine.precision == FLOAT else 0
        return _FLOAT_WEIGHT * weights + _BORDERS


def _spread_db(errors: Any) -> float:
    """Return three standard errors of the SQNR of the worst output, in dB."""
    worst = min(errors.outputs.values(), key=lambda each: each.sqnr_db)
    noises = [each.noise for each in worst.samples if math.isfinite(each.noise)]
    mean = math.fsum(noises) / max(len(noises), 1)
    if len(noises) < 2 or not mean:
        return math.inf
    return 3 * standard_error_db(noises, mean)
