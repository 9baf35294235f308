"""The language models of `fixtures.language` and their files are what its README says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ai_edge_litert.interpreter import Interpreter

from fixtures.language import encoder_decoder, loop, make, models

ROOT = Path(__file__).parents[2]

#: Lower limits of the SQNR in dB, of float16 by the file's name.
LIMITS = {"float": 115, "wi8": 30, "wi4": 6, "llama_mixed": 50}

#: Files that the loop runs, with what follows `decode` in the names of their signatures.
SOUND = {
    name: "_cache_64" if name == "llama_caches" else ""
    for name, export in make.EXPORTS.items()
    if export.model in models.FAMILIES and name != "llama_bool"
}


def sqnr_db(reference: np.ndarray, actual: np.ndarray) -> float:
    """Return the SQNR of all values."""
    return float(10 * np.log10(np.sum(reference**2) / np.sum((reference - actual) ** 2)))


def measured(name: str, path: Path) -> float:
    """Return the SQNR of the logits against torch, of two sequences that fill half of the cache."""
    module, both = models.tiny(make.EXPORTS[name].model), models.sequences(2, 50, seed=11)
    with torch.no_grad():
        wanted = [module(input_ids=torch.from_numpy(ids[None])).logits[0].numpy() for ids in both]
    got = [loop.logits(path, ids, SOUND.get(name, "")) for ids in both]
    return sqnr_db(np.array(wanted), np.array(got))


@pytest.mark.parametrize("family", models.FAMILIES)
def test_a_model_repeats_what_it_has_read(family: str) -> None:
    """From the separator on only the cache tells the next token."""
    tokens = torch.from_numpy(np.array(models.sequences(8, 80, seed=11)))
    with torch.no_grad():
        predicted = models.tiny(family)(input_ids=tokens).logits.argmax(-1)
    assert (predicted[:, 26:-1] == tokens[:, 27:]).float().mean() >= 0.98


@pytest.mark.parametrize("name", SOUND)
def test_a_file_computes_what_its_model_computes(name: str) -> None:
    """In every layout, fed with its own cache."""
    for quantization in {*make.EXPORTS[name].keep, *(["wi4"] if name in models.FAMILIES else [])}:
        figure = measured(name, models.exported(name, quantization))
        assert figure >= LIMITS.get(name, LIMITS[quantization]), quantization


def test_the_file_with_a_bool_mask_is_wrong() -> None:
    """It stands for a defect of the converter; a release that mends it makes another file."""
    assert measured("llama_bool", models.exported("llama_bool", "float")) < 25


def test_the_encoder_and_the_decoder_in_a_file_are_the_modules() -> None:
    """The state is handed on by name, and the decoder copies both from it and from its cache."""
    encoder, decoder = encoder_decoder.tiny()
    interpreter = Interpreter(str(models.exported("encoder_decoder", "float")))
    encode, decode = map(interpreter.get_signature_runner, ("encode", "decode"))
    figures, copied = [], []
    for source, tokens in encoder_decoder.pairs(2, 48, seed=11):
        empty = encoder_decoder.sample_inputs()["decode"]
        ours = {k: v for k, v in empty.items() if k[:2] in ("k_", "v_")}
        theirs = {k: v.numpy() for k, v in ours.items()}
        with torch.no_grad():
            states = encoder(torch.from_numpy(source[None]))
            file_states = encode(source=source[None].astype(np.int32))
            for position, token in enumerate(tokens):
                ids, at = np.array([[token]], np.int32), np.array([position], np.int32)
                ours = decoder(torch.from_numpy(ids), torch.from_numpy(at), **states, **ours)
                theirs = decode(tokens=ids, input_pos=at, **file_states, **theirs)
                logits = ours.pop("logits").numpy()
                figures.append(sqnr_db(logits, theirs.pop("logits")))
                if position + 1 < len(tokens):
                    copied.append(int(logits.argmax()) == tokens[position + 1])
    assert min(figures) >= 100
    assert np.mean(np.reshape(copied, (2, 47))[:, :12]) >= 0.8  # from the encoder
    assert np.mean(np.reshape(copied, (2, 47))[:, 25:]) >= 0.6  # from the cache


def test_the_whisper_in_a_file_is_the_modules() -> None:
    """Without a cache: the decoder reads all tokens at each step."""
    encoder, decoder = encoder_decoder.whisper()
    interpreter = Interpreter(str(models.exported("whisper", "float")))
    encode, decode = map(interpreter.get_signature_runner, ("encode", "decode"))
    features = torch.randn(1, 80, 100)
    tokens = torch.randint(0, 250, (1, 32), dtype=torch.int32)
    mask = torch.full((32, 32), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        states = encoder(features)
        logits = decoder(states, tokens, mask)
    encoded = encode(args_0=features.numpy())["output_0"]
    decoded = decode(args_0=encoded, args_1=tokens.numpy(), args_2=mask.numpy())["output_0"]
    assert sqnr_db(states.numpy(), encoded) >= 100
    assert sqnr_db(logits.numpy(), decoded) >= 100


@pytest.mark.slow
@pytest.mark.timeout(600)  # 300 steps, 20 s on an idle core
def test_training_again_makes_a_model_that_copies() -> None:
    """By the same function that `make --train` calls, in a third of the steps."""
    threads = torch.get_num_threads()
    module = make.train("llama", steps=300)
    torch.set_num_threads(threads)
    tokens = torch.from_numpy(np.array(models.sequences(8, 64, seed=11)))
    with torch.no_grad():
        predicted = module(input_ids=tokens).logits.argmax(-1)
    assert (predicted[:, 26:-1] == tokens[:, 27:]).float().mean() >= 0.9


@pytest.mark.sweep(0, slow=4)
@pytest.mark.timeout(900)  # up to two exports of 60 s
@pytest.mark.parametrize("name", [*make.EXPORTS, "encoder_decoder"])
def test_the_installed_converter_writes_the_same(name: str, tmp_path: Path) -> None:
    """A release that writes another layout must be seen: run `python -m fixtures.language.make`."""
    command = [sys.executable, "-m", "fixtures.language.make", name, "--into", str(tmp_path)]
    # `export_hf` replaces parts of transformers, and prints.
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)

    made = sorted(tmp_path.iterdir())
    stored = sorted(models.EXPORTED.glob(f"{name}.*"))
    assert [path.name for path in made] == [path.name for path in stored]
    for new, old in zip(made, stored, strict=True):
        assert loop.signatures(new) == loop.signatures(old)
        if name in SOUND or name == "llama_bool":
            assert measured(name, new) == pytest.approx(measured(name, old), abs=0.5)
