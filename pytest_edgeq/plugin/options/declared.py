"""Every option, declared once, and the resolved settings of a run."""

# ruff: noqa: RUF009 # each option is a call that makes a field

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import pytest

from pytest_edgeq.names import CACHE_MODES, DEFAULT_PRESET, DEFAULT_RUNTIME, ISOLATE_MODES, RUNTIMES
from pytest_edgeq.plugin.options import values
from pytest_edgeq.plugin.options.values import OptionSource
from pytest_edgeq.runtimes.registry import Runtimes
from pytest_edgeq.runtimes.workers.settings import DEFAULT_SECONDS

OBSOLETE_LEVELS: Final = ("info", "error")
LOCALIZE_MODES: Final = ("auto", "off")


class Option(NamedTuple):
    """One option, on the command line and in the ini file."""

    default: str | int  # the ini default
    metavar: str  # what `--help` shows for the value
    help: str  # one sentence for `--help`
    # makes the value from the text, or raises ValueError with the valid values
    resolve: Callable[[str, values.OptionSource], Any]
    bare: str | None = None  # what the flag means without a value; None if it needs one
    # whether the ini value is a list of lines, and the flag may be repeated
    is_lines: bool = False
    stem: str = ""  # the name that all spellings share, that of its field: `snapshot_dir`

    @property
    def flag(self) -> str:
        """The spelling on the command line."""
        return f"--edgeq-{self.stem.replace('_', '-')}"

    @property
    def name(self) -> str:
        """The ini name, which is the dest, too."""
        return f"edgeq_{self.stem}"


def _option(*named: Any, **more: Any) -> Any:
    """Declare a field of the settings as an option, with the arguments of `Option`."""
    return dataclasses.field(metadata={"option": Option(*named, **more)})


# Each run of pytest waits for the methods that are made here.
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Settings:
    """The values of all options; each field declares its option."""

    on_command_line: frozenset[str]  # stems set there, which no marker overrides
    quantizers: tuple[str | None, ...] = _option(
        DEFAULT_PRESET,
        "NAMES",
        "Comma list of quantizers that tests asking for edgeq_quantizer run under: "
        "presets, .json recipes, none for float.",
        values.quantizers,
    )
    runtime: str = _option(
        DEFAULT_RUNTIME,
        "NAME",
        f"What runs the .tflite: {', '.join(RUNTIMES)}, a name from the hook "
        "pytest_edgeq_runtimes, or TARGET or TARGET:KERNELS of a target.",
        values.runtime_of,
    )
    targets: Mapping[str, tuple[str, ...]] = _option(
        "",
        "NAME=COMMAND",
        "A machine or CPU to run files on, by a command that starts a Python with numpy and "
        "ai_edge_litert there; in the ini a list. The flag may be given several times, and adds to "
        "the ini's.",
        values.targets,
        is_lines=True,
    )
    check_targets: tuple[str, ...] = _option(
        "",
        "NAMES",
        "Comma list of targets, as --edgeq-runtime names them, that edgeq.check runs in addition "
        "to the runtimes of this machine.",
        values.check_targets,
    )
    target_timeout: int = _option(
        DEFAULT_SECONDS,
        "SECONDS",
        "Seconds without an answer after which a target has failed.",
        values.integer(1),
    )
    threads: int = _option(
        0,
        "N",
        "Cores that the session may use; 0 for all, or a fair share with other workers of "
        "pytest-xdist. Figures are the same for any number.",
        values.integer(0),
    )
    executor: str | None = _option(
        "",
        "NAME",
        "Where samples are measured: processes:N for N processes of this machine, dask:ADDRESS for "
        "a cluster (needs pytest-edgeq[dask]). Figures are the same.",
        values.executor,
    )
    seed: int = _option(
        0, "N", "Seed of everything random in quantization.", values.integer(0, 2**32)
    )
    update: frozenset[str] = _option(
        "",
        "WHAT",
        "Store measurements as baselines: comma list of "
        f"{', '.join(values.UPDATE_CATEGORIES)}; without a value {values.BARE_UPDATE}. "
        "A test path cannot follow the bare flag. Refused on CI.",
        values.update_of,
        bare=values.BARE_UPDATE,
    )
    snapshot_dir: Path | None = _option(
        "",
        "DIR",
        "Folder of the baselines, relative to rootdir, in place of __edgeq__ next to each test.",
        values.directory,
    )
    obsolete: Literal["info", "error"] = _option(
        "info",
        "LEVEL",
        f"Baselines that no test owns any more: {' or '.join(OBSOLETE_LEVELS)} (exit status 1).",
        values.choice(OBSOLETE_LEVELS),
    )
    localize: Literal["auto", "off"] = _option(
        "auto",
        "MODE",
        "Name the layer to blame when a budget or a baseline of errors fails: "
        f"{' or '.join(LOCALIZE_MODES)}.",
        values.choice(LOCALIZE_MODES),
    )
    localize_timeout: int = _option(
        60,
        "SECONDS",
        "Seconds after which localization uses no further sample.",
        values.integer(1),
    )
    suggest: int = _option(
        0,
        "SECONDS",
        "When a budget fails, find layers to leave in float, and show the plan; after so many "
        "seconds no further choice is measured, 300 without a value, 0 for not at all. "
        "A test path cannot follow the bare flag.",
        values.integer(0),
        bare="300",
    )
    cache: Literal["on", "off", "refresh"] = _option(
        "on",
        "MODE",
        f"Keep finished conversions for later runs: {', '.join(CACHE_MODES)} (refresh replaces "
        "what earlier runs have kept).",
        values.choice(CACHE_MODES),
    )
    cache_dir: Path | None = _option(
        "",
        "DIR",
        "Directory of finished conversions, in place of one below pytest's cache directory; "
        "processes may share it.",
        values.directory,
    )
    isolate: Literal["auto", "on", "off"] = _option(
        "auto",
        "MODE",
        "Run native code in a child process, whose crash fails its test alone: "
        f"{', '.join(ISOLATE_MODES)} (auto: the first run of a file made elsewhere, and of each "
        f"file on other runtimes than {DEFAULT_RUNTIME}; on: conversions and all runs).",
        values.choice(ISOLATE_MODES),
    )
    isolate_timeout: int = _option(
        DEFAULT_SECONDS,
        "SECONDS",
        "Seconds after which one step in the child process has failed.",
        values.integer(1),
    )
    isolate_memory: int | None = _option(
        "",
        "SIZE",
        "Memory that the child process may use: 4G, 512M, or a number of MiB. By default half of "
        "the machine's or container's, shared by the workers of pytest-xdist; at least 4G. Linux.",
        values.memory,
    )
    artifacts: Path | None = _option(
        "",
        "DIR",
        "For each failed test keep the .tflite, the worst samples, expected and got, and a script "
        "that shows the failure without pytest, in a folder of its own below this one.",
        values.writable_directory,
    )
    json: Path | None = _option(
        "", "FILE", "Write the record of the run as JSON to this file.", values.file
    )
    markdown: Path | None = _option(
        "",
        "FILE",
        "Write models and failures as Markdown to this file, for a pull request. Where "
        "GITHUB_STEP_SUMMARY is set they are appended to that file, too.",
        values.file,
    )
    html: Path | None = _option(
        "",
        "FILE",
        "Write the record of the run as an HTML page with charts to this file; needs "
        "pytest-edgeq[report].",
        values.html,
    )


OPTIONS: Final = tuple(
    each.metadata["option"]._replace(stem=each.name)
    for each in dataclasses.fields(Settings)
    if each.metadata
)


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
        # pytest has integers from 8.4 on; before that `_ini` reads the text.
        is_integer = isinstance(option.default, int) and pytest.version_tuple >= (8, 4)
        ini_type = "int" if is_integer else "string"
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
    """Return the targets of ini and command line, which name runtimes, and their time limit."""
    declared, none = {option.stem: option for option in OPTIONS}, Runtimes()
    targets = declared["targets"]
    found = _resolved(config, targets, none, ini_only=True) | _resolved(config, targets, none)
    seconds: int = _resolved(config, declared["target_timeout"], none)
    return found, seconds


def _resolved(
    config: pytest.Config, option: Option, runtimes: Runtimes, *, ini_only: bool = False
) -> Any:
    """Resolve the value of an option from the command line, else from the ini."""
    given = None if ini_only else config.getoption(option.name)
    if given is None:
        folder = config.rootpath if config.inipath is None else config.inipath.parent
        text = _ini(config, option)
        place = OptionSource(f"ini option {option.name}", folder, runtimes)
    else:
        text = "\n".join(given) if option.is_lines else given
        place = OptionSource(option.flag, config.invocation_params.dir, runtimes)
    if option.stem == "snapshot_dir":
        # Relative to the root folder wherever it is written, as the paths below it are.
        place = place._replace(folder=config.rootpath)
    with place.errors():
        return option.resolve(text, place)


def resolve(config: pytest.Config, runtimes: Runtimes) -> Settings:
    """Make the settings of a run from its command line and ini file."""
    given = (option.stem for option in OPTIONS if config.getoption(option.name) is not None)
    values = {option.stem: _resolved(config, option, runtimes) for option in OPTIONS}
    return Settings(frozenset(given), **values)
