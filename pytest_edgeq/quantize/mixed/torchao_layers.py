"""torchao: exchange layers of the quantized module for those of the float model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_edgeq import litert
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.reference import call_reference
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.quantize.mixed.engine import Array, Layer, LayerEngine

if TYPE_CHECKING:
    import torch


class TorchaoLayers(LayerEngine):
    """The layers of a model of the torchao flow."""

    def __init__(self, quantized: QuantizedModel, config: Any) -> None:
        super().__init__(quantized)
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

    def quantizer(self, modules: Sequence[str]) -> Any:
        """Return the config that leaves some modules in float."""
        quantized = [each for each in self.layers if each not in modules]
        return litert.ao_config_of(self._config, quantized, modules)

    def code(self, modules: Sequence[str]) -> str:
        """Return the code that makes the config from the one that was used."""
        quantized = [each for each in self.layers if each not in modules]
        return litert.ao_config_code(self._config, quantized, modules)

    def outputs(
        self, modules: frozenset[str], samples: Iterable[Sample]
    ) -> Iterator[Sequence[Array]]:
        """Return the outputs of each sample with some modules in float."""
        with self._with(modules) as mixed:
            for sample in samples:
                yield self._outputs(mixed, sample)

    def _outputs(self, model: Any, sample: Sample) -> list[Array]:
        return self._expected.ordered(call_reference(model, sample))

    @contextmanager
    def _with(self, modules: Iterable[str]) -> Iterator[torch.nn.Module]:
        """Exchange modules of the quantized module, temporarily."""
        before = {}
        for path in modules:
            owner, _, name = path.rpartition(".")
            holder = self._quantized.get_submodule(owner)
            before[path] = holder._modules[name]
            holder._modules[name] = copy.copy(self._floats.get_submodule(path))
        try:
            yield self._quantized
        finally:
            for path, module in before.items():
                owner, _, name = path.rpartition(".")
                self._quantized.get_submodule(owner)._modules[name] = module
