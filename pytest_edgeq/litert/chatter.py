"""Keep what the libraries say to nobody away from tests."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator

# Loggers that say nothing that a user could act on, and would fill the captured log of every test
# that fails: torch 2.13's structured trace (hundreds of empty DEBUG records an export) and its
# export ("always_classified is unsupported" for each failure); torchao 0.18 on extensions for GPUs
# that it could not load, and torch on torchao's enums.
_CHATTER = (
    "torch.__trace",
    "torch.export._trace",
    "torchao",
    "torchao.kernel.intmm",
    "torch.utils._pytree",
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """
    Keep the libraries' own chatter away from tests, and from suites that make warnings errors.

    torch 2.13 and litert-torch 0.10 warn on each conversion (`isinstance(treespec, LeafSpec)` is
    deprecated) and on import (torchao's `KernelPreference`); nobody outside can act on it.
    """
    progress = os.environ.get("LITERT_TORCH_SHOW_PROGRESS")
    os.environ.setdefault("LITERT_TORCH_SHOW_PROGRESS", "n")
    # litert-torch 0.10 warns through logging.warning, which gives a bare root logger a handler.
    root = logging.getLogger()
    handlers = list(root.handlers)
    loggers = [logging.getLogger(name) for name in _CHATTER]
    disabled = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, before in zip(loggers, disabled, strict=True):
            logger.disabled = before
        for handler in [handler for handler in root.handlers if handler not in handlers]:
            root.removeHandler(handler)
        if progress is None:
            os.environ.pop("LITERT_TORCH_SHOW_PROGRESS", None)
