"""
Files that run on a target's GPU, by LiteRT's GPU engine.

The engine answers even where it has failed: a shader that does not compile, ops left to the CPU,
float32 in place of float16. It says so on stderr or not at all, so its text is read here, and a
product that overflows float16 is computed before the first file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from pytest_edgeq.errors import CrashedError, UnrunnableError
from pytest_edgeq.names import GPU_KERNELS
from pytest_edgeq.runtimes.engines import Opening
from pytest_edgeq.runtimes.gpu_refusals import (
    NO_ADAPTER,
    NO_OP,
    NO_SHADER,
    is_shader_error,
    said,
)
from pytest_edgeq.runtimes.workers.link import LinkError
from pytest_edgeq.runtimes.workers.remote_engine import TargetEngine
from pytest_edgeq.runtimes.workers.target import Target, link_error
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.writing import one_op

_ADAPTER: Final = re.compile(r"Selected adapter: (.+)")

_SHARED: Final = re.compile(
    r"(\d+|No) operations will run on the GPU, and (?:the remaining|all) (\d+) op"
)

_FACTOR: Final = 300.0
"""Its square is beyond the greatest float16, 65,504."""


class GpuEngine(TargetEngine):
    """
    A file on a GPU.

    Raises:
        RuntimeError: The engine refuses the file, leaves all of it to the CPU, or writes a shader
            that does not compile; the text ends with what the engine printed.
        UnrunnableError: There is no GPU, it does not compute in the precision of the kernels, or
            the worker has ended.
    """

    def __init__(
        self,
        opening: Opening,
        target: Target,
        *,
        is_trial: bool = False,
        is_proof: bool = False,
    ) -> None:
        self._is_proof = is_proof
        if not (is_trial or is_proof):
            prove_gpu(target, opening.kernels)
        super().__init__(opening, target, is_trial=is_trial)
        assert self._file is not None, "it was opened just now"
        printed = self._file.printed
        _check(printed)
        self.printed = printed
        self.n_on_cpu = sum(on_cpu for _, on_cpu in shared_ops(printed))
        if self.n_on_cpu >= len(opening.graph.ops):
            raise RuntimeError(f"{NO_OP}\n{printed}")
        if (found := _ADAPTER.search(printed)) is None:  # it may run on the CPU without a word
            raise RuntimeError(f"{NO_ADAPTER}\n{printed}")
        target.adapter = found[1].strip()

    def _ask(
        self, step: str, head: Any = None, parts: Sequence[Any] = (), **more: Any
    ) -> list[Any]:
        answer = super()._ask(step, head, parts, **more)
        if step == "run":
            _check(answer.pop().decode(errors="replace"))
        return answer

    def _trial(self, opening: Opening) -> GpuEngine:
        return GpuEngine(opening, self._target, is_trial=True)

    def _failure(self, step: str, error: LinkError, find_op: Callable[[], str]) -> UnrunnableError:
        op = find_op() if error.kind == "lost" and not self._is_proof else ""
        texts = _PROOF_TEXTS if self._is_proof else _TEXTS
        target, runtime = self._target, self._opening.runtime
        refused = link_error(runtime, target.command, error, target.seconds, op, texts)
        if self._is_proof and error.kind == "time":
            target.hung = refused.text
        return refused


def shared_ops(printed: str) -> list[tuple[int, int]]:
    """Return the numbers of ops on the GPU and on the CPU, of each subgraph that is split."""
    return [(0 if gpu == "No" else int(gpu), int(cpu)) for gpu, cpu in _SHARED.findall(printed)]


def prove_gpu(target: Target, kernels: str) -> None:
    """
    Start the GPU of a target, and see that its kernels have their precision, once.

    An adapter without float16 computes in float32, and nothing says so: a product that overflows
    float16 tells.

    Raises:
        UnrunnableError: There is no GPU, its driver crashes, or it has another precision.
    """
    if kernels in target.proven:
        return
    runtime = kernels if target.name in GPU_KERNELS else f"{target.name}:{kernels}"
    if target.hung:
        raise CrashedError(runtime, target.hung)
    graph = OpGraph.read(one_op("MUL", "x", "y"))
    [signature] = graph.signatures
    factor = np.array([_FACTOR], np.float32)
    opening = Opening(
        bytes(graph.buffer), graph, signature, runtime, 1, target=target, kernels=kernels
    )
    try:
        [product] = GpuEngine(opening, target, is_proof=True).run({"x": factor, "y": factor})
    except UnrunnableError:
        raise
    except RuntimeError as error:
        raise UnrunnableError(runtime, _no_gpu(str(error))) from None
    is_float32 = bool(product[0] == np.float32(_FACTOR**2))
    if is_float32 is (kernels == "gpu"):
        raise UnrunnableError(runtime, _other_precision(runtime, target.adapter, product[0]))
    target.proven.add(kernels)


def _check(printed: str) -> None:
    """Raise a RuntimeError if a shader did not compile: the engine answers all the same."""
    if is_shader_error(printed):
        raise RuntimeError(f"{NO_SHADER}\n{printed}")


_NO_ENGINE: Final = re.compile(
    r"GPU accelerator could not be loaded|^(ImportError|ModuleNotFoundError|AttributeError): "
)

_NO_LIBRARY: Final = "Failed loading library associated with ICD"

_INSTALL: Final = (
    "apt-get install mesa-vulkan-drivers, on Debian 13, Ubuntu 24.04 or later, whose lavapipe "
    "needs no graphics card; or edgeq target gpu DIR, which makes a target with it and changes "
    "nothing else"
)


def _no_gpu(error: str) -> str:
    """Describe why there is no GPU, from what the engine said, and the ways to one."""
    lines = ["finds no GPU: expected a Vulkan adapter, got none"]
    if _NO_ENGINE.search(error):
        lines += [
            "cause: ai-edge-litert there is without its GPU engine, libLiteRtWebGpuAccelerator.so",
            "fix: install a release of ai-edge-litert that has it, 2.3 or later, for Linux on "
            "x86-64 or 64-bit ARM",
        ]
    elif _NO_LIBRARY in error:
        lines += [
            "cause: the library of a Vulkan driver cannot be loaded",
            f"fix: install the driver again, or take its JSON out of VK_DRIVER_FILES; {_INSTALL}",
        ]
    else:
        lines += [
            "cause: the machine has no Vulkan driver, VK_DRIVER_FILES names none, or it is too old "
            "(Mesa before 23)",
            f"fix: {_INSTALL}",
        ]
    return "\n".join((*lines, *said(error)))


def _other_precision(runtime: str, adapter: str, product: Any) -> str:
    if not runtime.endswith("gpu"):
        return (
            f"does not compute in float32: expected {_FACTOR**2:g} of {_FACTOR:g} · {_FACTOR:g}, "
            f"got {product:g}\n"
            f"cause: LiteRT's GPU engine computes in float16 there: {adapter}\n"
            f"fix: use another driver: {_INSTALL}"
        )
    return (
        f"does not compute in float16: expected {_FACTOR:g} · {_FACTOR:g} to overflow, got "
        f"{product:g}\n"
        "cause: the adapter has no float16, so LiteRT computes in float32 without a word; phones "
        f"compute in float16: {adapter}\n"
        f"fix: name {runtime}_f32, which is float32 on purpose; or edgeq target gpu DIR, whose "
        "Mesa computes in float16"
    )


_AGAIN: Final = "run the test again by itself"

_TEXTS: Final = {
    "lost": (
        "lost its process: expected an answer, got {what}",
        "somebody ended the process, or the machine ran out of memory; it was tried once more "
        "where no state was lost",
        _AGAIN,
    ),
    "crash": (
        "lost its process: expected an answer, got {what}",
        "LiteRT's GPU engine or the driver crashed on this file, twice",
        "leave the op out, or run the file on the CPU (runtime='{name}'); report it with the file "
        "to LiteRT's authors",
    ),
    "time": (
        "did not answer: expected an answer in time, got {what}",
        "the file takes longer than that on this GPU, or the engine or its driver hangs",
        "--edgeq-target-timeout={more} gives it more time; where that does not help, run the file "
        "on the CPU (runtime='{name}')",
    ),
}
"""Of a process of the GPU, in place of those of any target."""

_PROOF_TEXTS: Final = {
    "lost": (
        "cannot start its GPU: expected an adapter that computes, got {what}",
        "somebody ended the process, or the machine ran out of memory, twice",
        _AGAIN,
    ),
    "crash": (
        "cannot start its GPU: expected an adapter that computes, got {what}",
        "the Vulkan driver or LiteRT's GPU engine crashed before a file was opened, twice",
        f"use another driver: {_INSTALL}",
    ),
    "time": (
        "cannot start its GPU: expected an adapter that computes, got {what}",
        "the Vulkan driver or LiteRT's GPU engine hangs before a file is opened",
        f"--edgeq-target-timeout={{more}} gives it more time; or use another driver: {_INSTALL}",
    ),
}
"""Of a process that computes one product before the first file."""
