"""The interface of the search for layers to leave in float, and the sums that it measures."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pytest_edgeq.compare.executors.remote import (
    PickledReference,
    Reading,
    pickled_reference,
    unpickled_reference,
)
from pytest_edgeq.compare.measurement import output_specs
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.reference import call_reference, in_file_order
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.numerics.error_sums import StageAccumulator
from pytest_edgeq.numerics.results import StageErrors
from pytest_edgeq.progress import Step

if TYPE_CHECKING:
    import torch

    from pytest_edgeq.compare.executors.sample_executor import SampleExecutor

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


def grouped(
    layers: Mapping[str, Layer], sharing: Iterable[Collection[str]] = ()
) -> dict[str, tuple[str, ...]]:
    """
    Return the layers that are also measured together, by the name of their group.

    Those inside a module, `layer3.*`, if two have weights, and those whose results have one scale,
    `conv + pool` or `first + … + last`. A module that lacks at most one layer of the module around
    it is left out.
    """
    blocks: dict[str, set[str]] = {}
    for layer in layers:
        names = layer.split(".")
        for n in range(1, len(names) + 1):
            blocks.setdefault(".".join(names[:n]), set()).add(layer)
    groups: dict[str, set[str]] = {}
    around = {"": {*layers}}  # the smallest group that holds a module
    for block, members in sorted(blocks.items()):
        outer = around[block.rpartition(".")[0]]
        weighted = sum(layers[each].weights > 0 for each in members)
        around[block] = members if weighted > 1 and len(members) < len(outer) - 1 else outer
        if around[block] is members:
            groups[f"{block}.*"] = members
    for pair in sharing:
        ordered = [each for each in layers if each in pair]
        shown = ordered if len(ordered) < 4 else [ordered[0], "…", ordered[-1]]
        groups[" + ".join(shown)] = {*ordered}
    return {
        name: tuple(each for each in layers if each in members)
        for name, members in groups.items()
        if 1 < len(members) < len(layers)
    }


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

    @classmethod
    def of(cls, errors: StageErrors) -> Noise:
        """Return the sums of errors; the noise of an output that is not finite is infinite."""
        sums = cls(len(errors.outputs))
        for i, output in enumerate(errors.outputs.values()):
            sums.signal[i] = math.fsum(each.signal for each in output.samples)
            noise = math.fsum(each.noise for each in output.samples)
            sums.noise[i] = math.inf if output.nonfinite else noise
        return sums

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
    """Noise of the model with layers in float, and with one layer quantized; mergeable."""

    quantized: Noise  # of the whole quantized model
    in_float: dict[str, Noise]  # by layer, and by group: this one in float
    alone: dict[str, Noise]  # by layer: only this one quantized

    @classmethod
    def of(cls, candidates: Iterable[str], layers: Iterable[str], outputs: int) -> LayerNoise:
        """Return sums without samples."""
        names = (candidates, layers)
        return cls(Noise(outputs), *({each: Noise(outputs) for each in part} for part in names))

    def merge(self, other: LayerNoise) -> None:
        """Add the samples of another one."""
        self.quantized.merge(other.quantized)
        for mine, theirs in ((self.in_float, other.in_float), (self.alone, other.alone)):
            for name, noise in mine.items():
                noise.merge(theirs[name])


Items = Iterable[tuple[int, Sample]]

Choice = Callable[[QuantizedModel], Callable[[Sample], Any]]
"""Returns what runs a sample with some layers in another precision; can be pickled."""

Job = Callable[[QuantizedModel, Expected], Callable[[Items], Any]]
"""Returns what sums over samples, mergeable; can be pickled."""


class SentModule:
    """A torch module that is sent to workers as references are."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (type(self), pickled_reference(self.module))


def _received(kind: type[SentModule], reference: PickledReference) -> SentModule:
    return kind(unpickled_reference(reference))


class LayerEngine(ABC):
    """A quantized model whose layers can be left in float."""

    layers: Mapping[str, Layer]  # by module, in execution order
    groups: Mapping[str, tuple[str, ...]]  # layers that are also measured together, by name
    precision: str = FLOAT  # what a layer gets in place of int8

    def __init__(self, quantized: QuantizedModel, executor: SampleExecutor | None = None) -> None:
        self._model, self._expected = quantized, Expected(quantized)
        self._executor = executor

    def others(self) -> Sequence[LayerEngine]:
        """Return the same layers for the other precisions that the flow has."""
        return ()

    @property
    def candidates(self) -> dict[str, tuple[str, ...]]:
        """The layers of each candidate, by its name: each layer, and each group."""
        return {each: (each,) for each in self.layers} | dict(self.groups)

    def sensitivity(self, samples: Sequence[Sample]) -> LayerNoise:
        """Measure each candidate in float, and each layer alone quantized."""
        every = frozenset(self.layers)

        def noise(modules: Iterable[str]) -> Noise:
            return Noise.of(self.errors(frozenset(modules), samples))

        return LayerNoise(
            noise(()),
            {name: noise(layers) for name, layers in self.candidates.items()},
            {each: noise(every - {each}) for each in self.layers},
        )

    def errors(self, modules: frozenset[str], samples: Sequence[Sample]) -> StageErrors:
        """Return the errors of the outputs with some modules in another precision."""
        with self.choice(modules) as choice:
            sums: StageAccumulator = self.summed(functools.partial(_errors, choice), samples)
        return sums.result()

    def outputs(
        self, modules: frozenset[str], samples: Iterable[Sample]
    ) -> Iterator[Sequence[Array]]:
        """Yield the outputs of each sample, in the file's order."""
        with self.choice(modules) as choice:
            run = choice(self._model)
            for sample in samples:
                yield self._expected.ordered(run(sample))

    def summed(self, job: Job, samples: Sequence[Sample]) -> Any:
        """Return the sums of a job over all samples; those of workers are merged."""
        if self._executor is not None:
            reading = Reading(self._model, samples, iter(samples))
            content = reading.pickled(self._model.runtime)
            if content is not None:
                step = Step("sensitivity", self._model.name, len(samples))
                on_worker = functools.partial(_on_worker, job=job)
                found: list[Any] = []
                reading.measure(self._executor, content, on_worker, found.append, step)
                first, *others = found
                for each in others:
                    first.merge(each)
                return first
        return job(self._model, self._expected)(enumerate(samples))

    def is_quantized(self, modules: frozenset[str]) -> bool:
        """Return whether anything is quantized with some modules in the other precision."""
        return modules != frozenset(self.layers)

    @abstractmethod
    def choice(self, modules: frozenset[str]) -> AbstractContextManager[Choice]:
        """Return what runs samples with some modules in the other precision."""

    @abstractmethod
    def quantizer(self, modules: Sequence[str]) -> Any:
        """Return the quantizer that makes the file."""

    @abstractmethod
    def code(self, modules: Sequence[str]) -> str:
        """Return the code that makes the quantizer."""


def _on_worker(model: QuantizedModel, *, job: Job) -> Callable[[Items, Any], Any]:
    """Return what measures samples on a worker."""
    measure = job(model, Expected(model))
    return lambda items, extra: measure(items)


def _errors(
    choice: Choice, model: QuantizedModel, expected: Expected
) -> Callable[[Items], StageAccumulator]:
    """Return what measures the errors of a choice of layers."""
    run = choice(model)

    def measure(items: Items) -> StageAccumulator:
        sums = StageAccumulator(output_specs(model.edge))
        for index, sample in items:
            sums.update(expected(sample), expected.ordered(run(sample)), index=index)
        return sums

    return measure
