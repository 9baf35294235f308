"""Files that TensorFlow's converter made, and the models that they were made of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from fixtures import keras_nets
from fixtures.models import seeded
from pytest_edgeq import Edgeq
from tests.roots import Provide

if TYPE_CHECKING:
    from pytest_edgeq import Comparison


class Features(nn.Module):
    """NCHW features, and their mean over the image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of 1×3×8×8: 1×8×6×6 and 1×8."""
        features = torch.relu(self.conv(image))
        return features, features.mean((2, 3))


@pytest.fixture
def maker(tmp_path: Path) -> Edgeq:
    """Quantize, load and compare; writes into a folder of the test's own."""
    return Edgeq(directory=tmp_path)


@pytest.fixture(scope="session")
def features() -> Features:
    """The torch model that `twin.tflite` computes, by way of Keras."""
    return seeded(Features)


@pytest.fixture(scope="session")
def keras_files(once_a_run: Provide, features: Features) -> Path:
    """The folder of `fixtures.keras_nets`, written by a process of its own."""
    values = {name: value.detach().numpy() for name, value in features.conv.named_parameters()}

    def make(folder: Path) -> None:
        folder.mkdir()
        np.savez(folder / "twin.npz", kernel=values["weight"], bias=values["bias"])
        made = subprocess.run(
            [sys.executable, "-m", "fixtures.keras_nets", str(folder)],
            cwd=Path(keras_nets.__file__).parents[1],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert made.returncode == 0, made.stderr

    return once_a_run("keras", make)


@pytest.fixture(scope="session")
def classifier() -> Any:
    """The Keras model that the files of `keras_nets.VARIANTS` were made of."""
    return keras_nets.classifier()


def sqnr_db(comparison: Comparison) -> dict[str, float]:
    """What a comparison says of each output."""
    return {name: errors.sqnr_db for name, errors in comparison.total.outputs.items()}
