"""Files of kinds that other tools write: the sound one passes, its damaged sibling does not."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from fixtures.tflite.kinds import KINDS
from pytest_edgeq import Edgeq


@pytest.fixture
def loader(tmp_path: Path) -> Edgeq:
    """Loads files, and runs them in this process."""
    return Edgeq(directory=tmp_path, isolate="off")


@pytest.mark.parametrize("name", KINDS)
def test_a_sound_file_passes(loader: Edgeq, name: str) -> None:
    """Every op is compared, and no note says that one was not."""
    kind = KINDS[name]()
    model = loader.load(kind.content, reference=kind.reference)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loader.check(model, kind.inputs)
    errors = loader.localize(model, kind.inputs)

    notes = [str(each.message) for each in warned]
    assert not [each for each in notes if "one by one" in each or "op by op" in each]
    assert errors.culprit is None


@pytest.mark.parametrize("name", KINDS)
def test_its_damaged_sibling_fails(loader: Edgeq, name: str) -> None:
    """One weight has another sign."""
    kind = KINDS[name](damaged=True)
    model = loader.load(kind.content, reference=kind.reference)

    with pytest.raises(AssertionError, match="the file in float does not compute"):
        loader.check(model, kind.inputs)
