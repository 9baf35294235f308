"""Keys of `config.stash` and the snapshot session, shared by the modules of the plugin."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pytest

from pytest_edgeq.plugin.options.declared import Settings
from pytest_edgeq.progress import Progress
from pytest_edgeq.report.journal import Journal
from pytest_edgeq.runtimes.registry import Runtimes

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_edgeq.baselines.record import Owner
    from pytest_edgeq.baselines.session import SnapshotSession

CacheMessage: TypeAlias = tuple[Literal["warning", "info"], str]

settings_key = pytest.StashKey[Settings]()
memory_key: pytest.StashKey[SnapshotSession] = pytest.StashKey()
runtimes_key = pytest.StashKey[Runtimes]()
cache_dir_key: pytest.StashKey[Path | None] = pytest.StashKey()
isolate_memory_key = pytest.StashKey[int]()
progress_key = pytest.StashKey[Progress]()
cache_messages_key: pytest.StashKey[list[CacheMessage]] = pytest.StashKey()
collected_key: pytest.StashKey[list[pytest.Item]] = pytest.StashKey()
absent_key: pytest.StashKey[dict[Path, str]] = pytest.StashKey()
journal_key = pytest.StashKey[Journal]()
running_key: pytest.StashKey[pytest.Item | None] = pytest.StashKey()


def memory_of(config: pytest.Config) -> SnapshotSession:
    """Return the snapshot session of this run, created at the first call."""
    if memory_key not in config.stash:
        from pytest_edgeq.baselines.paths import Layout
        from pytest_edgeq.baselines.session import SnapshotSession

        settings = config.stash[settings_key]
        config.stash[memory_key] = SnapshotSession(
            Layout(config.rootpath, settings.snapshot_dir),
            update=settings.update,
            invocation_dir=config.invocation_params.dir,
        )
    return config.stash[memory_key]


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
