"""A `.tflite` file that runs: graph, op-dtype map and interpreters, made when first needed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.tflite.boundary import decode, encode
from pytest_edgeq.tflite.graph import OpGraph, Signature
from pytest_edgeq.tflite.modules import ModuleTree
from pytest_edgeq.tflite.op_dtypes import OpDtypeMap
from pytest_edgeq.tflite.runtimes import Runner, source_of
from pytest_edgeq.tflite.source import MappedFile, TflitePath

__all__ = ["EdgeFile"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True


class EdgeFile:
    """
    One `.tflite` file and all that is read from it.

    Args:
        source: Path or content.
        modules: The torch model's modules, to name ops after.
        threads: Of its interpreters.

    Raises:
        FileNotFoundError, ValueError, TypeError: As `open_tflite` says.
    """

    def __init__(
        self,
        source: TflitePath | bytes,
        *,
        modules: ModuleTree | None = None,
        threads: int = 1,
    ) -> None:
        self.graph = OpGraph.read(source)
        self.modules = modules
        self.threads = threads
        self._runners: dict[str, Runner] = {}

    @property
    def signature(self) -> Signature:
        """The entry point that is run: the file's first."""
        return self.graph.signatures[0]

    @functools.cached_property
    def op_dtypes(self) -> OpDtypeMap:
        """What each op computes in."""
        return OpDtypeMap(self.graph, self.modules)

    def runner(self, runtime: str) -> Runner:
        """
        The interpreter for a runtime, allocated at the first call.

        Raises:
            ValueError: Unknown runtime.
            RuntimeError: The kernels cannot allocate the file.
        """
        # Also for one made before: it reads on from a file that may have been written anew.
        source = source_of(self.graph)
        if runtime not in self._runners:
            self._runners[runtime] = Runner(
                source,
                self.graph,
                self.signature,
                runtime,
                self.threads,
                self.modules,
            )
        return self._runners[runtime]

    def require_one_signature(self, what: str) -> None:
        """
        Refuse a file of which only one entry point would be looked at.

        Raises:
            ValueError: It has several signatures.
        """
        keys = [signature.key for signature in self.graph.signatures]
        if len(keys) > 1:
            raise ValueError(
                f"{what}: the file has {len(keys)} signatures {keys}, and all but {keys[0]!r} "
                "would pass unseen; give each a file of its own"
            )

    def restart(self) -> None:
        """Let a file that keeps state from run to run start anew."""
        if self._is_stateful:
            self._runners.clear()

    @functools.cached_property
    def _is_stateful(self) -> bool:
        # Asked at each run, and every tensor of the file is looked at to tell.
        return self.graph.is_stateful

    @property
    def path(self) -> Path | None:
        """Where the file lies; None for one held in memory."""
        buffer = self.graph.buffer
        return buffer.path if isinstance(buffer, MappedFile) else None

    def encode(
        self, names: Sequence[str], arrays: Sequence[npt.NDArray[Any]]
    ) -> dict[str, npt.NDArray[Any]]:
        """
        Turn inputs into what the file takes, by the file's names.

        Inputs are matched by name where the file knows the names (as litert-torch writes them:
        `args_0`, … and keywords), else by position.

        Raises:
            ValueError, TypeError: Other inputs, shapes or dtypes than the file takes.
        """
        borders = self.signature.inputs
        given = dict(zip(names, arrays, strict=True))
        known = {border.name for border in borders}
        if known != set(given):
            # Names that agree in part would be matched by position to others' inputs.
            if len(given) != len(borders) or known & set(given):
                raise ValueError(
                    f"the file takes the inputs {[border.name for border in borders]}, "
                    f"got {list(given)}"
                )
            given = dict(zip((border.name for border in borders), arrays, strict=True))
        encoded = {}
        for border in borders:
            value = given[border.name]
            wanted = border.tensor.shape_signature
            if len(wanted) != value.ndim or any(
                expected not in (-1, actual)
                for expected, actual in zip(wanted, value.shape, strict=True)
            ):
                # The interpreter would resize itself to whatever comes, without a word.
                raise ValueError(
                    f"input {border.name!r}: the file expects shape {list(wanted)}, got "
                    f"{list(value.shape)}"
                )
            encoded[border.name] = encode(value, border)
        return encoded

    def run(
        self, names: Sequence[str], arrays: Sequence[npt.NDArray[Any]], runtime: str
    ) -> list[npt.NDArray[Any]]:
        """Codes as the file gives them, in the model's own order."""
        return self.runner(runtime).run(self.encode(names, arrays))

    def decode(self, codes: Sequence[npt.NDArray[Any]]) -> list[np.ndarray[Any, Any]]:
        """Codes to floats, each output by its own parameters."""
        return [
            decode(value, border)
            for value, border in zip(codes, self.signature.outputs, strict=True)
        ]
