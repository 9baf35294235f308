"""Run both models on a labelled sample and score their outputs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from pytest_edgeq.check.assertions.expect import failed
from pytest_edgeq.check.assertions.scoring.function import CallableScorer
from pytest_edgeq.check.assertions.scoring.metric import MetricScorer
from pytest_edgeq.check.assertions.scoring.scores import Scorer
from pytest_edgeq.compare.foreign import is_keras, keras_output_names
from pytest_edgeq.compare.measurement import check_layout
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.reference import call_unflattened, flatten_outputs, in_file_order
from pytest_edgeq.compare.samples import Sample, is_tensor
from pytest_edgeq.numerics.comparison import WorstSamples
from pytest_edgeq.numerics.findings import NONFINITE, Finding, Place
from pytest_edgeq.numerics.metrics import least_sqnr_db
from pytest_edgeq.runtimes.edge import EdgeFile

# pytest looks for it among a frame's globals, too: no frame of this module is shown.
__tracebackhide__ = True

Array = np.ndarray[Any, Any]


def scorer_for(metric: Any) -> Scorer:
    """Return the scorer for a callable or a Metric."""
    if isinstance(metric, type) or not callable(metric):
        way_out = (
            f"type: make one, {metric.__name__}(…)"
            if isinstance(metric, type)
            else f"{type(metric).__name__} {metric!r}"
        )
        raise TypeError(
            "metric: expected a callable metric(outputs, label) that gives a bool or a number, or "
            f"a torchmetrics Metric, got a {way_out}"
        )
    if all(hasattr(metric, name) for name in ("update", "compute", "reset")):
        return MetricScorer(metric)
    return CallableScorer(metric)


def bound_pair(model: QuantizedModel, pair: Any, index: int) -> tuple[Sample, Any]:
    """Return the bound sample and the label of a pair."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        what = f"{type(pair).__name__} of {len(pair)}" if hasattr(pair, "__len__") else pair
        raise TypeError(
            f"labelled_inputs, sample {index}: expected a pair (sample, label), got {what}; "
            "zip(samples, labels) makes pairs, and a sample of several tensors is a tuple: "
            "((x, y), label)"
        )
    return model.spec.bind(pair[0], f"labelled sample {index}"), pair[1]


@dataclass(frozen=True, slots=True)
class PairedOutputs:
    """Outputs of both models for one labelled sample."""

    index: int
    pair: tuple[Sample, Any]
    outputs: tuple[Any, Any]


def score(scorer: Scorer, outcome: PairedOutputs, worst: WorstSamples) -> Any:
    """Return the score of a sample without adding it to the scorer."""
    index, (sample, label) = outcome.index, outcome.pair
    expected, got = ([value for _, value in flatten_outputs(each)] for each in outcome.outputs)
    lengths = {len(leaf) for leaf in expected if leaf.ndim}
    scored = scorer.score(index, outcome.outputs, label, lengths)
    lost = scorer.lost(scored)
    worst.offer(index, least_sqnr_db(expected, got), sample.clone, lost=lost)
    return scored


def run_both(
    model: QuantizedModel,
    edge: EdgeFile,
    item: tuple[int, tuple[Sample, Any]],
    scorer: Scorer,
    cores: AbstractContextManager[object],
) -> PairedOutputs:
    """Run both models on a sample; fail if only the file is not finite."""
    index, pair = item
    sample = pair[0]
    reference = model.float_model
    assert reference is not None, "unreachable because the caller has checked it"
    with cores:
        nested = call_unflattened(reference, sample)
    leaves = flatten_outputs(nested)
    wanted = [border.name for border in model.edge.signature.outputs]
    aliases = keras_output_names(reference) if is_keras(reference) else ()
    places = [(key, np.array(place)) for place, (key, _) in enumerate(leaves)]
    order = [int(place) for place in in_file_order(places, wanted, model.name, aliases)]
    try:
        codes = edge.run(model.input_names, sample.arrays(), model.runtime)
    except (TypeError, ValueError) as error:
        raise type(error)(f"labelled sample {index}: {error}") from None
    given = edge.decode(codes)
    expected = [leaves[place][1] for place in order]
    check_layout(model, expected, given)
    for name, want, got in zip(wanted, expected, given, strict=True):
        _check_output(model.name, name, index, want, got)
    ordered = dict(zip(order, given, strict=True))
    both = ([value for _, value in leaves], [ordered[place] for place in range(len(leaves))])
    first, second = (
        _nested(nested, iter(_alike(values, both[0])), scorer.wants_tensors) for values in both
    )
    return PairedOutputs(index, pair, (first, second))


def _check_output(model: str, name: str, index: int, expected: Array, actual: Array) -> None:
    if actual.dtype.kind != "f" or expected.dtype.kind != "f":
        return
    broken = int(np.count_nonzero(~np.isfinite(actual) & np.isfinite(expected)))
    if broken:
        place, got = Place("output", name), f"{broken} of {actual.size} NaN or infinite"
        says = f"labelled sample {index}: expected finite values, got {got}"
        found = Finding(
            kind=NONFINITE,
            place=place,
            expected="finite values",
            got=got,
            symptom=says,
            headline=f"{model}: {place}, {says}",
            causes=("the float model is finite there, so the file is broken whatever it scores.",),
            fix="edgeq.compare(model, samples) names the stage that first gives them",
        )
        raise failed(found, found.fix)


def _alike(values: list[Array], reference: list[Array]) -> Iterator[Array]:
    """Yield copies with the reference's dtypes, since litert-torch stores int64 as int32."""
    for value, wanted in zip(values, reference, strict=True):
        kinds = {value.dtype.kind, wanted.dtype.kind}
        same = len(kinds) == 1 or kinds == {"i", "u"}
        yield np.array(value, dtype=wanted.dtype if same else value.dtype, order="C")


def _nested(like: Any, leaves: Iterator[Array], wants_tensors: bool) -> Any:
    """Nest arrays as these outputs are nested, as tensors if these are."""
    if isinstance(like, Mapping):
        filled = {key: _nested(value, leaves, wants_tensors) for key, value in like.items()}
        if type(like) is dict or not isinstance(like, MutableMapping):
            return filled
        # A model output class also has its values as attributes.
        other: Any = copy.copy(like)
        for key, value in filled.items():
            other[key] = value
        return other
    if isinstance(like, (tuple, list)):
        items = [_nested(value, leaves, wants_tensors) for value in like]
        return type(like)(*items) if hasattr(like, "_fields") else type(like)(items)
    leaf = next(leaves)
    if wants_tensors or (is_tensor(like) and not isinstance(like, np.ndarray)):
        import torch

        return torch.from_numpy(leaf)
    return leaf
