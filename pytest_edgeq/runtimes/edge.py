"""A `.tflite` file that runs: graph, op-dtype map and interpreters, made on demand."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.errors import CopyError
from pytest_edgeq.names import nearest, readable
from pytest_edgeq.runtimes.engines import Opening
from pytest_edgeq.runtimes.registry import BUILT_IN, Runtimes
from pytest_edgeq.runtimes.runner import Copied, Runner
from pytest_edgeq.tflite.boundary import decode, encode
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.layout import LayoutArgument, Layouts, fits, mismatch_hint
from pytest_edgeq.tflite.mapped import MappedFile
from pytest_edgeq.tflite.modules import ModulePaths, exported_modules
from pytest_edgeq.tflite.op_dtypes import OpDtypeMap
from pytest_edgeq.tflite.source import TflitePath
from pytest_edgeq.tflite.subgraph import Signature, Subgraph

if TYPE_CHECKING:
    from pytest_edgeq.runtimes.delegation import Delegation


class EdgeFile:
    """One `.tflite` file, or a section of a bundle, with its signature and interpreters."""

    def __init__(
        self,
        source: TflitePath | bytes | OpGraph,
        *,
        section: str | None = None,
        modules: ModulePaths | None = None,
        threads: int = 1,
        layout: LayoutArgument = None,
        runtimes: Runtimes = BUILT_IN,
        foreign: bool = False,
        copied: Copied | None = None,
        one_interpreter: bool = False,
    ) -> None:
        build = runtimes.builder(foreign=foreign)
        try:
            if not isinstance(source, OpGraph):
                source = OpGraph.read(source, build, section)
            self.graph = source
        except ValueError as error:
            if copied is None:
                raise
            raise CopyError(f"{copied.what} cannot be read: {error}") from error
        self.modules = exported_modules(self.graph) if modules is None else modules
        self.threads = threads
        self.runtimes = runtimes
        self.foreign = foreign
        self._copied = copied
        self.layout = layout
        self.layouts = Layouts(layout, self.graph.signatures)
        self.key: str | None = None  # the signature chosen of several
        self._views: dict[str, EdgeFile] = {}
        self._runners: dict[tuple[str, bool], Runner] = {}
        self.delegations: dict[str, Delegation] = {}  # by runtime; also of views and clones
        # Of one that runs all signatures: each interpreter holds a copy of the weights.
        self._interpreters: dict[str, Any] | None = {} if one_interpreter else None

    @property
    def signatures(self) -> tuple[Signature, ...]:
        """The entry points: the chosen one, else all of the file."""
        if self.key is None:
            return self.graph.signatures
        return tuple(each for each in self.graph.signatures if each.key == self.key)

    @property
    def signature(self) -> Signature:
        """The entry point to run."""
        if len(self.signatures) > 1:
            keys = [each.key for each in self.signatures]
            raise ValueError(
                f"the file has {len(keys)} signatures {keys}, and a run of one would leave the "
                f"others unseen: choose with model.signature({keys[0]!r})"
            )
        return self.signatures[0]

    @property
    def subgraph(self) -> Subgraph:
        """The subgraph of that entry point."""
        return self.graph.subgraphs[self.signature.subgraph]

    def at(self, key: str | None) -> EdgeFile:
        """Return the file with one signature chosen and its own interpreters, made once."""
        if key is None:
            return self
        key = readable(key)
        keys = [each.key or "" for each in self.graph.signatures]
        if key not in keys:
            raise ValueError(
                f"the file has no signature {key!r}{nearest(str(key), keys)}; it has {keys}"
            )
        if len(keys) == 1:
            return self
        if key not in self._views:
            view = self._views[key] = copy.copy(self)
            view.key = key
            view._runners = {}
        return self._views[key]

    def clone(self) -> EdgeFile:
        """Return the same file, with interpreters of its own."""
        other = copy.copy(self)
        other._views, other._runners = {}, {}
        other._interpreters = None if self._interpreters is None else {}
        return other

    @functools.cached_property
    def op_dtypes(self) -> OpDtypeMap:
        """The dtypes in which each op computes."""
        return OpDtypeMap(self.graph, self.modules)

    def runner(self, runtime: str, *, keep: bool = False) -> Runner:
        """Return the interpreter for a runtime, allocated at the first call."""
        # Also for an existing one: it still reads the file, which may have been overwritten.
        _ = self.graph.buffer
        key = (runtime, keep)
        if key not in self._runners:
            opening = self.opening(runtime, keep=keep)
            self._runners[key] = Runner(opening, self.runtimes, self._copied)
        return self._runners[key]

    def opening(self, runtime: str, *, keep: bool = False) -> Opening:
        """Return the file as an engine of a runtime opens it."""
        runtimes = self.runtimes
        return Opening(
            self.graph,
            self.signature,
            runtimes.check(runtime),
            self.threads,
            runtimes.own.get(runtime),
            runtimes.target_of(runtime),
            runtimes.kernels_of(runtime),
            self.modules,
            keep=keep,
            foreign=self.foreign,
            is_part=self._copied is not None and self._copied.is_part,
            interpreters=self._interpreters,
        )

    def restart(self) -> None:
        """Drop the interpreters of a file that keeps state, to start anew."""
        if self.graph.is_stateful:
            self.close()

    def close(self) -> None:
        """Drop the interpreters; the next run opens new ones."""
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()
        if self._interpreters is not None:
            self._interpreters.clear()

    @property
    def path(self) -> Path | None:
        """Path of the file; None for one held in memory."""
        buffer = self.graph.buffer
        return buffer.path if isinstance(buffer, MappedFile) else None

    @property
    def label(self) -> str:
        """Name of the file in texts: its path, or that of the bundle with the section."""
        buffer = self.graph.buffer
        return buffer.label if isinstance(buffer, MappedFile) else "the file held in memory"

    def by_input_name(
        self, names: Sequence[str], arrays: Sequence[npt.NDArray[Any]]
    ) -> dict[str, npt.NDArray[Any]]:
        """Return inputs by the file's names: matched by name if it knows them, else by position."""
        by_name = dict(zip(names, arrays, strict=True))
        known = [each.name for each in self.signature.inputs]
        if set(known) == set(by_name):
            return by_name
        # Names that agree in part would be matched by position to others' inputs.
        if len(by_name) != len(known) or by_name.keys() & set(known):
            raise ValueError(f"the file has the inputs {known}, got {list(by_name)}")
        return dict(zip(known, arrays, strict=True))

    def encode(
        self, names: Sequence[str], arrays: Sequence[npt.NDArray[Any]]
    ) -> dict[str, npt.NDArray[Any]]:
        """Quantize inputs as by `by_input_name`, permuted to the file's layout."""
        arrays_by_name = self.by_input_name(names, arrays)
        encoded = {}
        for io_tensor in self.signature.inputs:
            value = self.layouts.to_file(io_tensor, arrays_by_name[io_tensor.name])
            wanted = io_tensor.tensor.shape_signature
            if not fits(value.shape, wanted):
                # The interpreter would silently resize itself to any shape.
                raise ValueError(
                    f"input {io_tensor.name!r}: the file expects shape {list(wanted)}, got "
                    f"{list(value.shape)}{mismatch_hint(value.shape, wanted)}"
                )
            encoded[io_tensor.name] = encode(value, io_tensor)
        return encoded

    def run(
        self, names: Sequence[str], arrays: Sequence[npt.NDArray[Any]], runtime: str
    ) -> list[npt.NDArray[Any]]:
        """Return the outputs as stored, in the model's own order."""
        return self.runner(runtime).run(self.encode(names, arrays))

    def decode(self, codes: Sequence[npt.NDArray[Any]]) -> list[np.ndarray[Any, Any]]:
        """Dequantize outputs by their own parameters, in the reference's layout."""
        pairs = zip(codes, self.signature.outputs, strict=True)
        return self.in_reference_layout([decode(value, io_tensor) for value, io_tensor in pairs])

    def in_reference_layout(self, codes: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        """Permute stored outputs to the reference's layout."""
        return [
            self.layouts.from_file(io_tensor, value)
            for value, io_tensor in zip(codes, self.signature.outputs, strict=True)
        ]
