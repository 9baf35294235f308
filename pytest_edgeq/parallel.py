"""Samples on several cores: what may be measured at the same time, and how."""

from __future__ import annotations

import contextlib
import os
import queue
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pytest_edgeq.quantized import QuantizedModel

__all__ = [
    "MOST_WORKERS",
    "Beside",
    "available_cores",
    "in_order",
    "on_one_thread",
    "run_together",
    "state_of",
    "torch_threads",
]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True

MOST_WORKERS = 8
"""Each has interpreters of its own, which hold the weights as their kernels want them."""

_Result = TypeVar("_Result")
_Worker = TypeVar("_Worker")
_Sample = TypeVar("_Sample")


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run torch's operators on so many threads at most."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(min(count, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def on_one_thread() -> contextlib.AbstractContextManager[None]:
    """
    Run torch's operators on one thread.

    How a sum is split over threads shows in its last bits, and so would the number of cores in the
    figures; samples use the cores instead.
    """
    return torch_threads(1)


class Beside:
    """Runs one call at a time beside this thread, on another core."""

    def __init__(self) -> None:
        import torch

        self._pool = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))

    def start(self, call: Callable[[], _Result]) -> Callable[[], _Result]:
        """Begin a call, and return what waits for its result, or raises what it raised."""
        return self._pool.submit(call).result

    def close(self) -> None:
        """Wait for the last call, and end the thread."""
        self._pool.shutdown()


def run_together(
    samples: Iterator[tuple[int, _Sample]],
    make: Callable[[], _Worker],
    measure: Callable[[_Worker, int, _Sample], None],
    count: int,
) -> list[_Worker]:
    """
    Measure samples in several threads, as many at a time as there are workers.

    Args:
        samples: With their indices, in order; read in this thread, one ahead of the workers.
        make: Makes a worker, when there is a sample that no other one is free for.
        measure: Measures one sample by one worker.
        count: How many workers there may be.

    Returns:
        The workers.

    Raises:
        Exception: What `measure` raised for the first sample that failed, whatever thread it was.
    """
    import torch

    free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    workers: list[_Worker] = []
    errors: list[tuple[int, BaseException]] = []

    def work(worker: _Worker, index: int, sample: _Sample) -> None:
        try:
            measure(worker, index, sample)
        except BaseException as error:  # raised in the main thread
            errors.append((index, error))
        finally:
            free.put(worker)

    with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for index, sample in samples:
            if free.empty() and len(workers) < count:
                workers.append(make())
                free.put(workers[-1])
            pool.submit(work, free.get(), index, sample)
            if errors:
                break
    if errors:
        raise min(errors, key=lambda each: each[0])[1]
    return workers


def in_order(
    items: Iterator[_Sample],
    make: Callable[[], _Worker],
    measure: Callable[[_Worker, _Sample], _Result],
    count: int,
) -> Iterator[_Result]:
    """
    Give the results of items in their order, measured in several threads.

    Args:
        items: Read in this thread, at most as many ahead as there are workers.
        make: Makes a worker, when there is an item that no other one is free for.
        measure: Measures one item by one worker.
        count: How many workers there may be.

    Raises:
        Exception: What `measure` raised, when it is that item's turn.
    """
    import torch

    free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    pending: deque[Future[_Result]] = deque()
    made = 0

    def work(item: _Sample) -> _Result:
        worker = free.get()
        try:
            return measure(worker, item)
        finally:
            free.put(worker)

    with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for item in items:
            if made < count:
                free.put(make())
                made += 1
            pending.append(pool.submit(work, item))
            if len(pending) == count:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def state_of(quantized: QuantizedModel) -> object:
    """
    Return what identifies the state of a model's reference and files; None where samples depend.

    Samples may be measured in any order where no forward changes anything: no buffer, no attribute
    of a module. A file that keeps state, a reference that is no torch module, and hooks on its
    modules are taken for what they may be.
    """
    from pytest_edgeq.reference import torch_module

    edges = [edge for edge in (quantized.edge, quantized.float_edge) if edge is not None]
    owner = torch_module(quantized.float_model)
    if owner is None or any(edge.is_stateful for edge in edges):
        return None
    told: list[Any] = []
    for module in owner.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return None
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers"):
                tensors = value.values()
                told.append([(id(t), None if t is None else t._version) for t in tensors])
            else:
                size = len(value) if isinstance(value, (list, dict, set)) else None
                told.append((name, id(value), size))
    return told
