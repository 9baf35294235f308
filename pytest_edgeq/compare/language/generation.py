"""Generate greedily with a language model's file and with its reference, and compare the tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pytest_edgeq.compare.language.model import LanguageModel, as_sequences
from pytest_edgeq.compare.language.runner import call_with_cache, new_cache, reference_pass
from pytest_edgeq.compare.language.stepping import CacheSession
from pytest_edgeq.compare.reference import no_grad
from pytest_edgeq.compare.samples import Sample, as_array
from pytest_edgeq.numerics.findings import aligned, counted
from pytest_edgeq.numerics.metrics import json_number
from pytest_edgeq.numerics.token_errors import TokenErrors
from pytest_edgeq.progress import Progress

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """
    The first step at which a file and its reference choose different tokens.

    Attributes:
        step: Tokens that were generated before it.
        token: Choice of the file.
        expected: Choice of the reference.
        margin: Between the two greatest logits of the reference at this step.
        error: RMS error of the file's logits at this step.
        is_near_tie: Whether the margin is at most twice the usual error of this sequence, so that
            rounding decides; `top1_agreement` does not count such a position either.
    """

    step: int
    token: int
    expected: int
    margin: float
    error: float
    is_near_tie: bool


@dataclass(frozen=True, slots=True)
class Continuation:
    """
    The tokens that follow one prompt.

    Attributes:
        prompt: Token ids of the prompt.
        tokens: Token ids that the file generates.
        reference: Token ids that the reference generates.
        difference: The first difference; None where all are equal.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    reference: tuple[int, ...]
    difference: Difference | None

    @property
    def first_difference(self) -> int | None:
        """The first step at which the tokens differ; None where all are equal."""
        return None if self.difference is None else self.difference.step


@dataclass(frozen=True, slots=True)
class Generation:
    """
    Greedy tokens of a file and of its reference, returned by `edgeq.generate`.

    Attributes:
        name: Of the model.
        reference: Name of the reference in texts.
        runtime: What ran the file.
        steps: Tokens that were generated after each prompt.
        prompts: What followed each prompt.
    """

    name: str
    reference: str
    runtime: str
    steps: int
    prompts: tuple[Continuation, ...]

    @property
    def first_difference(self) -> int | None:
        """The first step at which the tokens of any prompt differ; None where all are equal."""
        return min((at.step for _, at in self._differing()), default=None)

    def _differing(self) -> list[tuple[int, Difference]]:
        """Return the index and the difference of each prompt that has one."""
        found = enumerate(each.difference for each in self.prompts)
        return [(index, each) for index, each in found if each is not None]

    def __str__(self) -> str:
        of_all = f"{counted(len(self.prompts), 'prompt')} × {counted(self.steps, 'step')}"
        differing = self._differing()
        if not differing:
            return f"{self.name}: {of_all}: all tokens are those of {self.reference}"
        rows = [("prompt", "length", "step", "token", "expected", "margin", "error", "")]
        for index, at in differing:
            numbers = (index, len(self.prompts[index].prompt), at.step, at.token, at.expected)
            figures = (f"{at.margin:.3g}", f"{at.error:.3g}", "near-tie" * at.is_near_tie)
            rows.append((*map(str, numbers), *figures))  # type: ignore[arg-type] # as many
        head = (
            f"{self.name}: {of_all}: {counted(len(differing), 'prompt')} with other tokens than "
            f"{self.reference}, first at step {self.first_difference}"
        )
        return "\n".join([head, *aligned(rows, numeric=range(7))])

    def to_dict(self) -> dict[str, Any]:
        """Return plain, JSON-able data."""
        return {
            "name": self.name,
            "reference": self.reference,
            "runtime": self.runtime,
            "steps": self.steps,
            "first_difference": self.first_difference,
            "prompts": [
                {
                    "prompt": list(each.prompt),
                    "tokens": list(each.tokens),
                    "reference": list(each.reference),
                    "first_difference": each.first_difference,
                    "margin": None if at is None else json_number(at.margin),
                    "error": None if at is None else json_number(at.error),
                    "near_tie": None if at is None else at.is_near_tie,
                }
                for each in self.prompts
                for at in [each.difference]
            ],
        }


class _OfFile(CacheSession):
    """A file that reads the prompt as a runtime does, then token by token."""

    def greedy(self, prompt: Array, steps: int) -> list[int]:
        """Return the most likely tokens after a prompt."""
        self.read(prompt[:-1])
        found = [int(prompt[-1])]
        while len(found) <= steps:
            found.append(int(self.decode_all(found[-1:])[-1].argmax()))
        return found[1:]

    def logits(self, prompt: Array, tokens: list[int]) -> Array:
        """Return the logits of `decode` in the prompt, and behind a prefill after it."""
        self.reset()
        of_prompt = self.decode_all(prompt[:-1])
        self.read(prompt[:-1])
        return np.concatenate([of_prompt, self.decode_all([prompt[-1], *tokens])])


class _OfReference:
    """A Hugging Face module with a cache, or any callable from token ids to logits."""

    def __init__(self, reference: Callable[..., Any]) -> None:
        self._reference = reference

    def greedy(self, prompt: Array, steps: int) -> list[int]:
        """Return the most likely tokens after a prompt, without penalties and stop tokens."""
        tokens: list[int] = []
        cache = new_cache(self._reference)
        unread = prompt[None]
        with no_grad():
            while len(tokens) < steps:
                if cache is None:
                    row = self.logits(prompt, tokens)[-1]
                else:
                    found = call_with_cache(self._reference, unread, cache)
                    row = as_array(found.logits)[0, -1]
                tokens.append(int(row.argmax()))
                unread = np.array([tokens[-1:]])
        return tokens

    def logits(self, prompt: Array, tokens: list[int]) -> Array:
        """Return the logits of the whole sequence at once."""
        ids = np.array([[*prompt, *tokens]], np.int64)
        return reference_pass(self._reference, Sample((ids,), {}), {}).logits


class _OfEngine:
    """
    A bundle in the engine of LiteRT-LM, which reads and writes text.

    Its logits are not asked for: after a prefill `run_text_scoring` of 0.18.1 is one position off.
    """

    def __init__(self, model: LanguageModel) -> None:
        try:
            import litert_lm
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"the runtime {LITERT_LM} needs its package: pip install litert-lm-api"
            ) from error
        if model.metadata is None or model.bundle is None:
            raise ValueError(f"{model.name}: {LITERT_LM} runs .litertlm bundles alone")
        litert_lm.set_min_log_severity(litert_lm.LogSeverity.ERROR)
        self._library, self._name = litert_lm, model.name
        cpu = litert_lm.Backend.CPU(thread_count=model.threads)
        # Without a folder for it the engine writes a cache beside the file.
        self._engine = litert_lm.Engine(str(model.bundle), cpu, cache_dir=":nocache")

    def greedy(self, prompt: Array, expected: list[int]) -> list[int]:
        """Return the most likely tokens after a prompt, up to a stop token."""
        # The pieces of its text are those of the tokens expected, up to the first that is not.
        engine, text = self._engine, self._text(prompt)
        sampler = self._library.SamplerConfig(top_k=1, top_p=1.0, temperature=1.0, seed=0)
        with engine.create_session(
            apply_prompt_template=False, sampler_config=sampler, max_output_tokens=len(expected)
        ) as session:
            session.run_prefill([text])
            pieces = [each.texts[0] for each in session.run_decode_async()]
        whole, ends = "".join(pieces), set(itertools.accumulate(map(len, pieces), initial=0))
        for n in range(len(expected), -1, -1):
            common = engine.detokenize(expected[:n]) if n else ""
            if len(common) in ends and whole.startswith(common):
                break
        others = engine.tokenize(whole[len(common) :]) if len(common) < len(whole) else []
        if not others and n < len(expected):
            others = self._stop(expected[n])
        return [*expected[:n], *others][: len(expected)]

    def _stop(self, expected: int) -> list[int]:
        """Return the stop token that ended a text, which has none of it."""
        stops = [ids[0] for ids in self._engine.eos_token_ids if len(ids) == 1]
        if "\ufffd" in self._engine.detokenize([expected]):
            return []  # part of a character, which the engine holds back
        return [expected] if expected in stops else stops[:1]

    def _text(self, prompt: Array) -> str:
        """Return the text that the engine reads as a prompt; it adds the start token by itself."""
        engine, ids = self._engine, prompt.tolist()
        if (start := engine.bos_token_id) is not None:
            if ids[0] != start:
                raise ValueError(
                    f"{self._name}: {LITERT_LM} begins every prompt with the bundle's start token "
                    f"{start}: give prompts that do, got {ids[:4]} …"
                )
            ids = ids[1:]
        text: str = engine.detokenize(ids)
        if engine.tokenize(text) != ids:
            raise ValueError(
                f"{self._name}: {LITERT_LM} reads text, and the bundle's tokenizer reads "
                f"{text[:60]!r} as other tokens than it was written from: give a prompt without "
                "special tokens"
            )
        return text


LITERT_LM: Final = "litert_lm"
"""The runtime that generates with LiteRT-LM's own engine."""

_Side = _OfFile | _OfReference


def generate(
    model: LanguageModel,
    prompts: Iterable[Any],
    steps: int,
    *,
    runtime: str,
    progress: Progress,
) -> Generation:
    """Generate after each prompt with the file and with its reference, and compare the tokens."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps: expected a whole number of at least 1, got {steps!r}")
    is_engine = runtime == LITERT_LM
    ours = "xnnpack" if is_engine else model.edge.runtimes.check(runtime)
    file = _OfFile(model.steps, ours)
    if model.float_model is not None:
        reference: _Side = _OfReference(model.float_model)
        name = model.reference_name
    elif model.float_steps is not None:
        reference, name = _OfFile(model.float_steps, ours), "the float file"
    elif is_engine:
        reference, name = file, "the file itself, step by step"
    else:
        raise ValueError(
            f"{model.name} has no reference to generate with: load it with "
            "edgeq.load(path, reference=hf_model) or float_tflite="
        )
    engine = _OfEngine(model) if is_engine else None
    with progress.step("generate", model.name, prompts) as step:
        bound = step.each(iter(_bound(model, prompts, steps)))
        found = [_continuation(file, reference, engine, each, steps) for each in bound]
    return Generation(model.name, name, runtime, steps, tuple(found))


def _bound(model: LanguageModel, prompts: Any, steps: int) -> list[Array]:
    """Return the token ids of each prompt, checked."""
    is_one = isinstance(prompts, str) or getattr(prompts, "ndim", 0) == 1
    room, found = model.steps.cache_length, []
    for index, prompt in enumerate([prompts] if is_one else as_sequences(prompts)):
        ids = model.spec.bind(prompt, f"prompt {index}").arrays()[0][0]
        # The last token that is generated is not read.
        if (n := ids.size + steps - 1) > room:
            raise ValueError(
                f"prompt {index}: {ids.size} tokens and {counted(steps, 'step')} need {n:,} "
                f"positions, and the file's cache has {room:,}: use at most "
                f"{room + 1 - ids.size:,} steps, or export with a longer cache (cache_length=)"
            )
        found.append(ids)
    if not found:
        raise ValueError("prompts: expected at least one")
    return found


def _continuation(
    file: _OfFile, reference: _Side, engine: _OfEngine | None, prompt: Array, steps: int
) -> Continuation:
    expected = reference.greedy(prompt, steps)
    tokens = file.greedy(prompt, steps) if engine is None else engine.greedy(prompt, expected)
    pairs = enumerate(zip(tokens, expected, strict=False))  # LiteRT-LM ends at a stop token
    at = next((step for step, (token, other) in pairs if token != other), None)
    difference = None
    if at is not None:
        common = tokens[:at]
        of_reference, of_file = (side.logits(prompt, common) for side in (reference, file))
        following = np.array([*prompt[1:], *common, -1])
        errors = TokenErrors.measure(0, of_reference, of_file, following)
        rows = errors.rows
        difference = Difference(
            at,
            tokens[at],
            expected[at],
            float(rows["gap"][-1]),
            math.sqrt(rows["noise"][-1] / errors.vocab),
            not rows["counts"][-1],
        )
    return Continuation(tuple(map(int, prompt)), tuple(tokens), tuple(expected), difference)
