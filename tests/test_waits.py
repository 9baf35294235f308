"""No test waits without a bound, for what may never come."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import line_of, output_of, rounds, running, wait_until

ROOT = Path(__file__).parents[1]

LOOKED_AT = [
    path
    for path in sorted((ROOT / "tests").rglob("*.py"))
    # What this page asks for, and scripts that somebody runs by hand.
    if path.name != "waiting.py" and path.parent.name != "speed"
]


def unbounded(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the code of each wait that may last for ever."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(ast.Attribute(ast.Name("subprocess"), "run"), _, keywords):
                is_bounded = any(each.arg == "timeout" for each in keywords)
            case ast.Call(ast.Attribute(_, "communicate" | "join" | "wait"), args, keywords):
                is_bounded = bool(args or keywords)
            case ast.Call(ast.Attribute(ast.Attribute(_, "stdout"), "readline")):
                is_bounded = False
            case ast.While():
                is_bounded = "sleep(" not in ast.unparse(node)
            case _:
                continue
        if not is_bounded:
            yield node.lineno, ast.unparse(node).partition("\n")[0]


def test_waits_are_bounded() -> None:
    """By a timeout, or by `tests.waiting`."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {code}"
        for path in LOOKED_AT
        for line, code in unbounded(path.read_text("utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("subprocess.run(command, check=True)", 1),
        ("subprocess.run(command, check=True, timeout=100)", 0),
        ("process.communicate()", 1),
        ("process.communicate(timeout=60)", 0),
        ("thread.join(), event.wait()", 2),
        ("thread.join(60), event.wait(60), ', '.join(names)", 0),
        ("client.stdout.readline()", 1),
        ("while not path.exists():\n    time.sleep(0.1)", 1),
        ("while rest:\n    rest.pop()", 0),
    ],
)
def test_a_wait_without_a_bound_is_found(source: str, count: int) -> None:
    """And one with a bound is not."""
    assert len(list(unbounded(source))) == count


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_wait_ends_with_what_it_waits_for(tmp_path: Path) -> None:
    """Also where that is the last thing that the process does."""
    made = tmp_path / "made"
    with running(_python(f"open({str(made)!r}, 'w')")) as process:
        wait_until(made.exists, process)
    with running(_python("print('ready'); input()"), stdin=-1, stdout=-1, text=True) as process:
        assert line_of(process) == "ready\n"
        process.communicate("", timeout=60)


def test_a_wait_fails_when_the_partner_has_died() -> None:
    """At once, with what it printed, and not when the time is over."""
    dies = _python("print('no memory'); raise SystemExit(3)")
    told = pytest.raises(AssertionError, match="ended before: no memory")
    with running(dies, stdout=subprocess.PIPE, text=True) as process, told:
        wait_until(lambda: False, process)
    thread = threading.Thread(target=int)
    thread.start()
    with pytest.raises(AssertionError, match=r"stopped.* ended before"):
        wait_until(lambda: False, thread)


def test_a_wait_fails_when_the_time_is_over() -> None:
    """And the process is killed with its children."""
    with pytest.raises(AssertionError, match=r"not done within 0\.05 s"):
        wait_until(lambda: False, None, 0.05)
    with pytest.raises(AssertionError, match=r"not done within 0 s and \d+ rounds"):
        list(rounds(0))
    code = "import subprocess; subprocess.run(['sleep', '600'])"
    for wait, words in ((output_of, "runs after"), (line_of, "prints nothing for")):
        told = pytest.raises(AssertionError, match=rf"{words} 0\.5 s")
        with running(_python(code), stdout=-1, text=True) as process, told:
            wait(process, 0.5)


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
    """By the settings of this project, and also in a worker of pytest-xdist."""
    pytester.makepyfile(test_it=HANGS)
    pytester.makeconftest(
        "from tests.conftest import (\n    pytest_configure,\n    pytest_timeout_cancel_timer,\n"
        "    pytest_timeout_set_timer,\n)"
    )
    config = (f"--config-file={ROOT / 'pyproject.toml'}", f"--rootdir={pytester.path}")
    result = pytester.runpytest_subprocess(*config, *xdist, "test_it.py", timeout=100)
    assert result.ret == 1
    result.stderr.fnmatch_lines(["Timeout (0:00:01)!", "*test_it.py*in test_hangs"])
