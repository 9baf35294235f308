"""
The `recipe` flow: convert the model, then quantize the file by a recipe.

Without a recipe it is the `float` flow: the conversion alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pytest_edgeq import litert
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.quantize.request import Entry, Request
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.op_dtypes import OpDtypes


def quantize_recipe(request: Request, recipe: list[dict[str, Any]] | None) -> QuantizedModel:
    """Convert a model, and quantize the file by a recipe."""
    traced = {entry.key: entry.traced() for entry in request.entries}
    float_edge = request.edge(request.session.convert(request.name, traced))
    if recipe is None:
        return request.finish("float", float_edge)
    rules = litert.check_rules(recipe, f"{request.name}: {request.quantizer}")
    ops = scoped_ops(float_edge)
    winners = litert.match_rules(rules, ops)
    float_tflite = bytes(float_edge.graph.buffer)
    cache, native = request.session.cache, request.session.native(request.name)
    ranges = calibrated(request, float_edge, recipe)
    with request.session.progress.step("quantize", request.name):
        tflite = cache.quantize_recipe(
            request.name,
            float_tflite,
            recipe,
            ranges,
            lambda: litert.quantize_recipe(float_tflite, recipe, ranges, native),
        )
    edge = request.edge(tflite)
    _check_applied(rules, ops, winners, _outcomes(float_edge.graph, edge))
    left_in_float = frozenset(
        entry.module
        # The scopes of inputs and outputs follow those of the ops.
        for entry, winner in zip(float_edge.op_dtypes, winners, strict=False)
        if winner is not None and not rules[winner].quantizes and entry.module is not None
    )
    return request.finish(
        "recipe", edge, float_edge=float_edge, left_in_float=left_in_float, quantizer=recipe
    )


def calibrated(request: Request, float_edge: EdgeFile, recipe: list[dict[str, Any]]) -> Any:
    """Return the ranges of a float file's tensors on the calibration samples, or None."""
    float_tflite = bytes(float_edge.graph.buffer)
    threads, native = request.session.threads, request.session.native(request.name)
    entries = {entry.key: entry for entry in request.entries}

    def calibrate(samples: Mapping[str, Iterator[Sample]]) -> Any:
        streams = {key: _by_name(entries[key], float_edge, samples[key]) for key in entries}
        try:
            return litert.calibrate_recipe(
                float_tflite, recipe, streams, threads=threads, native=native
            )
        except (RuntimeError, ValueError):
            # If the kernels refuse the float file, this raises an error with the op and the fix.
            float_edge.runner("xnnpack")
            raise

    sources = [entry.calibration for entry in request.entries]
    with request.session.progress.step("calibrate", request.name, *sources) as step:
        return request.session.cache.calibrate_recipe(
            request.name,
            float_tflite,
            recipe,
            {key: step.each(entry.calibration_samples()) for key, entry in entries.items()},
            calibrate,
            threads=threads,
        )


def _by_name(
    entry: Entry, float_edge: EdgeFile, samples: Iterable[Sample]
) -> Iterator[Mapping[str, np.ndarray[Any, Any]]]:
    """Encode samples for the float file."""
    names = [spec.name for spec in entry.spec.inputs]
    view = float_edge.at(entry.key)
    for sample in samples:
        yield view.encode(names, sample.arrays())


def scoped_ops(edge: EdgeFile) -> list[litert.ScopedOp]:
    """Return the float file's ops, inputs and outputs with the scopes that rules match."""
    graph = edge.graph
    scoped = []
    for op, entry in zip(graph.ops, edge.op_dtypes, strict=True):
        named = op.outputs or [i for i in op.inputs if i >= 0]
        scope = _scope(graph.tensor(op, i).name for i in named)
        scoped.append(litert.ScopedOp(op.name, scope, entry.where))
    for subgraph in graph.subgraphs:
        place = f"subgraph {subgraph.index}" if len(graph.subgraphs) > 1 else "the model"
        for name, indices in (("INPUT", subgraph.inputs), ("OUTPUT", subgraph.outputs)):
            scope = _scope(subgraph.tensors[i].name for i in indices)
            scoped.append(litert.ScopedOp(name, scope, f"the {name.lower()} of {place}"))
    return scoped


def _scope(names: Iterable[str]) -> str:
    return "".join(f"{name};" for name in names if name)


def _outcomes(graph: OpGraph, edge: EdgeFile) -> list[str]:
    """
    Return the scheme of each op of the float file after quantization, as `scoped_ops` orders them.

    Quantization keeps the names of the ops' outputs, which the library requires to be unique.
    """
    entries: dict[str, OpDtypes] = {}
    for op, entry in zip(edge.graph.ops, edge.op_dtypes, strict=True):
        entries |= {edge.graph.tensor(op, i).name: entry for i in op.outputs}
    outcomes = [
        # An op without outputs (it writes a variable) has nothing to quantize.
        entries[graph.tensor(op, op.outputs[0]).name].scheme if op.outputs else "integer"
        for op in graph.ops
    ]
    for before, after in zip(graph.subgraphs, edge.graph.subgraphs, strict=True):
        for was, now in ((before.inputs, after.inputs), (before.outputs, after.outputs)):
            floats = [
                after.tensors[j].is_floating_point
                for i, j in zip(was, now, strict=True)
                if before.tensors[i].is_floating_point
            ]
            outcomes.append("integer" if not floats else "float" if any(floats) else "int8")
    return outcomes


def _check_applied(
    rules: Sequence[litert.Rule],
    ops: Sequence[litert.ScopedOp],
    winners: Sequence[int | None],
    outcomes: Sequence[str],
) -> None:
    """
    Check that the file conforms to the rules that quantized it.

    A rule for one operation must apply to each op that it matches, a rule for `*` to at least one.
    Exempt are ops on integers, and small weights where the rule exempts them.
    """
    for index, rule in enumerate(rules):
        applied = [
            (op, outcome)
            for op, winner, outcome in zip(ops, winners, outcomes, strict=True)
            if winner == index
        ]
        left = [op for op, outcome in applied if outcome == "float"]
        quantized = [op for op, outcome in applied if outcome not in ("float", "integer")]
        if not applied or not rule.quantizes or rule.may_pass_over:
            continue
        if quantized and not (left and rule.names_an_operation):
            continue
        shown = left or [op for op, _ in applied]
        done = f"left {len(left)} in float" if left else "quantized none"
        raise ValueError(
            "\n".join(
                [
                    f"{rule.place}: {done} of the {len(applied)} ops that it applies to",
                    f"  rule: {rule.json}",
                    litert.listed_ops(shown),
                    "  The library passes over ops that have nothing to quantize by this rule: a "
                    "dynamic or weight-only rule needs a constant weight, a static one floating-"
                    "point activations. Narrow the rule's regex, or let a no_quantize rule for "
                    "these ops follow it",
                ]
            )
        )
