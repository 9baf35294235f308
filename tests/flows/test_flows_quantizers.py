"""PT2E quantizers that users bring: the converter's own, set up by hand, and subclasses."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.models import ConvBnRelu, ResidualNet, samples, seeded
from pytest_edgeq import Edgeq, assert_op_dtypes, litert


def _config(**options: Any) -> Any:
    from litert_torch.quantize.pt2e_quantizer import get_symmetric_quantization_config

    return get_symmetric_quantization_config(**options)


def _quantizer() -> Any:
    from litert_torch.quantize.pt2e_quantizer import PT2EQuantizer

    return PT2EQuantizer()


def test_the_converters_own_quantizer(maker: Edgeq) -> None:
    """Set up by the user, it does what the preset does, byte by byte."""
    model, sample = seeded(ResidualNet), ResidualNet.sample_inputs()
    own = _quantizer().set_global(_config(is_per_channel=True))
    made = [
        maker.quantize(model, sample, quantizer=q, calibration=samples(ResidualNet, 4))
        for q in (own, "pt2e_static_int8")
    ]

    assert made[0].tflite == made[1].tflite
    assert made[0].options["quantizer"] == "PT2EQuantizer"
    assert (
        made[0].options["quantizer.global_config.weight.qscheme"].endswith("per_channel_symmetric")
    )
    assert made[1].options == {"quantizer": "pt2e_static_int8", "strict_export": "True"}
    assert made[1].with_tflite(made[1].tflite).options == {}


def test_a_quantizer_without_a_global_config(maker: Edgeq) -> None:
    """The converter reads its mode from the global config; where there is none it is derived."""
    from litert_torch.quantize.pt2e_quantizer_utils import OP_TO_ANNOTATOR

    base = type(_quantizer())

    class LinearOnly(base):  # type: ignore[valid-type, misc] # the class is the library's own
        def annotate(self, model: Any) -> Any:
            OP_TO_ANNOTATOR["linear"](model, _config(is_per_channel=True), None)
            return model

    quantized = maker.quantize(
        seeded(ResidualNet),
        ResidualNet.sample_inputs(),
        quantizer=LinearOnly(),
        calibration=samples(ResidualNet, 4),
    )

    assert_op_dtypes(quantized, "FULLY_CONNECTED", scheme="int8", weight="int8", count=1)
    assert {entry.scheme for entry in quantized.op_dtypes.ops(op="CONV_2D")} == {"float"}


@pytest.mark.slow
def test_a_subclass_that_overrides_annotate(maker: Edgeq) -> None:
    """Its annotations count: one layer is kept in float, and only that one."""
    base = type(_quantizer())

    class SkipStem(base):  # type: ignore[valid-type, misc] # the class is the library's own
        def annotate(self, model: Any) -> Any:
            model = super().annotate(model)
            first = next(n for n in model.graph.nodes if "conv2d" in str(n.target))
            for node in (first, *first.users):
                node.meta.pop("quantization_annotation", None)
            return model

    quantized = maker.quantize(
        seeded(ConvBnRelu),
        ConvBnRelu.sample_inputs(),
        quantizer="pt2e_static_int8",
        calibration=samples(ConvBnRelu, 4),
    )
    skipped = maker.quantize(
        seeded(ResidualNet),
        ResidualNet.sample_inputs(),
        quantizer=SkipStem().set_global(_config(is_per_channel=True)),
        calibration=samples(ResidualNet, 4),
    )

    assert {entry.scheme for entry in quantized.op_dtypes.ops(op="CONV_2D")} == {"int8"}
    schemes = [entry.scheme for entry in skipped.op_dtypes.ops(op="CONV_2D")]
    assert schemes[0] == "float"
    assert set(schemes[1:]) == {"int8"}


def test_a_quantizer_is_recognised_without_importing_torchao() -> None:
    """What cannot be one is told apart by its attributes alone."""
    assert litert.is_pt2e_quantizer(_quantizer())
    assert not litert.is_pt2e_quantizer("pt2e_static_int8")
    assert not litert.is_pt2e_quantizer(3)


def test_a_static_quantizer_whose_observers_see_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Observers that were switched off leave scales without meaning: an error names the tensors."""
    original = litert.prepare_pt2e

    def blind(exported: Any, quantizer: Any) -> Any:
        prepared = original(exported, quantizer)
        _, observer = litert.pt2e_graphs._static_activations(prepared)[1]
        observer.forward = lambda x: x
        return prepared

    monkeypatch.setattr(litert, "prepare_pt2e", blind)
    with pytest.raises(ValueError, match=r"1 activation\(s\) were never calibrated: "):
        Edgeq(cache="off").quantize(
            seeded(ResidualNet),
            ResidualNet.sample_inputs(),
            calibration=samples(ResidualNet, 4),
        )


def _schemes(quantized: Any, op: str) -> dict[str, str]:
    return {entry.module: entry.scheme for entry in quantized.op_dtypes.ops(op=op)}


@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, False])
def test_a_config_for_one_module(maker: Edgeq, strict: bool) -> None:
    """That module alone, however the graph was exported."""
    quantizer = _quantizer().set_module_name("layer1.0", _config(is_per_channel=True))
    quantized = maker.quantize(
        seeded(ResidualNet),
        ResidualNet.sample_inputs(),
        quantizer=quantizer,
        calibration=samples(ResidualNet, 4),
        strict_export=strict,
    )
    schemes = _schemes(quantized, "CONV_2D")

    assert {path: s for path, s in schemes.items() if path.startswith("layer1.0")} == {
        "layer1.0.conv_a": "int8"
    }
    assert {s for path, s in schemes.items() if not path.startswith("layer1.0")} == {"float"}
