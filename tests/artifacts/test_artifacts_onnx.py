"""ONNX beside `.tflite`: as the reference, and as what the file was made of."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import fixtures
from fixtures import basic_pitch
from fixtures.models import ResidualNet, samples, seeded
from pytest_edgeq import Budget, Edgeq, assert_op_dtypes, assert_within_budget, onnx_reference
from tests.artifacts.conftest import sqnr_db

if TYPE_CHECKING:
    from collections.abc import Iterator

# TensorFlow is imported and converts, in a process of its own.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _export(
    model: nn.Module, args: tuple[torch.Tensor, ...], path: Path, names: tuple[str, ...], **io: Any
) -> Path:
    with warnings.catch_warnings():
        # torch's exporter of its own torch.export.
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        torch.onnx.export(
            model,
            args,
            path,
            dynamo=True,
            external_data=False,
            verbose=False,
            input_names=list(names),
            **io,
        )
    return path


def _session(path: Path) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(path)


def _quantize_static(path: Path, into: Path) -> Path:
    """Quantize to int8 by onnxruntime: QuantizeLinear and DequantizeLinear around every op."""
    from onnxruntime import quantization

    class Images(quantization.CalibrationDataReader):  # type: ignore[misc] # ships no types
        def __init__(self) -> None:
            self.images: Iterator[Any] = samples(ResidualNet, 32)

        def get_next(self) -> dict[str, Any] | None:
            sample = next(self.images, None)
            return None if sample is None else {"image": sample[0].numpy()}

    quantization.quantize_static(
        path,
        into,
        Images(),
        quant_format=quantization.QuantFormat.QDQ,
        activation_type=quantization.QuantType.QInt8,
        weight_type=quantization.QuantType.QInt8,
        per_channel=True,
    )
    return into


@pytest.fixture(scope="module")
def residual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ResidualNet in ONNX, in float and static int8, and as `.tflite`, likewise."""
    folder = tmp_path_factory.mktemp("onnx")
    model, inputs = seeded(ResidualNet), ResidualNet.sample_inputs()
    path = _export(model, inputs, folder / "float.onnx", ("image",), output_names=["scores"])
    _quantize_static(path, folder / "int8.onnx")
    maker, calibration = Edgeq(directory=folder), list(samples(ResidualNet, 32))
    for name, quantizer in (("float", None), ("int8", "pt2e_static_int8")):
        made = maker.quantize(model, inputs, quantizer=quantizer, calibration=calibration)
        (folder / f"{name}.tflite").write_bytes(made.tflite)
    return folder


@pytest.mark.parametrize(
    ("onnx", "tflite", "floor"),
    [
        # Measured: 142 dB, which is float32's rounding.
        ("float", "float", 110.0),
        # Measured: 46 dB, because both calibrations and the weights' rounding are much the same.
        # 6 dB are twice the noise.
        ("int8", "int8", 40.0),
    ],
)
def test_torch_exported_twice(
    maker: Edgeq, residual: Path, onnx: str, tflite: str, floor: float
) -> None:
    """To ONNX and to `.tflite`, each in float and quantized by its own library."""
    reference = onnx_reference(_session(residual / f"{onnx}.onnx"))
    loaded = maker.load(residual / f"{tflite}.tflite", reference=reference)
    if tflite == "int8":
        assert_op_dtypes(loaded, "CONV_2D", scheme="int8", weight="int8", count=3)
    comparison = maker.compare(loaded, samples(ResidualNet, 32, seed=5))

    assert_within_budget(comparison, Budget(sqnr_db=floor, top1_agreement=1.0))


class _Weighted(nn.Module):
    """Two inputs, two outputs of one shape; none may change places."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(8, 4)
        self.right = nn.Linear(8, 4)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        """Weigh b twice."""
        return {"weighed": self.left(a) + 2 * self.right(b), "alone": self.left(a)}


def test_inputs_and_outputs_are_paired_by_name(maker: Edgeq, tmp_path: Path) -> None:
    """Whatever their order on either side; under exchanged names they are another model's."""
    model = seeded(_Weighted)
    generator = np.random.default_rng(0)
    data = [
        {name: generator.standard_normal((1, 8), np.float32) for name in ("a", "b")}
        for _ in range(4)
    ]
    tensors = {name: torch.from_numpy(value) for name, value in data[0].items()}
    backwards = {"b": tensors["b"], "a": tensors["a"]}
    made = maker.quantize(model, sample_kwargs=backwards, quantizer=None)
    assert [border.name for border in made.inputs] == ["b", "a"]
    args = (tensors["a"], tensors["b"])

    def compared(inputs: tuple[str, ...], outputs: list[str], data: list[Any]) -> dict[str, float]:
        path = _export(model, args, tmp_path / "pair.onnx", inputs, output_names=outputs)
        reference = onnx_reference(_session(path))
        return sqnr_db(maker.compare(maker.load(made.tflite, reference=reference), data))

    names = ["weighed", "alone"]
    tuples = [(sample["a"], sample["b"]) for sample in data]
    assert min(compared(("a", "b"), names, data).values()) > 100
    assert min(compared(("a", "b"), names, tuples).values()) > 100
    assert max(compared(("b", "a"), names, data).values()) < 10
    assert max(compared(("a", "b"), names[::-1], data).values()) < 10


@pytest.fixture(scope="module")
def embedding(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Path]:
    """A model of int64 ids: its `.tflite`, which stores them as int32, and its ONNX."""
    model = seeded(lambda: nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 3)))
    args = (torch.tensor([[1, 2, 3]]),)
    folder = tmp_path_factory.mktemp("ids")
    made = Edgeq(directory=folder).quantize(model, args, quantizer=None)
    return made.tflite, _export(model, args, folder / "ids.onnx", ("ids",))


def test_whole_numbers_change_their_width(maker: Edgeq, embedding: tuple[bytes, Path]) -> None:
    """The file has int32, the session int64, and a sample may have either, or no floats."""
    tflite, path = embedding
    reference = onnx_reference(_session(path))
    loaded = maker.load(tflite, reference=reference)
    for dtype in (np.int32, np.int64):
        assert maker.compare(loaded, [np.array([[1, 2, 3]], dtype)]).total.sqnr_db > 100
    for value in (np.zeros((1, 3), np.float32), np.full((1, 3), 2**63, np.uint64)):
        with pytest.raises(
            TypeError, match=r"expects int64, the sample has .*with the intended cast"
        ):
            reference(value)


def test_a_bare_session_is_no_reference(maker: Edgeq, embedding: tuple[bytes, Path]) -> None:
    """It cannot be called; the text names the helper. Nor is a path a session."""
    tflite, path = embedding
    for inputs in ((), (1, 2)):
        with pytest.raises(ValueError, match=r"the ONNX session has the inputs \['ids'\]"):
            onnx_reference(_session(path))(*inputs)
    with pytest.raises(TypeError, match=r"InferenceSession cannot be called.*onnx_reference"):
        maker.load(tflite, reference=_session(path))
    with pytest.raises(TypeError, match=r"expected an onnxruntime.InferenceSession, got PosixPath"):
        onnx_reference(path)


def test_basic_pitch_as_it_ships(maker: Edgeq) -> None:
    """
    A trained network whose file and ONNX were made by others, paired by position.

    Measured on XNNPACK: 122 dB; on the built-in kernels, whose LOGISTIC is coarser, 62 dB.
    """
    reference = onnx_reference(_session(basic_pitch.nmp("onnx")))
    loaded = maker.load(basic_pitch.nmp("tflite"), reference=reference)
    tones = [basic_pitch.tone(hz) for hz in (220, 440, 880)]
    comparison = maker.compare(loaded, tones)

    assert list(comparison.total.outputs) == ["onset", "note", "contour"]
    assert_within_budget(comparison, Budget(sqnr_db=100))
    assert_op_dtypes(loaded, "CONV_2D", scheme="float")
    notes = loaded.run(tones[1])["note"][0].mean(0)
    assert basic_pitch.FIRST_NOTE + int(notes.argmax()) == 69, "a tone of 440 Hz is A4"
    halved = maker.load(loaded.tflite, reference=lambda audio: reference(audio / 2))
    assert maker.compare(halved, tones).total.sqnr_db < 60


@pytest.fixture(scope="module")
def by_onnx2tf(residual: Path) -> Path:
    """A folder with what onnx2tf, in a process of its own, made of ResidualNet's ONNX."""
    folder = residual / "onnx2tf"
    made = subprocess.run(
        [sys.executable, "-m", "fixtures.onnx_to_tflite", residual / "float.onnx", folder],
        cwd=Path(next(iter(fixtures.__path__))).parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert made.returncode == 0, made.stderr
    return folder


# Measured: 142 dB, float32's rounding; 70 dB in float16, weights and activations.
@pytest.mark.parametrize(("dtype", "floor"), [("float32", 110.0), ("float16", 64.0)])
def test_a_file_made_by_way_of_onnx(
    maker: Edgeq, by_onnx2tf: Path, dtype: str, floor: float
) -> None:
    """It keeps channels last, and its torch model does not; one word says so."""
    path, model = by_onnx2tf / f"float_{dtype}.tflite", seeded(ResidualNet)
    loaded = maker.load(path, reference=model, layout="nhwc")
    scheme = "float" if dtype == "float32" else "float16"
    assert_op_dtypes(loaded, "CONV_2D", scheme=scheme, input=dtype, weight=dtype, count=3)
    assert_op_dtypes(loaded, "FULLY_CONNECTED", scheme=scheme, input=dtype, weight=dtype)
    assert {entry.module for entry in loaded.op_dtypes} == {None}
    images = list(samples(ResidualNet, 8, seed=5))

    assert_within_budget(maker.compare(loaded, images), Budget(sqnr_db=floor, top1_agreement=1.0))
    scores = loaded.run(*images[0])["scores"]
    assert scores.dtype == np.float32
    if dtype == "float16":
        np.testing.assert_array_equal(loaded.run(images[0][0].half())["scores"], scores)
    with pytest.raises(ValueError, match=r'1×16×16×3, got 1×3×16×16.*pass layout="nhwc"'):
        maker.compare(maker.load(path, reference=model), images)
    made = maker.quantize(model, ResidualNet.sample_inputs(), quantizer=None)
    shipped = made.with_tflite(path, layout="nhwc")  # by another converter, with other names
    assert maker.compare(shipped, images).total.sqnr_db > floor
    other = maker.load(path, reference=seeded(ResidualNet, seed=1), layout="nhwc")
    with pytest.raises(AssertionError, match="sqnr_db"):
        assert_within_budget(maker.compare(other, images), Budget(sqnr_db=floor))
