"""The interface of the search for layers to leave in float, and the sums that it measures."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pytest_edgeq.compare.measurement import output_specs
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.reference import call_reference, in_file_order
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.numerics.error_sums import StageAccumulator
from pytest_edgeq.numerics.results import StageErrors

FLOAT: Final = "float"
INT16X8: Final = "int16x8"

Array = npt.NDArray[Any]


class ReadBy(NamedTuple):
    """A quantized op of another module."""

    op: str
    module: str

    def __str__(self) -> str:
        return f"{self.op} ({self.module})" if self.module else self.op


@dataclass(frozen=True, slots=True)
class Layer:
    """
    A module whose own ops a quantizer can leave in float, without the layers inside it.

    Attributes:
        module: Its path.
        ops: Its quantized ops, in execution order.
        weights: How many weights are quantized.
        readers: The quantized ops of other modules that read its results.
    """

    module: str
    ops: tuple[str, ...]
    weights: int
    readers: tuple[ReadBy, ...] = ()


class Expected:
    """Outputs of the reference in the file's order, computed once for each sample."""

    def __init__(self, model: QuantizedModel) -> None:
        self._model = model
        self.names = [each.name for each in model.edge.signature.outputs]
        self._known: dict[int, tuple[Sample, list[Array]]] = {}  # a sample's id is its as it lives

    def __call__(self, sample: Sample) -> list[Array]:
        """Return the reference's outputs for a sample."""
        if id(sample) not in self._known:
            reference = self._model.float_model
            assert reference is not None, "unreachable because the flow has a torch module"
            self._known[id(sample)] = sample, self.ordered(call_reference(reference, sample))
        return self._known[id(sample)][1]

    def ordered(self, outputs: Sequence[tuple[str | None, Array]]) -> list[Array]:
        """Return named outputs in the file's order."""
        return in_file_order(outputs, self.names, self._model.name)


class Noise:
    """Signal and noise of the outputs, summed over samples; mergeable."""

    def __init__(self, outputs: int) -> None:
        self.signal, self.noise = np.zeros(outputs), np.zeros(outputs)

    def add(self, reference: Sequence[Array], actual: Sequence[Array]) -> None:
        """Add one sample."""
        for i, (wanted, got) in enumerate(zip(reference, actual, strict=True)):
            off = np.asarray(wanted, np.float64) - got
            self.signal[i] += np.square(wanted, dtype=np.float64).sum()
            self.noise[i] += np.square(off).sum()

    def merge(self, other: Noise) -> None:
        """Add the samples of another one."""
        self.signal += other.signal
        self.noise += other.noise

    @property
    def share(self) -> float:
        """Noise over signal of the worst output."""
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = self.noise / self.signal
        # Nothing over nothing is no noise; anything not finite is the worst.
        return float(np.max(np.where(self.noise == 0, 0.0, np.nan_to_num(shares, nan=np.inf))))

    @property
    def sqnr_db(self) -> float:
        """The SQNR of the worst output."""
        return -10 * math.log10(self.share) if self.share else math.inf


@dataclass(slots=True)
class LayerNoise:
    """Noise of the model with one layer in float, and with one layer quantized; mergeable."""

    quantized: Noise  # of the whole quantized model
    in_float: dict[str, Noise] = field(default_factory=dict)  # by module: this one in float
    alone: dict[str, Noise] = field(default_factory=dict)  # only this one quantized

    @classmethod
    def of(cls, modules: Iterable[str], outputs: int) -> LayerNoise:
        """Return sums without samples."""
        modules = list(modules)
        sums = ({each: Noise(outputs) for each in modules} for _ in range(2))
        return cls(Noise(outputs), *sums)

    def merge(self, other: LayerNoise) -> None:
        """Add the samples of another one."""
        self.quantized.merge(other.quantized)
        for mine, theirs in ((self.in_float, other.in_float), (self.alone, other.alone)):
            for module, noise in mine.items():
                noise.merge(theirs[module])


class LayerEngine(ABC):
    """A quantized model whose layers can be left in float."""

    layers: Mapping[str, Layer]  # by module, in execution order; blocks behind their layers
    precision: str = FLOAT  # what a layer gets in place of int8

    def __init__(self, quantized: QuantizedModel) -> None:
        self._model, self._expected = quantized, Expected(quantized)

    def others(self) -> Sequence[LayerEngine]:
        """Return the same layers for the other precisions that the flow has."""
        return ()

    def sensitivity(self, samples: Sequence[Sample]) -> LayerNoise:
        """Measure each layer alone: in float, and quantized."""
        sums = LayerNoise.of(self.layers, len(self._expected.names))

        def add(noise: Noise, modules: frozenset[str]) -> None:
            for sample, got in zip(samples, self.outputs(modules, samples), strict=True):
                noise.add(self._expected(sample), got)

        add(sums.quantized, frozenset())
        for module in self.layers:
            add(sums.in_float[module], frozenset([module]))
            add(sums.alone[module], frozenset(self.layers) - {module})
        return sums

    def errors(self, modules: frozenset[str], samples: Sequence[Sample]) -> StageErrors:
        """Return the errors of the outputs with some modules in another precision."""
        sums = StageAccumulator(output_specs(self._model.edge))
        for sample, got in zip(samples, self.outputs(modules, samples), strict=True):
            sums.update(self._expected(sample), got)
        return sums.result()

    def is_quantized(self, modules: frozenset[str]) -> bool:
        """Return whether anything is quantized with some modules in the other precision."""
        return modules != frozenset(self.layers)

    @abstractmethod
    def outputs(
        self, modules: frozenset[str], samples: Iterable[Sample]
    ) -> Iterator[Sequence[Array]]:
        """Return the outputs of each sample, in the file's order."""

    @abstractmethod
    def quantizer(self, modules: Sequence[str]) -> Any:
        """Return the quantizer that makes the file."""

    @abstractmethod
    def code(self, modules: Sequence[str]) -> str:
        """Return the code that makes the quantizer."""
