"""
What is met or checked around ai-edge-quantizer is still needed, and says what the library does.

A test here fails when the upstream symptom is gone: then the shim goes, and the test with it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fixtures import tflite
from fixtures.models import ResidualNet, TwoSignatures, normal, samples, seeded
from pytest_edgeq import Edgeq, litert
from pytest_edgeq.litert import recipes
from pytest_edgeq.litert.libraries import recipe_module
from pytest_edgeq.names import PRESETS
from pytest_edgeq.quantize.recipe import scoped_ops
from pytest_edgeq.runtimes.edge import EdgeFile
from tests.quantize.rules import dynamic, left

pytestmark = pytest.mark.slow

STATIC = "recipe_static_wi8_ai8"


@pytest.fixture(scope="module")
def residual() -> bytes:
    """A float file with the one signature."""
    return litert.convert(
        {litert.SIGNATURE: litert.Traced(seeded(ResidualNet), ResidualNet.sample_inputs())}
    )


@pytest.fixture(scope="module")
def two() -> bytes:
    """A float file with two signatures, `small` and `large`, of one model."""
    model = seeded(TwoSignatures)
    return litert.convert({key: litert.Traced(model, (_image(key, 0),)) for key in SIZES})


SIZES = {"small": 8, "large": 16}


def _image(key: str, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    # Other ranges for each, so that one cannot stand for the other.
    return torch.randn(1, 3, SIZES[key], SIZES[key], generator=generator) * SIZES[key]


def _arrays(key: str, count: int = 6) -> Iterator[dict[str, npt.NDArray[Any]]]:
    for seed in range(count):
        yield {"args_0": _image(key, seed).numpy()}


def _residual_arrays() -> Iterator[dict[str, npt.NDArray[Any]]]:
    for (sample,) in samples(ResidualNet, 6):
        yield {"args_0": sample.numpy()}


def _assert_same_ranges(actual: Any, expected: Mapping[str, Mapping[str, Any]]) -> None:
    assert actual is not None
    assert actual.keys() == expected.keys()
    for name, ranges in expected.items():
        for key, value in ranges.items():
            np.testing.assert_array_equal(actual[name][key], value, err_msg=f"{name} {key}")


def _library(float_tflite: bytes, rules: Any) -> Any:
    with litert.quiet():
        return recipe_module("quantizer").Quantizer(float_tflite, rules)


class _LayerScale(nn.Module):
    """The end of a ConvNeXt block on NHWC, scaled by channel: its bias has four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide, self.narrow = (
            nn.Conv2d(3, 6, 2, 2),
            nn.Linear(6, 12),
            nn.Linear(12, 6),
        )
        self.gamma = nn.Parameter(torch.linspace(0.2, 1.2, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y: torch.Tensor = self.narrow(F.gelu(self.wide(x.permute(0, 2, 3, 1)))) * self.gamma
        return x + y.permute(0, 3, 1, 2)


def _upsampling() -> nn.Module:
    """As U-Nets and generators have it: the batch norm is an ADD that becomes a bias."""
    up, norm = nn.ConvTranspose2d(3, 6, 4, 2, 1, bias=False), nn.BatchNorm2d(6)
    norm.running_mean = torch.linspace(-1.0, 1.0, 6)
    return nn.Sequential(up, norm, nn.ReLU())


@pytest.mark.parametrize("make", [_LayerScale, _upsampling])
def test_the_recipe_library_still_takes_each_bias_for_one_dimensional(
    maker: Edgeq, make: Callable[[], nn.Module]
) -> None:
    """ai-edge-quantizer 0.10.0 writes its scales along dimension 0; see `biases_of_any_rank`."""
    model, x = seeded(make), [normal(1, 3, 8, 8, seed=seed) for seed in range(12)]
    with pytest.MonkeyPatch.context() as without:
        without.setattr(recipes, "biases_of_any_rank", contextlib.nullcontext)
        with pytest.raises(RuntimeError, match="num_scales must be 1 for per-layer quantization"):
            maker.quantize(model, (x[0],), quantizer=STATIC, calibration=x[:8])
    quantized = maker.quantize(model, (x[0],), quantizer=STATIC, calibration=x[:8])
    graph = quantized.edge.graph
    [bias] = [
        each
        for each in graph.subgraphs[0].tensors
        if each.dtype == "int32" and len(each.scales) > 1 and len(each.shape) == 4
    ]
    assert (bias.shape, bias.quantized_dimension, len(bias.scales)) == ((1, 1, 1, 6), 3, 6)
    with pytest.warns(UserWarning, match="baselines were not checked"):
        maker.check(quantized, x[8:])


def test_the_recipe_library_still_uses_up_a_generator(residual: bytes) -> None:
    """ai-edge-quantizer 0.10.0 counts its data before it reads it; see `calibrate_recipe`."""
    made = _library(residual, litert.load_recipe(STATIC))
    with litert.quiet():
        assert made.calibrate({litert.SIGNATURE: _residual_arrays()}) == {}


def test_one_sample_a_call_gathers_the_same_ranges(residual: bytes, two: bytes) -> None:
    """Our streaming calibration equals the library's own on whole lists, to the bit."""
    rules = litert.load_recipe(STATIC)
    streams: Any = {litert.SIGNATURE: _residual_arrays}
    streams_of_two: Any = {key: functools.partial(_arrays, key) for key in SIZES}
    for content, each in ((residual, streams), (two, streams_of_two)):
        with litert.quiet():
            expected = _library(content, rules).calibrate(
                {key: list(stream()) for key, stream in each.items()}, num_threads=1
            )
        actual = litert.calibrate_recipe(
            content, rules, {key: stream() for key, stream in each.items()}, threads=1
        )
        _assert_same_ranges(actual, expected)
    fewer = litert.calibrate_recipe(two, rules, {key: _arrays(key, 1) for key in SIZES}, threads=1)
    with pytest.raises(AssertionError):
        _assert_same_ranges(fewer, expected)


@pytest.mark.parametrize("key", SIZES)
def test_a_signature_without_samples_is_told(two: bytes, key: str) -> None:
    """Ranges of one signature do not serve the other: the tensor that lacks them is named."""
    rules = litert.load_recipe(STATIC)
    (other,) = SIZES.keys() - {key}
    ranges = litert.calibrate_recipe(two, rules, {key: _arrays(key)}, threads=1)
    with pytest.raises(RuntimeError, match=f"quantization parameters for tensor: {other}_args_0"):
        litert.quantize_recipe(two, rules, ranges)


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("recipe_")])
def test_every_recipe_preset_is_one_of_the_librarys(name: str) -> None:
    """Our names follow the library's own."""
    own = getattr(recipe_module("recipe"), name.removeprefix("recipe_"))()

    assert litert.load_recipe(name) == own


FLOAT_FILES = sorted(Path(tflite.__file__).parent.glob("converted/*.float.tflite"))


@pytest.mark.parametrize("path", FLOAT_FILES, ids=lambda path: path.name.split(".")[0])
def test_scopes_are_the_librarys(path: Path) -> None:
    """What our match is searched in is what the library searches, op by op, borders included."""
    utils = recipe_module("utils.tfl_flatbuffer_utils")
    model = utils.read_model(path.read_bytes())
    ops = [(op, graph) for graph in model.subgraphs for op in graph.operators]
    for graph in model.subgraphs:
        ops += [(op, graph) for op in utils.get_subgraph_input_output_operators(graph)]
    expected = [utils.get_op_scope(op, graph.tensors) for op, graph in ops]

    assert [op.scope for op in scoped_ops(EdgeFile(path))] == expected


def _filed(*rules: dict[str, Any]) -> Any:
    manager = recipe_module("recipe_manager").RecipeManager()
    manager.load_quantization_recipe(list(rules))
    operation = recipe_module("qtyping").TFLOperationName.FULLY_CONNECTED
    return manager.get_quantization_configs(operation, "head;")


def test_a_later_rule_still_stands_where_its_regex_stood_first() -> None:
    """ai-edge-quantizer 0.10.0: the last rule should win, and does not; `_check_precedence`."""
    off = left(".*", "FULLY_CONNECTED")
    first, second = dynamic(".*", "CONV_2D"), dynamic("head")

    assert _filed(first, second, off)[0] == "min_max_uniform_quantize"
    assert _filed(second, off)[0] == "no_quantize"


def test_a_rule_for_all_still_throws_those_of_its_regex_away() -> None:
    """ai-edge-quantizer 0.10.0: also where it does not replace them; see `_check_precedence`."""
    weights, unsupported = dynamic(), dynamic(algorithm="float_casting")

    assert _filed(weights)[0] == "min_max_uniform_quantize"
    assert _filed(weights, unsupported)[0] == "no_quantize"
    assert _filed(weights, {**unsupported, "regex": "(.*)"})[0] == "min_max_uniform_quantize"


def test_a_slip_still_has_no_effect() -> None:
    """ai-edge-quantizer 0.10.0 takes it for a parameter, and looks at no op left in float."""
    for rule, told in (
        (dynamic(symetric=False), r"unknown key 'symetric'"),
        (left(".*", "CONV2D"), r"unknown operation 'CONV2D'"),
    ):
        recipe_module("recipe_manager").RecipeManager().load_quantization_recipe([rule])
        with pytest.raises(ValueError, match=told):
            litert.check_rules([rule], "recipe")
