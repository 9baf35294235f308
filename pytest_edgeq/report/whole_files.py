"""Write files whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pytest_edgeq.baselines.regular_files import open_at_once


def check_folder(path: Path) -> None:
    """Refuse a path of which no folder but the root exists."""
    above = path.absolute().parents[:-1]
    if above and not any(folder.exists() for folder in above):
        raise ValueError(f"{path}: there is no folder {path.parent}")


def write_whole(path: Path, text: str) -> None:
    """
    Write a text atomically; missing folders are created, and lone surrogates escaped.

    A link stays one. A device or a pipe, such as `/dev/stdout`, is written to in place.
    """
    content = text.encode("utf-8", "backslashreplace")
    if path.exists() and not path.is_file():
        with open(path, "wb", opener=open_at_once) as file:
            os.set_blocking(file.fileno(), True)
            file.write(content)
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(content)
    unfinished.replace(path)


def write_json(path: Path, data: Any, **style: Any) -> None:
    """Write a document atomically, in the style of `json.dumps`."""
    write_whole(path, json.dumps(data, ensure_ascii=False, allow_nan=False, **style) + "\n")
