"""The steps of a conversion, each run once for equal ingredients."""

from __future__ import annotations

import dataclasses
import functools
import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pytest_edgeq import litert
from pytest_edgeq.cache import environment
from pytest_edgeq.cache.digest import UnknownError, digest_of
from pytest_edgeq.cache.graphs import decode_graph, decode_tensors, encode_graph, encode_tensors
from pytest_edgeq.cache.samples import Recording, find_equal
from pytest_edgeq.cache.trace import code_and_result, graph_digest, program_digest

if TYPE_CHECKING:
    from pytest_edgeq.cache.store import Store
    from pytest_edgeq.samples import Sample

__all__ = ["ConversionCache", "Simulation"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True


@dataclasses.dataclass(frozen=True)
class Simulation:
    """
    A quantized torch graph, built when it is first used, and what the flow must know of it.

    Attributes:
        graph: Return the graph, always the same one.
        static: Whether activations are quantized statically.
        weights_alone: Whether an op has a quantized weight and a float input.
        annotated: Module and op type of the weights that the quantizer annotated.
        strict_refusal: Why strict export refused the model, if it did.
        digest: A hash of the graph; None where the graph cannot be stored.
    """

    graph: Callable[[], torch.fx.GraphModule]
    static: bool
    weights_alone: bool
    annotated: frozenset[tuple[str, str]]
    strict_refusal: str | None = None
    digest: str | None = None


class ConversionCache:
    """
    Runs the steps of a conversion, or reads their results.

    Args:
        store: None where nothing is kept.
        note: Called with the reason where a result cannot be kept.
        refresh: Replace what earlier sessions stored.
        seed: Of the session's random number generators.
    """

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
        self._exported: weakref.WeakKeyDictionary[
            torch.nn.Module, tuple[str, torch.export.ExportedProgram, str | None]
        ] = weakref.WeakKeyDictionary()

    @property
    def is_on(self) -> bool:
        """Whether results are kept."""
        return self._store is not None

    def refuse(self, name: str, why: str) -> None:
        """Report that a result of a model is not stored, with the reason."""
        if self.is_on:
            self._note(f"{name}: not kept in the conversion cache: {why}")

    # --- keys -----------------------------------------------------------------------------------

    def exported_key(
        self, name: str, traced: litert.Traced, quantizer: str, *, strict: bool
    ) -> str | None:
        """
        Return the key of a model under one of our presets; None where it cannot be known.

        The graph of a non-strict export tells what is computed, in a fraction of the time of the
        strict one; the code that ran tells what strict export makes of it, see `trace.py`.
        """

        def ingredients() -> Sequence[Any]:
            try:
                code, program = code_and_result(traced.model, lambda: litert.export(traced))
            except UnknownError:
                raise
            except Exception as error:  # torch.export raises whatever the model's own code met
                kind = type(error).__name__
                raise UnknownError(f"torch.export(strict=False), which raises {kind}") from error
            return (quantizer, strict, code if strict else "", program_digest(program))

        return self._key(name, ingredients, threads=torch.get_num_threads())

    def prepared_key(self, name: str, prepared: Callable[[], torch.fx.GraphModule]) -> str | None:
        """Return the key of a graph with observers; None where it cannot be known."""
        return self._key(name, lambda: (graph_digest(prepared()),), threads=torch.get_num_threads())

    def _key(
        self, name: str, ingredients: Callable[[], Sequence[Any]], **options: Any
    ) -> str | None:
        if not self.is_on:
            return None
        try:
            told = ingredients()
            fixed = (environment.libraries(), environment.settings(), self._seed)
            return digest_of(fixed, options, told)
        except UnknownError as error:
            self.refuse(name, f"its key cannot be known, because of {error}")
            return None

    def exported(
        self,
        model: torch.nn.Module,
        key: str | None,
        export: Callable[[], tuple[torch.export.ExportedProgram, str | None]],
    ) -> tuple[torch.export.ExportedProgram, str | None]:
        """
        Return the exported program of a model, once a session for equal keys.

        Args:
            model: Its parameters are the program's own.
            key: From `exported_key`; None exports anew.
            export: Returns the program, and why strict export refused it, if it did.
        """
        known = self._exported.get(model)
        if key is not None and known is not None and known[0] == key:
            _, program, refusal = known
            if _shares_memory(program, model):
                return program, refusal
        program, refusal = export()
        if key is not None:
            self._exported[model] = (key, program, refusal)
        return program, refusal

    # --- steps ----------------------------------------------------------------------------------

    def convert(
        self,
        name: str,
        signatures: Mapping[str, litert.Traced],
        *,
        simulations: Mapping[str, Simulation] | None = None,
        static: bool | None = None,
        second_pipeline: bool = False,
    ) -> bytes:
        """
        Convert as `litert.convert` does.

        Args:
            name: Of the model, for texts.
            signatures: What is converted; of simulations without the model.
            simulations: The graphs that PT2E made, in place of the models.
            static: As `litert.convert` takes it.
            second_pipeline: As `litert.convert` takes it.
        """
        programs: dict[str, torch.export.ExportedProgram] = {}

        def ingredients() -> Sequence[Any]:
            told: list[Any] = [static, second_pipeline]
            for key, traced in signatures.items():
                if simulations is not None:
                    digest = simulations[key].digest
                    told.append((key, digest, _shapes(traced), repr(traced.dynamic_shapes)))
                else:
                    programs[key] = litert.export(traced)
                    told.append((key, program_digest(programs[key])))
            return told

        def make() -> dict[str, bytes]:
            given = dict(signatures)
            if simulations is not None:
                given = {k: each.of(simulations[k].graph()) for k, each in signatures.items()}
            tflite = litert.convert(
                given, static=static, second_pipeline=second_pipeline, programs=programs
            )
            return {"tflite": tflite}

        # Why a graph has no digest was told where it was made.
        is_known = simulations is None or all(each.digest for each in simulations.values())
        key = self._key(name, ingredients) if is_known else None
        return self._step("convert", key, make)["tflite"]

    def simulate(
        self,
        key: str | None,
        name: str,
        samples: Iterator[Sample],
        make: Callable[[Iterator[Sample]], tuple[Simulation, bool]],
    ) -> Simulation:
        """
        Return the quantized graph of a model and its calibration samples.

        Args:
            key: Of the prepared graph; None where nothing is to be kept.
            name: Of the model, for texts.
            samples: To calibrate with; read only where the quantizer needs them.
            make: Calibrates; returns the graph, and whether it read the samples.
        """
        if key is None or self._store is None:
            return make(samples)[0]
        recording = Recording(samples)
        with self._store.lock("calibrate", key):
            stored = self._runs("calibrate", key)
            # Where the quantizer needs no samples for this model, none are read.
            found = next((k for k, hashes in stored.items() if hashes is None), None)
            remaining: Iterator[Sample] = recording
            if found is None:
                runs = {k: hashes for k, hashes in stored.items() if hashes is not None}
                found, remaining = find_equal(recording, runs)
            parts = None if found is None else self._read("calibrate", found)
            if parts is not None:
                return _read_simulation(parts)
            simulation, has_read = make(remaining)
            try:
                parts = _write_simulation(simulation)
            except UnknownError as error:
                self.refuse(name, f"its quantized graph cannot be stored, because of {error}")
                return simulation
            hashes = recording.hashes if has_read else None
            self._keep_run("calibrate", key, hashes, parts)
        return dataclasses.replace(simulation, digest=_content_digest(parts))

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
        """
        Return the ranges that a recipe needs, None where it needs none.

        Args:
            name: Of the model, for texts.
            float_tflite: What is calibrated.
            recipe: Its rules, plain.
            samples: By signature.
            make: Calibrates on the samples that it is given.
            threads: Of the interpreter.
        """
        key = self._key(name, lambda: (float_tflite, recipe, list(samples)), threads=threads)
        if key is None or self._store is None:
            return make(samples)
        if len(samples) > 1:
            self.refuse(name, "the ranges of several signatures are calibrated together")
            return make(samples)
        ((signature, stream),) = samples.items()
        recording = Recording(stream)
        with self._store.lock("ranges", key):
            stored = {k: hashes for k, hashes in self._runs("ranges", key).items() if hashes}
            found, remaining = find_equal(recording, stored)
            parts = None if found is None else self._read("ranges", found)
            if parts is not None:
                return _read_ranges(parts)
            ranges = make({signature: remaining})
            if ranges is not None:
                try:
                    self._keep_run("ranges", key, recording.hashes, _write_ranges(ranges))
                except UnknownError as error:
                    self.refuse(name, f"its ranges cannot be stored, because of {error}")
        return ranges

    def quantize_recipe(
        self, name: str, float_tflite: bytes, recipe: Any, ranges: Any, make: Callable[[], bytes]
    ) -> bytes:
        """Return the file that a recipe makes of a float file and its ranges."""
        key = self._key(name, lambda: (float_tflite, recipe, ranges))
        return self._step("quantize", key, lambda: {"tflite": make()})["tflite"]

    # --- entries --------------------------------------------------------------------------------

    def _step(
        self, kind: str, key: str | None, make: Callable[[], dict[str, bytes]]
    ) -> dict[str, bytes]:
        if key is None or self._store is None:
            return make()
        found = self._read(kind, key)
        if found is not None:
            return found
        with self._store.lock(kind, key):
            # Another process may have finished it while this one waited.
            found = self._read(kind, key)
            if found is None:
                found = make()
                self._write(kind, key, found)
        return found

    def _read(self, kind: str, key: str) -> dict[str, bytes] | None:
        assert self._store is not None, "unreachable because callers have looked"
        if self._refresh and (kind, key) not in self._written:
            return None
        return self._store.read(kind, key)

    def _write(self, kind: str, key: str, parts: Mapping[str, bytes]) -> None:
        assert self._store is not None, "unreachable because callers have looked"
        self._store.write(kind, key, parts)
        self._written.add((kind, key))

    def _runs(self, kind: str, group: str) -> dict[str, list[str] | None]:
        """Stored runs of a group by key, with the running hashes of their samples."""
        assert self._store is not None, "unreachable because callers have looked"
        runs = {}
        for key in self._store.keys(f"{kind}-samples", group):
            parts = self._read(f"{kind}-samples", key)
            if parts is not None:
                runs[key] = json.loads(parts["hashes"])
        return runs

    def _keep_run(
        self, kind: str, group: str, hashes: list[str] | None, parts: Mapping[str, bytes]
    ) -> None:
        key = f"{group}.{hashes[-1] if hashes else 'none'}"
        self._write(kind, key, parts)
        self._write(f"{kind}-samples", key, {"hashes": json.dumps(hashes).encode()})


def _shares_memory(program: torch.export.ExportedProgram, model: torch.nn.Module) -> bool:
    """Whether the program's weights and buffers are still the model's own."""
    own = model.state_dict(keep_vars=True)
    return program.state_dict.keys() == own.keys() and all(
        value.data_ptr() == own[name].data_ptr() for name, value in program.state_dict.items()
    )


def _shapes(traced: litert.Traced) -> list[Any]:
    tensors = [*traced.args, *traced.kwargs.values()]
    return [(list(traced.kwargs), str(t.dtype), tuple(t.shape), t.stride()) for t in tensors]


def _write_simulation(simulation: Simulation) -> dict[str, bytes]:
    facts = {
        "static": simulation.static,
        "weights_alone": simulation.weights_alone,
        "annotated": sorted(simulation.annotated),
        "strict_refusal": simulation.strict_refusal,
    }
    return {**encode_graph(simulation.graph()), "facts": json.dumps(facts).encode()}


def _read_simulation(parts: Mapping[str, bytes]) -> Simulation:
    facts = json.loads(parts["facts"])

    @functools.cache
    def graph() -> torch.fx.GraphModule:
        litert.register_quantized_operators()
        return decode_graph(parts)

    return Simulation(
        graph,
        facts["static"],
        facts["weights_alone"],
        frozenset((module, op) for module, op in facts["annotated"]),
        facts["strict_refusal"],
        _content_digest(parts),
    )


def _content_digest(parts: Mapping[str, bytes]) -> str:
    return digest_of(parts["graph"], parts["tensors"])


def _write_ranges(ranges: Mapping[str, Mapping[str, Any]]) -> dict[str, bytes]:
    """
    Encode ranges by tensor name.

    Raises:
        UnknownError: One of them is no array.
    """
    arrays = {}
    for i, each in enumerate(ranges.values()):
        for j, value in enumerate(each.values()):
            if not isinstance(value, np.ndarray):
                raise UnknownError(f"a range that is a {type(value).__name__}")
            arrays[f"{i} {j}"] = torch.from_numpy(value.copy())
    table, raw = encode_tensors(arrays)
    names = [[name, list(each)] for name, each in ranges.items()]
    told = {"names": names, "tensors": table}
    return {"ranges": json.dumps(told).encode(), "tensors": raw}


def _read_ranges(parts: Mapping[str, bytes]) -> dict[str, dict[str, Any]]:
    told = json.loads(parts["ranges"])
    arrays = decode_tensors(told["tensors"], parts["tensors"])
    return {
        name: {kind: arrays[f"{i} {j}"].numpy() for j, kind in enumerate(kinds)}
        for i, (name, kinds) in enumerate(told["names"])
    }
