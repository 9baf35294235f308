"""
Baselines on disk: atomic writes, and reads that validate.

Every reading error is a ValueError that says what was seen and what to do.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from pytest_edgeq.baselines.paths import FOLDER
from pytest_edgeq.baselines.regular_files import NotRegularError, open_regular
from pytest_edgeq.baselines.shape import TEXT_OR_NULL, shape_problem

SCHEMA = 1
READABLE_SCHEMAS = (1,)

_DOCUMENT = {
    "kind": str,
    "owner": {"module": str, "test": str},
    "name": str,
    "data": dict,
    "producer": {"*": TEXT_OR_NULL},
    "options": {"*": str},
}
_LONGEST_WRITE = 3600  # seconds after which the writer of a temporary file was killed

_START_OVER = "Restore it from version control, or delete it and store it anew with"
_NEW = "--edgeq-update=new"


class Document(NamedTuple):
    """One baseline."""

    kind: str  # what sort of data it holds, such as `op_dtype_map`
    module: str  # the owner's module as the file names it
    test: str  # the owner's test, the rest of the node id
    name: str  # the claim's name
    producer: dict[str, str | None]  # the versions that made it
    data: dict[str, Any]  # what was measured: plain JSON
    options: dict[str, str] = {}  # noqa: RUF012 # of `quantize`, as text; empty if unknown


def plain(data: dict[str, Any]) -> dict[str, Any]:
    """Return data as they are after a round trip through a file; refuse NaN and infinity."""
    made: dict[str, Any] = json.loads(json.dumps(data, allow_nan=False))
    return made


def render(document: Document) -> str:
    """Return the text of a file: sorted keys, a line for each entry of a list of objects."""
    content = {
        "edgeq_schema": SCHEMA,
        "kind": document.kind,
        "owner": {"module": document.module, "test": document.test},
        "name": document.name,
        "producer": document.producer,
        "data": document.data,
        **({"options": document.options} if document.options else {}),
    }
    return _render(content, "") + "\n"


def _render(value: Any, indent: str) -> str:
    inner = indent + "  "
    if isinstance(value, dict) and value:
        lines = [f"{_line(key)}: {_render(value[key], inner)}" for key in sorted(value)]
        return "{\n" + ",\n".join(inner + line for line in lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        return "[\n" + ",\n".join(inner + _line(part) for part in value) + f"\n{indent}]"
    return _line(value)


def _line(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)


def write(path: Path, content: bytes) -> None:
    """Write a file atomically: an error leaves the old content."""
    sweep(path.parent)
    # Not tempfile: its files are the user's own, but what is committed is for all to read.
    temporary = path.parent / f".edgeq-{uuid.uuid4().hex}.tmp"
    try:
        try:
            _put(path, temporary, content)
        except FileNotFoundError:  # another process has deleted the folder meanwhile
            _put(path, temporary, content)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is reported
            temporary.unlink(missing_ok=True)
        raise


def _put(path: Path, temporary: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_bytes(content)
    temporary.replace(path)


def sweep(folder: Path) -> None:
    """Delete temporary files of processes that were killed while they wrote."""
    with contextlib.suppress(OSError):  # another process deletes them, or nobody may
        for path in list(folder.glob(".edgeq-*.tmp")):
            if abs(time.time() - path.stat().st_mtime) > _LONGEST_WRITE:
                path.unlink(missing_ok=True)


def delete(path: Path) -> None:
    """Delete a file, and its folder with it when that was the last."""
    path.unlink(missing_ok=True)
    folder = path.parent
    with contextlib.suppress(OSError):  # not empty
        folder.rmdir()
        if folder.parent.name == FOLDER:
            folder.parent.rmdir()


def read(path: Path, shown: str) -> Document:
    """Read a file; a ValueError says why it is no baseline."""
    try:
        with open_regular(path) as file:
            text = file.read().decode("utf-8-sig")
        content = json.loads(text, parse_constant=_no_number, object_pairs_hook=_without_doubles)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(
            f"{shown} cannot be read: {error.strerror}. Let this user read it, or restore it from "
            "version control"
        ) from None
    except NotRegularError:
        raise ValueError(
            f"{shown} is a pipe, a socket or a device, not a file. {_START_OVER} {_NEW}"
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(_broken(error, shown)) from None
    except (ValueError, RecursionError) as error:  # what JSON, Python or UTF-8 does not allow
        raise ValueError(f"{shown} is not valid JSON: {error}. {_START_OVER} {_NEW}") from None
    return _document(content, shown)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of these members; reject duplicate keys, which a bad merge leaves."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in made if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:60]!r} occurs twice in one object")
    return made


def _broken(error: json.JSONDecodeError, shown: str) -> str:
    for number, line in enumerate(error.doc.splitlines(), start=1):
        if re.match(r"(<{7}|={7}|>{7})( |$)", line):
            return (
                f"{shown} holds the marks of an unfinished merge (line {number}: {line[:40]!r}). "
                "Take either side whole, then run the test with --edgeq-update=changed"
            )
    if not error.doc.strip():
        return f"{shown} is empty. {_START_OVER} {_NEW}"
    return (
        f"{shown} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}. "
        f"{_START_OVER} {_NEW}"
    )


def _document(content: object, shown: str) -> Document:
    if not isinstance(content, dict) or "edgeq_schema" not in content:
        raise ValueError(
            f"{shown} is no baseline: it has no key 'edgeq_schema'. {_START_OVER} {_NEW}"
        )
    schema = content["edgeq_schema"]
    if isinstance(schema, bool) or schema not in READABLE_SCHEMAS:
        readable = " and ".join(map(str, READABLE_SCHEMAS))
        raise ValueError(
            f"{shown} has edgeq_schema {schema!r}; this version of pytest-edgeq reads {readable}. "
            "Upgrade pytest-edgeq to a version that reads it (pip install -U pytest-edgeq)"
        )
    content = {"producer": {}, "options": {}, **content}
    if problem := shape_problem(content, _DOCUMENT, "content"):
        raise ValueError(f"{shown} is no whole baseline: {problem}. {_START_OVER} {_NEW}")
    known = {name: content[name] for name in ("kind", "name", "producer", "data", "options")}
    owner = content["owner"]
    return Document(module=owner["module"], test=owner["test"], **known)
