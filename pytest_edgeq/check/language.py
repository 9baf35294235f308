"""Check a language model: against its references by position, and its signatures by each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.check.verdict import Verdict
from pytest_edgeq.compare.comparer import compare
from pytest_edgeq.compare.language.layout import CacheLayout
from pytest_edgeq.compare.language.model import LanguageModel
from pytest_edgeq.compare.language.runner import DIFFERS
from pytest_edgeq.compare.language.stepping import CacheSession, chunks, same_db
from pytest_edgeq.compare.samples import SampleSource, iterate, read_samples
from pytest_edgeq.numerics.comparison import Comparison
from pytest_edgeq.numerics.findings import (
    CACHE_OVERRUN,
    LOST_OUTPUT,
    MISSING_SIGNATURE,
    NO_HARM,
    OTHER_START_TOKEN,
    PREFILL_DIFFERS,
    STATE_KEPT,
    USELESS,
    WRONG_OUTPUT,
    Finding,
    Harm,
    Place,
)
from pytest_edgeq.numerics.metrics import ONE_BIT_DB
from pytest_edgeq.numerics.token_errors import CacheErrors, PositionErrors
from pytest_edgeq.progress import Progress

if TYPE_CHECKING:
    from pytest_edgeq.compare.executors.sample_executor import SampleExecutor

Array = npt.NDArray[Any]

SEQUENCES = 2
"""Number of first sequences on which the signatures are compared with each other."""

# A float file: 117 dB and more at each position of two layers; half of the bits are left to depth.
# With weights, caches or a reference of 16 bits the rounding of those, 54 dB for bfloat16.
_FLOAT32_DB, _FLOAT16_DB = 80.0, 30.0
_DRIFT_DB, _FEWEST = 12.0, 16  # a quarter of 16 positions has four
_OUTPUT = Place("output", "logits")


def check_language(
    model: LanguageModel,
    inputs: Iterable[Any],
    verdict: Verdict,
    *,
    runtime: str,
    progress: Progress,
    engine: SampleExecutor | None,
) -> Comparison | None:
    """
    Add the findings on a language model; return the comparison, None without a reference.

    The signatures of each file are compared with each other on the first two sequences.
    """
    first: Iterable[Any]
    if isinstance(inputs, SampleSource):
        first = inputs.read(range(min(SEQUENCES, len(inputs))))
    else:
        inputs = iterate(inputs)
        first = list(itertools.islice(inputs, SEQUENCES))
        inputs = itertools.chain(first, inputs)
    sequences = [each.arrays()[0][0] for each in read_samples(first, model.spec, "evaluation")]
    with progress.step("check", model.name, sequences):
        verdict.add(*step_findings(model, sequences, runtime))
        end = f"{model.name}: {past_the_end(model.steps, runtime)}"
    if not model.has_reference:
        why = "logits were not compared: there is no reference and no float_tflite"
        verdict.notes += [why, end]
        return None
    comparison = compare(model, inputs, runtime=runtime, progress=progress, engine=engine)
    comparison = replace(comparison, notes=(end,))
    found, health = list(position_findings(model, comparison)), comparison.health
    if any(each.kind == WRONG_OUTPUT for each in found):
        # `decode` itself is wrong, so that a sound prefill differs from it.
        verdict.findings[:] = map(_behind, verdict.findings)
        health = tuple(map(_behind, health))
    verdict.add(*health, *found)
    return comparison


def _behind(found: Finding) -> Finding:
    """Return a difference of prefill and `decode` as a consequence."""
    return replace(found, harm=NO_HARM, fix="") if found.kind == PREFILL_DIFFERS else found


def position_findings(model: LanguageModel, comparison: Comparison) -> Iterator[Finding]:
    """Judge every stage at its worst position."""
    for stage, positions in comparison.positions.items():
        if stage == "total" and len(comparison.positions) > 1:
            continue  # its parts are judged
        layout = model.float_steps if stage == "conversion" else model.steps
        assert layout is not None, "unreachable because the stage has a file"
        is_float = not any(each.is_quantized for each in layout.tensors)
        least = _least_of_float(model, layout) if is_float else ONE_BIT_DB
        position, decibels = positions.worst
        if decibels >= least:
            yield from [] if is_float else _drift(stage, positions)
            continue
        first = positions.first_below(least)
        at = position if first is None else first
        yield Finding(
            kind=WRONG_OUTPUT if is_float else LOST_OUTPUT,
            place=_OUTPUT,
            expected=f"{least:g} dB SQNR or more at every position",
            got=f"{decibels:.3g} dB at position {position}",
            headline=f"{stage}, {_OUTPUT}: expected {least:g} dB SQNR or more at every position, "
            f"got {decibels:.3g} dB at position {position}; the first below it is {at}",
            harm=Harm.decibels(least - decibels) if is_float else USELESS,
            causes=tuple(_causes(model, comparison, stage, at, least)),
            evidence=tuple(str(positions).splitlines()),
            fix=_fix(model, stage, at),
        )


def _fix(model: LanguageModel, stage: str, position: int) -> str:
    """Return how to find the op: by localize where the quantizer lost it."""
    if stage == "quantization":
        return f"find the op by edgeq.localize(model, sequences, positions=[{position}])"
    alone = "export the model with the layer of the first wrong cache tensor alone"
    return f"{alone}, and compare it, its mask and its positions with {model.reference_name}"


def _least_of_float(model: LanguageModel, layout: CacheLayout) -> float:
    dtypes = {each.dtype for each in layout.tensors}
    parameters = getattr(model.float_model, "parameters", lambda: ())()
    halves = {str(each.dtype) for each in parameters} & {"torch.bfloat16", "torch.float16"}
    return _FLOAT16_DB if halves or dtypes & {"float16", "bfloat16"} else _FLOAT32_DB


def _drift(stage: str, positions: PositionErrors) -> Iterator[Finding]:
    """Find a loss that grows by position, as of a cache that is not kept."""
    quarters = [each.sqnr_db for name, each in positions.outputs.items() if "quarter" in name]
    best, worst = int(np.argmax(quarters)), int(np.argmin(quarters))
    if len(positions.n) < _FEWEST or best > worst or quarters[best] - quarters[worst] < _DRIFT_DB:
        return
    yield Finding(
        kind=LOST_OUTPUT,
        place=_OUTPUT,
        headline=f"{stage}, {_OUTPUT}: expected no quarter of the positions {_DRIFT_DB:g} dB worse "
        f"than an earlier one, got {quarters[worst]:.3g} dB in quarter {worst + 1} and "
        f"{quarters[best]:.3g} dB in quarter {best + 1}",
        harm=Harm.decibels(quarters[best] - quarters[worst]),
        evidence=tuple(str(positions).splitlines()),
    )


def _causes(
    model: LanguageModel, comparison: Comparison, stage: str, position: int, least: float
) -> Iterator[str]:
    caches = comparison.caches.get(stage)
    bad = None if caches is None else caches.first_below(least)
    if bad is not None:
        yield f"the cache differs first at {bad}"
    elif caches is not None and caches:
        yield (
            f"every cache tensor has {least:g} dB or more: the error arises behind the last "
            "layer's cache"
        )
    window = getattr(getattr(model.float_model, "config", None), "sliding_window", None)
    if window and position in (window - 1, window, window + 1):
        yield f"the reference's sliding window has {window} positions (config.sliding_window)"


def step_findings(model: LanguageModel, sequences: Sequence[Array], runtime: str) -> list[Finding]:
    """Compare the signatures of each file with each other on a few sequences."""
    found: list[Finding] = []
    for layout in (*model.layouts.values(), *model.float_layouts.values()):
        fitting = [each[: layout.cache_length] for each in sequences]
        found += _of_layout(layout, fitting, runtime)
    worst: dict[tuple[str, Place], Finding] = {}
    for each in found:
        known = worst.setdefault((each.kind, each.place), each)
        if each.harm > known.harm:
            worst[each.kind, each.place] = each
    return [*worst.values(), *_missing(model), *_start_token(model)]


def _of_layout(layout: CacheLayout, sequences: Sequence[Array], runtime: str) -> Iterator[Finding]:
    session = CacheSession(layout, runtime)
    session.reopen()
    fresh = session.decode_all(sequences[-1])
    for tokens in sequences:
        session.reset()
        logits = session.decode_all(tokens)
        alone = _cache(session)
        yield from _prefills(session, tokens, alone, logits)
    yield from _kept_state(fresh, logits)
    yield from _full_cache(session, sequences[-1], alone)


def _prefills(
    session: CacheSession, tokens: Array, alone: Mapping[str, Array], logits: Array
) -> Iterator[Finding]:
    for length, step in sorted(session.layout.prefills.items()):
        for n in sorted({min(length, len(tokens)), max(min(length, len(tokens)) // 2, 1)}):
            session.reset()
            rows = session.feed(step, tokens[:n])
            cache, wanted = _cache(session), {name: each[:n] for name, each in alone.items()}
            if rows is not None and len(rows) in (1, n) and (n == length or len(rows) == n):
                # Of one row, they are those of its last position.
                cache["logits_0"], wanted["logits_0"] = rows, logits[n - len(rows) : n]
            padded = f", padded to {length}" if n < length else ""
            expected = f"the cache of {n} × decode for {n} tokens{padded}"
            where = f"signature {step.edge.key!r}"
            if found := _differing(session, where, expected, cache, wanted):
                yield found


def _kept_state(fresh: Array, behind: Array) -> Iterator[Finding]:
    """Compare the logits of a sequence before and after other sequences."""
    if np.array_equal(behind, fresh, equal_nan=True):
        return
    at = int((behind != fresh).any(axis=1).argmax())
    yield Finding(
        kind=STATE_KEPT,
        place=_OUTPUT,
        expected="the same logits for a sequence before and after others",
        got=f"others from position {at} on",
        causes=("the file or the runtime keeps something of the sequence before",),
        harm=USELESS,
    )


def _full_cache(
    session: CacheSession, tokens: Array, alone: Mapping[str, Array]
) -> Iterator[Finding]:
    """
    Compare prompts that fill the cache.

    The last chunk is compared with `decode`, the first positions with those of the sequence, and
    all positions with those of a prompt whose chunks begin behind one decoded token.
    """
    layout, room = session.layout, session.layout.cache_length
    if not layout.prefills:
        return
    prompt = np.resize(tokens, room)
    *before, (step, last) = chunks(layout, prompt)
    session.reset()
    for earlier, chunk in before:
        session.feed(earlier, chunk)
    cache, position = session.cache, session.position
    session.feed(step, last)
    filled = _cache(session)
    session.cache, session.position = cache, position
    session.decode_all(last)
    where = f"signature {step.edge.key!r}"
    expected = f"the last {len(last)} of {room} positions as {len(last)} × decode fill them"
    if step.length > len(last) and (found := _differing(session, where, expected, filled)):
        yield replace(
            found,
            kind=CACHE_OVERRUN,
            causes=(
                f"it writes {step.length} positions and fewer are left: DYNAMIC_UPDATE_SLICE moves "
                "them to the front, over tokens that were read before",
            ),
            fix="export with a cache_length= that is a multiple of the longest of prefill_lengths=",
        )
        return
    whole = f"a prompt of {room} tokens"
    found = _differing(session, where, expected, filled) or _differing(
        session, whole, f"what {len(tokens)} × decode leave first", filled, alone
    )
    if found is None:
        session.reset()
        session.feed(layout.decode, prompt[:1])
        session.prefill(prompt[1:])
        shifted = "the cache of chunks that begin behind one decoded token"
        found = _differing(session, whole, shifted, filled)
    if found is not None:
        yield found


def past_the_end(layout: CacheLayout, runtime: str) -> str:
    """Read one token more than the cache holds, and describe what becomes of the others."""
    session, room = CacheSession(layout, runtime), layout.cache_length
    session.position = room
    before = {name: each.copy() for name, each in session.cache.items()}
    text = f"the cache holds {room} tokens, and one more"
    try:
        session.feed(layout.decode, [1])
    except RuntimeError as error:
        return f"{text} is refused by the runtime: {str(error).splitlines()[0]}"
    changed = (
        np.moveaxis(before[name] != after, layout.axes[name], 0).reshape(room, -1).any(axis=1)
        for name, after in session.cache.items()
    )
    overwritten = np.flatnonzero(np.any(list(changed), axis=0)).tolist()
    if not overwritten:
        what = "is not stored"
    elif len(overwritten) == 1:
        what = f"overwrites position {overwritten[0]}"
    else:
        what = f"overwrites {len(overwritten)} positions, {overwritten[0]} to {overwritten[-1]}"
    return f"{text} {what}: the application must stop there"


def _cache(session: CacheSession) -> dict[str, Array]:
    return {name: session.positions(name) for name in session.cache}


def _differing(
    session: CacheSession,
    where: str,
    expected: str,
    cache: Mapping[str, Array],
    wanted: Mapping[str, Array] | None = None,
) -> Finding | None:
    """Compare a cache at the positions of another one, by default that of the session."""
    wanted = _cache(session) if wanted is None else wanted
    errors, least = CacheErrors(), same_db(session.layout)
    errors.add(wanted, {name: each[: len(wanted[name])] for name, each in cache.items()})
    bad = errors.first_below(least)
    if bad is None:
        return None
    return Finding(
        kind=PREFILL_DIFFERS,
        place=Place("file", where),
        expected=expected,
        got=str(bad),
        harm=Harm.decibels(least - bad.sqnr_db),
        fix=DIFFERS,
    )


def _missing(model: LanguageModel) -> Iterator[Finding]:
    """Find signatures of the float file that the file lacks."""
    known, of_float = (
        sorted({str(step.edge.key) for layout in layouts.values() for step in layout.steps})
        for layouts in (model.layouts, model.float_layouts)
    )
    for key in of_float:
        if key not in known:
            yield Finding(
                kind=MISSING_SIGNATURE,
                place=Place("file", model.name),
                expected=f"the signature {key!r} of the float file",
                got=str(known),
                fix="quantize the file that export_hf wrote as a whole",
            )


def _start_token(model: LanguageModel) -> Iterator[Finding]:
    """Compare the start token of the bundle with the tokenizer's."""
    start = None if model.metadata is None else model.metadata.start_token
    wanted = getattr(model.tokenizer, "bos_token_id", None)
    text = getattr(model.tokenizer, "bos_token", None)
    if start is None or wanted is None or start in ((wanted,), text):
        return
    yield Finding(
        kind=OTHER_START_TOKEN,
        place=Place("file", model.name),
        expected=f"the tokenizer's start token {text!r} ({wanted}) in the metadata",
        got=repr(start),
        fix="export with the tokenizer of the model; a wrong start token moves every position",
    )
