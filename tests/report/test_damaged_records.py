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


def _damaged(folder: Path, damage: Damage) -> Path:
    data = copy.deepcopy(dict(full_run().data))
    damage(data)
    path = folder / "run.json"
    path.write_text(json.dumps(data))
    return path


def test_a_sound_record_is_read(tmp_path: Path) -> None:
    """With everything that there is to show."""
    path = tmp_path / "run.json"
    full_run().write(path)
    assert read_run(path).data == full_run().data


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d["models"]["bad-1"].pop("ops"),
        lambda d: d["tests"][0].update(seconds="x"),
        lambda d: _comparison(d)["stages"].pop("total"),
        lambda d: _picture(d).update(pixels="?"),
        lambda d: d["models"].pop("bad-1"),
        lambda d: d["tests"].insert(0, []),
        lambda d: d.pop("baselines"),
        # Views would show fewer tests than there are.
        lambda d: d.update(tests=""),
        lambda d: d.update(models=[], tests=[]),
    ],
    ids=[*"abcdefghi"],
)
def test_a_damaged_record_is_refused(tmp_path: Path, damage: Damage) -> None:
    """By one sentence, whatever reads it first."""
    path = _damaged(tmp_path, damage)

    done = CliRunner().invoke(edgeq, ["report", str(path), "--html", str(tmp_path / "run.html")])

    assert done.exit_code == 2
    assert done.stderr.startswith(f"Error: {path}: the record is not whole (")
    assert "fix: write it anew (pytest --edgeq-json)" in done.stderr


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d["models"]["bad-1"].pop("ops"),
        lambda d: d["tests"][0].pop("events"),
        lambda d: d["tests"][0].pop("outcome"),
        lambda d: d.pop("models"),
    ],
    ids=[*"abcd"],
)
def test_a_history_of_a_damaged_record_is_refused(tmp_path: Path, damage: Damage) -> None:
    """The sentence names the record."""
    path = _damaged(tmp_path, damage)

    done = CliRunner().invoke(edgeq, ["report", "--history", str(tmp_path)])

    assert done.exit_code == 2
    assert done.stderr.startswith(f"Error: {path}: the record is not whole (")
