"""Small networks of transformers, of which torch's graph was matched wrongly or in part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fixtures.models import normal
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.localize.rows import LayerErrors
from tests.bench.detection.flatfile import FlatFile
from tests.localize.builds import STATIC, blamed

# Networks of hundreds of ops, converted and localized.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

DYNAMIC = "recipe_dynamic_wi8_afp32"


class Net(nn.Module):
    """A network that gives one tensor, of images or of tokens."""

    def __init__(self, net: nn.Module, output: str, tokens: bool) -> None:
        super().__init__()
        self.net, self.output, self.tokens = net, output, tokens

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Give logits, or the last states."""
        made = self.net(input_ids=given) if self.tokens else self.net(given)
        return getattr(made, self.output)  # type: ignore[no-any-return] # a tensor

    def sample(self, seed: int) -> torch.Tensor:
        """An image of 32 × 32, or 16 tokens of 100."""
        if self.tokens:
            return torch.randint(0, 100, (1, 16), generator=torch.Generator().manual_seed(seed))
        return normal(1, 3, 32, 32, seed=seed)


_WINDOWS: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 2],
    "window_size": 4,
}
_STATES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 100,
}


def _swin() -> Net:
    from transformers import SwinConfig, SwinForImageClassification

    return Net(SwinForImageClassification(SwinConfig(**_WINDOWS)), "logits", tokens=False)


def _swin_v2() -> Net:
    from transformers import Swinv2Config, Swinv2ForImageClassification

    return Net(Swinv2ForImageClassification(Swinv2Config(**_WINDOWS)), "logits", tokens=False)


def _deberta() -> Net:
    from transformers import DebertaV2Config, DebertaV2Model

    config = DebertaV2Config(**_STATES, relative_attention=True, pos_att_type=["p2c", "c2p"])
    return Net(DebertaV2Model(config), "last_hidden_state", tokens=True)


def _gemma() -> Net:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**_STATES, num_key_value_heads=2, head_dim=8, use_cache=False)
    return Net(Gemma2ForCausalLM(config), "logits", tokens=True)


NETWORKS: dict[str, Callable[[], Net]] = {
    "Swin": _swin,
    "SwinV2": _swin_v2,
    "DeBERTa-v2": _deberta,
    "Gemma 2": _gemma,
}

TRUE = {
    ("DeBERTa-v2", STATIC): "its weight has 1024 scales, expected 1",
    ("Gemma 2", STATIC): "the mask is lost: −3.4e+38 (or −inf) in torch is 0 in the file",
}
"""What these files really lose: a kernel that knows one scale, a mask that masks nothing."""


@pytest.fixture(scope="module")
def maker() -> Edgeq:
    """Builds without a test's own fixture."""
    return Edgeq()


def built(maker: Edgeq, name: str, flow: str | None) -> tuple[Net, QuantizedModel]:
    """Quantize a network with random weights, calibrated on eight samples."""
    torch.manual_seed(0)
    model = NETWORKS[name]().eval()
    calibration = [(model.sample(100 + i),) for i in range(8)] if flow == STATIC else None
    quantized = maker.quantize(model, (model.sample(0),), quantizer=flow, calibration=calibration)
    return model, quantized


def localized(maker: Edgeq, model: Net, quantized: QuantizedModel) -> LayerErrors:
    """Localize on three other samples."""
    return maker.localize(quantized, [(model.sample(200 + i),) for i in range(3)])


@pytest.mark.parametrize("flow", [None, DYNAMIC, STATIC])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_op_is_held_and_only_true_losses_are_told(
    maker: Edgeq, name: str, flow: str | None
) -> None:
    """Windows that are rolled, masks that are equal, relative positions."""
    model, quantized = built(maker, name, flow)
    errors = localized(maker, model, quantized)

    assert errors.coverage == 1
    found = [text for _, texts in blamed(errors).values() for text in texts]
    expected = TRUE.get((name, flow or ""))
    if expected is None:
        assert not found
    else:
        assert found
        assert all(text.startswith(expected) for text in found), found


@pytest.mark.parametrize(("name", "flow"), [("Swin", STATIC), ("DeBERTa-v2", DYNAMIC)])
def test_a_zeroed_channel_is_found_in_every_eighth_of_the_file(
    maker: Edgeq, name: str, flow: str
) -> None:
    """Wherever it stands: nothing hides behind ops that are not matched."""
    model, quantized = built(maker, name, flow)
    weights = FlatFile(quantized.tflite).weights()
    for which in np.linspace(0, len(weights) - 1, 8).astype(int).tolist():
        file = FlatFile(quantized.tflite)
        weight = file.weights()[which]
        codes = file.constant(weight.tensor)
        assert codes is not None
        codes[np.abs(codes.reshape(len(codes), -1)).sum(1).argmax()] = 0
        file.store(weight.tensor, codes)
        errors = localized(maker, model, quantized.with_tflite(file.content()))
        assert set(weight.ops) & set(blamed(errors)), (which, errors.cause)
        told = {errors.culprit.index} if errors.culprit is not None else set()
        assert told & set(weight.ops) or (name, flow) in TRUE, (which, errors.cause)
