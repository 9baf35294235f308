"""Assert how much of the float model's score the file may lose."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pytest_edgeq.check.assertions.expect import failed, parse_number, swapped, table
from pytest_edgeq.check.assertions.scoring import ScoredSample, Scorer, Scores, scorer_for
from pytest_edgeq.compare.failed_samples import FailedSamples, attach_samples
from pytest_edgeq.compare.foreign import keras_output_names
from pytest_edgeq.compare.measurement import check_layout
from pytest_edgeq.compare.parallel import InFlight, begin, in_order, on_one_thread
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.reference import (
    call_unflattened,
    flatten_outputs,
    in_file_order,
    undisturbed,
)
from pytest_edgeq.compare.samples import Sample, is_tensor, iterate
from pytest_edgeq.numerics.arrays import kind_of
from pytest_edgeq.numerics.comparison import WorstSamples
from pytest_edgeq.numerics.findings import NONFINITE, OVER_BUDGET, Finding, Place
from pytest_edgeq.numerics.metrics import least_sqnr_db
from pytest_edgeq.numerics.paired import MOST_SAMPLES, RightWrong, mcnemar_p
from pytest_edgeq.progress import Step
from pytest_edgeq.quantize.mixed.engine import Noise
from pytest_edgeq.runtimes.edge import EdgeFile

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from pytest_edgeq.compare.executors.sample_executor import SampleExecutor
    from pytest_edgeq.numerics.comparison import Comparison
    from pytest_edgeq.quantize.mixed.engine import LayerEngine

Array = np.ndarray[Any, Any]


class _LabelledSample(NamedTuple):
    """A sample with its label, and its number among all samples."""

    number: int
    sample: Sample
    label: Any


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
    limit = _parse_limit(max_drop)
    if not isinstance(model, QuantizedModel):
        raise TypeError(
            f"expected a QuantizedModel, got {kind_of(model)}{swapped(labelled_inputs)}: a drop "
            "is measured against a float model, which a file alone does not have: "
            "edgeq.load(tflite, reference=model)"
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
    # Written so that NaN fails it.
    if not scores.evidence.bounds.high <= limit:
        error = drop_error(scores, limit, n_samples)
        shown = FailedSamples(model, model.runtime, None, worst.result(), n_samples)
        attach_samples(error, shown)
        raise error


def _parse_limit(max_drop: Any) -> float:
    limit = parse_number("max_drop", max_drop)
    if not 0 < limit < math.inf:
        raise ValueError(
            f"max_drop: expected more than 0, and finite, got {max_drop!r}\n"
            "cause: no number of samples shows that a drop is exactly zero\n"
            "fix: to require unchanged answers use "
            "assert_within_budget(comparison, Budget(top1_agreement=1))"
        )
    return limit


def drop_error(scores: Scores, limit: float, n_samples: int) -> AssertionError:
    """Return the error of a drop that is, or may be, beyond a limit."""
    evidence, bounds = scores.evidence, scores.evidence.bounds
    what = "drop" if scores.higher_is_better else "rise"
    items = "samples" if evidence.n == n_samples else "items"
    n, between = f"{evidence.n} {items}", f"{bounds.low:.3g} to {bounds.high:.3g}"
    least = f"max_drop={_up(bounds.high):g}" if math.isfinite(bounds.high) else ""
    end, command = f"({between}): {n} cannot settle it", ""
    if bounds.low > limit:
        end = f"({n})"
        cause = (
            f"other data of the same kind would show a {what} of more than {limit:g}, too: chance "
            "does not explain it."
        )
        fix = "edgeq.compare(model, samples) says which stage of the flow loses it"
        command = f"{least}, the least that these {items} support" if least else ""
    elif not least:
        cause = f"{n} are too few: {scores.name} is undefined on some bootstrap resamples."
        fix = "pass more, of every class"
    else:
        side = (
            "is beyond the limit, but chance may explain it"
            if evidence.drop > limit
            else f"is within the limit, but the data do not prove that the true {what} is"
        )
        cause = f"the bounds lie on both sides of {limit:g}. What was seen {side}."
        fix = f"{least} is the least that these {items} support"
        if (enough := evidence.samples_needed(limit)) is None:
            end = f"({between}): to settle it needs more than {MOST_SAMPLES:,} {items}"
        else:
            end += f", about {enough:,} would"
            fix = f"about {enough:,} {items} settle it, if as large a share of them changes; {fix}"
    float_right, edge_right = (
        f"{round(score * evidence.n)} of {evidence.n} right"
        if isinstance(evidence, RightWrong)
        else ""
        for score in (scores.float_score, scores.edge_score)
    )
    rows = [
        ("float", f"{scores.float_score:.4g}", float_right),
        ("edge", f"{scores.edge_score:.4g}", edge_right),
        (what, f"{evidence.drop:.4g}", f"{between}, each bound with 95 % confidence"),
    ]
    found = Finding(
        kind=OVER_BUDGET,
        place=Place("file", f"{what} of {scores.name}"),
        expected=f"at most {limit:g}",
        got=f"{evidence.drop:.4g} {end}",
        evidence=(*table(rows, ("", "score", f"{n}, {scores.detail}")), *_changes(scores, items)),
        causes=(cause,),
        fix=fix,
        command=command,
    )
    return failed(found, fix, *found.acceptance)


def _changes(scores: Scores, items: str) -> list[str]:
    """Return lines on the samples that changed, and on whether chance explains it."""
    evidence = scores.evidence
    if not isinstance(evidence, RightWrong):
        worst = ", ".join(f"{i} ({a:.3g} → {b:.3g})" for i, a, b in scores.worst)
        return [f"lost most: samples {worst}"] if worst else []
    if not evidence.lost + evidence.gained:
        return [f"none of {evidence.n} {items} changed: what was right, or wrong, still is"]
    p = mcnemar_p(evidence.lost, evidence.gained)
    lines = [
        f"{evidence.lost} of {evidence.n} {items} became wrong, {evidence.gained} became "
        f"right; p = {p:.2g} (exact McNemar test)"
    ]
    if scores.worst:
        more = evidence.lost - len(scores.worst)
        worst = ", ".join(str(index) for index, _, _ in scores.worst)
        lines.append(f"became wrong: samples {worst}" + (f", … and {more} more" if more else ""))
    return lines


def _up(number: float) -> float:
    """Round up to two digits."""
    if number <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(number)) - 1)
    nearest = round(number / unit)
    return (nearest if nearest * unit >= number else nearest + 1) * unit


class DropCriterion:
    """The condition of `assert_accuracy_drop`, for the search of layers to leave in float."""

    least_sqnr_db = None

    def __init__(
        self, model: QuantizedModel, labelled: Iterable[tuple[Any, Any]], metric: Any, max_drop: Any
    ) -> None:
        self._model, self._metric, self._limit = model, metric, _parse_limit(max_drop)
        self._pairs = [(each.clone(), _copied(label)) for each, label in _pairs(labelled, model)]
        self._labels = {id(sample): label for sample, label in self._pairs}
        self._expected: dict[int, tuple[Any, list[Array], list[int]]] = {}  # by the sample's id

    def __str__(self) -> str:
        return f"a drop of at most {self._limit:g} in {scorer_for(self._metric).name}"

    @property
    def samples(self) -> list[Sample]:
        """The samples, without labels."""
        return [sample for sample, _ in self._pairs]

    def simulated(
        self, engine: LayerEngine, modules: frozenset[str], samples: Sequence[Sample]
    ) -> _MeasuredDrop:
        """Score the model with some modules in float."""
        return self._scored(samples, engine.outputs(modules, samples))

    def of_file(self, comparison: Comparison) -> _MeasuredDrop:
        """Score a converted file."""
        model: QuantizedModel = comparison.quantized
        samples = self.samples
        outputs = (
            model.edge.decode(model.edge.run(model.input_names, each.arrays(), comparison.runtime))
            for each in samples
        )
        return self._scored(samples, outputs)

    def accepts(self, measured: _MeasuredDrop) -> bool:
        """Return whether the data prove that the drop is within the limit."""
        return measured.high <= self._limit

    def stricter(
        self, goal: DropCriterion, simulated: _MeasuredDrop, file: _MeasuredDrop
    ) -> DropCriterion | None:
        """Lower the limit by what the file drops more than its simulation."""
        limit = min(self._limit, goal._limit - (file.high - simulated.high))
        return self._with(limit) if 0 < limit < self._limit else None

    def looser(self, simulated: _MeasuredDrop, file: _MeasuredDrop) -> DropCriterion:
        """Raise the limit by what the file differs from its simulation."""
        return self._with(self._limit + abs(file.high - simulated.high))

    def _with(self, limit: float) -> DropCriterion:
        other = copy.copy(self)
        other._limit = limit
        return other

    def _scored(self, samples: Sequence[Sample], outputs: Iterable[Any]) -> _MeasuredDrop:
        scorer = scorer_for(self._metric)
        noise: Noise | None = None
        for index, (sample, given) in enumerate(zip(samples, outputs, strict=True)):
            pair = _LabelledSample(index, sample, self._labels[id(sample)])
            if id(sample) not in self._expected:
                self._expected[id(sample)] = _reference_outputs(self._model, sample)
            nested, expected, order = self._expected[id(sample)]
            noise = Noise(len(expected)) if noise is None else noise
            noise.add(expected, given)
            both = _like_reference(nested, expected, given, order, scorer)
            scorer.add(_score(scorer, pair, both, WorstSamples()))
        assert noise is not None, "unreachable because there are samples"
        return _MeasuredDrop(scorer.result().evidence.bounds.high, noise.sqnr_db)


class _MeasuredDrop(NamedTuple):
    """The drop that the data do not exclude, and the SQNR."""

    high: float
    sqnr_db: float


def _pairs(labelled: Any, model: QuantizedModel) -> Iterator[tuple[Sample, Any]]:
    """Read pairs once, in order, holding one at a time."""
    kind = type(labelled).__name__
    hint = "labelled_inputs: expected an iterable of pairs (sample, label), got"
    if is_tensor(labelled) or isinstance(labelled, (Mapping, str, bytes)):
        raise TypeError(f"{hint} one {kind}")
    try:
        iterator = iterate(labelled)
    except TypeError:
        raise TypeError(f"{hint} {kind}") from None
    index = -1
    for index, pair in enumerate(iterator):
        yield _bound(model, pair, index)
    if index < 0:
        used_up = (
            ". A generator yields its samples once, and this one is used up: make it anew for each "
            "use, or keep the pairs in a list"
        )
        raise ValueError(
            f"labelled_inputs: there is no sample in the {kind}"
            + (used_up if iterator is labelled else "")
        )


def _bound(model: QuantizedModel, pair: Any, index: int) -> tuple[Sample, Any]:
    """Return the bound sample and the label of a pair."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        what = f"{type(pair).__name__} of {len(pair)}" if hasattr(pair, "__len__") else pair
        raise TypeError(
            f"labelled_inputs, sample {index}: expected a pair (sample, label), got {what}; "
            "zip(samples, labels) makes pairs, and a sample of several tensors is a tuple: "
            "((x, y), label)"
        )
    return model.spec.bind(pair[0], f"labelled sample {index}"), pair[1]


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
        from pytest_edgeq.compare.executors.remote import Reading

        reading = Reading(model, labelled, pairs, lambda pair: pair[0], _bound)
        content = reading.pickled(model.runtime)
        if content is not None:

            def merge(scored: tuple[list[Any], WorstSamples]) -> None:
                for each in scored[0]:
                    scorer.add(each)
                worst.merge(scored[1])

            step = Step("accuracy", model.name, None)
            runner = partial(_AccuracyRunner, metric=metric)
            what = "the metric, or the factory of the samples,"
            reading.measure(engine, content, runner, merge, step, what=what)
            return step.done
        pairs = reading.items
    n_samples = 0
    is_remote = model.edge.runtimes.target_of(model.runtime) is not None
    in_flight = InFlight(model.threads, is_remote=is_remote)
    items: Iterator[Any] = (_LabelledSample(index, *pair) for index, pair in enumerate(pairs))

    def measure(edge: EdgeFile, pair: _LabelledSample) -> tuple[_LabelledSample, tuple[Any, Any]]:
        return pair, _run_both(model, edge, pair, scorer, in_flight.cores)

    # In this thread, since a user's metric need not be thread-safe.
    def add(pair: _LabelledSample, outputs: tuple[Any, Any]) -> None:
        nonlocal n_samples
        scorer.add(_score(scorer, pair, outputs, worst))
        n_samples += 1

    def run(pair: Any) -> None:
        add(*measure(model.edge, pair))

    if begin(items, model, in_flight.workers, run):
        # A loader may reuse the memory of samples and labels.
        kept = (
            each._replace(sample=each.sample.clone(), label=_copied(each.label)) for each in items
        )
        for pair, outputs in in_order(kept, model.edge.clone, measure, in_flight.workers):
            add(pair, outputs)
    return n_samples


def _copied(label: Any) -> Any:
    # torch refuses deepcopy of a tensor with gradients.
    if is_tensor(label) and not isinstance(label, np.ndarray):
        return label.detach().clone()
    return copy.deepcopy(label)


class _AccuracyRunner:
    def __init__(self, model: QuantizedModel, *, metric: Any) -> None:
        self._model, self._edge = model, model.edge.clone()
        self._scorer = scorer_for(metric)

    def __call__(
        self, items: Iterable[tuple[int, Any]], extra: Any
    ) -> tuple[list[Any], WorstSamples]:
        """Score samples."""
        del extra
        found: list[Any] = []
        worst = WorstSamples()
        for index, item in items:
            if found and isinstance(found[-1], ScoredSample):
                # Only the last example of all is used, which may be this chunk's last.
                found[-1] = found[-1]._replace(example=None)
            pair = _LabelledSample(index, *item)
            outputs = _run_both(self._model, self._edge, pair, self._scorer, nullcontext())
            found.append(_score(self._scorer, pair, outputs, worst))
        return found, worst


def _score(
    scorer: Scorer, pair: _LabelledSample, outputs: tuple[Any, Any], worst: WorstSamples
) -> Any:
    """Return the score of a sample without adding it to the scorer."""
    expected, got = ([value for _, value in flatten_outputs(each)] for each in outputs)
    lengths = {len(leaf) for leaf in expected if leaf.ndim}
    scored: Any = scorer.score(pair.number, outputs, pair.label, lengths)
    sqnr_db, lost = least_sqnr_db(expected, got), scorer.lost(scored)
    worst.offer(pair.number, sqnr_db, pair.sample.clone, lost=lost)
    return scored


def _run_both(
    model: QuantizedModel,
    edge: EdgeFile,
    pair: _LabelledSample,
    scorer: Scorer,
    cores: AbstractContextManager[object],
) -> tuple[Any, Any]:
    """Return both models' outputs for a sample; fail if only the file's are not finite."""
    with cores:
        nested, expected, order = _reference_outputs(model, pair.sample)
    try:
        codes = edge.run(model.input_names, pair.sample.arrays(), model.runtime)
    except (TypeError, ValueError) as error:
        raise type(error)(f"labelled sample {pair.number}: {error}") from None
    given = edge.decode(codes)
    check_layout(model, expected, given)
    names = [each.name for each in edge.signature.outputs]
    for name, want, got in zip(names, expected, given, strict=True):
        _check_output(model.name, name, pair.number, want, got)
    return _like_reference(nested, expected, given, order, scorer)


def _reference_outputs(model: QuantizedModel, sample: Sample) -> tuple[Any, list[Array], list[int]]:
    """Return the reference's outputs as it nests them, in the file's order, and that order."""
    reference = model.float_model
    assert reference is not None, "unreachable because the caller has checked it"
    nested = call_unflattened(reference, sample)
    leaves = flatten_outputs(nested)
    names = [each.name for each in model.edge.signature.outputs]
    aliases = keras_output_names(reference)
    places = [(key, np.array(place)) for place, (key, _) in enumerate(leaves)]
    order = [int(place) for place in in_file_order(places, names, model.name, aliases)]
    return nested, [leaves[place][1] for place in order], order


def _like_reference(
    nested: Any,
    expected: Sequence[Array],
    given: Sequence[Array],
    order: Sequence[int],
    scorer: Any,
) -> tuple[Any, Any]:
    """Nest the outputs of both models, in the file's order, as the reference nests them."""
    floats, others = ([values[i] for i in np.argsort(order)] for values in (expected, given))
    first, second = (
        _nested(nested, iter(_alike(values, floats)), scorer.wants_tensors)
        for values in (floats, others)
    )
    return first, second


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
            fix="edgeq.compare(model, samples) names the first stage that has them",
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
