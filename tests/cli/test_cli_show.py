"""`edgeq show`: texts, the document, findings and files that are none."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.tflite.writer import FileWriter, one_op
from tests.cli.conftest import CONVERTED, Check, Refused, Run
from tests.report.runs import event, layers, model, outcome, run_of
from tests.runtimes.gpu.delegation_texts import transposed
from tests.tflite.one_op_files import layer

SIDE = {"dtype": "int8", "scales": [0.5], "zero_points": [3]}


def written(path: Path, content: bytes) -> Path:
    """Write a file, and return its path."""
    path.write_bytes(content)
    return path


def two_signatures() -> bytes:
    """A file with an entry point for each of two sizes."""
    file = FileWriter()
    for length in (4, 8):
        key, x = f"of_{length}", {"dtype": "int8", "shape": (1, length), "scales": [0.5]}
        y = x | {"scales": [1 / 256], "zero_points": [-128]}
        logistic = ("LOGISTIC", "x", "y")
        file.graph(key).fill(logistic, inputs="x", outputs="y", key=key, x=x, y=y)
    return file.content()


def defective() -> bytes:
    """One CONV_2D with a defect of each kind that parameters tell."""
    return one_op(
        "CONV_2D",
        [
            {"dtype": "int8", "shape": (1, 2, 2, 1), "scales": [1.0]},
            {
                "dtype": "int8",
                "shape": (2, 1, 1, 1),
                "scales": [0.0, 0.5],
                "data": np.ones(2, np.int8),
            },
            {"dtype": "int32", "shape": (2,), "data": np.array([2**31 - 1, 0], np.int32)},
        ],
        [{"dtype": "int8", "shape": (1, 2, 2, 2), "scales": [1e-44]}],
        "Conv2DOptions",
        strideH=1,
        strideW=1,
    )


@pytest.mark.parametrize("recipe", ["static_wi8_ai8", "dynamic_wi8_afp32"])
def test_a_healthy_file(recipe: str, run: Run, golden: Check) -> None:
    """Exit code 0; the text has each op and the share that computes in float."""
    done = run("show", CONVERTED / f"nested.recipe_{recipe}.tflite")

    golden(f"show_{recipe}", done.stdout)
    assert (done.exit_code, done.stderr) == (0, "")


def test_each_signature_is_told(tmp_path: Path, run: Run, golden: Check) -> None:
    """With its own inputs and outputs; ops of later subgraphs have the subgraph's number."""
    done = run("show", written(tmp_path / "sizes.tflite", two_signatures()))

    golden("show_signatures", done.stdout)
    assert done.exit_code == 0


def test_findings(tmp_path: Path, run: Run, golden: Check) -> None:
    """Exit code 1, and each finding with the op."""
    path = written(tmp_path / "defective.tflite", defective())

    done, document = run("show", path), run("show", path, "--json")

    golden("show_findings", done.stdout)
    assert (done.exit_code, document.exit_code) == (1, 1)
    kinds = {finding["kind"] for finding in json.loads(document.stdout)["health"]}
    assert kinds == {"bad_scale", "bias_at_int32_limit"}


@pytest.mark.parametrize(
    ("op", "scale", "is_found"),
    [("EXP", 1.0, True), ("EXP", 0.5, False), ("RELU", 1.0, False), ("RESHAPE", 1.0, False)],
)
def test_scale_one_on_both_sides_of_an_op(
    tmp_path: Path, run: Run, op: str, scale: float, is_found: bool
) -> None:
    """A sign that nothing was calibrated, but of ops that keep their input's scale."""
    sides = [{"dtype": "int8", "scales": [each], "name": "t"} for each in (1.0, scale)]

    done = run("show", written(tmp_path / "one.tflite", one_op(op, [sides[0]], [sides[1]])))

    told = f"the output of {op} #0: scale 1.0 and zero point 0, which its input has, too"
    assert (told in " ".join(done.stdout.split())) is is_found
    assert done.exit_code == int(is_found)


def test_an_op_that_aborts_is_a_finding(tmp_path: Path, run: Run) -> None:
    """An ADD whose scales are too far apart ends the process that allocates it."""
    constant = {"dtype": "int8", "scales": [0.5], "data": np.ones((1, 4), np.int8)}
    wide = {"dtype": "int8", "scales": [2.0**20]}
    content = one_op("ADD", [wide, constant], [{"dtype": "int8", "scales": [1.0]}], "AddOptions")
    content_of_sound = one_op("ADD", [SIDE, constant], [SIDE], "AddOptions")

    done = run("show", written(tmp_path / "aborts.tflite", content))
    sound = run("show", written(tmp_path / "sound.tflite", content_of_sound))

    assert (done.exit_code, sound.exit_code) == (1, 0)
    assert "unsafe_op: ADD #0: an input's scale, 1.05e+06, is 2^19 times" in done.stdout


def test_the_document(run: Run) -> None:
    """Plain data: signatures, ops by role, schemes, constants, health."""
    path = CONVERTED / "nested.recipe_static_wi8_ai8.tflite"

    done = run("show", path, "--json")

    document: dict[str, Any] = json.loads(done.stdout)
    [signature] = document["signatures"]
    assert done.exit_code == 0
    assert document["size_bytes"] == path.stat().st_size
    assert document["schemes"] == {"int8": 11}
    assert document["health"] == []
    assert signature["inputs"] == [
        {
            "dtype": "int8",
            "granularity": "per_tensor",
            "name": "args_0",
            "scales": [pytest.approx(0.0145874, rel=1e-5)],
            "shape": [2, 4],
            "zero_points": [21],
        }
    ]
    op = {"index": 2, "inputs": ["int8", "int8"], "op": "ADD", "scheme": "int8", "weight": None}
    assert op.items() <= document["ops"][2].items()
    assert {each["dtype"]: each["bytes"] for each in document["constants"]} == {
        "int8": 140,
        "int32": 128,
    }


def test_what_is_no_file(tmp_path: Path, run: Run, refused: Refused) -> None:
    """A sentence on stderr and exit code 2: missing, a folder, text, cut off."""
    whole = (CONVERTED / "nested.float.tflite").read_bytes()
    near = written(tmp_path / "model.tflite", whole)
    cases = {
        tmp_path / "modle.tflite": f"no .tflite file at {tmp_path / 'modle.tflite'}; {tmp_path} "
        "holds model.tflite",
        tmp_path: f"{tmp_path} is a folder, not a .tflite file",
        written(tmp_path / "notes.txt", b"just a text"): "not a .tflite file: file identifier",
        written(tmp_path / "cut", whole[: len(whole) // 2]): "It was truncated or overwritten",
    }
    for path, sentence in cases.items():
        refused("show", path, says=sentence)
        assert len(run("show", path).stderr.splitlines()) == 1
    assert run("show", near).exit_code == 0


def test_node_data_for_model_explorer(run: Run, refused: Refused, tmp_path: Path) -> None:
    """Of the file alone dtypes and schemes; with a record what that run measured of the ops."""
    path = CONVERTED / "nested.recipe_static_wi8_ai8.tflite"
    done = run("show", path, "--model-explorer", tmp_path / "bare")
    assert done.exit_code == 0
    assert sorted(each.stem for each in (tmp_path / "bare").iterdir()) == ["dtypes", "scheme"]

    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    measured = event("localize", "a", layers=layers(model(ops=4)["ops"]))
    tests = [outcome("test_x.py::test_a", ["a"], measured)]
    run_of({"a": model(sha256=digest)}, tests).write(tmp_path / "run.json")
    arguments = ("--model-explorer", tmp_path / "measured", "--record", tmp_path / "run.json")
    done = run("show", path, *arguments)
    assert done.exit_code == 0
    text = (tmp_path / "measured" / "local_sqnr_db.json").read_text("utf-8")
    assert "43" in text

    other = CONVERTED / "attention.int8.tflite"
    refused("show", other, *arguments, says="the run has measured no ops of this file")
    assert run("show", path, "--record", tmp_path / "run.json").exit_code == 2


def test_rules_of_kernels(tmp_path: Path, run: Run, golden: Check) -> None:
    """A violation is a finding; what CPU kernels compute is a warning, and exit code 0."""
    row = {"dtype": "int8", "shape": (1, 8)}
    scales = ([1 / 127], [4 / 127], [4 / 127])
    one, two, made = ({**row, "scales": each} for each in scales)
    broken = one_op("MAXIMUM", [one, two], [made], "MaximumMinimumOptions")
    path = written(tmp_path / "maximum.tflite", broken)
    asymmetric = written(tmp_path / "dense.tflite", layer("FULLY_CONNECTED", point=6)[0])

    done, warned = run("show", path), run("show", asymmetric)
    document = json.loads(run("show", asymmetric, "--json").stdout)

    golden("show_conformance", done.stdout)
    golden("show_conformance_warning", warned.stdout)
    assert (done.exit_code, warned.exit_code) == (1, 0)
    assert [each["kind"] for each in document["warnings"]] == ["weight_zero_point"]
    assert document["health"] == []


def test_ops_on_a_gpu(run: Run, golden: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of the table, and the engine's words on those that stay on the CPU."""
    transposed(monkeypatch)
    path = CONVERTED / "transposed.int8.tflite"

    done, document = (
        run("show", path, "--runtime=gpu"),
        run("show", path, "--runtime=gpu", "--json"),
    )

    golden("show_gpu", done.stdout)
    found = json.loads(document.stdout)["delegation"]
    assert (done.exit_code, found["runtime"], found["n_on_gpu"]) == (0, "gpu", 6)
    assert found["ops"][1] == {
        "op": "TRANSPOSE_CONV #1",
        "runs_on": "CPU",
        "words": "Max version supported: 3. Requested version 4.",
    }
    assert run("show", path, "--runtime=xnnpack").exit_code == 2
