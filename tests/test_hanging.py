"""A test that hangs ends its process, by the settings of this project."""

from __future__ import annotations

import pytest

from tests.projects import ROOT

HANGS = """
import threading
import pytest

@pytest.mark.timeout(1)
def test_hangs():
    threading.Event().wait()
"""


@pytest.mark.parametrize(
    "xdist", [("-p", "no:xdist"), pytest.param(("-n", "1"), marks=pytest.mark.slow)], ids="-".join
)
def test_a_test_that_hangs_ends_with_its_stacks(
    pytester: pytest.Pytester, xdist: tuple[str, str]
) -> None:
    """Also in a worker of pytest-xdist."""
    pytester.makepyfile(test_it=HANGS)
    pytester.makeconftest(
        "from tests.conftest import (\n    pytest_configure,\n    pytest_timeout_cancel_timer,\n"
        "    pytest_timeout_set_timer,\n)"
    )
    config = (f"--config-file={ROOT / 'pyproject.toml'}", f"--rootdir={pytester.path}")
    result = pytester.runpytest_subprocess(*config, *xdist, "test_it.py", timeout=100)
    assert result.ret == 1
    result.stderr.fnmatch_lines(["Timeout (0:00:01)!", "*test_it.py*in test_hangs"])
