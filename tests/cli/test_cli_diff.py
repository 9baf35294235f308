"""`edgeq diff`: each kind of difference, what is none, and the document."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema

from fixtures.tflite.writer import pack, unpack
from tests.cli.conftest import CONVERTED, Check, Run

OLD = CONVERTED / "local.int8.tflite"


def edited(folder: Path, change: Callable[[Any], None]) -> Path:
    """Write a copy of the file with its objects changed."""
    model = unpack(OLD.read_bytes())
    change(model)
    path = folder / "new.tflite"
    path.write_bytes(pack(model))
    return path


def _op(model: Any, name: str) -> Any:
    graph = model.subgraphs[0]
    code = getattr(schema.BuiltinOperator, name)
    return next(
        op for op in graph.operators if model.operatorCodes[op.opcodeIndex].builtinCode == code
    )


def _rename(model: Any) -> None:
    for tensor in model.subgraphs[0].tensors:
        tensor.name = b"renamed_" + tensor.name
    model.description = "made elsewhere"


def _weight(model: Any) -> None:
    weight = model.subgraphs[0].tensors[_op(model, "CONV_2D").inputs[1]]
    data = np.array(model.buffers[weight.buffer].data)
    data[3] ^= 1
    model.buffers[weight.buffer].data = data


def _weight_scale(model: Any) -> None:
    weight = model.subgraphs[0].tensors[_op(model, "CONV_2D").inputs[1]]
    weight.quantization.scale = weight.quantization.scale * np.float32(2)


def _output_parameters(model: Any) -> None:
    output = model.subgraphs[0].tensors[_op(model, "CONV_2D").outputs[0]]
    output.quantization.scale = np.array([0.25], np.float32)
    output.quantization.zeroPoint = np.array([7], np.int64)


def _input_parameters(model: Any) -> None:
    graph = model.subgraphs[0]
    graph.tensors[graph.inputs[0]].quantization.zeroPoint = np.array([9], np.int64)


def _option(model: Any) -> None:
    _op(model, "CONV_2D").builtinOptions.strideH = 3


def _no_bias(model: Any) -> None:
    op = _op(model, "CONV_2D")
    op.inputs = np.array([*op.inputs[:2], -1], np.int32)


def _output_source(model: Any) -> None:
    graph = model.subgraphs[0]
    source = graph.operators[0].outputs[0]
    graph.outputs = np.array([source], np.int32)
    model.signatureDefs[0].outputs[0].tensorIndex = source


CASES: dict[str, tuple[Callable[[Any], None], list[str]]] = {
    "weight": (_weight, ["CONV_2D #", "weight, 1 of "]),
    "weight scale": (_weight_scale, ["weight scale, ", " channels, the first 0: "]),
    "output parameters": (_output_parameters, ["output scale: ", " → 0.25", "output zero point: "]),
    "input parameters": (_input_parameters, ["input 'args_0'", "zero point: ", " → 9"]),
    "option": (_option, ["option strideH: 1 → 3"]),
    "no bias": (_no_bias, ["bias went from int32 to none"]),
    "source of the output": (_output_source, ["output 'output_0'", "source: the output of "]),
}


@pytest.mark.parametrize("case", CASES)
def test_each_kind_of_difference(case: str, tmp_path: Path, run: Run) -> None:
    """Exit code 1, and the op with the values of both files."""
    change, words = CASES[case]

    done = run("diff", OLD, edited(tmp_path, change))

    assert done.exit_code == 1
    for each in words:
        assert each in done.stdout


def test_what_is_no_difference(tmp_path: Path, run: Run) -> None:
    """The same bytes; and other names and metadata, which no kernel reads."""
    same = run("diff", OLD, OLD)
    renamed = run("diff", OLD, edited(tmp_path, _rename))

    assert (same.exit_code, renamed.exit_code) == (0, 0)
    assert same.stdout == f"{OLD} and {OLD} are identical: {OLD.stat().st_size:,} bytes\n"
    assert "no difference but in names, metadata or the order of bytes\n" in renamed.stdout


def test_two_files_that_differ_in_everything(
    run: Run, golden: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ops are aligned: those that quantization inserted are no change of those behind them."""
    monkeypatch.chdir(CONVERTED)

    done = run("diff", "nested.float.tflite", "nested.recipe_dynamic_wi8_afp32.tflite")
    static = run("diff", "attention.float.tflite", "attention.int8.tflite")

    golden("diff_dynamic", done.stdout)
    golden("diff_static", static.stdout)
    assert (done.exit_code, static.exit_code) == (1, 1)


def _one_code(values: Any) -> Any:
    values[3, 2] += 50
    return values


def _negated_channel(values: Any) -> Any:
    values[1] = -values[1]
    return values


ROUNDINGS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "sound": (lambda values: values, ""),
    "one code": (_one_code, "95.0 % of 20 codes; worst channel 3: 75.0 %, off by 49.6"),
    "a channel": (_negated_channel, "80.0 % of 20 codes; worst channel 1: 0 %, off by 2"),
    "permuted": (lambda values: np.roll(values, 1), "not the float file's values ("),
}


@pytest.mark.parametrize("case", ROUNDINGS)
def test_codes_are_compared_with_the_float_values(case: str, tmp_path: Path, run: Run) -> None:
    """The text names no channel where most codes differ."""
    change, told = ROUNDINGS[case]
    model = unpack((CONVERTED / "nested.int8.tflite").read_bytes())
    weight = model.subgraphs[0].tensors[_op(model, "FULLY_CONNECTED").inputs[1]]
    shape = tuple(weight.shape)
    data = np.array(model.buffers[weight.buffer].data, np.uint8).view(np.int8).reshape(shape)
    model.buffers[weight.buffer].data = np.array(change(data.copy())).view(np.uint8).ravel()
    (tmp_path / "new.tflite").write_bytes(pack(model))
    done = run("diff", CONVERTED / "nested.float.tflite", tmp_path / "new.tflite")
    head = f"all codes of {8 - bool(told)} of 8 weights are the rounding of the float values"
    text = done.stdout.partition(head)[2]

    assert text
    assert text.splitlines()[0] == (":" if told else "")
    assert told in text


def test_weights_of_another_shape_and_half_floats(run: Run) -> None:
    """Are not compared; a file that is quantized itself has no float values."""
    files = (CONVERTED / f"{name}.tflite" for name in ("nested.float", "local.int8"))
    assert "float values" not in run("diff", OLD, CONVERTED / "nested.int8.tflite").stdout
    document = json.loads(run("diff", *files, "--json").stdout)
    assert all(not each["is_of_floats"] for each in document["weights"])


def test_the_document(tmp_path: Path, run: Run) -> None:
    """Plain data with every change, whatever the text leaves out."""
    done = run("diff", OLD, edited(tmp_path, _option), "--json")
    same = run("diff", OLD, OLD, "--json")
    ops = run("diff", CONVERTED / "nested.float.tflite", CONVERTED / "nested.int8.tflite", "--json")

    document, whole = json.loads(done.stdout), json.loads(ops.stdout)
    assert (document["equal"], document["identical_bytes"]) == (False, False)
    [change] = document["changes"]
    assert (change["what"], change["old"], change["new"]) == ("option strideH", "1", "3")
    assert (json.loads(same.stdout)["equal"], same.exit_code) == (True, 0)
    assert whole["summary"].startswith("8 FULLY_CONNECTED")
    assert [each["codes"] for each in whole["weights"]] == [20] * 6 + [8, 12]
    assert all(each["codes"] == each["equal"] for each in whole["weights"])
    assert whole["ops"]["changed"][0]["old"]["scheme"] == "float"
    assert (done.exit_code, ops.exit_code) == (1, 1)
