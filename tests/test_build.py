"""What of a build is remembered beside its errors."""

from __future__ import annotations

import numpy as np

from fixtures.models import ResidualNet, seeded
from fixtures.tflite.writer import one_op
from pytest_edgeq.compare.file_health import build_of
from pytest_edgeq.numerics.samples import SampleLedger
from pytest_edgeq.runtimes.edge import EdgeFile

SIDE = {"dtype": "int8", "shape": (1, 4), "scales": [1 / 16], "zero_points": [3]}


def test_what_shares_its_inputs_parameters() -> None:
    """Scale and zero point alike; one of them is not enough."""
    names = []
    ledger = SampleLedger()
    for number in (1, 2, 2):
        ledger.add([np.array([number])])
    for change in ({}, {"scales": [1 / 32]}, {"zero_points": [4]}):
        content = one_op("LOGISTIC", [SIDE], [{**SIDE, **change}])
        built = build_of(EdgeFile(content), ledger, None, {})
        assert built["n_calibrated"] == 2
        names.append((list(built["scales"].values()), built["shared"], built["asymmetric"]))
    where = "LOGISTIC #0"
    assert names == [([0.0625], [where], []), ([0.03125], [], []), ([0.0625], [], [])]


def test_which_activations_are_int16() -> None:
    """Their steps are not those of int8."""
    for dtype, wide in (("int16", ["LOGISTIC #0"]), ("int8", [])):
        side = {**SIDE, "dtype": dtype}
        content = one_op("LOGISTIC", [side], [side])
        assert build_of(EdgeFile(content), SampleLedger(), None, {})["int16"] == wide


def test_which_weights_are_asymmetric() -> None:
    """Any zero point other than 0; that of an activation counts not."""
    found = []
    for points in ([0, 0], [0, -5]):
        weight = {
            "dtype": "int8",
            "shape": (2, 4),
            "scales": [0.1, 0.1],
            "zero_points": points,
            "axis": 0,
            "data": np.ones((2, 4), np.int8),
        }
        made = {**SIDE, "shape": (1, 2)}
        content = one_op("FULLY_CONNECTED", [SIDE, weight, None], [made], "FullyConnectedOptions")
        built = build_of(EdgeFile(content), SampleLedger(), None, {})
        found.append(built["asymmetric"])
    assert found == [[], ["FULLY_CONNECTED #0"]]


def test_fingerprints_of_weights_and_calibration() -> None:
    """Equal values give equal ones, samples in any order; one other value gives another."""
    edge = EdgeFile(one_op("LOGISTIC", [SIDE], [SIDE]))

    def built(seed: int, *samples: float) -> tuple[str, str]:
        ledger = SampleLedger()
        for each in samples:
            ledger.add([np.array([each], np.float32)])
        found = build_of(edge, ledger, seeded(ResidualNet, seed), {})
        return found["weights"], found["calibration"]

    assert built(0, 1.0, 2.0) == built(0, 2.0, 1.0, 2.0)
    assert built(0, 1.0)[0] != built(1, 1.0)[0]
    assert built(0, 1.0)[1] != built(0, 1.5)[1]
    assert built(0)[1] == ""
    assert build_of(edge, SampleLedger(), lambda x: x, {})["weights"] == ""
