"""Bad arguments: a clear error that says what was seen and what to do, and no file left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fixtures.models import (
    ConvBnRelu,
    NonStrictOnly,
    ResidualNet,
    SoftmaxHead,
    TwoInputs,
    samples,
    seeded,
)
from pytest_edgeq import Edgeq, litert
from tests.quantize import making
from tests.quantize.quantizers import ByHand

STATIC = ("pt2e_static_int8", "recipe_static_wi8_ai8")
SAMPLE = ResidualNet.sample_inputs()
IMAGE, VECTOR = TwoInputs.sample_inputs(1)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tmp_path: Path) -> Any:
    """No half-written file, whatever the error."""
    yield
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def _model() -> nn.Module:
    return seeded(ResidualNet)


def _with_nan() -> torch.Tensor:
    bad = SAMPLE[0].clone()
    bad[0, 0, 0, 0] = torch.nan
    return bad


def _rules(**changes: Any) -> list[dict[str, Any]]:
    rules = litert.load_recipe("recipe_dynamic_wi8_afp32")
    return [{**rules[0], **changes}]


NO_QUANTIZER = r"quantizer: expected a preset's name, a PT2E Quantizer"

# Arguments (a model, sample inputs, and those by name), the error, and what it says.
REFUSED: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "a function": ((lambda x: x, SAMPLE), {}, TypeError, "expected a torch.nn.Module, got a func"),
    "a class": (
        (ResidualNet, SAMPLE),
        {},
        TypeError,
        "expected a torch.nn.Module, got the class .*instantiate it",
    ),
    "no model": ((None, SAMPLE), {}, TypeError, "expected a torch.nn.Module, got a NoneType"),
    "no inputs": (
        (_model(), None),
        {},
        ValueError,
        "no sample inputs: the model is traced with them",
    ),
    "an empty tuple": ((_model(), ()), {}, ValueError, "no sample inputs: the model is traced wi"),
    "a number among tensors": (
        (seeded(TwoInputs), (IMAGE, 1.0)),
        {},
        TypeError,
        r"sample_inputs\[1\]: expected a torch.Tensor, got float",
    ),
    "an array": (
        (_model(), np.zeros((1, 8))),
        {},
        TypeError,
        r"expected a torch.Tensor, got ndarray of shape \[1, 8\]; write torch.as_tensor",
    ),
    "swapped arguments": (
        ((torch.ones(1, 8),), _model()),
        {},
        TypeError,
        r"got a tuple: \(Tensor of shape \[1, 8\],\); the arguments are swapped",
    ),
    "inputs by name": (
        (seeded(TwoInputs), {"image": torch.ones(1)}),
        {},
        TypeError,
        "keyword inputs are sample_kwargs",
    ),
    "one tensor as calibration": (
        (_model(), SAMPLE),
        {"calibration": SAMPLE[0]},
        TypeError,
        r"an iterable of samples, got one Tensor.*\[sample\]",
    ),
    "an unknown preset": (
        (_model(), SAMPLE),
        {"quantizer": "pt2e_int8"},
        ValueError,
        "(?s)unknown quantizer preset 'pt2e_int8'.*pt2e_static_int8.*recipe_weight_only_wi4_afp32",
    ),
    "a number": ((_model(), SAMPLE), {"quantizer": 3}, TypeError, NO_QUANTIZER),
    "a class of models": ((_model(), SAMPLE), {"quantizer": ResidualNet}, TypeError, NO_QUANTIZER),
    "one rule": ((_model(), SAMPLE), {"quantizer": {"regex": ".*"}}, TypeError, NO_QUANTIZER),
    "a class of quantizers": (
        (_model(), SAMPLE),
        {"quantizer": type(litert.pt2e_preset("pt2e_static_int8"))},
        TypeError,
        "instantiate it",
    ),
    "no file": (
        (_model(), SAMPLE),
        {"quantizer": "nowhere.json"},
        FileNotFoundError,
        "no recipe at nowhere.json",
    ),
    "a recipe that quantizes nothing": (
        (_model(), SAMPLE),
        {"quantizer": _rules(algorithm_key="no_quantize", operation="*", regex=".*")},
        ValueError,
        "nothing was quantized by recipe",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_are_refused(case: str) -> None:
    """Before anything is converted."""
    arguments, named, error, told = REFUSED[case]
    with pytest.raises(error, match=told):
        Edgeq().quantize(*arguments, **named)


@pytest.mark.parametrize("preset", ["pt2e_static_int8", "recipe_dynamic_wi8_afp32", None])
def test_a_module_in_train_mode(preset: str | None) -> None:
    """The model itself, for every flow, or one batch norm; the flag is left as it was."""
    model = _model().train()
    with pytest.raises(ValueError, match=r"the model is in train mode.*model\.eval\(\)"):
        Edgeq().quantize(model, SAMPLE, quantizer=preset)
    assert model.training

    part = seeded(ConvBnRelu)
    name = next(n for n, m in part.named_modules() if isinstance(m, nn.BatchNorm2d))
    part.get_submodule(name).train()
    with pytest.raises(ValueError, match=f"submodule '{name}' is in train mode"):
        Edgeq().quantize(part, ConvBnRelu.sample_inputs(), quantizer=preset)


@pytest.mark.slow
@pytest.mark.parametrize("preset", STATIC)
@pytest.mark.parametrize(
    ("calibration", "told"),
    [
        (None, "{preset} needs calibration data and got none.*Pass"),
        ([], "calibration: there is no sample in the list"),
        ([_with_nan()], "sample 0, input 'args_0': 1 of .* NaN or inf"),
        ([_with_nan().nan_to_num() / 0], "sample 0, input 'args_0': .* NaN or inf"),
    ],
    ids=["none", "empty", "nan", "infinite"],
)
def test_calibration_that_cannot_serve(preset: str, calibration: Any, told: str) -> None:
    """A static flow names the quantizer and the way out."""
    with pytest.raises(ValueError, match=told.format(preset=preset)):
        making.quantize(preset, calibration=calibration)


@pytest.mark.sweep(1)
@pytest.mark.parametrize("preset", STATIC)
def test_a_generator_used_twice(preset: str) -> None:
    """The second model gets nothing from it, and is told why."""
    once = samples(ResidualNet, 8)
    making.quantize(preset, calibration=once)
    with pytest.raises(
        ValueError, match=r"generator yields its samples once, and this one is used"
    ):
        making.quantize(preset, calibration=once)


BAD_SAMPLES: dict[str, tuple[Any, type[Exception], str]] = {
    "one of two": (IMAGE, ValueError, "expected 2 positional inputs, got 1"),
    "with a label": (
        (IMAGE, VECTOR, torch.tensor([3])),
        ValueError,
        "expected 2 positional inputs, got 3.*label",
    ),
    "a batch": (
        (IMAGE.repeat(4, 1, 1, 1), VECTOR),
        ValueError,
        "input 'args_0': expected shape 1×3×8×8, got 4×3×8×8.*split the batch",
    ),
    "no batch dimension": (
        (IMAGE[0], VECTOR),
        ValueError,
        "expected shape 1×3×8×8, got 3×8×8.*add the batch dimension",
    ),
    "another size": ((IMAGE[..., :4], VECTOR), ValueError, "got 1×3×8×4"),
    "integers": (
        ((IMAGE * 10).to(torch.uint8), VECTOR),
        TypeError,
        "expected float32, got uint8.*integers in place of floats",
    ),
    "doubles": ((IMAGE.double(), VECTOR), TypeError, "expected float32, got float64"),
    "another name": (
        {"image": IMAGE, "vektor": VECTOR},
        ValueError,
        "expected 2 positional inputs, got 0|vektor",
    ),
    "not a tensor": ((IMAGE, "vector"), TypeError, "input 'args_1': expected a tensor, got str"),
    "a number": (3.0, TypeError, "expected a tensor, a tuple of tensors or a dict"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BAD_SAMPLES)
def test_a_calibration_sample_does_not_fit(case: str) -> None:
    """The second sample is bad, and named."""
    sample, error, told = BAD_SAMPLES[case]
    # One of the two flows each: both read samples in the same way.
    preset = STATIC[list(BAD_SAMPLES).index(case) % 2]
    with pytest.raises(error, match=f"(?s)calibration sample 1.*{told}"):
        making.quantize(preset, TwoInputs, calibration=[TwoInputs.sample_inputs(), sample])


def test_a_model_that_only_non_strict_export_takes() -> None:
    """A warning says what is lost, at the caller's line; not where the user has asked for it."""
    given: dict[str, Any] = {"calibration": making.drawn(NonStrictOnly)}
    model, sample = seeded(NonStrictOnly), NonStrictOnly.sample_inputs()
    with pytest.warns(UserWarning, match=r"\(strict=True\) refuses the model") as seen:
        quantized = Edgeq().quantize(model, sample, **given)

    assert [warning.filename for warning in seen] == [__file__]
    assert [entry.scheme for entry in quantized.op_dtypes.ops(op="ADD")] == ["float"]
    # Warnings are errors here.
    Edgeq().quantize(model, sample, strict_export=False, **given)


def test_a_softmax_whose_scale_no_kernel_takes() -> None:
    """An annotated softmax output must have the scale 1/256."""
    with pytest.raises(RuntimeError, match=r"cannot load the .tflite file: SOFTMAX") as caught:
        making.quantize(ByHand("softmax", weight=None), SoftmaxHead)
    assert "1/256" in str(caught.value)


def test_a_recipe_as_a_list_and_as_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two give the same file, also if its name begins as that of a preset."""
    path = tmp_path / "pt2e_rules.json"
    path.write_text(json.dumps(_rules()), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    made = [making.quantize(recipe).tflite for recipe in (_rules(), path.name, path)]
    path.unlink()

    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize(
    ("content", "error", "told"),
    [
        ("{", ValueError, "is not JSON"),
        ('{"regex": ".*"}', TypeError, "expected a list of dicts"),
        ("[]", ValueError, "has no rule"),
        ('[{"regex": ".*"}]', ValueError, "rule 1 of 1: 'operation' and .* missing"),
        ("[3]", TypeError, "expected a list of dicts"),
    ],
)
def test_a_bad_recipe_file(tmp_path: Path, content: str, error: type[Exception], told: str) -> None:
    """Broken JSON, another shape, no rule, a rule without its parts."""
    path = tmp_path / "rules.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(error, match=told):
        making.quantize(str(path))
    path.unlink()


@pytest.mark.sweep(0)
@pytest.mark.parametrize("preset", [*STATIC, None])
def test_the_model_is_left_as_it_was(preset: str | None) -> None:
    """Parameters and buffers bit for bit, training flags, hooks, gradients."""
    model = _model()
    model.register_forward_hook(lambda *_: None)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    pointers = {name: value.data_ptr() for name, value in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    hooks = dict(model._forward_hooks)
    Edgeq().quantize(model, SAMPLE, quantizer=preset, calibration=making.drawn(ResidualNet))

    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert {n: v.data_ptr() for n, v in model.state_dict().items()} == pointers
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())
    assert not any(module.training for module in model.modules())
    assert dict(model._forward_hooks) == hooks


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"runtime": "xnpack"}, r"unknown runtime 'xnpack' .did you mean .*valid: "),
        ({"threads": 0}, "threads: expected at least 1, got 0"),
        ({"seed": -1}, "seed: expected 0"),
    ],
)
def test_bad_settings(options: dict[str, Any], told: str) -> None:
    """Runtime, threads and seed are checked when an Edgeq is made."""
    make: Callable[..., Edgeq] = Edgeq
    with pytest.raises(ValueError, match=told):
        make(**options)
