"""The steps of a conversion, each run once for equal inputs."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from pytest_edgeq import litert
from pytest_edgeq.litert.digest import UnhashableError, digest_of, feed, feed_graph
from pytest_edgeq.quantize.cache import environment
from pytest_edgeq.quantize.cache.parts import (
    Simulation,
    read_file,
    read_key,
    read_ranges,
    read_simulation,
    write_ranges,
    write_simulation,
)
from pytest_edgeq.quantize.cache.sample_replay import Recording, Tagged, spooled, streams_of
from pytest_edgeq.runtimes.process_state import seeded

if TYPE_CHECKING:
    from pytest_edgeq.compare.samples import Sample
    from pytest_edgeq.quantize.cache.directory import Store

Parts = Mapping[str, bytes]  # the content of an entry, by name

_Result = TypeVar("_Result")

# Decodes the parts of an entry; raises anything for parts that another program wrote.
Decode = Callable[[Parts], _Result]


class CachedStep(NamedTuple):
    """One step of a conversion."""

    kind: str  # `export`, `calibrate`, `convert`, `ranges` or `quantize`
    is_cached: bool  # whether its result was read, or for an export was not needed


class ConversionCache:
    """The steps of a conversion, whose results are read if they are stored."""

    def __init__(
        self,
        store: Store | None = None,
        note: Callable[[str], None] = lambda text: None,
        *,
        refresh: bool = False,
        seed: int = 0,
    ) -> None:
        self._store = store
        self._note = note
        self._refresh = refresh
        self._seed = seed
        self._written: set[tuple[str, str]] = set()
        self.steps: list[CachedStep] = []  # those run since this list was assigned, in order

    @property
    def is_on(self) -> bool:
        """Whether results are stored."""
        return self._store is not None

    def refuse(self, name: str, why: str) -> None:
        """Report that a result of a model is not stored, with the reason."""
        if self.is_on:
            self._note(f"{name}: not kept in the conversion cache: {why}")

    # --- keys -----------------------------------------------------------------------------------

    def traced_key(self, traced: litert.Traced, preset: str) -> str | None:
        """
        Return a key that makes a strict export unnecessary, or None.

        It covers the non-strict graph with its source lines, and every module that is not
        installed.
        """
        if not self.is_on:
            return None
        try:
            # The strict export must not see changed generators or a changed model.
            with seeded(self._seed):
                program = litert.export(traced.of(_copied(traced.model)), runs=False)
            digest = _program_digest(program, lines=True)
            return self._digest(
                (digest, environment.sources(), preset), threads=torch.get_num_threads()
            )
        except Exception:  # whatever the model's own code met: the strict export reports it
            return None

    def prepared_key(
        self, name: str, make: Callable[[], str], traced_key: str | None = None
    ) -> str | None:
        """Return the key of a graph with observers; read it by the key of the trace if possible."""

        def read_or_make() -> str:
            key = self._once("export", traced_key, "key", lambda: make().encode(), read_key)
            return key.decode()

        return self._known(name, read_or_make)

    def graph_key(self, graph: torch.fx.GraphModule, *facts: Any) -> str:
        """Return the key of a graph with observers and of its export."""
        return self._digest((_graph_digest(graph), facts), threads=torch.get_num_threads())

    def _key(
        self, name: str, ingredients: Callable[[], Sequence[Any]], **options: Any
    ) -> str | None:
        return self._known(name, lambda: self._digest(ingredients(), **options))

    def _known(self, name: str, make: Callable[[], str]) -> str | None:
        """Return a key; None, with the reason, where a part of it cannot be identified."""
        try:
            return make() if self.is_on else None
        except UnhashableError as error:
            self.refuse(name, f"its key cannot be known, because of {error}")
            return None

    def _digest(self, values: Sequence[Any], **options: Any) -> str:
        fixed = (environment.libraries(), environment.settings(), self._seed)
        return digest_of(fixed, options, values)

    # --- steps ----------------------------------------------------------------------------------

    def convert(
        self,
        name: str,
        signatures: Mapping[str, litert.Traced],
        *,
        simulations: Mapping[str, Simulation] | None = None,
        static: bool | None = None,
        native: litert.Native | None = None,
    ) -> bytes:
        """Convert as `litert.convert`, or read the stored file."""
        programs: dict[str, torch.export.ExportedProgram] = {}

        def ingredients() -> Sequence[Any]:
            found: list[Any] = [static]
            for key, traced in signatures.items():
                if simulations is not None:
                    digest = simulations[key].digest
                    found.append((key, digest, _shapes(traced), repr(traced.dynamic_shapes)))
                else:
                    programs[key] = litert.export(traced)
                    found.append((key, _program_digest(programs[key])))
            return found

        def make() -> bytes:
            models = dict(signatures)
            if simulations is not None:
                models = {k: each.of(simulations[k].graph()) for k, each in signatures.items()}
            return litert.convert(
                models,
                static=static,
                programs=programs,
                native=native,
            )

        # The missing digest of a graph was reported when it was made.
        is_known = simulations is None or all(each.digest for each in simulations.values())
        key = self._key(name, ingredients) if is_known else None
        return self._once("convert", key, "tflite", make, read_file)

    def simulate(
        self,
        key: str | None,
        name: str,
        samples: Iterator[Sample],
        make: Callable[[Iterator[Sample]], tuple[Simulation, bool]],
        made_key: Callable[[], str | None],
    ) -> Simulation:
        """Return the quantized graph; store it only if its graph still has the key."""
        if key is None:
            return make(samples)[0]

        def calibrate(samples: Iterator[Tagged]) -> tuple[Simulation, Parts | None, bool]:
            is_current = made_key() == key  # asked before samples change the graph
            simulation, has_read = make(sample for _, sample in samples)
            if not is_current:
                self.refuse(name, "its graph changed since its key was made")
                return simulation, None, has_read
            try:
                parts = write_simulation(simulation)
            except UnhashableError as error:
                self.refuse(name, f"its quantized graph cannot be stored, because of {error}")
                return simulation, None, has_read
            digest = read_simulation(parts).digest
            return dataclasses.replace(simulation, digest=digest), parts, has_read

        tagged = (("", sample) for sample in samples)
        return self._calibrated("calibrate", key, tagged, calibrate, read_simulation)

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
        """Return the ranges that a recipe needs, or None if it needs none."""
        key = self._key(name, lambda: (float_tflite, recipe, list(samples)), threads=threads)
        if key is None:
            return make(samples)

        def calibrate(stream: Iterator[Tagged]) -> tuple[Any, Parts | None, bool]:
            ranges = make(streams_of(stream, samples))
            if ranges is None:
                return None, None, False
            try:
                parts = write_ranges(ranges)
            except UnhashableError as error:
                self.refuse(name, f"its ranges cannot be stored, because of {error}")
                return ranges, None, True
            return read_ranges(parts), parts, True  # as a later run reads them

        tagged = ((name, sample) for name, stream in samples.items() for sample in stream)
        return self._calibrated("ranges", key, tagged, calibrate, read_ranges)

    def quantize_recipe(
        self, name: str, float_tflite: bytes, recipe: Any, ranges: Any, make: Callable[[], bytes]
    ) -> bytes:
        """Return the file quantized by a recipe with its ranges."""
        key = self._key(name, lambda: (float_tflite, recipe, ranges))
        return self._once("quantize", key, "tflite", make, read_file)

    # --- entries --------------------------------------------------------------------------------

    def read(self, kind: str, key: str, decode: Decode[_Result]) -> _Result | None:
        """Return the content of an entry; None if missing or, with a warning, damaged."""
        store = self._stored()
        if self._refresh and (kind, key) not in self._written:
            return None
        parts = store.read(kind, key)
        if parts is None:
            return None
        try:
            return decode(parts)
        except Exception as error:  # torch raises anything for parts that another program wrote
            why = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
            store.report_damage(kind, key, why)
            return None

    def _stored(self) -> Store:
        assert self._store is not None, "unreachable because there are no keys without a store"
        return self._store

    def _write(self, kind: str, key: str, parts: Parts) -> None:
        self._stored().write(kind, key, parts)
        self._written.add((kind, key))

    def _once(
        self,
        kind: str,
        key: str | None,
        part: str,
        make: Callable[[], bytes],
        decode: Decode[bytes],
    ) -> bytes:
        """Return the only part of an entry, or compute and store it; without a key compute it."""
        if key is None:
            return make()
        found = self.read(kind, key, decode)
        is_cached = True
        if found is None:
            with self._stored().lock(kind, key):
                # Another process may have finished it while this one waited.
                found = self.read(kind, key, decode)
                if found is None:
                    is_cached = False
                    found = make()
                    self._write(kind, key, {part: found})
        self.steps.append(CachedStep(kind, is_cached))
        return found

    def _calibrated(
        self,
        kind: str,
        key: str,
        samples: Iterator[Tagged],
        make: Callable[[Iterator[Tagged]], tuple[_Result, Parts | None, bool]],
        decode: Decode[_Result],
    ) -> _Result:
        """Return the stored result of a run on equal samples, or run on them."""
        store, recording = self._stored(), Recording(samples)
        remaining: Iterator[Tagged] = recording
        with store.lock(kind, key):
            stored = store.keys(kind, f"{key}.")
            found = f"{key}.none"  # of a run that needed no samples
            if stored and found not in stored:
                remaining = spooled(recording)
                found = f"{key}.{recording.digest}"
            known = self.read(kind, found, decode)
            self.steps.append(CachedStep(kind, known is not None))
            if known is not None:
                return known
            result, parts, has_read = make(remaining)
            if parts is not None:
                self._write(kind, f"{key}.{recording.digest if has_read else 'none'}", parts)
        return result


def _program_digest(program: torch.export.ExportedProgram, *, lines: bool = False) -> str:
    """Return a hash of an exported program, optionally with its nodes' source lines."""
    hasher = hashlib.sha256()
    feed_graph(hasher, program.graph_module, ("stack_trace",) if lines else ())
    signature = program.graph_signature
    for spec in (*signature.input_specs, *signature.output_specs):
        feed(hasher, str(spec))
    feed(hasher, dict(sorted(program.state_dict.items())))
    feed(hasher, dict(sorted(program.constants.items())))
    feed(
        hasher, sorted(f"{symbol} {bounds}" for symbol, bounds in program.range_constraints.items())
    )
    feed(hasher, (str(program.call_spec.in_spec), str(program.call_spec.out_spec)))
    return hasher.hexdigest()


def _graph_digest(module: torch.fx.GraphModule) -> str:
    """Return a hash of a graph with observers: nodes, annotations, observers and constants."""
    hasher = hashlib.sha256()
    feed_graph(hasher, module, litert.NODE_METADATA)
    info = getattr(module.graph._codegen, "pytree_info", None)
    feed(hasher, str(info))
    return hasher.hexdigest()


def _copied(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy that shares its weights, to protect the model's own state."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(each): each for each in tensors})


def _shapes(traced: litert.Traced) -> list[Any]:
    tensors = [*traced.args, *traced.kwargs.values()]
    return [(list(traced.kwargs), str(t.dtype), tuple(t.shape), t.stride()) for t in tensors]
