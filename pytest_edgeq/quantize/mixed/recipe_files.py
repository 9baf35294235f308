"""Recipes: quantize the float file again, with rules for some of its layers."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_edgeq import litert
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.quantize.mixed.engine import (
    FLOAT,
    INT16X8,
    Array,
    Choice,
    Layer,
    LayerEngine,
    ReadBy,
    grouped,
)
from pytest_edgeq.quantize.recipe import calibrated, scoped_ops
from pytest_edgeq.quantize.request import Request
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.boundary import qparams
from pytest_edgeq.tflite.subgraph import Op

if TYPE_CHECKING:
    from pytest_edgeq.compare.executors.sample_executor import SampleExecutor


class RecipeLayers(LayerEngine):
    """The layers of a model of the recipe flow; an op of no module is a layer by itself."""

    def __init__(
        self,
        quantized: QuantizedModel,
        request: Request,
        recipe: Any,
        executor: SampleExecutor | None = None,
    ) -> None:
        super().__init__(quantized, executor)
        self._request = request
        self._recipe = litert.load_recipe(recipe)
        assert quantized.float_edge is not None, "unreachable because the flow keeps it"
        self._float_edge = quantized.float_edge
        self._float_tflite = bytes(self._float_edge.graph.buffer)
        self._ranges = calibrated(request, self._float_edge, self._recipe)
        self._scopes: dict[str, list[str]] = {}
        self._producers: dict[str, str] = {}  # the layer of each result, by its name
        self.layers = self._layers()
        self.groups = grouped(self.layers, self._sharing())

    def others(self) -> tuple[RecipeLayers, ...]:
        """Return the layers that int16 activations are supported for, if the recipe has int8."""
        configs = (rule.get("op_config", {}) for rule in self._recipe)
        activations = [config.get("activation_tensor_config", {}) for config in configs]
        if not any(each.get("num_bits") == 8 for each in activations):
            return ()
        other = copy.copy(self)
        other.precision = INT16X8
        other.layers = {
            name: layer
            for name, layer in self.layers.items()
            if any(litert.is_supported(other._rule(name), op) for op in layer.ops)
        }
        return (other,)

    def _layers(self) -> dict[str, Layer]:
        schemes: dict[str, str] = {}  # by the name of an op's output, which quantization keeps
        edge = self._model.edge
        for op, entry in zip(edge.graph.ops, edge.op_dtypes, strict=True):
            schemes |= {edge.graph.tensor(op, i).name: entry.scheme for i in op.outputs}
        graph = self._float_edge.graph
        named: dict[str, list[Op]] = {}
        scoped = scoped_ops(self._float_edge)  # those of inputs and outputs follow
        for op, entry, scope in zip(graph.ops, self._float_edge.op_dtypes, scoped, strict=False):
            output = graph.tensor(op, op.outputs[0]).name if op.outputs else ""
            if schemes.get(output, "integer") in ("float", "integer"):
                continue
            name = entry.module or f"{op.name} #{op.index}"
            named.setdefault(name, []).append(op)
            self._scopes.setdefault(name, []).append(scope.scope)
            self._producers[output] = name
        producers = {i: name for name, ops in named.items() for op in ops for i in op.outputs}
        readers: dict[str, set[ReadBy]] = {name: set() for name in named}
        for name, ops in named.items():
            for op in ops:
                for producer in {producers.get(i, name) for i in op.inputs} - {name}:
                    readers[producer].add(ReadBy(op.name, name))
        return {
            name: Layer(
                name,
                tuple(op.name for op in ops),
                sum(map(self._weights, ops)),
                tuple(sorted(readers[name])),
            )
            for name, ops in named.items()
        }

    def _sharing(self) -> Collection[frozenset[str]]:
        """Return layers whose results have one scale, as those of ops that do not rescale have."""
        graph = self._model.edge.graph
        sharing: dict[str, frozenset[str]] = {}
        for op in graph.ops:
            tensors = [graph.tensor(op, i) for i in (*op.inputs, *op.outputs) if i >= 0]
            by_scale: dict[Any, set[str]] = {}
            for tensor in tensors:
                if tensor.name in self._producers and (scale := qparams(tensor)):
                    by_scale.setdefault(scale, set()).add(self._producers[tensor.name])
            for layers in by_scale.values():
                joined = layers.union(*(sharing.get(each, ()) for each in layers))
                sharing |= dict.fromkeys(joined, frozenset(joined))
        return dict.fromkeys(sharing.values())

    def _weights(self, op: Op) -> int:
        """Return the number of an op's weights, the largest of its constants."""
        tensors = [self._float_edge.graph.tensor(op, i) for i in op.inputs if i >= 0]
        sizes = [math.prod(t.shape) for t in tensors if t.is_constant and t.is_floating_point]
        return max(sizes, default=0)

    def is_quantized(self, modules: frozenset[str]) -> bool:
        """Return whether any op is quantized with some modules in the other precision."""
        return self.precision != FLOAT or super().is_quantized(modules)

    def quantizer(self, modules: Sequence[str]) -> list[dict[str, Any]]:
        """Return the recipe with rules for the other precision of some modules."""
        return [*self._recipe, *map(self._rule, modules)]

    def _rule(self, module: str) -> dict[str, Any]:
        regex = "|".join(f"^{re.escape(scope)}$" for scope in self._scopes[module])
        if self.precision == FLOAT:
            return {"regex": regex, "operation": "*", "algorithm_key": "no_quantize"}
        static = [r for r in self._recipe if "activation_tensor_config" in r.get("op_config", {})]
        config = dict(static[-1]["op_config"])
        activations = config["activation_tensor_config"]
        config["activation_tensor_config"] = {**activations, "num_bits": 16, "symmetric": True}
        return {**static[-1], "regex": regex, "op_config": config}

    def code(self, modules: Sequence[str]) -> str:
        """Return the recipe as JSON, a rule a line."""
        rules = ",\n".join(f"  {json.dumps(rule)}" for rule in self.quantizer(modules))
        return f"[\n{rules}\n]"

    @contextmanager
    def choice(self, modules: frozenset[str]) -> Iterator[Choice]:
        """Quantize the float file, with some modules in the other precision."""
        if not modules:
            yield _RecipeFile(bytes(self._model.graph.buffer), self._model.edge)
            return
        recipe, session = self.quantizer(sorted(modules)), self._request.session
        native = session.native(self._model.name)
        content = litert.quantize_recipe(self._float_tflite, recipe, self._ranges, native)
        yield _RecipeFile(content, self._request.edge(content))


class _RecipeFile:
    """A file in place of a model's; a worker gets its content, and opens it."""

    def __init__(self, content: bytes, edge: EdgeFile | None = None) -> None:
        self._content, self._edge = content, edge

    def __reduce__(self) -> tuple[Any, ...]:
        return _RecipeFile, (self._content,)

    def __call__(self, model: QuantizedModel) -> Callable[[Sample], Any]:
        own = model.edge
        opened = self._edge or EdgeFile(self._content, runtimes=own.runtimes, threads=own.threads)
        edge = opened.at(own.signature.key)
        names = [each.name for each in edge.signature.outputs]

        def run(sample: Sample) -> list[tuple[str, Array]]:
            codes = edge.run(model.input_names, sample.arrays(), model.runtime)
            return [*zip(names, edge.decode(codes), strict=True)]

        return run
