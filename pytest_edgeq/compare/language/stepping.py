"""
Feed a language model's file its tokens and its own cache, step by step.

Prefill is fed as LiteRT-LM does it (`GetOptimizedPrefillWorkGroups`, `PrefillInternal`): the
longest signature as often as it fits, then the shortest that holds the rest, whose tokens and
positions behind the last one are 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.compare.language.layout import CacheLayout, TokenStep
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.boundary import decode, numpy_dtype

Array = npt.NDArray[Any]

# What LiteRT-LM adds to hidden scores (`InitializeAttentionMask`), by the size of the mask's float.
_HIDDEN = {2: -45824.0, 4: -0.7 * float(np.finfo(np.float32).max)}

# Two ways through one file differ by rounding alone: bit-equal in the default layout of Llama,
# Qwen3 and Gemma 3, 144 dB in the split cache. The float32 of a float file leaves half of its bits;
# elsewhere one flipped code in a row of 8 bits is 45 dB.
_SAME_FLOAT_DB, _SAME_DB = 80.0, 40.0


class CacheSession:
    """One sequence in a file, with its key-value cache."""

    def __init__(self, layout: CacheLayout, runtime: str) -> None:
        self.layout, self._runtime = layout, runtime
        self.position = 0  # number of tokens that were read
        self.cache: dict[str, Array] = {}  # by name, as the file returned them
        self.reset()

    def reopen(self) -> None:
        """Drop the interpreters, and what they may keep of earlier sequences."""
        for step in self.layout.steps:
            for edge in (step.edge, *step.helpers.values()):
                edge.close()

    def reset(self) -> None:
        """Forget all tokens."""
        inputs = self.layout.decode.inputs()
        self.position = 0
        self.cache = {
            name: np.zeros(inputs[name].tensor.shape, numpy_dtype(inputs[name].tensor.dtype))
            for name in self.layout.axes
        }

    def feed(self, step: TokenStep, tokens: Sequence[int] | Array) -> Array | None:
        """Run one step and keep the cache; return logits [tokens, vocabulary] if it has any."""
        n, start = len(tokens), self.position
        outputs = self._run(step, np.asarray(tokens), start)
        self.position += n
        logits = outputs.get("logits")
        return None if logits is None else logits.reshape(-1, logits.shape[-1])[:n]

    def decode_all(self, tokens: Sequence[int] | Array) -> Array:
        """Read the tokens one by one; return the logits [tokens, vocabulary]."""
        rows = [self.feed(self.layout.decode, [token]) for token in tokens]
        return np.concatenate([row for row in rows if row is not None])

    def read(self, prompt: Array) -> None:
        """Forget all tokens, and read a prompt; by `decode` what does not fit into a chunk."""
        self.reset()
        self.prefill(prompt)
        for token in prompt[self.position :]:
            self.feed(self.layout.decode, [token])

    def prefill(self, tokens: Array) -> None:
        """Read tokens as LiteRT-LM does, up to the first chunk that does not fit."""
        # A step writes its whole length, which near the end of the cache moves to the front.
        for step, chunk in chunks(self.layout, tokens):
            if self.position + step.length > self.layout.cache_length:
                return
            self.feed(step, chunk)

    def inputs(self, token: int, role: str | None = None) -> dict[str, Array]:
        """Return the inputs of `decode`, or of one of its helpers, for the next token."""
        step = self.layout.decode
        edge = step.edge if role is None else step.helpers[role]
        return _inputs(edge, self._given(step, np.array([token]), self.position))

    def positions(self, name: str) -> Array:
        """Return a cache tensor as float [positions read, values of one position]."""
        values = decode(self.cache[name], self.layout.caches[name])
        by_position = np.moveaxis(values, self.layout.axes[name], 0)[: self.position]
        floats: Array = by_position.reshape(self.position, -1).astype(np.float32)
        return floats

    def _given(self, step: TokenStep, tokens: Array, start: int) -> dict[str, Array]:
        """Return the inputs of a step and of its helpers, by name."""
        n, room = len(tokens), step.length
        ids, at = np.zeros(room, np.int32), np.zeros(room, np.int32)
        ids[:n], at[:n] = tokens, np.arange(start, start + n)
        is_real = np.arange(room) < n
        given: dict[str, Array] = {
            "tokens": ids,
            "token_ids": ids,
            "input_tokens": ids,
            "input_pos": at,
            "time_step": np.array(start),
            "valid_mask": is_real,
            **self.cache,
        }
        for role in ("embedder", "mask", "rope"):
            if role in step.helpers:
                given |= self._call(step.helpers[role], given)
        wanted = step.inputs()
        if "mask" in wanted and "mask" not in step.helpers:
            dtype, seen_up_to = wanted["mask"].tensor.dtype, np.where(is_real, at, -1)
            given["mask"] = attention_mask(dtype, seen_up_to, self.layout.cache_length)
        return given

    def _run(self, step: TokenStep, tokens: Array, start: int) -> Mapping[str, Array]:
        given = self._given(step, tokens, start)
        outputs = self._call(step.edge, given)
        if "cache_update" in step.helpers:
            given |= {name: each for name, each in outputs.items() if name.startswith("kv_slice")}
            outputs = {**outputs, **self._call(step.helpers["cache_update"], given)}
        self.cache = {name: outputs[name] for name in self.cache}
        return outputs

    def _call(self, edge: EdgeFile, given: Mapping[str, Array]) -> dict[str, Array]:
        """Run one signature; integers, and the cache, are passed on as the file stores them."""
        found = edge.runner(self._runtime).run(_inputs(edge, given))
        return {
            each.name: decode(value, each) if each.name == "logits" else value
            for each, value in zip(edge.signature.outputs, found, strict=True)
        }


def _inputs(edge: EdgeFile, given: Mapping[str, Array]) -> dict[str, Array]:
    inputs = {}
    for each in edge.signature.inputs:
        shape, dtype = each.tensor.shape, numpy_dtype(each.tensor.dtype)
        inputs[each.name] = given[each.name].astype(dtype, copy=False).reshape(shape)
    return inputs


def same_db(layout: CacheLayout) -> float:
    """Return the least SQNR of a cache that two ways through one file leave."""
    is_rounded = any(each.is_quantized or each.dtype == "float16" for each in layout.tensors)
    return _SAME_DB if is_rounded else _SAME_FLOAT_DB


def chunks(layout: CacheLayout, tokens: Array) -> Iterator[tuple[TokenStep, Array]]:
    """Split a prompt into steps, as LiteRT-LM does; one by one where there is no prefill."""
    lengths = sorted(layout.prefills)
    while len(tokens):
        if not lengths:
            step, n = layout.decode, 1
        else:
            n = next((each for each in lengths if each >= len(tokens)), lengths[-1])
            step = layout.prefills[n]
        yield step, tokens[:n]
        tokens = tokens[n:]


def attention_mask(dtype: str, at: Array, room: int) -> Array:
    """Return which of the positions up to `room` each token sees: all up to its own."""
    seen = np.arange(room) <= at[:, None]
    if dtype == "bool":
        return seen
    floats = np.dtype(numpy_dtype(dtype))
    return np.where(seen, 0.0, _HIDDEN[floats.itemsize]).astype(floats)
