"""The targets of a project's ini, for the command line."""

from __future__ import annotations

import contextlib
import sys

import pytest

from pytest_edgeq.plugin.options.declared import target_options


class _Reader:
    """A plugin that reads the ini before any test is collected."""

    def __init__(self) -> None:
        self.found: tuple[dict[str, tuple[str, ...]], int] | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> int:
        """Read the options, and end pytest."""
        self.found = target_options(config)
        return 0


def project_targets() -> tuple[dict[str, tuple[str, ...]], int]:
    """Return the targets of the project in the working directory."""
    reader = _Reader()
    # What a conftest.py prints must not be mixed into a JSON document.
    with contextlib.redirect_stdout(sys.stderr):
        code = pytest.main(["-p", "no:cacheprovider", "-s"], plugins=[reader])
    if reader.found is None:
        raise RuntimeError(f"pytest does not read the project's ini: exit status {int(code)}")
    return reader.found
