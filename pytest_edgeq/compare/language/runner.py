"""Run sequences through a language model's files and its reference; measure them by position."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.compare.language.model import LanguageModel
from pytest_edgeq.compare.language.stepping import CacheSession, same_db
from pytest_edgeq.compare.measurement import sides_of
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.reference import as_tensor, call_reference, no_grad, torch_module
from pytest_edgeq.compare.samples import Sample, as_array
from pytest_edgeq.numerics.comparison import WorstSamples
from pytest_edgeq.numerics.findings import PREFILL_DIFFERS, Finding, Harm, Place
from pytest_edgeq.numerics.samples import EvaluatedLedger
from pytest_edgeq.numerics.static_health import UNKNOWN, Calibration
from pytest_edgeq.numerics.token_errors import CacheErrors, TokenAccumulator, TokenErrors

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Pass:
    """The logits and caches of one side for one sequence."""

    logits: Array  # [tokens, vocabulary], of `decode` alone, or of the reference
    cache: Mapping[str, Array] = field(default_factory=dict)  # by name, [tokens, values]
    # of a file: the logits of the last tokens behind two prefills, and the cache of all
    after_prefill: Array | None = None
    prefilled: Mapping[str, Array] = field(default_factory=dict)
    same_db: float = 0.0  # least SQNR of one cache against the other


@dataclass(frozen=True, slots=True)
class SequenceOutputs:
    """Outputs of one sequence by side: `float`, `float_tflite`, `edge`."""

    tokens: Array
    values: Mapping[str, Pass]

    def checked(self, where: str) -> SequenceOutputs:
        """Check that logits and cache tensors have the shapes of the file's on all sides."""
        file = self.values["edge"]
        for side, found in self.values.items():
            pairs: dict[str, tuple[Array | None, Array]] = {"logits": (found.logits, file.logits)}
            if found.cache:  # not of a callable
                pairs |= {key: (found.cache.get(key), each) for key, each in file.cache.items()}
            for what, (given, expected) in pairs.items():
                if given is None or given.shape != expected.shape:
                    raise ValueError(
                        f"{where}: {what}: the file has shape {list(expected.shape)}, "
                        f"{_SIDES[side]} {'none' if given is None else list(given.shape)}"
                        "\ncause: the file was made from another model, or its vocabulary is padded"
                    )
        return self


_SIDES = {"float": "the reference", "float_tflite": "the float file", "edge": "the file"}

_TURN = 3  # tokens that are decoded between two prefills


def file_pass(session: CacheSession, tokens: Array) -> Pass:
    """
    Run a sequence through a file twice: by `decode` alone, and as a conversation of two turns.

    The first half is read by prefill signatures, then 3 tokens by `decode`, then more by prefill
    signatures that begin behind them, then the last eighth by `decode`.
    """
    session.reset()
    logits = session.decode_all(tokens)
    cache = {name: session.positions(name) for name in session.cache}
    n = len(tokens)
    if not session.layout.prefills or n <= _TURN:
        return Pass(logits, cache)
    half, last = n // 2, n - max(n // 8, 2)
    turn = min(half + _TURN, last)
    session.read(tokens[:half])
    for token in tokens[half:turn]:
        session.feed(session.layout.decode, [token])
    session.prefill(tokens[turn:last])
    after = session.decode_all(tokens[session.position :])
    prefilled = {name: session.positions(name) for name in session.cache}
    return Pass(logits, cache, after, prefilled, same_db(session.layout))


class LanguageRunner:
    """A file, its float file and its reference with interpreters of their own; not thread-safe."""

    def __init__(self, model: LanguageModel, runtime: str) -> None:
        self._model, self._runtime = model, runtime
        sides = {"float_tflite": model.float_steps, "edge": model.steps}
        self._sessions = {
            side: CacheSession(layout, runtime)
            for side, layout in sides.items()
            if layout is not None
        }

    def run(self, sample: Sample, index: int) -> SequenceOutputs:
        """Run one sequence."""
        model, tokens = self._model, sample.arrays()[0][0]
        values = {side: file_pass(session, tokens) for side, session in self._sessions.items()}
        if model.float_model is None:
            values["float"] = values["float_tflite"]
        else:
            values["float"] = reference_pass(model.float_model, sample, model.steps.axes)
        return SequenceOutputs(tokens, values).checked(f"{model.name}, evaluation sample {index}")


def new_cache(reference: Callable[..., Any]) -> Any:
    """Return an empty cache for a Hugging Face module, None for any other callable."""
    if torch_module(reference) is not reference or not hasattr(reference, "config"):
        return None
    from transformers.cache_utils import DynamicCache

    # Without a configuration no layer drops what lies outside of its window.
    return DynamicCache()


def call_with_cache(module: Any, ids: Array, cache: Any) -> Any:
    """Run a Hugging Face module on token ids [1, length] behind those in the cache."""
    # `past_key_values` is the argument's name in older releases of transformers.
    names = inspect.signature(module.forward).parameters
    name = "cache" if "cache" in names else "past_key_values"
    return module(input_ids=as_tensor(ids), use_cache=True, **{name: cache})


def reference_pass(reference: Callable[..., Any], sample: Sample, axes: Mapping[str, int]) -> Pass:
    """Run a Hugging Face module, or any callable from token ids to logits, over a sequence."""
    held = new_cache(reference)
    if held is None:
        return Pass(_rows(call_reference(reference, sample)[0][1]))
    with no_grad():
        found = call_with_cache(reference, sample.arrays()[0], held)
    cache = {}
    for tensor in axes:
        kind, layer = tensor.split("_")[-2:]
        if int(layer) >= len(held.layers):
            continue
        of_layer = held.layers[int(layer)]
        # [1, heads, tokens, size of a head]
        values = as_array(of_layer.keys if kind == "k" else of_layer.values)[0]
        cache[tensor] = np.moveaxis(values, 1, 0).reshape(values.shape[1], -1).astype(np.float32)
    return Pass(_rows(as_array(found.logits)), cache)


def _rows(logits: Array) -> Array:
    return logits.reshape(-1, logits.shape[-1])


DIFFERS = (
    "prefill and decode must leave the same cache: export the file again with other "
    "prefill_lengths=, and report it to litert-torch"
)


class LanguageMeasurement:
    """Errors of every stage by position, over a part of the sequences; mergeable."""

    def __init__(self, model: QuantizedModel) -> None:
        self._sides = sides_of(model)
        self._stages = {name: TokenAccumulator() for name in self._sides}
        self._caches = {name: CacheErrors() for name in self._sides}
        # by side, the cache behind a prefill beside that of `decode` alone
        self._handover = {side: CacheErrors() for side in ("float_tflite", "edge")}
        self._same: dict[str, float] = {}  # by side, the least SQNR of its cache in dB
        self.worst = WorstSamples()
        self.evaluated = EvaluatedLedger()
        self.overlap = 0
        self.ranges: list[tuple[float, float]] = []

    def update(self, index: int, sample: Sample, outcome: SequenceOutputs) -> None:
        """Add one sequence."""
        arrays = sample.arrays()
        following = np.append(outcome.tokens[1:], -1)
        for stage, accumulator in self._stages.items():
            reference, actual = (outcome.values[side] for side in self._sides[stage])
            errors = TokenErrors.measure(index, reference.logits, actual.logits, following)
            decibels = accumulator.add("logits", errors)
            if actual.after_prefill is not None:
                behind = reference.logits
                if reference.after_prefill is not None:
                    behind = reference.after_prefill
                rows = min(len(behind), len(actual.after_prefill))
                start = len(following) - rows
                errors = TokenErrors.measure(
                    index,
                    behind[-rows:],
                    actual.after_prefill[-rows:],
                    following[start:],
                    start=start,
                )
                # Unlike `min`, it returns NaN where either is.
                decibels = float(np.minimum(decibels, accumulator.add("after_prefill", errors)))
            if stage == "total":
                self.worst.offer(index, decibels, sample.clone)
            self._caches[stage].add(reference.cache, actual.cache)
        for side, errors_of_side in self._handover.items():
            found = outcome.values.get(side)
            if found is not None and found.prefilled:
                self._same[side] = found.same_db
                errors_of_side.add(found.cache, found.prefilled)
        self.evaluated.add(index, arrays)
        self.ranges = [(0.0, 0.0)] * len(arrays)

    def merge(self, other: LanguageMeasurement) -> None:
        """Add all sequences of another measurement."""
        for name, accumulator in self._stages.items():
            accumulator.merge(other._stages[name])
            self._caches[name].merge(other._caches[name])
        for side, errors in self._handover.items():
            errors.merge(other._handover[side])
        self._same |= other._same
        self.worst.merge(other.worst)
        self.evaluated.merge(other.evaluated)
        self.ranges = self.ranges or other.ranges

    def results(self) -> dict[str, Any]:
        """Return the errors of every stage, by attribute of a `Comparison`."""
        stages: dict[str, Any] = {name: each.stage() for name, each in self._stages.items()}
        positions = {name: each.positions() for name, each in self._stages.items()}
        caches = {name: each for name, each in self._caches.items() if each}
        return {**stages, "positions": positions, "caches": caches}

    def findings(self, calibration: Calibration = UNKNOWN) -> list[Finding]:
        """Return a finding where the cache behind a prefill is another than that of `decode`."""
        del calibration
        return [
            Finding(
                kind=PREFILL_DIFFERS,
                place=Place("file", _SIDES[side]),
                expected="behind prefill signatures the cache that decode alone leaves",
                got=str(bad),
                harm=Harm.decibels(least - bad.sqnr_db),
                fix=DIFFERS,
            )
            for side, errors in self._handover.items()
            if (least := self._same.get(side, 0.0))
            and (bad := errors.first_below(least)) is not None
        ]
