"""States of language models, on which their ops are compared: the inputs of one step each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy.typing as npt

from pytest_edgeq.compare.language.model import LanguageModel
from pytest_edgeq.compare.language.stepping import CacheSession
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.samples import Sample


def decoder_of(model: LanguageModel) -> QuantizedModel:
    """Return the signature that decodes, with the float file as its reference."""
    if model.float_steps is None:
        raise ValueError(
            f"{model.name}: localize needs the float file of a language model: load it with "
            "edgeq.load(tflite, float_tflite=path)"
        )
    key = model.edge.signature.key
    assert key is not None, "unreachable because a language model is known by its signatures"
    return model.signature(key)


def embedder_of(model: LanguageModel) -> QuantizedModel | None:
    """Return the signature that computes the embeddings for `decode`; None without one."""
    steps = [each.decode for each in (model.steps, model.float_steps) if each is not None]
    helpers = [each.helpers.get("embedder") for each in steps]
    if helpers[0] is None or None in helpers:
        return None
    key = helpers[0].signature.key
    assert key is not None, "unreachable because a section is known by its signatures"
    return model.signature(key)


def states(
    model: LanguageModel,
    sequences: Iterable[Sample],
    positions: Sequence[int] | None,
    runtime: str = "builtin",
    embedded: list[dict[str, npt.NDArray[Any]]] | None = None,
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """
    Yield the inputs of `decode` at some positions of each sequence, in order.

    The cache among them is the one that the file itself filled, token by token. By default the
    positions are the first, the last, and three between them. Inputs of the embedder are added to
    `embedded`.
    """
    session = CacheSession(model.steps, runtime)
    for index, sample in enumerate(sequences):
        tokens = sample.arrays()[0][0]
        last = len(tokens) - 1
        chosen = {last * i // 4 for i in range(5)} if positions is None else set(positions)
        beyond = sorted(each for each in chosen if not 0 <= each <= last)
        if beyond or not chosen:
            raise ValueError(
                f"positions: expected numbers from 0 to {last} for sequence {index} of "
                f"{last + 1} tokens, got {beyond[0] if beyond else 'none'}"
            )
        session.reset()
        for position in range(max(chosen) + 1):
            if position in chosen:
                if embedded is not None:
                    embedded.append(session.inputs(tokens[position], "embedder"))
                yield session.inputs(tokens[position])
            session.feed(session.layout.decode, tokens[position : position + 1])
