"""Run pytest on a small project inside of a test: files in, outcomes and texts out."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from pytest_edgeq.plugin.options.values import CI_VARIABLES

ROOT = Path(__file__).parents[1]

Files = str | Path | Mapping[str, str | bytes]

# Other people's plugins, and the search for them, take half of the time of a run. pytest's own for
# exceptions in finalizers collects garbage five times in the end: 2 s among the objects of torch.
_PLUGINS = ("-p edgeq", "-p xdist", "-p no:unraisableexception")


def environment() -> dict[str, str]:
    """Return the variables of a shell that is no CI, without the pytest around it."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in CI_VARIABLES and not name.startswith(("PYTEST_", "COV_"))
    }


class Project:
    """
    A folder that pytest is run on, by default in this process, which spares the import of torch.

    The options of all runs stand in PYTEST_ADDOPTS, for processes too; a run is none on CI. Modules
    of this repository can be imported, which an editable install alone would give.
    """

    def __init__(
        self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, *options: str
    ) -> None:
        self.path = pytester.path
        self._pytester = pytester
        for variable in CI_VARIABLES:
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("PYTEST_ADDOPTS", " ".join((*_PLUGINS, *options)))
        # pytest's own option needs an ini file before pytest 8.
        monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def write(self, files: Files) -> None:
        """Copy a folder, or write files by name, `.py` without a suffix; a text is `test_x.py`."""
        if isinstance(files, Path):
            shutil.copytree(files, self.path, dirs_exist_ok=True)
            return
        for name, content in ({"test_x": files} if isinstance(files, str) else files).items():
            path = self.path / (name if Path(name).suffix else f"{name}.py")
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                content = textwrap.dedent(content).encode()
            path.write_bytes(content)

    def run(
        self,
        *options: str,
        files: Files | None = None,
        shows: str | Sequence[str] = (),
        hides: str | Sequence[str] = (),
        ret: int | None = None,
        process: bool | str = False,
        **outcomes: int,
    ) -> pytest.RunResult:
        """
        Run pytest, and check what came of it.

        Args:
            options: Of the command line.
            files: What to write first.
            shows: Patterns of lines that are printed, in this order, on stdout or behind it on
                stderr; `[` is written `[[]`.
            hides: Patterns of lines that are not printed.
            ret: The exit status.
            process: Whether pytest runs in a process of its own; the folder of `warm` makes that,
                and its workers, forks.
            **outcomes: As `RunResult.assert_outcomes` takes them.
        """
        if files is not None:
            self.write(files)
        if isinstance(process, str):
            result = self._pytester.run(f"{process}/pytest", "--basetemp=basetemp", *options)
        elif process:
            result = self._pytester.runpytest_subprocess(*options)
        else:
            # Warnings are errors in this run.
            result = self._pytester.runpytest_inprocess("-W", "default", *options)
        if outcomes:
            result.assert_outcomes(**outcomes)
        assert ret is None or result.ret == ret
        lines = pytest.LineMatcher([*result.outlines, *result.errlines])
        lines.fnmatch_lines([shows] if isinstance(shows, str) else shows)
        for pattern in [hides] if isinstance(hides, str) else hides:
            lines.no_fnmatch_line(pattern)
        return result

    def refuses(self, *options: str, files: Files | None = None, shows: str | Sequence[str]) -> str:
        """Run pytest, which must refuse the run by a text; return that."""
        files = {"test_x": "def test_plain(): pass"} | dict(files or {})  # type: ignore[arg-type]
        result = self.run(*options, files=files, ret=pytest.ExitCode.USAGE_ERROR)
        text = f"{result.stderr}{result.stdout}"
        assert "INTERNALERROR" not in text
        assert "Traceback" not in text
        for each in [shows] if isinstance(shows, str) else shows:
            assert each in text
        return text
