"""Values of options: parsed from text, or rejected with the valid ones."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from pytest_edgeq.compare.executors.session_executor import check_spec
from pytest_edgeq.names import (
    NEEDS_REPORT,
    NEEDS_TENSORFLOW,
    PRESETS,
    unknown_preset,
)
from pytest_edgeq.runtimes.registry import BUILT_IN, Runtimes
from pytest_edgeq.runtimes.workers.bounds import parse_memory
from pytest_edgeq.runtimes.workers.target_spec import parse_targets

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


def ci_variable(environment: Mapping[str, str] = os.environ) -> str | None:
    """
    Return the environment variable that marks this run as CI, or None.

    Empty, `0` and `false` count as not set.
    """
    for name in CI_VARIABLES:
        if environment.get(name, "").strip().lower() not in ("", "0", "false"):
            return name
    return None


UPDATE_CATEGORIES: Final = ("new", "changed", "tighten", "prune")

BARE_UPDATE: Final = "new,changed"
_WRITE_WITH_EQUALS: Final = (
    "If this is a test path that the flag has taken for its value, write "
    f"--edgeq-update={BARE_UPDATE} (with '=') or put the flag after the path."
)
_REFUSED_ON_CI: Final = (
    "{where}: baselines are never written on CI, and the environment variable {variable} "
    "is set to {value!r}.\n"
    "  Run the update on your own machine, read the change and commit it; "
    "or unset {variable} if this is no CI."
)


@dataclasses.dataclass(frozen=True)
class OptionSource:
    """Where an option's text was written."""

    where: str  # a name for messages
    folder: Path  # what its paths are relative to
    runtimes: Runtimes = BUILT_IN  # the runtimes that can be named there


def _split(text: str) -> list[str]:
    """Split a comma list, without blanks around the words."""
    return [word for word in (part.strip() for part in text.split(",")) if word]


def choice(valid: Sequence[str]) -> Callable[[str, OptionSource], str]:
    """Make the resolver of an option that is one word of a few."""

    def resolve(text: str, place: OptionSource) -> str:
        if text not in valid:
            raise pytest.UsageError(
                f"{place.where}: {text!r} is none of the valid values: {', '.join(valid)}"
            )
        return text

    return resolve


def integer(lowest: int, end: int | None = None) -> Callable[[str, OptionSource], int]:
    """Make the resolver of an option that is an integer from `lowest`, below `end`."""
    valid = f"an integer from {lowest}" if end is None else f"an integer from {lowest} to {end - 1}"

    def resolve(text: str, place: OptionSource) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if value < lowest or (end is not None and value >= end):
            raise pytest.UsageError(f"{place.where}: expected {valid}, got {text!r}")
        return value

    return resolve


def quantizer_of(text: str, place: OptionSource) -> str | None:
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


def quantizers(text: str, place: OptionSource) -> tuple[str | None, ...]:
    """Resolve a comma list of quantizers, each named once."""
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


def runtime_of(text: str, place: OptionSource) -> str:
    """Resolve a runtime's name; TensorFlow is looked for, not imported."""
    try:
        place.runtimes.check(text)
    except ValueError as error:
        raise pytest.UsageError(f"{place.where}: {error}") from None
    if text == "tensorflow" and importlib.util.find_spec("tensorflow") is None:
        raise pytest.UsageError(f"{place.where}: {NEEDS_TENSORFLOW}")
    return text


def update_of(text: str, place: OptionSource) -> frozenset[str]:
    """Resolve the categories of baselines to write; refused on CI."""
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


def directory(text: str, place: OptionSource) -> Path | None:
    """Resolve the path of a folder; None for none."""
    if not text:
        return None
    path = place.folder / text
    if _is_folder(path, place) is False:
        raise pytest.UsageError(f"{place.where}: {path} is a file; a folder is wanted")
    return path


def file(text: str, place: OptionSource) -> Path | None:
    """Resolve the path of a file to write; None for none."""
    if not text:
        return None
    path = place.folder / text
    if _is_folder(path, place):
        raise pytest.UsageError(f"{place.where}: {path} is a folder; a file is wanted")
    return path


def _is_folder(path: Path, place: OptionSource) -> bool | None:
    """Return whether the path is a folder; None if it does not exist."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise pytest.UsageError(f"{place.where}: {path}: {error.strerror}") from None


def writable_directory(text: str, place: OptionSource) -> Path | None:
    """Resolve the path of a folder to write into, which need not be there yet."""
    path = directory(text, place)
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


def html(text: str, place: OptionSource) -> Path | None:
    """Resolve the path of the HTML report; its libraries are looked for, not imported."""
    path = file(text, place)
    if path is not None and importlib.util.find_spec("bokeh") is None:
        raise pytest.UsageError(f"{place.where}: {NEEDS_REPORT}")
    return path


def memory(text: str, place: OptionSource) -> int | None:
    """Resolve a number of bytes; None for the default."""
    if not text:
        return None
    try:
        return parse_memory(text)
    except ValueError as error:
        raise pytest.UsageError(f"{place.where}: {error}") from None


def executor(text: str, place: OptionSource) -> str | None:
    """Resolve the name of an executor; dask is looked for, not imported."""
    try:
        return check_spec(text) if text else None
    except (ValueError, ModuleNotFoundError) as error:
        raise pytest.UsageError(f"{place.where}: {error}") from None


def targets(text: str, place: OptionSource) -> dict[str, tuple[str, ...]]:
    """Resolve targets, one a line."""
    try:
        return parse_targets(text.splitlines())
    except ValueError as error:
        raise pytest.UsageError(f"{place.where}: {error}") from None


def check_targets(text: str, place: OptionSource) -> tuple[str, ...]:
    """Resolve the names of runtimes of targets."""
    words = tuple(_split(text))
    try:
        return Runtimes(targets=place.runtimes.targets, check_targets=words).check_targets
    except ValueError as error:
        raise pytest.UsageError(f"{place.where}: {error}") from None
