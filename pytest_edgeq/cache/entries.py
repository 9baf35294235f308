"""Results that are read where they are stored, or made and stored, once for all processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pytest_edgeq.cache.parts import read_file, read_run
from pytest_edgeq.cache.sample_replay import Recording, Tagged, find_equal

if TYPE_CHECKING:
    from pytest_edgeq.cache.directory import Store


Parts = Mapping[str, bytes]
"""The content of an entry, by name."""

_Result = TypeVar("_Result")


class Step(NamedTuple):
    """
    One step of a conversion.

    Attributes:
        kind: `export`, `calibrate`, `convert`, `ranges` or `quantize`.
        is_cached: Whether its result was read, not made.
    """

    kind: str
    is_cached: bool


class Entries:
    """
    The entries of a store by kind and key.

    Attributes:
        steps: The steps run since this list was put here, in order.
    """

    def __init__(self, store: Store, *, refresh: bool = False) -> None:
        self._store = store
        self._refresh = refresh
        self._written: set[tuple[str, str]] = set()
        self.steps: list[Step] = []

    def lock(self, kind: str, key: str) -> AbstractContextManager[None]:
        """Lock an entry: one process at a time creates it."""
        return self._store.lock(kind, key)

    def read(self, kind: str, key: str, decode: Callable[[Parts], _Result]) -> _Result | None:
        """Return what an entry holds; None where there is none, or, warned of, a damaged one."""
        if self._refresh and (kind, key) not in self._written:
            return None
        parts = self._store.read(kind, key)
        if parts is None:
            return None
        try:
            return decode(parts)
        except Exception as error:  # torch raises anything of parts that another program wrote
            why = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
            self._store.report_damage(kind, key, why)
            return None

    def write(self, kind: str, key: str, parts: Parts) -> None:
        """Store an entry."""
        self._store.write(kind, key, parts)
        self._written.add((kind, key))

    def file(self, kind: str, key: str, make: Callable[[], bytes]) -> bytes:
        """Return the `.tflite` file of an entry, or make and store it."""
        found = self.read(kind, key, read_file)
        is_cached = True
        if found is None:
            with self.lock(kind, key):
                # Another process may have finished it while this one waited.
                found = self.read(kind, key, read_file)
                if found is None:
                    is_cached = False
                    found = {"tflite": make()}
                    self.write(kind, key, found)
        self.steps.append(Step(kind, is_cached))
        return found["tflite"]

    def calibrated(
        self,
        kind: str,
        key: str,
        samples: Iterator[Tagged],
        make: Callable[[Iterator[Tagged]], tuple[_Result, Parts | None, bool]],
        decode: Callable[[Parts], _Result],
    ) -> _Result:
        """Return what a stored run on equal samples gave, or run on them."""
        recording = Recording(samples)
        with self.lock(kind, key):
            stored = self._runs(kind, key)
            # Where a run needed no samples, none are read.
            found = next((k for k, hashes in stored.items() if hashes is None), None)
            remaining: Iterator[Tagged] = recording
            if found is None:
                runs = {k: hashes for k, hashes in stored.items() if hashes is not None}
                found, remaining = find_equal(recording, runs, self._store.report)
            known = None if found is None else self.read(kind, found, decode)
            self.steps.append(Step(kind, known is not None))
            if known is not None:
                return known
            result, parts, has_read = make(remaining)
            if parts is not None:
                self._keep_run(kind, key, recording.hashes if has_read else None, parts)
        return result

    def _runs(self, kind: str, group: str) -> dict[str, list[str] | None]:
        """Return the running hashes of the samples of a group's runs, by their keys."""
        runs = {}
        for key in self._store.keys(f"{kind}-samples", group):
            run = self.read(f"{kind}-samples", key, read_run)
            if run is not None:
                runs[key] = run.hashes
        return runs

    def _keep_run(self, kind: str, group: str, hashes: list[str] | None, parts: Parts) -> None:
        key = f"{group}.{hashes[-1] if hashes else 'none'}"
        self.write(kind, key, parts)
        self.write(f"{kind}-samples", key, {"hashes": json.dumps(hashes).encode()})
