"""
Where baselines live.

`__edgeq__/<test module>/<test>.<name>.json` beside the test module, or the same below the folder
of the option `edgeq_snapshot_dir`, by the module's path from rootdir.

A file name must be valid on every file system: Windows and macOS ignore case, and forbid some
characters. A name that is changed for this has a short hash of the exact text, so that it stays
unique.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pytest_edgeq.baselines.claims import Owner

FOLDER = "__edgeq__"

_LONGEST_TEST = 120
_LONGEST_NAME = 60


class Layout(NamedTuple):
    """The places of baselines."""

    rootdir: Path  # pytest's root folder, to which shown paths are relative
    # the folder of all baselines; None for `__edgeq__` in each test's folder
    directory: Path | None = None

    def folder(self, module: Path) -> Path:
        """Return the folder of the baselines of a test module."""
        stem = module.stem if module.suffix == ".py" else module.name
        if self.directory is None:
            return module.parent / FOLDER / stem
        parts = Path(self.module_in_file(module)).parent.parts
        return self.directory.joinpath(*("__" if part == ".." else part for part in parts), stem)

    def has_baselines(self, module: Path) -> bool:
        """Whether there is a folder of the module's files."""
        return self.folder(module).is_dir()

    def path(self, owner: Owner, name: str) -> Path:
        """Return the path of the baseline of a claim."""
        return self.folder(owner.module) / f"{_test_part(owner.test)}.{_name_part(name)}.json"

    def module_in_file(self, module: Path) -> str:
        """
        Return how a baseline names its owner's module.

        By default the bare file name, so that a moved folder of tests keeps its baselines; with
        a separate directory of baselines the path from rootdir.
        """
        if self.directory is None:
            return module.name
        return Path(os.path.relpath(module, self.rootdir)).as_posix()

    def module_of(self, named: str, path: Path) -> Path:
        """Return the module that the baseline at a path names as its owner's."""
        base = path.parents[2] if self.directory is None else self.rootdir
        return Path(os.path.normpath(base / named))

    def shown(self, path: Path) -> str:
        """Return a path with forward slashes, relative to rootdir if it is below."""
        try:
            return path.relative_to(self.rootdir).as_posix()
        except ValueError:
            return path.as_posix()


def _test_part(test: str) -> str:
    """Return the part of a file name that identifies the test."""
    names, bracket, parameters = test.partition("[")
    *classes, function = names.split("::")
    # Class names are in CamelCase by convention: a hash on each would only cost readability.
    # Two that differ in case alone are found when the file's owner is read.
    safe = [re.sub(r"[^A-Za-z0-9_]", "_", name) for name in (*classes, function)]
    plain = ".".join(safe) + bracket + re.sub(r"[^A-Za-z0-9_.,+=@\[\]-]", "_", parameters)
    same = plain == test.replace("::", ".", len(classes))
    unsafe = _has_upper_case(function + parameters) or not same
    return _finish(plain, test, _LONGEST_TEST, unsafe=unsafe)


def _name_part(name: str) -> str:
    """Return the part of a file name that identifies the claim."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    return _finish(plain, name, _LONGEST_NAME, unsafe=_has_upper_case(name) or plain != name)


def _has_upper_case(text: str) -> bool:
    return text != text.lower()


def _finish(plain: str, exact: str, longest: int, *, unsafe: bool) -> str:
    if len(plain) > longest:
        plain, unsafe = plain[:longest], True
    if not unsafe:
        return plain
    return f"{plain}-{hashlib.sha256(exact.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"
