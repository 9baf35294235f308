"""`.litertlm` and `.task` in `edgeq show`, `diff` and `compare`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pytest_edgeq.runtimes.edge import EdgeFile
from tests.cli.conftest import Refused, Run, without_torch
from tests.tflite.bundle_files import FLOAT, INT8, OTHER, litertlm, task


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Two models and a tokenizer."""
    models = {"prefill_decode": INT8, "embedder": OTHER}
    return litertlm(tmp_path / "model.litertlm", models, tokenizer="{}")


def test_show_lists_sections_and_shows_each_model(bundle: Path, run: Run) -> None:
    """Each headed by its name, with the text that the file alone has."""
    done = run("show", bundle)

    assert (done.exit_code, done.stderr) == (0, "")
    sizes = [INT8.stat().st_size, OTHER.stat().st_size]
    alone = [run("show", path).stdout.partition("\n")[2] for path in (INT8, OTHER)]
    head = f"""model.litertlm: 3 sections, {sum(sizes) + 18:,} bytes
  section            type               bytes
  HF_Tokenizer_Zlib  HF_Tokenizer_Zlib     18
  prefill_decode     TFLiteModel        {sizes[0]:,}
  embedder           TFLiteModel        {sizes[1]:,}

model.litertlm:prefill_decode: {sizes[0]:,} bytes
"""
    assert (
        done.stdout == f"{head}{alone[0]}\nmodel.litertlm:embedder: {sizes[1]:,} bytes\n{alone[1]}"
    )

    document = json.loads(run("show", bundle, "--json").stdout)
    assert document["file"] == str(bundle)
    assert [each["name"] for each in document["sections"]] == [
        *("HF_Tokenizer_Zlib", "prefill_decode", "embedder")
    ]
    kind = "HF_Tokenizer_Zlib"
    assert document["sections"][0] == {"name": kind, "size_bytes": 18, "type": kind}
    expected = json.loads(run("show", INT8, "--json").stdout)
    expected["file"] = f"{bundle}:prefill_decode"
    assert document["models"]["prefill_decode"] == expected
    assert list(document["models"]) == ["embedder", "prefill_decode"]


def test_show_of_one_section(bundle: Path, run: Run, refused: Refused) -> None:
    """As of a file; a name that is in none is refused, and so is a section of a file."""
    done = run("show", bundle, "--section", "embedder")
    assert done.exit_code == 0
    title, _, rest = done.stdout.partition("\n")
    assert title == f"model.litertlm:embedder: {OTHER.stat().st_size:,} bytes"
    assert rest == run("show", OTHER).stdout.partition("\n")[2]
    assert json.loads(run("show", bundle, "--section", "embedder", "--json").stdout)["ops"]

    says = "no model 'embeder' (did you mean embedder?)"
    refused("show", bundle, "--section", "embeder", says=says)
    refused("show", INT8, "--section", "embedder", says="--section: expected a bundle, got")


def test_node_data_is_of_one_model(
    bundle: Path, tmp_path: Path, run: Run, refused: Refused
) -> None:
    """The tensors of several sections would have the same names."""
    says = "--model-explorer needs one model: choose it by --section"
    refused("show", bundle, "--model-explorer", tmp_path / "data", says=says)
    done = run("show", bundle, "--section", "embedder", "--model-explorer", tmp_path / "data")
    assert done.exit_code == 0


def test_findings_of_any_model_are_found(tmp_path: Path, run: Run, refused: Refused) -> None:
    """Exit code 1, whichever section has them; a section that is no model ends the command."""
    from tests.cli.test_cli_show import defective

    path = task(tmp_path / "m.task", {"a.tflite": defective(), "b.tflite": INT8})
    assert run("show", path).exit_code == 1
    broken = task(tmp_path / "n.task", {"a.tflite": INT8, "b.tflite": b"x" * 90})
    refused("show", broken, says="n.task:b.tflite: not a .tflite file")


def test_diff_pairs_sections_by_name(bundle: Path, tmp_path: Path, run: Run) -> None:
    """The order does not matter; missing sections and other contents are differences."""
    same = run("diff", bundle, bundle)
    assert same.exit_code == 0
    size = f"{OTHER.stat().st_size:,} bytes"
    assert f"{bundle}:embedder and {bundle}:embedder are identical: {size}" in same.stdout

    models = {"embedder": OTHER, "aux": INT8, "prefill_decode": FLOAT}
    new = litertlm(tmp_path / "new.litertlm", models, tokenizer='{"other": 1}')
    done = run("diff", bundle, new)
    assert done.exit_code == 1
    alone = run("diff", INT8, FLOAT).stdout.partition("\n")[2]
    tokenizer, rest = done.stdout.split("\n\n", 1)
    assert tokenizer.startswith("section HF_Tokenizer_Zlib: other content (18 → ")
    assert rest == (
        f"{bundle}:prefill_decode → {new}:prefill_decode\n{alone}\n"
        f"{bundle}:embedder and {new}:embedder are identical: {size}\n\n"
        f"section aux: only in {new}\n"
    )
    document = json.loads(run("diff", bundle, new, "--json").stdout)
    assert not document["equal"]
    assert document["changed_sections"] == ["HF_Tokenizer_Zlib", "aux"]
    equal = {name: each["equal"] for name, each in document["models"].items()}
    assert equal == {"prefill_decode": False, "embedder": True}


def test_diff_of_one_section_and_of_a_file(bundle: Path, run: Run, refused: Refused) -> None:
    """A bundle of several has to be chosen from, where the other is a file."""
    done = run("diff", bundle, INT8, "--section", "prefill_decode")
    assert done.exit_code == 0
    size = f"{INT8.stat().st_size:,} bytes"
    assert done.stdout == f"{bundle}:prefill_decode and {INT8} are identical: {size}\n"
    says = "Choose one: edgeq.load(path, section='prefill_decode'), or --section"
    refused("diff", INT8, bundle, says=says)


def test_compare_of_one_section(bundle: Path, tmp_path: Path, run: Run, refused: Refused) -> None:
    """Against a file or another bundle."""
    entry, samples = EdgeFile(FLOAT).signature.inputs[0], tmp_path / "x.npz"
    shape = [max(length, 1) for length in entry.tensor.shape_signature]
    np.savez(samples, **{entry.name: np.ones(shape, np.float32)})  # type: ignore[arg-type]
    done = run("compare", FLOAT, bundle, "--section", "prefill_decode", "--inputs", samples)
    assert done.exit_code == 0
    assert f"{bundle.name}:prefill_decode against" in done.stdout.replace("\n    ", " ")
    says = "its models: prefill_decode, embedder"
    refused("compare", FLOAT, bundle, "--inputs", samples, says=says)


def test_bundles_are_shown_without_torch(bundle: Path) -> None:
    """The package that reads them needs none."""
    done = without_torch("show", bundle)
    assert done.returncode == 0, done.stderr
    assert "model.litertlm:embedder" in done.stdout
