"""Thirty-three defects of language models, each reported by `check` with position and tensor."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from fixtures.language.models import exported, sequences, tiny
from pytest_edgeq import Budget, assert_within_budget
from pytest_edgeq.compare.language.model import LanguageModel
from pytest_edgeq.edgeq import Edgeq
from tests.language.defects import OF_THE_LOOP, OF_THE_REFERENCE, Tampered, changed, with_window

_SEQUENCES = sequences(3, 80, 11)

# By defect, what the failure says: the first position or a pattern of it, and the cache tensor.
_FOUND = {
    "decode one position late": r"kv_cache_k_0 at position 0",
    "mask hides the token itself": r"kv_cache_k_1 at position 1",
    "mask shows one slot too many": r"kv_cache_k_1 at position 0",
    "mask shows everything": r"kv_cache_k_1 at position 0",
    "decode sees 32 positions only": r"kv_cache_k_1 at position 32",
    "only the first chunk is kept": r"behind prefill signatures.*kv_cache_k_0 at position 16",
    "heads of layer 1 swapped after prefill": r"'prefill_16'.*kv_cache_k_1 at position",
    "V of layer 0 lost from position 40": r"kv_cache_v_0 at position 40",
    "cache in int8": r"kv_cache_k_0 at position 0",
    "cache in float16": r"kv_cache_k_0 at position 0",
    "caches of two layers swapped after prefill": r"'prefill_16'.*kv_cache_v_0 at position",
    "later chunks one position early": r"behind prefill signatures.*kv_cache_k_0 at position 15",
    "chunks at 48 and 64 write zeros": r"kv_cache_._\d at position (48|64)",
    "first slots lost once a chunk begins at 48": r"kv_cache_k_0 at position 0",
    "a padded later chunk overwrites slot 0": r"kv_cache_k_0 at position 0",
    "a chunk at an uneven start writes nothing": r"kv_cache_k_0 at position",
    "prefill behind decode starts from an empty cache": r"kv_cache_k_0 at position",
    "cache in float16 behind prefill": r"the float file: expected behind prefill signatures",
    "rope theta 10000 → 12000": r"kv_cache_k_0 at position 1",
    "rope interleaved in layer 1": r"below it is 1\b.*behind the last layer's cache",
    "norm epsilon 1e-6 → 1e-5": r"kv_cache_k_0 at position 0",
    "norm epsilon 1e-6 → 1e-2": r"kv_cache_k_0 at position 0",
    "attention scale × 1.1 in layer 1": r"behind the last layer's cache",
    "attention scale of 1/√32": r"kv_cache_k_1 at position 1",
    "two query heads swapped in layer 1": r"behind the last layer's cache",
    "GELU for SiLU in layer 0": r"kv_cache_k_1 at position 0",
    "part of the head clipped": r"below it is 0\b.*behind the last layer's cache",
    "up_proj of layer 1 × 1.05": r"below it is 0\b.*behind the last layer's cache",
    "gate of layer 1 from layer 0": r"below it is 0\b.*behind the last layer's cache",
    "embedding of one token zero": r"kv_cache_k_0 at position 24",
}


# In the fast lane: one of the mask, one of the hand-over, one of the cache, one of the reference.
@functools.cache
def _llama() -> Any:
    return tiny("llama")


def _loaded(edgeq: Edgeq, reference: Any) -> LanguageModel:
    model = edgeq.load(
        exported("llama", "wi8"), reference=reference, float_tflite=exported("llama", "float")
    )
    assert isinstance(model, LanguageModel)
    return model


@functools.cache
def _failure(name: str) -> str:
    if name in OF_THE_LOOP:
        edgeq = Edgeq(runtimes={"tampered": Tampered(OF_THE_LOOP[name])}, runtime="tampered")
        model = _loaded(edgeq, _llama())
    else:
        edgeq = Edgeq()
        model = _loaded(edgeq, changed(_llama(), OF_THE_REFERENCE[name]))
    with pytest.raises(AssertionError) as failed:
        edgeq.check(model, _SEQUENCES)
    return str(failed.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(_FOUND))
def test_a_defect_is_reported_with_its_position_and_tensor(name: str) -> None:
    """The first position and the first cache tensor name the cause."""
    text = _failure(name)
    assert re.search(_FOUND[name], text, re.DOTALL | re.MULTILINE), text


def test_every_defect_has_an_expected_text() -> None:
    """None is left out."""
    assert set(_FOUND) == {*OF_THE_LOOP, *OF_THE_REFERENCE}


def test_the_sound_file_passes() -> None:
    """So what fails is the defect, not the runtime that plants it."""
    untouched = Tampered(lambda key, inputs, run: run(inputs))
    edgeq = Edgeq(runtimes={"tampered": untouched}, runtime="tampered")
    with pytest.warns(UserWarning, match="baselines were not checked"):
        edgeq.check(_loaded(edgeq, _llama()), _SEQUENCES)


@pytest.mark.slow
@pytest.mark.parametrize("window", [15, 17, 512])
def test_a_wrong_sliding_window_is_found_by_its_position(window: int) -> None:
    """The file's window of 16 ends where the reference's goes on, or the other way round."""
    edgeq = Edgeq()
    model = edgeq.load(exported("gemma3", "float"), reference=with_window(tiny("gemma3"), window))
    with pytest.raises(AssertionError, match=rf"first below it is {min(window, 16)}\b"):
        edgeq.check(model, _SEQUENCES)


def test_a_budget_for_the_float_file_fails_on_a_cache_in_float16() -> None:
    """It moves the quantized file's figures by less than its own rounding does."""
    edgeq = Edgeq(
        runtimes={"tampered": Tampered(OF_THE_LOOP["cache in float16"])}, runtime="tampered"
    )
    comparison = edgeq.compare(_loaded(edgeq, _llama()), _SEQUENCES)
    assert_within_budget(comparison, total=Budget(sqnr_db=30, top1_agreement=0.95, kl=1e-2))
    with pytest.raises(AssertionError, match="conversion, output 'logits': sqnr_db"):
        assert_within_budget(comparison, conversion=Budget(sqnr_db=100))
