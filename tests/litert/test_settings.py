"""What is stored of a quantizer's settings: plain text that two equal quantizers share."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch

from pytest_edgeq import litert
from pytest_edgeq.litert import settings_of
from tests.quantize.quantizers import converters, per_channel
from tests.quantize.rules import dynamic


def _pt2e(*, stem: bool = True, **options: Any) -> Any:
    config = per_channel(**options)
    quantizer = converters().set_global(config)
    quantizer.set_module_type(torch.nn.Linear, config)
    quantizer.module_name_config["stem"] = config if stem else None
    return quantizer


def _torchao(*, size: int = 32) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, PerGroup

    return Int8WeightOnlyConfig(granularity=PerGroup(size))


def _recipe(*, bits: int = 8) -> Any:
    return [dynamic(bits=bits)]


@pytest.mark.parametrize(
    ("make", "option", "path"),
    [
        (_pt2e, {"is_per_channel": False}, "global_config.weight.qscheme"),
        (_pt2e, {"stem": False}, "module_name_config.stem"),
        (_torchao, {"size": 64}, "granularity.group_size"),
        (_recipe, {"bits": 4}, "[0].op_config.weight_tensor_config.num_bits"),
    ],
)
def test_a_setting_that_differs_has_a_path(make: Any, option: dict[str, Any], path: str) -> None:
    """Equal quantizers have equal settings, another setting another text at its path."""
    settings, others = settings_of(make()), settings_of(make(**option))
    assert settings == settings_of(make())
    assert settings.get(path) != others[path]
    assert all(isinstance(each, str) and " at 0x" not in each for each in settings.values())


def test_a_quantizer_of_the_users_own_is_unknown() -> None:
    """Its code may have changed where its state has not."""
    own = type("Own", (type(_pt2e()),), {"__module__": "my_project"})()
    assert settings_of(own) == {"settings": "unknown"}
    quantizer = _pt2e()
    quantizer.module_name_config["stem"] = object()
    assert settings_of(quantizer) == {"settings": "unknown"}
    assert settings_of(None) == {}


def test_a_thread_that_is_done_leaves_the_others_quiet() -> None:
    """Filters of warnings are shared by all threads: here the first one in leaves first."""
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (first, second):
            each.enter_context(litert.quiet())
        first.close()
        warnings.warn("chatter", FutureWarning, stacklevel=1)
        second.close()
        with pytest.raises(FutureWarning):
            warnings.warn("chatter", FutureWarning, stacklevel=1)
