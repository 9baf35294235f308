"""Values of options: parsed from text, or rejected with the valid ones."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from pytest_edgeq.names import NEEDS_REPORT, NEEDS_TENSORFLOW, PRESETS, unknown_preset
from pytest_edgeq.runtimes.registry import BUILT_IN, Runtimes
from pytest_edgeq.runtimes.workers.settings import parse_memory
from pytest_edgeq.runtimes.workers.target_spec import parse_targets

CI_VARIABLES: Final = (
    *("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "GITLAB_CI", "TF_BUILD", "JENKINS_URL"),
    *("TEAMCITY_VERSION", "CIRCLECI", "BUILDKITE", "TRAVIS"),
)


def ci_variable(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the variable that marks this run as CI; empty, `0` and `false` count as not set."""
    for name in CI_VARIABLES:
        if environment.get(name, "").strip().lower() not in ("", "0", "false"):
            return name
    return None


UPDATE_CATEGORIES: Final = ("new", "changed", "tighten", "prune")

BARE_UPDATE: Final = "new,changed"


class OptionSource(NamedTuple):
    """Where an option's text was written; its resolver raises ValueError of a wrong one."""

    where: str  # a name for messages
    folder: Path  # what its paths are relative to
    runtimes: Runtimes = BUILT_IN  # the runtimes that can be named there

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Name this place in errors of values."""
        try:
            yield
        except (ValueError, ModuleNotFoundError) as error:
            raise pytest.UsageError(f"{self.where}: {error}") from None


def _split(text: str) -> list[str]:
    """Split a comma list, without blanks around the words."""
    return [word for word in (part.strip() for part in text.split(",")) if word]


def choice(valid: Sequence[str]) -> Callable[[str, OptionSource], str]:
    """Make the resolver of an option that is one word of a few."""

    def resolve(text: str, place: OptionSource) -> str:
        if text not in valid:
            raise ValueError(f"{text!r} is none of the valid values: {', '.join(valid)}")
        return text

    return resolve


def integer(lowest: int, end: int | None = None) -> Callable[[str, OptionSource], int]:
    """Make the resolver of an option that is an integer from `lowest`, below `end`."""
    valid = f"an integer from {lowest}" + ("" if end is None else f" to {end - 1}")

    def resolve(text: str, place: OptionSource) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if value < lowest or (end is not None and value >= end):
            raise ValueError(f"expected {valid}, got {text!r}")
        return value

    return resolve


def quantizer_of(text: str, place: OptionSource) -> str | None:
    """Resolve one quantizer's name: a preset, the path of a recipe, or `none` for float."""
    if text == "none":
        return None
    if text.endswith(".json"):
        path = (place.folder / text).resolve()
        if not path.is_file():
            raise ValueError(f"there is no recipe file at {path}")
        return str(path)
    if text not in PRESETS:
        raise ValueError(
            f"{unknown_preset(text)}\n"
            "  or the path of a recipe that ends in .json, or none for float"
        )
    return text


def quantizers(text: str, place: OptionSource) -> tuple[str | None, ...]:
    """Resolve a comma list of quantizers, each named once."""
    values = tuple(quantizer_of(word, place) for word in _split(text))
    if not values:
        raise ValueError(
            "names no quantizer, so tests that ask for edgeq_quantizer would be skipped without a "
            f"word\n  presets: {', '.join(PRESETS)}"
        )
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{value or 'none'} is named more than once")
    return values


def runtime_of(text: str, place: OptionSource) -> str:
    """Resolve a runtime's name; TensorFlow is looked for, not imported."""
    place.runtimes.check(text)
    if text == "tensorflow" and importlib.util.find_spec("tensorflow") is None:
        raise ValueError(NEEDS_TENSORFLOW)
    return text


def update_of(text: str, place: OptionSource) -> frozenset[str]:
    """Resolve the categories of baselines to write; refused on CI."""
    words = _split(text)
    for word in words:
        if word not in UPDATE_CATEGORIES:
            raise ValueError(
                f"{word!r} is none of the valid values: {', '.join(UPDATE_CATEGORIES)}\n"
                "  If this is a test path that the flag has read as its value, write "
                f"--edgeq-update={BARE_UPDATE} (with '=') or put the flag after the path."
            )
    if words and (variable := ci_variable()) is not None:
        raise ValueError(
            f"baselines are never written on CI, and the environment variable {variable} is set to "
            f"{os.environ[variable]!r}.\n"
            "  Run the update on your own machine, read the change and commit it; "
            f"or unset {variable} if this is no CI."
        )
    return frozenset(words)


def directory(text: str, place: OptionSource) -> Path | None:
    """Resolve the path of a folder; None for none."""
    path = place.folder / text
    if text and _is_folder(path) is False:
        raise ValueError(f"{path} is a file; a folder is wanted")
    return path if text else None


def file(text: str, place: OptionSource) -> Path | None:
    """Resolve the path of a file to write; None for none."""
    if not text:
        return None
    from pytest_edgeq.report.whole_files import check_folder

    path = place.folder / text
    if _is_folder(path):
        raise ValueError(f"{path} is a folder; a file is wanted")
    check_folder(path)
    return path


def _is_folder(path: Path) -> bool | None:
    """Return whether the path is a folder; None if it does not exist."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None


def writable_directory(text: str, place: OptionSource) -> Path | None:
    """Resolve the path of a folder to write into, which need not be there yet."""
    path = directory(text, place)
    if path is None:
        return None
    from pytest_edgeq.report.whole_files import check_folder

    check_folder(path)
    nearest = next(each for each in (path, *path.parents) if each.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        what = "cannot be written" if nearest.is_dir() else "is a file"
        raise ValueError(
            f"expected a folder that can be written, got {path}\ncause: {nearest} {what}"
        )
    return path


def html(text: str, place: OptionSource) -> Path | None:
    """Resolve the path of the HTML report; its libraries are looked for, not imported."""
    path = file(text, place)
    if path is not None and importlib.util.find_spec("bokeh") is None:
        raise ValueError(NEEDS_REPORT)
    return path


def memory(text: str, place: OptionSource) -> int | None:
    """Resolve a number of bytes; None for the default."""
    return parse_memory(text) if text else None


def executor(text: str, place: OptionSource) -> str | None:
    """Resolve the name of an executor; dask is looked for, not imported."""
    if not text:
        return None
    from pytest_edgeq.compare.executors.session_executor import check_spec

    return check_spec(text)


def targets(text: str, place: OptionSource) -> dict[str, tuple[str, ...]]:
    """Resolve targets, one a line."""
    return parse_targets(text.splitlines())


def check_targets(text: str, place: OptionSource) -> tuple[str, ...]:
    """Resolve the names of runtimes of targets."""
    known = place.runtimes.targets
    return Runtimes(targets=known, check_targets=_split(text)).check_targets
