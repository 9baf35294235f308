"""
Files that run on a target's GPU, by LiteRT's GPU engine.

The engine answers even where it has failed: a shader that does not compile, ops left to the CPU,
float32 in place of float16. It says so on stderr or not at all, so its text is read here, and a
product that overflows float16 is computed before the first file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from pytest_edgeq.errors import CrashedError, UnrunnableError
from pytest_edgeq.runtimes.engines import Opening
from pytest_edgeq.runtimes.gpu_refusals import NO_SHADER, is_shader_error, said
from pytest_edgeq.runtimes.workers.remote_engine import TargetEngine
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
    """
    A file on a GPU.

    Raises:
        RuntimeError: The engine refuses the file, leaves all of it to the CPU, or writes a shader
            that does not compile; the text ends with what the engine printed.
        UnrunnableError: There is no GPU, it does not compute in the precision of the kernels, or
            the worker has ended.
    """

    def __init__(self, opening: Opening, target: Target, *, is_trial: bool = False) -> None:
        if not is_trial:
            prove_gpu(target, opening.kernels, opening.runtime)
        super().__init__(opening, target, is_trial=is_trial)
        assert self._file is not None, "it was opened just now"
        printed = self._file.printed
        if (found := _ADAPTER.search(printed)) is not None:
            target.adapter = found[1].strip()
        if not target.adapter:
            raise RuntimeError(f"no adapter\n{printed}")
        _check(printed)
        self.printed = printed
        self.n_on_cpu = sum(on_cpu for _, on_cpu in shared_ops(printed))
        if self.n_on_cpu >= len(opening.graph.ops):
            raise RuntimeError(f"the GPU takes no op of the file\n{printed}")

    def _ask(
        self, step: str, head: Any = None, parts: Sequence[Any] = (), **more: Any
    ) -> list[Any]:
        answer = super()._ask(step, head, parts, **more)
        if step == "run":
            _check(answer.pop().decode(errors="replace"))
        return answer

    def _trial(self, opening: Opening) -> GpuEngine:
        return GpuEngine(opening, self._target, is_trial=True)


def shared_ops(printed: str) -> list[tuple[int, int]]:
    """Return the numbers of ops on the GPU and on the CPU, of each subgraph that is split."""
    return [(0 if gpu == "No" else int(gpu), int(cpu)) for gpu, cpu in _SHARED.findall(printed)]


def prove_gpu(target: Target, kernels: str, runtime: str = "") -> None:
    """
    Start the GPU of a target, and see that its kernels have their precision, once.

    An adapter without float16 computes in float32, and nothing says so: a product that overflows
    float16 tells.

    Raises:
        UnrunnableError: There is no GPU, its driver crashes, or it has another precision.
    """
    if kernels in target.proven:
        return
    runtime = runtime or kernels
    graph = OpGraph.read(one_op("MUL", "x", "y"))
    [signature] = graph.signatures
    factor = np.array([_FACTOR], np.float32)
    opening = Opening(
        bytes(graph.buffer), graph, signature, runtime, 1, target=target, kernels=kernels
    )
    try:
        [product] = GpuEngine(opening, target, is_trial=True).run({"x": factor, "y": factor})
    except UnrunnableError as error:
        if not isinstance(error, CrashedError):
            raise
        first, *lines = error.text.splitlines()
        text = "\n".join((f"cannot start its GPU: it {first}", *lines))
        raise CrashedError(runtime, text) from None
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


_NO_ENGINE = "GPU accelerator could not be loaded"


def _no_gpu(error: str) -> str:
    """Describe why there is no GPU, from what the engine said, and the ways to one."""
    lines = ["finds no GPU: expected a Vulkan adapter, got none"]
    if _NO_ENGINE in error:
        lines += [
            "cause: ai-edge-litert there is without its GPU engine, libLiteRtWebGpuAccelerator.so",
            "fix: install a release of ai-edge-litert that has it, 2.3 or later, for Linux on "
            "x86-64 or 64-bit ARM",
        ]
    else:
        lines += [
            "cause: the machine has no Vulkan driver, or one that is too old (Mesa before 23)",
            "fix: apt-get install mesa-vulkan-drivers, on Debian 13, Ubuntu 24.04 or later, whose "
            "lavapipe needs no graphics card; or edgeq target gpu DIR, which makes a target with "
            "it and changes nothing else",
        ]
    return "\n".join((*lines, *said(error)))


def _other_precision(runtime: str, adapter: str, product: Any) -> str:
    text = (
        f"does not compute in its precision: expected {_FACTOR:g} · {_FACTOR:g} to overflow "
        f"float16, got {product:g}\n"
        f"cause: the adapter has no float16, so LiteRT computes in float32 without a word; phones "
        f"compute in float16: {adapter}\n"
    )
    if not runtime.endswith("gpu"):
        text = (
            f"does not compute in its precision: expected {_FACTOR**2:g} of {_FACTOR:g} · "
            f"{_FACTOR:g}, got {product:g}\ncause: the adapter computes in float16: {adapter}\n"
        )
    return (
        f"{text}fix: name {runtime}_f32, which is float32 on purpose; or edgeq target gpu DIR, "
        "whose Mesa computes in float16"
    )
