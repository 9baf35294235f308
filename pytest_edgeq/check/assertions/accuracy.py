"""Assert how much of the float model's score the file may lose."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_edgeq.check.assertions.expect import parse_number
from pytest_edgeq.check.assertions.scoring.both_models import (
    PairedOutputs,
    bound_pair,
    run_both,
    score,
    scorer_for,
)
from pytest_edgeq.check.assertions.scoring.drop_error import drop_error
from pytest_edgeq.check.assertions.scoring.scores import Scorer
from pytest_edgeq.compare.failed_samples import FailedSamples, attach_samples
from pytest_edgeq.compare.parallel import AtOnce, in_order, on_one_thread, state_of
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.reference import undisturbed
from pytest_edgeq.compare.samples import Sample, is_tensor
from pytest_edgeq.numerics.comparison import WorstSamples
from pytest_edgeq.runtimes.edge import EdgeFile

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from pytest_edgeq.compare.executors.engines import SampleExecutor

# pytest looks for it among a frame's globals, too: no frame of this module is shown.
__tracebackhide__ = True


def assert_accuracy_drop(
    model: QuantizedModel,
    labelled_inputs: Iterable[tuple[Any, Any]],
    metric: Callable[[Any, Any], Any],
    max_drop: float = 0.01,
    *,
    executor: Executor | None = None,
) -> None:
    """
    Assert that the file scores at most `max_drop` worse than the float model.

    Both are scored on the same samples. It passes if the data prove it: the upper bound of the
    drop, which holds with 95 % confidence, must lie within `max_drop`. If the data prove neither
    that nor the opposite it fails, and says how many samples are needed: no drop at all on 100
    samples still leaves 3 % possible, and a limit of 0.01 needs 299 samples that all agree.

    Args:
        model: From `edgeq.quantize`, or from `edgeq.load` with a reference.
        labelled_inputs: Pairs (sample, label), read once, in order, one held at a time; samples as
            for `edgeq.compare`.
        metric: A callable `metric(outputs, label)` that returns a bool or a number, more is better,
            or a tensor of one for each item of the sample's batch. It is called for both models,
            with outputs in the reference's form: the same nesting, dtypes and layout, torch tensors
            if the reference returns those. Or a torchmetrics `Metric`, updated with (outputs,
            label); if its `higher_is_better` is False the drop is a rise.
        max_drop: More than 0, in the metric's unit: 0.01 of an accuracy is one in a hundred.
        executor: Any `concurrent.futures.Executor`, whose workers run both models and the metric;
            that of the model's session by default. The scores are equal within 1e-12.

    Raises:
        AssertionError: The file scores worse by more, or the data are inconclusive; or the file
            returns NaN or infinities and the float model does not.
        TypeError: Not a QuantizedModel, no pairs, a sample or a score of another kind, or, with an
            executor, a reference or a metric that cannot be sent to its workers.
        ValueError: No reference, no samples, samples that do not fit, outputs of another shape, a
            score that is not finite, or a float model that has nothing right.
        RuntimeError: The kernels cannot allocate the file.
    """
    limit = parse_number("max_drop", max_drop)
    if not 0 < limit < math.inf:
        raise ValueError(
            f"max_drop: expected more than 0, and finite, got {max_drop!r}\n"
            "cause: no number of samples shows that a drop is exactly zero\n"
            "fix: that each sample's answer stays the same is "
            "assert_within_budget(comparison, Budget(top1_agreement=1))"
        )
    if not isinstance(model, QuantizedModel):
        raise TypeError(
            f"expected a QuantizedModel, got {type(model).__name__}: a drop is measured against a "
            "float model, which a file alone does not have: edgeq.load(tflite, reference=model)"
        )
    if model.float_model is None:
        raise ValueError(
            f"{model.name} has no float model to lose accuracy against: load it with "
            "edgeq.load(tflite, reference=model)"
        )
    scorer = scorer_for(metric)
    engine = model.engine(executor)
    model.edge.restart()
    worst = WorstSamples()
    with undisturbed(model.float_model, model.name), on_one_thread():
        n_samples = _score_all(model, labelled_inputs, metric, scorer, engine, worst)
    scores = scorer.result()
    bounds = scores.evidence.bounds
    # Written so that NaN fails it.
    if not bounds.high <= limit:
        error = drop_error(scores, limit, n_samples)
        shown = FailedSamples(model, model.runtime, None, worst.result(), n_samples)
        attach_samples(error, shown)
        raise error


def _pairs(labelled: Any, model: QuantizedModel) -> Iterator[tuple[Sample, Any]]:
    """Read pairs once, in order, holding one at a time."""
    kind = type(labelled).__name__
    hint = "expected an iterable of pairs (sample, label)"
    if is_tensor(labelled) or isinstance(labelled, (Mapping, str, bytes)):
        raise TypeError(f"labelled_inputs: {hint}, got one {kind}")
    try:
        iterator = iter(labelled)
    except TypeError:
        raise TypeError(f"labelled_inputs: {hint}, got {kind}") from None
    index = -1
    for index, pair in enumerate(iterator):
        yield bound_pair(model, pair, index)
    if index < 0:
        used_up = (
            ". A generator gives its samples once, and this one is used up: make it anew for each "
            "use, or keep the pairs in a list"
        )
        raise ValueError(
            f"labelled_inputs: there is no sample in the {kind}"
            + (used_up if iterator is labelled else "")
        )


def _score_all(
    model: QuantizedModel,
    labelled: Any,
    metric: Any,
    scorer: Scorer,
    engine: SampleExecutor | None,
    worst: WorstSamples,
) -> int:
    """Score all samples, in order, and return their number."""
    pairs = _pairs(labelled, model)
    if engine is not None:
        from pytest_edgeq.check.assertions.scoring.on_workers import score_by
        from pytest_edgeq.compare.executors.remote import Reading

        reading = Reading(model, labelled, pairs, lambda pair: pair[0])
        content = reading.pickled(model.runtime)
        if content is not None:
            return score_by(engine, content, metric, reading, model.name, scorer, worst)
        pairs = reading.items()
    n_samples = 0
    # Scored in this thread, since a user's metric need not be thread-safe.
    for outcome in _paired_outputs(model, enumerate(pairs), scorer):
        scorer.add(score(scorer, outcome, worst))
        n_samples += 1
    return n_samples


def _paired_outputs(
    model: QuantizedModel, pairs: Iterator[tuple[int, tuple[Sample, Any]]], scorer: Scorer
) -> Iterator[PairedOutputs]:
    """Yield every sample with both models' outputs, in order, on the model's cores."""
    is_remote = model.edge.runtimes.target_of(model.runtime) is not None
    at_once = AtOnce(model.threads, is_remote=is_remote)

    def measure(edge: EdgeFile, item: tuple[int, tuple[Sample, Any]]) -> PairedOutputs:
        return run_both(model, edge, item, scorer, at_once.cores)

    before = state_of(model) if at_once.workers > 1 else None
    for item in itertools.islice(pairs, 1):
        yield measure(model.edge, item)
    if before is None or before != state_of(model):
        for item in pairs:
            yield measure(model.edge, item)
        return
    # A loader may reuse the memory of samples and labels.
    kept = ((index, (sample.clone(), _copied(label))) for index, (sample, label) in pairs)
    yield from in_order(kept, model.edge.clone, measure, at_once.workers)


def _copied(label: Any) -> Any:
    # torch refuses deepcopy of a tensor with gradients.
    if is_tensor(label) and not isinstance(label, np.ndarray):
        return label.detach().clone()
    return copy.deepcopy(label)
