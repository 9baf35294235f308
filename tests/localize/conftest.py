"""Models that are converted once for a module of tests."""

from __future__ import annotations

from typing import Any

import pytest

from fixtures.models import SmallModel, samples, seeded
from pytest_edgeq import Edgeq, QuantizedModel
from tests.localize.builds import Build


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Edgeq:
    """Builds outside of any test's own fixture."""
    return Edgeq(directory=tmp_path_factory.mktemp("localize"))


@pytest.fixture(scope="module")
def build(maker: Edgeq) -> Build:
    """Convert each model by each flow once."""
    known: dict[tuple[type[SmallModel], Any], QuantizedModel] = {}

    def get(kind: type[SmallModel], flow: Any) -> QuantizedModel:
        if (kind, flow) not in known:
            known[kind, flow] = maker.quantize(
                seeded(kind),
                kind.sample_inputs(),
                quantizer=flow,
                calibration=samples(kind, 16) if flow is not None else None,
            )
        return known[kind, flow]

    return get
