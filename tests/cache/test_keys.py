"""Every ingredient of a result is in its key: what changes one of them is never a stale hit."""

from __future__ import annotations

import copy
import functools
import importlib
import operator
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fixtures.models import normal
from pytest_edgeq import Edgeq, litert
from pytest_edgeq.cache import environment
from pytest_edgeq.cache.conversions import ConversionCache
from pytest_edgeq.cache.directory import Store
from pytest_edgeq.litert import Traced

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


class _OtherFunction(Reference):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(torch.relu(self.conv(x)), x)


class _OtherOperator(Reference):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = operator.add(torch.relu(self.conv(x)), x)
        return made


class _OtherSpelling(Reference):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.conv(x)) + x


class _Method(Reference):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.conv(x).relu() + x
        return made


class _Printing(Reference):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return torch.relu(self.conv(x)) + x


def _double(x: torch.Tensor) -> torch.Tensor:
    return x


class _Helped(Reference):
    helper: Callable[[torch.Tensor], torch.Tensor] = staticmethod(_double)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.helper(self.conv(x))) + x


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
    cache = _cache(seed=seed)
    key = cache.preset_key(cache.exported_key(traced), preset)
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


@pytest.mark.parametrize(
    "kind",
    [
        _OtherFunction,
        _OtherOperator,
        _OtherSpelling,
        _Method,
        _Printing,
        _Helped,
        _Constant,
        _Order,
        _Unused,
    ],
)
def test_other_code_with_equal_weights_has_another_key(kind: type[Reference]) -> None:
    """Also where the graph of operators is the same, and strict export reads the difference."""

    class Same(Reference):
        __qualname__ = Reference.__qualname__
        forward = kind.forward
        helper = staticmethod(_double)

    # No name tells them apart.
    Same.__module__, Same.__name__ = Reference.__module__, Reference.__name__
    assert _key(Same()) != _key(Reference())


def test_a_helper_with_another_body_has_another_key() -> None:
    """It computes nothing, and strict export looks into it."""

    def spoken(x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return x

    one, other = _Helped(), _Helped()
    other.helper = spoken
    assert _key(one) != _key(other)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x * 1


def _same_by_function(x: torch.Tensor) -> torch.Tensor:
    return torch.mul(x, 1)


class _Helping(nn.Module):
    helper: Callable[[torch.Tensor], torch.Tensor] = staticmethod(_same)


class _Branching(_Helping):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.cond(x.sum() > 0, torch.relu, _Helping.helper, (x,))
        return made


class _Mapping(_Helping):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.vmap(_Helping.helper)(x)
        return made


class _Distance(_Helping):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.triplet_margin_with_distance_loss(
            x, x, x, distance_function=lambda a, b: _Helping.helper(a) - b
        )


class _Checkpointed(_Helping):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.utils.checkpoint.checkpoint(
            _Helping.helper, x, use_reentrant=False
        )
        return made


class _ByMode(_Helping):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with _Mode():
            return torch.relu(x)


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _Helping.helper(func(*args, **(kwargs or {})))


@pytest.mark.parametrize("kind", [_Mapping, _Distance, _Checkpointed, _ByMode])
def test_code_that_torch_calls_counts(
    kind: type[_Helping], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a function that is mapped: each calls an operator in one of two ways."""
    keys = set()
    for helper in (_same, _same, _same_by_function):
        monkeypatch.setattr(_Helping, "helper", staticmethod(helper))
        keys.add(_key(kind()))
    assert len(keys) == 2


def _with(change: Callable[[Reference], Any]) -> Reference:
    model = Reference()
    with torch.no_grad():
        change(model)
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.conv.weight.view(-1)[7:8].mul_(1.0000002),
        lambda m: m.conv.bias.view(-1)[0:1].neg_(),
        lambda m: setattr(m.conv, "padding", "same"),
        lambda m: setattr(m.conv, "bias", None),
        lambda m: setattr(m, "conv", nn.Conv2d(4, 4, 5, padding=2)),
        lambda m: setattr(m, "twin", m.conv),
    ],
    ids=["a weight by an ulp", "a bias's sign", "padding", "no bias", "kernel", "two names"],
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


def test_every_library_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of one of them, or other files under the same version."""
    before = environment.libraries()
    assert {"torch", "torchao", "litert-torch", "litert-converter", "ai-edge-litert"} <= set(before)
    assert {"ai-edge-quantizer", "numpy", "jax", "python", "pytest-edgeq"} <= set(before)
    key = _key(Reference())
    for name in before:
        monkeypatch.setattr(environment, "libraries", lambda n=name: before | {n: "another"})
        assert _key(Reference()) != key, name
    monkeypatch.setattr(environment, "libraries", lambda: before)
    assert _key(Reference()) == key


def test_tensorflow_counts_where_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the second pipeline, whose files are others with another release; else not at all."""
    made: list[Any] = []

    def convert(*_: Any, **options: Any) -> bytes:
        made.append(options)
        return b"fileTFL3"

    monkeypatch.setattr(litert, "convert", convert)
    cache = ConversionCache(Store(tmp_path, pytest.fail))
    signatures = {"serving_default": Traced(Reference().eval(), INPUT)}
    for release in ("2.21.0", "2.22.0", "2.22.0"):
        monkeypatch.setattr(environment, "second_pipeline", lambda r=release: {"tensorflow": r})
        for second in (False, True):
            assert cache.convert("Net", signatures, second_pipeline=second) == b"fileTFL3"
    assert [options["second_pipeline"] for options in made] == [False, True, True]


@pytest.mark.slow
def test_no_other_conversion_imports_tensorflow() -> None:
    """So that it may be installed beside a cache that was filled without it."""
    script = """
import sys
from fixtures.models import ConvBnRelu, samples, seeded
from pytest_edgeq import Edgeq
data = list(samples(ConvBnRelu, 2))
for flow in ("pt2e_static_int8", "pt2e_dynamic_int8", "recipe_static_wi8_ai8", None):
    Edgeq().quantize(
        seeded(ConvBnRelu), ConvBnRelu.sample_inputs(), quantizer=flow, calibration=data
    )
assert "litert_torch" in sys.modules
assert "tensorflow" not in sys.modules
"""
    root = Path(__file__).parent.parent.parent
    subprocess.run([sys.executable, "-c", script], cwd=root, check=True, timeout=100)


@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.set_num_threads(torch.get_num_threads() + 1),
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.use_deterministic_algorithms(mode=True),
        lambda: setattr(torch.backends.mkldnn, "enabled", False),
    ],
    ids=["threads", "matmul", "deterministic", "mkldnn"],
)
def test_every_setting_counts(change: Callable[[], Any]) -> None:
    """Results of floating point depend on them."""
    threads, key = torch.get_num_threads(), _key(Reference())
    try:
        change()
        assert _key(Reference()) != key
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(mode=False)
        torch.backends.mkldnn.enabled = True  # type: ignore[assignment]
    assert _key(Reference()) == key


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("flows/pt2e.py", True),
        ("tflite/boundary.py", True),  # encodes the samples that calibrate a recipe
        ("samples.py", True),
        ("localize/match.py", False),
        ("snapshots/store.py", False),
    ],
)
def test_our_own_code_counts(tmp_path: Path, file: str, *, counts: bool) -> None:
    """Between two releases, too: all of it but what only looks at what was converted."""
    package = Path(environment.__file__).parent.parent
    copied = shutil.copytree(package, tmp_path / "package")
    before = environment.own_code(copied)
    with (copied / file).open("a") as source:
        source.write("# one more line\n")
    environment.own_code.cache_clear()
    assert (environment.own_code(copied) != before) is counts


def test_an_environment_variable_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of the libraries is part of the key, unless it only changes what they print."""
    key = _key(Reference())
    monkeypatch.setenv("LITERT_TORCH_SHOW_PROGRESS", "y")
    assert _key(Reference()) == key
    monkeypatch.setenv("TORCH_SOMETHING", "1")
    assert _key(Reference()) != key


@pytest.mark.parametrize("where", ["lowerings", "_pre_convert_decomp", "_pre_lower_decomp"])
def test_what_others_register_with_the_converter_makes_the_key_unknown(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Their code is in no version."""
    table = litert.converter_module("backend.lowerings.registry").global_registry.registered_ops
    if where != "lowerings":
        table = getattr(litert.converter_module("fx_infra.decomp"), where)
    monkeypatch.setitem(table, torch.ops.aten.relu.default, _double)
    told: list[str] = []
    assert _prepared_key(_quantizer(), told) is None
    assert "test_keys._double as litert_torch." in told[0]
    assert _cache().exported_key(Traced(Reference().eval(), INPUT)) is None


@pytest.mark.parametrize("register", ["register_forward_pre_hook", "register_forward_hook"])
def test_the_code_of_a_hook_of_the_model_counts(register: str) -> None:
    """It computes nothing, and strict export looks into it."""

    def silent(*_: Any) -> None:
        return None

    def spoken(*_: Any) -> None:
        print(end="")

    hooked = [Reference(), Reference()]
    for model, hook in zip(hooked, (silent, spoken), strict=True):
        getattr(model, register)(hook)
    spoken.__qualname__, spoken.__name__ = silent.__qualname__, silent.__name__
    spoken.__code__ = spoken.__code__.replace(
        co_name=silent.__code__.co_name, co_qualname=silent.__code__.co_qualname
    )
    assert len({_key(Reference()), *map(_key, hooked)}) == 3


class _Called(Reference):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """As `nn.Module` does, less its hooks."""
        return self.forward(x)


class _Reduced(Reference):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = functools.reduce(_SUM, [self.conv(x), x])
        return made


class _Mapped(Reference):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return next(iter(map(_SUM, [self.conv(x)], [x])))


class _Counting(Reference):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global _SUM
        _SUM = operator.add
        made: torch.Tensor = _SUM(self.conv(x), x)
        return made


class _Asking(Reference):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling():
            x = x * _GAIN
        made: torch.Tensor = self.conv(x) + x
        return made


class _Marked(Reference):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _as_it_is(self.conv(x), x)


class _Disabled(Reference):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = _disabled(self.conv(x), x)
        return made


def _as_it_is(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


_SUM: Callable[..., torch.Tensor] = operator.add
_GAIN = 2.0
_disabled: Any = torch.compiler.disable(_as_it_is)  # type: ignore[no-untyped-call] # torch's own gap


@pytest.mark.parametrize(
    "kind", [_Called, _Reduced, _Mapped, _Counting, _Asking, _Marked, _Disabled, _Branching]
)
def test_code_that_does_not_tell_everything_takes_a_strict_export(
    kind: type[Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function in C that is called by one in C, and what is said to TorchDynamo."""
    if kind is _Marked:
        assert _key(_Marked())
        rules = importlib.import_module("torch._dynamo.trace_rules")
        monkeypatch.setattr(rules._allowed_callable_ids, "function_ids", {id(_as_it_is)})
    assert _cache().exported_key(Traced(kind().eval(), INPUT)) is None


class _Flagged(Reference):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.conv(x)
        if _FLAGS[0]:
            y = y + x
            return y.add(x)
        y = y.add(x)
        return y + x


class _Listed(Reference):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.conv(x)
        for function in _FUNCTIONS:
            y = function(y, x)
        return y


def _by_operator(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def _by_method(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.add(y)


_FLAGS = [True]
_FUNCTIONS = [_by_operator, _by_method]


@pytest.mark.parametrize(("kind", "values"), [(_Flagged, _FLAGS), (_Listed, _FUNCTIONS)])
def test_the_order_of_calls_counts(kind: type[Reference], values: list[Any]) -> None:
    """The operators are the same, and so is the code that runs; annotators see the order."""
    before, kept = _key(kind()), list(values)
    try:
        values[:] = [False] if len(kept) == 1 else kept[::-1]
        assert _key(kind()) != before
    finally:
        values[:] = kept
    assert _key(kind()) == before


def test_code_beside_torch_with_a_name_like_its_own_counts() -> None:
    """`torchvision` lies in a folder whose name begins with that of `torch`."""
    folder = Path(torch.__file__).parent.parent / "torchvision"
    keys = set()
    for body in ("self.conv(x) + x", "self.conv(x).add(x)"):
        source = f"def forward(self, x):\n    return {body}\n"
        found: dict[str, Any] = {}
        exec(compile(source, str(folder / "models.py"), "exec"), found)
        keys.add(_key(type("Reference", (Reference,), {"forward": found["forward"]})()))
    assert len(keys) == 2


def test_a_key_leaves_the_model_as_it_was() -> None:
    """Compiled in place or not."""
    for compiles in (False, True):
        model = Reference().eval()
        if compiles:
            model.compile(backend="eager")
        before = dict(vars(model))
        _key(model)
        assert vars(model) == before


def test_another_profiler_takes_a_strict_export() -> None:
    """Which code ran is then not known."""
    sys.setprofile(lambda *_: None)
    try:
        key = _cache().exported_key(Traced(Reference().eval(), INPUT))
    finally:
        sys.setprofile(None)
    assert key is None


def test_a_model_that_sets_a_profiler_takes_a_strict_export() -> None:
    """It took the place of ours."""

    class Profiling(Reference):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sys.setprofile(lambda *_: None)
            return super().forward(x)

    assert _cache().exported_key(Traced(Profiling().eval(), INPUT)) is None
    assert sys.getprofile() is None


class _Annotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.second(torch.relu(self.first(x)))
        return made


def _prepared_key(quantizer: Any, said: list[str] | None = None) -> str | None:
    model, args = _Annotated().eval(), (normal(1, 4, seed=0),)
    graph = torch.export.export(model, args, strict=True).module()
    cache = _cache(pytest.fail if said is None else said.append)
    return cache.prepared_key("model", lambda: (litert.prepare_pt2e(graph, quantizer), None))


def _quantizer(**config: Any) -> Any:
    module = litert.converter_module("quantize.pt2e_quantizer")
    return module.PT2EQuantizer().set_global(module.get_symmetric_quantization_config(**config))


def _subclass(annotate: Callable[[Any, Any], Any]) -> Any:
    base = type(_quantizer())
    made = type("PT2EQuantizer", (base,), {"annotate": annotate})()
    module = litert.converter_module("quantize.pt2e_quantizer")
    return made.set_global(module.get_symmetric_quantization_config())


def test_what_a_quantizer_annotates_counts_and_its_class_does_not() -> None:
    """Code of a subclass shows in the annotations; equal ones are one key."""
    base = type(_quantizer())

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
    assert key != _prepared_key(_quantizer(is_per_channel=True))
    assert key != _prepared_key(_quantizer(is_dynamic=True))


def test_an_observer_of_the_users_own_makes_the_key_unknown() -> None:
    """Its code decides on ranges, and nothing identifies it."""
    base = type(_quantizer())

    def observes(self: Any, model: Any) -> Any:
        return base.annotate(self, model)

    def own_observers(self: Any, model: Any, observers: Any) -> None:
        for observer in filter(None, observers.values()):
            kind = type(observer)
            observer.__class__ = type("Own", (kind,), {"__module__": "conftest"})

    quantizer = _subclass(observes)
    type(quantizer).prepare_obs_or_fq_callback = own_observers
    said: list[str] = []
    assert _prepared_key(quantizer, said) is None
    assert "an observer of class conftest.Own" in said[0]


@pytest.mark.slow
def test_every_sample_counts_in_its_order(tmp_path: Path) -> None:
    """A changed, missing, further or moved sample is another run; equal ones are not run again."""
    maker = Edgeq(cache_dir=tmp_path)
    samples = [normal(1, 4, 8, 8, seed=seed) for seed in range(4)]
    model = Reference().eval()

    def stored(given: list[torch.Tensor]) -> int:
        maker.quantize(model, INPUT, calibration=iter(given))
        return len(Store(tmp_path, pytest.fail).keys("calibrate", ""))

    others = (
        samples,
        samples[:3],
        samples[::-1],
        [*samples, samples[0]],
        [samples[0], samples[1], samples[2], samples[3] * 1.5],
        [(sample.contiguous(memory_format=torch.channels_last)) for sample in samples],
    )
    for runs, given in enumerate(others, 1):
        assert stored(given) == runs
        assert stored(given) == runs
    assert stored(samples) == len(others)
