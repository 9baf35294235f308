"""Suggest which layers to leave in float, and convert the file that results."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_edgeq.compare.comparer import compare
from pytest_edgeq.compare.parallel import torch_threads
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.reference import undisturbed
from pytest_edgeq.compare.samples import Sample, read_samples
from pytest_edgeq.numerics.comparison import Comparison
from pytest_edgeq.quantize.mixed.criteria import Criterion
from pytest_edgeq.quantize.mixed.engine import LayerEngine, LayerNoise
from pytest_edgeq.quantize.mixed.planner import Planner
from pytest_edgeq.quantize.mixed.recipe_files import RecipeLayers
from pytest_edgeq.quantize.mixed.results import (
    GroupSensitivity,
    LayerSensitivity,
    MixedPrecisionPlan,
    Sensitivity,
)
from pytest_edgeq.quantize.mixed.search import FEW, Search
from pytest_edgeq.quantize.mixed.simulated import SimulatedLayers
from pytest_edgeq.quantize.mixed.torchao_layers import TorchaoLayers
from pytest_edgeq.quantize.request import Request, fresh
from pytest_edgeq.runtimes.process_state import frozen_heap, seeded

if TYPE_CHECKING:
    from pytest_edgeq.compare.executors.sample_executor import SampleExecutor


def sensitivity(
    quantized: QuantizedModel,
    inputs: Iterable[Any],
    *,
    calibration: Iterable[Any] | None = None,
    executor: SampleExecutor | None = None,
) -> Sensitivity:
    """Measure the model with each layer alone in float, and alone quantized."""
    samples = read(quantized, inputs)
    request, quantizer = _made_by(quantized, calibration)
    with _measuring(quantized, request):
        engine = _engine(quantized, request, quantizer, executor)
        return _sensitivity(quantized, engine, samples)[1]


def _sensitivity(
    quantized: QuantizedModel, engine: LayerEngine, samples: Sequence[Sample]
) -> tuple[LayerNoise, Sensitivity]:
    with quantized.made_by[0].session.progress.step("sensitivity", quantized.name):
        noise = engine.sensitivity(samples)
    return noise, _result(quantized, engine, noise, len(samples))


def suggest(
    quantized: QuantizedModel,
    samples: Sequence[Sample],
    goal: Criterion,
    *,
    runtime: str | None = None,
    calibration: Iterable[Any] | None = None,
    executor: SampleExecutor | None = None,
    seconds: float = math.inf,
) -> MixedPrecisionPlan:
    """Return the layers to leave in float, with the file converted and measured."""
    start = time.monotonic()
    request, quantizer = _made_by(quantized, calibration)
    with _measuring(quantized, request):
        engine = _engine(quantized, request, quantizer, executor)
        measure = functools.partial(
            _compare, samples=samples, runtime=runtime or quantized.runtime, executor=executor
        )
        before = measure(quantized)
        noise, known = _sensitivity(quantized, engine, samples[:FEW])
        plans = [
            Planner(
                quantized,
                request,
                goal,
                Search(each, goal, samples, noise, quantized.size_bytes, start + seconds),
                measure,
            ).plan(known, before, start)
            for each in (engine, *engine.others())
        ]
    met = [plan for plan in plans if plan.is_met]
    if met:
        return min(met, key=lambda plan: plan.quantized.size_bytes)
    return max(plans, key=lambda plan: plan.comparison.total.sqnr_db)


def _engine(
    quantized: QuantizedModel, request: Request, quantizer: Any, executor: SampleExecutor | None
) -> LayerEngine:
    if quantized.flow == "pt2e":
        return SimulatedLayers(quantized, request, quantizer, executor)
    if quantized.flow == "recipe":
        return RecipeLayers(quantized, request, quantizer, executor)
    if quantized.flow == "torchao":
        return TorchaoLayers(quantized, quantizer, executor)
    raise ValueError(
        f"{quantized.name}: the {quantized.flow} flow quantizes no layer, so none can be left in "
        "float: quantize the model with a quantizer"
    )


def _made_by(quantized: QuantizedModel, calibration: Iterable[Any] | None) -> tuple[Request, Any]:
    """Return the call of `quantize` to repeat, or refuse."""
    if quantized.made_by is None:
        raise ValueError(
            f"{quantized.name} was not made by edgeq.quantize, so it is not known how to quantize "
            "it with other layers: pass what quantize returned"
        )
    request, quantizer = quantized.made_by
    if len(request.entries) > 1:
        raise ValueError(
            f"{quantized.name} is one of the signatures "
            f"{', '.join(entry.key for entry in request.entries)}, whose file has one quantizer: "
            "quantize that signature by itself"
        )
    (entry,) = request.entries
    if request.train is not None or entry.graph is not None:
        raise ValueError(
            f"{quantized.name}: its graph was {'trained' if request.train else 'prepared'} outside "
            "of quantize, which cannot be repeated with other layers: leave layers out of the "
            "quantizer that prepared it"
        )
    if calibration is not None:
        entry = dataclasses.replace(entry, calibration=calibration)
    source = entry.calibration
    if source is not None and iter(source) is source:
        raise ValueError(
            f"{quantized.name}: its calibration samples were a {type(source).__name__}, which is "
            "used up, and the file of a plan is calibrated anew: pass calibration= again, as a "
            "list, or to this call"
        )
    entry = dataclasses.replace(fresh(entry), exports={})  # each file converts the same export
    return dataclasses.replace(request, entries=(entry,)), quantizer


def read(quantized: QuantizedModel, inputs: Iterable[Any]) -> list[Sample]:
    """Read all samples, and keep copies."""
    return [each.clone() for each in read_samples(inputs, quantized.spec, "evaluation")]


@contextmanager
def _measuring(quantized: QuantizedModel, request: Request) -> Iterator[None]:
    assert quantized.float_model is not None, "unreachable because the model was quantized here"
    session = request.session
    with (
        undisturbed(quantized.float_model, quantized.name),
        seeded(session.seed),
        torch_threads(session.threads),
        frozen_heap(),
    ):
        yield


def _compare(
    quantized: QuantizedModel,
    *,
    samples: Sequence[Sample],
    runtime: str,
    executor: SampleExecutor | None,
) -> Comparison:
    inputs = [(each.args, each.kwargs) for each in samples]
    return compare(quantized, inputs, runtime=runtime, threads=quantized.threads, engine=executor)


def _result(
    quantized: QuantizedModel, engine: LayerEngine, noise: LayerNoise, n_samples: int
) -> Sensitivity:
    base = noise.quantized.sqnr_db
    in_float = {name: each.sqnr_db for name, each in noise.in_float.items()}
    rows = [
        LayerSensitivity(
            module=module,
            ops=layer.ops,
            weights=layer.weights,
            readers=tuple(map(str, layer.readers)),
            in_float_db=in_float[module],
            quantized_db=noise.alone[module].sqnr_db,
            gain_db=in_float[module] - base,
        )
        for module, layer in engine.layers.items()
    ]
    groups = [
        GroupSensitivity(
            name=name,
            layers=layers,
            weights=sum(engine.layers[each].weights for each in layers),
            in_float_db=in_float[name],
            gain_db=in_float[name] - base,
        )
        for name, layers in engine.groups.items()
    ]
    return Sensitivity(
        name=quantized.name,
        sqnr_db=base,
        n_samples=n_samples,
        rows=tuple(sorted(rows, key=lambda row: row.quantized_db)),
        groups=tuple(sorted(groups, key=lambda row: -row.in_float_db)),
    )
