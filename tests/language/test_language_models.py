"""Files of language models beside their modules: opening, comparing, checking."""

from __future__ import annotations

import functools
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fixtures.language.models import exported, sequences, tiny, tokenizer
from pytest_edgeq import Budget, assert_no_float_ops, assert_within_budget
from pytest_edgeq.check.language import past_the_end, step_findings
from pytest_edgeq.compare.language.model import LanguageModel
from pytest_edgeq.edgeq import Edgeq
from pytest_edgeq.numerics.findings import (
    CACHE_OVERRUN,
    MISSING_SIGNATURE,
    OTHER_START_TOKEN,
    PREFILL_DIFFERS,
    STATE_KEPT,
)
from pytest_edgeq.tflite.bundles import LmMetadata, open_bundle
from tests.executors.conftest import Near, figures
from tests.language.defects import OF_THE_LOOP, Arrays, Defect, Run, Tampered

SEQUENCES = sequences(3, 60, 11)


@functools.cache
def module(family: str) -> Any:
    """Return the Hugging Face module of a family, loaded once."""
    return tiny(family)


def loaded(edgeq: Edgeq, name: str = "llama", **options: Any) -> LanguageModel:
    """Return the dynamic 8-bit file of a family with its float file, or with what is given."""
    options = options or {"reference": module(name), "float_tflite": exported(name, "float")}
    model = edgeq.load(exported(name, "wi8"), **options)
    assert isinstance(model, LanguageModel)
    return model


def tampered(defect: Defect) -> Edgeq:
    """Return a session whose only runtime has a defect."""
    return Edgeq(runtimes={"tampered": Tampered(defect)}, runtime="tampered")


# Each file, its layout, its family, and the least SQNR of its logits in dB: that of a sound float
# file, or of one with weights of 8 or 4 bits.
LAYOUTS = [
    ("llama", "float", "default", "llama", 115),
    ("llama", "wi8", "default", "llama", 33),
    ("qwen3", "wi8", "default", "qwen3", 33),
    ("gemma3", "float", "default", "gemma3", 115),
    ("gemma3", "wi4", "default", "gemma3", 10),  # the recipe's own loss
    ("llama_split", "wi8", "split cache", "llama", 33),
    ("gemma3_split", "float", "split cache", "gemma3", 115),
    ("llama_split_fp16", "wi8", "split cache", "llama", 33),
    ("llama_embedder", "wi8", "external embedder", "llama", 33),
    ("llama_caches", "wi8", "default", "llama", 33),
    ("llama_mixed", "float", "default", "llama", 50),
    ("llama_logits", "wi8", "default", "llama", 33),
    ("llama_same_axis", "wi8", "default", "llama", 33),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "quantization", "layout", "family", "least"), LAYOUTS)
def test_a_sound_file_of_each_layout_passes(
    name: str, quantization: str, layout: str, family: str, least: float
) -> None:
    """The figures are those of the same file by `fixtures.language.loop`, and nothing is found."""
    edgeq = Edgeq()
    model = edgeq.load(exported(name, quantization), reference=module(family))
    assert isinstance(model, LanguageModel)
    assert model.layout == layout
    with pytest.warns(UserWarning, match="baselines were not checked"):
        edgeq.check(model, SEQUENCES)
    comparison = edgeq.compare(model, SEQUENCES)
    assert comparison.total.outputs["logits"].sqnr_db >= least
    assert comparison.health == ()


def test_a_bool_mask_that_is_added_is_reported() -> None:
    """litert-torch 0.10.0 exports it so; top-1 and perplexity hardly move."""
    edgeq = Edgeq()
    model = edgeq.load(exported("llama_bool", "float"), reference=module("llama"))
    with pytest.raises(AssertionError, match="80 dB SQNR or more at every position"):
        edgeq.check(model, SEQUENCES)


@pytest.mark.parametrize(
    ("name", "unknown"),
    [
        ("gpu", "'param_tensor'"),
        ("linear_attention", "'kv_cache_[cr]_0'"),
        ("verify", "'verify"),
        ("vision", "section 'vision"),
    ],
)
def test_what_only_other_runtimes_know_is_refused_by_name(name: str, unknown: str) -> None:
    """Ignored, an input would be zeros, and every figure wrong."""
    with pytest.raises(ValueError, match=unknown):
        Edgeq().load(exported(name, "wi8"))


def test_a_section_without_the_others_is_refused(tmp_path: Path) -> None:
    """Its mask and its embeddings are computed by other files of the bundle."""
    bundle = open_bundle(exported("llama_split", "wi8"))
    assert bundle is not None
    alone = shutil.copy(bundle.model("prefill_decode"), tmp_path / "alone.tflite")
    with pytest.raises(ValueError, match=r"'embeddings' .* load the whole"):
        Edgeq().load(alone)


def test_the_stages_are_those_of_float_file_and_module() -> None:
    """The float file between them tells the converter's error from the quantizer's."""
    comparison = Edgeq().compare(loaded(Edgeq()), SEQUENCES)
    assert list(comparison.stages) == ["conversion", "quantization", "total"]
    assert_within_budget(
        comparison,
        conversion=Budget(sqnr_db=100),
        total=Budget(sqnr_db=30, top1_agreement=0.95, kl=1e-2, perplexity_ratio=1.02),
    )
    positions = comparison.by_position("total")
    assert positions.first_below(20) is None
    assert positions.first_below(positions.worst[1] + 0.01) is not None
    assert comparison.caches["conversion"].worst.sqnr_db > 100


@pytest.mark.parametrize("given", ["path", "model", "float_tflite"])
def test_a_float_file_is_enough(given: str) -> None:
    """A team that ships a file need not have the module."""
    edgeq, path = Edgeq(), exported("llama", "float")
    by_name: dict[str, dict[str, Any]] = {
        "path": {"reference": path},
        "model": {"reference": edgeq.load(path)},
        "float_tflite": {"float_tflite": path},
    }
    comparison = edgeq.compare(loaded(edgeq, **by_name[given]), SEQUENCES)
    assert list(comparison.stages) == ["quantization", "total"]
    assert 33 <= comparison.total.outputs["logits"].sqnr_db <= 45


def test_a_callable_and_a_module_in_bfloat16_are_references() -> None:
    """Bounds follow the precision of the reference."""
    edgeq, llama = Edgeq(), module("llama")

    def logits(tokens: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(llama(torch.from_numpy(tokens)).logits)

    path = exported("llama", "float")
    assert edgeq.compare(edgeq.load(path, reference=logits), SEQUENCES).total.sqnr_db > 100
    half = edgeq.load(path, reference=tiny("llama").to(torch.bfloat16))
    with pytest.warns(UserWarning, match="baselines were not checked"):
        edgeq.check(half, SEQUENCES)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"num_key_value_heads": 4},
            r"kv_cache_k_0: the file has shape \[30, 32\], the reference \[",
        ),
        ({"num_hidden_layers": 1}, r"kv_cache_k_1: the file has shape .*, the reference none"),
        ({"vocab_size": 300}, r"logits: the file has shape \[30, 256\], the reference \[30, 300\]"),
    ],
)
def test_a_module_of_another_configuration(change: dict[str, int], says: str) -> None:
    """Its cache has other heads or fewer layers than the file's, or its vocabulary is padded."""
    llama = module("llama")
    other = type(llama)(type(llama.config)(**{**llama.config.to_dict(), **change})).eval()
    edgeq = Edgeq()
    with pytest.raises(ValueError, match=f"evaluation sample 0: {says}"):
        edgeq.compare(edgeq.load(exported("llama"), reference=other), [SEQUENCES[0][:30]])


def test_text_needs_a_tokenizer() -> None:
    """Text and its token ids are the same sequence."""
    edgeq, text = Edgeq(), "w1 w2 w3 w4 <sep> w1 w2"
    model = loaded(edgeq)
    with pytest.raises(TypeError, match="give the tokenizer"):
        edgeq.compare(model, [text])
    of_text = edgeq.compare(model, [text], tokenizer=tokenizer("llama"))
    ids = tokenizer("llama")(text)["input_ids"]
    for sequence in (np.array(ids), (np.array([ids]),), {"input_ids": [np.array([ids])]}):
        assert of_text.total == edgeq.compare(model, [sequence]).total


@pytest.mark.parametrize(
    ("sequence", "says"),
    [
        (np.zeros(200, np.int64), "200 tokens, and the file's cache has 96 positions"),
        (np.array([1, 256]), "expected token ids from 0 to 255, got 1 … 256"),
        (np.array([1]), "expected 2 tokens or more, got 1"),
        (np.array([0.5, 1.0]), "expected one sequence of token ids, got .* float64"),
    ],
)
def test_a_sequence_that_does_not_fit_is_refused(sequence: Any, says: str) -> None:
    """The file would clamp a position, or read a row that the embedding does not have."""
    edgeq = Edgeq()
    with pytest.raises((ValueError, TypeError), match=says):
        edgeq.compare(loaded(edgeq), [sequence])


def test_workers_measure_the_same() -> None:
    """Sequences are measured one by one, merged in any order, and may be rows of one array."""
    edgeq = Edgeq()
    model = loaded(edgeq)
    here = edgeq.compare(model, np.stack(SEQUENCES))
    with ThreadPoolExecutor(2) as executor:
        there = edgeq.compare(model, SEQUENCES, executor=executor)
    assert figures(there) == Near(figures(here))
    for stage, positions in here.positions.items():
        np.testing.assert_allclose(there.positions[stage].sqnr_db, positions.sqnr_db, rtol=1e-12)


def test_assertions_read_the_section_that_decodes() -> None:
    """It holds the ops; each of its signatures can be run by itself."""
    model = loaded(Edgeq())
    with pytest.raises(AssertionError):
        assert_no_float_ops(model)
    assert model.signature("decode").outputs[-1].name == "logits"


# --- signatures against each other ---------------------------------------------------------------


def found(edgeq: Edgeq, **options: Any) -> list[str]:
    """Return the kinds of findings on the signatures of a file without a reference."""
    model = loaded(edgeq, **(options or {"reference": None}))
    return [each.kind for each in step_findings(model, SEQUENCES, edgeq._session.runtime())]


def test_state_that_is_kept_is_found() -> None:
    """A conversation must not change the next one."""

    class Keeping:
        """Adds what it has summed up over all runs before."""

        total = 0.0

        def __call__(self, key: str, x: Arrays, run: Run) -> Arrays:
            y = run(x)
            if "logits" in y:
                y["logits"] = y["logits"] + np.float32(self.total)
                self.total += 1e-3
            return y

    assert STATE_KEPT in found(tampered(Keeping()))


def test_a_last_chunk_that_moves_to_the_front_is_found() -> None:
    """Its cache has 90 positions: 10 are left for the last chunk of 16."""
    edgeq = Edgeq()
    model = edgeq.load(exported("llama_odd_cache", "float"))
    assert isinstance(model, LanguageModel)
    (only,) = step_findings(model, SEQUENCES, "xnnpack")
    assert only.kind == CACHE_OVERRUN
    assert "kv_cache_k_0 at position 74" in only.got


@pytest.mark.parametrize(
    ("name", "positions"),
    # A sliding window of the split cache begins again at the front.
    [("llama", "position 95"), ("gemma3_split", "2 positions, 0 to 95")],
)
def test_what_a_token_past_the_end_overwrites(name: str, positions: str) -> None:
    """A file does not refuse it, so that the application has to."""
    model = Edgeq().load(exported(name, "float"))
    assert isinstance(model, LanguageModel)
    text = past_the_end(model.steps, "xnnpack")
    assert text == (
        f"the cache holds 96 tokens, and one more overwrites {positions}: the application must "
        "stop there"
    )


@pytest.mark.slow
def test_a_file_that_drops_a_token_past_the_end_or_refuses_it() -> None:
    """The text says which of both it does."""

    def dropping(key: str, x: Arrays, run: Run) -> Arrays:
        return run(x) | {name: each for name, each in x.items() if name.startswith("kv_cache")}

    def refusing(key: str, x: Arrays, run: Run) -> Arrays:
        raise RuntimeError("gather index out of bounds\nNode number 3 failed to invoke.")

    for defect, text in ((dropping, "is not stored"), (refusing, "gather index out of bounds")):
        model = loaded(edgeq := tampered(defect), reference=None)
        found = past_the_end(model.steps, edgeq._session.runtime())
        assert text in found
        assert "Node number" not in found


def test_a_signature_that_is_missing_is_found() -> None:
    """A quantizer that wrote `decode` alone leaves the prompt to single steps."""
    edgeq = Edgeq()
    model = loaded(edgeq, float_tflite=exported("llama", "float"))
    only = next(iter(model.layouts.values()))
    model.layouts = {only.cache_length: replace(only, prefills={})}
    kinds = [each.kind for each in step_findings(model, SEQUENCES, "xnnpack")]
    assert set(kinds) == {MISSING_SIGNATURE}


def test_a_start_token_that_is_not_the_tokenizers_is_found() -> None:
    """The runtime begins each prompt with the bundle's."""
    edgeq = Edgeq()
    model = loaded(edgeq, tokenizer=tokenizer("llama"))
    assert step_findings(model, SEQUENCES[:1], "xnnpack") == []
    model.metadata = LmMetadata((3,), ())
    kinds = [each.kind for each in step_findings(model, SEQUENCES[:1], "xnnpack")]
    assert kinds == [OTHER_START_TOKEN]


def test_compare_tells_of_a_handover_that_differs() -> None:
    """Also where only budgets are asserted, and `check` is not called."""
    edgeq = tampered(OF_THE_LOOP["only the first chunk is kept"])
    comparison = edgeq.compare(loaded(edgeq), SEQUENCES)
    (first, *_) = [each for each in comparison.health if each.kind == PREFILL_DIFFERS]
    assert "kv_cache_k_0 at position 16" in first.got
    with pytest.raises(AssertionError, match=r"cause: the float file: .* position 16") as failed:
        assert_within_budget(comparison, conversion=Budget(sqnr_db=100))
    assert "output 'after_prefill'" in str(failed.value)
    assert "update (" not in str(failed.value)


@pytest.mark.parametrize("length", [4, 5, 90, 95, 96])
def test_a_sequence_of_any_length_has_no_finding(length: int) -> None:
    """Chunks that would run over the end of the cache are read token by token."""
    edgeq = Edgeq()
    model = edgeq.load(exported("llama", "float"), reference=module("llama"))
    comparison = edgeq.compare(model, sequences(2, length, 3))
    assert comparison.health == ()
    assert comparison.total.sqnr_db > 100
