"""The trained models of the examples, made once a session."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from fixtures import crepe, digits, efficientnet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give these tests the time that a real network's conversion takes on a busy machine."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """
    Keep torch on one thread, like the runtimes.

    Networks as small as these gain nothing from more, and on a busy machine threads that wait for
    one another cost minutes.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def efficientnet_lite0() -> nn.Module:
    """EfficientNet-Lite0 with its ImageNet weights."""
    return efficientnet.efficientnet_lite0()


@pytest.fixture(scope="session")
def digits_net() -> nn.Module:
    """A small residual network, trained on scikit-learn's digits in two seconds."""
    return digits.trained()


@pytest.fixture(scope="session")
def crepe_tiny() -> nn.Module:
    """CREPE-tiny with its trained weights."""
    return crepe.crepe_tiny()
