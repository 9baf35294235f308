"""Files with several entry points: each is quantized, run and compared by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fixtures.models import TwoSignatures, normal, seeded
from pytest_edgeq import (
    Edgeq,
    QuantizedModel,
    assert_input_dtypes,
    assert_no_float_ops,
    assert_op_dtypes,
    assert_runtimes_agree,
)
from pytest_edgeq.runtimes.runner import Runner

SIDES = {"small": 8, "large": 12}


def _images(side: int, n: int, seed: int) -> list[tuple[torch.Tensor, ...]]:
    return [TwoSignatures.sample_inputs(seed + i, side=side) for i in range(n)]


def _quantize(maker: Edgeq, quantizer: Any, model: Any = None) -> QuantizedModel:
    return maker.quantize(
        model if model is not None else seeded(TwoSignatures),
        {name: TwoSignatures.sample_inputs(side=side) for name, side in SIDES.items()},
        quantizer=quantizer,
        # Static recipes average over samples.
        calibration={name: _images(side, 40, seed=100) for name, side in SIDES.items()},
    )


@pytest.fixture
def static() -> QuantizedModel:
    """Two sizes of image, one model."""
    return _quantize(Edgeq(), "pt2e_static_int8")


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["pt2e_static_int8", "recipe_static_wi8_ai8"])
@pytest.mark.parametrize("name", SIDES)
def test_each_signature_is_compared_at_its_own_size(maker: Edgeq, preset: str, name: str) -> None:
    """With every stage that the flow has; both are int8 and sound."""
    static = _quantize(maker, preset)
    view = static.signature(name)
    comparison = maker.compare(view, _images(SIDES[name], 16, seed=300))

    assert static.signatures == ("small", "large")
    assert view.signatures == (name,)
    assert view.inputs[0].shape == (1, 3, SIDES[name], SIDES[name])
    # Measured: 36 dB with PT2E; 19 to 26 with the recipe, whose averaged ranges clip a
    # fifth of the outputs. A head whose sign is wrong gives less than 3.
    assert comparison.total.sqnr_db > 15
    assert comparison.quantization is not None
    assert_input_dtypes(view, "int8")
    assert_op_dtypes(static, "CONV_2D", weight="int8", scheme="int8", module="conv", count=2)
    assert_no_float_ops(static)
    assert_runtimes_agree(view, _images(SIDES[name], 4, seed=300), 1, ("xnnpack", "builtin"))


@pytest.mark.slow
def test_a_defect_in_one_signature_is_found_there(maker: Edgeq) -> None:
    """Other weights behind the second entry point: the first is sound, the second is not."""
    models = {"small": seeded(TwoSignatures), "large": seeded(TwoSignatures)}
    made = _quantize(maker, "recipe_dynamic_wi8_afp32", models)
    with torch.no_grad():
        models["large"].head.weight.neg_()
        models["large"].head.bias.neg_()
    found = {
        name: maker.compare(made.signature(name), _images(side, 8, seed=300)).total.sqnr_db
        for name, side in SIDES.items()
    }

    assert found["small"] > 25
    # What has changed its sign is off by twice the signal.
    assert found["large"] < 0


def test_ops_are_named_after_the_models_of_their_signatures(maker: Edgeq) -> None:
    """Two models that have nothing in common but the file."""
    first, second = nn.Sequential(nn.Linear(8, 4)).eval(), seeded(lambda: nn.Linear(6, 3))
    sample = {"first": (normal(1, 8, seed=0),), "second": (normal(1, 6, seed=0),)}
    made = maker.quantize({"first": first, "second": second}, sample, quantizer=None)

    assert [entry.module for entry in made.op_dtypes.ops("FULLY_CONNECTED")] == ["0", ""]


def test_the_whole_is_not_run(maker: Edgeq, static: QuantizedModel) -> None:
    """Only one of its entry points would be looked at, and a defect in another would pass."""
    sample = TwoSignatures.sample_inputs()
    for use in (
        lambda: maker.compare(static, [sample]),
        lambda: static.run(*sample),
        lambda: assert_runtimes_agree(static, [sample], 1),
        lambda: static.inputs,
    ):
        with pytest.raises(ValueError, match=r"the file has 2 signatures \['small', 'large'\]"):
            use()
    with pytest.raises(ValueError, match=r"no signature 'smal' \(did you mean small\?\)"):
        static.signature("smal")


def test_a_loaded_file_takes_a_reference_for_each(maker: Edgeq, static: QuantizedModel) -> None:
    """One alone would not say which it is for."""
    model = seeded(TwoSignatures)
    loaded = maker.load(static.tflite, reference={"large": model}, name="made")
    sample = _images(12, 4, seed=300)

    assert maker.compare(loaded.signature("large"), sample).total.sqnr_db > 15
    with pytest.raises(ValueError, match=r"made\[small\] has no reference to compare with"):
        maker.compare(loaded.signature("small"), _images(8, 4, seed=300))
    with pytest.raises(ValueError, match="say which one the reference is for"):
        maker.load(static.tflite, reference=model)
    with pytest.raises(ValueError, match=r"no signature 'larg' \(did you mean large\?\)"):
        maker.load(static.tflite, reference={"larg": model})


def test_another_file_keeps_the_choice(maker: Edgeq, static: QuantizedModel) -> None:
    """The artifact is run at the signature that was chosen, against that one's references."""
    sample = TwoSignatures.sample_inputs(side=12)
    view = static.signature("large").with_tflite(static.tflite)
    expected = static.signature("large").run(*sample)

    np.testing.assert_array_equal(view.run(*sample)["output_0"], expected["output_0"])
    one = maker.quantize(seeded(TwoSignatures), TwoSignatures.sample_inputs(), quantizer=None)
    with pytest.raises(ValueError, match="the file has the signatures"):
        static.with_tflite(one.tflite)


def test_a_file_is_opened_once(maker: Edgeq, monkeypatch: pytest.MonkeyPatch) -> None:
    """What quantize tried the file with serves the first run and all that follow."""
    opened: list[str | None] = []

    class Counted(Runner):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            opened.append(self._opening.signature.key)

    monkeypatch.setattr("pytest_edgeq.runtimes.edge.Runner", Counted)
    model, sample = seeded(TwoSignatures), TwoSignatures.sample_inputs()
    one = maker.quantize(model, sample, quantizer=None)
    several = maker.quantize(model, TwoSignatures.signatures(), quantizer=None)
    for _ in range(2):
        one.run(*sample)
        several.signature("small").run(*sample)

    assert opened == ["serving_default", "small", "large"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"calibration": [1]}, "calibration: with several signatures expected a dict"),
        ({"calibration": {"small": [1]}}, r"calibration has the signatures \['small'\]"),
        ({"sample_kwargs": {"image": 1}}, "sample_kwargs: with several signatures"),
        ({"dynamic_shapes": ({0: 1},)}, "dynamic_shapes: with several signatures"),
        ({"model": {"small": nn.Identity()}}, "sample_inputs has the signatures"),
        (
            {"model": {"small": nn.Identity()}, "sample_inputs": (1,)},
            "need sample inputs by signature",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(
    maker: Edgeq, change: dict[str, Any], text: str
) -> None:
    """Before anything is converted."""
    call: dict[str, Any] = {
        "model": seeded(TwoSignatures),
        "sample_inputs": TwoSignatures.signatures(),
    }
    with pytest.raises((TypeError, ValueError), match=text):
        maker.quantize(**{**call, **change})
