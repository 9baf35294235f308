"""
The plugin: hooks and fixtures only.

It is loaded into every pytest run where pytest-edgeq is installed, so until tests are collected it
imports the options alone: the memory comes with the first test that runs, and torch, numpy and the
converter with the fixture.
All state is in `config.stash`.
What a test claimed travels as plain data on its report, because only reports survive the crash of
an xdist worker.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import os
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pytest

from pytest_edgeq import options
from pytest_edgeq.presets import quantizer_ids
from pytest_edgeq.tflite.registry import Runtimes

if TYPE_CHECKING:
    from pytest_edgeq.edgeq import Edgeq
    from pytest_edgeq.snapshots.collected import CollectedModule
    from pytest_edgeq.snapshots.obsolete import RunLog
    from pytest_edgeq.snapshots.record import Owner, Phase
    from pytest_edgeq.snapshots.session import SnapshotSession
    from pytest_edgeq.snapshots.summary import Outcome, Severity
    from pytest_edgeq.tflite.registry import Runtime

CacheMessage: TypeAlias = tuple[Literal["warning", "info"], str]

_OUTPUT = "edgeq_collected"
"""Key of what a worker of pytest-xdist sends when it ends."""

_HEADER_VERSIONS = ("torch", "torchao", "litert-torch", "ai-edge-litert")
_MARKUP: Mapping[Severity | None, dict[str, bool]] = {
    "error": {"red": True},
    "warning": {"yellow": True},
    "info": {},
    None: {},
}

settings_key = pytest.StashKey[options.Settings]()
_memory_key: pytest.StashKey[SnapshotSession] = pytest.StashKey()
_runtimes_key = pytest.StashKey[Runtimes]()
cache_dir_key = pytest.StashKey["Path | None"]()
_cache_messages_key = pytest.StashKey["list[CacheMessage]"]()
_outcome_key: pytest.StashKey[Outcome] = pytest.StashKey()
_collected_key = pytest.StashKey["list[pytest.Item]"]()
_absent_key = pytest.StashKey["dict[Path, str]"]()
_running_key = pytest.StashKey["pytest.Item | None"]()


# --- options and what the run says first --------------------------------------------------------


class HookSpecs:
    """The hooks that other plugins, and conftest.py files, may implement."""

    @staticmethod
    def pytest_edgeq_runtimes(config: pytest.Config) -> Mapping[str, Runtime] | None:
        """
        Give runtimes of your own: a dict of name → runner.

        Called once, while pytest is being configured and in each worker of pytest-xdist by itself,
        so it must stand in a plugin or in a conftest.py that pytest reads before it collects.
        Results of several plugins are merged. A name is valid wherever a runtime is named.
        `pytest_edgeq.tflite.runtimes.Runtime` says what a runner is.
        """


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the hooks."""
    pluginmanager.add_hookspecs(HookSpecs)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the options."""
    options.add_options(parser)


# After the plugins that register others while they are configured.
@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Resolve the options, so that a wrong one stops the run at once; register the marker."""
    config.addinivalue_line("markers", options.MARKER)
    runtimes = config.stash[_runtimes_key] = _registered(config)
    settings = config.stash[settings_key] = options.resolve(config, runtimes)
    config.stash[_running_key] = None
    config.stash[cache_dir_key] = _cache_dir(config, settings)
    config.stash[_cache_messages_key] = []
    config.stash[_collected_key] = []
    config.stash[_absent_key] = {}
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Controller(config), "edgeq-controller")


def memory_of(config: pytest.Config) -> SnapshotSession:
    """Return the memory of this run, made at the first call."""
    if _memory_key not in config.stash:
        from pytest_edgeq.snapshots.paths import Layout
        from pytest_edgeq.snapshots.session import SnapshotSession

        settings = config.stash[settings_key]
        config.stash[_memory_key] = SnapshotSession(
            Layout(config.rootpath, settings.snapshot_dir),
            update=settings.update,
            invocation_dir=config.invocation_params.dir,
        )
    return config.stash[_memory_key]


def _cache_dir(config: pytest.Config, settings: options.Settings) -> Path | None:
    """Return the directory of the conversion cache; None where it is off."""
    if settings.cache == "off":
        return None
    if settings.cache_dir is not None:
        return settings.cache_dir
    if not config.pluginmanager.hasplugin("cacheprovider"):
        return None
    folder = Path(os.path.expandvars(config.getini("cache_dir")))
    return config.rootpath / folder / "d" / "edgeq"


def _registered(config: pytest.Config) -> Runtimes:
    """Ask the plugins for runtimes, and merge them."""
    hook = config.hook.pytest_edgeq_runtimes
    results = hook(config=config)
    merged: dict[str, Runtime] = {}
    try:
        for runtimes in results:
            found = Runtimes(runtimes).own
            twice = sorted(found.keys() & merged.keys())
            if twice:
                raise ValueError(f"runtimes: {twice[0]!r} is given twice")  # noqa: TRY301
            merged |= found
    except (TypeError, ValueError) as error:
        plugins = ", ".join(str(each.plugin_name) for each in hook.get_hookimpls())
        raise pytest.UsageError(
            f"the hook pytest_edgeq_runtimes: {error}\n  implemented by: {plugins}"
        ) from None
    return Runtimes(merged)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Tell the effective settings and the versions, which are read without an import."""
    from pytest_edgeq.snapshots.producer import version_of

    settings = config.stash[settings_key]
    words = [f"runtime={settings.runtime}", f"threads={_cores(config)}", f"seed={settings.seed}"]
    words += [f"{name}={version_of(name) or 'not installed'}" for name in _HEADER_VERSIONS]
    if own := config.stash[_runtimes_key].own:
        words.append(f"runtimes={','.join(own)}")
    if settings.update:
        words.append(f"update={','.join(sorted(settings.update))}")
    return [f"edgeq: {' '.join(words)}", f"edgeq: {_cache_header(config)}"]


def _cores(config: pytest.Config) -> int:
    """Return the number of cores that this process may use."""
    input_of_worker = getattr(config, "workerinput", {"workercount": 1})
    return config.stash[settings_key].cores(input_of_worker["workercount"])


def _cache_header(config: pytest.Config) -> str:
    directory, mode = config.stash[cache_dir_key], config.stash[settings_key].cache
    if directory is None:
        why = "" if mode == "off" else " (pytest's cache directory is turned off)"
        return f"conversion cache: off{why}"
    from pytest_edgeq.cache.directory import size_of

    count, size = size_of(directory)
    path = directory
    if directory.is_relative_to(config.rootpath):
        path = directory.relative_to(config.rootpath)
    entries = "1 entry" if count == 1 else f"{count} entries"
    return f"conversion cache: {path} ({mode}, {entries}, {size / 1e6:.1f} MB)"


# --- fixtures -----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def edgeq(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Edgeq]:
    """
    Quantize a model, run it beside torch, and remember what was accepted.

    It may be used in fixtures of any scope; what it measures is booked on the test that is
    running.
    """
    from pytest_edgeq.cache.log import CacheLog
    from pytest_edgeq.edgeq import Edgeq

    # Otherwise Python scans all objects of the libraries when it exits, which takes 2 to 3 s.
    atexit.register(gc.freeze)
    config = request.config
    settings = config.stash[settings_key]
    messages = config.stash[_cache_messages_key]
    session = Edgeq(
        runtime=lambda: _runtime(config),
        threads=_cores(config),
        seed=settings.seed,
        directory=tmp_path_factory.mktemp("edgeq"),
        memory=memory_of(config),
        runtimes=config.stash[_runtimes_key],
        localize_timeout=settings.localize_timeout if settings.localize == "auto" else 0,
        cache_dir=config.stash[cache_dir_key],
        cache=settings.cache,
        cache_log=CacheLog(
            warn=lambda text: messages.append(("warning", text)),
            note=lambda text: messages.append(("info", text)),
        ),
    )
    yield session
    session.close()


@pytest.fixture(scope="session")
def edgeq_quantizer(request: pytest.FixtureRequest) -> object:
    """
    Give one quantizer at a time: a test that asks for it runs once under each.

    They are those of the marker `edgeq(quantizers=[…])`, else of `--edgeq-quantizers`, else of the
    ini option `edgeq_quantizers`, else the default preset.
    """
    return request.param


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Check the marker; run the test once under each quantizer if it asks for one."""
    config = metafunc.config
    marks = _marks(metafunc.definition)
    if "edgeq_quantizer" in metafunc.fixturenames and not _parametrized(metafunc):
        quantizers = config.stash[settings_key].quantizers_beside(marks.quantizers)
        metafunc.parametrize(
            "edgeq_quantizer", quantizers, ids=quantizer_ids(quantizers), indirect=True
        )


def _parametrized(metafunc: pytest.Metafunc) -> bool:
    """Tell whether the test gives `edgeq_quantizer` its values by itself."""
    argnames = [
        mark.args[0] if mark.args else mark.kwargs.get("argnames", ())
        for mark in metafunc.definition.iter_markers("parametrize")
    ]
    lists = [names.split(",") if isinstance(names, str) else names for names in argnames]
    return any(name.strip() == "edgeq_quantizer" for names in lists for name in names)


def _marks(item: pytest.Item) -> options.Marks:
    try:
        return options.resolve_marks(
            item.iter_markers("edgeq"), item.config.rootpath, item.config.stash[_runtimes_key]
        )
    except pytest.UsageError as error:
        message = f"{item.nodeid}: {error}"
    # As pytest does for its own markers: a message for this file, without a traceback.
    pytest.fail(message, pytrace=False)


def _runtime(config: pytest.Config) -> str:
    """Tell the kernels that the running test is to use."""
    item = config.stash[_running_key]
    marked = None if item is None else _marks(item).runtime
    return config.stash[settings_key].runtime_beside(marked)


# --- what was collected -------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Note modules of which nothing is collected."""
    report = yield
    if isinstance(collector, pytest.File) and not report.passed:
        why = "it was skipped" if report.skipped else "it could not be collected"
        collector.config.stash[_absent_key][collector.path] = why
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Note all tests before any are deselected."""
    config.stash[_collected_key] = list(items)
    return (yield)


def _collected(session: pytest.Session) -> list[CollectedModule]:
    """Describe what this process collected of the modules that have baselines."""
    from pytest_edgeq.snapshots.collected import collected_modules

    config = session.config
    layout = memory_of(config).layout
    items: dict[Path, list[pytest.Item]] = {}
    for item in config.stash[_collected_key]:
        items.setdefault(item.path, []).append(item)
    collected = {
        module: {item.nodeid: _owner(item).test for item in its_items}
        for module, its_items in items.items()
        if layout.has_baselines(module)
    }
    files = [argument.partition("::")[0] for argument in config.args if "::" in argument]
    absent = config.stash[_absent_key]
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


# --- the running test ---------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Book what is measured meanwhile on this test."""
    _marks(item)
    with _running(item, "setup"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Book what is claimed meanwhile on this test."""
    with _running(item, "call"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Book what is measured meanwhile on this test."""
    with _running(item, "teardown"):
        return (yield)


@contextlib.contextmanager
def _running(item: pytest.Item, phase: Phase) -> Iterator[None]:
    stash = item.config.stash
    stash[_running_key] = item
    try:
        with memory_of(item.config).running(_owner(item), phase):
            yield
    finally:
        stash[_running_key] = None


def _owner(item: pytest.Item) -> Owner:
    from pytest_edgeq.snapshots.record import Owner

    # Not from the node id: pytest-xdist appends the group to it with --dist=loadgroup.
    names: list[str] = []
    for node in item.listchain():
        names = [] if isinstance(node, pytest.File) else [*names, node.name]
    return Owner(item.path, "::".join(names))


# --- what became of it --------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put what the test claimed on the report of its call."""
    report = yield
    messages = item.config.stash[_cache_messages_key]
    report.__dict__["edgeq_cache"] = list(messages)
    messages.clear()
    if call.when == "call":
        record = memory_of(item.config).record(_owner(item))
        report.__dict__["edgeq"] = record
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the controller what this worker of pytest-xdist collected."""
    config = session.config
    if hasattr(config, "workeroutput") and _memory_key in config.stash:
        config.workeroutput[_OUTPUT] = _collected(session)


class _Controller:
    """The hooks of the process that hears of every test: of all but the workers of xdist."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._log: RunLog | None = None
        self._cache_messages: dict[CacheMessage, None] = {}
        self._collected: list[list[CollectedModule]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take one report, of this process or of a worker."""
        if self._log is None:
            from pytest_edgeq.snapshots.obsolete import RunLog

            self._log = RunLog()
        self._log.add(
            report.nodeid,
            getattr(report, "worker_id", ""),
            report.when or "",
            report.outcome,
            getattr(report, "edgeq", None),
        )
        told = getattr(report, "edgeq_cache", ())
        self._cache_messages.update(dict.fromkeys((kind, text) for kind, text in told))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a worker collected; one that crashed has sent nothing."""
        output = getattr(node, "workeroutput", {})
        if _OUTPUT in output:
            self._collected.append(output[_OUTPUT])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Look for obsolete baselines; delete them if asked to."""
        if self._log is None:
            return  # no test ran, so that nothing is known
        from pytest_edgeq.snapshots.obsolete import prune, survey
        from pytest_edgeq.snapshots.summary import Outcome

        settings = self._config.stash[settings_key]
        if self._config.stash[_collected_key]:
            self._collected.append(_collected(session))
        found = survey(memory_of(self._config).layout, self._log, self._collected)
        is_asked = settings.obsolete == "error" or "prune" in settings.update
        outcome = Outcome(
            found,
            obsolete_is_error=settings.obsolete == "error",
            tells_not_judged=is_asked or self._config.get_verbosity() > 0,
        )
        if "prune" in settings.update:
            kept = prune(found.obsolete)
            pruned = [path for path in found.obsolete if path not in kept]
            outcome = dataclasses.replace(outcome, pruned=pruned, kept=kept)
        self._config.stash[_outcome_key] = outcome
        if outcome.fails and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Tell what was written, what differs and what is obsolete, if anything is."""
        outcome = self._config.stash.get(_outcome_key, None)
        if outcome is None or self._log is None:
            return
        from pytest_edgeq.snapshots.summary import Line, summarize

        lines = summarize(memory_of(self._config).layout, self._log, outcome)
        verbose = self._config.get_verbosity() > 0
        lines += [
            Line(f"{kind.capitalize()}: {text}", kind)
            for kind, text in self._cache_messages
            if verbose or kind == "warning"
        ]
        if lines:
            terminalreporter.section("edgeq")
        for line in lines:
            terminalreporter.write_line(line.text, **_MARKUP[line.severity])
