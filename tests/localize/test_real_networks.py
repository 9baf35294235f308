"""Small networks of transformers, of which torch's graph was matched wrongly or in part."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_edgeq import Edgeq
from tests.bench.detection.architectures import net
from tests.bench.detection.flatfile import FlatFile
from tests.bench.detection.sound import FLOAT, sound
from tests.localize.builds import DYNAMIC, STATIC, blamed

# Networks of hundreds of ops, converted and localized.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TRUE = {
    ("deberta-v2", STATIC): "its weight has 64 scales, expected 1",
    ("gemma2", STATIC): "the mask is lost: −3.4e+38 (or −inf) in torch is 0 in the file",
}
"""What these files really lose: a kernel that knows one scale, a mask that masks nothing."""


@pytest.mark.sweep(0, slow=5)
@pytest.mark.parametrize("flow", [STATIC, DYNAMIC, FLOAT])
@pytest.mark.parametrize("name", ["swin", "swinv2", "deberta-v2", "gemma2"])
def test_every_op_is_held_and_only_true_losses_are_told(maker: Edgeq, name: str, flow: str) -> None:
    """Windows that are rolled, masks that are equal, relative positions."""
    built = sound(maker, net(name), flow)
    errors = maker.localize(built.quantized, built.evaluation)

    assert errors.coverage == 1
    found = [text for _, texts in blamed(errors).values() for text in texts]
    expected = TRUE.get((name, flow))
    assert bool(found) == (expected is not None)
    assert all(text.startswith(expected or "") for text in found), found


@pytest.mark.sweep(0, slow=1)
@pytest.mark.parametrize(("name", "flow"), [("swin", STATIC), ("deberta-v2", DYNAMIC)])
def test_a_zeroed_channel_is_found_in_every_eighth_of_the_file(
    maker: Edgeq, name: str, flow: str
) -> None:
    """Wherever it stands: nothing hides behind ops that are not matched."""
    built = sound(maker, net(name), flow)
    weights = FlatFile(built.quantized.tflite).weights()
    for which in np.linspace(0, len(weights) - 1, 8).astype(int).tolist():
        file = FlatFile(built.quantized.tflite)
        weight = file.weights()[which]
        codes = file.constant(weight.tensor)
        assert codes is not None
        codes[np.abs(codes.reshape(len(codes), -1)).sum(1).argmax()] = 0
        file.store(weight.tensor, codes)
        errors = maker.localize(built.quantized.with_tflite(file.content()), built.evaluation)
        assert set(weight.ops) & set(blamed(errors)), (which, errors.cause)
        assert errors.culprit is not None
        assert errors.culprit.index in weight.ops, (which, errors.cause)
