"""Measure samples in this process, or by an executor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pytest_edgeq import litert
from pytest_edgeq.compare.executors.remote import (
    PickledReference,
    Reading,
    pickled_reference,
    unpickled_reference,
)
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.progress import Step
from pytest_edgeq.quantize.mixed.engine import Expected

if TYPE_CHECKING:
    from pytest_edgeq.compare.executors.engines import SampleExecutor


def measured(
    model: QuantizedModel,
    expected: Expected,
    graph: litert.MixedGraph,
    samples: Sequence[Sample],
    make_runner: Callable[[QuantizedModel, Expected, litert.MixedGraph], Any],
    executor: SampleExecutor | None,
) -> Any:
    """Return the sums over all samples; those of workers are merged."""
    if executor is not None:
        reading = Reading(model, samples, iter(samples))
        content = reading.pickled(model.runtime)
        if content is not None:
            found: list[Any] = []

            def merge(sums: Any) -> None:
                if found:
                    found[0].merge(sums)
                else:
                    found.append(sums)

            step = Step("sensitivity", model.name, len(samples))
            on_worker = functools.partial(
                _runner, graph=pickled_reference(graph.module), make_runner=make_runner
            )
            reading.measure(executor, content, on_worker, merge, step)
            return found[0]
    return make_runner(model, expected, graph)(enumerate(samples), None)


def _runner(
    model: QuantizedModel,
    *,
    graph: PickledReference,
    make_runner: Callable[[QuantizedModel, Expected, litert.MixedGraph], Any],
) -> Any:
    return make_runner(model, Expected(model), litert.MixedGraph(unpickled_reference(graph)))
