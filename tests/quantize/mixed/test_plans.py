"""Layers to leave in float: the file that results keeps its budget, and needs each of them."""

from __future__ import annotations

import copy
import json
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fixtures import digits
from fixtures.models import net, normal, seeded
from pytest_edgeq import (
    Budget,
    Edgeq,
    MixedPrecisionPlan,
    QuantizedModel,
    assert_accuracy_drop,
    assert_within_budget,
    litert,
)
from pytest_edgeq.quantize import pt2e, resolve
from pytest_edgeq.quantize.mixed import planner, suggest
from pytest_edgeq.tflite.ops import QDQ
from tests.quantize.mixed import nets


def _from_code(maker: Edgeq, plan: MixedPrecisionPlan, quantizer: Any = None) -> QuantizedModel:
    """Quantize the digits by a plan's code, as printed."""
    if plan.code.startswith("["):
        return nets.quantized_digits(maker, json.loads(plan.code))
    own = copy.deepcopy(quantizer)  # which the code changes
    names: dict[str, Any] = {"quantizer": own, "config": own}
    exec(plan.code, names)
    return nets.quantized_digits(
        maker, names["quantizer"] if "quantizer =" in plan.code else names["config"]
    )


def _own_quantizer() -> Any:
    return litert.pt2e_preset("pt2e_static_int8_per_tensor").set_module_name("conv2", None)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("quantizer", "bound"),
    [
        ("pt2e_static_int8", 40.0),
        ("pt2e_static_int8_per_tensor", 37.5),
        (_own_quantizer, 37.5),
        ("recipe_static_wi8_ai8", 35.0),
        ("recipe_dynamic_wi8_afp32", 45.0),
        ("recipe_weight_only_wi4_afp32", 27.0),
    ],
    ids=lambda each: getattr(each, "__name__", str(each)),
)
def test_the_file_of_the_code_keeps_the_budget(maker: Edgeq, quantizer: Any, bound: float) -> None:
    """As printed; and with any one layer quantized after all it does not."""
    quantizer = quantizer() if callable(quantizer) else quantizer
    samples, budget = nets.held_out(), Budget(sqnr_db=bound, top1_agreement=0.95)
    quantized = nets.quantized_digits(maker, quantizer)
    with pytest.raises(AssertionError):
        assert_within_budget(maker.compare(quantized, samples), budget)
    plan = maker.suggest_mixed_precision(quantized, samples, budget)

    assert plan.is_met, str(plan)
    assert plan.layers
    again = _from_code(maker, plan, quantizer)
    assert again.tflite == plan.quantized.tflite
    assert_within_budget(maker.compare(again, samples), budget)
    for layer in plan.layers:
        others = [each.module for each in plan.layers if each != layer]
        rest = _without(maker, quantized, quantizer, others)
        with pytest.raises(AssertionError):
            assert_within_budget(maker.compare(rest, samples), budget)


def _without(maker: Edgeq, quantized: QuantizedModel, quantizer: Any, modules: list[str]) -> Any:
    request, quantizer = suggest._made_by(quantized, None)
    engine = suggest._engine(quantized, request, quantizer, None)
    return nets.quantized_digits(maker, engine.quantizer(modules))


@pytest.mark.slow
def test_a_plan_of_the_default_preset(maker: Edgeq, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text has the layers, the file and the code; all its files share one export."""
    quantized = nets.quantized_digits(maker)
    budget = nets.budget_of_two_layers(maker, quantized)
    exported, export = [], pt2e._export

    def counted(entry: Any, **options: Any) -> Any:
        exported.append(entry.name)
        return export(entry, **options)

    monkeypatch.setattr(pt2e, "_export", counted)
    plan = maker.suggest_mixed_precision(quantized, nets.held_out(), budget)

    assert plan.is_met
    assert len(exported) == 1
    assert_within_budget(maker.compare(plan.quantized, nets.held_out()), budget)
    assert [layer.module for layer in plan.layers] == ["fc", "conv1"]
    assert plan.ops_in_float == 3
    assert str(plan).endswith(
        """
from litert_torch.quantize.pt2e_quantizer import PT2EQuantizer, get_symmetric_quantization_config

config = get_symmetric_quantization_config(is_per_channel=True)
quantizer = (
    PT2EQuantizer()
    .set_global(config)
    .set_module_name("conv1", None)
    .set_module_name("fc", None)
)"""
    )


def test_a_budget_that_is_kept_needs_no_layer(maker: Edgeq) -> None:
    """The plan is the file as it is."""
    quantized = nets.quantized_digits(maker)
    plan = maker.suggest_mixed_precision(quantized, nets.held_out(), Budget(sqnr_db=20))

    assert plan.is_met
    assert plan.layers == ()
    assert plan.quantized is quantized


@pytest.mark.slow
def test_a_budget_out_of_reach_says_what_limits_it(maker: Edgeq) -> None:
    """The sum is at the model's root, which no name reaches."""
    quantized = nets.quantized_digits(maker)
    plan = maker.suggest_mixed_precision(quantized, nets.held_out(), Budget(sqnr_db=60))

    assert not plan.is_met
    assert {layer.module for layer in plan.layers} == {"conv1", "conv2", "fc"}
    assert "does not meet Budget(sqnr_db=60)" in str(plan)
    assert any(each.startswith("quantization loses most") for each in plan.limits)
    assert any("belong to no module" in each and "ADD" in each for each in plan.limits)


def test_the_time_is_bounded(maker: Edgeq) -> None:
    """Without any left the plan is the file as it is, and says so."""
    quantized = nets.quantized_digits(maker)
    plan = maker.suggest_mixed_precision(quantized, nets.held_out(), Budget(sqnr_db=40), seconds=0)

    assert not plan.is_met
    assert plan.limits[0] == "the time was over before a choice of layers met the goal"


def test_layers_that_no_file_was_made_without_are_told(
    maker: Edgeq, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other file would be ready in time: the first may have layers that it does not need."""
    without_needless = planner.Planner._without_needless

    def late(self: planner.Planner, chosen: list[str], _: Any) -> list[str]:
        self._search.deadline = time.monotonic() + 0.9 * self._seconds
        possible = SimpleNamespace(accepts=lambda simulated: True)  # only a file can decide
        return without_needless(self, chosen, possible)

    monkeypatch.setattr(planner.Planner, "_without_needless", late)
    quantized = nets.quantized_digits(maker)
    budget = nets.budget_of_two_layers(maker, quantized)
    plan = maker.suggest_mixed_precision(quantized, nets.held_out(), budget)

    assert plan.is_met
    assert plan.limits == ("the time was over before each layer was quantized again in a file",)


@pytest.mark.slow
def test_a_score_is_a_goal(maker: Edgeq) -> None:
    """Layers that prove a drop of at most so much; the assertion agrees."""
    held = digits.held_out()
    pairs = list(zip(held.samples(), held.labels, strict=True))
    quantized = nets.quantized_digits(maker, "recipe_weight_only_wi4_afp32")

    def margin(outputs: Any, label: Any) -> float:
        logits = torch.as_tensor(outputs).flatten()
        return float(logits[int(label)] - logits.mean())

    with pytest.raises(AssertionError) as caught:
        assert_accuracy_drop(quantized, pairs, margin, 1e-6)
    bounds = re.search(r"to (\S+), each bound", str(caught.value))
    assert bounds is not None, str(caught.value)
    limit = round(0.9 * float(bounds[1]), 4)
    plan = maker.suggest_mixed_precision(quantized, pairs, metric=margin, max_drop=limit)

    assert plan.is_met, str(plan)
    assert [layer.module for layer in plan.layers] == ["fc"]
    assert plan.goal == f"a drop of at most {limit} in margin"
    assert_accuracy_drop(plan.quantized, pairs, margin, limit)


def test_a_goal_is_needed(maker: Edgeq) -> None:
    """One of budget and metric."""
    quantized = nets.quantized_digits(maker)
    with pytest.raises(ValueError, match="needs a goal: budget="):
        maker.suggest_mixed_precision(quantized, nets.held_out())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_named", [False, True], ids=["one config", "by name"])
def test_torchao_leaves_layers_out(maker: Edgeq, is_named: bool) -> None:
    """The config of the code names what is quantized, or what is not."""
    from torchao.quantization import FqnToConfig, IntxWeightOnlyConfig

    model = seeded(lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64)))
    samples = [normal(1, 16, seed=i) for i in range(16)]
    config: Any = IntxWeightOnlyConfig(weight_dtype=torch.int4)  # type: ignore[attr-defined] # torch's own gap
    config = FqnToConfig({"0": config, "re:2": config}) if is_named else config
    quantized = maker.quantize(model, (samples[0],), quantizer=config)
    found = maker.sensitivity(quantized, samples)
    budget = Budget(sqnr_db=found.sqnr_db + 1)
    plan = maker.suggest_mixed_precision(quantized, samples, budget)
    names = {"config": config}
    exec(plan.code, names)
    again = maker.quantize(model, (samples[0],), quantizer=names["config"])

    assert plan.is_met, str(plan)
    assert len(plan.layers) == 1
    assert again.tflite == plan.quantized.tflite


def test_a_budget_that_only_float_keeps(maker: Edgeq) -> None:
    """One layer stays quantized, since a file without any would be no plan."""
    model = seeded(lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)))
    samples = [normal(1, 16, seed=i) for i in range(8)]
    quantized = maker.quantize(model, (samples[0],), quantizer="recipe_dynamic_wi8_afp32")
    plan = maker.suggest_mixed_precision(quantized, samples, Budget(sqnr_db=160))

    assert not plan.is_met
    assert len(plan.layers) == 1
    assert plan.comparison.total.sqnr_db > plan.before.total.sqnr_db


def _block(act: type[nn.Module]) -> Any:
    """Build a residual block."""
    return net(
        lambda self, x: self.pwl(self.act2(self.dw(self.act(self.pw(x))))) + x,
        pw=nn.Conv2d(8, 24, 1),
        act=act(),
        dw=nn.Conv2d(24, 24, 3, padding=1, groups=24),
        act2=act(),
        pwl=nn.Conv2d(24, 8, 1),
    )


def _residual(act: type[nn.Module] = nn.Hardswish) -> nn.Module:
    """Build a net whose block has a wide channel, which its sum passes on."""

    def forward(self: Any, x: Tensor) -> Any:
        return self.tail(self.head(self.block(self.stem(x)))).mean((2, 3))

    def build() -> nn.Module:
        stem, block = nn.Conv2d(3, 8, 3, padding=1), _block(act)
        head, tail = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 4, 1)
        for parameter in block.pwl.parameters():
            parameter.data[0] *= 30
        head.weight.data[:, 0] /= 30
        return net(forward, "Residual", stem=stem, block=block, head=head, tail=tail)

    return seeded(build, 3)


_IMAGES = [normal(1, 3, 6, 6, seed=i) for i in range(12)]
_CALIBRATION, _EVALUATION = _IMAGES[:4], _IMAGES[4:]


@pytest.mark.slow
def test_a_layer_that_cannot_be_converted_in_float_stays_quantized(
    maker: Edgeq, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search goes on without it, and the plan says why."""
    run_flow = resolve.run_flow

    def refused(request: Any, quantizer: Any) -> QuantizedModel:
        if "tail" in quantizer.module_name_config:
            raise RuntimeError("the converter refuses Residual: no layout\nfix: another")
        return run_flow(request, quantizer)

    monkeypatch.setattr(planner, "run_flow", refused)
    quantized = maker.quantize(
        _residual(), (_IMAGES[0],), quantizer=nets.PT2E, calibration=_CALIBRATION
    )
    bound = maker.compare(quantized, _EVALUATION).total.sqnr_db + 1
    plan = maker.suggest_mixed_precision(quantized, _EVALUATION, Budget(sqnr_db=bound))

    assert plan.is_met
    assert "tail" not in {layer.module for layer in plan.layers}
    (limit,) = plan.limits
    expected = "tail cannot be left in float: the converter refuses Residual: no layout"
    assert limit == expected
    assert f"\nlimit: {limit}\n" in str(plan)


@pytest.mark.slow
@pytest.mark.parametrize(("own", "act"), [(False, nn.ReLU), (True, nn.ReLU), (False, nn.ReLU6)])
def test_the_sum_of_a_block_alone_is_left_in_float(
    maker: Edgeq, own: bool, act: type[nn.Module]
) -> None:
    """Its convolutions stay quantized, with their activations, and the code says so."""
    quantizer = litert.pt2e_preset(nets.PT2E) if own else nets.PT2E

    def quantize(by: Any) -> QuantizedModel:
        return maker.quantize(_residual(act), (_IMAGES[0],), quantizer=by, calibration=_CALIBRATION)

    request, made_by = suggest._made_by(quantize(quantizer), None)
    engine = suggest._engine(quantize(quantizer), request, made_by, None)
    assert engine.layers["block"].weights == 0
    code = engine.code(["block"])

    config = "quantizer.global_config" if own else "config"
    assert code.endswith(
        f"""
    .set_module_name("block.pw", {config})
    .set_module_name("block.dw", {config})
    .set_module_name("block.pwl", {config})
    .set_module_name("block", None)
)"""
    )
    names: dict[str, Any] = {"quantizer": copy.deepcopy(quantizer)}
    exec(code, names)
    again = quantize(names["quantizer"])
    schemes = [(each.op, each.scheme) for each in again.op_dtypes if each.scheme != "integer"]
    assert [op for op, scheme in schemes if scheme == "float" and op not in QDQ] == ["ADD"]
    assert not any(op.startswith("RELU") for op, _ in schemes)


def test_layers_inside_are_kept_by_the_outermost_modules_around_them() -> None:
    """Modules that the model does not call, such as a ModuleList, get no config."""
    layers = ["a", "a.list.0", "a.list.0.x", "a.list.1.y", "b.c", "b.d"]
    modules = {*layers, "a.list.1", "b"}

    assert litert.kept_inside(["a"], layers, modules) == ["a.list.0", "a.list.1"]
    assert litert.kept_inside(["a", "a.list.0", "a.list.1.y"], layers, modules) == ["a.list.0.x"]
    assert litert.kept_inside(["b.c"], layers, modules) == []


@pytest.mark.slow
def test_an_op_without_int16_kernels_is_not_tried_with_them(maker: Edgeq) -> None:
    """HARD_SWISH has 8-bit kernels only, and a rule for 16 bits is an error."""
    quantized = maker.quantize(
        _residual(), (_IMAGES[0],), quantizer="recipe_static_wi8_ai8", calibration=_CALIBRATION
    )
    plan = maker.suggest_mixed_precision(quantized, _EVALUATION, Budget(sqnr_db=100))

    assert not plan.is_met
    assert plan.comparison.total.sqnr_db > plan.before.total.sqnr_db


@pytest.mark.slow
def test_int16_activations_are_chosen_where_their_file_is_smaller(maker: Edgeq) -> None:
    """A wide tensor between large layers needs finer codes, and no weight has to be in float."""
    model = seeded(
        lambda: nn.Sequential(
            *(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        )
    )
    with torch.no_grad():
        model.get_parameter("2.bias")[0] = 20.0
    corners = torch.tensor([[1.0, -1.0]])
    inputs = [torch.cat([normal(1, 62, seed=i).clamp(-1, 1), corners], 1) for i in range(24)]
    recipe = "recipe_static_wi8_ai8"
    quantized = maker.quantize(model, (inputs[0],), quantizer=recipe, calibration=inputs[:8])

    plan = maker.suggest_mixed_precision(quantized, inputs[8:], Budget(sqnr_db=33))

    assert plan.is_met
    assert plan.precision == "int16x8"
    rules = json.loads(plan.code)

    def made(quantizer: Any) -> QuantizedModel:
        return maker.quantize(model, (inputs[0],), quantizer=quantizer, calibration=inputs[:8])

    assert made(rules).tflite == plan.quantized.tflite
    assert {each.scheme for each in made(rules).op_dtypes} == {"int8", "int16x8"}
    for rule in rules[1:]:
        rest = made([each for each in rules if each is not rule])
        assert maker.compare(rest, inputs[8:]).total.sqnr_db < 33
