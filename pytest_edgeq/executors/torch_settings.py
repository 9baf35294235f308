"""Settings of torch by which a process may get other figures than the client."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class TorchSettings(NamedTuple):
    """
    Settings of a process.

    Attributes:
        dtype: Of tensors that are made without one.
        precision: Of float32 products, by kind of operator, as oneDNN has them.
        uses_mkldnn: Whether oneDNN is used.
        is_deterministic: Whether only deterministic kernels are.
        flushes_denormal: Whether numbers below the normal ones are zero.
    """

    dtype: torch.dtype
    precision: tuple[tuple[str, str], ...]
    uses_mkldnn: bool
    is_deterministic: bool
    flushes_denormal: bool

    @classmethod
    def current(cls) -> TorchSettings:
        """Return those of this process, and of this thread."""
        mkldnn: Any = torch.backends.mkldnn
        return cls(
            torch.get_default_dtype(),
            tuple((kind, getattr(mkldnn, kind).fp32_precision) for kind in _kinds()),
            bool(mkldnn.enabled),
            torch.are_deterministic_algorithms_enabled(),
            not sys.float_info.min / 2,
        )

    def apply(self) -> None:
        """Make them those of this process, and of this thread."""
        mkldnn: Any = torch.backends.mkldnn
        torch.set_default_dtype(self.dtype)
        for kind, precision in self.precision:
            if getattr(mkldnn, kind).fp32_precision != precision:
                getattr(mkldnn, kind).fp32_precision = precision
        if mkldnn.enabled != self.uses_mkldnn:
            mkldnn.set_flags(self.uses_mkldnn)
        torch.use_deterministic_algorithms(self.is_deterministic)
        torch.set_flush_denormal(self.flushes_denormal)


def _kinds() -> tuple[str, ...]:
    """Return the kinds of operators with a precision of their own, which torch 2.9 has added."""
    return tuple(each for each in ("matmul", "conv", "rnn") if hasattr(torch.backends.mkldnn, each))


@contextlib.contextmanager
def applied(settings: TorchSettings) -> Iterator[None]:
    """Use the client's settings in a block."""
    before = TorchSettings.current()
    if before == settings:
        yield
        return
    settings.apply()
    try:
        yield
    finally:
        before.apply()
