"""
EfficientNet-Lite0 with its ImageNet weights, on photographs, with the kernels of a phone.

What the examples ask of a file on this machine is asked of it on a 64-bit ARM, which QEMU emulates.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import nn

from fixtures.efficientnet import efficientnet_lite0
from fixtures.photographs import calibration_crops, evaluation_crops
from pytest_edgeq import (
    Budget,
    Edgeq,
    QuantizedModel,
    assert_runtimes_agree,
    assert_within_budget,
)

# A real network on an emulated CPU.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

CROPS = 64

# Measured on these crops (November 2026), with XNNPACK's kernels, of ARM as of x86: 14.8 dB, 7.1 dB
# and 0.984. The default preset, which must not ship, is at 6.1 dB, 1.1 dB and 0.888.
ACCEPTANCE = Budget(sqnr_db=13.5, worst_sample_sqnr_db=6.0, cosine_similarity=0.98)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """The float network."""
    return efficientnet_lite0()


@pytest.fixture(scope="module")
def quantized(edgeq: Edgeq, model: nn.Module) -> QuantizedModel:
    """int8 from end to end, by ranges of ai-edge-quantizer."""
    return edgeq.quantize(
        model,
        tuple(evaluation_crops(1)),
        quantizer="recipe_static_wi8_ai8",
        calibration=calibration_crops(16),
        name="efficientnet_lite0",
    )


@pytest.fixture(scope="module")
def on_arm(arm64_command: list[str]) -> Iterator[Edgeq]:
    """A session that runs files there; in a project `edgeq_targets` of the ini file names it."""
    session = Edgeq(targets={"arm64": arm64_command}, runtime="arm64")
    yield session
    session.close()


@pytest.fixture(scope="module")
def shipped(on_arm: Edgeq, quantized: QuantizedModel, model: nn.Module) -> QuantizedModel:
    """The file as it goes to the phone."""
    return on_arm.load(quantized.path, reference=model)


def test_it_may_ship_by_what_arm_computes(on_arm: Edgeq, shipped: QuantizedModel) -> None:
    """The figures are those of ARM's kernels, and the comparison says so."""
    comparison = on_arm.compare(shipped, evaluation_crops(CROPS))

    assert comparison.target is not None
    assert comparison.target.machine == "aarch64"
    assert comparison.total.n_samples == CROPS
    assert_within_budget(comparison, ACCEPTANCE)


def test_arm_gives_the_codes_of_this_machine(shipped: QuantizedModel) -> None:
    """With XNNPACK's kernels; so figures from here hold on the phone."""
    assert_runtimes_agree(
        shipped, evaluation_crops(4), max_lsb_error=0, runtimes=("xnnpack", "arm64")
    )
