"""`edgeq.check`: sound models pass, and all that is wrong with the others is listed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fixtures.models import ConvBnRelu, TwoInputs, samples, seeded
from fixtures.tflite.writer import FileWriter, pack, unpack
from pytest_edgeq import Edgeq, QuantizedModel

UNREMEMBERED = "nothing was held against a memory"


class _TwoHeads(nn.Module):
    """Two outputs of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2)
        self.heads = nn.ModuleList([nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.relu(self.stem(x))
        return self.heads[0](x), self.heads[1](x)


def _images(n: int, seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n):
        yield torch.randn(1, 3, 16, 16, generator=generator)


@pytest.fixture(scope="module")
def edgeq_alone(tmp_path_factory: pytest.TempPathFactory) -> Edgeq:
    """Without a memory."""
    return Edgeq(directory=tmp_path_factory.mktemp("check"))


@pytest.fixture(scope="module", params=["pt2e_static_int8", "recipe_static_wi8_ai8"])
def heads(edgeq_alone: Edgeq, request: pytest.FixtureRequest) -> QuantizedModel:
    """A sound model."""
    torch.manual_seed(0)
    return edgeq_alone.quantize(
        _TwoHeads().eval(),
        (next(_images(1, 0)),),
        quantizer=request.param,
        calibration=_images(32, 1),
    )


def _findings(edgeq: Edgeq, quantized: QuantizedModel, inputs: Any) -> str:
    """What the gate says; empty where it lets the model through."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            edgeq.check(quantized, inputs)
        except AssertionError as error:
            text = str(error)
        else:
            text = ""
    # Where there is a text, it says so itself.
    assert [str(each.message) for each in told if UNREMEMBERED not in str(each.message)] == []
    assert len(told) == (not text)
    assert not text or UNREMEMBERED in text
    return text


def test_a_sound_model_passes(edgeq_alone: Edgeq, heads: QuantizedModel) -> None:
    """From a generator, which gives each sample once."""
    assert _findings(edgeq_alone, heads, _images(8, 2)) == ""


def test_the_warning_points_at_the_users_line(edgeq_alone: Edgeq, heads: QuantizedModel) -> None:
    """And says what was not done, and what it needs."""
    with pytest.warns(UserWarning, match=UNREMEMBERED) as told:
        edgeq_alone.check(heads, _images(2, 2))

    assert told[0].filename == __file__
    assert "call it on the fixture `edgeq` in a test" in str(told[0].message)


def test_samples_are_held_one_at_a_time(edgeq_alone: Edgeq, heads: QuantizedModel) -> None:
    """A loader that writes each sample into the same buffer is read right."""
    buffer = torch.empty(1, 3, 16, 16)

    def loader() -> Iterator[torch.Tensor]:
        for image in _images(8, 2):
            buffer.copy_(image)
            yield buffer

    assert _findings(edgeq_alone, heads, loader()) == ""


def test_calibration_samples_are_found(edgeq_alone: Edgeq, heads: QuantizedModel) -> None:
    """Two of those that were calibrated with, among others."""
    text = _findings(edgeq_alone, heads, [*_images(2, 1), *_images(6, 2)])

    assert text.startswith(
        "health: calibration_overlap: inputs: 2 of 8 evaluated samples were also used to calibrate"
    )


Change = Callable[[Any], None]


def _scale(model: Any) -> None:
    tensor = model.subgraphs[0].tensors[model.subgraphs[0].operators[-1].outputs[0]]
    tensor.quantization.scale = np.asarray(tensor.quantization.scale) * np.float32(1.02)


def _zero_point(model: Any) -> None:
    tensor = model.subgraphs[0].tensors[model.subgraphs[0].operators[-1].outputs[0]]
    tensor.quantization.zeroPoint = np.asarray(tensor.quantization.zeroPoint) + 1


def _swapped(model: Any) -> None:
    [signature] = model.signatureDefs
    first, second = signature.outputs
    first.tensorIndex, second.tensorIndex = second.tensorIndex, first.tensorIndex


def _swapped_tensors(model: Any) -> None:
    """Under the same names in the same order."""
    _swapped(model)
    model.subgraphs[0].outputs = model.subgraphs[0].outputs[::-1].copy()


def _activation(model: Any) -> None:
    for op in model.subgraphs[0].operators:
        if getattr(op.builtinOptions, "fusedActivationFunction", 0):
            op.builtinOptions.fusedActivationFunction = 0
            return
    raise AssertionError("no op has one")


def _stride(model: Any) -> None:
    """By the options only: the shapes in the file are as they were."""
    for op in model.subgraphs[0].operators:
        if getattr(op.builtinOptions, "dilationWFactor", 0):
            op.builtinOptions.padding ^= 1
            return
    raise AssertionError("no op has one")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_scale, r"flow made: .*its output: expected the scale [\d.e-]+, got"),
        (_zero_point, r"flow made: .*its output: expected the zero point -?\d+, got"),
        (_swapped, r"flow made: outputs: expected output_0 .*; output_1 .*, got output_1 .*"),
        (_swapped_tensors, r"flow made: the output 'output_0': what another op gives"),
        (_activation, r"flow made: CONV_2D .*: fused activation: expected RELU, got None"),
        (_stride, r"flow made: CONV_2D .*: padding: expected VALID, got SAME"),
    ],
)
def test_a_file_that_is_not_the_one_made_is_found(
    edgeq_alone: Edgeq, heads: QuantizedModel, change: Change, said: str
) -> None:
    """It claims to be what the flow made of the model, and one thing of it is another."""
    model = unpack(heads.tflite)
    change(model)
    other = heads.with_tflite(pack(model))

    text = _findings(edgeq_alone, other, _images(4, 2))

    assert any(re.search(said, line) for line in text.splitlines()), text


def test_the_same_file_written_anew_passes(edgeq_alone: Edgeq, heads: QuantizedModel) -> None:
    """Other bytes, the same model."""
    model = unpack(heads.tflite)
    model.description = "written anew"
    other = heads.with_tflite(pack(model))

    assert _findings(edgeq_alone, other, _images(8, 2)) == ""


def test_a_file_in_place_of_another_is_held_against_the_first(
    edgeq_alone: Edgeq, heads: QuantizedModel
) -> None:
    """What the flow made, not what was put in its place before."""
    model = unpack(heads.tflite)
    _scale(model)
    wrong = pack(model)

    text = _findings(edgeq_alone, heads.with_tflite(wrong).with_tflite(wrong), _images(4, 2))

    assert "expected the scale" in text


def test_another_quantizers_file_is_found(edgeq_alone: Edgeq, heads: QuantizedModel) -> None:
    """A float file that claims to be the int8 one: which ops computed in what is told."""
    float_file = edgeq_alone.quantize(heads.float_model, (next(_images(1, 0)),), quantizer=None)  # type: ignore[arg-type] # it is a module

    text = _findings(edgeq_alone, heads.with_tflite(float_file.tflite), _images(4, 2))

    assert text.splitlines()[0].startswith("not the file that the ")
    assert "CONV_2D" in text
    assert "int8 → float" in text


def test_a_weight_that_is_another_is_found(edgeq_alone: Edgeq, heads: QuantizedModel) -> None:
    """One channel's largest weight negated: the layer is named."""
    model = unpack(heads.tflite)
    convolution = [op for op in heads.graph.ops if op.name == "CONV_2D"][-1]
    tensor = heads.graph.tensor(convolution, convolution.inputs[1])
    data = np.array(model.buffers[tensor.buffer].data).view(np.int8)
    data[np.abs(data.astype(int)).argmax()] *= -1
    model.buffers[tensor.buffer].data = data.view(np.uint8)

    text = _findings(edgeq_alone, heads.with_tflite(pack(model)), _images(4, 2))

    assert text.startswith(f"CONV_2D #{convolution.index} (heads."), text


def test_inputs_that_do_not_fit_the_file_are_told(
    edgeq_alone: Edgeq, heads: QuantizedModel, tmp_path: Path
) -> None:
    """A file of another model: what it takes is told, with all else that is wrong."""
    other = edgeq_alone.quantize(
        seeded(TwoInputs), TwoInputs.sample_inputs(), calibration=samples(TwoInputs, 4)
    )

    text = _findings(edgeq_alone, heads.with_tflite(other.tflite), _images(4, 2))

    assert text.startswith("not the file that the")
    assert "the file takes the inputs ['args_0', 'args_1']" in text


def test_a_file_that_no_runtime_runs_is_found(edgeq_alone: Edgeq, heads: QuantizedModel) -> None:
    """An output that no op computes: each runtime says so, and nothing else breaks."""
    model = unpack(heads.tflite)
    model.subgraphs[0].operators.pop()

    text = _findings(edgeq_alone, heads.with_tflite(pack(model)), _images(4, 2))

    assert text.startswith("not the file that the")
    assert "[2] the xnnpack runtime cannot " in text
    assert "the builtin runtime cannot " in text


def test_a_runtime_that_gives_something_else_is_found(heads: QuantizedModel) -> None:
    """One of one's own, one step off in every code."""
    from ai_edge_litert.interpreter import Interpreter

    def one_off(path: Path, signature: str | None) -> Any:
        run = Interpreter(str(path)).get_signature_runner(signature)
        return lambda inputs: {
            name: np.minimum(value, 126) + np.int8(1) for name, value in run(**inputs).items()
        }

    edgeq = Edgeq(runtimes={"board": one_off})
    model = edgeq.load(heads.tflite, reference=heads.float_model)

    text = _findings(edgeq, model, _images(4, 2))

    assert text.splitlines()[0].startswith("runtimes 'board' and 'builtin': ")
    assert "near ties" in text


def test_a_state_is_not_moved_by_others(edgeq_alone: Edgeq) -> None:
    """What the reference keeps is put back, and the model is as it was."""
    model = seeded(ConvBnRelu)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    quantized = edgeq_alone.quantize(
        model, ConvBnRelu.sample_inputs(), calibration=samples(ConvBnRelu, 16)
    )

    _findings(edgeq_alone, quantized, samples(ConvBnRelu, 4, seed=5))

    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_all_is_listed_the_most_telling_first(edgeq_alone: Edgeq, heads: QuantizedModel) -> None:
    """What the file is not, before what is said of the samples."""
    model = unpack(heads.tflite)
    _activation(model)

    text = _findings(edgeq_alone, heads.with_tflite(pack(model)), [*_images(2, 1), *_images(6, 2)])

    first, *lines = text.splitlines()
    numbers = [line[:3] for line in lines if line.startswith("[")]
    assert numbers == [f"[{number}]" for number in range(2, len(numbers) + 2)]
    assert first == (
        f"not the file that the {heads.flow} flow made: CONV_2D at stem (op 1): fused activation: "
        f"expected RELU, got None [1 of {len(numbers) + 1} findings on _TwoHeads]"
    )
    assert (
        f"[{len(numbers) + 1}] health: calibration_overlap: inputs: 2 of 8 evaluated samples were "
        "also used to calibrate: the errors look smaller than they are; evaluate on samples that "
        "the calibration has not seen"
    ) in lines


@pytest.mark.parametrize("inputs", [[], torch.zeros(1, 3, 16, 16), [torch.zeros(1, 3, 8, 8)]])
def test_bad_samples_are_refused(edgeq_alone: Edgeq, heads: QuantizedModel, inputs: Any) -> None:
    """They are no findings about the model."""
    with pytest.raises((ValueError, TypeError), match="evaluation"):
        edgeq_alone.check(heads, inputs)


def test_a_file_without_a_reference_is_refused(edgeq_alone: Edgeq, heads: QuantizedModel) -> None:
    """There is nothing to hold it against."""
    with pytest.raises(ValueError, match="no reference to compare with"):
        edgeq_alone.check(edgeq_alone.load(heads.tflite), _images(2, 2))


def test_the_text_of_runtimes_that_differ(tmp_path: Path) -> None:
    """To the letter: where, on what, expected, got, how many."""
    from ai_edge_litert.interpreter import Interpreter

    def one_off(path: Path, signature: str | None) -> Any:
        run = Interpreter(str(path)).get_signature_runner(signature)
        return lambda inputs: {
            name: np.minimum(value, 126) + np.int8(1) for name, value in run(**inputs).items()
        }

    file = FileWriter()
    graph = file.graph()
    x, y, z = (
        graph.tensor("int8", (1, 64), scales=[scale], zero_points=[-128])
        for scale in (1 / 16, 1 / 16, 1 / 8)
    )
    graph.op("ADD", [x, y], [z], "AddOptions")
    graph.borders([x, y], [z])
    file.signature("add", [("x", x), ("y", y)], [("z", z)])
    edgeq = Edgeq(runtimes={"board": one_off}, directory=tmp_path)
    model = edgeq.load(file.content(), reference=_Sum().eval(), name="sum")
    steps = torch.arange(64)[None] / 16

    text = _findings(edgeq, model, [(steps, steps), (steps.flip(1), steps)])

    assert text.partition("\n\nnot looked at: ")[0] == (
        "runtimes 'board' and 'builtin': ADD (op 0): expected codes to differ "
        "near ties, 50% of them at most, got 190 of 190 higher (sample 0, index [0, 0]: -127 and "
        "-128) (1 of 1 ops that were run alone, each on the same inputs)\n"
        "  one of the two computes something else than the file says"
    )


class _Sum(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y
