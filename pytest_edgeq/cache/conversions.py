"""The steps of a conversion, each run once for equal ingredients."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pytest_edgeq import litert
from pytest_edgeq.cache import environment
from pytest_edgeq.cache.digest import UnknownError, digest_of
from pytest_edgeq.cache.entries import Entries, Parts, Step
from pytest_edgeq.cache.model_code import code_and_result
from pytest_edgeq.cache.parts import (
    Exported,
    Simulation,
    read_exported,
    read_ranges,
    read_simulation,
    write_exported,
    write_ranges,
    write_simulation,
)
from pytest_edgeq.cache.sample_replay import Tagged, streams_of
from pytest_edgeq.cache.trace import ProgramDigest, graph_digest, program_digest
from pytest_edgeq.process_state import seeded

if TYPE_CHECKING:
    from pytest_edgeq.cache.directory import Store
    from pytest_edgeq.samples import Sample


_Program = tuple[torch.export.ExportedProgram, str | None]
"""An exported program, and why strict export refused the model, if it did."""


class ConversionCache:
    """Runs the steps of a conversion, or reads their results."""

    def __init__(
        self,
        store: Store | None = None,
        note: Callable[[str], None] = lambda text: None,
        *,
        refresh: bool = False,
        seed: int = 0,
    ) -> None:
        self._entries = None if store is None else Entries(store, refresh=refresh)
        self._note = note
        self._seed = seed
        self._exported: weakref.WeakKeyDictionary[torch.nn.Module, _Kept] = (
            weakref.WeakKeyDictionary()
        )
        self._states: dict[str, str] = {}
        self._outdated: set[str] = set()

    @property
    def is_on(self) -> bool:
        """Whether results are kept."""
        return self._entries is not None

    @contextlib.contextmanager
    def noted_steps(self) -> Iterator[list[Step]]:
        """Note the steps that run meanwhile; none where nothing is kept."""
        steps: list[Step] = []
        if self._entries is not None:
            self._entries.steps = steps
        yield steps

    def refuse(self, name: str, why: str) -> None:
        """Report that a result of a model is not stored, with the reason."""
        if self.is_on:
            self._note(f"{name}: not kept in the conversion cache: {why}")

    # --- keys -----------------------------------------------------------------------------------

    def exported_key(self, traced: litert.Traced) -> str | None:
        """
        Return the key of what strict export makes of a model; None where it takes a strict export.

        The graph of a non-strict export tells what is computed, in a fraction of the time of the
        strict one; the code that ran tells what strict export makes of it, see `model_code.py`.
        """
        if not self.is_on:
            return None

        def export() -> torch.export.ExportedProgram:
            try:
                return litert.export(traced, nodes_only=True)
            except UnknownError:
                raise
            except Exception as error:  # whatever the model's own code met
                raise UnknownError(f"torch.export, which raises {type(error).__name__}") from error

        try:
            # The export that follows must find the generators as they are now.
            with seeded(self._seed):
                code, program = code_and_result(traced.model, export)
            digest = program_digest(program)
            key = self._digest((code, digest.whole))
        except UnknownError:
            return None
        self._states[key] = digest.state
        return key

    def preset_key(self, exported: str | None, preset: str) -> str | None:
        """Return the key of a model under one of our presets, which determine the annotations."""
        return exported and digest_of(exported, preset, torch.get_num_threads())

    def prepared_key(
        self, name: str, prepared: Callable[[], tuple[torch.fx.GraphModule, Any]]
    ) -> str | None:
        """Return the key of a graph with observers; None where it cannot be known."""

        def ingredients() -> Sequence[Any]:
            graph, facts = prepared()
            return graph_digest(graph), facts

        return self._key(name, ingredients, threads=torch.get_num_threads())

    def _key(
        self, name: str, ingredients: Callable[[], Sequence[Any]], **options: Any
    ) -> str | None:
        if not self.is_on:
            return None
        try:
            return self._digest(ingredients(), **options)
        except UnknownError as error:
            self.refuse(name, f"its key cannot be known, because of {error}")
            return None

    def _digest(self, told: Sequence[Any], **options: Any) -> str:
        fixed = (environment.libraries(), environment.settings(), self._seed)
        return digest_of(fixed, options, told)

    def exported(
        self, name: str, model: torch.nn.Module, key: str | None, export: Callable[[], _Program]
    ) -> Exported:
        """Return a copy of the exported graph of a model, exported once for equal keys."""
        if key is None or self._entries is None:
            return _copied(export())
        known = self._exported.get(model)
        # The program's weights and constants are the model's own, and may have changed since.
        if known is not None and known.key == key and known.is_unchanged():
            return _copied(known.program)
        with self._entries.lock("export", key):
            exported = self._entries.read("export", key, read_exported)
            self._entries.steps.append(Step("export", exported is not None))
            if exported is not None:
                return exported
            program = export()
            exported = _copied(program)
            try:
                digest = program_digest(program[0])
                if digest.state == self._states[key]:
                    self._exported[model] = _Kept(key, program, digest)
                    self._entries.write("export", key, write_exported(exported))
                else:
                    self._outdated.add(key)
                    self.refuse(name, "its weights changed while its samples were read")
            except UnknownError as error:
                self.refuse(name, f"its exported graph cannot be stored, because of {error}")
        return exported

    # --- steps ----------------------------------------------------------------------------------

    def convert(
        self,
        name: str,
        signatures: Mapping[str, litert.Traced],
        *,
        simulations: Mapping[str, Simulation] | None = None,
        static: bool | None = None,
        second_pipeline: bool = False,
        native: litert.Native | None = None,
    ) -> bytes:
        """Convert as `litert.convert` does."""
        programs: dict[str, torch.export.ExportedProgram] = {}

        def ingredients() -> Sequence[Any]:
            told: list[Any] = [static, environment.second_pipeline() if second_pipeline else None]
            for key, traced in signatures.items():
                if simulations is not None:
                    digest = simulations[key].digest
                    told.append((key, digest, _shapes(traced), repr(traced.dynamic_shapes)))
                else:
                    programs[key] = litert.export(traced)
                    told.append((key, program_digest(programs[key]).whole))
            return told

        def make() -> bytes:
            given = dict(signatures)
            if simulations is not None:
                given = {k: each.of(simulations[k].graph()) for k, each in signatures.items()}
            return litert.convert(
                given,
                static=static,
                second_pipeline=second_pipeline,
                programs=programs,
                native=native,
            )

        # Why a graph has no digest was told where it was made.
        is_known = simulations is None or all(each.digest for each in simulations.values())
        key = self._key(name, ingredients) if is_known else None
        return self._file("convert", key, make)

    def simulate(
        self,
        key: str | None,
        name: str,
        samples: Iterator[Sample],
        make: Callable[[Iterator[Sample]], tuple[Simulation, bool]],
        exported: str | None = None,
    ) -> Simulation:
        """Return the quantized graph of a model and its calibration samples."""
        if key is None or self._entries is None:
            return make(samples)[0]

        def calibrate(samples: Iterator[Tagged]) -> tuple[Simulation, Parts | None, bool]:
            simulation, has_read = make(sample for _, sample in samples)
            if exported in self._outdated:  # while its samples were read, which has been told
                return simulation, None, has_read
            try:
                parts = write_simulation(simulation)
            except UnknownError as error:
                self.refuse(name, f"its quantized graph cannot be stored, because of {error}")
                return simulation, None, has_read
            digest = read_simulation(parts).digest
            return dataclasses.replace(simulation, digest=digest), parts, has_read

        tagged = (("", sample) for sample in samples)
        return self._entries.calibrated("calibrate", key, tagged, calibrate, read_simulation)

    def calibrate_recipe(
        self,
        name: str,
        float_tflite: bytes,
        recipe: Any,
        samples: Mapping[str, Iterator[Sample]],
        make: Callable[[Mapping[str, Iterator[Sample]]], Any],
        *,
        threads: int,
    ) -> Any:
        """Return the ranges that a recipe needs, None where it needs none."""
        key = self._key(name, lambda: (float_tflite, recipe, list(samples)), threads=threads)
        if key is None or self._entries is None:
            return make(samples)

        def calibrate(given: Iterator[Tagged]) -> tuple[Any, Parts | None, bool]:
            ranges = make(streams_of(given, samples))
            if ranges is None:
                return None, None, False
            try:
                return ranges, write_ranges(ranges), True
            except UnknownError as error:
                self.refuse(name, f"its ranges cannot be stored, because of {error}")
            return ranges, None, True

        tagged = ((name, sample) for name, stream in samples.items() for sample in stream)
        return self._entries.calibrated("ranges", key, tagged, calibrate, read_ranges)

    def quantize_recipe(
        self, name: str, float_tflite: bytes, recipe: Any, ranges: Any, make: Callable[[], bytes]
    ) -> bytes:
        """Return the file that a recipe makes of a float file and its ranges."""
        return self._file("quantize", self._key(name, lambda: (float_tflite, recipe, ranges)), make)

    def _file(self, kind: str, key: str | None, make: Callable[[], bytes]) -> bytes:
        if key is None or self._entries is None:
            return make()
        return self._entries.file(kind, key, make)


@dataclasses.dataclass(frozen=True)
class _Kept:
    """A program that was exported in this session, and its hashes at that time."""

    key: str
    program: _Program
    digest: ProgramDigest

    def is_unchanged(self) -> bool:
        """Whether the hashes of the program are still the same."""
        return program_digest(self.program[0]) == self.digest


def _copied(program: _Program) -> Exported:
    exported, strict_refusal = program
    with litert.quiet():
        return Exported(copy.deepcopy(exported.module()), strict_refusal)


def _shapes(traced: litert.Traced) -> list[Any]:
    tensors = [*traced.args, *traced.kwargs.values()]
    return [(list(traced.kwargs), str(t.dtype), tuple(t.shape), t.stride()) for t in tensors]
