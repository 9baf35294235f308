"""Runtimes that other plugins and conftest.py files register, one of them a real second process."""

from __future__ import annotations

import os
import sys

import pytest

from fixtures.tflite import make
from pytest_edgeq.names import RUNTIMES
from tests.projects import Project
from tests.waiting import wait_until

# What stands on the other side: a device, here a process with an interpreter of its own.
SIMULATOR = """
import pickle
import sys

if __name__ == "__main__":
    from ai_edge_litert.interpreter import Interpreter

    run = Interpreter(sys.argv[1]).get_signature_runner(sys.argv[2])
    while True:
        try:
            inputs = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        pickle.dump(run(**inputs), sys.stdout.buffer)
        sys.stdout.buffer.flush()
"""

CONFTEST = '''
import pickle
import subprocess
import sys
from pathlib import Path

import simulator

LOG = Path(__file__).parent / "log"


class Simulated:
    """One file, open on the simulator: maps inputs to outputs."""

    def __init__(self, path, signature):
        command = [sys.executable, simulator.__file__, str(path), signature]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        LOG.joinpath(str(self.process.pid)).touch()

    def __call__(self, inputs):
        pickle.dump(inputs, self.process.stdin)
        self.process.stdin.flush()
        return pickle.load(self.process.stdout)

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
        LOG.joinpath(f"{self.process.pid}.closed").touch()


def pytest_edgeq_runtimes(config):
    return {"simulator": Simulated}
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
def simulated(project: Project) -> Project:
    """A suite whose runtime is a process of its own."""
    file = (make.CONVERTED / "nested.int8.tflite").read_bytes()
    project.write({"simulator": SIMULATOR, "test_it": TESTS, "conftest": CONFTEST})
    project.write({"nested.tflite": file})
    project.path.joinpath("log").mkdir()
    return project


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _wait_for_end(project: Project) -> tuple[list[int], list[int]]:
    """Give the processes that were started and those that were closed; all must have ended."""
    names = [path.name for path in (project.path / "log").iterdir()]
    started = [int(name) for name in names if name.isdigit()]
    closed = [int(name.removesuffix(".closed")) for name in names if not name.isdigit()]
    wait_until(lambda: not any(map(_is_running, started)), None)
    return sorted(started), sorted(closed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ini", "options", "most"),
    [("edgeq_runtime = simulator", ("-p", "no:xdist"), 2), ("", ("-n", "2"), 4)],
    ids=["ini", "flag-n2"],
)
def test_a_second_process_runs_the_file(
    simulated: Project, ini: str, options: tuple[str, ...], most: int
) -> None:
    """By flag, ini, marker and name; opened where it is used, and closed at the end."""
    flag = () if ini else ("--edgeq-runtime=simulator",)
    simulated.run(
        *(*options, *flag, "-W", "error"),
        files={"pytest.ini": f"[pytest]\n{ini}\nfilterwarnings = error\n"},
        process=True,
        passed=3,
        shows="edgeq: runtime=simulator *runtimes=simulator",
    )
    started, closed = _wait_for_end(simulated)
    assert started == closed
    # Tests share a model, which is tried in the child process first; each worker has its own.
    assert 2 <= len(started) <= most


# --- registering ------------------------------------------------------------------------------

HOOK = "the hook pytest_edgeq_runtimes: runtime"


def test_a_bad_registration_stops_the_run(project: Project) -> None:
    """At once, with the hook and those that implement it; which are bad, `Edgeq` decides."""
    files = {"conftest": "def pytest_edgeq_runtimes(config): return {'xnnpack': print}"}
    said = "'xnnpack' is the name of a built-in runtime"
    project.refuses(files=files, shows=[HOOK, said, "implemented by: ", "conftest.py"])


def test_a_hook_with_another_signature_is_refused(project: Project) -> None:
    """By pluggy, because the hook is declared."""
    result = project.run(files={"conftest": "def pytest_edgeq_runtimes(settings): return {}"})
    assert result.ret != pytest.ExitCode.OK
    assert "settings" in f"{result.stderr}{result.stdout}"


_PLUGIN = "def pytest_edgeq_runtimes(config):\n    return {runtimes}\n"


def test_results_of_several_plugins_are_merged(project: Project) -> None:
    """Also of a plugin that returns None; help and errors list all; no name may occur twice."""
    sys.path.insert(0, str(project.path))  # put back by pytester
    files = {
        name: _PLUGIN.format(runtimes=runtimes)
        for name, runtimes in {
            "one": "{'one': print}",
            "none": "None",
            "again": "{'two': print}",
            "conftest": "{'two': print}",
        }.items()
    }
    options = ("-p", "one", "-p", "none")
    text = project.refuses(
        *(*options, "--edgeq-runtime=oen"),
        files=files,
        shows=[
            "--edgeq-runtime: unknown runtime 'oen' (did you mean one",
            "valid: " + ", ".join(RUNTIMES),
            "pytest_edgeq_runtimes(config), which must be in a plugin, or in a conftest",
        ],
    )
    assert {"one", "two"} <= set(text.split("valid: ")[1].splitlines()[0].split(", "))
    project.run(*options, "--edgeq-runtime=two", passed=1, shows="edgeq: runtime=two *")
    project.refuses("-p", "again", shows=[f"{HOOK}s: 'two' is given twice", "implemented by: "])


def test_a_plugin_may_register_another_while_it_is_configured(project: Project) -> None:
    """Ours is configured last."""
    conftest = """
        class Late:
            def pytest_edgeq_runtimes(self, config):
                return {"late": print}

        def pytest_configure(config):
            config.pluginmanager.register(Late())
    """
    files = {"conftest": conftest, "test_x": "def test_plain(): pass"}
    project.run("--edgeq-runtime=late", files=files, passed=1)


def test_a_conftest_that_is_read_too_late_is_told_where_to_stand(project: Project) -> None:
    """One below the folder that pytest is given registers nothing."""
    test = "import pytest\n@pytest.mark.edgeq(runtime='phone')\ndef test_it(edgeq): pass\n"
    conftest = _PLUGIN.format(runtimes="{'phone': print}")
    files = {"below/__init__": "", "below/conftest": conftest, "below/test_below": test}
    shows = [
        "*the marker edgeq(runtime=…): unknown runtime 'phone'; valid: *",
        "*a conftest.py that pytest reads before it collects*",
    ]
    project.run(files=files, errors=1, shows=shows)
    project.run("below", ret=0)


def test_tensorflow_is_looked_for_when_the_run_starts(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By flag, ini and marker; without importing it."""
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    needs = "the runtime 'tensorflow' needs TensorFlow, which is not inst"
    install = "pip install 'pytest-edgeq[tensorflow]'"
    shows = [f"--edgeq-runtime: {needs}", install]
    project.refuses("--edgeq-runtime=tensorflow", shows=shows)
    ini = {"pytest.ini": "[pytest]\nedgeq_runtime = tensorflow\n"}
    project.refuses(files=ini, shows=f"ini option edgeq_runtime: {needs}")
    test = "import pytest\n@pytest.mark.edgeq(runtime='tensorflow')\ndef test_it(): pass"
    files = {"pytest.ini": "[pytest]\n", "test_x": test}
    project.run(files=files, errors=1, shows="*pip install 'pytest-edgeq[[]tensorflow]'")


@pytest.mark.slow
def test_tensorflow_that_is_there_is_not_imported_before_it_runs(project: Project) -> None:
    """Choosing it costs nothing in a run that runs no file."""
    test = "import sys\ndef test_it(): assert 'tensorflow' not in sys.modules"
    options = ("--edgeq-runtime=tensorflow", "-p", "no:xdist")
    project.run(*options, files=test, process=True, passed=1, shows="edgeq: runtime=tensorflow *")
