"""Sensitivities of layers are those of converted files."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import spearmanr
from torch import nn

from fixtures.models import net, normal, seeded
from pytest_edgeq import Budget, Edgeq, QuantizedModel, litert
from pytest_edgeq.quantize.mixed import engine
from pytest_edgeq.quantize.mixed.results import Sensitivity
from tests.quantize.mixed import nets
from tests.quantize.rules import left


def _truth(maker: Edgeq, quantizer: Any, make: Any, samples: Any, layers: list[str]) -> list[float]:
    """Return the gain of each layer, converted in float one by one."""
    before = maker.compare(make(maker, quantizer), samples).total.sqnr_db
    found = []
    for layer in layers:
        if isinstance(quantizer, str) and quantizer.startswith("pt2e"):
            other: Any = litert.pt2e_preset(quantizer).set_module_name(layer, None)
        else:
            regex = "^serving_default" if layer == "fc" else f"Conv2d_{layer};"
            other = [*litert.load_recipe(quantizer), left(regex)]
        found.append(maker.compare(make(maker, other), samples).total.sqnr_db - before)
    return found


def _wide_chain(maker: Edgeq, quantizer: Any = nets.PT2E) -> QuantizedModel:
    return nets.quantized_chain(maker, quantizer, nets.with_wide_channel(nets.chain(1), "b", 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "samples", "ties"),
    [
        (nets.quantized_chain, nets.images(16, seed=2), 0.0),
        (_wide_chain, nets.images(16, seed=2), 0.0),
        # On some CPUs two of its three layers gain the same within 0.001 dB.
        (nets.quantized_digits, nets.held_out(), 0.1),
    ],
    ids=["chain", "wide channel", "digits"],
)
def test_gains_are_those_of_converted_files(
    maker: Edgeq, make: Any, samples: Any, ties: float
) -> None:
    """Rank correlation over the layers of three nets; the quantized graph has all of the loss."""
    found = maker.sensitivity(make(maker), samples)
    layers = [row.module for row in found.rows]
    truth = _truth(maker, nets.PT2E, make, samples, layers)

    gains = [row.gain_db for row in found.rows]
    ranks = [[sum(x > y + ties for y in each) for x in each] for each in (truth, gains)]
    correlation = spearmanr(*ranks).statistic
    assert correlation >= 0.9, list(zip(layers, truth, found.rows, strict=True))
    assert max(abs(one - two) for one, two in zip(truth, gains, strict=True)) < 0.5


@pytest.mark.slow
def test_a_recipe_is_measured_by_its_files(maker: Edgeq) -> None:
    """The gain of a layer is exactly that of the file that has it in float."""
    samples = nets.held_out()
    found = maker.sensitivity(nets.quantized_digits(maker, "recipe_static_wi8_ai8"), samples)
    gains = {row.module: row.gain_db for row in found.rows}
    truth = _truth(
        maker, "recipe_static_wi8_ai8", nets.quantized_digits, samples, ["fc", "conv1", "conv2"]
    )

    assert [gains[each] for each in ("fc", "conv1", "conv2")] == pytest.approx(truth, abs=1e-6)


@pytest.mark.sweep(0, slow=5)
@pytest.mark.parametrize("seed", range(20))
def test_a_bad_layer_comes_first(maker: Edgeq, seed: int) -> None:
    """One channel of 30 times the others takes the range of a layer's results."""
    layer = "abcde"[seed % 5]
    sound = maker.sensitivity(nets.quantized_chain(maker, seed=seed), nets.images(8, seed=2))
    model = nets.with_wide_channel(nets.chain(seed), layer, seed)
    found = maker.sensitivity(nets.quantized_chain(maker, model=model), nets.images(8, seed=2))

    assert found.rows[0].module == layer, str(found)
    costs = {row.module: row.quantized_db for row in sound.rows}
    assert found.rows[0].quantized_db < costs[layer] - 6


@pytest.mark.slow
@pytest.mark.parametrize("flow", ["pt2e", "recipe", "torchao"])
def test_workers_measure_the_same(maker: Edgeq, flow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By two processes, within 1e-12."""
    if flow == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        model = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)))
        samples = [normal(1, 6, seed=i) for i in range(8)]
        quantized = maker.quantize(model, (samples[0],), quantizer=Int8WeightOnlyConfig())
    else:
        quantizer = nets.PT2E if flow == "pt2e" else "recipe_static_wi8_ai8"
        quantized, samples = nets.quantized_chain(maker, quantizer), nets.images(8, seed=2)
    here = maker.sensitivity(quantized, samples)
    monkeypatch.setattr(engine.Expected, "__call__", None)  # nothing is measured in this process
    other = Edgeq(executor="processes:2")
    try:
        there = other.sensitivity(quantized, samples, executor=None)
    finally:
        other.close()

    assert [row.module for row in there.rows] == [row.module for row in here.rows]
    for one, two in zip(here.rows, there.rows, strict=True):
        assert two.quantized_db == pytest.approx(one.quantized_db, rel=1e-12)
        assert two.in_float_db == pytest.approx(one.in_float_db, rel=1e-12)


def test_its_text_is_a_table(maker: Edgeq) -> None:
    """A row a layer, and plain data."""
    found = maker.sensitivity(nets.quantized_digits(maker), nets.held_out())
    assert isinstance(found, Sensitivity)
    lines = str(found).splitlines()

    assert lines[0] == f"DigitsNet: {found.sqnr_db:.4g} dB SQNR over 64 samples"
    assert lines[2].split() == (
        ["layer", "alone", "quantized", "alone", "in", "float", "gain", "weights", "read", "by"]
    )
    assert [line.split()[0] for line in lines[3:]] == [row.module for row in found.rows]
    assert found.to_dict()["rows"][0]["module"] == found.rows[0].module


@pytest.mark.slow
def test_refused(maker: Edgeq) -> None:
    """Models that cannot be quantized again with other layers are refused."""
    model, samples = seeded(lambda: nn.Linear(4, 4)), [normal(1, 4, seed=i) for i in range(8)]
    sample = samples[0]
    quantized = maker.quantize(model, (sample,), calibration=samples)
    loaded = maker.load(quantized.path, reference=quantized.float_model)
    with pytest.raises(ValueError, match=r"was not made by edgeq\.quantize"):
        maker.sensitivity(loaded, [sample])
    floats = maker.quantize(model, (sample,), quantizer=None)
    with pytest.raises(ValueError, match="the float flow quantizes no layer"):
        maker.sensitivity(floats, [sample])
    drawn = maker.quantize(nets.chain(), (nets.images(1)[0],), calibration=iter(nets.images(8)))
    with pytest.raises(ValueError, match="calibration samples were a list_iterator"):
        maker.sensitivity(drawn, nets.images(1))
    assert maker.sensitivity(drawn, nets.images(1), calibration=nets.images(8)).rows
    both = {"one": (sample,), "two": (sample,)}
    several = maker.quantize(model, both, calibration=dict.fromkeys(both, samples))
    with pytest.raises(ValueError, match="is one of the signatures one, two"):
        maker.sensitivity(several.signature("one"), [sample])


def test_writes_that_the_simulation_would_lose_are_refused(maker: Edgeq) -> None:
    """Into a tensor in float, of which the file is right."""

    def forward(self: Any, x: Any) -> Any:
        y = torch.sin(x)
        y[:, 0] = 1
        return self.head(torch.cos(y))

    model = seeded(lambda: net(forward, head=nn.Linear(8, 4)))
    samples = [normal(1, 8, seed=i) for i in range(8)]
    quantized = maker.quantize(model, samples[0], calibration=samples)
    assert maker.compare(quantized, samples).total.sqnr_db > 30
    with pytest.raises(ValueError, match="writes into a part of a tensor that cos reads later"):
        maker.sensitivity(quantized, samples)


def test_a_file_that_no_interpreter_opens_is_refused(
    maker: Edgeq, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what wrote it, and a way out."""
    quantized = nets.quantized_chain(maker, "recipe_static_wi8_ai8")
    broken = quantized.tflite[: len(quantized.tflite) // 2]
    monkeypatch.setattr(litert, "quantize_recipe", lambda *_: broken)
    with pytest.raises(RuntimeError, match="converter and quantizer wrote it so"):
        maker.sensitivity(quantized, nets.images(2, seed=2))


def test_groups_of_layers() -> None:
    """Modules with two layers that have weights and less than the one around; shared scales."""
    weights = {"stem": 1, "b.0.a": 1, "b.0.c": 1, "b.0": 0, "b.1.a": 1, "b.1.act": 0, "b.1.m.d": 1}
    weights |= {"pool": 0, "view": 0, "flip": 0, "head": 1}
    layers = {name: engine.Layer(name, (), n) for name, n in weights.items()}
    sharing = [{"head"}, {"flip", "view", "pool", "head"}, {"stem", "b.0.a"}, set(layers)]

    assert engine.grouped(layers, sharing) == {
        "b.*": ("b.0.a", "b.0.c", "b.0", "b.1.a", "b.1.act", "b.1.m.d"),
        "b.0.*": ("b.0.a", "b.0.c", "b.0"),
        "b.1.*": ("b.1.a", "b.1.act", "b.1.m.d"),
        "stem + b.0.a": ("stem", "b.0.a"),
        "pool + … + head": ("pool", "view", "flip", "head"),
    }


def _cat(self: Any, x: Any) -> Any:
    return self.head(torch.cat([self.a(x), self.pool(self.b(x))], 1))


def _branches() -> nn.Module:
    head = nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    convs = {"a": nn.Conv2d(3, 4, 3, stride=2, padding=1), "b": nn.Conv2d(3, 4, 3, padding=1)}
    return net(_cat, "Branches", **convs, pool=nn.MaxPool2d(2), head=head)


@pytest.mark.parametrize(
    ("quantizer", "groups"),
    [
        (nets.PT2E, {"a + b", "head.*"}),
        (
            "recipe_static_wi8_ai8",
            {"b + pool", "a + CONCATENATION #5", "head.2 + TRANSPOSE #8", "head.*"},
        ),
    ],
    ids=["pt2e", "recipe"],
)
def test_layers_are_also_measured_together(maker: Edgeq, quantizer: Any, groups: set[str]) -> None:
    """A module's layers have the SQNR of the file with that module in float."""
    model, samples = seeded(_branches), nets.images(8, seed=2)
    quantized = nets.quantized_chain(maker, quantizer, model)
    found = maker.sensitivity(quantized, samples)

    by_name = {row.name: row for row in found.groups}
    assert by_name.keys() == groups
    together = by_name["head.*"]
    assert together.layers == ("head.0", "head.2")
    assert together.weights == 2 * 8 * 8 * 9
    if quantizer == nets.PT2E:
        other: Any = litert.pt2e_preset(quantizer).set_module_name("head", None)
    else:
        other = [*litert.load_recipe(quantizer), left("Sequential_head")]
    file = maker.compare(nets.quantized_chain(maker, other, model), samples)
    assert together.in_float_db == pytest.approx(file.total.sqnr_db, abs=0.1)


def _adapted() -> nn.Module:
    """A linear layer with an adapter inside, as LoRA has."""
    inside = {"down": nn.Linear(64, 4, bias=False), "up": nn.Linear(4, 64, bias=False)}
    first = net(
        lambda self, x: nn.functional.linear(x, self.weight) + self.up(self.down(x)),
        weight=nn.Parameter(normal(64, 64, seed=0) / 8),
        **inside,
    )
    return net(lambda self, x: self.head(self.first(x)), first=first, head=nn.Linear(64, 8))


def test_layers_inside_a_layer_that_torchao_quantizes(maker: Edgeq) -> None:
    """Each is measured by itself; the user's model keeps its modules; all weights are counted."""
    from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig

    names = ("first.weight", "first.down", "first.up", "head")
    config = FqnToConfig(dict.fromkeys(names, Int8WeightOnlyConfig()))
    model, samples = seeded(_adapted), [normal(1, 64, seed=i) for i in range(4)]
    before = dict(model.named_modules())
    quantized = maker.quantize(model, samples[0], quantizer=config)
    budget = Budget(sqnr_db=maker.compare(quantized, samples).total.sqnr_db + 1)
    plan = maker.suggest_mixed_precision(quantized, samples, budget)
    found = plan.sensitivity

    assert plan.share_of_weights <= 1
    assert {row.module for row in found.rows} == {"first", "first.down", "first.up", "head"}
    assert all(30 < row.quantized_db < 80 for row in found.rows), str(found)
    assert dict(model.named_modules()) == before
