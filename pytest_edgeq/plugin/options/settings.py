"""Resolve the options of a run into settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from pytest_edgeq.compare.parallel import available_cores
from pytest_edgeq.plugin.options.declared import OPTIONS, Option
from pytest_edgeq.plugin.options.values import Place
from pytest_edgeq.runtimes.registry import Runtimes


@dataclasses.dataclass(frozen=True)
class Settings:
    """
    The values of all options; one field for each, by its stem.

    Attributes:
        quantizers: Presets, absolute paths of recipes, None for float.
        runtime: The default runtime.
        targets: Words of the command of each target, by name.
        check_targets: Runtimes of targets on which checks run, too.
        target_timeout: Seconds.
        threads: Cores that the session may use; 0 for a share of all.
        executor: `processes:N` or `dask:ADDRESS`; None to measure in this process.
        seed: Seed of everything random in quantization.
        update: Categories of baselines that may be written.
        snapshot_dir: Folder of the baselines; None for the folder of each test.
        obsolete: `info` or `error`.
        localize: `auto` or `off`.
        localize_timeout: Seconds.
        cache: `on`, `off` or `refresh`.
        cache_dir: Directory of finished conversions; None for one below pytest's cache directory.
        isolate: `auto`, `on` or `off`.
        isolate_timeout: Seconds.
        isolate_memory: Bytes; None for the default.
        artifacts: Folder of the bundles of failed tests; None for none.
        json: File of the run's record; None for none.
        markdown: File of the Markdown page; None for none.
        html: File of the HTML page; None for none.
        on_command_line: Stems of options on the command line, which no marker overrides.
    """

    quantizers: tuple[str | None, ...]
    runtime: str
    targets: Mapping[str, tuple[str, ...]]
    check_targets: tuple[str, ...]
    target_timeout: int
    threads: int
    executor: str | None
    seed: int
    update: frozenset[str]
    snapshot_dir: Path | None
    obsolete: Literal["info", "error"]
    localize: Literal["auto", "off"]
    localize_timeout: int
    cache: Literal["on", "off", "refresh"]
    cache_dir: Path | None
    isolate: Literal["auto", "on", "off"]
    isolate_timeout: int
    isolate_memory: int | None
    artifacts: Path | None
    json: Path | None
    markdown: Path | None
    html: Path | None
    on_command_line: frozenset[str]

    @property
    def wants_details(self) -> bool:
        """Whether a view shows outputs and samples of comparisons besides errors."""
        return self.json is not None or self.html is not None

    @property
    def writes_views(self) -> bool:
        """Whether a view of the run is written to a file."""
        return any(path is not None for path in (self.json, self.markdown, self.html))

    def cores(self, workers: int) -> int:
        """Return the number of cores for one of several workers on this machine."""
        return self.threads or max(1, available_cores() // workers)

    def runtime_beside(self, marked: str | None) -> str:
        """Return the runtime by priority: command line, marker, ini."""
        if marked is None or "runtime" in self.on_command_line:
            return self.runtime
        return marked

    def quantizers_beside(self, marked: tuple[object, ...] | None) -> tuple[object, ...]:
        """Return the quantizers by priority: marker, command line, ini."""
        return self.quantizers if marked is None else marked


def add_options(parser: pytest.Parser) -> None:
    """Register every option, on the command line and in the ini."""
    group = parser.getgroup("edgeq", "quantization regression tests (pytest-edgeq)")
    for option in OPTIONS:
        many: dict[str, Any] = {}
        if option.bare is not None:
            many = {"nargs": "?", "const": option.bare}
        if option.is_lines:
            many = {"action": "append"}
        group.addoption(
            option.flag,
            dest=option.name,
            metavar=option.metavar,
            default=None,
            help=option.help,
            **many,
        )
        ini_type: Literal["int", "string", "linelist"]
        ini_type = "int" if isinstance(option.default, int) else "string"
        default: Any = option.default
        if option.is_lines:
            ini_type, default = "linelist", []
        parser.addini(option.name, option.help, type=ini_type, default=default)


def _ini(config: pytest.Config, option: Option) -> str:
    """Return an ini value as text, whatever type pytest made of it."""
    try:
        value = config.getini(option.name)
    except (TypeError, ValueError, pytest.UsageError) as error:
        # pytest's own text need not name the option ("invalid literal for int()").
        kind = "an integer" if isinstance(option.default, int) else 'a string, such as "a,b"'
        raise pytest.UsageError(f"ini option {option.name}: expected {kind}: {error}") from None
    if isinstance(value, list):
        return ("\n" if option.is_lines else ",").join(map(str, value))
    return str(value).strip()


def target_options(config: pytest.Config) -> tuple[dict[str, tuple[str, ...]], int]:
    """
    Return the targets of a run, which name runtimes, and their timeout.

    Returns:
        The words of each command by name, where the command line overrides the ini; and seconds.

    Raises:
        pytest.UsageError: One cannot be read.
    """
    declared = {option.stem: option for option in OPTIONS}
    option, timeout = declared["targets"], declared["target_timeout"]
    found = dict(_resolved(config, option, "ini", Runtimes()))
    if config.getoption(option.name) is not None:
        found |= _resolved(config, option, "flag", Runtimes())
    where: Literal["ini", "flag"]
    where = "ini" if config.getoption(timeout.name) is None else "flag"
    seconds: int = _resolved(config, timeout, where, Runtimes())
    return found, seconds


def _resolved(
    config: pytest.Config, option: Option, where: Literal["ini", "flag"], runtimes: Runtimes
) -> Any:
    """Resolve the value of an option in the ini or on the command line."""
    if where == "ini":
        folder = config.rootpath if config.inipath is None else config.inipath.parent
        text, place = _ini(config, option), Place(f"ini option {option.name}", folder, runtimes)
    else:
        given = config.getoption(option.name)
        text = "\n".join(given) if option.is_lines else given
        place = Place(option.flag, config.invocation_params.dir, runtimes)
    if option.stem == "snapshot_dir":
        # Always relative to the root folder, as the paths below it are.
        place = dataclasses.replace(place, folder=config.rootpath)
    return option.resolve(text, place)


def resolve(config: pytest.Config, runtimes: Runtimes) -> Settings:
    """
    Return the settings of a run from its command line and ini file.

    Args:
        config: Of the run.
        runtimes: The runtimes that can be named.

    Raises:
        pytest.UsageError: A value is not valid, or an update was requested on CI.
    """
    values: dict[str, Any] = {}
    given = set()
    for option in OPTIONS:
        if config.getoption(option.name) is not None:
            given.add(option.stem)
        where: Literal["ini", "flag"] = "flag" if option.stem in given else "ini"
        values[option.stem] = _resolved(config, option, where, runtimes)
    values["targets"], _ = target_options(config)
    return Settings(**values, on_command_line=frozenset(given))
