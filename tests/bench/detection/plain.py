"""Run a file as people do without the plugin: a signature runner, inputs quantized by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from ai_edge_litert.interpreter import Interpreter, OpResolverType

Array = npt.NDArray[Any]
Run = Callable[[Mapping[str, Array]], Mapping[str, Array]]


class Plain:
    """A file on the builtin kernels with every tensor kept, or on the default ones."""

    def __init__(self, content: bytes, *, keep: bool = False, run: Run | None = None) -> None:
        resolver = (
            OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES if keep else OpResolverType.BUILTIN
        )
        self._interpreter = Interpreter(
            model_content=content,
            num_threads=1,
            experimental_op_resolver_type=resolver,
            experimental_preserve_all_tensors=keep,
        )
        self._interpreter.allocate_tensors()
        self._runner = self._interpreter.get_signature_runner()
        self._run: Run = (lambda inputs: self._runner(**inputs)) if run is None else run
        self._inputs = self._runner.get_input_details()
        self._outputs = self._runner.get_output_details()

    def codes(self, sample: Sequence[torch.Tensor]) -> dict[str, Array]:
        """Give the outputs as the file has them, by name."""
        inputs = {
            name: _quantized(sample[int(name.rpartition("_")[2])].numpy(), detail)
            for name, detail in self._inputs.items()
        }
        return dict(self._run(inputs))

    def outputs(self, sample: Sequence[torch.Tensor]) -> list[Array]:
        """Give the outputs in float, in the order that their names tell."""
        codes = self.codes(sample)
        names = sorted(codes, key=lambda name: int(name.rpartition("_")[2]))
        return [_dequantized(codes[name], self._outputs[name]) for name in names]

    def scales(self) -> list[float]:
        """The outputs' scales in that order; 0 of a float one."""
        names = sorted(self._outputs, key=lambda name: int(name.rpartition("_")[2]))
        return [float(self._outputs[name]["quantization"][0]) for name in names]

    def tensor(self, index: int) -> Array:
        """A tensor as the last run left it."""
        value: Array = self._interpreter.get_tensor(index)
        return value


def _quantized(value: Array, detail: Mapping[str, Any]) -> Array:
    dtype = np.dtype(detail["dtype"])
    scale, zero_point = detail["quantization"]
    if not np.issubdtype(dtype, np.integer) or scale == 0:
        return value.astype(dtype)
    limits = np.iinfo(dtype)
    codes = np.round(value / np.float32(scale)) + zero_point
    clipped: Array = np.clip(codes, limits.min, limits.max).astype(dtype)
    return clipped


def _dequantized(codes: Array, detail: Mapping[str, Any]) -> Array:
    scale, zero_point = detail["quantization"]
    if not np.issubdtype(codes.dtype, np.integer) or scale == 0:
        return codes
    values: Array = (codes.astype(np.float32) - zero_point) * np.float32(scale)
    return values


def same_codes(
    sound: bytes,
    other: bytes,
    tensors: Sequence[int],
    samples: Sequence[Sequence[torch.Tensor]],
    *,
    others: Sequence[int] | None = None,
) -> bool:
    """Whether every code of these tensors is equal in two files on every sample."""
    first, second = Plain(sound, keep=True), Plain(other, keep=True)
    for sample in samples:
        first.codes(sample)
        second.codes(sample)
        for index, twin in zip(tensors, tensors if others is None else others, strict=True):
            one, two = first.tensor(index), second.tensor(twin)
            same = one.dtype == two.dtype and one.shape == two.shape
            if not same or one.tobytes() != two.tobytes():
                return False
    return True
