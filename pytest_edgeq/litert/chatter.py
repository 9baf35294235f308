"""Suppress the libraries' messages that users cannot act on."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator

# Loggers whose messages no user can act on, and which would fill the captured log of every test
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
    Suppress the libraries' own messages, also for suites that turn warnings into errors.

    torch 2.13 and litert-torch 0.10 warn on each conversion (`isinstance(treespec, LeafSpec)` is
    deprecated) and on import (torchao's `KernelPreference`); no user can act on it.
    """
    progress = os.environ.get("LITERT_TORCH_SHOW_PROGRESS")
    os.environ.setdefault("LITERT_TORCH_SHOW_PROGRESS", "n")
    # litert-torch 0.10 warns through logging.warning, which adds a handler to a bare root logger.
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
