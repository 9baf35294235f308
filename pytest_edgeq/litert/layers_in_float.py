"""Let `set_module_name(name, None)` leave a layer in float, as its signature promises."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

__all__ = ["accept_none"]


def accept_none(module: ModuleType) -> None:
    """
    Have the quantizer of a module take None as the config of a module's name.

    litert-torch 0.10.0 and torchao 0.18.0 take None in `set_module_type`, annotate
    `Optional[QuantizationConfig]` in `set_module_name`, and stop there with
    `quantization_config == None is not supported yet`. What a config of None means is decided in
    `configs_as_set`.
    """
    for name in ("PT2EQuantizer", "XNNPACKQuantizer"):
        kind = vars(module).get(name)
        if kind is not None and not hasattr(kind.set_module_name, "__wrapped__"):
            kind.set_module_name = _accepting_none(kind.set_module_name)


def _accepting_none(method: Any) -> Any:
    @functools.wraps(method)
    def set_module_name(self: Any, module_name: str, quantization_config: Any) -> Any:
        if quantization_config is not None:
            return method(self, module_name, quantization_config)
        self.module_name_config[module_name] = None
        return self

    return set_module_name
