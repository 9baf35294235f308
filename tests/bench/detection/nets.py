"""Networks of the bench that `fixtures.models` does not have: each of a kind that people ship."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fixtures.models import SmallModel, normal


class DsCnn(SmallModel):
    """Keyword spotting: strided stem, two depthwise-separable blocks with batch norm, mean."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 12, 3, stride=2, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(12)
        self.blocks = nn.Sequential(SeparableBlock(12, 16), SeparableBlock(16, 16))
        self.head = nn.Linear(16, 6)

    def forward(self, spectrogram: Tensor) -> Tensor:
        """Give six logits."""
        x = F.relu(self.stem_norm(self.stem(spectrogram)))
        logits: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return logits

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[Tensor, ...]:
        """One spectrogram."""
        return (normal(1, 1, 16, 12, seed=seed),)


class SeparableBlock(nn.Module):
    """Depthwise and pointwise convolution, each with batch norm and ReLU."""

    def __init__(self, channels: int, wider: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.pointwise = nn.Conv2d(channels, wider, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(wider)

    def forward(self, x: Tensor) -> Tensor:
        """Give features of the same size."""
        x = F.relu(self.norm1(self.depthwise(x)))
        return F.relu(self.norm2(self.pointwise(x)))


class Mlp(SmallModel):
    """Three linear layers and two outputs: class scores and a box."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(20, 24)
        self.mid = nn.Linear(24, 24)
        self.scores = nn.Linear(24, 4)
        self.box = nn.Linear(24, 4)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Give four scores and four sides."""
        x = torch.relu(self.mid(torch.relu(self.up(features))))
        return self.scores(x), self.box(x)

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[Tensor, ...]:
        """One row of features."""
        return (normal(1, 20, seed=seed),)


class EncoderBlock(SmallModel):
    """A transformer's block: norm, two heads of attention, norm, feed forward, both added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(16)
        self.query = nn.Linear(16, 16)
        self.key = nn.Linear(16, 16)
        self.value = nn.Linear(16, 16)
        self.out = nn.Linear(16, 16)
        self.norm2 = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        """Give tokens of the shape that came in."""
        x = self.norm1(tokens)
        query, key, value = (_heads(layer(x)) for layer in (self.query, self.key, self.value))
        attention = torch.softmax(query @ key.transpose(2, 3) / 8**0.5, dim=-1)
        mixed = (attention @ value).transpose(1, 2).reshape(1, 6, 16)
        x = tokens + self.out(mixed)
        fed: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return fed

    @staticmethod
    def sample_inputs(seed: int = 0) -> tuple[Tensor, ...]:
        """One sequence of six tokens."""
        return (normal(1, 6, 16, seed=seed),)


def _heads(tokens: Tensor) -> Tensor:
    return tokens.reshape(1, 6, 2, 8).transpose(1, 2)
