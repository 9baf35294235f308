"""What the libraries log to stderr: no part of a failure, and no line behind pytest's last."""

from __future__ import annotations

import re

import pytest

from fixtures.tflite import make
from pytest_edgeq.plugin.library_output import split_output

LOG = re.compile(r"^(WARNING|INFO|[VDIWE]\d{4}|\[[VIWE]\d{4})\b.*", re.MULTILINE)

REAL = """
import sys
import numpy as np
import pytest
import torch
from torch import nn

FILE = {file!r}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        if not torch.compiler.is_compiling():
            print("forward prints")
            print("forward warns", file=sys.stderr)
        return self.linear(x)


@pytest.mark.parametrize("runtime", ["xnnpack", "builtin", "compiled"])
def test_runs(edgeq, runtime):
    model = edgeq.load(FILE)
    inputs = [np.zeros(each.shape, np.float32) for each in model.inputs]
    model.run(*inputs, runtime=runtime)
    assert not "a file ran"


def test_quantizes(edgeq):
    samples = [(torch.randn(1, 4),) for _ in range(4)]
    model = edgeq.quantize(Net().eval(), samples[0], calibration=samples)
    edgeq.compare(model, samples[:1])
    assert not "a model was quantized"
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """Fail after a run on each runtime, and after a conversion."""
    file = make.CONVERTED / "equal_weights.int8.tflite"
    pytester.makepyfile(REAL.format(file=str(file)))
    return pytester


def test_a_failure_holds_no_log_of_the_libraries(project: pytest.Pytester) -> None:
    """It is counted, what the model prints is there, and pytest's last line is the last one."""
    result = project.runpytest_subprocess("--edgeq-cache=off", "--tb=short")

    result.assert_outcomes(failed=4)
    shown = result.stdout.str()
    assert LOG.findall(shown) == []
    assert shown.count("forward prints") == shown.count("forward warns") > 0
    result.stdout.fnmatch_lines(["*edgeq: stderr of the libraries, call*", "* lines, shown by -v"])
    assert " 4 failed in " in result.outlines[-1]
    assert result.errlines == []


@pytest.mark.slow
def test_a_verbose_run_shows_the_log(project: pytest.Pytester) -> None:
    """Under a title of its own."""
    result = project.runpytest_subprocess("--edgeq-cache=off", "--tb=short", "-v")

    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(
        [
            "*edgeq: stderr of the libraries, call*",
            "INFO: Created TensorFlow Lite XNNPACK delegate for CPU.",
            "*edgeq: stderr of the libraries, call*",
            "INFO: [[]environment.cc:*[]] Creating LiteRT environment with options",
            "*Captured stdout call*",
            "forward prints",
            "*Captured stderr call*",
            "forward warns",
            "*edgeq: stderr of the libraries, call*",
            "I0000 *.cc:*[]] *",
        ]
    )
    assert result.errlines == []


LINE = "INFO: Created TensorFlow Lite XNNPACK delegate for CPU."

STAGED = f"""
import os
import pytest
import sys

def log():
    os.write(2, b"{LINE}\\n")

@pytest.fixture
def logged():
    log()
    yield
    log()
    log()

def test_in_each_phase(logged):
    print("told by the test", file=sys.stderr)
    log()
    assert False

def test_a_refusal():
    log()
    raise RuntimeError("the kernels refuse the file")
"""

COUNTED = [
    "*Captured stderr call*",
    "told by the test",
    "*edgeq: stderr of the libraries, call*",
    "1 line, shown by -v",
    "*edgeq: stderr of the libraries, teardown*",
    "2 lines, shown by -v",
]


@pytest.mark.parametrize("options", [(), ("-n", "1"), ("--show-capture=stderr",)], ids="-".join)
def test_each_phase_has_a_section(pytester: pytest.Pytester, options: tuple[str, ...]) -> None:
    """Also from a worker of pytest-xdist; a refusal has its log in full."""
    pytester.makepyfile(STAGED)

    result = pytester.runpytest_subprocess(*options)

    result.stdout.fnmatch_lines(["*edgeq: stderr of the libraries, setup*", "1 line, shown by -v"])
    result.stdout.fnmatch_lines(COUNTED, consecutive=True)
    result.stdout.fnmatch_lines(["*RuntimeError: the kernels refuse the file", "*call*", LINE])
    assert result.stdout.str().count(LINE) == 1


def test_no_output_is_shown_where_none_is_asked_for(pytester: pytest.Pytester) -> None:
    """As of the captured sections of pytest itself."""
    pytester.makepyfile(STAGED)

    result = pytester.runpytest_subprocess("--show-capture=no")

    result.stdout.no_fnmatch_line("*stderr of the libraries*")


@pytest.mark.parametrize("capture", ["no", "sys"])
def test_what_pytest_does_not_capture_is_left_alone(
    pytester: pytest.Pytester, capture: str
) -> None:
    """`-s` shows all of it, and `--capture=sys` what native code writes."""
    pytester.makepyfile(STAGED)

    result = pytester.runpytest_subprocess(f"--capture={capture}")

    assert result.stderr.str().count(LINE) == 5
    shown = result.stdout if capture == "sys" else result.stderr
    shown.fnmatch_lines(["told by the test"])


OWN = [
    "INFO: started",
    "INFO:root:started",
    "WARNING: low battery",
    "I1125 09:29:02.040000 10460 my_model.py:12] of absl's logging for Python",
    "ERROR: gather index out of bounds",
    "E1125 09:29:02.040000 10460 torch/_subclasses/fake_tensor.py:3090] failed",
    "[INFO] I0000 00:00:1795598182.951979 4277 port.cc:153] quoted",
    "",
]

LOGGED = [
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "I0000 00:00:1795598182.951979    4277 port.cc:153] oneDNN custom operations are on.",
    "W0000 00:00:1795598187.053778    4277 tf_tfl_flatbuffer_helpers.cc:392] Ignored",
    "INFO: Created TensorFlow Lite XNNPACK delegate for CPU.",
    "INFO: Initialized TensorFlow Lite runtime.",
    "INFO: Applying 1 TensorFlow Lite delegate(s) lazily.",
    "INFO: [environment.cc:36] Creating LiteRT environment with options",
    "WARNING: [npu_registry.cc:34] NPU accelerator could not be loaded and registered",
    "[W1125 09:29:02.123456789 CPUAllocator.cpp:249] Warning: Failed to load",
    "W1125 09:29:02.040000 10460 torch/fx/experimental/symbolic_shapes.py:8866] Unable to find",
    "2025-11-25 09:29:02.040000: I tensorflow/core/util/port.cc:153] oneDNN",
]


def test_lines_of_the_libraries_are_told_from_others() -> None:
    """Errors, and what a test or a model logs by itself, stay."""
    lines = [*LOGGED, *OWN]
    lines = [*lines[::2], *lines[1::2]]

    rest, logged = split_output("".join(f"{line}\n" for line in lines))

    assert sorted(rest.splitlines()) == sorted(OWN)
    assert sorted(line.rstrip("\n") for line in logged) == sorted(LOGGED)
