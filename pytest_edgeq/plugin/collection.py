"""Record the collected tests, for the search of obsolete baselines."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_edgeq.plugin.state import (
    absent_key,
    collected_key,
    memory_key,
    memory_of,
    owner_of,
    settings_key,
)

if TYPE_CHECKING:
    from pytest_edgeq.baselines.obsolete import CollectedModule

OUTPUT = "edgeq_collected"
"""Key of the output that a worker of pytest-xdist sends at its end."""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Record modules without collected tests."""
    report = yield
    if isinstance(collector, pytest.File) and not report.passed:
        why = "it was skipped" if report.skipped else "it could not be collected"
        collector.config.stash[absent_key][collector.path] = why
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Record all tests before any are deselected."""
    config.stash[collected_key] = list(items)
    return (yield)


def collected_in(session: pytest.Session) -> list[CollectedModule]:
    """Return the collected tests of this process, for modules with baselines."""
    from pytest_edgeq.baselines.obsolete import collected_modules

    config = session.config
    layout = memory_of(config).layout
    items: dict[Path, list[pytest.Item]] = {}
    for item in config.stash[collected_key]:
        items.setdefault(item.path, []).append(item)
    collected = {
        module: {item.nodeid: owner_of(item).test for item in its_items}
        for module, its_items in items.items()
        if layout.has_baselines(module)
    }
    files = [argument.partition("::")[0] for argument in config.args if "::" in argument]
    absent = config.stash[absent_key]
    narrowed = ""
    if config.getoption("lf", False):
        narrowed = "--last-failed chose its tests"
    elif "quantizers" in config.stash[settings_key].on_command_line:
        narrowed = "--edgeq-quantizers replaced the quantizers of its tests"
    return collected_modules(
        layout,
        collected,
        {item.nodeid for item in session.items},
        named={(config.invocation_params.dir / file).resolve() for file in files},
        absent=absent,
        narrowed=narrowed,
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the collected tests of this pytest-xdist worker to the controller."""
    config = session.config
    if hasattr(config, "workeroutput") and memory_key in config.stash:
        config.workeroutput[OUTPUT] = collected_in(session)
