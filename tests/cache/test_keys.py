"""Every ingredient of a result is in its key: what changes one of them is never a stale hit."""

from __future__ import annotations

import copy
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pytest_edgeq
from fixtures.models import normal, seeded
from pytest_edgeq import litert
from pytest_edgeq.litert import Traced
from pytest_edgeq.quantize.cache import environment
from pytest_edgeq.quantize.cache.conversions import ConversionCache
from pytest_edgeq.quantize.cache.directory import Store
from tests.quantize.quantizers import converters, per_channel, per_tensor

INPUT = (normal(1, 4, 8, 8, seed=0),)
PRESET = "pt2e_static_int8"


class Reference(nn.Module):
    """The model that each variant below changes in one place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.offset = nn.Buffer(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A sum, so that annotators look at the functions that are called."""
        return torch.relu(self.conv(x)) + x


class _Method(Reference):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.conv(x).relu() + x
        return made


class _Constant(Reference):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x)) + x * 1.0


class _Order(Reference):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.conv(x))


class _Unused(Reference):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x) + 0 * self.offset) + x


def _cache(said: Callable[[str], None] = pytest.fail, *, seed: int = 0) -> ConversionCache:
    """One that is on; keys alone are asked for, so that nothing is written."""
    return ConversionCache(Store(Path("nowhere"), said), said, seed=seed)


def _key(
    model: nn.Module,
    *,
    preset: str = PRESET,
    seed: int = 0,
    args: Any = INPUT,
    dynamic_shapes: Any = None,
) -> str:
    traced = Traced(model.eval(), args, dynamic_shapes=dynamic_shapes)
    key = _cache(seed=seed).traced_key(traced, preset)
    assert key is not None
    return key


def test_one_model_has_one_key() -> None:
    """Made twice, copied, or the same weights in other memory."""
    key = _key(Reference())
    assert key == _key(Reference()) == _key(copy.deepcopy(Reference()))
    moved = Reference()
    for parameter in moved.parameters():
        parameter.data = parameter.data.clone()
    assert key == _key(moved)


@pytest.mark.parametrize("kind", [_Method, _Constant, _Order])
def test_other_code_with_equal_weights_has_another_key(kind: type[Reference]) -> None:
    """By its operators, and by the lines that call them."""

    class Same(Reference):
        __qualname__ = Reference.__qualname__
        forward = kind.forward

    # No name tells them apart.
    Same.__module__, Same.__name__ = Reference.__module__, Reference.__name__
    assert _key(Same()) != _key(Reference())


class _Scaled(Reference):
    """Multiplies by a number that some object holds."""

    factor = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.number()

    def number(self) -> float:
        return self.factor


def _attribute(value: float) -> nn.Module:
    model = _Scaled()
    model.factor = value
    return model


def _tensor(value: float) -> nn.Module:
    table = torch.full((1,), value)
    model = _Scaled()
    model.number = lambda: table  # type: ignore[method-assign, return-value, assignment]
    return model


@pytest.mark.parametrize("make", [_attribute, _tensor])
def test_a_number_that_the_graph_holds_counts(make: Callable[[float], nn.Module]) -> None:
    """Wherever the forward takes it from."""
    assert _key(make(2.0)) == _key(make(2.0)) != _key(make(3.0))


def test_the_source_of_every_module_that_is_not_installed_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its text; of what is installed, the names and versions of packages count."""
    before = environment.sources()
    assert __name__ in before["loaded"]
    assert not {"torch", "torch.ops", "json", "pytest"} & set(before["loaded"])
    assert any(name.startswith("torch-") for name in before["installed"])
    path, key = tmp_path / "helpers.py", _key(Reference())
    module = types.ModuleType("edgeq_helpers")
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "edgeq_helpers", module)
    keys = []
    for text in ("X = 1\n", "X = 2\n", "X = 12\n", "X = 1\n"):
        path.write_text(text)
        keys.append(_key(Reference()))
    assert keys[0] == keys[3]
    assert len({key, *keys}) == 4
    path.unlink()
    assert _cache().traced_key(Traced(Reference().eval(), INPUT), PRESET) is None


def _with(change: Callable[[Reference], Any]) -> Reference:
    model = Reference()
    with torch.no_grad():
        change(model)
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.conv.weight.view(-1)[7:8].mul_(1.0000002),
        lambda m: setattr(m.conv, "padding", "same"),
        lambda m: setattr(m.conv, "bias", None),
        lambda m: setattr(m, "twin", m.conv),
    ],
    ids=["a weight by an ulp", "padding", "no bias", "two names"],
)
def test_another_state_has_another_key(change: Callable[[Reference], Any]) -> None:
    """Weights, biases and settings of layers."""
    assert _key(_with(change)) != _key(Reference())


def test_a_buffer_counts_where_it_is_read() -> None:
    """In place, as a training step changes it."""
    one, other = _Unused(), _Unused()
    before = _key(one)
    other.offset.add_(1)
    assert _key(other) != before
    one.offset.add_(1)
    assert _key(one) == _key(other)


@pytest.mark.parametrize(
    "options",
    [
        {"preset": "pt2e_static_int8_per_tensor"},
        {"seed": 1},
        {"args": (normal(2, 4, 8, 8, seed=0),)},
        {"dynamic_shapes": ({0: torch.export.Dim("batch", min=1, max=8)},)},
    ],
    ids=["preset", "seed", "shape", "dynamic"],
)
def test_every_option_counts(options: dict[str, Any]) -> None:
    """Options of the export, the quantizer and the session are part of the key."""
    args: dict[str, Any] = {}
    if "dynamic_shapes" in options:
        args["args"] = (normal(2, 4, 8, 8, seed=0),)
    assert _key(Reference(), **(args | options)) != _key(Reference(), **args)


def test_the_values_of_the_sample_inputs_do_not_count() -> None:
    """A model is traced with them, on their shapes and dtypes alone: they are often random."""
    assert _key(Reference(), args=(normal(1, 4, 8, 8, seed=9),)) == _key(Reference())


def test_libraries_and_settings_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of a library, another setting; see test_environment.py for each."""
    key = _key(Reference())
    for name in ("libraries", "settings"):
        with monkeypatch.context() as patch:
            patch.setattr(environment, name, lambda: {"torch": "another"})
            assert _key(Reference()) != key, name
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert _key(Reference()) != key
    torch.set_num_threads(threads)
    assert _key(Reference()) == key


def test_our_own_code_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two releases, too."""
    package = Path(pytest_edgeq.__file__).parent
    copied = shutil.copytree(package, tmp_path / "package")
    monkeypatch.setattr(
        environment, "__file__", str(copied / "quantize" / "cache" / "environment.py")
    )
    before = environment._own_code.__wrapped__()
    with (copied / "quantize/pt2e.py").open("a") as source:
        source.write("# one more line\n")
    assert environment._own_code.__wrapped__() != before


class _Counting(Reference):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(1)
        return super().forward(x)


def test_a_key_leaves_the_model_as_it_was() -> None:
    """Compiled in place or not, with what its forward keeps and draws."""
    for compiles in (False, True):
        model = _Counting().eval()
        if compiles:
            model.compile(backend="eager")
        before = dict(vars(model))
        drawn = torch.get_rng_state()
        _key(model)
        assert vars(model) == before
        assert model.calls == []
        assert torch.equal(torch.get_rng_state(), drawn)


def _annotated() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def _prepared_key(quantizer: Any, said: list[str] | None = None) -> str | None:
    model, args = seeded(_annotated), (normal(1, 4, seed=0),)
    graph: Any = torch.export.export(model, args, strict=True).module()
    cache = _cache(pytest.fail if said is None else said.append)
    return cache.prepared_key(
        "model", lambda: cache.graph_key(litert.prepare_pt2e(graph, quantizer))
    )


def _quantizer(config: Any = None) -> Any:
    return converters().set_global(per_tensor() if config is None else config)


def _subclass(annotate: Callable[[Any, Any], Any]) -> Any:
    made = type("PT2EQuantizer", (type(converters()),), {"annotate": annotate})()
    return made.set_global(per_tensor())


@pytest.mark.slow
def test_what_a_quantizer_annotates_counts_and_its_class_does_not() -> None:
    """Code of a subclass shows in the annotations; equal ones are one key."""
    base = type(converters())

    def drops_one(self: Any, model: Any) -> Any:
        annotated = base.annotate(self, model)
        for node in annotated.graph.nodes:
            if "linear_1" in node.name:
                node.meta.pop("quantization_annotation", None)
        return annotated

    key = _prepared_key(_quantizer())
    assert key is not None
    assert key == _prepared_key(_quantizer())
    assert key == _prepared_key(_subclass(base.annotate))
    assert key != _prepared_key(_subclass(drops_one))
    assert key != _prepared_key(_quantizer(per_channel()))
    assert key != _prepared_key(_quantizer(per_tensor(is_dynamic=True)))


def test_an_observer_of_the_users_own_makes_the_key_unknown() -> None:
    """Its code decides on ranges, and nothing identifies it."""

    def own_observers(self: Any, model: Any, observers: Any) -> None:
        for observer in filter(None, observers.values()):
            kind = type(observer)
            observer.__class__ = type("Own", (kind,), {"__module__": "conftest"})

    quantizer = _subclass(type(converters()).annotate)
    type(quantizer).prepare_obs_or_fq_callback = own_observers
    said: list[str] = []
    assert _prepared_key(quantizer, said) is None
    assert "an observer of class conftest.Own" in said[0]
