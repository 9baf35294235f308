"""Every option, each declared once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

from pytest_edgeq.names import (
    CACHE_MODES,
    DEFAULT_PRESET,
    DEFAULT_RUNTIME,
    ISOLATE_MODES,
    RUNTIMES,
)
from pytest_edgeq.plugin.options import values
from pytest_edgeq.runtimes.workers.bounds import DEFAULT_SECONDS

OBSOLETE_LEVELS: Final = ("info", "error")
LOCALIZE_MODES: Final = ("auto", "off")


@dataclasses.dataclass(frozen=True)
class Option:
    """
    One option, on the command line and in the ini file.

    Attributes:
        stem: The name in all spellings, such as `snapshot_dir`.
        default: The ini default.
        metavar: Placeholder of the value in `--help`.
        help: One sentence for `--help`.
        resolve: Parses the text, or raises pytest.UsageError with the valid values.
        bare: Value of the flag without a value; None if it needs one.
        is_lines: Whether the ini value is a list of lines, and the flag may be given several times.
    """

    stem: str
    default: str | int
    metavar: str
    help: str
    resolve: Callable[[str, values.Place], Any]
    bare: str | None = None
    is_lines: bool = False

    @property
    def flag(self) -> str:
        """The spelling on the command line."""
        return f"--edgeq-{self.stem.replace('_', '-')}"

    @property
    def name(self) -> str:
        """The ini name, and the dest."""
        return f"edgeq_{self.stem}"


OPTIONS: Final = (
    Option(
        "quantizers",
        DEFAULT_PRESET,
        "NAMES",
        "Comma list of quantizers that tests asking for edgeq_quantizer run under: "
        "presets, .json recipes, none for float.",
        values.quantizers,
    ),
    Option(
        "runtime",
        DEFAULT_RUNTIME,
        "NAME",
        f"What runs the .tflite: {', '.join(RUNTIMES)}, a name from the hook "
        "pytest_edgeq_runtimes, or TARGET or TARGET:KERNELS of a target.",
        values.runtime_of,
    ),
    Option(
        "targets",
        "",
        "NAME=COMMAND",
        "A machine or CPU to run files on, by a command that starts a Python with numpy and "
        "ai_edge_litert there; in the ini a list. The flag may be given several times, and adds to "
        "the ini's.",
        values.targets,
        is_lines=True,
    ),
    Option(
        "check_targets",
        "",
        "NAMES",
        "Comma list of targets, as --edgeq-runtime names them, that edgeq.check runs beside the "
        "runtimes of this machine.",
        values.check_targets,
    ),
    Option(
        "target_timeout",
        DEFAULT_SECONDS,
        "SECONDS",
        "After so many seconds without an answer a target has failed.",
        values.integer(1),
    ),
    Option(
        "threads",
        0,
        "N",
        "Cores that the session may use; 0 for all, or a fair share beside other workers of "
        "pytest-xdist. Figures are the same for any number.",
        values.integer(0),
    ),
    Option(
        "executor",
        "",
        "NAME",
        "Where samples are measured: processes:N for N processes of this machine, dask:ADDRESS for "
        "a cluster (needs pytest-edgeq[dask]). Figures are the same.",
        values.executor,
    ),
    Option("seed", 0, "N", "Seed of everything random in quantization.", values.integer(0, 2**32)),
    Option(
        "update",
        "",
        "WHAT",
        "Accept what was measured into the baselines: comma list of "
        f"{', '.join(values.UPDATE_CATEGORIES)}; without a value {values.BARE_UPDATE}. "
        "A value needs '='. Refused on CI.",
        values.update_of,
        bare=values.BARE_UPDATE,
    ),
    Option(
        "snapshot_dir",
        "",
        "DIR",
        "Folder of the baselines, relative to rootdir, in place of __edgeq__ beside each test.",
        values.directory,
    ),
    Option(
        "obsolete",
        "info",
        "LEVEL",
        f"Baselines that no test owns any more: {' or '.join(OBSOLETE_LEVELS)} (exit status 1).",
        values.choice(OBSOLETE_LEVELS),
    ),
    Option(
        "localize",
        "auto",
        "MODE",
        "Name the layer to blame when a budget or a remembered error fails: "
        f"{' or '.join(LOCALIZE_MODES)}.",
        values.choice(LOCALIZE_MODES),
    ),
    Option(
        "localize_timeout",
        60,
        "SECONDS",
        "After so many seconds of it no further sample is looked at.",
        values.integer(1),
    ),
    Option(
        "cache",
        "on",
        "MODE",
        f"Keep finished conversions for later runs: {', '.join(CACHE_MODES)} (refresh replaces "
        "what earlier runs have kept).",
        values.choice(CACHE_MODES),
    ),
    Option(
        "cache_dir",
        "",
        "DIR",
        "Directory of finished conversions, in place of one below pytest's cache directory; "
        "processes may share it.",
        values.directory,
    ),
    Option(
        "isolate",
        "auto",
        "MODE",
        "Run native code in a child process, whose crash fails its test alone: "
        f"{', '.join(ISOLATE_MODES)} (auto: the first run of a file made elsewhere, and of each "
        f"file on other runtimes than {DEFAULT_RUNTIME}; on: conversions and all runs).",
        values.choice(ISOLATE_MODES),
    ),
    Option(
        "isolate_timeout",
        DEFAULT_SECONDS,
        "SECONDS",
        "After so many seconds one step in the child process has failed.",
        values.integer(1),
    ),
    Option(
        "isolate_memory",
        "",
        "SIZE",
        "Memory that the child process may use: 4G, 512M, or a number of MiB. By default half of "
        "the machine's or container's, shared by the workers of pytest-xdist; at least 4G. Linux.",
        values.memory,
    ),
    Option(
        "artifacts",
        "",
        "DIR",
        "For each failed test keep the .tflite, the worst samples, expected and got, and a script "
        "that shows the failure without pytest, in a folder of its own below this one.",
        values.writable_directory,
    ),
    Option("json", "", "FILE", "Write the record of the run as JSON to this file.", values.file),
    Option(
        "markdown",
        "",
        "FILE",
        "Write models and failures as Markdown to this file, for a pull request. Where "
        "GITHUB_STEP_SUMMARY is set they are appended to that file, too.",
        values.file,
    ),
    Option(
        "html",
        "",
        "FILE",
        "Write the record of the run as an HTML page with charts to this file; needs "
        "pytest-edgeq[report].",
        values.html,
    ),
)
