"""
Every option of the plugin, each declared once.

One stem gives three spellings: the flag `--edgeq-x-y`, the ini name `edgeq_x_y` and the dest
`edgeq_x_y`.
A flag that was not given is None, so that it can be told from one that repeats the default;
the default stands in the ini.
The command line beats the marker, the marker beats the ini; but the quantizers that a marker names
belong to what the test asserts, and nothing overrides them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import pytest

from pytest_edgeq.executors.names import check_spec
from pytest_edgeq.isolate.bounds import DEFAULT_SECONDS, parse_memory
from pytest_edgeq.parallel import available_cores
from pytest_edgeq.presets import (
    CACHE_MODES,
    DEFAULT_PRESET,
    DEFAULT_RUNTIME,
    ISOLATE_MODES,
    NEEDS_REPORT,
    NEEDS_TENSORFLOW,
    PRESETS,
    RUNTIMES,
    unknown_preset,
)
from pytest_edgeq.targets.target_spec import parse_targets
from pytest_edgeq.tflite.registry import BUILT_IN, Runtimes

UPDATE_CATEGORIES: Final = ("new", "changed", "tighten", "prune")
OBSOLETE_LEVELS: Final = ("info", "error")
LOCALIZE_MODES: Final = ("auto", "off")
CI_VARIABLES: Final = (
    "CI",
    "BUILD_NUMBER",
    "GITHUB_ACTIONS",
    "GITLAB_CI",
    "TF_BUILD",
    "JENKINS_URL",
    "TEAMCITY_VERSION",
    "CIRCLECI",
    "BUILDKITE",
    "TRAVIS",
)

_BARE_UPDATE: Final = "new,changed"
_WRITE_WITH_EQUALS: Final = (
    "If this is a test path that the flag has taken for its value, write "
    f"--edgeq-update={_BARE_UPDATE} (with '=') or put the flag after the path."
)
_REFUSED_ON_CI: Final = (
    "{where}: baselines are never written on CI, and the environment variable {variable} "
    "is set to {value!r}.\n"
    "  Run the update on your own machine, read the change and commit it; "
    "or unset {variable} if this is no CI."
)


@dataclasses.dataclass(frozen=True)
class Place:
    """
    Where an option's text was written.

    Attributes:
        where: A name for messages.
        folder: What its paths are relative to.
        runtimes: The runtimes that can be named there.
    """

    where: str
    folder: Path
    runtimes: Runtimes = BUILT_IN


@dataclasses.dataclass(frozen=True)
class Option:
    """
    One option, on the command line and in the ini file.

    Attributes:
        stem: The name that all spellings share, such as `snapshot_dir`.
        default: The ini default.
        metavar: What `--help` shows for the value.
        help: One sentence for `--help`.
        resolve: Makes the value from the text, or raises pytest.UsageError with the valid values.
        bare: What the flag means without a value; None if it needs one.
        is_lines: Whether the ini value is a list of lines, and the flag may be given several times.
    """

    stem: str
    default: str | int
    metavar: str
    help: str
    resolve: Callable[[str, Place], Any]
    bare: str | None = None
    is_lines: bool = False

    @property
    def flag(self) -> str:
        """The spelling on the command line."""
        return f"--edgeq-{self.stem.replace('_', '-')}"

    @property
    def name(self) -> str:
        """The ini name, which is the dest, too."""
        return f"edgeq_{self.stem}"


def _split(text: str) -> list[str]:
    """Take a comma list apart; blanks around the words do not count."""
    return [word for word in (part.strip() for part in text.split(",")) if word]


def _choice(valid: Sequence[str]) -> Callable[[str, Place], str]:
    """Make the resolver of an option that is one word of a few."""

    def resolve(text: str, place: Place) -> str:
        if text not in valid:
            raise pytest.UsageError(
                f"{place.where}: {text!r} is none of the valid values: {', '.join(valid)}"
            )
        return text

    return resolve


def _integer(lowest: int, end: int | None = None) -> Callable[[str, Place], int]:
    """Make the resolver of an option that is an integer from `lowest`, below `end`."""
    valid = f"an integer from {lowest}" if end is None else f"an integer from {lowest} to {end - 1}"

    def resolve(text: str, place: Place) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if value < lowest or (end is not None and value >= end):
            raise pytest.UsageError(f"{place.where}: expected {valid}, got {text!r}")
        return value

    return resolve


def quantizer_of(text: str, place: Place) -> str | None:
    """Resolve one quantizer's name: a preset, the path of a recipe, or `none` for float."""
    if text == "none":
        return None
    if text.endswith(".json"):
        path = (place.folder / text).resolve()
        if not path.is_file():
            raise pytest.UsageError(f"{place.where}: there is no recipe file at {path}")
        return str(path)
    if text not in PRESETS:
        raise pytest.UsageError(
            f"{place.where}: {unknown_preset(text)}\n"
            "  or the path of a recipe that ends in .json, or none for float"
        )
    return text


def _quantizers(text: str, place: Place) -> tuple[str | None, ...]:
    words = _split(text)
    if not words:
        raise pytest.UsageError(
            f"{place.where}: names no quantizer, so tests that ask for edgeq_quantizer would be "
            f"skipped without a word\n  presets: {', '.join(PRESETS)}"
        )
    values = tuple(quantizer_of(word, place) for word in words)
    for value in values:
        if values.count(value) > 1:
            raise pytest.UsageError(f"{place.where}: {value or 'none'} is named more than once")
    return values


def runtime_of(text: str, place: Place) -> str:
    """Resolve a runtime's name; TensorFlow is looked for, not imported."""
    try:
        place.runtimes.check(text)
    except ValueError as error:
        raise pytest.UsageError(f"{place.where}: {error}") from None
    if text == "tensorflow" and importlib.util.find_spec("tensorflow") is None:
        raise pytest.UsageError(f"{place.where}: {NEEDS_TENSORFLOW}")
    return text


def _update(text: str, place: Place) -> frozenset[str]:
    words = _split(text)
    for word in words:
        if word not in UPDATE_CATEGORIES:
            raise pytest.UsageError(
                f"{place.where}: {word!r} is none of the valid values: "
                f"{', '.join(UPDATE_CATEGORIES)}\n  {_WRITE_WITH_EQUALS}"
            )
    if words and (variable := ci_variable()) is not None:
        raise pytest.UsageError(
            _REFUSED_ON_CI.format(where=place.where, variable=variable, value=os.environ[variable])
        )
    return frozenset(words)


def _directory(text: str, place: Place) -> Path | None:
    if not text:
        return None
    path = place.folder / text
    if path.exists() and not path.is_dir():
        raise pytest.UsageError(f"{place.where}: {path} is a file; a folder is wanted")
    return path


def _file(text: str, place: Place) -> Path | None:
    """Resolve the path of a file to write; None for none."""
    if not text:
        return None
    path = place.folder / text
    if path.is_dir():
        raise pytest.UsageError(f"{place.where}: {path} is a folder; a file is wanted")
    return path


def _writable_directory(text: str, place: Place) -> Path | None:
    """Resolve the path of a folder to write into, which need not be there yet."""
    path = _directory(text, place)
    if path is None:
        return None
    nearest = next(each for each in (path, *path.parents) if each.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        what = "cannot be written" if nearest.is_dir() else "is a file"
        raise pytest.UsageError(
            f"{place.where}: expected a folder that can be written, got {path}\n"
            f"cause: {nearest} {what}"
        )
    return path


def _html(text: str, place: Place) -> Path | None:
    """Resolve the path of the HTML report; its libraries are looked for, not imported."""
    path = _file(text, place)
    if path is not None and importlib.util.find_spec("bokeh") is None:
        raise pytest.UsageError(f"{place.where}: {NEEDS_REPORT}")
    return path


def _memory(text: str, place: Place) -> int | None:
    """Resolve a number of bytes; None for the default."""
    if not text:
        return None
    try:
        return parse_memory(text)
    except ValueError as error:
        raise pytest.UsageError(f"{place.where}: {error}") from None


def _executor(text: str, place: Place) -> str | None:
    """Resolve the name of an executor; dask is looked for, not imported."""
    try:
        return check_spec(text) if text else None
    except (ValueError, ModuleNotFoundError) as error:
        raise pytest.UsageError(f"{place.where}: {error}") from None


def _targets(text: str, place: Place) -> dict[str, tuple[str, ...]]:
    """Resolve targets, one a line."""
    try:
        return parse_targets(text.splitlines())
    except ValueError as error:
        raise pytest.UsageError(f"{place.where}: {error}") from None


def _check_targets(text: str, place: Place) -> tuple[str, ...]:
    """Resolve the names of runtimes of targets."""
    words = tuple(_split(text))
    try:
        return Runtimes(targets=place.runtimes.targets, check_targets=words).check_targets
    except ValueError as error:
        raise pytest.UsageError(f"{place.where}: {error}") from None


OPTIONS: Final = (
    Option(
        "quantizers",
        DEFAULT_PRESET,
        "NAMES",
        "Comma list of quantizers that tests asking for edgeq_quantizer run under: "
        "presets, .json recipes, none for float.",
        _quantizers,
    ),
    Option(
        "runtime",
        DEFAULT_RUNTIME,
        "NAME",
        f"What runs the .tflite: {', '.join(RUNTIMES)}, a name from the hook "
        "pytest_edgeq_runtimes, or TARGET or TARGET:KERNELS of a target.",
        runtime_of,
    ),
    Option(
        "targets",
        "",
        "NAME=COMMAND",
        "A machine or CPU to run files on, by a command that starts a Python with numpy and "
        "ai_edge_litert there; in the ini a list. The flag may be given several times, and adds to "
        "the ini's.",
        _targets,
        is_lines=True,
    ),
    Option(
        "check_targets",
        "",
        "NAMES",
        "Comma list of targets, as --edgeq-runtime names them, that edgeq.check runs beside the "
        "runtimes of this machine.",
        _check_targets,
    ),
    Option(
        "target_timeout",
        DEFAULT_SECONDS,
        "SECONDS",
        "After so many seconds without an answer a target has failed.",
        _integer(1),
    ),
    Option(
        "threads",
        0,
        "N",
        "Cores that the session may use; 0 for all, or a fair share beside other workers of "
        "pytest-xdist. Figures are the same for any number.",
        _integer(0),
    ),
    Option(
        "executor",
        "",
        "NAME",
        "Where samples are measured: processes:N for N processes of this machine, dask:ADDRESS for "
        "a cluster (needs pytest-edgeq[dask]). Figures are the same.",
        _executor,
    ),
    Option("seed", 0, "N", "Seed of everything random in quantization.", _integer(0, 2**32)),
    Option(
        "update",
        "",
        "WHAT",
        "Accept what was measured into the baselines: comma list of "
        f"{', '.join(UPDATE_CATEGORIES)}; without a value {_BARE_UPDATE}. "
        "A value needs '='. Refused on CI.",
        _update,
        bare=_BARE_UPDATE,
    ),
    Option(
        "snapshot_dir",
        "",
        "DIR",
        "Folder of the baselines, relative to rootdir, in place of __edgeq__ beside each test.",
        _directory,
    ),
    Option(
        "obsolete",
        "info",
        "LEVEL",
        f"Baselines that no test owns any more: {' or '.join(OBSOLETE_LEVELS)} (exit status 1).",
        _choice(OBSOLETE_LEVELS),
    ),
    Option(
        "localize",
        "auto",
        "MODE",
        "Name the layer to blame when a budget or a remembered error fails: "
        f"{' or '.join(LOCALIZE_MODES)}.",
        _choice(LOCALIZE_MODES),
    ),
    Option(
        "localize_timeout",
        60,
        "SECONDS",
        "After so many seconds of it no further sample is looked at.",
        _integer(1),
    ),
    Option(
        "cache",
        "on",
        "MODE",
        f"Keep finished conversions for later runs: {', '.join(CACHE_MODES)} (refresh replaces "
        "what earlier runs have kept).",
        _choice(CACHE_MODES),
    ),
    Option(
        "cache_dir",
        "",
        "DIR",
        "Directory of finished conversions, in place of one below pytest's cache directory; "
        "processes may share it.",
        _directory,
    ),
    Option(
        "isolate",
        "auto",
        "MODE",
        "Run native code in a child process, whose crash fails its test alone: "
        f"{', '.join(ISOLATE_MODES)} (auto: the first run of a file made elsewhere, and of each "
        f"file on other runtimes than {DEFAULT_RUNTIME}; on: conversions and all runs).",
        _choice(ISOLATE_MODES),
    ),
    Option(
        "isolate_timeout",
        DEFAULT_SECONDS,
        "SECONDS",
        "After so many seconds one step in the child process has failed.",
        _integer(1),
    ),
    Option(
        "isolate_memory",
        "",
        "SIZE",
        "Memory that the child process may use: 4G, 512M, or a number of MiB. By default half of "
        "the machine's or container's, shared by the workers of pytest-xdist; at least 4G. Linux.",
        _memory,
    ),
    Option(
        "artifacts",
        "",
        "DIR",
        "For each failed test keep the .tflite, the worst samples, expected and got, and a script "
        "that shows the failure without pytest, in a folder of its own below this one.",
        _writable_directory,
    ),
    Option("json", "", "FILE", "Write the record of the run as JSON to this file.", _file),
    Option(
        "markdown",
        "",
        "FILE",
        "Write models and failures as Markdown to this file, for a pull request. Where "
        "GITHUB_STEP_SUMMARY is set they are appended to that file, too.",
        _file,
    ),
    Option(
        "html",
        "",
        "FILE",
        "Write the record of the run as an HTML page with charts to this file; needs "
        "pytest-edgeq[report].",
        _html,
    ),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """
    What the options came to; one field an option, by its stem.

    Attributes:
        quantizers: Presets, absolute paths of recipes, None for float.
        runtime: What runs the `.tflite`.
        targets: Words of the command of each target, by name.
        check_targets: Runtimes of targets that checks run, too.
        target_timeout: Seconds.
        threads: Cores that the session may use; 0 for a share of all.
        executor: `processes:N` or `dask:ADDRESS`; None to measure in this process.
        seed: Seed of everything random in quantization.
        update: Categories of baselines that may be written.
        snapshot_dir: Folder of the baselines; None for beside each test.
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
        on_command_line: Stems whose value was given there, which no marker overrides.
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
        """Whether a view shows outputs and samples of comparisons, not their errors alone."""
        return self.json is not None or self.html is not None

    @property
    def writes_views(self) -> bool:
        """Whether a view of the run is written to a file of its own."""
        return any(path is not None for path in (self.json, self.markdown, self.html))

    def cores(self, workers: int) -> int:
        """Return the number of cores for one of several workers on this machine."""
        return self.threads or max(1, available_cores() // workers)

    def runtime_beside(self, marked: str | None) -> str:
        """Pick the runtime that counts beside a marker's: command line, marker, ini."""
        if marked is None or "runtime" in self.on_command_line:
            return self.runtime
        return marked

    def quantizers_beside(self, marked: tuple[object, ...] | None) -> tuple[object, ...]:
        """Pick the quantizers that count beside a marker's: marker, command line, ini."""
        return self.quantizers if marked is None else marked


def ci_variable(environment: Mapping[str, str] = os.environ) -> str | None:
    """
    Tell which environment variable says that this is CI.

    Returns:
        Its name, or None. Empty, `0` and `false` count as not set.
    """
    for name in CI_VARIABLES:
        if environment.get(name, "").strip().lower() not in ("", "0", "false"):
            return name
    return None


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
    """Read an ini value as text, whatever pytest made of it."""
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
    Return the targets of a run, which name runtimes, and their time limit.

    Returns:
        The words of each command by name, those of the command line in place of the ini's of the
        same names; and seconds.

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
    """Resolve the value of an option as it stands in the ini or on the command line."""
    if where == "ini":
        folder = config.rootpath if config.inipath is None else config.inipath.parent
        text, place = _ini(config, option), Place(f"ini option {option.name}", folder, runtimes)
    else:
        given = config.getoption(option.name)
        text = "\n".join(given) if option.is_lines else given
        place = Place(option.flag, config.invocation_params.dir, runtimes)
    if option.stem == "snapshot_dir":
        # Relative to the root folder wherever it is written, as the paths below it are.
        place = dataclasses.replace(place, folder=config.rootpath)
    return option.resolve(text, place)


def resolve(config: pytest.Config, runtimes: Runtimes) -> Settings:
    """
    Make the settings of a run from its command line and ini file.

    Args:
        config: Of the run.
        runtimes: Those that can be named.

    Raises:
        pytest.UsageError: A value is not valid, or an update was asked for on CI.
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
