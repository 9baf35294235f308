"""Findings are data: their order, what explains what, and their texts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pytest_edgeq.errors import failure, findings_of
from pytest_edgeq.numerics.findings import (
    BLOCKING,
    CANNOT_RUN,
    CLIPPED_INPUT,
    CLIPPED_OUTPUT,
    ERRORS_REGRESSED,
    MISFIT,
    NO_BASELINE,
    NO_HARM,
    OP_DTYPES_CHANGED,
    OTHER_FILE,
    RUNTIMES_DIFFER,
    USELESS,
    WRONG_OP,
    ZERO_OUTPUT,
    DiffLine,
    DiffPart,
    Finding,
    Harm,
    Place,
    explains,
    ordered,
)

FILE = Place("file", "the file")
OUTPUT = Place("output", "scores")


def finding(kind: str, harm: Harm = NO_HARM) -> Finding:
    """Return a finding of a kind."""
    return Finding(kind=kind, place=FILE, symptom=kind, harm=harm)


def test_harms_are_ordered() -> None:
    """Unknown, a share, decibels, a useless output, nothing computed; more is worse."""
    harms = [
        NO_HARM,
        Harm.share(1, 10),
        Harm.share(2, 10),
        Harm.decibels(-3),
        Harm.decibels(20),
        USELESS,
        BLOCKING,
    ]
    assert harms == sorted(harms)
    assert len(set(harms)) == len(harms)


def test_findings_are_ordered_by_harm_and_not_by_kind() -> None:
    """What no runtime can run is first, what has no harm last, in the order given."""
    given = [
        finding(NO_BASELINE),
        finding(CLIPPED_OUTPUT, Harm.share(1, 5)),
        finding(RUNTIMES_DIFFER),
        finding(ZERO_OUTPUT, USELESS),
        finding(CANNOT_RUN, BLOCKING),
        finding(ERRORS_REGRESSED, Harm.decibels(9)),
    ]
    assert [each.kind for each in ordered(given)] == [
        CANNOT_RUN,
        ZERO_OUTPUT,
        ERRORS_REGRESSED,
        CLIPPED_OUTPUT,
        RUNTIMES_DIFFER,
        NO_BASELINE,
    ]
    assert ordered([*given, *given]) == ordered(given)


def test_what_explains_others_stands_before_them() -> None:
    """A clipped input does the harm of what is lost behind it; another file that of all."""
    worst = finding(ZERO_OUTPUT, USELESS)
    regressed = finding(ERRORS_REGRESSED, Harm.decibels(30))
    given = [regressed, worst, finding(WRONG_OP), finding(CLIPPED_INPUT, Harm.share(1, 9))]
    kinds = [each.kind for each in ordered(given)]
    assert kinds == [WRONG_OP, CLIPPED_INPUT, ZERO_OUTPUT, ERRORS_REGRESSED]
    assert ordered([*given, finding(OTHER_FILE)])[0].kind == OTHER_FILE


def test_what_leaves_nothing_to_measure_is_first() -> None:
    """Behind the one that explains it: a file of another model takes other samples."""
    given = [finding(ZERO_OUTPUT, USELESS), finding(MISFIT, BLOCKING), finding(OTHER_FILE)]
    assert [each.kind for each in ordered(given)] == [OTHER_FILE, MISFIT, ZERO_OUTPUT]


def test_an_input_explains_losses_alone() -> None:
    """A range that is too narrow makes no runtime refuse the file."""
    one = finding(CLIPPED_INPUT)
    assert explains(one, finding(ERRORS_REGRESSED))
    assert not explains(one, finding(CANNOT_RUN))
    assert not explains(finding(ERRORS_REGRESSED), one)


def test_a_finding_explains_what_was_found_to_follow_from_it() -> None:
    """Not by its kind: the baseline that it names is another finding's, too."""
    change = finding(OP_DTYPES_CHANGED)
    regressed = finding(ERRORS_REGRESSED)
    assert not explains(change, regressed)
    assert explains(change, replace(regressed, explained_by=(change,)))
    assert explains(replace(change, fix="undo it"), replace(regressed, explained_by=(change,)))


def test_a_text_is_rendered_from_the_fields() -> None:
    """First line, causes, fix, details and command; the explaining finding's table is last."""
    layer = Finding(
        kind=WRONG_OP,
        place=Place("op", "CONV_2D", 3, "stem.0"),
        symptom="its weight is another",
        fix="convert it anew",
        evidence=("op  LSB",),
    )
    found = Finding(
        kind=ERRORS_REGRESSED,
        place=OUTPUT,
        expected="30 dB",
        got="3 dB",
        explained_by=(layer,),
        causes=("calibrated on fewer samples",),
        diff=(DiffLine((DiffPart("int8", "old"), DiffPart(" → float")), "changed"),),
        evidence=("  a row",),
        fix="undo it",
        command="pytest --edgeq-update=changed",
    )
    assert found.lines == [
        "output 'scores': expected 30 dB, got 3 dB",
        "cause: calibrated on fewer samples",
        "layer to blame: CONV_2D #3 (stem.0): its weight is another; convert it anew",
        "fix: undo it",
        "int8 → float",
        "  a row",
        "op  LSB",
        "update: pytest --edgeq-update=changed",
    ]
    assert Finding.from_dict(json.loads(json.dumps(found.to_dict()))) == found


@pytest.mark.parametrize(
    ("place", "text"),
    [
        (Place("op", "CONV_2D", 3, "layer1.0.conv"), "CONV_2D #3 (layer1.0.conv)"),
        (Place("op", "CUSTOM:a #1", 12, None, 2), "CUSTOM:a #1 #2:12"),
        (Place("op", "ADD"), "ADD"),
    ],
)
def test_the_name_of_an_op_is_read_back(place: Place, text: str) -> None:
    """Baselines have ops by their names."""
    assert str(place) == text
    assert Place.of_op(text) == place


def test_an_assertion_error_carries_its_findings() -> None:
    """Nobody reads its text again."""
    found = finding(ZERO_OUTPUT)
    error = failure([found])
    assert str(error) == "the file: zero_output"
    assert findings_of(error) == (found,)
    assert findings_of(AssertionError("else")) == ()
