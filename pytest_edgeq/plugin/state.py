"""
Keys of `config.stash`, shared by the modules of the plugin.

The snapshot session and the journal are created, and imported, with the first test that needs them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import pytest

from pytest_edgeq.plugin.html_extras import writes_html

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_edgeq.baselines.paths import Layout
    from pytest_edgeq.baselines.record import Owner, Phase
    from pytest_edgeq.baselines.session import SnapshotSession
    from pytest_edgeq.plugin.artifacts import Artifacts
    from pytest_edgeq.plugin.options.declared import Settings
    from pytest_edgeq.progress import Progress
    from pytest_edgeq.report.journal import Journal
    from pytest_edgeq.runtimes.registry import Runtimes

CacheMessage: TypeAlias = tuple[Literal["warning", "info"], str]


class RunningPhase(NamedTuple):
    """The running phase of a test."""

    item: pytest.Item
    phase: Phase
    ends: contextlib.ExitStack  # closed when the phase ends


settings_key: pytest.StashKey[Settings] = pytest.StashKey()
memory_key: pytest.StashKey[SnapshotSession] = pytest.StashKey()
runtimes_key: pytest.StashKey[Runtimes] = pytest.StashKey()
cache_dir_key: pytest.StashKey[Path | None] = pytest.StashKey()
isolate_memory_key = pytest.StashKey[int]()
progress_key: pytest.StashKey[Progress] = pytest.StashKey()
cache_messages_key: pytest.StashKey[list[CacheMessage]] = pytest.StashKey()
collected_key: pytest.StashKey[list[pytest.Item]] = pytest.StashKey()
absent_key: pytest.StashKey[dict[Path, str]] = pytest.StashKey()
artifacts_key: pytest.StashKey[Artifacts | None] = pytest.StashKey()
journal_key: pytest.StashKey[Journal] = pytest.StashKey()
running_key: pytest.StashKey[RunningPhase | None] = pytest.StashKey()


def memory_of(config: pytest.Config) -> SnapshotSession:
    """Return the snapshot session of this run, created at the first call."""
    if memory_key not in config.stash:
        from pytest_edgeq.baselines.session import SnapshotSession

        memory = config.stash[memory_key] = SnapshotSession(
            layout_of(config),
            update=config.stash[settings_key].update,
            invocation_dir=config.invocation_params.dir,
        )
        if (current := config.stash[running_key]) is not None:
            _record_claims(current, memory)
    return config.stash[memory_key]


def layout_of(config: pytest.Config) -> Layout:
    """Return the places of this run's baselines."""
    from pytest_edgeq.baselines.paths import Layout

    return Layout(config.rootpath, config.stash[settings_key].snapshot_dir)


def journal_of(config: pytest.Config) -> Journal:
    """Return the journal of this run, created at the first call."""
    if journal_key not in config.stash:
        from pytest_edgeq.report.journal import Journal

        settings = config.stash[settings_key]
        config.stash[journal_key] = Journal(
            # Views show outputs and samples of comparisons, not their errors alone.
            details=any((settings.json, settings.html, writes_html(config))),
            keeps_calls=settings.artifacts is not None,
        )
    return config.stash[journal_key]


@contextlib.contextmanager
def running(item: pytest.Item, phase: Phase) -> Iterator[None]:
    """Record measurements and claims for this test."""
    stash = item.config.stash
    with contextlib.ExitStack() as ends:
        stash[running_key] = current = RunningPhase(item, phase, ends)
        if memory_key in stash:
            _record_claims(current, stash[memory_key])
        try:
            yield
        finally:
            stash[running_key] = None


def _record_claims(current: RunningPhase, memory: SnapshotSession) -> None:
    current.ends.enter_context(memory.running(owner_of(current.item), current.phase))


def owner_of(item: pytest.Item) -> Owner:
    """Return the test as the owner of baselines."""
    from pytest_edgeq.baselines.record import Owner

    # Not from the node id: pytest-xdist appends the group to it with --dist=loadgroup.
    names: list[str] = []
    for node in item.listchain():
        names = [] if isinstance(node, pytest.File) else [*names, node.name]
    return Owner(item.path, "::".join(names))


def fixture_values(item: pytest.Item, module: str, name: str) -> list[Any]:
    """Return the values of one of our classes; empty if it is not imported."""
    loaded = sys.modules.get(f"pytest_edgeq.{module}")
    if loaded is None:
        return []
    kind: type = getattr(loaded, name)
    return [each for each in getattr(item, "funcargs", {}).values() if isinstance(each, kind)]
