"""Make plain data fit for another machine: without absolute paths and environment variables."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FREE = frozenset({"cause", "change", "error", "findings", "message", "note", "records"})
"""Fields of texts that hold whatever an error says."""

_SHORTEST = 12
"""Length from which a variable's value is no ordinary word, and may be a secret."""

_END = r"(?=$|[\\/\s'\":,;)\]}>])"
_PART = r"[^\s/\\'\"`:;,()\[\]{}<>|]"
_ABSOLUTE = re.compile(
    rf"(?<![\w~/.…-])(?:/[A-Za-z_.]{_PART}*(?:/{_PART}+)*|[A-Za-z]:[\\/]{_PART}+(?:[\\/]{_PART}+)*)"
)


def portable(data: Any, rootdir: Path) -> Any:
    """
    Return a copy of JSON-able data without absolute paths and, in texts of errors, environment.

    A path below the root directory becomes relative to it, one below the home directory starts with
    `~`, of any other the last part is left. A path of which this machine lacks the first folder is
    none: tensors of a file made from ONNX are called `/conv/Conv_output_0`. The value of an
    environment variable becomes the variable's name, as `$NAME`.
    """
    return _portable(data, _known_folders(rootdir), is_free=isinstance(data, str))


def _portable(data: Any, folders: Mapping[str, str], *, is_free: bool) -> Any:
    if isinstance(data, str):
        text = _without_paths(data, folders)
        return _without_environment(text) if is_free else text
    if isinstance(data, Mapping):
        return {
            _without_paths(key, folders): _portable(value, folders, is_free=is_free or key in _FREE)
            for key, value in data.items()
        }
    if isinstance(data, (list, tuple)):
        return [_portable(each, folders, is_free=is_free) for each in data]
    return data


def _known_folders(rootdir: Path) -> dict[str, str]:
    """Return the text in place of each folder, the longest folders first."""
    folders = {tempfile.gettempdir(): "…", str(Path.home()): "~"}
    folders |= {str(rootdir): ".", str(rootdir.resolve()): "."}
    return {
        folder: short
        for folder, short in sorted(folders.items(), key=lambda each: -len(each[0]))
        if folder != Path(folder).anchor
    }


def _without_paths(text: str, folders: Mapping[str, str]) -> str:
    text = re.sub(r"file://(?=/)", "", text)
    for folder, short in folders.items():
        if short == ".":
            text = re.sub(rf"{re.escape(folder)}[\\/]", "", text)
        text = re.sub(re.escape(folder) + _END, short, text)
    return _ABSOLUTE.sub(_shortened, text)


def _shortened(found: re.Match[str]) -> str:
    parts = re.split(r"[\\/]", found[0])
    is_path = parts[0] or os.path.exists(f"/{parts[1]}")  # noqa: PTH110 # of any text False
    return f"…/{parts[-1]}" if is_path else found[0]


def _without_environment(text: str) -> str:
    values = {value: name for name, value in os.environ.items() if len(value) >= _SHORTEST}
    for value, name in sorted(values.items(), key=lambda each: -len(each[0])):
        text = text.replace(value, f"${name}")
    return text
