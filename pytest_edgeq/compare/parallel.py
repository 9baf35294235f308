"""Measure samples on several cores."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_edgeq.versions import loaded_torch

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from pytest_edgeq.compare.quantized import QuantizedModel
    from pytest_edgeq.compare.samples import Sample


# Limits memory: each worker's interpreters hold a packed copy of the weights. To a target, at a
# round trip of 50 ms, these are 160 samples a second, more than a board computes.
MOST_WORKERS = 8

_Result = TypeVar("_Result")
_Worker = TypeVar("_Worker")
_Sample = TypeVar("_Sample")


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Limit torch's operators to a number of threads; of no effect where torch is not loaded."""
    torch = loaded_torch()
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(min(count, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def on_one_thread() -> contextlib.AbstractContextManager[None]:
    """Run torch's operators on one thread: the last bits of a sum depend on their number."""
    return torch_threads(1)


class InFlight:
    """Number of samples in flight, and the semaphore of the cores that they share."""

    def __init__(self, threads: int, *, is_remote: bool) -> None:
        self.workers = MOST_WORKERS if is_remote else min(threads, MOST_WORKERS)
        self.cores: contextlib.AbstractContextManager[object] = (
            threading.BoundedSemaphore(threads) if is_remote else contextlib.nullcontext()
        )


def begin(
    samples: Iterator[Sample],
    quantized: QuantizedModel,
    threads: int,
    update: Callable[[Sample], object],
) -> bool:
    """Measure the first sample, or all if they change a state; return whether some are left."""
    before = state_of(quantized) if threads > 1 else None
    for sample in itertools.islice(samples, 1 if threads > 1 else None):
        update(sample)
        del sample  # before the next one is made
    if threads > 1 and (before is None or before != state_of(quantized)):
        for sample in samples:
            update(sample)
        return False
    return threads > 1


def in_order(
    items: Iterator[_Sample],
    make: Callable[[], _Worker],
    measure: Callable[[_Worker, _Sample], _Result],
    count: int,
) -> Iterator[_Result]:
    """Measure items in several threads, and yield the results in order."""
    free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    pending: deque[Future[_Result]] = deque()
    n_workers = 0

    def work(worker: _Worker, item: _Sample) -> _Result:
        try:
            return measure(worker, item)
        finally:
            free.put(worker)

    pool, waits = torch_pool(count), True
    try:
        while True:
            try:
                item = next(items)
            except StopIteration:
                break
            except Exception:
                for each in pending:
                    each.result()  # raises, if an earlier item failed
                raise
            if free.empty() and n_workers < count:
                free.put(make())
                n_workers += 1
            pending.append(pool.submit(work, free.get(), item))
            while pending and (pending[0].done() or len(pending) > count):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except KeyboardInterrupt:
        waits = False  # as a target may hang
        raise
    finally:
        pool.shutdown(wait=waits, cancel_futures=not waits)


def torch_pool(count: int) -> ThreadPoolExecutor:
    """Return a pool in which torch, where it is loaded, runs each operator on one thread."""
    from concurrent.futures import ThreadPoolExecutor

    torch = loaded_torch()
    if torch is None:
        return ThreadPoolExecutor(count)
    return ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))


def state_of(quantized: QuantizedModel) -> object:
    """
    Return a model's state identity; None if the order of samples may matter.

    It does not matter if no forward changes a buffer or an attribute of a module.
    """
    from pytest_edgeq.compare.reference import torch_module

    edges = [edge for edge in (quantized.edge, quantized.float_edge) if edge is not None]
    owner = torch_module(quantized.float_model)
    if owner is None or any(edge.graph.is_stateful for edge in edges):
        return None
    state: list[Any] = []
    for module in owner.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return None
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers"):
                # Tensors that were made in inference mode do not count their changes.
                tensors = ((t, t is None or t.is_inference()) for t in value.values())
                state.append(
                    [(id(t), None if uncounted else t._version) for t, uncounted in tensors]
                )
            else:
                state.append((name, _identity(value)))
    return state


_PLAIN = (bool, int, float, str)


def _identity(value: object) -> object:
    # torch.export replaces tuples and lists, such as a kernel's size, by equal copies.
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list)) and all(isinstance(each, _PLAIN) for each in value):
        return list(value)
    size = len(value) if isinstance(value, (list, dict, set)) else None
    return id(value), size
