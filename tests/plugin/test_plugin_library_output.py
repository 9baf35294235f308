"""What the libraries log to stderr is no part of a failure."""

from __future__ import annotations

import re

import pytest

from fixtures.tflite import make
from pytest_edgeq.plugin.library_output import split_output
from tests.projects import Project

LOG = re.compile(r"^(WARNING|INFO|[VDIWE]\d{4}|\[[VIWE]\d{4})\b.*", re.MULTILINE)

REAL = """
import sys
import numpy as np
import pytest
import torch
from fixtures.models import net

FILE = {file!r}


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
    model = net(forward, linear=torch.nn.Linear(4, 4)).eval()
    model = edgeq.quantize(model, samples[0], calibration=samples)
    edgeq.compare(model, samples[:1])
    assert not "a model was quantized"
"""

TITLE = "*edgeq: stderr of the libraries, {}*"


@pytest.mark.slow
def test_a_failure_holds_no_log_of_the_libraries(project: Project) -> None:
    """It is counted; the model's own output is shown, and pytest's last line is the last one."""
    test = REAL.format(file=str(make.CONVERTED / "equal_weights.int8.tflite"))
    shows = [TITLE.format("call"), "* lines, shown by -v"]
    options = ("--edgeq-cache=off", "--tb=short")
    result = project.run(*options, files=test, process=True, failed=4, shows=shows)
    shown = result.stdout.str()
    assert LOG.findall(shown) == []
    assert shown.count("forward prints") == shown.count("forward warns") > 0
    assert " 4 failed in " in result.outlines[-1]
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


@pytest.mark.parametrize(
    "options",
    [(), ("-v",), ("--show-capture=stderr",), pytest.param(("-n", "1"), marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_each_phase_has_a_section(project: Project, options: tuple[str, ...]) -> None:
    """Also from a worker of pytest-xdist; a refusal has its log in full, `-v` has all."""
    one, two = ([LINE], [LINE, LINE]) if "-v" in options else (["1 line, *-v"], ["2 lines, *-v"])
    shows = [
        *(TITLE.format("setup"), *one, "*Captured stderr call*", "told by the test"),
        *(TITLE.format("call"), *one, TITLE.format("teardown"), *two),
        *("*RuntimeError: the kernels refuse the file", TITLE.format("call"), LINE),
    ]
    result = project.run(*options, files=STAGED, shows=shows)
    assert result.stdout.str().count(LINE) == (5 if "-v" in options else 1)


def test_no_output_is_shown_where_none_is_asked_for(project: Project) -> None:
    """As of the captured sections of pytest itself."""
    project.run("--show-capture=no", files=STAGED, hides=TITLE.format(""))


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
    rest, logged = split_output("".join(f"{line}\n" for line in [*LOGGED, *OWN, *LOGGED]))
    assert rest.splitlines() == OWN
    assert [line.rstrip("\n") for line in logged] == [*LOGGED, *LOGGED]
