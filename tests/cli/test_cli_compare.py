"""`edgeq compare`: figures, budgets, samples in every accepted form, and those that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fixtures.language.models import EXPORTED, exported, sequences
from fixtures.tflite.kinds import free_shapes
from fixtures.tflite.writer import one_op
from pytest_edgeq.numerics.metrics import sqnr_db
from pytest_edgeq.runtimes.edge import EdgeFile
from tests.cli.conftest import CONVERTED, Check, Refused, Run
from tests.runtimes.isolate.runners import segfault_at_run

FLOAT = CONVERTED / "attention.float.tflite"
INT8 = CONVERTED / "attention.int8.tflite"
SHAPE = (1, 5, 8)


def values(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Standard normal floats."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """Write an `.npz` file of arrays, and return its path."""

    def save(name: str = "x.npz", **arrays: npt.NDArray[Any]) -> Path:
        np.savez(tmp_path / name, allow_pickle=True, **arrays)
        return tmp_path / name

    return save


def test_the_figures(
    saved: Callable[..., Path], run: Run, golden: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 0 without a budget, however large finite errors are."""
    path = saved(args_0=values(6, *SHAPE))
    monkeypatch.chdir(CONVERTED)

    done = run("compare", FLOAT.name, INT8.name, "--inputs", path, "--runtime", "reference")

    golden("compare", done.stdout)
    assert done.exit_code == 0


def test_the_document_has_the_figures_of_both_files(saved: Callable[..., Path], run: Run) -> None:
    """They are those that numpy computes from the outputs of both interpreters."""
    samples = values(4, *SHAPE)
    path = saved(args_0=samples)

    done = run("compare", FLOAT, INT8, "--inputs", path, "--json")

    sides = [
        np.concatenate([edge.decode(edge.run(["args_0"], [x], "xnnpack"))[0] for x in samples])
        for edge in (EdgeFile(FLOAT), EdgeFile(INT8))
    ]
    expected = sides[0].astype(np.float64)
    noise = expected - sides[1]
    document = json.loads(done.stdout)
    total = document["stages"]["total"]
    assert total["n_samples"] == 4
    assert total["sqnr_db"] == pytest.approx(sqnr_db((expected**2).sum(), (noise**2).sum()))
    assert total["max_abs_error"] == pytest.approx(np.abs(noise).max())
    assert (document["budget"], document["violations"]) == (None, [])


def test_a_budget(saved: Callable[..., Path], run: Run) -> None:
    """Exit code 1 where a bound is not kept, with the budget that is; 0 with that one."""
    path = saved(args_0=values(6, *SHAPE))
    files = ("compare", FLOAT, INT8, "--inputs", path)

    missed = run(*files, "--budget", "sqnr_db=60", "--budget", "cosine_similarity=0.9")
    kept = run(*files, "--budget", "sqnr_db=12.6", "--budget", "cosine_similarity=0.9")
    document = json.loads(run(*files, "--budget", "sqnr_db=60", "--json").stdout)

    assert (missed.exit_code, kept.exit_code) == (1, 0)
    assert "budget: 1 violation\n  total, output 'output_0': sqnr_db: expected" in missed.stdout
    assert "\n  update: this measurement needs --budget sqnr_db=12.6 --budget c" in missed.stdout
    assert kept.stdout.endswith("budget: kept (sqnr_db=12.6, cosine_similarity=0.9)\n")
    assert document["budget"] == {"sqnr_db": 60.0}
    assert len(document["violations"]) == 1


FORMS: dict[str, dict[str, npt.NDArray[Any]]] = {
    "one more axis": {"args_0": values(4, *SHAPE)},
    "batches of one": {"args_0": values(4, *SHAPE)[:, 0]},
    "float64": {"args_0": values(4, *SHAPE).astype(np.float64)},
    "as savez names them": {"arr_0": values(4, *SHAPE)},
    "beside others": {"args_0": values(4, *SHAPE), "labels": np.arange(9)},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_samples(form: str, saved: Callable[..., Path], run: Run) -> None:
    """The same samples give the same figures; so do they in files of one sample each."""
    one_by_one = [saved(f"{i}.npz", args_0=x) for i, x in enumerate(values(4, *SHAPE))]
    options = [word for path in one_by_one for word in ("--inputs", path)]

    several = run("compare", FLOAT, INT8, *options, "--json")
    together = run("compare", FLOAT, INT8, "--inputs", saved(**FORMS[form]), "--json")

    assert together.exit_code == 0
    figures = [json.loads(done.stdout)["stages"] for done in (several, together)]
    assert figures[0] == figures[1]
    assert figures[0]["total"]["n_samples"] == 4


@pytest.mark.parametrize("shape", [(4, 16), (4, 1, 16)], ids=["batch", "one more axis"])
def test_a_free_batch_is_read_sample_by_sample(
    saved: Callable[..., Path], run: Run, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    """An axis more in front gives the same."""
    path = tmp_path / "free.tflite"
    path.write_bytes(free_shapes().content)

    done = run("compare", path, path, "--inputs", saved(x=values(*shape)), "--json")

    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["stages"]["total"]["n_samples"] == 4


def test_two_inputs_by_name(saved: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    """Each array goes to the input of its name, whatever the order in the file."""
    side = {"dtype": "float32", "shape": (1, 2)}
    path = tmp_path / "sub.tflite"
    path.write_bytes(
        one_op("SUB", [{**side, "name": "left"}, {**side, "name": "right"}], [side], "SubOptions")
    )
    samples = saved(right=values(3, 1, 2, seed=1), left=values(3, 1, 2))

    done = run("compare", path, path, "--inputs", samples, "--json")

    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["stages"]["total"]["max_abs_error"] == 0.0


def test_outputs_that_are_not_finite_are_found(saved: Callable[..., Path], run: Run) -> None:
    """Exit code 1 without a budget."""
    samples = values(4, *SHAPE)
    samples[2] = np.nan

    done = run("compare", FLOAT, FLOAT, "--inputs", saved(args_0=samples))

    assert done.exit_code == 1
    assert "NaN or infinite" in done.stdout


def test_outputs_that_are_clipped_are_a_finding(saved: Callable[..., Path], run: Run) -> None:
    """Inputs of ten times the calibrated range are a health finding; the exit code stays 0."""
    done = run("compare", FLOAT, INT8, "--inputs", saved(args_0=10 * values(4, *SHAPE)))

    assert done.exit_code == 0
    assert "clipped_input: input 'args_0': expected values within the range of" in done.stdout


TROUBLE: dict[str, tuple[dict[str, npt.NDArray[Any]], str]] = {
    "missing": ({"args_1": values(4, *SHAPE)}, "has no array 'args_0' (did you mean args_1?)"),
    "shape": ({"args_0": values(4, 5)}, "expected shape [1, 5, 8], or n of them as [n, 1, 5, 8]"),
    "length": ({"args_0": values(4, 1, 5, 9)}, "expected shape [1, 5, 8], or n of them as [n"),
    "codes": ({"args_0": np.ones((4, *SHAPE), np.int8)}, "expects float32, got int8"),
    "objects": ({"args_0": np.array([None])}, "the array 'args_0' cannot be read"),
    "empty": ({"args_0": values(0, *SHAPE)}, "no sample was measured"),
}


@pytest.mark.parametrize("case", TROUBLE)
def test_samples_that_do_not_fit(case: str, saved: Callable[..., Path], refused: Refused) -> None:
    """A sentence and exit code 2."""
    arrays, sentence = TROUBLE[case]
    refused("compare", FLOAT, INT8, "--inputs", saved(**arrays), says=sentence)


def test_what_is_no_npz_file(tmp_path: Path, refused: Refused) -> None:
    """Text, an array without a name, a file that is missing."""
    np.save(tmp_path / "one.npy", values(*SHAPE))
    (tmp_path / "text.npz").write_text("no samples")
    for name, sentence in {
        "one.npy": "holds one array without a name",
        "text.npz": "text.npz is no .npz file: write np.savez(path, args_0=…)",
        "gone.npz": "No such file",
    }.items():
        refused("compare", FLOAT, INT8, "--inputs", tmp_path / name, says=sentence)


def test_language_models_by_position(saved: Callable[..., Path], run: Run) -> None:
    """Sequences of several files, which may have other lengths."""
    paths = saved(tokens=np.stack(sequences(3, 20, 0))), saved("b.npz", tokens=sequences(1, 40, 1))
    inputs = [word for path in paths for word in ("--inputs", path)]
    files = exported("llama", "float"), exported("llama", "wi8")

    done = run("compare", *files, *inputs, "--budget", "sqnr_db=30")

    assert done.exit_code == 0
    pytest.LineMatcher(done.stdout.splitlines()).fnmatch_lines(
        [
            "*xnnpack, 4 samples",
            "output * logits  after_prefill",
            "logits, quarter 4 * 30 to 39 *1 *3?.??  *",
            "worst samples: [xb].npz[[][0-2]] (3*",
            "budget: kept (sqnr_db=30.0)",
        ]
    )
    document = json.loads(run("compare", *files, *inputs, "--json").stdout)
    assert document["positions"]["total"]["n"] == [4] * 20 + [1] * 20
    assert run("compare", *files, *inputs, "--budget", "sqnr_db=50").exit_code == 1


def test_inputs_of_language_models_that_do_not_fit(
    saved: Callable[..., Path], run: Run, refused: Refused
) -> None:
    """A signature is compared on its own inputs."""
    file = exported("llama", "float")
    for name, values, sentence in (
        ("ids", np.ones((2, 8), np.int64), "has no array 'tokens', and sequences of token ids"),
        ("tokens", np.ones((2, 97), np.int64), "97 tokens, and the file's cache has 96"),
        ("tokens", np.ones((2, 8), np.float32), "expected one sequence of token ids"),
        ("tokens", np.ones((0, 8), np.int64), "x.npz holds no sequence"),
    ):
        path = saved(**{name: values})
        refused("compare", file, file, "--inputs", path, says=sentence)
    says = "float_tflite: expected a file of a language model"
    refused("compare", CONVERTED / "nested.float.tflite", file, "--inputs", path, says=says)
    unknown = exported("linear_attention")
    told = run("compare", unknown, unknown, "--inputs", path).stderr
    assert "input 'kv_cache_c_0' of signature 'decode' is not known" in told
    assert "or compare one signature: --signature decode" in told


def test_files_and_budgets_that_do_not_fit(saved: Callable[..., Path], refused: Refused) -> None:
    """Other inputs or outputs, and bounds on what an output does not have."""
    path = saved(args_0=values(2, 2, 4))
    nested, other = CONVERTED / "nested.float.tflite", CONVERTED / "local.float.tflite"
    several = EXPORTED / "encoder_decoder.float.tflite"
    for arguments, sentence in (
        ((nested, other), "expects shape"),
        ((nested, nested, "--budget", "max_lsb_error=1"), "has no scale, and so no LSB"),
        ((nested, nested, "--budget", "sqnr=1"), "unknown metric 'sqnr' (did you mean sqnr_db"),
        ((nested, nested, "--budget", "sqnr_db"), "expected metric=bound, such as sqnr_db=30"),
        ((nested, nested, "--budget", "sqnr_db=x"), "sqnr_db: expected a number, got 'x'"),
        ((nested, nested, "--budget", "sqnr_db=-1"), "a bound of 0 dB or below"),
        (
            (nested, nested, "--runtime", "tpu"),
            "unknown runtime 'tpu' (did you mean gpu?); valid: xnnpack",
        ),
        ((nested, nested, "--signature", "serve"), "the file has no signature 'serve'"),
        (
            (nested, several),
            "has 2 signatures ['encode', 'decode']: choose one: --signature encode",
        ),
    ):
        refused("compare", *arguments, "--inputs", path, says=sentence)


def test_a_file_whose_kernels_crash(saved: Callable[..., Path], run: Run, tmp_path: Path) -> None:
    """The command survives, and names the step and the signal."""
    path = tmp_path / "model.tflite"
    path.write_bytes(segfault_at_run())
    samples = saved(arr_0=np.ones((1, 4, 4, 4), np.float32))

    done = run("compare", path, path, "--inputs", samples)

    assert done.exit_code == 2
    assert done.stderr.startswith("Error: the xnnpack runtime crashed in the step run: expected")
    assert "got SIGSEGV (invalid memory access)" in done.stderr
