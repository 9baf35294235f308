"""
Run files on a GPU, by LiteRT's GPU engine.

The engine returns outputs even if a shader does not compile, if ops run on the CPU, or if it
computes in float32 instead of float16. It logs this to stderr or not at all, so its log is read
here, and before the first file a product is computed that overflows float16.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from pytest_edgeq.errors import CrashedError, UnrunnableError
from pytest_edgeq.names import GPU_KERNELS
from pytest_edgeq.runtimes.engines import Opening, check_outputs_written, described
from pytest_edgeq.runtimes.gpu_refusals import (
    NO_ADAPTER,
    NO_OP,
    check_shaders,
    said,
)
from pytest_edgeq.runtimes.workers.link import Link, LinkError
from pytest_edgeq.runtimes.workers.remote_engine import RemoteFile, TargetEngine
from pytest_edgeq.runtimes.workers.target import Target
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.writing import one_op

_ADAPTER: Final = re.compile(r"Selected adapter: (.+)")

_SHARED: Final = re.compile(
    r"(\d+|No) operations will run on the GPU, and (?:the remaining|all) (\d+) op"
)

_FACTOR: Final = 300.0
"""Its square is beyond the greatest float16, 65,504."""


class GpuEngine(TargetEngine):
    """A file on a GPU; the texts of its RuntimeErrors end with what the engine printed."""

    def __init__(self, opening: Opening, target: Target, *, is_proof: bool = False) -> None:
        self._is_proof, self._texts = is_proof, _TEXTS
        if not is_proof:
            prove_gpu(target, opening.kernels)
        check_outputs_written(opening.graph, opening.signature)
        super().__init__(opening, target)
        assert self._file is not None, "it was opened just now"
        self.printed = printed = self._file.printed
        check_shaders(printed)
        if sum(on_cpu for _, on_cpu in shared_ops(printed)) >= len(opening.graph.ops):
            raise RuntimeError(f"{NO_OP}\n{printed}")
        if (found := _ADAPTER.search(printed)) is None:  # it may run on the CPU without a message
            raise RuntimeError(f"{NO_ADAPTER}\n{printed}")
        target.adapter = found[1].strip()

    def _ask(
        self, step: str, head: Any = None, parts: Sequence[Any] = (), **more: Any
    ) -> list[Any]:
        if step != "run":
            return super()._ask(step, head, parts, **more)
        *answer, printed = super()._ask(step, {**head, "printed": True}, parts, **more)
        check_shaders(printed)
        return answer

    def _open_in(self, link: Link, file: RemoteFile, **more: Any) -> None:
        """Compile a file; what the engine does not support runs on the CPU, as in most apps."""
        more = described(self._opening.signature, self._opening.graph) | {"printed": True}
        try:
            super()._open_in(link, file, is_partly=False, **more)
        except RuntimeError as error:
            # Asked for both at once, it also runs files on the CPU where there is no GPU.
            if "not accelerated" not in str(error):
                raise
            super()._open_in(link, file, is_partly=True, **more)

    def _failure(self, step: str, error: LinkError, given: Sequence[Any]) -> UnrunnableError:
        if not self._is_proof:
            return super()._failure(step, error, given)
        refused = self._target.failure(self._opening.runtime, error, "", _PROOF_TEXTS)
        if error.kind == "time":
            self._target.hung = refused.text
        return refused


def shared_ops(printed: str) -> list[tuple[int, int]]:
    """Return the numbers of ops on the GPU and on the CPU, of each subgraph that is split."""
    return [(0 if gpu == "No" else int(gpu), int(cpu)) for gpu, cpu in _SHARED.findall(printed)]


def prove_gpu(target: Target, kernels: str) -> None:
    """
    Check that a target has a GPU that computes in the precision of the kernels, once.

    An adapter without float16 computes in float32 without a message. A product that overflows
    float16 shows it.

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
    opening = Opening(graph, signature, runtime, 1, target=target, kernels=kernels)
    try:
        [product] = GpuEngine(opening, target, is_proof=True).run([factor, factor])
    except UnrunnableError:
        raise
    except RuntimeError as error:
        raise UnrunnableError(runtime, _no_gpu(str(error))) from None
    is_float32 = bool(product[0] == np.float32(_FACTOR**2))
    if is_float32 is (kernels == "gpu"):
        raise UnrunnableError(runtime, _other_precision(runtime, target.adapter, product[0]))
    target.proven.add(kernels)


_NO_ENGINE: Final = re.compile(
    r"GPU accelerator could not be loaded|^(ImportError|ModuleNotFoundError|AttributeError): "
)

_INSTALL: Final = (
    "apt-get install mesa-vulkan-drivers, on Ubuntu 24.04, Debian 13 or later: its lavapipe is a "
    "GPU in software and needs no graphics card. On older systems edgeq target gpu DIR makes a "
    "target with it, in a folder"
)


def _no_gpu(error: str) -> str:
    """Describe why there is no GPU, from what the engine printed, and how to get one."""
    lines = ["finds no GPU: expected a Vulkan driver with a GPU, got none"]
    if _NO_ENGINE.search(error):
        lines += [
            "cause: this ai-edge-litert has no GPU engine (libLiteRtWebGpuAccelerator.so)",
            "fix: install ai-edge-litert 2.3 or later, for Linux on x86-64 or 64-bit ARM",
        ]
    else:
        lines += [
            "cause: LiteRT's GPU engine needs Vulkan, a driver interface, and there is no driver, "
            "VK_DRIVER_FILES names none, its library cannot be loaded, or it is too old (Mesa "
            "before 23.2)",
            f"fix: {_INSTALL}",
        ]
    return "\n".join((*lines, *said(error)))


def _other_precision(runtime: str, adapter: str, product: Any) -> str:
    if not runtime.endswith("gpu"):
        return (
            f"does not compute in float32: expected {_FACTOR**2:g} of {_FACTOR:g} · {_FACTOR:g}, "
            f"got {product:g}\n"
            f"cause: LiteRT computes in float16 on this GPU: {adapter}\n"
            f"fix: use another driver: {_INSTALL}"
        )
    return (
        f"does not compute in float16: expected {_FACTOR:g} · {_FACTOR:g} to overflow, got "
        f"{product:g}\n"
        "cause: this GPU has no float16, so LiteRT computes in float32 without a message, and "
        f"phones compute in float16: {adapter}\n"
        f"fix: use the runtime {runtime}_f32 to test in float32; for float16 make a target by "
        "edgeq target gpu DIR"
    )


_AGAIN: Final = "run the test again by itself"

_TEXTS: Final = {
    "lost": (
        "lost its process: expected an answer, got {what}",
        "another program ended the process, or the machine ran out of memory. The run was repeated "
        "once, unless the file keeps state",
        _AGAIN,
    ),
    "crash": (
        "lost its process: expected an answer, got {what}",
        "LiteRT's GPU engine or the driver crashed on this file, twice",
        "write this part of the model with other ops, or run the file on the CPU "
        "(runtime='{name}'); report the file to LiteRT",
    ),
    "time": (
        "did not answer: expected an answer in time, got {what}",
        "the file needs longer than that on this GPU, or the engine or the driver hangs",
        "allow more time by --edgeq-target-timeout={more}; if that does not help, run the file on "
        "the CPU (runtime='{name}')",
    ),
}
"""Texts for a process that runs a file."""

_PROOF_TEXTS: Final = {
    "lost": (
        "cannot start its GPU: expected it to compute one product, got {what}",
        "another program ended the process, or the machine ran out of memory, twice",
        _AGAIN,
    ),
    "crash": (
        "cannot start its GPU: expected it to compute one product, got {what}",
        "the Vulkan driver or LiteRT's GPU engine crashed before a file was opened, twice",
        f"use another driver: {_INSTALL}",
    ),
    "time": (
        "cannot start its GPU: expected it to compute one product, got {what}",
        "the Vulkan driver or LiteRT's GPU engine hangs before a file is opened",
        f"allow more time by --edgeq-target-timeout={{more}}, or use another driver: {_INSTALL}",
    ),
}
"""Texts for a process that computes one product, before the first file."""
