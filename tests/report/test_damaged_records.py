"""Records of runs that are not what their schema says: refused with the place."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_edgeq.report.run import read_run
from tests.report.runs import full_run

Damage = Callable[[Any], Any]


def _comparison(data: Any) -> Any:
    return data["tests"][1]["events"][0]["comparison"]


def _picture(data: Any) -> Any:
    return next(iter(_comparison(data)["worst_samples"][0]["pictures"].values()))


def test_a_sound_record_is_read(tmp_path: Path) -> None:
    """With everything that there is to show."""
    path = tmp_path / "run.json"
    full_run().write(path)
    assert read_run(path).data == full_run().data


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda d: d["models"]["bad-1"].pop("ops"), "the record.models.bad-1 lacks ops"),
        (lambda d: d["tests"].insert(0, []), "the record.tests[0]: expected object, got []"),
        (
            lambda d: d["tests"][0].update(seconds="x"),
            ".tests[0].seconds: expected number, got 'x'",
        ),
        (lambda d: d["tests"][0].update(seconds=-1), ".seconds: expected at least 0, got -1"),
        (lambda d: d["tests"][0].update(seconds=10**400), ".seconds: expected number, got 1000"),
        (lambda d: d["tests"][1]["failure"].update(phase="x"), ".failure.phase: expected one of ["),
        (lambda d: d["tests"][0].update(models=["x"]), "tests[0]: the model 'x' is none of the re"),
        (lambda d: d["models"]["bad-1"].update(sha256="x"), ".sha256: expected a text like ^[0-9a"),
        (lambda d: d["models"]["bad-1"]["outputs"][0].update(scale=-1), "a scale is none of float"),
        (lambda d: _comparison(d)["stages"].update(x={}), ".stages.x: expected one of ['conversi"),
        (lambda d: _comparison(d)["stages"].pop("total"), ".stages lacks total"),
        (
            lambda d: _comparison(d)["stages"]["total"]["outputs"].clear(),
            "has other outputs than t",
        ),
        (
            lambda d: _comparison(d)["points"]["boxes"]["edge"].pop(),
            "the points of 'boxes' are not",
        ),
        (lambda d: _picture(d).update(pixels="?"), ".pixels: expected base64, got '?'"),
        (lambda d: _picture(d).update(height=3), "a picture has other bytes than its height and w"),
        (
            lambda d: d["baselines"]["pruned"].append(3),
            ".baselines.pruned[0]: expected string, got",
        ),
    ],
)
def test_a_damaged_record_is_refused_with_the_place(
    tmp_path: Path, damage: Damage, told: str
) -> None:
    """By the schema that the package ships, and by what it cannot say."""
    data = copy.deepcopy(dict(full_run().data))
    damage(data)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="it is not whole\nfix: ") as caught:
        read_run(path)
    assert str(caught.value).startswith(f"{path}: the record")
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"seconds": NaN}', "got NaN, which is no number of JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"seconds": ' + "9" * 5000 + "}", "expected the JSON of --edgeq-json, got Exceeds"),
    ],
)
def test_json_that_python_alone_reads_is_refused(tmp_path: Path, text: str, told: str) -> None:
    """Or that it cannot read."""
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="expected the JSON of --edgeq-json") as caught:
        read_run(path)
    assert told in str(caught.value)
