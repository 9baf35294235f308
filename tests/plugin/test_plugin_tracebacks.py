"""Errors of the plugin show the user's line and a message, not how the libraries came to it."""

from __future__ import annotations

import pytest

from tests.plugin.conftest import Run

_MODEL = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()

def images(count, channels=3):
    return [(torch.zeros(1, channels, 8, 8),) for _ in range(count)]
"""


def _failure(result: pytest.RunResult) -> list[str]:
    lines = result.outlines
    start = next(i for i, line in enumerate(lines) if line.startswith("____"))
    end = next(i for i, line in enumerate(lines) if line.startswith("=") and i > start)
    return lines[start + 1 : end]


@pytest.mark.parametrize("quantizer", ["pt2e_static_int8", "recipe_dynamic_wi8_afp32"])
@pytest.mark.parametrize(
    ("inputs", "told", "cause"),
    [
        (
            "images(1, channels=4)[0]",
            "args_0: float32 1×4×8×8",
            "RuntimeError: Given groups=1, weight of size [4, 3, 3, 3], expected input[1, 4, 8, 8] "
            "to have 3 channels, but got 4 channels instead",
        ),
        (
            "(*images(1)[0], torch.zeros(1))",
            "args_0: float32 1×3×8×8, args_1: float32 1",
            "TypeError: Sequential.forward() takes 2 positional arguments but 3 were given",
        ),
    ],
    ids=["shape", "count"],
)
def test_sample_inputs_that_the_model_does_not_take(
    pytester: pytest.Pytester, run_here: Run, quantizer: str, inputs: str, told: str, cause: str
) -> None:
    """The sentence alone; the libraries' traceback, 190 lines, with --tb=long."""
    pytester.makepyfile(
        test_x=_MODEL
        + f"""
def test_it(edgeq):
    edgeq.quantize(net(), {inputs}, quantizer="{quantizer}", calibration=iter(images(4)))
"""
    )

    lines = _failure(run_here())

    assert [line for line in lines if line.startswith("E ")] == [
        f"E       RuntimeError: Sequential: its forward fails on the sample inputs ({told})",
        f"E       cause: {cause}",
        "E       fix: give inputs that the model takes in eval mode; no quantizer is involved",
    ]
    assert lines[-1] == "the library's own error is shown by --tb=long"
    assert len(lines) < 15
    assert not any("site-packages" in line for line in lines)
    whole = _failure(run_here("--tb=long"))
    assert any("site-packages/torch" in line for line in whole)
    assert not any("--tb=long" in line for line in whole)


@pytest.mark.parametrize("quantizer", ["pt2e_static_int8", "recipe_static_wi8_ai8"])
def test_a_calibration_sample_of_another_shape(
    pytester: pytest.Pytester, run_here: Run, quantizer: str
) -> None:
    """No frame of the plugin between the user's line and the message."""
    pytester.makepyfile(
        test_x=_MODEL
        + f"""
def test_it(edgeq):
    edgeq.quantize(
        net(), images(1)[0], quantizer="{quantizer}", calibration=images(4, channels=4)
    )
"""
    )

    lines = _failure(run_here())

    assert any(line.endswith("edgeq.quantize(") for line in lines)
    told = [line for line in lines if line.startswith("E ")]
    assert told == [
        "E       ValueError: calibration sample 0, input 'args_0': expected shape 1×3×8×8, got "
        "1×4×8×8"
    ]
    assert not any("pytest_edgeq/" in line for line in lines)


def test_an_error_of_the_users_own_code_is_left_as_it_is(
    pytester: pytest.Pytester, run_here: Run
) -> None:
    """A training loop that fails shows its line, and what it was raised from."""
    pytester.makepyfile(
        test_x=_MODEL
        + """
def train(prepared):
    try:
        {}["loss"]
    except KeyError as error:
        raise ZeroDivisionError("mine") from error

def test_it(edgeq):
    edgeq.quantize(net(), images(1)[0], quantizer="pt2e_qat_int8", train=train)
"""
    )

    lines = _failure(run_here())

    assert "E           KeyError: 'loss'" in lines
    assert "test_x.py:15: ZeroDivisionError" in lines
    assert not any("--tb=long" in line for line in lines)


def test_what_a_fixture_raises_is_short_as_well(pytester: pytest.Pytester, run_here: Run) -> None:
    """Models are quantized in fixtures."""
    pytester.makepyfile(
        test_x=_MODEL
        + """
import pytest

@pytest.fixture
def quantized(edgeq):
    return edgeq.quantize(net(), images(1, channels=4)[0], calibration=images(4, channels=4))

def test_it(quantized):
    pass
"""
    )

    result = run_here()

    result.assert_outcomes(errors=1)
    assert not any("site-packages" in line for line in _failure(result))
    result.stdout.fnmatch_lines(["E       cause: RuntimeError: Given groups=1*"])
