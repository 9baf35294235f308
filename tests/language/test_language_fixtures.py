"""The language models of `fixtures.language` and their files are what its README says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fixtures.language import loop, make, models

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


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND)
def test_a_file_computes_what_its_model_computes(name: str) -> None:
    """In every layout, fed with its own cache."""
    for quantization in {*make.EXPORTS[name].keep, *(["wi4"] if name in models.FAMILIES else [])}:
        figure = measured(name, models.exported(name, quantization))
        assert figure >= LIMITS.get(name, LIMITS[quantization]), quantization


def test_the_file_with_a_bool_mask_is_wrong() -> None:
    """It stands for a defect of the converter; a release that mends it makes another file."""
    assert measured("llama_bool", models.exported("llama_bool", "float")) < 25


@pytest.mark.slow
@pytest.mark.full  # exports in processes of their own; the libraries are pinned
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
