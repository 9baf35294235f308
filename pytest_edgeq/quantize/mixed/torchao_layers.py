"""torchao: exchange layers of the quantized module for those of the float model."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_edgeq import litert
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.reference import call_reference
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.quantize.mixed.engine import Choice, Layer, LayerEngine, SentModule, grouped

if TYPE_CHECKING:
    import torch

    from pytest_edgeq.compare.executors.sample_executor import SampleExecutor


class TorchaoLayers(LayerEngine):
    """The layers of a model of the torchao flow."""

    def __init__(
        self, quantized: QuantizedModel, config: Any, executor: SampleExecutor | None = None
    ) -> None:
        super().__init__(quantized, executor)
        self._config = config
        simulated, floats = quantized.simulated, quantized.float_model
        assert simulated is not None, "unreachable because the flow has both"
        self._quantized: torch.nn.Module = simulated
        self._floats: Any = floats
        names = {
            each.name.rpartition(".")[0] for each in litert.ao_weights(simulated, quantized.name)
        }
        self.layers = {
            name: Layer(
                name,
                (type(module).__name__,),
                sum(each.numel() for each in module.parameters(recurse=False) if each.dim() > 1),
            )
            for name, module in floats.named_modules()  # type: ignore[union-attr] # a module
            if name in names
        }
        self.groups = grouped(self.layers)

    def quantizer(self, modules: Sequence[str]) -> Any:
        """Return the config that leaves some modules in float."""
        quantized = [each for each in self.layers if each not in modules]
        return litert.ao_config_of(self._config, quantized, modules)

    def code(self, modules: Sequence[str]) -> str:
        """Return the code that makes the config from the one that was used."""
        quantized = [each for each in self.layers if each not in modules]
        return litert.ao_config_code(self._config, quantized, modules)

    @contextmanager
    def choice(self, modules: frozenset[str]) -> Iterator[Choice]:
        """Exchange modules of the quantized module, temporarily; the layers inside them stay."""
        before = {path: self._quantized.get_submodule(path) for path in sorted(modules)}
        for path, module in before.items():
            layer = copy.copy(self._floats.get_submodule(path))
            layer._modules = {**layer._modules, **module._modules}
            self._quantized.set_submodule(path, layer)
        try:
            yield _Module(self._quantized)
        finally:
            for path, module in before.items():
                self._quantized.set_submodule(path, module)


class _Module(SentModule):
    """Runs a module."""

    def __call__(self, model: QuantizedModel) -> Callable[[Sample], Any]:
        return functools.partial(call_reference, self.module)
