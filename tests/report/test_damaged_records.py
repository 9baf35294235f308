"""Records of runs that are not what their schema says."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pytest_edgeq.cli import edgeq
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


WHOLE = "the record is not whole ("


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda d: d["models"]["bad-1"].pop("ops"), WHOLE),
        (lambda d: d["tests"][0].update(seconds="x"), WHOLE),
        (lambda d: d["tests"][0].update(seconds=10**400), WHOLE),
        (lambda d: _comparison(d)["stages"].pop("total"), WHOLE),
        (lambda d: _comparison(d)["points"]["boxes"]["edge"].pop(), WHOLE),
        (lambda d: _picture(d).update(pixels="?"), WHOLE),
        (lambda d: d["models"].pop("bad-1"), WHOLE),
        # Views would show fewer tests than there are.
        (lambda d: d["tests"].insert(0, []), "the record.tests[0] is not an object\n"),
        (lambda d: d.update(tests=""), "the record.tests is not a list\n"),
        (lambda d: d.pop("baselines"), "the record lacks baselines\n"),
        (lambda d: d["tests"][0].pop("failure"), "the record.tests[0] lacks failure\n"),
    ],
    ids=[*"abcdefghijk"],
)
def test_a_damaged_record_is_refused(tmp_path: Path, damage: Damage, problem: str) -> None:
    """By one sentence, whatever reads it first."""
    data = copy.deepcopy(dict(full_run().data))
    damage(data)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(data))

    done = CliRunner().invoke(edgeq, ["report", str(path), "--html", str(tmp_path / "run.html")])

    assert done.exit_code == 2
    assert done.stderr.startswith(f"Error: {path}: {problem}")
    assert "fix: write it anew (pytest --edgeq-json)" in done.stderr


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
