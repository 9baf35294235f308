"""Results that are read from the store, or computed and stored once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pytest_edgeq.quantize.cache.sample_replay import Recording, Tagged, spooled

if TYPE_CHECKING:
    from pytest_edgeq.quantize.cache.directory import Store


Parts = Mapping[str, bytes]  # the content of an entry, by name

_Result = TypeVar("_Result")

# Decodes the parts of an entry; raises anything for parts that another program wrote.
Decode = Callable[[Parts], _Result]


class CachedStep(NamedTuple):
    """One step of a conversion."""

    kind: str  # `export`, `calibrate`, `convert`, `ranges` or `quantize`
    is_cached: bool  # whether its result was read, or for an export was not needed


class Entries:
    """The entries of a store by kind and key."""

    def __init__(self, store: Store, *, refresh: bool = False) -> None:
        self._store = store
        self._refresh = refresh
        self._written: set[tuple[str, str]] = set()
        self.steps: list[CachedStep] = []  # the steps run since this list was assigned, in order

    def read(self, kind: str, key: str, decode: Decode[_Result]) -> _Result | None:
        """Return the content of an entry; None if missing or, with a warning, damaged."""
        if self._refresh and (kind, key) not in self._written:
            return None
        parts = self._store.read(kind, key)
        if parts is None:
            return None
        try:
            return decode(parts)
        except Exception as error:  # torch raises anything for parts that another program wrote
            why = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
            self._store.report_damage(kind, key, why)
            return None

    def write(self, kind: str, key: str, parts: Parts) -> None:
        """Store an entry."""
        self._store.write(kind, key, parts)
        self._written.add((kind, key))

    def once(
        self, kind: str, key: str, part: str, make: Callable[[], bytes], decode: Decode[bytes]
    ) -> bytes:
        """Return the only part of an entry, or compute and store it."""
        found = self.read(kind, key, decode)
        is_cached = True
        if found is None:
            with self._store.lock(kind, key):
                # Another process may have finished it while this one waited.
                found = self.read(kind, key, decode)
                if found is None:
                    is_cached = False
                    found = make()
                    self.write(kind, key, {part: found})
        self.steps.append(CachedStep(kind, is_cached))
        return found

    def calibrated(
        self,
        kind: str,
        key: str,
        samples: Iterator[Tagged],
        make: Callable[[Iterator[Tagged]], tuple[_Result, Parts | None, bool]],
        decode: Decode[_Result],
    ) -> _Result:
        """Return the stored result of a run on equal samples, or run on them."""
        recording = Recording(samples)
        remaining: Iterator[Tagged] = recording
        with self._store.lock(kind, key):
            stored = self._store.keys(kind, f"{key}.")
            found = f"{key}.none"  # of a run that needed no samples
            if stored and found not in stored:
                remaining = spooled(recording, self._store.report)
                found = f"{key}.{recording.digest}"
            known = self.read(kind, found, decode)
            self.steps.append(CachedStep(kind, known is not None))
            if known is not None:
                return known
            result, parts, has_read = make(remaining)
            if parts is not None:
                self.write(kind, f"{key}.{recording.digest if has_read else 'none'}", parts)
        return result
