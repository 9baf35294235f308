"""PT2E: toggle the roundings of layers in the quantized graph."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_edgeq import litert
from pytest_edgeq.compare.executors.remote import (
    PickledReference,
    Reading,
    pickled_reference,
    unpickled_reference,
)
from pytest_edgeq.compare.measurement import output_specs
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.reference import flatten_outputs
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.numerics.error_sums import StageAccumulator
from pytest_edgeq.numerics.results import StageErrors
from pytest_edgeq.progress import Step
from pytest_edgeq.quantize.mixed.engine import (
    Array,
    Expected,
    Layer,
    LayerEngine,
    LayerNoise,
    ReadBy,
)
from pytest_edgeq.quantize.pt2e import exported_graph, instance_of
from pytest_edgeq.quantize.request import fresh

if TYPE_CHECKING:
    from pytest_edgeq.compare.executors.sample_executor import SampleExecutor
    from pytest_edgeq.litert.mixed import Roundings
    from pytest_edgeq.quantize.request import Request

_Items = Iterable[tuple[int, Sample]]


class _Toggles(NamedTuple):
    """The roundings of the quantized graph, and with one layer toggled."""

    quantized: Roundings
    in_float: Mapping[str, Roundings]
    alone: Mapping[str, Roundings]


class SimulatedLayers(LayerEngine):
    """
    The layers of a model of the PT2E flow.

    They have no int16 activations: the converter reads int64 biases of 16-bit layers as int32.
    """

    def __init__(
        self,
        quantized: QuantizedModel,
        request: Request,
        quantizer: Any,
        executor: SampleExecutor | None = None,
    ) -> None:
        (entry,) = request.entries
        super().__init__(quantized)
        self._executor = executor
        self._preset = quantizer if isinstance(quantizer, str) else None
        self._quantizer = instance_of(quantizer)
        exported, _ = exported_graph(entry, request.session, strict=request.strict_export)

        def samples() -> Iterator[tuple[tuple[Any, ...], Mapping[str, Any]]]:
            for sample in fresh(entry).calibration_samples():
                yield sample.args, sample.kwargs

        self._annotated = litert.AnnotatedGraph(exported, self._quantizer, samples)
        self.layers: dict[str, Layer] = {}  # unknown until the quantizer itself has annotated
        self._known: dict[frozenset[str], Roundings] = {}
        self._add([frozenset()])
        self._made = self._known[frozenset()]
        self._graph = self._annotated.graph
        self._runner = _GraphRunner(self._model, self._expected, self._graph)
        self.layers = self._layers()

    def _layers(self) -> dict[str, Layer]:
        ops: dict[str, list[str]] = {}
        by_op = self._annotated.layers(self._made)
        for op, module in by_op.items():
            ops.setdefault(module, []).append(op)
        weights: Counter[str] = Counter()
        readers: dict[str, set[ReadBy]] = {module: set() for module in ops}
        for op, operand in self._made.operands:
            producer = by_op.get(operand)
            if producer is not None and producer != by_op[op]:
                readers[producer].add(ReadBy(op, by_op[op]))
            if operand in self._graph.constants:
                weights[op] += self._graph.constants[operand].numel()
        can_keep = litert.can_configure_inside(self._quantizer)
        return {
            module: Layer(
                module,
                tuple(ops[module]),
                sum(weights[op] for op in ops[module]),
                tuple(sorted(readers[module])),
            )
            for module in ops
            if module and (can_keep or not any(each.startswith(f"{module}.") for each in ops))
        }

    def _add(self, choices: Sequence[frozenset[str]]) -> None:
        """Find the roundings of choices of layers in float."""
        new = [each for each in choices if each not in self._known]
        quantizers = [self.quantizer(sorted(each)) for each in new]
        self._known |= zip(new, self._annotated.roundings(quantizers), strict=True)

    def _with(self, modules: Iterable[str]) -> Roundings:
        self._add([frozenset(modules)])
        return self._known[frozenset(modules)]

    def sensitivity(self, samples: Sequence[Sample]) -> LayerNoise:
        """Measure each layer alone."""
        by_op = self._annotated.layers(self._made)
        self._add([frozenset([module]) for module in self.layers])
        toggles = _Toggles(
            self._made,
            {module: self._with([module]) for module in self.layers},
            {module: self._made.of_layer(by_op, module) for module in self.layers},
        )
        found: LayerNoise = self._measured(_GraphRunner.sensitivity, toggles, samples)
        return found

    def errors(self, modules: frozenset[str], samples: Sequence[Sample]) -> StageErrors:
        """Return the errors of the outputs with some modules in float."""
        sums: StageAccumulator = self._measured(_GraphRunner.errors, self._with(modules), samples)
        return sums.result()

    def _measured(
        self,
        measure: Callable[[_GraphRunner, Any, _Items], Any],
        made: Any,
        samples: Sequence[Sample],
    ) -> Any:
        """Return the sums over all samples; those of workers are merged."""
        if self._executor is not None:
            reading = Reading(self._model, samples, iter(samples))
            content = reading.pickled(self._model.runtime)
            if content is not None:
                graph = pickled_reference(self._graph.module)
                on_worker = functools.partial(_on_worker, graph=graph, measure=measure, made=made)
                step = Step("sensitivity", self._model.name, len(samples))
                found: list[Any] = []
                reading.measure(self._executor, content, on_worker, found.append, step)
                first, *others = found
                for each in others:
                    first.merge(each)
                return first
        return measure(self._runner, made, enumerate(samples))

    def outputs(
        self, modules: frozenset[str], samples: Iterable[Sample]
    ) -> Iterator[Sequence[Array]]:
        """Return the outputs of each sample with some modules in float."""
        made = self._with(modules)
        return (self._runner(sample, made) for sample in samples)

    def is_quantized(self, modules: frozenset[str]) -> bool:
        """Return whether anything is rounded with some modules in float."""
        return self._with(modules) != litert.NOTHING

    def quantizer(self, modules: Sequence[str]) -> Any:
        """Return the quantizer that leaves some modules in float."""
        return litert.left_in_float(self._quantizer, modules, self._kept(modules))

    def _kept(self, modules: Sequence[str]) -> list[str]:
        followers = self._annotated.followers
        layers = [name for name, each in self.layers.items() if not followers.issuperset(each.ops)]
        return litert.kept_inside(modules, layers, self._annotated.modules)

    def code(self, modules: Sequence[str]) -> str:
        """Return the code that makes the quantizer."""
        kept = self._kept(modules)
        floats = [f'.set_module_name("{module}", None)' for module in modules]
        if self._preset is not None:
            inside = [f'.set_module_name("{module}", config)' for module in kept]
            return litert.pt2e_preset_code(self._preset, [*inside, *floats])
        inside = []
        for module in kept:
            named = litert.named_around(self._quantizer, module)
            config = f'module_name_config["{named}"]' if named else "global_config"
            inside.append(f'.set_module_name("{module}", quantizer.{config})')
        calls = [*inside, *floats]
        return "\n".join(
            ["quantizer = (", "    quantizer", *(f"    {each}" for each in calls), ")"]
        )


class _GraphRunner:
    """Runs the quantized graph of a model with some roundings."""

    def __init__(self, model: QuantizedModel, expected: Expected, graph: litert.MixedGraph) -> None:
        self._model, self._expected, self._graph = model, expected, graph

    def __call__(self, sample: Sample, made: Roundings) -> list[Array]:
        """Return the outputs of a sample with some roundings."""
        return self._outputs(self._graph.run(sample.args, sample.kwargs, made))

    def _outputs(self, values: Mapping[str, Any]) -> list[Array]:
        return self._expected.ordered(flatten_outputs(self._graph.outputs(values)))

    def errors(self, made: Roundings, items: _Items) -> StageAccumulator:
        """Measure the errors with some roundings."""
        sums = StageAccumulator(output_specs(self._model.edge))
        for index, sample in items:
            sums.update(self._expected(sample), self(sample, made), index=index)
        return sums

    def sensitivity(self, toggles: _Toggles, items: _Items) -> LayerNoise:
        """Measure each layer alone."""
        made, in_float, alone = toggles
        sums = LayerNoise.of(in_float, len(self._expected.names))
        for _, sample in items:
            expected = self._expected(sample)
            values = self._graph.run(sample.args, sample.kwargs, made)
            sums.quantized.add(expected, self._outputs(values))
            for module, others in in_float.items():
                sums.in_float[module].add(expected, self._changed(values, made, others))
            values = self._graph.run(sample.args, sample.kwargs, litert.NOTHING)
            outputs = self._outputs(values)
            for module, own in alone.items():
                sums.alone[module].add(outputs, self._changed(values, litert.NOTHING, own))
        return sums

    def _changed(
        self, values: Mapping[str, Any], before: Roundings, made: Roundings
    ) -> list[Array]:
        """Return the outputs with other roundings than those of a run."""
        return self._outputs({**values, **self._graph.changed(values, before, made)})


def _on_worker(
    model: QuantizedModel,
    *,
    graph: PickledReference,
    measure: Callable[[_GraphRunner, Any, _Items], Any],
    made: Any,
) -> Callable[[_Items, Any], Any]:
    """Return what measures samples on a worker."""
    runner = _GraphRunner(model, Expected(model), litert.MixedGraph(unpickled_reference(graph)))
    return lambda items, extra: measure(runner, made, items)
