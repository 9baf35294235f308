"""Samples on several cores: what may be measured at the same time, and how."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from pytest_edgeq.compare.quantized import QuantizedModel
    from pytest_edgeq.compare.samples import Sample


MOST_WORKERS = 8
"""Each has interpreters of its own, which hold the weights as their kernels want them."""

MOST_AHEAD = 8
"""
Samples that are under way to a target, so that its latency does not count.

At 50 ms to and fro that is 160 samples a second, more than a board computes.
"""

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


class AtOnce:
    """How many samples are under way, and the cores that those in this process share."""

    def __init__(self, threads: int, *, is_far: bool) -> None:
        self.workers = min(max(threads, MOST_AHEAD) if is_far else threads, MOST_WORKERS)
        self.cores: contextlib.AbstractContextManager[object] = (
            threading.BoundedSemaphore(threads) if is_far else contextlib.nullcontext()
        )


class Beside:
    """Runs one call at a time beside this thread, on another core."""

    def __init__(self) -> None:
        self._pool = _threads(1)

    def start(self, call: Callable[[], _Result]) -> Callable[[], _Result]:
        """Begin a call, and return what waits for its result, or raises what it raised."""
        return self._pool.submit(call).result

    def close(self) -> None:
        """Wait for the last call, and end the thread."""
        self._pool.shutdown()


def begin(
    samples: Iterator[Sample],
    quantized: QuantizedModel,
    threads: int,
    update: Callable[[Sample], object],
) -> bool:
    """
    Measure the first sample, and all where each may depend on the one before.

    Where a sample changes the reference's state, so does each.

    Returns:
        Whether there are samples left that may be measured together.
    """
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
    """
    Measure items in several threads, and give the results in the order of the items.

    Raises:
        Exception: What reading or measuring raised for the first item that failed.
    """
    free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    pending: deque[Future[_Result]] = deque()
    made = 0

    def work(worker: _Worker, item: _Sample) -> _Result:
        try:
            return measure(worker, item)
        finally:
            free.put(worker)

    with waiting_threads(count) as pool:
        while True:
            try:
                item = next(items)
            except StopIteration:
                break
            except Exception:
                for each in pending:
                    each.result()  # raises, if an earlier item failed
                raise
            if free.empty() and made < count:
                free.put(make())
                made += 1
            pending.append(pool.submit(work, free.get(), item))
            while pending and (pending[0].done() or len(pending) > count):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


@contextlib.contextmanager
def waiting_threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """
    Give a pool of so many threads, and wait for them; Ctrl-C waits for none.

    A thread may wait for a target that hangs, which is ended with the session.
    """
    pool = _threads(count)
    waits = True
    try:
        yield pool
    except KeyboardInterrupt:
        waits = False
        raise
    finally:
        pool.shutdown(wait=waits, cancel_futures=not waits)


def _threads(count: int) -> ThreadPoolExecutor:
    """Make a pool in which torch runs each operator on one thread."""
    from concurrent.futures import ThreadPoolExecutor

    import torch

    return ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))


def state_of(quantized: QuantizedModel) -> object:
    """
    Return what identifies the state of a model's reference and files; None where samples depend.

    Samples may be measured in any order where no forward changes anything: no buffer, no attribute
    of a module. A file that keeps state, a reference that is no torch module, and hooks on its
    modules are taken for what they may be.
    """
    from pytest_edgeq.compare.reference import torch_module

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
                told.append((name, _identity(value)))
    return told


_PLAIN = (bool, int, float, str)


def _identity(value: object) -> object:
    # torch.export puts equal copies in place of tuples and lists, such as a kernel's size.
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list)) and all(isinstance(each, _PLAIN) for each in value):
        return list(value)
    size = len(value) if isinstance(value, (list, dict, set)) else None
    return id(value), size
