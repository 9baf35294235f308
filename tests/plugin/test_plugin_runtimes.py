"""Runtimes that other plugins and conftest.py files register, one of them a real second process."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from fixtures.tflite import make
from pytest_edgeq.names import RUNTIMES
from tests.waiting import wait_until

# What stands on the other side: a device, here a process with an interpreter of its own.
SIMULATOR = """
import io
import struct
import sys

import numpy as np


def send(stream, arrays):
    content = io.BytesIO()
    np.savez(content, **arrays)
    stream.write(struct.pack("<Q", content.tell()) + content.getvalue())
    stream.flush()


def receive(stream):
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError("the other side has hung up")
    (size,) = struct.unpack("<Q", head)
    with np.load(io.BytesIO(stream.read(size))) as arrays:
        return dict(arrays)


if __name__ == "__main__":
    from ai_edge_litert.interpreter import Interpreter

    run = Interpreter(sys.argv[1]).get_signature_runner(sys.argv[2])
    while True:
        try:
            inputs = receive(sys.stdin.buffer)
        except EOFError:
            break
        send(sys.stdout.buffer, run(**inputs))
"""

CONFTEST = '''
import subprocess
import sys
from pathlib import Path

import simulator


class Simulated:
    """One file, open on the simulator: called with the inputs, it gives the outputs."""

    def __init__(self, path, signature):
        command = [sys.executable, simulator.__file__, str(path), signature]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        LOG.joinpath(str(self.process.pid)).touch()

    def __call__(self, inputs):
        simulator.send(self.process.stdin, inputs)
        return simulator.receive(self.process.stdout)

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        LOG.joinpath(f"{self.process.pid}.closed").touch()


def pytest_edgeq_runtimes(config):
    return {"simulator": Simulated}


LOG = Path(__file__).parent / "log"
'''

TESTS = """
import numpy as np
import pytest
from pytest_edgeq import assert_runtimes_agree

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


@pytest.fixture(scope="module")
def model(edgeq):
    return edgeq.load("nested.tflite", reference=lambda x: (x[:, :2] * 0, x[:, :3] * 0))


def test_it_agrees(model):
    assert_runtimes_agree(model, [X, -X], 0, runtimes=("xnnpack", "simulator", "builtin"))


def test_compare(edgeq, model):
    assert edgeq.compare(model, [X]).runtime == "simulator"
    assert edgeq.compare(model, [X], runtime="builtin").runtime == "builtin"


@pytest.mark.edgeq(runtime="simulator")
def test_marked(edgeq, model):
    assert edgeq.compare(model, [X]).runtime == "simulator"
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> Path:
    """A suite whose runtime is a process of its own."""
    pytester.makepyfile(simulator=SIMULATOR, test_it=TESTS)
    pytester.makeconftest(CONFTEST)
    pytester.path.joinpath("log").mkdir()
    shutil.copy(make.CONVERTED / "nested.int8.tflite", pytester.path / "nested.tflite")
    return pytester.path


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _wait_for_end(project: Path) -> tuple[list[int], list[int]]:
    """Give the processes that were started and those that were closed; all must have ended."""
    names = [path.name for path in (project / "log").iterdir()]
    started = [int(name) for name in names if name.isdigit()]
    closed = [int(name.removesuffix(".closed")) for name in names if not name.isdigit()]
    wait_until(lambda: not any(map(_is_running, started)), None)
    return sorted(started), sorted(closed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "xdist"), [("ini", ("-p", "no:xdist")), ("flag", ("-n", "2"))], ids=["ini", "flag-n2"]
)
def test_a_second_process_runs_the_file(
    pytester: pytest.Pytester, project: Path, xdist: tuple[str, ...], how: str
) -> None:
    """By flag, ini, marker and name; opened where it is used, and closed at the end."""
    if how == "ini":
        pytester.makeini("[pytest]\nedgeq_runtime = simulator\nfilterwarnings = error\n")
    flag = ["--edgeq-runtime=simulator"] if how == "flag" else []

    result = pytester.runpytest_subprocess(*xdist, *flag, "-W", "error")

    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["edgeq: runtime=simulator *runtimes=simulator"])
    started, closed = _wait_for_end(project)
    assert started == closed
    # The three tests share a model, which is tried in the child process first; each worker has its
    # own.
    assert len(started) == 2 if xdist[0] == "-p" else 2 <= len(started) <= 4


@pytest.mark.slow
def test_a_marker_alone_names_it(pytester: pytest.Pytester, project: Path) -> None:
    """Tried in the child process, then here; a test that names none starts no process."""
    result = pytester.runpytest_subprocess("-p", "no:xdist", "-k", "marked or compare")
    result.assert_outcomes(passed=1, failed=1, deselected=1)
    result.stdout.fnmatch_lines(["E *'xnnpack' == 'simulator'"])
    assert len(_wait_for_end(project)[0]) == 2


@pytest.mark.slow
def test_a_process_that_dies_is_an_error_that_names_it(
    pytester: pytest.Pytester, project: Path
) -> None:
    """Not a hang, and not a pass."""
    pytester.makepyfile(
        simulator=SIMULATOR.replace("send(sys.stdout.buffer, run(**inputs))", "sys.exit(3)")
    )
    result = pytester.runpytest_subprocess("-p", "no:xdist", "-k", "agrees")
    result.assert_outcomes(failed=1, deselected=2)
    result.stdout.fnmatch_lines(
        [
            "E *the simulator runtime cannot run the .tflite file: the runner raised EOFError: "
            "the other side has hung up"
        ]
    )
    assert _wait_for_end(project)[0]


@pytest.mark.slow
def test_a_process_that_gives_something_else_is_an_error(
    pytester: pytest.Pytester, project: Path
) -> None:
    """Floats where the file gives codes."""
    pytester.makepyfile(
        simulator=SIMULATOR.replace(
            "run(**inputs))", "{k: v.astype('f4') for k, v in run(**inputs).items()})"
        )
    )
    result = pytester.runpytest_subprocess("-p", "no:xdist", "-k", "agrees")
    result.assert_outcomes(failed=1, deselected=2)
    result.stdout.fnmatch_lines(
        ["E *simulator runtime * output 'output_0': expected int8 ?2, 2?, the runner gave float32*"]
    )


# --- registering ------------------------------------------------------------------------------


def _refused(pytester: pytest.Pytester, *args: str) -> str:
    pytester.makepyfile("def test_plain(): pass")
    result = pytester.runpytest(*args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    text = f"{result.stderr}{result.stdout}"
    assert "INTERNALERROR" not in text
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{'xnnpack': print}", "'xnnpack' is the name of a built-in runtime"),
        ("{'my phone': print}", "'my phone' is no name for a runtime"),
        ("{'phone': 'adb'}", "runtime 'phone': expected a runner"),
        ("[print]", "expected a dict of name → runner, got list"),
        ("'phone'", "expected a dict of name → runner, got str"),
    ],
)
def test_a_bad_registration_stops_the_run(pytester: pytest.Pytester, value: str, said: str) -> None:
    """At once, with the hook and those that implement it."""
    pytester.makeconftest(f"def pytest_edgeq_runtimes(config): return {value}")
    text = _refused(pytester)
    assert "the hook pytest_edgeq_runtimes: runtime" in text
    assert said in text
    assert "implemented by: " in text
    assert "conftest.py" in text


def test_a_hook_with_another_signature_is_refused(pytester: pytest.Pytester) -> None:
    """By pluggy, because the hook is declared."""
    pytester.makeconftest("def pytest_edgeq_runtimes(settings): return {}")
    result = pytester.runpytest()
    assert result.ret != pytest.ExitCode.OK
    assert "settings" in f"{result.stderr}{result.stdout}"


_PLUGIN = "def pytest_edgeq_runtimes(config):\n    return {runtimes}\n"


def test_results_of_several_plugins_are_merged(pytester: pytest.Pytester) -> None:
    """Of one that has nothing to give, too; the help and the error list them all."""
    pytester.makepyfile(
        one=_PLUGIN.format(runtimes="{'one': print}"),
        none=_PLUGIN.format(runtimes="None"),
    )
    pytester.makeconftest(_PLUGIN.format(runtimes="{'two': print}"))
    pytester.syspathinsert()
    text = _refused(pytester, "-p", "one", "-p", "none", "--edgeq-runtime=oen")
    assert "--edgeq-runtime: unknown runtime 'oen' (did you mean one" in text
    assert "valid: " + ", ".join(RUNTIMES) in text
    assert {"one", "two"} <= set(text.split("valid: ")[1].splitlines()[0].split(", "))
    assert "pytest_edgeq_runtimes(config), which must stand in a plugin, or in a conftest" in text
    result = pytester.runpytest("-p", "one", "-p", "none", "--edgeq-runtime=two")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["edgeq: runtime=two *"])


def test_one_name_from_two_plugins_stops_the_run(pytester: pytest.Pytester) -> None:
    """Which of them would run?"""
    pytester.makepyfile(one=_PLUGIN.format(runtimes="{'phone': print}"))
    pytester.makeconftest(_PLUGIN.format(runtimes="{'phone': print}"))
    pytester.syspathinsert()
    text = _refused(pytester, "-p", "one")
    assert "the hook pytest_edgeq_runtimes: runtimes: 'phone' is given twice" in text
    assert "implemented by: " in text


def test_a_plugin_may_register_another_while_it_is_configured(pytester: pytest.Pytester) -> None:
    """Ours is configured last."""
    pytester.makeconftest(
        """
        class Late:
            def pytest_edgeq_runtimes(self, config):
                return {"late": print}

        def pytest_configure(config):
            config.pluginmanager.register(Late())
        """
    )
    pytester.makepyfile("def test_plain(): pass")
    result = pytester.runpytest("--edgeq-runtime=late")
    result.assert_outcomes(passed=1)


def test_a_conftest_that_is_read_too_late_is_told_where_to_stand(pytester: pytest.Pytester) -> None:
    """One below the folder that pytest is given registers nothing."""
    below = pytester.mkpydir("below")
    below.joinpath("conftest.py").write_text(_PLUGIN.format(runtimes="{'phone': print}"))
    below.joinpath("test_below.py").write_text(
        "import pytest\n@pytest.mark.edgeq(runtime='phone')\ndef test_it(edgeq): pass\n"
    )
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    text = result.stdout.str()
    assert "the marker edgeq(runtime=…): unknown runtime 'phone'; valid: " in text
    assert "a conftest.py that pytest reads before it collects" in text
    assert pytester.runpytest("below").ret == pytest.ExitCode.OK


def test_tensorflow_is_looked_for_when_the_run_starts(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By flag, ini and marker; without importing it."""
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    text = _refused(pytester, "--edgeq-runtime=tensorflow")
    assert "--edgeq-runtime: the runtime 'tensorflow' needs TensorFlow, which is not inst" in text
    assert "pip install 'pytest-edgeq[tensorflow]'" in text
    pytester.makeini("[pytest]\nedgeq_runtime = tensorflow\n")
    assert "ini option edgeq_runtime: the runtime 'tensorflow' needs" in _refused(pytester)
    pytester.makeini("[pytest]\n")
    pytester.makepyfile(
        "import pytest\n@pytest.mark.edgeq(runtime='tensorflow')\ndef test_it(): pass"
    )
    result = pytester.runpytest()
    result.assert_outcomes(errors=1)
    assert "pip install 'pytest-edgeq[tensorflow]'" in result.stdout.str()


@pytest.mark.slow
def test_tensorflow_that_is_there_is_not_imported_before_it_runs(
    pytester: pytest.Pytester,
) -> None:
    """Choosing it costs nothing in a run that runs no file."""
    pytester.makepyfile("import sys\ndef test_it(): assert 'tensorflow' not in sys.modules")
    result = pytester.runpytest_subprocess("--edgeq-runtime=tensorflow", "-p", "no:xdist")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["edgeq: runtime=tensorflow *"])
