"""
The plugin: hooks and fixtures only.

It is loaded into every pytest run where pytest-edgeq is installed, so at first it imports only the
options: the baselines, the journal, torch, numpy and the converter are imported with the fixture.

All state is in `config.stash` (`state`). `options` has the options, `markers` the marker `edgeq`,
`project_targets` the targets of the ini. `controller` receives the reports and writes the views;
`artifacts` and `html_extras` write what shows a failure. `tracebacks`, `library_output` and
`terminal_progress` change what the terminal shows.

What a test claimed is attached to its report as plain data, because only reports survive the crash
of an xdist worker.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shlex
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_edgeq.names import quantizer_ids
from pytest_edgeq.plugin.controller import OUTPUT, Controller, collected_in
from pytest_edgeq.plugin.html_extras import add_extras, writes_html
from pytest_edgeq.plugin.markers import MARKER, Marks, check_quantizers_are_used, resolve_marks
from pytest_edgeq.plugin.options.declared import Settings, add_options, resolve, target_options
from pytest_edgeq.plugin.state import (
    PluginState,
    fixture_values,
    journal_of,
    memory_of,
    owner_of,
    running,
    state_key,
)
from pytest_edgeq.plugin.terminal_progress import progress_of
from pytest_edgeq.runtimes.registry import Runtimes
from pytest_edgeq.runtimes.workers.settings import (
    IsolationSettings,
    available_cores,
    default_memory,
)
from pytest_edgeq.runtimes.workers.settings import begin as begin_isolation

if TYPE_CHECKING:
    from pytest_edgeq.edgeq import Edgeq
    from pytest_edgeq.tflite.runtimes import Runtime

# Distributions that the header names even if they are missing.
_NEEDED = ("ai-edge-litert",)


class HookSpecs:
    """The hooks that other plugins, and conftest.py files, may implement."""

    @staticmethod
    def pytest_edgeq_runtimes(config: pytest.Config) -> Mapping[str, Runtime] | None:
        """
        Return runtimes of your own: a dict of name → runner.

        Called once, while pytest is being configured, and in each worker of pytest-xdist by itself,
        so it must be in a plugin or in a conftest.py that pytest reads before it collects. Results
        of several plugins are merged. A name is valid wherever a runtime is named.

        `pytest_edgeq.tflite.runtimes.Runtime` is the protocol of a runner.
        """


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the hooks."""
    pluginmanager.add_hookspecs(HookSpecs)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the options."""
    add_options(parser)


# After the plugins that register others while they are configured.
@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Resolve the options, to refuse invalid ones at once, and register the marker."""
    config.addinivalue_line("markers", MARKER)
    runtimes = _registered(config)
    settings = resolve(config, runtimes)
    runtimes.check_targets = settings.check_targets
    config.add_cleanup(runtimes.close)
    cache_dir = _cache_dir(config, settings)
    memory = settings.isolate_memory
    memory = default_memory(_workers(config)) if memory is None else memory
    is_worker = hasattr(config, "workerinput")
    controller = os.getppid() if is_worker else None
    isolation = settings.isolate, settings.isolate_timeout, memory, cache_dir
    config.add_cleanup(begin_isolation(IsolationSettings(*isolation, controller=controller)))
    progress = progress_of(config)
    state = config.stash[state_key] = PluginState(settings, runtimes, cache_dir, memory, progress)
    if settings.artifacts is not None:
        from pytest_edgeq.plugin.artifacts import Artifacts

        state.artifacts = Artifacts(config, settings.artifacts)
    if not is_worker:
        config.pluginmanager.register(Controller(config), "edgeq-controller")


def _cache_dir(config: pytest.Config, settings: Settings) -> Path | None:
    """Return the directory of the conversion cache; None if it is off."""
    if settings.cache == "off":
        return None
    if settings.cache_dir is not None:
        return settings.cache_dir
    if not config.pluginmanager.hasplugin("cacheprovider"):
        return None
    folder = Path(os.path.expandvars(config.getini("cache_dir")))
    return config.rootpath / folder / "d" / "edgeq"


def _registered(config: pytest.Config) -> Runtimes:
    """Return the merged runtimes of all plugins."""
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
    commands, seconds = target_options(config)
    if not commands:
        return Runtimes(merged, seconds=seconds)
    from pytest_edgeq.runtimes.workers.target import make_targets

    try:
        return Runtimes(merged, targets=make_targets(commands, seconds), seconds=seconds)
    except ValueError as error:
        raise pytest.UsageError(f"edgeq_targets: {error}") from None


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Return the effective settings and the versions, without importing libraries."""
    from pytest_edgeq.versions import library_versions, untried

    state = config.stash[state_key]
    settings = state.settings
    words = [f"runtime={settings.runtime}", f"threads={_cores(config)}", f"seed={settings.seed}"]
    if settings.executor is not None:
        words.append(f"executor={settings.executor}")
    if own := state.runtimes.own:
        words.append(f"runtimes={','.join(own)}")
    if settings.update:
        words.append(f"update={','.join(sorted(settings.update))}")
    versions = library_versions()
    releases = [
        f"{name} {version or 'not installed'}"
        for name, version in versions.items()
        if version is not None or name in _NEEDED
    ]
    new = [f"not tried with {', '.join(map(str, others))}"] if (others := untried(versions)) else []
    lines = [" ".join(words), ", ".join(releases), *new, _cache_header(config)]
    return [f"edgeq: {line}" for line in (*lines, *_target_headers(config))]


def _target_headers(config: pytest.Config) -> list[str]:
    """Describe the targets; start the one that all tests run on."""
    runtimes, settings = config.stash[state_key].runtimes, config.stash[state_key].settings
    states = {name: shlex.join(target.command) for name, target in runtimes.targets.items()}
    used = runtimes.target_of(settings.runtime)
    if used is not None and not config.option.collectonly:
        try:
            states[used.name] = str(runtimes.machine_of(settings.runtime))
        except RuntimeError as error:
            states[used.name] = str(error).splitlines()[0]
    return [f"target {name}: {state}" for name, state in states.items()]


def _cores(config: pytest.Config) -> int:
    """Return the number of cores that this process may use."""
    return config.stash[state_key].settings.threads or max(1, available_cores() // _workers(config))


def _workers(config: pytest.Config) -> int:
    """Return the number of processes that run tests of this session on this machine."""
    count: int = getattr(config, "workerinput", {"workercount": 1})["workercount"]
    return count


def _cache_header(config: pytest.Config) -> str:
    directory, mode = config.stash[state_key].cache_dir, config.stash[state_key].settings.cache
    if directory is None:
        why = "" if mode == "off" else " (pytest's cache directory is turned off)"
        return f"conversion cache: off{why}"
    from pytest_edgeq.quantize.cache.directory import size_of

    count, size = size_of(directory)
    is_below = directory.is_relative_to(config.rootpath)
    path = directory.relative_to(config.rootpath) if is_below else directory
    entries = "1 entry" if count == 1 else f"{count} entries"
    return f"conversion cache: {path} ({mode}, {entries}, {size / 1e6:.1f} MB)"


@pytest.fixture(scope="session")
def edgeq(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Edgeq]:
    """
    Quantize a model, compare it with torch, and check baselines.

    It may be used in fixtures of any scope; its measurements are recorded for the running test.
    """
    from pytest_edgeq.edgeq import Edgeq
    from pytest_edgeq.quantize.cache.directory import CacheLog

    # Otherwise Python scans all objects of the libraries at exit, for 2 to 3 s.
    atexit.register(gc.freeze)
    config = request.config
    state = config.stash[state_key]
    settings, messages = state.settings, state.cache_messages
    session = Edgeq(
        runtime=lambda: _runtime(config),
        threads=_cores(config),
        seed=settings.seed,
        directory=tmp_path_factory.mktemp("edgeq"),
        memory=memory_of(config),
        runtimes=state.runtimes,
        localize_timeout=settings.localize_timeout if settings.localize == "auto" else 0,
        suggest_timeout=settings.suggest,
        cache_dir=state.cache_dir,
        cache=settings.cache,
        cache_log=CacheLog(
            warn=lambda text: messages.append(("warning", text)),
            note=lambda text: messages.append(("info", text)),
        ),
        progress=state.progress,
        journal=journal_of(config),
        isolate=settings.isolate,
        isolate_timeout=settings.isolate_timeout,
        isolate_memory=state.isolate_memory,
        executor=settings.executor,
    )
    yield session
    session.close()


@pytest.fixture(scope="session")
def edgeq_quantizer(request: pytest.FixtureRequest) -> object:
    """
    Return one quantizer at a time; its tests run once with each.

    They are those of the marker `edgeq(quantizers=[…])`, else of `--edgeq-quantizers`, else of the
    ini option `edgeq_quantizers`, else the default preset.
    """
    return request.param


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Check the marker; parametrize the test with quantizers if it uses them."""
    config = metafunc.config
    marks = _marks(metafunc.definition)
    if "edgeq_quantizer" in metafunc.fixturenames and not _parametrized(metafunc):
        quantizers = marks.quantizers
        if quantizers is None:
            quantizers = config.stash[state_key].settings.quantizers
        metafunc.parametrize(
            "edgeq_quantizer", quantizers, ids=quantizer_ids(quantizers), indirect=True
        )


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, object, object]:
    """Check that quantizers in markers are used, also those of `pytest.param`."""
    made = yield
    for item in made if isinstance(made, list) else ():
        if isinstance(item, pytest.Function):
            case = getattr(item, "callspec", None)
            of_case = () if case is None else case.marks
            with _refusing(item):
                check_quantizers_are_used(item.own_markers, item.fixturenames, of_case)
    return made


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Record modules without collected tests."""
    report = yield
    if isinstance(collector, pytest.File) and not report.passed:
        why = "it was skipped" if report.skipped else "it could not be collected"
        collector.config.stash[state_key].absent[collector.path] = why
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Record all tests before any are deselected."""
    config.stash[state_key].collected = list(items)
    return (yield)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the collected tests of this pytest-xdist worker to the controller."""
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput[OUTPUT] = collected_in(session)


def _parametrized(metafunc: pytest.Metafunc) -> bool:
    """Return whether the test parametrizes `edgeq_quantizer` itself."""
    argnames = [
        mark.args[0] if mark.args else mark.kwargs.get("argnames", ())
        for mark in metafunc.definition.iter_markers("parametrize")
    ]
    lists = [names.split(",") if isinstance(names, str) else names for names in argnames]
    return any(name.strip() == "edgeq_quantizer" for names in lists for name in names)


def _marks(item: pytest.Item) -> Marks:
    """Read the test's markers."""
    with _refusing(item):
        runtimes = item.config.stash[state_key].runtimes
        return resolve_marks(item.iter_markers("edgeq"), item.config.rootpath, runtimes)


@contextlib.contextmanager
def _refusing(item: pytest.Item) -> Generator[None]:
    """Fail with a message for this file, without a traceback, as for pytest's markers."""
    try:
        yield
    except pytest.UsageError as error:
        raise pytest.fail.Exception(f"{item.nodeid}: {error}", pytrace=False) from None


def _runtime(config: pytest.Config) -> str:
    """Return the runtime of the running test."""
    phase, settings = config.stash[state_key].running, config.stash[state_key].settings
    marked = None if phase is None else _marks(phase.item).runtime
    return settings.runtime if marked is None or "runtime" in settings.on_command_line else marked


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Record measurements during setup for this test."""
    if (artifacts := item.config.stash[state_key].artifacts) is not None:
        artifacts.begin(item)
    _marks(item)
    with running(item, "setup"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Record claims during the call for this test."""
    with running(item, "call"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Record measurements during teardown for this test."""
    with running(item, "teardown"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the test's records to its report; shorten tracebacks of our errors."""
    config, state = item.config, item.config.stash[state_key]
    # Of a test of unittest, pytest moves the error to the call inside of this hook.
    raised = (getattr(item, "_excinfo", None) or [call.excinfo])[0]
    users, hidden = None, False
    if raised is not None:
        from pytest_edgeq.plugin.tracebacks import frames_of_user, hide_other_frames, shows_all

        users = frames_of_user(raised)
        hidden = users is not None and not shows_all(config) and hide_other_frames(raised, users)
    report = yield
    if users:
        path, line = users[-1].tb_frame.f_code.co_filename, users[-1].tb_lineno
        report.__dict__["edgeq_line"] = path, line
    if report.sections:
        from pytest_edgeq.plugin.library_output import separated

        # Refusals of torch, the converter or the kernels, as documented in `Edgeq`.
        is_refused = raised is not None and issubclass(raised.type, RuntimeError)
        is_shown = is_refused or config.option.verbose > 0
        report.sections = separated(report.sections, is_shown=is_shown)
    # A module's fixture that failed raises again for the next test, without frames of ours.
    uses_fixture = "edgeq" in getattr(item, "fixturenames", ())
    if raised is not None and (users is not None or uses_fixture):
        from pytest_edgeq.errors import findings_of

        found = findings_of(raised.value)
        report.__dict__["edgeq_findings"] = [each.to_dict() for each in found]
    if hidden:
        report.sections.append(("edgeq", "the library's own error is shown by --tb=long"))
    if messages := state.cache_messages:
        report.__dict__["edgeq_cache"] = list(messages)
        messages.clear()
    if machines := state.runtimes.machines:
        report.__dict__["edgeq_targets"] = [machine.to_dict() for machine in machines]
    if call.when == "call":
        if state.memory is not None and (claims := state.memory.record(owner_of(item))):
            report.__dict__["edgeq"] = claims
        if used := fixture_values(item, "compare.quantized", "QuantizedModel"):
            journal = journal_of(config)
            report.__dict__["edgeq_uses"] = [journal.add_model(model) for model in used]
    if state.journal is not None:
        _attach_calls(item, report)
    if state.artifacts is not None:
        state.artifacts.take(item, report, None if raised is None else raised.value)
    return report


def _attach_calls(item: pytest.Item, report: pytest.TestReport) -> None:
    """Attach the calls of `Edgeq` since the last report, and their figures."""
    from pytest_edgeq.report.journal import PREFIX, properties_of

    taken = journal_of(item.config).take()
    if report.when == "setup":  # of a test that a plugin runs again
        properties = item.user_properties
        properties[:] = [each for each in properties if not each[0].startswith(PREFIX)]
    if taken["models"] or taken["events"]:
        report.__dict__["edgeq_journal"] = taken
        if writes_html(item.config):
            add_extras(report, taken)
        figures = list(properties_of(taken).items())
        item.user_properties += figures  # for the reports of later phases
        report.user_properties += figures
