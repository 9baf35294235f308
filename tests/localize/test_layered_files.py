"""Files of a few layers that other tools could have made: sound ones pass, damaged ones do not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.tflite.layered import (
    DAMAGES,
    KINDS,
    Layer,
    Spoil,
    convolutional,
    dense,
    in_layer,
    moved_by,
    run,
    write,
)
from pytest_edgeq import Edgeq, QuantizedModel, onnx_reference

pytestmark = pytest.mark.filterwarnings("ignore:edgeq.check. baselines were not checked")

Array = np.ndarray[Any, Any]

#: Layers and the shape of a sample, for a seed and a number of outputs.
NETS: dict[str, Callable[[int, int], tuple[list[Layer], tuple[int, ...]]]] = {
    "dense": lambda seed, n: (dense(seed, (12, 24, 24, n)), (12,)),
    "gate": lambda seed, n: (dense(seed, (12, 24, n), "LOGISTIC"), (12,)),
    "conv": lambda seed, n: (convolutional(seed, n), (8, 8, 3)),
    "classes": lambda seed, n: (convolutional(seed, n + 1, "SOFTMAX"), (8, 8, 3)),
}
COUNTS = (1, 2, 3, 10)
CASES = [(net, n, kind) for net in NETS for n in COUNTS for kind in KINDS]

_VISIBLE = 0.15
"""Share of an output's rms, 16 dB, by which a damage must move it to be one that is to be seen."""


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Edgeq:
    """Load and check; writes into a folder of the module's own."""
    return Edgeq(directory=tmp_path_factory.mktemp("layered"))


class Case:
    """One model with its samples."""

    def __init__(self, net: str, outputs: int, kind: str, seed: int = 0) -> None:
        self.layers, shape = NETS[net](500 + seed, outputs)
        draw = np.random.default_rng(1000 + seed)
        self.calibration = draw.normal(size=(128, *shape)).astype(np.float32)
        low, high = self.calibration.min(), self.calibration.max()
        new = draw.normal(size=(8, 1, *shape)).astype(np.float32)
        self.samples = [(each,) for each in np.clip(new, low, high)]
        self.kind, self.reference = kind, functools.partial(run, self.layers)

    def file(self, spoil: Spoil | None = None) -> bytes:
        """Write the file."""
        kept: Spoil = lambda place, stored: stored  # noqa: E731 # a name for one value
        return write(self.layers, self.kind, self.calibration, spoil or kept)

    def damages(self) -> list[tuple[str, bytes]]:
        """Every damage of every layer that can be seen at the outputs, with its file."""
        x = np.concatenate([each for (each,) in self.samples])
        weighted = [layer for layer in self.layers if layer.weight is not None]
        return [
            (f"{name} in layer {place}", self.file(in_layer(place, damage)))
            for name, damage in DAMAGES.items()
            for place in range(len(weighted))
            if moved_by(self.layers, self.kind, place, damage, x) > _VISIBLE
        ]


def alarm(maker: Edgeq, model: QuantizedModel, case: Case) -> str:
    """The text of a failed check; empty where it passes."""
    try:
        maker.check(model, case.samples)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("net", "outputs", "kind"), CASES)
def test_sound_files_pass(maker: Edgeq, net: str, outputs: int, kind: str) -> None:
    """Whatever they are quantized by, and however few their outputs are."""
    for seed in range(3):
        case = Case(net, outputs, kind, seed)
        loaded = maker.load(case.file(), reference=case.reference, name=f"net{seed}")
        assert alarm(maker, loaded, case) == ""


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("net", "outputs", "kind"), CASES)
def test_damaged_files_are_told(maker: Edgeq, net: str, outputs: int, kind: str) -> None:
    """Each constant that changes an output by far more than rounding does."""
    case = Case(net, outputs, kind)
    for what, file in case.damages():
        told = alarm(maker, maker.load(file, reference=case.reference, name="net"), case)
        assert told, what
        assert "torch" not in told.splitlines()[0], told


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("net", "outputs", "kind"), CASES)
def test_a_float_file_is_a_reference(
    maker: Edgeq, tmp_path: Path, net: str, outputs: int, kind: str
) -> None:
    """By path, as bytes or as a model; ops and constants are compared with its own."""
    case = Case(net, outputs, kind)
    content = Case(net, outputs, "float32").file()
    path = tmp_path / "float.tflite"
    path.write_bytes(content)
    for given in (
        {"reference": path},
        {"reference": str(path)},
        {"reference": content},
        {"reference": maker.load(content)},
        {"float_tflite": path},
    ):
        sound = maker.load(case.file(), name="net", **given)
        assert alarm(maker, sound, case) == ""
        assert list(maker.compare(sound, case.samples).stages) == ["quantization", "total"]
    for what, file in case.damages():
        told = alarm(maker, maker.load(file, reference=path, name="net"), case)
        assert told, what


def test_a_callable_is_not_called_torch(maker: Edgeq) -> None:
    """The text names what the file was compared with."""
    case = Case("dense", 3, "int8")
    _, file = case.damages()[0]
    told = alarm(maker, maker.load(file, reference=case.reference, name="net"), case)

    assert "the file in float does not compute what the reference does" in told
    assert "torch" not in told


@pytest.mark.parametrize(("outputs", "first"), [(1, False), (3, True)])
def test_a_probability_near_0_is_as_exact_as_its_logit(
    maker: Edgeq, outputs: int, first: bool
) -> None:
    """On one sample or on all; a weight that is off by a thousandth is told all the same."""
    case = Case("gate", outputs, "float32")
    shift = case.layers[-2]
    assert shift.bias is not None
    shift.bias[:] -= 6 if first else 3
    for seed in range(3):
        draw = np.random.default_rng(seed)
        case.samples = [(draw.normal(size=(1, 12)).astype(np.float32) * 2,) for _ in range(8)]
        loaded = maker.load(case.file(), reference=case.reference, name="net")
        assert alarm(maker, loaded, case) == ""

    def off(stored: Any) -> Any:
        stored.weight[:] *= np.float32(1.001)
        return stored

    spoilt = Case("gate", outputs, "float32")
    spoilt.layers[-2].bias[:] -= 6 if first else 3  # type: ignore[index] # as above
    loaded = maker.load(spoilt.file(in_layer(0, off)), reference=case.reference, name="net")
    assert alarm(maker, loaded, case)


def _onnx(layers: list[Layer], shape: tuple[int, ...]) -> Any:
    """The same model as an onnxruntime session, which has channels first inside."""
    import onnx
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    nodes: list[Any] = []
    constants: list[Any] = []
    value = "x"

    def constant(array: Array | None) -> str:
        name = f"c{len(constants)}"
        constants.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def node(op: str, inputs: list[str], **attributes: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [f"v{len(nodes)}"], **attributes))
        return f"v{len(nodes) - 1}"

    is_image = len(shape) == 3
    if is_image:
        value = node("Transpose", [value], perm=[0, 3, 1, 2])
    for layer in layers:
        if layer.op == "CONV_2D":
            assert layer.weight is not None
            weight = constant(layer.weight.transpose(0, 3, 1, 2))
            value = node("Conv", [value, weight, constant(layer.bias)])
        elif layer.op == "FULLY_CONNECTED":
            value = node("Gemm", [value, constant(layer.weight), constant(layer.bias)], transB=1)
        elif layer.op == "MEAN":
            value = node("ReduceMean", [value, constant(np.array([2, 3]))], keepdims=0)
        else:
            value = node("Sigmoid" if layer.op == "LOGISTIC" else "Softmax", [value])
        value = node("Relu", [value]) if layer.relu else value
    taken = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, *shape])
    count = next(len(each.bias) for each in layers[::-1] if each.bias is not None)
    made = helper.make_tensor_value_info(value, TensorProto.FLOAT, [1, count])
    graph = helper.make_graph(nodes, "net", [taken], [made], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    return onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )


def _keras(layers: list[Layer], shape: tuple[int, ...]) -> Any:
    """The same model in Keras."""
    import keras

    made = [keras.Input(shape, 1, name="x")]
    for layer in layers:
        activation = "relu" if layer.relu else None
        if layer.op == "CONV_2D":
            assert layer.weight is not None
            made.append(keras.layers.Conv2D(len(layer.weight), 3, activation=activation))
        elif layer.op == "FULLY_CONNECTED":
            assert layer.weight is not None
            made.append(keras.layers.Dense(len(layer.weight), activation=activation))
        elif layer.op == "MEAN":
            made.append(keras.layers.GlobalAveragePooling2D())
        else:
            made.append(keras.layers.Activation("sigmoid" if layer.op == "LOGISTIC" else "softmax"))
    model = keras.Sequential(made)
    for layer, built in zip(layers, model.layers, strict=True):
        if layer.op == "CONV_2D":
            built.set_weights([layer.weight.transpose(1, 2, 3, 0), layer.bias])  # type: ignore[union-attr] # it has some
        elif layer.op == "FULLY_CONNECTED":
            built.set_weights([layer.weight.T, layer.bias])  # type: ignore[union-attr] # it has some
    return model


@pytest.mark.slow
@pytest.mark.parametrize("of", ["onnx", "keras"])
@pytest.mark.parametrize(("net", "outputs", "kind"), CASES)
def test_models_of_other_frameworks_are_references(
    maker: Edgeq, of: str, net: str, outputs: int, kind: str
) -> None:
    """Sound files pass, damaged ones do not, and the text says what they were compared with."""
    case = Case(net, outputs, kind, seed=7)
    shape = case.samples[0][0].shape[1:]
    made = _keras(case.layers, shape) if of == "keras" else _onnx(case.layers, shape)
    reference = made if of == "keras" else onnx_reference(made)
    assert alarm(maker, maker.load(case.file(), reference=reference, name="net"), case) == ""
    for what, file in case.damages()[:2]:
        told = alarm(maker, maker.load(file, reference=reference, name="net"), case)
        assert told, what
        assert "torch" not in told.splitlines()[0], told
