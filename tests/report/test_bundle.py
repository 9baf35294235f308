"""Bundles of failed tests: the script runs elsewhere, and shows what was recorded."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fixtures.tflite.stateful import counter
from fixtures.tflite.writer import FileWriter, chain
from pytest_edgeq import Comparison, Edgeq, QuantizedModel
from pytest_edgeq.compare.failed_samples import FailedSamples, compared_samples
from pytest_edgeq.report.bundle import Evidence, bundle_name, remove_bundle, write_bundle
from pytest_edgeq.report.run import RunRecorder, read_run

Array = npt.NDArray[Any]


def kept(
    tmp_path: Path, *measured: Comparison | FailedSamples, models: Sequence[QuantizedModel] = ()
) -> Path:
    """Write a bundle, and return a copy of it in another folder."""
    folder = tmp_path / "bundles" / "one"
    run = RunRecorder().run()
    samples = [
        each if isinstance(each, FailedSamples) else compared_samples(each) for each in measured
    ]
    write_bundle(folder, Evidence(models, samples, ()), run, "it failed", tmp_path)
    moved = tmp_path / "elsewhere"
    shutil.rmtree(moved, ignore_errors=True)
    shutil.move(folder, moved)
    assert not list(folder.parent.iterdir())
    return moved


def shown(folder: Path) -> tuple[int, str]:
    """Run the script of a bundle in this process, and return exit status and what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(folder / "reproduce.py"), run_name="__main__")
    return int(ended.value.code or 0), printed.getvalue()


def shown_alone(folder: Path) -> tuple[int, str]:
    """Run the script of a bundle by itself, without this package and without environment."""
    done = subprocess.run(
        [sys.executable, "-I", str(folder / "reproduce.py")],
        capture_output=True,
        encoding="utf-8",
        env={"PATH": os.environ["PATH"]},
        cwd=folder.parent,
        check=False,
        timeout=100,
    )
    return done.returncode, done.stdout


def file_of(op: str, *, signatures: Sequence[str] = ("run",)) -> bytes:
    """Write a float file of one op, with as many entry points."""
    file = FileWriter()
    for number, key in enumerate(signatures):
        graph = file.graph(key)
        tensors = graph.tensor("float32"), graph.tensor("float32")
        graph.op(op, tensors[:1], tensors[1:])
        graph.borders(tensors[:1], tensors[1:])
        file.signature(key, [("in/put", tensors[0])], [("out put", tensors[1])], number)
    return file.content()


def values(count: int) -> list[Array]:
    """Return samples, the last one the largest."""
    return [np.full((1, 4), i + 0.25, np.float32) * [1, -1, 2, -2] for i in range(count)]


def as_float32(samples: Sequence[Array]) -> list[tuple[Array]]:
    """Return samples of the dtype that the files expect."""
    return [(each.astype(np.float32),) for each in samples]


def compared(
    content: bytes, reference: Callable[..., Any], count: int = 6, **options: Any
) -> Comparison:
    """Compare a file with a reference."""
    maker = Edgeq()
    loaded = maker.load(content, reference=reference, name="name: x/y", **options)
    return maker.compare(loaded, as_float32(values(count)))


def test_the_failure_is_shown_elsewhere(tmp_path: Path) -> None:
    """In another folder, without this package, without environment; odd names do no harm."""
    comparison = compared(file_of("NEG"), lambda x: -x + 0.5)
    folder = kept(tmp_path, comparison)
    status, text = shown_alone(folder)
    assert status == 1
    assert text.startswith("it failed\n\nmodel.tflite: name: x/y, signature run, runtime xnnpack\n")
    (worst,) = {each.index for each in comparison.worst_samples} & {0}
    assert "  output out put:\n    max abs error: 0.5 (recorded: 0.5)\n" in text
    assert f"    sample {worst} [0, 0]: expected 0.25, got -0.25\n" in text
    assert text.endswith("\nshown as recorded\n")
    script = (folder / "reproduce.py").read_text("utf-8")
    assert "pytest_edgeq" not in script
    assert read_run(folder / "record.json").tests == []
    with np.load(folder / "samples.npz") as samples:
        assert set(samples) == {f"{each.index}/in/put" for each in comparison.worst_samples}


def test_what_is_not_shown_as_recorded(tmp_path: Path) -> None:
    """Other outputs than recorded, as of another machine's kernels, and a file that was changed."""
    folder = kept(tmp_path, compared(file_of("NEG"), lambda x: x))
    with np.load(folder / "got.npz") as got:
        np.savez(folder / "got.npz", **{key: got[key] + 1 for key in got.files})
    status, text = shown(folder)
    assert status == 2
    assert "not the recorded outputs: xnnpack kernels computed something else then" in text
    assert text.endswith("NOT shown as recorded\n")
    (folder / "model.tflite").write_bytes(file_of("ABS"))
    status, text = shown(folder)
    assert status == 2
    assert "not the recorded file: it was changed" in text


def test_a_file_without_samples_is_described(tmp_path: Path) -> None:
    """Its inputs, outputs and ops, where a test failed on them; each signature by itself."""
    loaded = Edgeq().load(file_of("NEG", signatures=("one", "two")), name="both")
    status, text = shown(kept(tmp_path, models=[loaded, loaded.signature("one")]))
    assert status == 1
    for key, op in (("one", "NEG #0"), ("two", "NEG #1:0")):
        assert (
            f"model.tflite: both[{key}], signature {key}, runtime xnnpack\n"
            "  no samples were compared; the file's dtypes:\n"
            "  input in/put: float32 [1, 4]\n"
            "  output out put: float32 [1, 4]\n"
            f"  {op}: float32 -> float32\n"
        ) in text
    assert text.count("model.tflite") == 2


def test_several_models_and_signatures(tmp_path: Path) -> None:
    """Files of a second model, and of a second comparison, end in its number."""
    maker = Edgeq()
    references = {"one": lambda x: -x + 1.0, "two": lambda x: -x + 2.0}
    both = maker.load(file_of("NEG", signatures=("one", "two")), reference=references)
    other = maker.load(file_of("ABS"), reference=lambda x: abs(x) + 3.0, name="other")
    folder = kept(
        tmp_path,
        *(maker.compare(both.signature(key), as_float32(values(2))) for key in references),
        maker.compare(other, as_float32(values(4))),
        models=[both, other],
    )
    status, text = shown(folder)
    assert status == 1
    titles = [line for line in text.splitlines() if ".tflite" in line]
    assert [title.partition(",")[0] for title in titles] == [
        "model.tflite: model[one]",
        "model.tflite: model[two]",
        "model_2.tflite: other",
    ]
    errors = [line for line in text.splitlines() if "max abs error" in line]
    assert [line.split()[3] for line in errors] == ["1", "2", "3"]
    arrays = [
        f"{side}{at}.npz" for side in ("expected", "got", "samples") for at in ("", "_2", "_3")
    ]
    others = ["bundle.json", "failure.txt", "model.tflite", "model_2.tflite", "record.json"]
    found = {path.name for path in folder.iterdir()}
    assert found == {*arrays, *others, "reproduce.py"}


def test_a_float_file_is_kept_beside_the_other(tmp_path: Path) -> None:
    """With its outputs on the same samples."""
    between = file_of("ABS")
    comparison = compared(file_of("NEG"), lambda x: abs(x), float_tflite=between)
    folder = kept(tmp_path, comparison)
    assert (folder / "float.tflite").read_bytes() == between
    with (
        np.load(folder / "float_tflite.npz") as outputs,
        np.load(folder / "expected.npz") as wanted,
    ):
        assert set(outputs) == set(wanted)
        assert all(np.array_equal(outputs[key], wanted[key]) for key in outputs)
    assert shown(folder)[0] == 1


def test_samples_of_a_file_with_state_follow_each_other(tmp_path: Path) -> None:
    """They are run from a fresh start, in the order in which the test gave them."""
    comparison = compared(counter(), lambda x: x)
    folder = kept(tmp_path, comparison)
    with np.load(folder / "got.npz") as got, np.load(folder / "samples.npz") as samples:
        first, *_, last = samples.files
        assert np.array_equal(got[last.replace("x", "total")], sum(samples.values()))
        assert first != last
    status, text = shown(folder)
    assert status == 1
    assert "the file keeps state: the samples follow each other, from a fresh start" in text


def quantized_image() -> bytes:
    """Write a file that reverses nothing: int8 [1, 2, 3, 4], channels last, one scale a side."""
    x = {"dtype": "int8", "shape": (1, 2, 3, 4), "scales": [0.5], "zero_points": [3]}
    y = x | {"dtype": "int16", "scales": [0.25], "zero_points": [0]}
    quantize = ("QUANTIZE", "x", "y", "QuantizeOptions")
    return chain(quantize, inputs="x", outputs="y", key="run", x=x, y=y)


def test_quantized_inputs_of_another_layout(tmp_path: Path) -> None:
    """The script quantizes, turns, runs, turns back and dequantizes, as `run` does."""
    maker = Edgeq()
    loaded = maker.load(quantized_image(), reference=lambda x: x + 2.0, layout="nhwc")
    random = np.random.default_rng(0)
    samples = [(random.normal(0, 20, (1, 4, 2, 3)).astype(np.float32),) for _ in range(5)]
    comparison = maker.compare(loaded, samples)
    folder = kept(tmp_path, comparison)
    status, text = shown(folder)
    assert status == 1, text
    with np.load(folder / "got.npz") as got:
        for each in comparison.worst_samples:
            expected = loaded.run(*each.inputs.args)["y"]
            assert np.array_equal(got[f"{each.index}/y"], expected)
    assert "max LSB error: " in text
    assert "max LSB error: -" not in text


def test_any_length_that_a_file_takes(tmp_path: Path) -> None:
    """Samples may have different shapes."""
    free = {"signature": (1, -1)}
    content = chain(("NEG", "x", "y"), inputs="x", outputs="y", key="run", x=free, y=free)
    maker = Edgeq()
    loaded = maker.load(content, reference=lambda x: x)
    lengths = [(np.ones((1, n), np.float32),) for n in (2, 5, 3)]
    status, text = shown(kept(tmp_path, maker.compare(loaded, lengths)))
    assert status == 1, text
    assert "max abs error: 2 (recorded: 2)" in text


def test_a_runtime_that_the_script_lacks(tmp_path: Path) -> None:
    """The outputs of a board are stored; the script says that it runs on other kernels."""

    def board(path: Path, signature: str | None) -> Callable[..., Any]:
        return lambda inputs: {"out put": -2 * inputs["in/put"]}

    maker = Edgeq(runtimes={"board": board})
    loaded = maker.load(file_of("NEG"), reference=lambda x: -x)
    comparison = maker.compare(loaded, as_float32(values(3)), runtime="board")
    status, text = shown(kept(tmp_path, comparison))
    assert status == 2
    assert "recorded on board, run on xnnpack here" in text
    assert "max abs error: 0 (recorded: 4.5)" in text


def test_a_reference_that_fails_meanwhile(tmp_path: Path) -> None:
    """File and samples are still stored, with the reason."""
    works = [True]

    def reference(x: Array) -> Array:
        if not works[0]:
            raise RuntimeError("the session was closed")
        return x

    comparison = compared(file_of("NEG"), reference)
    works.clear()
    works.append(False)
    folder = kept(tmp_path, comparison)
    status, text = shown(folder)
    assert status == 1
    assert "samples could not be run again: RuntimeError: " in text
    assert (folder / "samples.npz").is_file()


def test_a_bundle_replaces_the_one_before(tmp_path: Path) -> None:
    """Nothing of it is left; a folder that is no bundle is not touched."""
    folder = tmp_path / "bundles" / "one"
    run = RunRecorder().run()
    one = compared(file_of("NEG"), lambda x: x)
    evidence = Evidence([], [compared_samples(one)], [])
    assert not evidence.is_empty
    write_bundle(folder, evidence, run, "first", tmp_path)
    (folder / "note.txt").touch()
    loaded = Edgeq().load(file_of("ABS"))
    write_bundle(folder, Evidence([loaded], [], []), run, "second", tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [
        "bundle.json",
        "failure.txt",
        "model.tflite",
        "record.json",
        "reproduce.py",
    ]
    assert (folder / "failure.txt").read_text("utf-8") == "second\n"
    remove_bundle(folder)
    assert not folder.exists()
    folder.mkdir()
    (folder / "mine").touch()
    remove_bundle(folder)
    with pytest.raises(OSError, match="one"):
        write_bundle(folder, Evidence([loaded], [], []), run, "third", tmp_path)
    assert [path.name for path in folder.parent.iterdir()] == ["one"]
    assert [path.name for path in folder.iterdir()] == ["mine"]


def test_names_of_bundles(tmp_path: Path) -> None:
    """Short, of plain characters, and unlike those of tests that differ in one character."""
    tests = [
        "tests/test_x.py::TestA::test_it[ä/b c:*?]",
        "tests/test_x.py::TestA::test_it[ä/b c:*!]",
        "tests/test_x.py::" + 50 * "long_" + "[a]",
        "tests/test_x.py::" + 50 * "long_" + "[b]",
    ]
    names = [bundle_name(test, tmp_path) for test in tests]
    assert len(set(names)) == 4
    assert names[0].startswith("tests-test_x.py-TestA-test_it-b-c-")
    for name in names:
        assert len(name) <= 70
        assert name.isascii()
        assert not set(name) & set(r"\/:*?<>|[]")
