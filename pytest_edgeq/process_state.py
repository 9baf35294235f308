"""State of the process during a conversion: random number generators, the garbage collector."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

__all__ = ["frozen_heap", "paused_collector", "seeded"]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Fix the random number generators of torch, numpy and Python for a while."""
    import torch

    python, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)


_is_frozen = False
"""Whether `frozen_heap` is in effect."""


@contextmanager
def frozen_heap() -> Iterator[None]:
    """
    Let the garbage collector pass over the objects that exist already.

    The libraries hold millions of them, and a conversion makes enough new ones to have all of them
    looked at several times: 4 to 9 % of its time. Garbage that the conversion leaves is collected.
    """
    global _is_frozen
    if gc.get_freeze_count():
        yield  # what somebody else froze must stay so
        return
    gc.freeze()
    _is_frozen = True
    try:
        yield
    finally:
        _is_frozen = False
        gc.unfreeze()


@contextmanager
def paused_collector() -> Iterator[None]:
    """
    Turn the garbage collector off while libraries are imported.

    Their objects stay alive, and scanning them repeatedly takes a third of the import's time.
    Inside `frozen_heap` they are frozen afterwards.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if _is_frozen:
            gc.freeze()
