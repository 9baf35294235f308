"""State of the plugin during one run of pytest, kept in `config.stash`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import pytest

from pytest_edgeq.plugin.html_extras import writes_html

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_edgeq.baselines.claims import Owner, Phase
    from pytest_edgeq.baselines.paths import Layout
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


@dataclass(eq=False)
class PluginState:
    """The state of one run."""

    settings: Settings
    runtimes: Runtimes
    cache_dir: Path | None
    isolate_memory: int
    progress: Progress
    artifacts: Artifacts | None = None
    cache_messages: list[CacheMessage] = field(default_factory=list)
    collected: list[pytest.Item] = field(default_factory=list)
    absent: dict[Path, str] = field(default_factory=dict)  # why, by file without collected tests
    running: RunningPhase | None = None
    # Created, and imported, with the first test that needs them.
    memory: SnapshotSession | None = None
    journal: Journal | None = None


state_key = pytest.StashKey[PluginState]()


def memory_of(config: pytest.Config) -> SnapshotSession:
    """Return the snapshot session of this run, created at the first call."""
    state = config.stash[state_key]
    if state.memory is None:
        from pytest_edgeq.baselines.session import SnapshotSession

        state.memory = SnapshotSession(
            layout_of(config),
            update=state.settings.update,
            invocation_dir=config.invocation_params.dir,
        )
        if state.running is not None:
            _record_claims(state.running, state.memory)
    return state.memory


def layout_of(config: pytest.Config) -> Layout:
    """Return the places of this run's baselines."""
    from pytest_edgeq.baselines.paths import Layout

    return Layout(config.rootpath, config.stash[state_key].settings.snapshot_dir)


def journal_of(config: pytest.Config) -> Journal:
    """Return the journal of this run, created at the first call."""
    state = config.stash[state_key]
    if state.journal is None:
        from pytest_edgeq.report.journal import Journal

        settings = state.settings
        state.journal = Journal(
            # Views show outputs and samples of comparisons, not their errors alone.
            details=any((settings.json, settings.html, writes_html(config))),
            keeps_calls=settings.artifacts is not None,
        )
    return state.journal


@contextlib.contextmanager
def running(item: pytest.Item, phase: Phase) -> Iterator[None]:
    """Record measurements and claims for this test."""
    state = item.config.stash[state_key]
    with contextlib.ExitStack() as ends:
        state.running = RunningPhase(item, phase, ends)
        if state.memory is not None:
            _record_claims(state.running, state.memory)
        try:
            yield
        finally:
            state.running = None


def _record_claims(current: RunningPhase, memory: SnapshotSession) -> None:
    current.ends.enter_context(memory.running(owner_of(current.item), current.phase))


def owner_of(item: pytest.Item) -> Owner:
    """Return the test as the owner of baselines."""
    from pytest_edgeq.baselines.claims import Owner

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
