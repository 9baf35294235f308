"""Files with an encoder and a decoder, compared position by position with a module for each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fixtures.language import encoder_decoder, models
from pytest_edgeq import Budget, Edgeq, assert_within_budget
from pytest_edgeq.compare.language.encoder_decoder import EncoderDecoder, Wiring
from tests.language.defects import Arrays, Run, Tampered

FLOAT = models.exported("encoder_decoder", "float")
PAIRS = [
    (source[None].astype(np.int32), tokens)
    for source, tokens in encoder_decoder.pairs(2, 40, seed=11)
]


@pytest.fixture(scope="module")
def modules() -> dict[str, Any]:
    """The trained modules by signature."""
    return dict(zip(("encode", "decode"), encoder_decoder.tiny(), strict=True))


def test_a_sound_file(modules: dict[str, Any]) -> None:
    """Every position is compared, in three stages where there is a float file."""
    edgeq = Edgeq()
    path = models.exported("encoder_decoder", "wi8")
    model = edgeq.load(path, reference=modules, float_tflite=FLOAT)

    comparison = edgeq.compare(model, PAIRS)

    assert_within_budget(
        comparison,
        conversion=Budget(sqnr_db=100),
        total=Budget(sqnr_db=30, kl=1e-3, top1_agreement=0.95),
    )
    assert len(comparison.by_position("conversion").sqnr_db) == 40
    assert comparison.by_position("conversion").first_below(100) is None
    by_signature = [{"encode": source, "decode": tokens} for source, tokens in PAIRS]
    alone = edgeq.compare(edgeq.load(path, float_tflite=FLOAT), by_signature)
    assert alone.total.sqnr_db == comparison.stages["quantization"].sqnr_db
    assert edgeq.compare(model.signature("encode"), [PAIRS[0][0]]).total.sqnr_db > 30


def test_a_decoder_without_a_cache() -> None:
    """It reads all tokens at once, and a mask; the inputs have no names."""
    encoder, decoder = (each.eval() for each in encoder_decoder.whisper())
    edgeq = Edgeq()
    model = edgeq.load(
        models.exported("whisper", "float"), reference={"encode": encoder, "decode": decoder}
    )
    generator = np.random.default_rng(0)
    features = generator.standard_normal((1, 80, 100)).astype(np.float32)
    samples = [(features, generator.integers(0, 250, n)) for n in (20, 32)]

    comparison = edgeq.compare(model, samples)

    assert comparison.by_position("total").first_below(100) is None
    assert comparison.by_position("total").n.tolist() == [2] * 20 + [1] * 12
    with pytest.raises(ValueError, match="33 tokens, and the file's cache has 32 positions"):
        edgeq.compare(model, [(features, generator.integers(0, 250, 33))])


def _loses_its_state(key: str, x: Arrays, run: Run) -> Arrays:
    y = run(x)
    return {**y, "k_0": x["k_0"]} if key == "decode" and x["input_pos"][0] == 20 else y


def _gets_no_states(key: str, x: Arrays, run: Run) -> Arrays:
    return run({**x, "states": np.zeros_like(x["states"])} if key == "decode" else x)


@pytest.mark.parametrize(
    ("defect", "first"), [(_loses_its_state, 21), (_gets_no_states, 0)], ids=["state", "encoded"]
)
def test_defects_of_the_file(
    modules: dict[str, Any], defect: Callable[..., Arrays], first: int
) -> None:
    """The first position that is wrong shows where the state is lost."""
    edgeq = Edgeq(runtimes={"tampered": Tampered(defect)})
    model = edgeq.load(FLOAT, reference=modules)

    comparison = edgeq.compare(model, PAIRS, runtime="tampered")

    assert comparison.by_position("total").first_below(80) == first


@pytest.mark.parametrize("signature", ["encode", "decode"])
def test_other_modules(modules: dict[str, Any], signature: str) -> None:
    """Each side hands on what its own encoder computes."""
    other = copy.deepcopy(modules)
    with torch.no_grad():
        next(each for each in other[signature].modules() if hasattr(each, "up")).up.weight *= 1.1

    comparison = Edgeq().compare(Edgeq().load(FLOAT, reference=other), PAIRS[:1])

    assert comparison.by_position("total").first_below(80) == 0


def test_what_does_not_fit(modules: dict[str, Any]) -> None:
    """One sentence each; files that are no encoder with a decoder are as before."""
    edgeq = Edgeq()
    (source, tokens), model = PAIRS[0], edgeq.load(FLOAT, reference=modules)
    for samples, sentence in (
        ([source], r"sample 0: expected a pair \(inputs of 'encode', tokens of 'decode'\)"),
        ([(source[:, :3], tokens)], r"0, signature 'encode', input 'source': expected shape"),
        ([(source, tokens + 250)], r"sample 0, signature 'decode': expected token ids from 0 to"),
    ):
        with pytest.raises((ValueError, TypeError), match=sentence):
            edgeq.compare(model, samples)
    half = edgeq.load(FLOAT, reference={"decode": modules["decode"]})
    with pytest.raises(ValueError, match=r"no reference for its signature 'encode': load it with"):
        edgeq.compare(half, PAIRS)
    with pytest.raises(ValueError, match=r"float has no reference to compare with"):
        edgeq.compare(edgeq.load(FLOAT), PAIRS)
    encode, decode = (model.edge.at(key).signature for key in ("encode", "decode"))
    position = next(each for each in decode.inputs if each.name == "input_pos")
    language = replace(decode, inputs=(*decode.inputs, replace(position, name="language")))
    with pytest.raises(ValueError, match=r"input 'language' of signature 'decode' is not known"):
        Wiring.of(encode, language, "model")
    no_tokens = tuple(each for each in decode.inputs if each.name != "tokens")
    assert Wiring.of(encode, replace(decode, inputs=no_tokens), "model") is None
    assert EncoderDecoder.of(model.signature("decode")) is None
