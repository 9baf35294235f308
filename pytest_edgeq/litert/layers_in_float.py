"""Make `set_module_name(name, None)` keep a module in float, as its signature allows."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any


def accept_none(module: ModuleType) -> None:
    """
    Make a module's quantizer classes accept None as the config of a module name.

    litert-torch 0.10.0 and torchao 0.18.0 accept None in `set_module_type`, annotate the parameter
    of `set_module_name` as `Optional[QuantizationConfig]`, and raise there
    `quantization_config == None is not supported yet`. `configs_as_set` applies configs of None.
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
