"""Greedy tokens of a language model's file beside those of its reference."""

from __future__ import annotations

import contextlib
import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from fixtures.language import models
from pytest_edgeq import Edgeq
from pytest_edgeq.compare.language.generation import _OfEngine
from tests.language.defects import OF_THE_LOOP, OF_THE_REFERENCE, Tampered, changed

#: Two that the model predicts, and four random ones, after which the logits are close.
PROMPTS = [
    *(each[:26] for each in models.sequences(2, 48, 0)),
    *np.random.default_rng(0).integers(0, 250, (4, 12)),
]


@pytest.fixture(scope="module")
def llama() -> Any:
    """The trained module."""
    return models.tiny("llama")


def test_a_sound_file_generates_what_torch_does(llama: Any) -> None:
    """The reference is what `generate` of the module gives without its stop tokens."""
    edgeq = Edgeq()
    lm = edgeq.load(models.exported("llama", "wi8"), reference=llama)

    generation = edgeq.generate(lm, PROMPTS[:2], steps=16)

    assert generation.first_difference is None, generation
    assert str(generation) == "llama.wi8: 2 prompts × 16 steps: all tokens are those of torch"
    for found, prompt in zip(generation.prompts, PROMPTS, strict=False):
        expected = llama.generate(
            torch.from_numpy(prompt[None]),
            do_sample=False,
            max_new_tokens=16,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert found.prompt == tuple(prompt)
        assert found.tokens == found.reference == tuple(expected[0, len(prompt) :].tolist())


def test_defects_of_a_file_are_no_near_ties(llama: Any) -> None:
    """This file adds its mask to the scores as 0 and 1."""
    edgeq = Edgeq()
    lm = edgeq.load(models.exported("llama_bool", "float"), reference=llama)

    generation = edgeq.generate(lm, PROMPTS, steps=12)

    assert generation.first_difference == 0
    for each in generation.prompts[2:]:
        assert (at := each.difference) is not None
        assert at.step < 2
        assert (at.token, at.expected) == (each.tokens[at.step], each.reference[at.step])
        assert at.margin > at.error > 1
        assert not at.is_near_tie
    head, names, *rows = str(generation).splitlines()
    assert head.endswith("prompts with other tokens than torch, first at step 0")
    assert names.split() == ["prompt", "length", "step", "token", "expected", "margin", "error"]
    assert rows[-1].split()[:2] == ["5", "12"]


def test_near_ties_are_named() -> None:
    """Random prompts leave two tokens about as likely, and int8 weights choose the other one."""
    edgeq = Edgeq()
    files = [models.exported("llama", each) for each in ("wi8", "float")]
    lm = edgeq.load(files[0], float_tflite=files[1])
    prompts = np.random.default_rng(0).integers(0, 250, (16, 12))[8:]

    generation = edgeq.generate(lm, prompts, steps=40)

    found = [each.difference for each in generation.prompts if each.difference is not None]
    assert found, generation
    assert all(each.is_near_tie and each.margin < 2 * each.error for each in found), generation
    assert str(generation).endswith("near-tie")
    assert "than the float file" in str(generation)
    data = json.loads(json.dumps(generation.to_dict()))
    assert data["first_difference"] == min(each.step for each in found)
    assert {each["near_tie"] for each in data["prompts"]} == {None, True}


@pytest.mark.parametrize("defect", ["only the first chunk is kept", "decode one position late"])
def test_defects_of_the_loop(llama: Any, defect: str) -> None:
    """The prompt is longer than the longest prefill signature."""
    edgeq = Edgeq(runtimes={"tampered": Tampered(OF_THE_LOOP[defect])})
    lm = edgeq.load(models.exported("llama", "float"), reference=llama)

    generation = edgeq.generate(lm, PROMPTS, steps=8, runtime="tampered")

    assert generation.first_difference is not None
    assert not all(each.difference and each.difference.is_near_tie for each in generation.prompts)


def test_text_any_callable_and_what_does_not_fit(llama: Any) -> None:
    """A prompt is refused before anything runs."""
    edgeq = Edgeq()
    path, tokenizer = models.exported("llama", "float"), models.tokenizer("llama")
    lm = edgeq.load(path, reference=lambda tokens: llama(torch.as_tensor(tokens)).logits)
    text = "w3 w17 w4"
    ids = np.array(tokenizer(text)["input_ids"])

    of_text = edgeq.generate(lm, text, steps=2, tokenizer=tokenizer)
    of_ids = edgeq.generate(lm, [ids], steps=2)

    assert of_text == of_ids
    assert of_text.first_difference is None
    for prompts, steps, sentence in (
        ([ids], 94, r"prompt 0: 4 tokens and 94 steps need 97 positions, .* has 96: .* 93 steps"),
        ([ids, [1]], 2, "prompt 1: expected 2 tokens or more"),
        ([text], 2, "prompt 0: expected token ids, got text; give the tokenizer"),
        ([], 2, "prompts: expected at least one"),
        ([ids], 0, "steps: expected a whole number of at least 1, got 0"),
    ):
        with pytest.raises((ValueError, TypeError), match=sentence):
            edgeq.generate(lm, prompts, steps=steps)
    with pytest.raises(ValueError, match=r"llama.float has no reference to generate with"):
        edgeq.generate(edgeq.load(path), [ids])


def test_litert_lm_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text has the command that installs it."""
    monkeypatch.setitem(sys.modules, "litert_lm", None)
    lm = Edgeq().load(models.exported("llama", "wi8"))

    with pytest.raises(ModuleNotFoundError, match="pip install litert-lm-api"):
        Edgeq().generate(lm, PROMPTS[:1], runtime="litert_lm")


class _Engine:
    """LiteRT-LM's engine and its session, which write these pieces; `<` is read as two tokens."""

    bos_token_id, eos_token_ids = None, [[5], [9]]

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def detokenize(self, ids: list[int]) -> str:
        return " ".join("<" if each == 9 else f"w{each}" for each in ids)

    def tokenize(self, text: str) -> list[int]:
        words = text.replace("<", "w7 w8").split()
        return [int(each.removeprefix("w")) for each in words]

    def create_session(self, **_: Any) -> Any:
        return contextlib.nullcontext(self)

    def run_prefill(self, _: list[str]) -> None: ...

    def run_decode_async(self) -> list[Any]:
        return [SimpleNamespace(texts=[each]) for each in self.pieces]


@pytest.mark.parametrize(
    ("pieces", "tokens"),
    [
        (("w1", " <", " w25"), [1, 9, 25]),  # `<` is the token expected, whatever it is read as
        (("w1", " <", " w2"), [1, 9, 2]),  # and w2 is not the start of w25
        (("w1", " w90", " w2"), [1, 90, 2]),
        (("w1", " <"), [1, 9, 5]),  # it met a stop token, which it does not write
        (("w1",), [1, 9]),  # also the one expected
    ],
)
def test_tokens_are_read_from_the_text_of_litert_lm(
    monkeypatch: pytest.MonkeyPatch, pieces: tuple[str, ...], tokens: list[int]
) -> None:
    """Only behind the first difference are they what the tokenizer reads."""
    library = MagicMock()
    library.Engine.return_value = _Engine(*pieces)
    monkeypatch.setitem(sys.modules, "litert_lm", library)
    engine = _OfEngine(Edgeq().load(models.exported("llama", "wi8")))  # type: ignore[arg-type]

    assert engine.greedy(np.array([3, 4]), [1, 9, 25]) == tokens
    with pytest.raises(ValueError, match="give a prompt without special tokens"):
        engine.greedy(np.array([3, 9]), [1])


@pytest.mark.slow
@pytest.mark.parametrize("family", models.FAMILIES)
def test_litert_lm_generates_what_the_steps_of_the_file_do(family: str, llama: Any) -> None:
    """It is fed by its own code; with another reference the tokens are others."""
    pytest.importorskip("litert_lm", exc_type=ImportError)
    edgeq = Edgeq()
    path = models.exported(family, "wi8")
    start = [] if family == "qwen3" else [models.BOS]  # of the bundle's metadata
    prompts = [np.array([*start, *each]) for each in PROMPTS[2:]]

    generation = edgeq.generate(edgeq.load(path), prompts, steps=20, runtime="litert_lm")

    assert generation.first_difference is None, generation
    assert "all tokens are those of the file itself, step by step" in str(generation)
    other = changed(llama, OF_THE_REFERENCE["attention scale of 1/√32"])
    lm = edgeq.load(path, reference=other)
    assert edgeq.generate(lm, prompts, steps=20, runtime="litert_lm").first_difference is not None


@pytest.mark.slow
def test_what_litert_lm_cannot_run() -> None:
    """It adds the start token, and opens bundles alone."""
    pytest.importorskip("litert_lm", exc_type=ImportError)
    edgeq = Edgeq()
    lm = edgeq.load(models.exported("llama", "wi8"))
    for model, prompt, sentence in (
        (lm, [3, 4], "begins every prompt with the bundle's start token 252"),
        (edgeq.load(models.exported("llama", "float")), [252, 4], "runs .litertlm bundles alone"),
    ):
        with pytest.raises(ValueError, match=sentence):
            edgeq.generate(model, [np.array(prompt)], steps=2, runtime="litert_lm")
