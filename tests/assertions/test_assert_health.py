"""`assert_healthy`: findings as sentences, and kinds that may be there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_edgeq import assert_healthy
from pytest_edgeq.errors import UnmatchedError
from pytest_edgeq.numerics.findings import (
    CLIPPED_OUTPUT,
    USELESS,
    ZERO_OUTPUT,
    Finding,
    Harm,
    Place,
)
from tests.assertions.conftest import comparison, golden

CLIPPED = Finding(
    kind=CLIPPED_OUTPUT,
    place=Place("output", "boxes"),
    expected="the reference within the range of the codes, [-1, 1]",
    got="9 of 10 elements (90 %) outside, as far as [-30, 30]",
    harm=Harm.share(9, 10),
    fix="calibrate with samples like those evaluated, preprocessed alike",
)
ZERO = Finding(
    kind=ZERO_OUTPUT,
    place=Place("output", "scores"),
    expected="values from 0.5 to 3",
    got="zero in all 40 elements",
    harm=USELESS,
    fix="edgeq.localize(model, samples) names the layer",
)


def test_a_sound_comparison_passes() -> None:
    """Nothing was found; what may be there need not be."""
    assert_healthy(comparison(health=()))
    assert_healthy(comparison(health=(CLIPPED,)), allow=[CLIPPED_OUTPUT])


def test_findings_are_sentences_the_most_harmful_first() -> None:
    """The golden text, with the kinds to allow."""
    golden("healthy", lambda: assert_healthy(comparison(health=(CLIPPED, ZERO))))


def test_a_fix_is_told_once() -> None:
    """Two outputs that the same calibration clips."""
    other = replace(CLIPPED, place=Place("output", "masks"), harm=Harm.share(1, 10))
    with pytest.raises(AssertionError, match="output 'masks'") as caught:
        assert_healthy(comparison(health=(CLIPPED, other)))
    assert str(caught.value).count("fix: ") == 1


def test_misuse() -> None:
    """An entry that matches nothing would hide the next finding; the nearest kind is named."""
    with pytest.raises(UnmatchedError, match=r"allow='clipped_input' matches no finding.*clipped"):
        assert_healthy(comparison(health=(CLIPPED,)), allow=["clipped_input"])
    with pytest.raises(TypeError, match=r"expected the result of edgeq\.compare"):
        assert_healthy("a.tflite")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="allow: expected a sequence"):
        assert_healthy(comparison(health=()), allow="clipped_output")
