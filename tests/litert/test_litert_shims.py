"""
Each shim over the libraries is still needed.

A test here fails when the upstream symptom is gone: then the shim goes, and the test with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fixtures.models import IntScalar, ResidualNet, samples, seeded
from pytest_edgeq import litert
from pytest_edgeq.presets import PRESETS


def _exported(model: type[Any]) -> Any:
    with litert.quiet():
        return torch.export.export(seeded(model), model.sample_inputs(), strict=True).module()


def test_integer_annotations_still_break_calibration() -> None:
    """Torchao 0.18.0: a histogram observer on an int64 tensor raises; see `prepare_pt2e`."""
    with litert.quiet():
        from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

        prepared = prepare_pt2e(_exported(IntScalar), litert.pt2e_preset("pt2e_static_int8"))
    with pytest.raises(NotImplementedError, match=r"histogram_cpu.*not implemented for 'Long'"):
        prepared(*IntScalar.sample_inputs())


def test_integer_annotations_are_dropped() -> None:
    """The same graph with our face runs, and keeps its annotations on floats."""
    prepared = litert.prepare_pt2e(_exported(IntScalar), litert.pt2e_preset("pt2e_static_int8"))
    prepared(*IntScalar.sample_inputs())

    assert litert.needs_calibration(prepared)
    assert litert.uncalibrated(prepared) == []


class _DeadAdd(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add something that is never used, as the position ids of a transformer are."""
        torch.arange(4) + 1  # unused on purpose
        return x + x


def _exported_dead_add() -> Any:
    with litert.quiet():
        return torch.export.export(_DeadAdd().eval(), (torch.ones(1, 4),), strict=True).module()


def test_an_unused_add_still_breaks_the_annotator() -> None:
    """Torch 2.13 leaves it in the graph, litert-torch 0.10.0 stumbles; see `prepare_pt2e`."""
    with litert.quiet():
        from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
    with pytest.raises(IndexError, match="list index out of range"):
        prepare_pt2e(_exported_dead_add(), litert.pt2e_preset("pt2e_static_int8"))


def test_an_unused_add_is_dropped() -> None:
    """With our face the graph is prepared, and the ADD that counts is observed."""
    prepared = litert.prepare_pt2e(_exported_dead_add(), litert.pt2e_preset("pt2e_static_int8"))

    assert litert.needs_calibration(prepared)


def test_folded_weights_are_still_refused_by_the_converter() -> None:
    """litert-torch 0.10.0 refuses what torchao's default gives; see `finish_pt2e`."""
    with litert.quiet():
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

        prepared = litert.prepare_pt2e(
            _exported(ResidualNet), litert.pt2e_preset("pt2e_static_int8")
        )
        with torch.no_grad():
            prepared(*ResidualNet.sample_inputs())
        folded = convert_pt2e(prepared)
    with pytest.raises(Exception, match=r"uniform_dequantize|per-tensor integer|quantize"):
        litert.convert_graph(folded, ResidualNet.sample_inputs(), {}, static=True)


def test_a_config_is_still_looked_at_for_its_mode_only() -> None:
    """litert-torch 0.10.0: a quantizer without a global config cannot be passed on."""
    with litert.quiet():
        from litert_torch.quantize.pt2e_quantizer import PT2EQuantizer
        from litert_torch.quantize.quant_config import QuantConfig
    with pytest.raises(AttributeError, match="is_dynamic"):
        QuantConfig(pt2e_quantizer=PT2EQuantizer())


def test_the_converter_still_warns_about_train_mode(caplog: pytest.LogCaptureFixture) -> None:
    """litert-torch 0.10.0 warns for every exported graph; see `finish_pt2e`."""
    prepared = litert.prepare_pt2e(_exported(ResidualNet), litert.pt2e_preset("pt2e_static_int8"))
    with torch.no_grad():
        prepared(*ResidualNet.sample_inputs())
    simulated = litert.finish_pt2e(prepared)
    litert.convert_graph(simulated, ResidualNet.sample_inputs(), {}, static=True)
    assert "converted in training mode" not in caplog.text

    simulated.training = True
    litert.convert_graph(simulated, ResidualNet.sample_inputs(), {}, static=True)
    assert "converted in training mode" in caplog.text


def test_a_conversion_still_warns() -> None:
    """Torch 2.13 and litert-torch 0.10.0 give FutureWarnings that nobody outside can act on."""
    import litert_torch

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        litert_torch.convert(seeded(ResidualNet), ResidualNet.sample_inputs())
    assert any(issubclass(warning.category, FutureWarning) for warning in seen)


def _float_tflite() -> bytes:
    return litert.convert_model(seeded(ResidualNet), ResidualNet.sample_inputs(), {})


def _arrays() -> Iterator[dict[str, Any]]:
    for (sample,) in samples(ResidualNet, 6):
        yield {"args_0": sample.numpy()}


def test_the_recipe_library_still_uses_up_a_generator() -> None:
    """ai-edge-quantizer 0.10.0 counts its data before it reads it; see `calibrate_recipe`."""
    from ai_edge_quantizer import quantizer

    made = quantizer.Quantizer(_float_tflite(), litert.load_recipe("recipe_static_wi8_ai8"))
    with litert.quiet():
        assert made.calibrate({litert.SIGNATURE: _arrays()}) == {}


def test_one_sample_a_call_gathers_the_same_ranges() -> None:
    """Our streaming calibration equals the library's own on the whole list, to the bit."""
    from ai_edge_quantizer import quantizer

    tflite, recipe = _float_tflite(), litert.load_recipe("recipe_static_wi8_ai8")
    with litert.quiet():
        expected = quantizer.Quantizer(tflite, recipe).calibrate(
            {litert.SIGNATURE: list(_arrays())}, num_threads=1
        )
    actual = litert.calibrate_recipe(tflite, recipe, _arrays(), threads=1)

    assert actual is not None
    assert actual.keys() == expected.keys()
    for name, ranges in expected.items():
        for key, value in ranges.items():
            np.testing.assert_array_equal(actual[name][key], value, err_msg=f"{name} {key}")


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("recipe_")])
def test_every_recipe_preset_is_one_of_the_librarys(name: str) -> None:
    """Our names follow the library's own."""
    from ai_edge_quantizer import recipe

    assert litert.load_recipe(name) == getattr(recipe, name.removeprefix("recipe_"))()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("method", ["set_module_name", "set_module_type"])
def test_the_converters_module_filters_still_match_nothing(method: str, strict: bool) -> None:
    """litert-torch 0.10.0 with torch 2.13; see `_matching_modules`."""
    with litert.quiet():
        from litert_torch.quantize.pt2e_quantizer import (
            PT2EQuantizer,
            get_symmetric_quantization_config,
        )
        from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

        model = nn.Sequential(nn.Linear(4, 4)).eval()
        graph = torch.export.export(model, (torch.ones(1, 4),), strict=strict).module()
        quantizer = PT2EQuantizer()
        target = "0" if method == "set_module_name" else nn.Linear
        getattr(quantizer, method)(target, get_symmetric_quantization_config())
        prepared = prepare_pt2e(graph, quantizer)

    assert not litert.holds_observers(prepared)
