"""Texts that leave the machine: without absolute paths and values of environment variables."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from pytest_edgeq.report.bundle import portable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{root}/tests/test_x.py:3: wrong", "tests/test_x.py:3: wrong"),
        ("{root}-other is no part of it", "…/{name}-other is no part of it"),
        ("'{home}/models/net.tflite' is gone", "'~/models/net.tflite' is gone"),
        ("see {tmp}/a b/net.tflite", "see …/a b/net.tflite"),
        ("(/usr/lib/python/numpy/__init__.py:7)", "(…/__init__.py:7)"),
        ("file://{root}/x.html", "x.html"),
        (r"C:\Users\me\net.tflite was read", "…/net.tflite was read"),
        ("https://ai.google.dev/edge/litert", "https://ai.google.dev/edge/litert"),
        ("x.float() / 255, and/or ./a/b, ../c", "x.float() / 255, and/or ./a/b, ../c"),
        ("/" + 300 * "x" + "/y", "/" + 300 * "x" + "/y"),
        ("op /conv1/Conv_output_0: int8", "op /conv1/Conv_output_0: int8"),
    ],
)
def test_paths(tmp_path: Path, text: str, expected: str) -> None:
    """Relative to rootdir, to the home directory, or the last part of them."""
    # Not below the folder of temporary files.
    root = Path("/usr/project")
    home, tmp = Path.home(), tempfile.gettempdir()
    given = text.format(root=root, home=home, tmp=tmp)
    assert portable(given, root) == expected.format(name=root.name)


def test_values_of_environment_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Replaced in texts of errors; short values and other data stay."""
    monkeypatch.setenv("EDGEQ_TOKEN", "hunter2-hunter2-hunter2")
    monkeypatch.setenv("EDGEQ_DTYPE", "float32")
    said = "no access with hunter2-hunter2-hunter2 to float32"
    data = {
        "test": "test_x.py::test_it[hunter2-hunter2-hunter2]",
        "failure": {"message": said, "line": 3},
        "events": [{"error": said, "findings": [said], "seconds": 0.5}],
    }
    hidden = "no access with $EDGEQ_TOKEN to float32"
    assert portable(said, tmp_path) == hidden
    assert portable(data, tmp_path) == data | {
        "failure": {"message": hidden, "line": 3},
        "events": [{"error": hidden, "findings": [hidden], "seconds": 0.5}],
    }
