"""Files that TensorFlow's converter made of Keras models, held against the Keras models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures import keras_nets
from fixtures.tflite.writer import pack, unpack
from pytest_edgeq import (
    Budget,
    Edgeq,
    QuantizedModel,
    assert_input_dtypes,
    assert_no_float_ops,
    assert_op_counts,
    assert_op_dtypes,
    assert_output_dtypes,
    assert_qparams,
    assert_runtimes_agree,
    assert_within_budget,
)
from pytest_edgeq.numerics.findings import STATEFUL_REFERENCE
from pytest_edgeq.tflite.roles import roles_of

# TensorFlow is imported and converts, in a process of its own.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# Measured on 32 images, dB of logits and of probabilities, the same on every set of kernels up to
# 0.3 (float: 6): float 131 and 125, dynamic 46 and 40, float16 70 and 66, int8 in all three dresses
# 43 and 30, int16x8 47 and 41 (its weights have 8 bits, too). The bounds leave 6 dB, which is a
# noise of twice the size.
FLOORS = {
    "float": (115.0, 110.0),
    "dynamic": (39.0, 34.0),
    "float16": (64.0, 59.0),
    "int8": (37.0, 24.0),
    "int8_float_io": (37.0, 24.0),
    "uint8_io": (37.0, 24.0),
    "int16x8": (41.0, 35.0),
}
# Dtypes of inputs and outputs; of what CONV_2D, FULLY_CONNECTED and so on compute in.
BORDERS = {"int8": "int8", "uint8_io": "uint8", "int16x8": "int16"}
LAYERS = {"CONV_2D": 2, "DEPTHWISE_CONV_2D": 1, "FULLY_CONNECTED": 1}
ALL_OPS = {**LAYERS, "ADD": 1, "MEAN": 1, "SOFTMAX": 1}


@pytest.fixture(params=keras_nets.VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    """A way to quantize after training."""
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture
def loaded(maker: Edgeq, keras_files: Path, classifier: Any, variant: str) -> QuantizedModel:
    """The file of the variant and its Keras model."""
    return maker.load(keras_files / f"{variant}.tflite", reference=classifier)


def _budgets(variant: str) -> dict[str, Budget | None]:
    logits, probabilities = FLOORS[variant]
    return {
        "logits": Budget(sqnr_db=logits, top1_agreement=1.0),
        "probabilities": Budget(sqnr_db=probabilities, top1_agreement=1.0),
    }


def _scheme(model: QuantizedModel, scheme: str, **dtypes: Any) -> None:
    for op, count in LAYERS.items():
        assert_op_dtypes(model, op, scheme=scheme, count=count, **dtypes)


def test_the_file_computes_what_keras_does(
    maker: Edgeq, loaded: QuantizedModel, classifier: Any, variant: str
) -> None:
    """On every output, by all kernels, whatever the file takes and gives; dropout is off."""
    comparison = maker.compare(loaded, keras_nets.images(32, seed=2))
    assert_within_budget(comparison, total=_budgets(variant))
    assert not comparison.health
    for runtime in ("builtin", "reference"):
        comparison = maker.compare(loaded, keras_nets.images(8, seed=2), runtime=runtime)
        assert_within_budget(comparison, total=_budgets(variant))
    outputs = loaded.run(*keras_nets.images(1, seed=4))
    assert {value.dtype for value in outputs.values()} == {np.dtype(np.float32)}

    comparison = maker.compare(_with_rolled_head(loaded), keras_nets.images(8, seed=2))
    with pytest.raises(AssertionError, match="logits"):
        assert_within_budget(comparison, total=_budgets(variant))


def test_every_op_is_told_right(loaded: QuantizedModel, variant: str) -> None:
    """Schemes, weights, biases, inputs and outputs; no op is named after a module."""
    border = BORDERS.get(variant, "float32")
    assert_input_dtypes(loaded, border)
    assert_output_dtypes(loaded, {"logits": border, "probabilities": border})
    assert {entry.module for entry in loaded.op_dtypes} == {None}
    if variant == "float":
        assert_op_counts(loaded, ALL_OPS)
        _scheme(loaded, "float", weight="float32")
    if variant == "float16":
        _scheme(loaded, "float16", input="float32", weight="float16", bias="float16")
        assert_op_dtypes(loaded, "ADD", scheme="float")
    if variant.startswith(("int8", "uint8")):
        for op in ALL_OPS:
            assert_op_dtypes(loaded, op, input="int8", output="int8", scheme="int8")
        _scheme(loaded, "int8", weight="int8", bias="int32", granularity="per_channel")
        assert_no_float_ops(loaded)
    if variant == "int16x8":
        for op in ALL_OPS:
            assert_op_dtypes(loaded, op, input="int16", output="int16", scheme="int16x8")
        _scheme(loaded, "int16x8", weight="int8", bias="int64", granularity="per_channel")
        assert_no_float_ops(loaded)
        assert_qparams(loaded, "CONV_2D", role="output", zero_point=0)


def test_dynamic_range_leaves_small_layers_in_float(
    maker: Edgeq, keras_files: Path, classifier: Any
) -> None:
    """Below 1,024 weights, without a word; and a test that expects otherwise fails."""
    loaded = maker.load(keras_files / "dynamic.tflite", reference=classifier)
    expected = {"scheme": "dynamic", "weight": "int8", "bias": "float32"}
    assert_op_dtypes(loaded, "CONV_2D", count=2, granularity="per_channel", **expected)
    assert_op_dtypes(loaded, "FULLY_CONNECTED", count=1, **expected)
    assert_op_dtypes(loaded, "DEPTHWISE_CONV_2D", scheme="float", weight="float32")

    with pytest.raises(AssertionError, match="DEPTHWISE_CONV_2D"):
        assert_op_dtypes(loaded, "DEPTHWISE_CONV_2D", scheme="dynamic")
    with pytest.raises(AssertionError, match="DEPTHWISE_CONV_2D"):
        assert_no_float_ops(loaded, allow=("ADD", "MEAN", "SOFTMAX"))


@pytest.mark.parametrize("variant", ["int8", "uint8_io"], indirect=True)
def test_codes_agree_over_kernels(loaded: QuantizedModel) -> None:
    """Integer outputs have an LSB, signed or not. Measured: 0 on 8 images; a rounding is 1."""
    assert_runtimes_agree(loaded, keras_nets.images(8, seed=3), 1)


def _with_rolled_head(loaded: QuantizedModel) -> QuantizedModel:
    """The defect: the weights of the dense layer belong to the class before."""
    (op,) = [op for op in loaded.graph.ops if op.name == "FULLY_CONNECTED"]
    (weight,) = roles_of(loaded.graph, op).weights
    model = unpack(loaded.tflite)
    buffer = model.buffers[weight.tensor.buffer]
    rows = np.asarray(buffer.data, np.uint8).reshape(weight.tensor.shape[0], -1)
    buffer.data = np.roll(rows, 1, axis=0).ravel()
    return loaded.with_tflite(pack(model))


def test_another_preprocessing_fails(maker: Edgeq, keras_files: Path, classifier: Any) -> None:
    """The reference, a plain callable, has what the file was made without."""

    def normalized(image: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
        outputs = classifier((image - 0.5) / 0.5, training=False)
        return {name: value.numpy() for name, value in outputs.items()}

    loaded = maker.load(keras_files / "int8.tflite", reference=normalized)
    comparison = maker.compare(loaded, keras_nets.images(8, seed=2))
    with pytest.raises(AssertionError, match="logits"):
        assert_within_budget(comparison, total=_budgets("int8"))


@pytest.mark.parametrize("takes", ["right first", "dict"])
def test_inputs_and_outputs_are_paired_by_name(maker: Edgeq, keras_files: Path, takes: str) -> None:
    """Whatever their order in the file: one of the lists has another, and so has the dict."""
    model = keras_nets.pair(takes=takes)
    loaded = maker.load(keras_files / "pair.tflite", reference=model)
    assert [border.name for border in loaded.outputs] == ["alone", "weighed"]
    generator = np.random.default_rng(0)
    samples = [
        {name: generator.standard_normal((1, 8), np.float32) for name in ("left", "right")}
        for _ in range(4)
    ]
    first, second = ("left", "right") if takes == "left first" else ("right", "left")

    # Conversion alone: float32 rounding, far above 100 dB.
    assert maker.compare(loaded, samples).total.sqnr_db > 100
    tuples = [(sample[first], sample[second]) for sample in samples]
    assert maker.compare(loaded, tuples).total.sqnr_db > 100

    def swapped(left: Any, right: Any) -> Any:
        pair = {"left": right, "right": left}
        inputs = pair if takes == "dict" else [pair[first], pair[second]]
        return model(inputs, training=False)

    wrong = maker.load(keras_files / "pair.tflite", reference=swapped)
    assert maker.compare(wrong, samples).total.sqnr_db < 10


def test_outputs_that_bear_the_names_of_layers(maker: Edgeq, keras_files: Path) -> None:
    """As Keras 2 has TensorFlow's converter write them (tried: tf-keras 2.21), in any order."""
    weights = np.load(keras_files / "twin.npz")
    twin = keras_nets.twin(weights["kernel"], weights["bias"])
    model = unpack((keras_files / "twin.tflite").read_bytes())
    outputs = {entry.name: entry for entry in model.signatureDefs[0].outputs}
    for i, name in enumerate(twin.output_names):
        outputs[f"output_{i}".encode()].name = name
    loaded = maker.load(pack(model), reference=twin)
    assert [border.name for border in loaded.outputs] == twin.output_names[::-1]
    images = [np.random.default_rng(i).standard_normal((1, 8, 8, 3), np.float32) for i in range(4)]

    assert maker.compare(loaded, images).total.sqnr_db > 100
    nameless = maker.load(pack(model), reference=lambda image: twin(image, training=False))
    with pytest.raises(ValueError, match="outputs are in another order"):
        maker.compare(nameless, images)


def test_any_kind_of_keras_model(maker: Edgeq, keras_files: Path) -> None:
    """Functional, sequential without an input of its own, subclassed, a layer alone."""
    import keras

    functional = keras_nets.dense()
    layer = functional.get_layer("dense")

    class Subclassed(keras.Model):  # type: ignore[misc] # Keras ships no types
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def call(self, x: Any, training: Any = None) -> Any:
            assert training is False
            return [self.layer(x)]

    sequential = keras.Sequential([layer])
    samples = [np.random.default_rng(i).standard_normal((1, 8), np.float32) for i in range(4)]
    for reference in (functional, sequential, Subclassed(), layer):
        loaded = maker.load(keras_files / "dense.tflite", reference=reference)
        assert maker.compare(loaded, samples).total.sqnr_db > 100
    weights = layer.get_weights()
    try:
        layer.set_weights([-weights[0], weights[1]])
        for reference in (functional, sequential, Subclassed(), layer):
            loaded = maker.load(keras_files / "dense.tflite", reference=reference)
            assert maker.compare(loaded, samples).total.sqnr_db < 10
    finally:
        layer.set_weights(weights)


def test_states_of_a_keras_model_are_put_back(maker: Edgeq, keras_files: Path) -> None:
    """As a torch module's buffers are, and the comparison tells of them."""
    import keras

    class Counting(keras.Model):  # type: ignore[misc] # Keras ships no types
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras_nets.dense()
            self.n = self.add_weight(shape=(), initializer="zeros", trainable=False, name="n")

        def call(self, x: Any) -> Any:
            self.n.assign_add(1.0)
            return self.dense(x) + self.n

    model = Counting()
    samples = [np.random.default_rng(i).standard_normal((1, 8), np.float32) for i in range(4)]
    comparison = maker.compare(maker.load(keras_files / "dense.tflite", reference=model), samples)

    assert float(model.n.numpy()) == 0.0
    (finding,) = [f for f in comparison.health if f.kind == STATEFUL_REFERENCE]
    assert "/n'" in str(finding)


def test_a_keras_model_of_other_inputs(maker: Edgeq, keras_files: Path) -> None:
    """Two where the file has one."""
    loaded = maker.load(keras_files / "dense.tflite", reference=keras_nets.pair())

    with pytest.raises(ValueError, match=r"the Keras model has the inputs \['left', 'right'\]"):
        maker.compare(loaded, [np.zeros((1, 8), np.float32)])


_ON_TORCH = """
import sys
import numpy as np
import torch
from fixtures import keras_nets
from pytest_edgeq import Edgeq
model = keras_nets.dense()
assert isinstance(model, torch.nn.Module)
loaded = Edgeq().load(sys.argv[1], reference=model)
generator = np.random.default_rng(0)
samples = [generator.standard_normal((1, 8), np.float32) for _ in range(4)]
model.get_layer("dense").set_weights(np.load(sys.argv[2], allow_pickle=False).values())
print(Edgeq().compare(loaded, samples).total.sqnr_db)
"""


def test_keras_on_torch_is_no_torch_module(keras_files: Path, tmp_path: Path) -> None:
    """On its torch backend a Keras model is one; it is called as Keras all the same."""
    layer = keras_nets.dense().get_layer("dense")
    np.savez(tmp_path / "weights.npz", *layer.get_weights())
    run = subprocess.run(
        [sys.executable, "-c", _ON_TORCH, keras_files / "dense.tflite", tmp_path / "weights.npz"],
        env={**os.environ, "KERAS_BACKEND": "torch"},
        cwd=Path(keras_nets.__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )

    assert run.returncode == 0, run.stderr
    assert float(run.stdout.split()[-1]) > 100
