"""
Find the op to blame: compare each op with its float counterpart.

- `float_forms` chooses the float form and finds the constants that the file's were rounded from;
  `structure` pairs the ops of both, `single_ops` runs ops alone, `execution` a float op on the
  inputs of the file's op.
- `against_torch` compares the float form with torch, `constant_rounding` bounds the rounding of
  constants, `repairs` finds the op whose replacement fixes the form, `origin` compares with the
  converted file.
- `localizer` measures samples, `measured` accumulates the errors of a tensor, `on_workers`
  measures by an executor; `constant_checks` finds wrong constants, `consumers` checks ranges by the
  ops that read them, `resolution` finds the tensor whose few codes lose the change of an input.
- `language` yields the inputs of a language model's step at some positions of sequences.
- `mistakes` and `cause` choose the op to blame and the words; `rows` holds the results;
  `source_lines` finds the line of the model that calls an op.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

from pytest_edgeq.localize.rows import LayerErrors
from pytest_edgeq.numerics.findings import FILE, NOT_LOCALIZED, OP_IN_FLOAT, WRONG_RESULT, Finding

if TYPE_CHECKING:
    from pytest_edgeq.compare.executors.sample_executor import SampleExecutor
    from pytest_edgeq.compare.quantized import QuantizedModel
    from pytest_edgeq.compare.samples import Sample
    from pytest_edgeq.numerics.comparison import Comparison
    from pytest_edgeq.progress import Progress, Step

OnLocalized: TypeAlias = Callable[[LayerErrors, float], None]


def localize(
    quantized: QuantizedModel,
    inputs: Iterable[Any],
    *,
    runtime: str,
    threads: int,
    progress: Progress,
    engine: SampleExecutor | None = None,
    positions: Sequence[int] | None = None,
) -> LayerErrors:
    """Measure the error of every op of a file on the op's own inputs."""
    from pytest_edgeq.compare.executors.remote import Reading
    from pytest_edgeq.compare.language.model import LanguageModel
    from pytest_edgeq.compare.samples import read_samples
    from pytest_edgeq.localize.localizer import Localizer
    from pytest_edgeq.localize.on_workers import localize_by

    def measure(model: QuantizedModel, inputs: Iterable[Any]) -> LayerErrors:
        step = progress.step("localize", model.name, inputs)
        with step as running, Localizer(model, runtime) as localizer:
            samples = read_samples(inputs, model.spec, "evaluation")
            is_measured = False
            if engine is not None:
                reading = Reading(model, inputs, samples)
                is_measured = localize_by(engine, localizer, runtime, reading, running)
                samples = reading.items
            if not is_measured:
                localizer.update_all(running.each(samples), threads)
            errors = _with_advice(localizer.result())
        # The line of the model's code, without the model.
        return replace(errors, finding=errors.with_source(errors.finding), source_of=None)

    if not isinstance(quantized, LanguageModel):
        if positions is not None:
            raise ValueError(f"positions: {quantized.name} is no language model")
        return measure(quantized, inputs)
    from pytest_edgeq.localize.language import decoder_of, embedder_of, states

    decoder, embedder = decoder_of(quantized), embedder_of(quantized)
    sequences = read_samples(inputs, quantized.spec, "evaluation")
    embedded = None if embedder is None else list[Any]()
    errors = measure(decoder, states(quantized, sequences, positions, runtime, embedded))
    if embedder is not None and embedded and errors.culprit is None:
        of_embedder = measure(embedder, embedded)
        errors = errors if of_embedder.culprit is None else of_embedder
    return errors


def with_explanation(
    comparison: Comparison,
    seconds: float,
    progress: Progress,
    on_localized: OnLocalized | None = None,
) -> Comparison:
    """
    Return a comparison whose `explain` localizes on its worst samples, once.

    It takes about `seconds` at most; with 0 there is no explanation. `on_localized` is called with
    the errors of each op and the seconds that they took.
    """
    if not seconds:
        return comparison
    name, worst = comparison.quantized.name, comparison.worst_samples

    def explain() -> Finding:
        with progress.step("localize", name, worst) as step:
            return _explain(comparison, step, seconds, on_localized)

    return replace(comparison, explain=functools.cache(explain))


def _worst(comparison: Comparison) -> tuple[QuantizedModel, Iterable[Sample], str]:
    """Return what to localize on to explain a failure; of a language model the worst position."""
    from pytest_edgeq.compare.language.model import LanguageModel
    from pytest_edgeq.compare.samples import read_samples

    model: QuantizedModel = comparison.quantized
    samples = [each.inputs for each in comparison.worst_samples]
    if not isinstance(model, LanguageModel):
        return model, samples, ""
    from pytest_edgeq.localize.language import decoder_of, states

    decoder = decoder_of(model)
    position = comparison.positions["quantization"].worst[0]
    ends = [each.arrays()[0].size - 1 for each in samples]
    found = chain.from_iterable(
        states(model, [each], [min(position, end)]) for each, end in zip(samples, ends, strict=True)
    )
    return decoder, read_samples(found, decoder.spec, "evaluation"), f", at position {position}"


def _explain(
    comparison: Comparison,
    step: Step,
    seconds: float,
    on_localized: OnLocalized | None,
) -> Finding:
    """Localize on a few samples to explain a failure; an error is an explanation, too."""
    from pytest_edgeq.compare.language.model import LanguageModel
    from pytest_edgeq.localize.cause import accumulated
    from pytest_edgeq.localize.localizer import Localizer

    conversion, quantization = comparison.conversion, comparison.quantization
    is_language = isinstance(comparison.quantized, LanguageModel)
    if is_language and conversion and quantization and conversion.sqnr_db < quantization.sqnr_db:
        return Finding(
            kind=NOT_LOCALIZED,
            place=FILE,
            symptom="not known: ops are compared with those of the float file, whose own error "
            "(conversion) exceeds that of quantization",
        )
    start = time.monotonic()
    count, left = 0, False
    try:
        quantized, samples, at = _worst(comparison)
        with Localizer(quantized) as localizer:
            for sample in step.each(iter(samples)):
                left = count > 0 and time.monotonic() - start > seconds
                if left:
                    break
                localizer.update(sample)
                count += 1
            errors = localizer.result()
    except Exception as error:  # e.g. from torch.export, or a reference that is no module
        first = (str(error).splitlines() or [""])[0]
        return Finding(
            kind=NOT_LOCALIZED,
            place=FILE,
            symptom=f"not known, as localizing failed: {type(error).__name__}: {first}",
        )
    if on_localized is not None:
        on_localized(errors, time.monotonic() - start)
    on = f"{count} sample{'s' if count > 1 else ''}"
    stopped = f", stopped after {seconds:g} s" if left else ""
    other = errors.of_another_model
    found = errors.with_source(_with_advice(errors).finding)
    lines = [*found.evidence]
    if found.kind == OP_IN_FLOAT:  # an op in float loses nothing
        found, lines = accumulated(errors.rows), [found.sentence]
    return replace(
        found,
        causes=(*found.causes, *([other] if other else [])),
        evidence=(
            *lines,
            f"localized on the worst {on}{at}{stopped}:",
            *errors.overview.splitlines(),
        ),
    )


def _with_advice(errors: LayerErrors) -> LayerErrors:
    """Add the advice to run a wrong result on another runtime as well."""
    if errors.finding.kind != WRONG_RESULT or errors.finding.fix:
        return errors
    fix = "run the file on another runtime to tell whether the kernel or the file is wrong"
    return replace(errors, finding=replace(errors.finding, fix=fix))
