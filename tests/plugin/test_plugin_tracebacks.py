"""Errors of the plugin show the user's line and a message, not how the libraries came to it."""

from __future__ import annotations

from tests.projects import Project

SUITE = """
import pytest
import torch
from torch import nn

ONE_MORE = torch.zeros(1)
QUANTIZERS = pytest.mark.parametrize("quantizer", ["pt2e_static_int8", "recipe_static_wi8_ai8"])

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()

def images(count, channels=3):
    return [(torch.zeros(1, channels, 8, 8),) for _ in range(count)]

@QUANTIZERS
@pytest.mark.parametrize("case", ["shape", "count"])
def test_sample(edgeq, quantizer, case):
    inputs = images(1, 4)[0] if case == "shape" else (*images(1)[0], ONE_MORE)
    edgeq.quantize(net(), inputs, quantizer=quantizer, calibration=iter(images(4)))

@QUANTIZERS
def test_calibration(edgeq, quantizer):
    edgeq.quantize(net(), images(1)[0], quantizer=quantizer, calibration=images(4, channels=4))

def train(prepared):
    try:
        {}["loss"]
    except KeyError as error:
        raise ZeroDivisionError("mine") from error  # raised

def test_own(edgeq):
    edgeq.quantize(net(), images(1)[0], quantizer="pt2e_qat_int8", train=train)

@pytest.fixture
def quantized(edgeq):
    return edgeq.quantize(net(), images(1, channels=4)[0], calibration=images(4, channels=4))

def test_fixture(quantized):
    pass
"""


E = "E       "


def _failures(project: Project, *options: str, **outcomes: int) -> dict[str, list[str]]:
    """Return the lines of each failure by the name of its test."""
    project.write(SUITE)
    result = project.run(*options)
    result.assert_outcomes(**outcomes)
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in result.outlines:
        if line.startswith("____"):
            lines = found.setdefault(line.strip("_ ").removeprefix("ERROR at setup of "), [])
        elif line.startswith("="):
            lines = []
        else:
            lines.append(line)
    return found


def test_failures_are_short(project: Project) -> None:
    """The sentence alone; the libraries' traceback, 190 lines, with --tb=long."""
    found = _failures(project, failed=7, errors=1)
    whole = _failures(project, "--tb=long", "-k", "shape", failed=2, deselected=6)
    told = {name: [line for line in lines if line[:2] == "E "] for name, lines in found.items()}
    hint = "the library's own error is shown by --tb=long"

    channels = (
        "RuntimeError: Given groups=1, weight of size [4, 3, 3, 3], expected input[1, 4, 8, 8] to "
        "have 3 channels, but got 4 channels instead"
    )
    count = "TypeError: Sequential.forward() takes 2 positional arguments but 3 were given"
    for quantizer in ("pt2e_static_int8", "recipe_static_wi8_ai8"):
        for case, inputs, cause in (
            ("shape", "args_0: float32 1×4×8×8", channels),
            ("count", "args_0: float32 1×3×8×8, args_1: float32 1", count),
        ):
            name = f"test_sample[{case}-{quantizer}]"
            assert told[name] == [
                f"{E}RuntimeError: Sequential: its forward fails on the sample inputs ({inputs})",
                f"{E}cause: {cause}",
                f"{E}fix: give inputs that the model accepts in eval mode; no quantizer is "
                "involved",
            ]
            assert found[name][-1] == hint
            assert len(found[name]) < 22
            if name in whole:
                assert any("site-packages/torch" in line for line in whole[name])
                assert hint not in whole[name]
        name = f"test_calibration[{quantizer}]"
        assert told[name] == [
            "E       ValueError: calibration sample 0, input 'args_0': expected shape 1×3×8×8, got "
            "1×4×8×8"
        ]
        assert any("edgeq.quantize(" in line and line[0] == ">" for line in found[name])
    assert told["test_fixture"][1] == f"E       cause: {channels}"
    for name, lines in found.items():
        assert name == "test_own" or not any("site-packages" in line for line in lines)
        assert name == "test_own" or not any("pytest_edgeq/" in line for line in lines)

    # A training loop that fails shows its line, and what it was raised from.
    raised = SUITE.partition("  # raised")[0].count("\n")
    assert "E           KeyError: 'loss'" in found["test_own"]
    assert f"test_x.py:{raised + 1}: ZeroDivisionError" in found["test_own"]
    assert hint not in found["test_own"]
