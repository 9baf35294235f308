"""Remembered errors, held against others."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_edgeq.baselines import session, store
from pytest_edgeq.baselines.claims import Owner
from pytest_edgeq.baselines.errors import is_explained_by, loose
from pytest_edgeq.baselines.paths import Layout
from pytest_edgeq.baselines.session import SnapshotSession
from pytest_edgeq.numerics.findings import LOSSY_OP, WRONG_OP, Finding, Place

GOLDEN = Path(__file__).parent / "golden"

Data = dict[str, Any]
Check = Callable[..., list[tuple[str, bool, str]]]


def row(metric: str, value: Any, worst: Any, best: Any, stage: str = "total") -> Data:
    """Make one metric with its limits."""
    return {
        "stage": stage,
        "output": "logits",
        "metric": metric,
        "value": value,
        "worst": worst,
        "best": best,
    }


ERRORS = [
    row("sqnr_db", "inf", 52.5, "inf", "lowering"),
    row("sqnr_db", 36.5, 35.0, 38.0),
    row("max_lsb_error", 4.0, 7.5, 0.5),
]


@pytest.fixture
def data() -> Data:
    """Two stages."""
    return {
        "flow": "pt2e",
        "runtime": "xnnpack",
        "n_samples": 64,
        "fingerprint": "ab" * 32,
        "margin": {"bootstrap": {"resamples": 1000, "seed": 0, "level": 0.9999}},
        "errors": ERRORS,
    }


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Claim one value in a run of its own; `versions` are those of that run."""

    def run(
        value: Data, update: str = "", torch: str = "2.13.0", **more: Any
    ) -> list[tuple[str, bool, str]]:
        monkeypatch.setattr(session, "producer", lambda: {"torch": torch, "torchao": "0.18.0"})
        owner = Owner(tmp_path / "test_x.py", "test_y")
        memory = SnapshotSession(Layout(tmp_path), update=[u for u in update.split(",") if u])
        with memory.running(owner, "call"):
            memory.check("errors", "errors", value, **more)
        return [(c["category"], c["written"], c["note"]) for c in memory.record(owner)]

    return run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of that claim."""
    return tmp_path / "__edgeq__" / "test_x" / "test_y.errors.json"


def with_values(data: Data, *values: Any) -> Data:
    """The same with other measurements, whose own limits count for nothing."""
    made = copy.deepcopy(data)
    for each, value in zip(made["errors"], values, strict=True):
        each["value"] = value
    return made


def failure(check: Check, value: Data, **more: Any) -> str:
    """The text that a claim fails with."""
    with pytest.raises(AssertionError) as caught:
        check(value, **more)
    return f"{caught.value}\n"


def test_nothing_remembered_is_one_line_and_its_command(check: Check, data: Data) -> None:
    """The golden text."""
    assert failure(check, data) == (GOLDEN / "errors_missing.txt").read_text("utf-8")


def test_worse_than_the_margin_is_a_failure(check: Check, data: Data, path: Path) -> None:
    """The golden text, with the library that moved and the layer to blame; nothing is written."""
    check(data, "new")
    before = path.read_bytes()
    worse = with_values(data, 60.0, 31.0, 9.0)
    layer = Finding(kind=LOSSY_OP, place=Place("op", "CONV_2D", 1), symptom="its range is too wide")
    text = failure(check, worse, torch="2.14.0", explain=lambda change, stored: [layer])
    assert text == (GOLDEN / "errors_regressed.txt").read_text("utf-8")
    assert path.read_bytes() == before
    for each in worse["errors"]:
        each["worst"] = each["best"] = each["value"]
    assert check(worse, "changed") == [("changed", True, "")]
    assert check(worse) == [("unchanged", False, "")]


def test_what_was_built_otherwise_stands_before_the_rows(check: Check, data: Data) -> None:
    """The golden text: it is why the errors are worse, and all rows are of one loss."""
    metrics = ("sqnr_db", "worst_sample_sqnr_db", "cosine_similarity")
    rows = [row(m, 30.0, 28.0, 32.0, s) for s in ("quantization", "total") for m in metrics]
    data |= {"errors": rows, "n_calibrated": 64, "scales": {"ADD #2": 0.05}}
    check(data, "new")
    fewer = with_values(data, *[5.0] * len(rows)) | {"n_calibrated": 2}
    text = failure(check, fewer | {"scales": {"ADD #2": 0.02}})
    assert text == (GOLDEN / "errors_regressed_calibration.txt").read_text("utf-8")
    assert "cause: " not in failure(check, with_values(data, *[5.0] * len(rows)))


OPTIONS = {"quantizer": "pt2e_static_int8", "strict_export": "True"}


def test_what_changed_is_known_where_errors_cannot_be_compared(
    tmp_path: Path, check: Check, data: Data
) -> None:
    """An output of zeros has no errors; nothing changed where no baseline is stored."""
    owner = Owner(tmp_path / "test_x.py", "test_y")
    memory = SnapshotSession(Layout(tmp_path))
    build = {"runtime": "xnnpack", "weights": "a", "calibration": "d"}
    with memory.running(owner, "call"):
        assert memory.changes("errors", "errors", build, OPTIONS) == ()
        check(data | {"weights": "a", "calibration": "c"}, "new", options=OPTIONS)
        known = memory.changes("errors", "errors", build, OPTIONS | {"strict_export": "False"})
        assert known[:2] == ("strict_export: True → False", "calibration: other samples")
        same = memory.changes("errors", "errors", build | {"calibration": "c"}, OPTIONS)
        assert not any("calibration" in each for each in same)
        assert memory.record(owner) == []


@pytest.mark.parametrize(
    ("options", "change", "first"),
    [
        ({}, {}, ""),
        ({"strict_export": "False"}, {}, "strict_export: True → False; "),
        ({}, {"weights": "b"}, "weights or buffers: changed; "),
        ({}, {"calibration": "d"}, "calibration: other samples; "),
        ({}, {"calibration": "d", "n_calibrated": 20}, "calibration: 32 → 20 samples; "),
        (
            {"strict_export": "False"},
            {"weights": "b", "calibration": "d", "runtime": "builtin"},
            "strict_export: True → False, runtime: xnnpack → builtin, 2 more changes; ",
        ),
    ],
)
def test_what_changed_since_the_baseline_comes_first(
    check: Check, data: Data, options: Data, change: Data, first: str
) -> None:
    """For regressed errors and moved ranges; a change alone does not fail."""
    data |= {"weights": "a", "calibration": "c", "n_calibrated": 32, "scales": {"ADD #2": 0.05}}
    check(data, "new", options=OPTIONS)
    now = OPTIONS | options
    check(data | change, options=now)
    text = failure(check, with_values(data, 60.0, 1.0, 90.0) | change, options=now)
    assert text.startswith(f"{first}errors regressed: ")
    assert text.count(first.removesuffix("; ")) == (1 if first else len(text) + 1)
    assert ("fix: undo what changed since the baseline\n" in text) is bool(first)
    left = (
        "cause: options, runtime, weights, calibration samples and versions are the baseline's: "
        "the model's code, its sample inputs or the machine changed\n"
    )
    assert (left in text) is not bool(first)
    assert ("\nchanged since the baseline: " in text) is ("more changes" in first)
    wide = failure(check, data | change | {"scales": {"ADD #2": 0.2}}, options=now)
    assert wide.startswith(f"{first}activation ranges moved: ADD #2: expected a scale within 2")


@pytest.mark.parametrize(
    ("stored", "change", "left"),
    [
        (
            {},
            {},
            "the quantizer and its settings, the model's code, its sample inputs or the machine",
        ),
        (
            {"quantizer": "Own", "quantizer.settings": "unknown"},
            {"calibration": ""},
            "the quantizer and its settings, the calibration samples, the model's code, its sample "
            "inputs or the machine",
        ),
        (
            OPTIONS,
            {"weights": ""},
            "the weights, the model's code, its sample inputs or the machine",
        ),
    ],
)
def test_what_is_not_known_of_both_builds_is_no_cause(
    check: Check, data: Data, stored: Data, change: Data, left: str
) -> None:
    """It is what to look at: of a baseline without options, or a quantizer of the user's own."""
    data |= {"weights": "a", "calibration": "c"}
    check(data, "new", options=stored)
    text = failure(check, with_values(data, 60.0, 31.0, 9.0) | change, options=stored or OPTIONS)
    assert text.startswith("errors regressed: ")
    assert f"\nfix: look for what changed in {left}, and undo it\n" in text
    assert ("cause: " in text) is (stored == OPTIONS)


@pytest.mark.parametrize(
    ("change", "stage", "op", "is_explained"),
    [
        ({}, "quantization", 1, False),
        ({}, "quantization", 2, True),
        ({}, "quantization", 3, True),
        ({}, "lowering", 2, False),
        ({"weights": "b"}, "quantization", 1, True),
    ],
    ids=["same range", "moved", "no such op", "another stage", "other weights"],
)
def test_a_layer_is_blamed_for_what_differs_from_the_baseline(
    data: Data, change: Data, stage: str, op: int, is_explained: bool
) -> None:
    """A loss that the accepted build has, too, explains nothing; a wrong op always may."""
    scales = {"CONV_2D #1 (stem)": 0.02, "ADD #2": 0.05}
    data |= {"weights": "a", "scales": scales, "errors": [row("sqnr_db", 36.5, 35.0, 38.0, stage)]}
    moved = {"scales": {"CONV_2D #1 (stem)": 0.0203, "ADD #2": 0.06}}
    worse = with_values(data, 20.0) | moved | change
    lossy = Finding(kind=LOSSY_OP, place=Place("op", "CONV_2D", op), symptom="too narrow")
    assert is_explained_by(lossy, data, worse) is is_explained
    assert is_explained_by(replace(lossy, kind=WRONG_OP), data, worse)


def test_within_the_margin_is_the_same(check: Check, data: Data, path: Path) -> None:
    """At the very limits, on both sides, nothing is said or written by any update."""
    check(data, "new")
    before = path.read_bytes()
    for values in ((52.5, 35.0, 7.5), ("inf", 38.0, 0.5)):
        found = check(with_values(data, *values), "new,changed,tighten")
        assert found == [("unchanged", False, "")]
    assert path.read_bytes() == before


def test_better_is_loose_until_it_is_tightened(check: Check, data: Data, path: Path) -> None:
    """It passes with a note; tighten writes the better rows, and those only."""
    check(data, "new")
    before = path.read_bytes()
    better = with_values(data, 60.0, 40.0, 5.0)
    better["errors"][1].update(worst=39.0, best=41.0)
    assert loose(data, better) == ["total, output 'logits': sqnr_db 36.5 → 40"]
    ((category, written, note),) = check(better, "new,changed")
    assert (category, written) == ("tighten", False)
    assert note == (
        "__edgeq__/test_x/test_y.errors.json is loose: total, output 'logits': sqnr_db 36.5 → 40; "
        "--edgeq-update=tighten stores the better values"
    )
    assert path.read_bytes() == before

    assert check(better, "tighten", torch="2.14.0") == [("tighten", True, "")]
    stored = store.read(path, "")
    assert stored.producer["torch"] == "2.14.0"
    rows = [data["errors"][0], better["errors"][1], data["errors"][2]]
    assert stored.data["errors"] == rows
    assert "expected at least 39" in failure(check, data)


def test_tighten_alone_accepts_neither_new_nor_worse(check: Check, data: Data, path: Path) -> None:
    """It is a category of its own."""
    failure(check, data, update="tighten")
    assert not path.exists()
    check(data, "new")
    before = path.read_bytes()
    failure(check, with_values(data, "inf", 30.0, 0.0), update="tighten")
    assert path.read_bytes() == before


def test_other_data_are_no_comparison(check: Check, data: Data) -> None:
    """The golden text, even where all errors are the same."""
    check(data, "new")
    other = {**data, "fingerprint": "cd" * 32, "n_samples": 32}
    assert failure(check, other) == (GOLDEN / "errors_other_data.txt").read_text("utf-8")


def test_another_runtime_is_compared(check: Check, data: Data) -> None:
    """By a bit, but for what kernels alone make and for single elements; it is reported."""
    check(data, "new")
    lowering, total, greatest = data["errors"]
    rounded = [{**lowering, "value": 41.0}, {**total, "value": 30.6}, {**greatest, "value": 9.0}]
    check({**data, "runtime": "builtin", "errors": rounded})
    worse = {**data, "runtime": "builtin", "errors": [lowering, {**total, "value": 30.4}, greatest]}
    text = failure(check, worse)
    assert text.startswith(
        "runtime: xnnpack → builtin; errors regressed: total, output 'logits': sqnr_db: expected "
        "at least 30.48"
    )
    better = {**data, "runtime": "builtin", "errors": [lowering, total, {**greatest, "value": 0.1}]}
    assert loose(data, better) == []


SCALES = {"CONV_2D #1 (stem)": 0.02, "ADD #2": 0.05}


@pytest.mark.parametrize(
    ("stored", "same", "other", "said"),
    [
        (
            {},
            [],
            {"flow": "other"},
            "errors not compared: measured in another flow: expected pt2e, got other",
        ),
        ({}, [], {"errors": ERRORS[1:]}, "errors disappeared: lowering, output 'logits': sqnr_db"),
        (
            {},
            [],
            {"errors": [*ERRORS, row("rmse", 1.0, 2.0, 0.5, "conversion")]},
            "errors appeared: conversion, output 'logits': rmse",
        ),
        (
            {"scales": SCALES},
            [
                {"scales": {"CONV_2D #1 (stem)": 0.038, "ADD #2": 0.03}},
                # An op without a name, of which there are two now; and steps of other codes.
                {"scales": {"ADD #1": 9.0, "CONV_2D #2 (stem)": 0.03, "ADD #3": 0.03}},
                {"scales": {**SCALES, "ADD #2": 0.2}, "int16": ["ADD #2"]},
            ],
            {"scales": {**SCALES, "ADD #2": 0.2}},
            "activation ranges moved: ADD #2: expected a scale within 2 × of 0.05, got 0.2 (1 of 2 "
            "activations)",
        ),
        (
            {"scales": SCALES},
            [],
            {"scales": {"MUL #1": 0.1, "CONV_2D #2 (stem)": 2.0, "ADD #3": 0.05}},
            "activation ranges moved: CONV_2D #1 (stem): ",
        ),
        (
            {"scales": SCALES},
            [],
            {"scales": {**SCALES, "CONV_2D #1 (stem)": 0.0}},
            "activation ranges moved: CONV_2D #1 (stem): ",
        ),
        (
            {"n_calibrated": 32},
            [{"n_calibrated": 16}, {"n_calibrated": 64}, {"n_calibrated": 0}],
            {"n_calibrated": 15},
            "calibration: 32 → 15 samples; expected at least half of the baseline's different "
            "calibration samples, got 47%: what they do not reach will be clipped",
        ),
        (
            {},
            [],
            {"asymmetric": ["CONV_2D #10 (head)", "CONV_2D #2 (stem)"]},
            "weights became asymmetric: CONV_2D #2 (stem) and 1 more: expected symmetric ones, "
            "got zero points other than 0",
        ),
        (
            {"asymmetric": ["CONV_2D #10 (head)", "CONV_2D #2 (stem)"]},
            [{"asymmetric": ["CONV_2D #3 (stem)", "CONV_2D #11 (head)"]}],
            {"asymmetric": ["CONV_2D #1 (stem)"]},
            "weights are no longer asymmetric: CONV_2D #10 (head): expected zero points other than "
            "0, got none",
        ),
        (
            {"scales": {"MEAN #2": 0.05, "RESHAPE #3": 0.05}, "shared": ["MEAN #2", "RESHAPE #3"]},
            [{"scales": {"MEAN #3": 0.05}, "shared": ["MEAN #3"]}],
            {"shared": ["RESHAPE #3"]},
            "parameters no longer shared: MEAN #2: expected the scale and zero point of its input, "
            "got others: it rounds once more",
        ),
    ],
)
def test_changes_of_a_build_are_reported(
    check: Check, data: Data, stored: Data, same: list[Data], other: Data, said: str
) -> None:
    """Though the errors are no worse. Near misses: what is less than that, or not known."""
    data |= stored
    check(data, "new")
    for each in same:
        check(data | each)
    assert failure(check, data | other).startswith(said + ("" if said.endswith(" ") else "\n"))


@pytest.mark.parametrize(
    ("lowering", "quantization", "first"),
    [(24.9, 1.3, "quantization"), (10.0, 40.0, "lowering"), (16.2, -1.7, "quantization")],
)
def test_the_stage_that_gained_most_noise_is_reported_first(
    check: Check, data: Data, lowering: float, quantization: float, first: str
) -> None:
    """What stands now is what the total is; a stage that fell by more may still be far above it."""
    before = {"lowering": 51.0, "quantization": 31.2, "total": 31.0}
    after = {"lowering": lowering, "quantization": quantization, "total": 1.0}

    def rows(values: dict[str, float]) -> Data:
        return {
            **data,
            "errors": [row("sqnr_db", v, v - 1, v + 1, stage) for stage, v in values.items()],
        }

    check(rows(before), "new")
    assert failure(check, rows(after)).startswith(f"errors regressed: {first}, output 'logits': ")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"scales": {"a": 10**400}}, "data.scales.a is not a scale"),
        ({"errors": [{**row("rmse", 1, 1, 1), "samples": ["inf"]}]}, r"errors\[0\].samples\[0\]"),
        ({"errors": []}, "data.errors is empty"),
        ({"errors": [row("snr", 1.0, 1.0, 1.0)]}, r"data.errors\[0\].metric is not one of"),
        ({"errors": [row("rmse", "nan", 1.0, 1.0)]}, r"data.errors\[0\].value is not a number"),
        ({"errors": [row("rmse", 1.0, 1.0, 1.0)] * 2}, "has one metric twice"),
    ],
)
def test_a_file_that_is_not_whole_is_refused(
    check: Check, data: Data, path: Path, change: Data, expected: str
) -> None:
    """Nothing is compared with half a file."""
    check(data, "new")
    stored = json.loads(path.read_text("utf-8"))
    stored["data"] |= change
    path.write_text(json.dumps(stored), encoding="utf-8")
    with pytest.raises(ValueError, match=expected):
        check(data)


def test_data_that_were_hashed_in_another_way_are_no_comparison(check: Check, data: Data) -> None:
    """Samples of `edgeq.samples`, where those of a list were remembered, and the other way."""
    by_sample = {**data, "fingerprint": "by sample " + "ef" * 32}
    check(data, "new")
    text = failure(check, by_sample)
    assert "with SHA-256 each efefefefefef…" in text
    assert "fix: give them as they were given when the errors were stored" in text
    assert max(map(len, text.splitlines())) <= 160
