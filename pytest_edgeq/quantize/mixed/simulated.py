"""PT2E: toggle the roundings of layers in the quantized graph."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_edgeq import litert
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.reference import flatten_outputs
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.quantize.mixed.engine import (
    Choice,
    Expected,
    Items,
    Layer,
    LayerEngine,
    LayerNoise,
    ReadBy,
    SentModule,
    grouped,
)
from pytest_edgeq.quantize.pt2e import exported_graph, instance_of
from pytest_edgeq.quantize.request import fresh

if TYPE_CHECKING:
    import torch

    from pytest_edgeq.compare.executors.sample_executor import SampleExecutor
    from pytest_edgeq.litert.mixed import Roundings
    from pytest_edgeq.quantize.request import Request


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
        super().__init__(quantized, executor)
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
        self._by_op = self._annotated.layers(self._made)  # the layer of each op
        self._runner = _GraphRunner(self._annotated.graph.module)
        self.layers = self._layers()
        self.groups = grouped(self.layers, self._sharing())

    def _sharing(self) -> list[set[str]]:
        """Return layers whose results have one scale, but for an activation with the op before."""
        found: dict[int, set[str]] = {}
        for op, rounding in self._made.results.items():
            if self._by_op.get(op) in self.layers and op not in self._annotated.followers:
                found.setdefault(id(rounding), set()).add(self._by_op[op])
        return [*found.values()]

    def _layers(self) -> dict[str, Layer]:
        ops: dict[str, list[str]] = {}
        for op, module in self._by_op.items():
            ops.setdefault(module, []).append(op)
        weights: Counter[str] = Counter()
        readers: dict[str, set[ReadBy]] = {module: set() for module in ops}
        for op, operand in self._made.operands:
            producer = self._by_op.get(operand)
            if producer is not None and producer != self._by_op[op]:
                readers[producer].add(ReadBy(op, self._by_op[op]))
            if operand in self._runner.graph.constants:
                weights[op] += self._runner.graph.constants[operand].numel()
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
        """Measure each candidate in float, and each layer alone quantized."""
        choices = {name: frozenset(layers) for name, layers in self.candidates.items()}
        self._add([*choices.values()])
        in_float = {name: self._known[each] for name, each in choices.items()}
        alone = {module: self._made.of_layer(self._by_op, module) for module in self.layers}
        job = functools.partial(_layer_noise, self._runner, self._made, in_float, alone)
        found: LayerNoise = self.summed(job, samples)
        return found

    @contextmanager
    def choice(self, modules: frozenset[str]) -> Iterator[Choice]:
        """Return what runs the graph with some modules in float."""
        yield functools.partial(_run_graph, self._runner, self._with(modules))

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


class _GraphRunner(SentModule):
    """Runs the quantized graph."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.graph = litert.MixedGraph(module)

    def outputs(self, values: Mapping[str, Any]) -> Any:
        """Return the named outputs of a run."""
        return flatten_outputs(self.graph.outputs(values))

    def changed(self, values: Mapping[str, Any], before: Roundings, made: Roundings) -> Any:
        """Return the named outputs with other roundings than those of a run."""
        return self.outputs({**values, **self.graph.changed(values, before, made)})


def _run_graph(
    runner: _GraphRunner, made: Roundings, model: QuantizedModel
) -> Callable[[Sample], Any]:
    """Return what runs the graph with some roundings."""
    return lambda sample: runner.outputs(runner.graph.run(sample.args, sample.kwargs, made))


def _layer_noise(
    runner: _GraphRunner,
    made: Roundings,
    in_float: Mapping[str, Roundings],
    alone: Mapping[str, Roundings],
    model: QuantizedModel,
    expected: Expected,
) -> Callable[[Items], LayerNoise]:
    """Return what measures each candidate in float, and each layer alone quantized."""

    def measure(items: Items) -> LayerNoise:
        sums = LayerNoise.of(in_float, alone, len(expected.names))
        for _, sample in items:
            wanted = expected(sample)
            values = runner.graph.run(sample.args, sample.kwargs, made)
            sums.quantized.add(wanted, expected.ordered(runner.outputs(values)))
            for name, others in in_float.items():
                got = expected.ordered(runner.changed(values, made, others))
                sums.in_float[name].add(wanted, got)
            values = runner.graph.run(sample.args, sample.kwargs, litert.NOTHING)
            outputs = expected.ordered(runner.outputs(values))
            for module, own in alone.items():
                got = expected.ordered(runner.changed(values, litert.NOTHING, own))
                sums.alone[module].add(outputs, got)
        return sums

    return measure
