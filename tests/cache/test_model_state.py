"""Python state that a model reaches: its types are in the key, and the export restores it."""

from __future__ import annotations

import array
import collections
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fixtures.models import normal
from pytest_edgeq import Edgeq
from pytest_edgeq.cache.conversions import ConversionCache
from pytest_edgeq.cache.directory import Store
from pytest_edgeq.litert import Traced

SAMPLE = normal(1, 4, seed=0)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)


def _key(model: nn.Module) -> str | None:
    cache = ConversionCache(Store(Path("nowhere"), pytest.fail), pytest.fail)
    return cache.exported_key(Traced(model.eval(), (SAMPLE,)))


_VARIABLES: dict[str, Any] = {"scale": 2.0, "calls": 0, "tables": {}}
_SCALE: Any = 2.0
_CALLS = 0


class _Settings:
    scale: Any = 2.0


class _Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: Any) -> None:
        self.scale = scale


@dataclasses.dataclass
class _Config:
    scale: Any


class _Scaled(_Net):
    """Multiplies by a number that some object holds."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(x) * self.number() + x
        return made

    def number(self) -> Any:
        return self.scale


class _OfVariable(_Scaled):
    def __init__(self, scale: Any) -> None:
        super().__init__(None)
        globals()["_SCALE"] = scale

    def number(self) -> Any:
        return _SCALE


class _OfClass(_Scaled):
    def __init__(self, scale: Any) -> None:
        super().__init__(None)
        _Settings.scale = scale

    def number(self) -> Any:
        return _Settings.scale


class _OfDict(_Scaled):
    def __init__(self, scale: Any) -> None:
        super().__init__(None)
        _VARIABLES["scale"] = scale

    def number(self) -> Any:
        return _VARIABLES["scale"]


class _Nested(_Scaled):
    def __init__(self, scale: Any) -> None:
        super().__init__([_Config((scale,))])

    def number(self) -> Any:
        return self.scale[0].scale[0]


class _OfSlots(_Scaled):
    def __init__(self, scale: Any) -> None:
        super().__init__(_Slotted(scale))

    def number(self) -> Any:
        return self.scale.scale


def _enclosing(scale: Any) -> nn.Module:
    model = _Scaled(None)
    model.number = lambda: scale  # type: ignore[method-assign]
    return model


def _by_default(scale: Any) -> nn.Module:
    def number(value: Any = scale) -> Any:
        return value

    model = _Scaled(None)
    model.number = number  # type: ignore[method-assign]
    return model


def _by_keyword(scale: Any) -> nn.Module:
    def number(*, value: Any = scale) -> Any:
        return value

    model = _Scaled(None)
    model.number = number  # type: ignore[method-assign]
    return model


def _by_partial(scale: Any) -> nn.Module:
    model = _Scaled(None)
    model.number = functools.partial(lambda value: value, scale)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    "make",
    [
        *(_Scaled, _OfVariable, _OfClass, _OfDict, _Nested, _OfSlots),
        *(_enclosing, _by_default, _by_keyword, _by_partial),
    ],
)
def test_the_type_of_a_number_counts(make: Callable[[Any], nn.Module]) -> None:
    """The operators are the same; strict export reads `float`, and refuses numpy's."""
    key = _key(make(2.0))
    assert key is not None
    assert key == _key(make(2.0))
    assert key != _key(make(np.float64(2.0)))


class _Summing(_Net):
    def __init__(self, factors: Any) -> None:
        super().__init__()
        self.factors = factors

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        for factor in self.factors:
            y = y + x * factor
        return y


def test_the_type_of_a_container_counts() -> None:
    """Strict export iterates a list, and refuses an array of Python's own."""
    assert _key(_Summing([1, 2])) != _key(_Summing(array.array("i", [1, 2])))


@pytest.mark.slow
def test_a_build_of_another_type_is_none_of_the_cache(tmp_path: Path) -> None:
    """The array makes a non-strict export, in which ADD and MUL stay in float."""

    def build(folder: Path | None, factors: Any) -> bytes:
        model, data = _Summing(factors).eval(), [SAMPLE]
        return Edgeq(cache_dir=folder).quantize(model, (SAMPLE,), calibration=data).tflite

    assert build(tmp_path, [1, 2]) == build(None, [1, 2])
    with pytest.warns(UserWarning, match="strict=False"):
        made = build(tmp_path, array.array("i", [1, 2]))
    assert made != build(tmp_path, [1, 2])


class _Counting(_Net):
    """Multiplies by a number that each call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Any = [0]
        self.config = _Config(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(x) * float(self.count()) + x
        return made

    def count(self) -> int:
        raise NotImplementedError


class _InList(_Counting):
    def count(self) -> int:
        self.calls.append(1)
        return len(self.calls)


class _InObject(_Counting):
    def count(self) -> int:
        self.config.scale += 1
        return int(self.config.scale)


class _InDict(_Counting):
    def count(self) -> int:
        _VARIABLES["calls"] += 1
        return int(_VARIABLES["calls"])


class _InClass(_Counting):
    total = 0

    def count(self) -> int:
        _InClass.total += 1
        return _InClass.total


class _InVariable(_Counting):
    def count(self) -> int:
        global _CALLS
        _CALLS += 1
        return _CALLS


def _in_cell() -> nn.Module:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    model = _Counting()
    model.count = count  # type: ignore[method-assign]
    return model


def _in_collection(calls: Any, add: Callable[[Any], None]) -> nn.Module:
    def count() -> int:
        add(len(calls))
        return len(calls)

    model = _Counting()
    model.calls = calls
    model.count = count  # type: ignore[method-assign]
    return model


def _in_set() -> nn.Module:
    calls: set[int] = set()
    return _in_collection(calls, calls.add)


def _in_deque() -> nn.Module:
    calls: collections.deque[int] = collections.deque()
    return _in_collection(calls, calls.append)


@pytest.mark.parametrize(
    "make",
    [_InList, _InObject, _InDict, _InClass, _InVariable, _in_cell, _in_set, _in_deque],
)
def test_a_number_that_a_call_changes_is_the_same_afterwards(make: Callable[[], Any]) -> None:
    """The export that follows must find what it finds without a cache."""
    model = make()
    before = model.count()
    _key(model)
    assert model.count() == before + 1


@functools.lru_cache
def _table(length: int) -> torch.Tensor:
    return torch.arange(float(length))


class _Remembering(_Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tables = _VARIABLES["tables"]
        if 4 not in tables:
            tables[4] = torch.arange(4.0)
        made: torch.Tensor = self.linear(x) + tables[4]
        return made


class _Caching(_Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(x) + _table(4)
        return made


@pytest.fixture
def _no_tables() -> Iterator[None]:
    yield
    _VARIABLES["tables"].clear()
    _table.cache_clear()


@pytest.mark.usefixtures("_no_tables")
@pytest.mark.parametrize("kind", [_Remembering, _Caching])
def test_a_table_is_computed_from_numbers(kind: type[_Net]) -> None:
    """None is left that the export has made, which has a shape alone."""
    model = kind()
    assert _key(model) is not None
    assert model.eval()(SAMPLE).detach().numpy().shape == (1, 4)


@pytest.mark.usefixtures("_no_tables")
@pytest.mark.parametrize("length", [4, 5])
def test_the_code_of_a_function_counts_whose_result_is_cached(length: int) -> None:
    """Strict export looks into it all the same; a result that is there is not computed again."""
    key = None
    for _ in range(2):
        _table.cache_clear()
        _table(length)
        assert key in (None, _key(_Caching()))
        key = _key(_Caching())
    code = _table.__wrapped__.__code__
    other = (lambda length: torch.arange(float(length))).__code__
    try:
        _table.__wrapped__.__code__ = other.replace(co_name="_table", co_qualname="_table")
        assert _key(_Caching()) != key
    finally:
        _table.__wrapped__.__code__ = code


def test_a_hook_that_removes_itself_is_there_afterwards() -> None:
    """It is one of the first call of the model, which is not ours."""

    def once(*_: Any) -> None:
        handle.remove()

    model = _Scaled(2.0)
    handle = model.linear.register_forward_pre_hook(once)
    _key(model)
    assert list(model.linear._forward_pre_hooks.values()) == [once]


def test_the_order_of_a_set_does_not_count() -> None:
    """It is another one in the next session, if the elements are hashed by their addresses."""
    keys = set()
    for _ in range(4):
        model = _Scaled(2.0)
        model.others = {object(), np.float64(1.5), *(_Slotted(1) for _ in range(4))}  # type: ignore[assignment]
        keys.add(_key(model))
    assert len(keys) == 1


def test_the_number_of_a_hook_does_not_count() -> None:
    """It depends on the hooks that other models of the process have."""

    def hooked() -> nn.Module:
        def once(*_: Any) -> None:
            handle.remove()

        model = _Scaled(2.0)
        handle = model.linear.register_forward_pre_hook(once)
        return model

    assert _key(hooked()) == _key(hooked())


def test_attributes_of_a_module_of_python_are_kept() -> None:
    """As of a `helpers` in which a forward counts."""
    helpers = types.ModuleType("helpers")
    helpers.calls = 0  # type: ignore[attr-defined]

    class Counting(_Counting):
        def count(self) -> int:
            helpers.calls += 1  # type: ignore[attr-defined]
            return int(helpers.calls)

    globals()["helpers"] = helpers
    code = "def count(self):\n    helpers.calls += 1\n    return helpers.calls\n"
    exec(code, globals())
    Counting.count = globals().pop("count")  # type: ignore[method-assign]
    try:
        _key(Counting())
    finally:
        del globals()["helpers"]
    assert helpers.calls == 0


def test_objects_of_other_packages_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixture leads to all of pytest; what it does meanwhile must stay done."""

    class Patching(_Scaled):
        def number(self) -> Any:
            monkeypatch.setenv("EDGEQ_TEST", "1")
            return self.scale

    assert _key(Patching(2.0)) is not None
    assert monkeypatch._setitem
