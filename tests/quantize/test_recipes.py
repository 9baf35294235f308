"""Recipes: what each kind of rule promises, told by the file; and rules that promise in vain."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from ai_edge_quantizer import recipe, recipe_manager
from torch import Tensor, nn

from fixtures import tflite as converted
from fixtures.models import EmbeddingMean, SelfAttention, net
from fixtures.tflite.writer import chain
from pytest_edgeq import (
    QuantizedModel,
    assert_input_dtypes,
    assert_no_float_ops,
    assert_op_dtypes,
    assert_output_dtypes,
    assert_qparams,
    litert,
)
from pytest_edgeq.litert import recipes
from pytest_edgeq.names import PRESETS
from pytest_edgeq.quantize.recipe import scoped_ops
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.ops import QDQ
from tests.quantize import making
from tests.quantize.rules import dynamic, float16, left, static, weight_only

Rules = list[dict[str, Any]]


def layers() -> nn.Module:
    """Every kind of layer that recipes quantize by weight, and an ADD; inputs of 32 for blocks."""

    def forward(self: Any, image: Tensor) -> Any:
        x = torch.relu(self.stem(image))
        x = self.up(self.depth(x) + x).mean((2, 3))
        return self.head(torch.relu(self.wide(torch.relu(self.hidden(x)))))

    parts: dict[str, Any] = {
        "stem": nn.Conv2d(3, 8, 3, padding=1),
        "depth": nn.Conv2d(8, 8, 3, padding=1, groups=8),
        "up": nn.ConvTranspose2d(8, 8, 2, stride=2),
        "hidden": nn.Linear(8, 32),
        "wide": nn.Linear(32, 64),
        "head": nn.Linear(64, 10),
    }
    for layer in parts.values():
        # As many weights below 0 as above would have the zero point 0 by chance.
        layer.weight.data += layer.weight.abs().max() / 4
    return net(forward, "Layers", **parts)


IMAGE = (1, 3, 8, 8)

# The library names ops after their outputs, and the last one has the name of the model's output.
HEAD = "serving_default_output"
OPS = {
    "stem": "CONV_2D",
    "depth": "DEPTHWISE_CONV_2D",
    "up": "TRANSPOSE_CONV",
    "hidden": "FULLY_CONNECTED",
    "wide": "FULLY_CONNECTED",
    "head": "FULLY_CONNECTED",
}


class Promise(NamedTuple):
    """
    What a recipe makes of `Layers`.

    Attributes:
        rules: The recipe.
        weights: What `assert_op_dtypes` expects at a module; the layers left out are in float.
        others: The scheme of the ops without weights.
        borders: dtypes of input and output.
        sqnr_db: Least SQNR against torch. Weights of n bits give some 6·n dB less what the layers
            add up to: measured are 25 to 55 dB, 9 with int2, 75 with float16.
    """

    rules: Rules
    weights: dict[str, dict[str, str]]
    others: str = "float"
    borders: tuple[str, str] = ("float32", "float32")
    sqnr_db: float = 20


def _all(**expected: str) -> dict[str, dict[str, str]]:
    return dict.fromkeys(OPS, expected)


def _only(*modules: str, **expected: str) -> dict[str, dict[str, str]]:
    return dict.fromkeys(modules, expected)


FLOAT = {"scheme": "float", "weight": "float32"}
INT8 = {"weight": "int8", "granularity": "per_channel"}
INT4 = {"weight": "int4", "granularity": "per_channel"}
STATIC = {"scheme": "int8", "input": "int8", "output": "int8", "bias": "int32"}
STATIC_16 = {"scheme": "int16x8", "input": "int16", "output": "int16", "bias": "int64"}
LINEAR = ("hidden", "wide", "head")

PROMISES: dict[str, Promise] = {
    "one layer": Promise(
        [dynamic("Linear_wide", "FULLY_CONNECTED")], _only("wide", scheme="dynamic", **INT8)
    ),
    "later rules win": Promise(
        [dynamic(), dynamic("Linear_wide", "FULLY_CONNECTED", bits=4), left(HEAD)],
        _all(scheme="dynamic", **INT8)
        | _only("wide", scheme="dynamic", **INT4)
        | _only("head", **FLOAT),
    ),
    "two regexes": Promise(
        [static(f"Linear_hidden|{HEAD}"), weight_only("Conv2d_stem", "CONV_2D", bits=4)],
        _only("hidden", "head", **STATIC, **INT8) | _only("stem", scheme="weight_only", **INT4),
        borders=("float32", "int8"),
    ),
    "blockwise int4": Promise(
        recipe.dynamic_wi4b32_afp32(regex="Linear_wide", operation_name="FULLY_CONNECTED"),
        _only("wide", scheme="dynamic", weight="int4", granularity="blockwise_32"),
    ),
    "int2": Promise(
        # No kernel takes convolutions of 2 bits.
        [*recipe.dynamic_wi2c_afp32(), left("Conv2d_stem", "CONV_2D")],
        _only(*LINEAR, scheme="dynamic", weight="int2", granularity="per_channel"),
        sqnr_db=6,
    ),
    "int16x8": Promise(
        recipe.static_wi8_ai16(),
        _all(**STATIC_16, **INT8),
        others="int16x8",
        borders=("int16", "int16"),
    ),
    "int8, one kind and the borders in float": Promise(
        [static(), left(".*", "CONV_2D"), left(".*", "INPUT"), left(".*", "OUTPUT")],
        _all(**STATIC, **INT8) | _only("stem", **FLOAT),
        others="int8",
    ),
    "int8 with uint8 borders": Promise(
        [static(), static(".*", "INPUT", dtype="UINT"), static(".*", "OUTPUT", dtype="UINT")],
        _all(**STATIC, **INT8),
        others="int8",
        borders=("uint8", "uint8"),
    ),
    "static int4 with int16": Promise(
        [
            static(".*", operation, bits=4, activation=16)
            for operation in ("CONV_2D", "FULLY_CONNECTED")
        ],
        _only("stem", *LINEAR, **STATIC_16, **INT4),
        sqnr_db=10,
    ),
    "float16": Promise([float16()], _all(scheme="float16", weight="float16"), sqnr_db=60),
    "weight only, per tensor, asymmetric": Promise(
        [weight_only(granularity="TENSORWISE", symmetric=False)],
        _all(scheme="weight_only", weight="int8", granularity="per_tensor"),
    ),
    "dynamic per tensor": Promise(
        [dynamic(granularity="TENSORWISE"), left(".*", "DEPTHWISE_CONV_2D")],
        _all(scheme="dynamic", weight="int8", granularity="per_tensor") | _only("depth", **FLOAT),
    ),
    "OCTAV": Promise(
        recipe.static_wi8_ai8(algorithm_key="OCTAV"),
        _all(**STATIC, **INT8),
        others="int8",
        borders=("int8", "int8"),
    ),
    "MSE": Promise(
        [dynamic(bits=4, algorithm="MSE")],
        _only("stem", *LINEAR, scheme="dynamic", **INT4),
        sqnr_db=10,
    ),
    "GPTQ": Promise(
        [dynamic(".*", "FULLY_CONNECTED", bits=4, algorithm="GPTQ")],
        _only(*LINEAR, scheme="dynamic", **INT4),
        sqnr_db=10,
    ),
}


@functools.cache
def by_recipe(name: str) -> QuantizedModel:
    """Return the file of a promise."""
    return _quantize(PROMISES[name].rules)


def _quantize(rules: Any, make: Callable[[], nn.Module] = layers) -> QuantizedModel:
    return making.quantize(rules, make, *([IMAGE] if make is layers else []))


def _assert_layer(quantized: QuantizedModel, module: str, expected: dict[str, Any]) -> None:
    assert_op_dtypes(quantized, OPS[module], module=module, count=1, **expected)


def _assert_kept(promise: Promise, quantized: QuantizedModel) -> None:
    for module in OPS:
        _assert_layer(quantized, module, promise.weights.get(module, FLOAT))
    for op in {entry.op for entry in quantized.op_dtypes} - {*OPS.values(), *QDQ}:
        assert_op_dtypes(quantized, op, scheme=promise.others)
    if promise.others != "float":
        in_float = {
            OPS[module]
            for module, each in promise.weights.items()
            if each["scheme"] in ("float", "weight_only")
        }
        assert_no_float_ops(quantized, allow=sorted(in_float))
    assert_input_dtypes(quantized, promise.borders[0])
    assert_output_dtypes(quantized, promise.borders[1])


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", PROMISES)
def test_a_recipe_keeps_its_promise(name: str) -> None:
    """Every op is what the rules say, those that no rule names are in float, and it computes."""
    quantized, promise = by_recipe(name), PROMISES[name]
    _assert_kept(promise, quantized)
    assert quantized.flow == "recipe"
    assert making.sqnr_db(quantized, layers, IMAGE) > promise.sqnr_db


def test_weights_are_asymmetric_only_where_asked() -> None:
    """One zero point off 0 a layer."""
    asymmetric = by_recipe("weight only, per tensor, asymmetric")
    symmetric = _quantize(recipe.weight_only_wi8_afp32())
    _assert_kept(Promise([], _all(scheme="weight_only", **INT8)), symmetric)
    for module in OPS:
        assert_qparams(asymmetric, OPS[module], module, symmetric=False)
        assert_qparams(symmetric, OPS[module], module, symmetric=True)


def test_an_algorithm_that_looks_at_activations() -> None:
    """GPTQ rounds by what calibration saw, and needs to see something."""
    plain = _quantize([dynamic(".*", "FULLY_CONNECTED", bits=4)])
    assert by_recipe("GPTQ").tflite != plain.tflite
    with pytest.raises(ValueError, match=r"needs calibration data and got none"):
        making.quantize(PROMISES["GPTQ"].rules, layers, IMAGE, calibration=None)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("algorithm", "op", "count"),
    [
        ("DECOMPOSED_HADAMARD_ROTATION", "RESHAPE", 6),
        ("HADAMARD_ROTATION", "CUSTOM:aeq.hadamard_rotation", 3),
        ("OSCAR", "MUL", 3),
    ],
)
def test_an_algorithm_that_inserts_ops(algorithm: str, op: str, count: int) -> None:
    """What it puts before each layer is in float, the layers have their int4."""
    quantized = _quantize([dynamic(".*", "FULLY_CONNECTED", bits=4, algorithm=algorithm)])
    linear = quantized.op_dtypes.ops("FULLY_CONNECTED")
    assert [entry.scheme for entry in linear if entry.weight == "int4"] == ["dynamic"] * 3
    assert_op_dtypes(quantized, op, scheme="float", count=count)
    # A rotation that is not undone by the weights leaves 0 dB.
    assert making.sqnr_db(quantized, layers, IMAGE) > 15


def _on_a_grid() -> nn.Module:
    """Return the model with a layer whose weights were quantized before, and are floats again."""
    model: Any = layers()
    weight = model.wide.weight.data
    scale = weight.abs().amax(1, keepdim=True) / 127
    model.wide.weight.data = (weight / scale).round() * scale
    return model  # type: ignore[no-any-return] # its class is made


@pytest.mark.slow
def test_weights_that_were_quantized_before() -> None:
    """They are found again without a loss; others are refused."""
    rules = [weight_only("Linear_wide", "FULLY_CONNECTED", algorithm="dequantized_weight_recovery")]
    quantized = making.quantize(rules, _on_a_grid, IMAGE)
    _assert_layer(quantized, "wide", {"scheme": "weight_only", **INT8})

    # float32 has 24 bits: 6.02 · 24 ≈ 144 dB for one rounding; int8 anew would give some 50.
    assert making.sqnr_db(quantized, _on_a_grid, IMAGE) > 100
    with pytest.raises(RuntimeError, match=r"Failed to recover the original quantized values"):
        _quantize(rules)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_embedding_tables(bits: int) -> None:
    """They are quantized by weight."""
    quantized = _quantize([dynamic(".*", "EMBEDDING_LOOKUP", bits=bits)], EmbeddingMean)
    expected = {"scheme": "dynamic", "weight": f"int{bits}", "granularity": "per_channel"}
    assert_op_dtypes(quantized, "EMBEDDING_LOOKUP", count=1, **expected)


def test_a_recipe_manager_says_the_same() -> None:
    """What the library's own classes hold is full of enums; they themselves are no recipe."""
    manager = recipe_manager.RecipeManager()
    manager.add_weight_only_config(".*", "CONV_2D", num_bits=4)
    manager.add_quantization_config(".*", "FULLY_CONNECTED", algorithm_key="no_quantize")
    by_hand = [weight_only(".*", "CONV_2D", bits=4), left(".*", "FULLY_CONNECTED")]
    files = [_quantize(r).tflite for r in (manager.get_quantization_recipe(), by_hand)]

    assert files[0] == files[1]
    with pytest.raises(TypeError, match=r"pass the result of its get_quantization_recipe\(\)"):
        _quantize(manager)


LIBRARY = Path(recipe.__file__).parent / "recipes"


def test_the_librarys_own_file_of_several_rules() -> None:
    """Static int8, but linear layers weight-only int4, and convolutions in float."""
    (path,) = LIBRARY.glob("sample_advanced*.json")
    quantized = _quantize(path)

    _assert_kept(
        Promise(
            [],
            _only(*LINEAR, scheme="weight_only", **INT4)
            | _only("depth", "up", **STATIC, **INT8)
            | _only("stem", **FLOAT),
            others="int8",
            borders=("int8", "int8"),
        ),
        quantized,
    )


FLOAT_FILES = sorted(Path(converted.__file__).parent.glob("converted/*.float.tflite"))
BASIC = [preset for preset in PRESETS if preset.startswith("recipe_")]


# What the presets quantize by its weight.
INT4_WEIGHTS = {"CONV_2D", "FULLY_CONNECTED", "EMBEDDING_LOOKUP"}
INT8_WEIGHTS = {"DEPTHWISE_CONV_2D", "TRANSPOSE_CONV", "BATCH_MATMUL"} | INT4_WEIGHTS


@pytest.mark.parametrize("path", FLOAT_FILES, ids=lambda path: path.name.split(".")[0])
def test_basic_recipes_match_every_model(path: Path) -> None:
    """A preset is for all models: it takes any that has an op that it can quantize."""
    ops = scoped_ops(EdgeFile(path))
    for preset in BASIC:
        rules = litert.check_rules(litert.load_recipe(preset), preset)
        weights = INT4_WEIGHTS if "wi4" in preset else INT8_WEIGHTS
        if "_static_" in preset or weights & {op.name for op in ops}:
            assert 0 in litert.match_rules(rules, ops)
        else:
            with pytest.raises(ValueError, match=r"does not support this config for \d"):
                litert.match_rules(rules, ops)


# Recipes that are refused, and parts of what is said.
IN_VAIN: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a layer that is not there": (
        [dynamic(), dynamic("Linear_last", bits=4)],
        (
            "Layers: recipe, rule 2 of 2: matches no op: its regex is found in the scope of none",
            "FULLY_CONNECTED #8 (wide): ",
            '  rule: {"regex": "Linear_last", "operation": "*", "algorithm_key": "min_max',
        ),
    ),
    "the last layer by its own name": (
        [dynamic(), left("Linear_head", "FULLY_CONNECTED")],
        (
            "rule 2 of 2: matches no op: its regex is found in the scope of no FULLY_CONNECTED",
            "FULLY_CONNECTED #9 (head): serving_default_output_0_output;",
            '  rule: {"regex": "Linear_head", "operation": "FULLY_CONNECTED", "algorithm_key": "no',
        ),
    ),
    "an operation that is not there": (
        [dynamic(), left(".*", "EMBEDDING_LOOKUP")],
        ("rule 2 of 2: matches no op: there is no EMBEDDING_LOOKUP among ", " 3 FULLY_CONNECTED"),
    ),
    "a config that no matching op has": (
        [dynamic("Conv2d_depth", bits=4), dynamic("Linear")],
        (
            "rule 1 of 2: ai-edge-quantizer does not support this config for ",
            "it does for FULLY_CONNECTED, CONV_2D, EMBEDDING_LOOKUP",
        ),
    ),
    "a later rule with an earlier regex": (
        [dynamic(), dynamic("Linear_wide", bits=4), left(".*", "FULLY_CONNECTED")],
        (
            "rule 3 of 3: is the last rule for FULLY_CONNECTED #8 (wide), but "
            "ai-edge-quantizer applies another",
            "(rule 1 of 3 has the same)",
            "('(.*)' means the same)",
        ),
    ),
    "a rule that is thrown away": (
        [dynamic(".*", "FULLY_CONNECTED", bits=4), float16(), dynamic(algorithm="GPTQ")],
        (
            "rule 2 of 3: is the last rule for CONV_2D #1 (stem), but "
            "ai-edge-quantizer leaves it in float",
            "(rule 1 of 3 and rule 3 of 3 has the same)",
        ),
    ),
    # It says int8 for what it does not rotate, and leaves that in float.
    "the library's own file that throws a rule away": (
        LIBRARY / "dynamic_wi8_afp32_hadamard_recipe.json",
        ("rule 1 of 2: is the last rule ", " CONV_2D #1 (stem)"),
    ),
    "an op that is never quantized": (
        [dynamic(".*", "ADD")],
        ("does not support this config for ADD; it does for FULLY_CONNECTED",),
    ),
    "an algorithm of other ops": (
        [dynamic(".*", "CONV_2D", algorithm="GPTQ")],
        ("for CONV_2D; it does for FULLY_CONNECTED\n",),
    ),
    "an algorithm of other bits": (
        [weight_only(algorithm="float_casting")],
        ("requires number of bits to be set as 16",),
    ),
    "blocks of another op": (
        [dynamic(".*", "CONV_2D", bits=4, granularity="BLOCKWISE_32")],
        ("for CONV_2D; it does",),
    ),
    "blocks that do not fit": (
        [dynamic("Linear_hidden", bits=4, granularity="BLOCKWISE_32")],
        ("Linear_hidden", "not divisible by block size 32"),
    ),
    "convolutions of two bits, which no kernel unpacks": (
        recipe.dynamic_wi2c_afp32(),
        ("CONV_2D #", "(stem)", "its weights are int2"),
    ),
    "a layer that the kernels compute wrongly": (
        [dynamic("Conv2d_depth", "DEPTHWISE_CONV_2D", granularity="TENSORWISE")],
        ("DEPTHWISE_CONV_2D #", "(depth)", "one scale for 8 channels"),
    ),
    "no plain data": (
        [dynamic() | {"regex": torch.ones(1)}],
        ("recipe: a rule is not plain data: ", "Tensor"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_VAIN)
def test_a_rule_in_vain(name: str) -> None:
    """It is an error that shows the rule, what there is, and the way out."""
    rules, told = IN_VAIN[name]
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        _quantize(rules)
    for part in told:
        assert part in str(caught.value)


def test_the_ways_out_of_a_rule_in_vain() -> None:
    """The scope that was shown, and the regex that was proposed, do what the rules meant."""
    shown = [dynamic(), left("serving_default_output_0_output", "FULLY_CONNECTED")]
    assert_op_dtypes(_quantize(shown), "FULLY_CONNECTED", module="head", scheme="float")
    proposed = [dynamic(), dynamic("Linear_wide", bits=4), left("(.*)", "FULLY_CONNECTED")]
    quantized = _quantize(proposed)
    assert_op_dtypes(quantized, "FULLY_CONNECTED", scheme="float", count=3)
    _assert_layer(quantized, "stem", {"scheme": "dynamic", **INT8})


def test_a_rule_that_leaves_its_ops_in_float() -> None:
    """The library takes the rule and passes over ops without constants; we tell, op by op."""
    rules = [dynamic(".*", "FULLY_CONNECTED"), dynamic("SelfAttention;1[37]")]
    told = "rule 2 of 2: left 2 in float of the 2 ops that it applies to"
    with pytest.raises(ValueError, match=told) as caught:
        _quantize(rules, SelfAttention)
    shown = str(caught.value).splitlines()

    assert sum("BATCH_MATMUL #" in line for line in shown) == 2
    assert json.dumps(rules[-1]) in str(caught.value)
    assert "let a no_quantize rule for these ops follow it" in shown[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules",
    [
        [dynamic()],
        [
            dynamic(".*", "BATCH_MATMUL"),
            dynamic("(.*)", "FULLY_CONNECTED"),
            left("", "BATCH_MATMUL"),
        ],
    ],
)
def test_an_op_that_no_rule_promises_may_stay_in_float(rules: Rules) -> None:
    """A rule for all that is supported, and one that a later rule overrides."""
    quantized = _quantize(rules, SelfAttention)

    assert_op_dtypes(quantized, "FULLY_CONNECTED", scheme="dynamic", weight="int8", count=4)
    assert_op_dtypes(quantized, "BATCH_MATMUL", scheme="float", count=2)


def _changed(rule: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of a rule with one entry added or replaced."""
    copy = json.loads(json.dumps(rule))
    *parents, key = path.split(".")
    inner = copy
    for parent in parents:
        inner = inner[parent]
    inner[key] = value
    return copy  # type: ignore[no-any-return] # it was a rule before


WEIGHT = "op_config.weight_tensor_config"
BAD_RULES: list[tuple[str, Any, str]] = [
    ("operation", "CONV2D", r"unknown operation 'CONV2D' \(did you mean CONV_2D"),
    ("operation", "LINEAR", r"unknown operation 'LINEAR' \(did you mean FULLY_CONNECTED\?\)"),
    ("operation", "TRANSPOSE_CONV", r"'TRANSPOSE_CONV' \(did you mean CONV_2D_TRANSPOSE\?\)"),
    ("operation", None, r"unknown operation 'None'"),
    (
        "algorithm_key",
        "min_max",
        r"unknown algorithm_key 'min_max' \(did you mean min_max_uniform_quantize\?\)\n"
        r"  known: no_quantize, ",
    ),
    ("algorithm_key", "MES", r"unknown algorithm_key 'MES' \(did you mean MSE\?\)"),
    ("regex", "[", r"regex '\[' is invalid: unterminated character set"),
    ("regex", 3, r"regex 3 is invalid"),
    ("op_confg", {}, r"unknown key 'op_confg' \(did you mean op_config\?\)"),
    ("op_config", [], r"op_config: expected a dict, got \[\]"),
    ("op_config", {}, r"op_config: 'weight_tensor_config' missing"),
    ("op_config.min_weight_element", 9, r"op_config: unknown key 'min_weight_element' \(did you"),
    ("op_config.compute_precision", "INT", r"unknown compute_precision 'INT' \(did you mean INTE"),
    ("op_config.explicit_dequantize", "no", r"explicit_dequantize: expected true or false"),
    (WEIGHT, 8, r"weight_tensor_config: expected a dict, got 8"),
    (WEIGHT, {}, r"weight_tensor_config: 'num_bits' missing"),
    (f"{WEIGHT}.num_bits", "8", r"num_bits: expected an integer, got '8'"),
    (f"{WEIGHT}.num_bits", 7, r"does not support this config for any op; it does for no operation"),
    (f"{WEIGHT}.symetric", False, r"unknown key 'symetric' \(did you mean symmetric\?\)"),
    (f"{WEIGHT}.granularity", "CHANNEL", r"unknown granularity 'CHANNEL' \(did you mean CHANNELWI"),
    (f"{WEIGHT}.block_size", 48, r"op_config: Unsupported block size: 48"),
    (f"{WEIGHT}.dtype", "int", r"unknown dtype 'int' \(did you mean INT or UINT\?\)"),
]


@pytest.mark.parametrize(("path", "value", "told"), BAD_RULES)
def test_a_rule_that_says_something_unknown(
    tmp_path: Path, path: str, value: Any, told: str
) -> None:
    """Much of it the library takes, and does something else; a file of rules is named."""
    rules = [dynamic("stem"), _changed(dynamic(), path, value)]
    file = tmp_path / "rules.json"
    file.write_text(json.dumps(rules), encoding="utf-8")
    for given, where in ((rules, "recipe"), (file, f"recipe {file}")):
        with pytest.raises(ValueError, match=told) as caught:
            _quantize(given)

        assert str(caught.value).startswith(f"{where}, rule 2 of 2: ")
        assert str(caught.value).splitlines()[-1] == f"  rule: {json.dumps(rules[1])}"


def _long_file() -> bytes:
    """Write a float file of as many operations as the library draws a progress bar for."""
    names = ["x", *(f"t{i}" for i in range(119)), "y"]
    ops = [("TANH", taken, made) for taken, made in itertools.pairwise(names)]
    return chain(*ops, inputs="x", outputs="y", key=litert.SIGNATURE)


def test_no_progress_bar_is_drawn(capfd: pytest.CaptureFixture[str]) -> None:
    """It would stand in the output of each test that fails; the library still draws it."""
    rules = litert.load_recipe("recipe_static_wi8_ai8")
    arrays = {"x": np.ones((1, 4), np.float32)}
    told = []
    for is_shimmed in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not is_shimmed:
                patch.setattr(recipes, "_no_progress_bar", contextlib.nullcontext)
            samples = {litert.SIGNATURE: iter([arrays] * 3)}
            ranges = litert.calibrate_recipe(_long_file(), rules, samples, threads=1)
            litert.quantize_recipe(_long_file(), rules, ranges)
        told.append(capfd.readouterr())
    for bar in ("Running Calibration", "Applying Transformations"):
        assert [bar in each.err for each in told] == [False, True]
    assert [each.out for each in told] == ["", ""]
    assert "it/s" not in told[0].err


def _calibrated(inputs: Iterator[float]) -> float:
    """Calibrate a small file with arrays of each value, and return the greatest of its input."""
    arrays = ({"x": np.full((1, 4), value, np.float32)} for value in inputs)
    content = chain(("TANH", "x", "y"), inputs="x", outputs="y", key=litert.SIGNATURE)
    rules = litert.load_recipe("recipe_static_wi8_ai8")
    ranges = litert.calibrate_recipe(content, rules, {litert.SIGNATURE: arrays}, threads=1)
    assert ranges is not None
    return float(ranges["x"]["max"].item())


@pytest.mark.parametrize("fails", [False, True])
def test_a_calibration_within_another_keeps_its_ranges(fails: bool) -> None:
    """As where samples come from another quantized model, which may lack its own."""

    def inner() -> Iterator[float]:
        yield 1000
        if fails:
            raise FileNotFoundError
        yield 1000

    def outer() -> Iterator[float]:
        yield 0.5
        with contextlib.suppress(FileNotFoundError):
            assert _calibrated(inner()) == 1000
        yield 0.5

    assert _calibrated(outer()) == 0.5
    assert not recipes._running
