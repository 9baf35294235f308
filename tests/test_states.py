"""States that one signature of a file hands on to another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from fixtures.tflite.writer import FileWriter
from pytest_edgeq import Edgeq
from pytest_edgeq.cli import edgeq as command
from pytest_edgeq.compare.file_health import state_findings, static_findings
from pytest_edgeq.errors import UnmatchedError
from pytest_edgeq.runtimes.edge import EdgeFile

pytestmark = pytest.mark.filterwarnings("ignore:edgeq.check")


def _content(
    given: float, taken: float, *, point: int = 0, names: tuple[str, str] = ("cache", "cache")
) -> bytes:
    """Write `prefill`, which gives a cache in one scale; `decode` takes it in another."""
    file = FileWriter()
    side = {"dtype": "int8", "shape": (1, 8), "scales": [given]}
    other = side | {"scales": [taken], "zero_points": [point]}
    for key, taking, giving, each in (
        ("prefill", "x", names[0], side),
        ("decode", names[1], "y", other),
    ):
        relu, tensors = ("RELU", taking, giving), {taking: each, giving: each}
        file.graph(key).fill(relu, inputs=taking, outputs=giving, key=key, **tensors)
    return file.content()


def test_a_cache_in_other_codes_is_found() -> None:
    """By its name, without a sample; one in the same codes, or of another name, is sound."""
    for scale, point, text in ((0.0079, 0, "0.0079 and 0"), (0.0245, 3, "0.0245 and 3")):
        (finding,) = static_findings(EdgeFile(_content(0.0245, scale, point=point)))
        assert str(finding).startswith(
            "state_mismatch: output 'cache': expected of signature 'prefill' the scale and zero "
            f"point of input 'cache' of 'decode', {text}, got 0.0245 and 0"
        )
    assert static_findings(EdgeFile(_content(0.0245, 0.0245))) == ()
    assert static_findings(EdgeFile(_content(0.0245, 0.0079, names=("new", "old")))) == ()


def test_names_that_differ_are_given() -> None:
    """A name that the file lacks is an error."""
    edge = EdgeFile(_content(0.0245, 0.0079, names=("new", "old")))
    (finding,) = state_findings(edge, {"new": "old"})
    assert "input 'old' of 'decode'" in finding.message
    with pytest.raises(UnmatchedError, match=r"expected the name of an input, got 'olds'"):
        state_findings(edge, {"new": "olds"})
    with pytest.raises(UnmatchedError, match=r"expected the name of an output, got 'old'"):
        state_findings(edge, {"old": "old"})


def _relu(x: Any) -> Any:
    return np.maximum(x, 0)


@pytest.mark.parametrize("names", [("cache", "cache"), ("new", "old")])
def test_check_finds_it(names: tuple[str, str]) -> None:
    """The sound file passes."""
    states = None if names[0] == names[1] else {names[0]: names[1]}
    samples = [np.random.default_rng(i).uniform(-1, 1, (1, 8)).astype(np.float32) for i in range(4)]

    def check(taken: float) -> None:
        references = dict.fromkeys(("prefill", "decode"), _relu)
        model = Edgeq().load(_content(0.0245, taken, names=names), reference=references)
        Edgeq().check(model.signature("prefill"), samples, states=states)

    check(0.0245)
    with pytest.raises(AssertionError, match="scale and zero point of input"):
        check(0.0079)


def test_show_tells_of_it(tmp_path: Path) -> None:
    """And ends with the code of a finding."""
    path = tmp_path / "two.tflite"
    path.write_bytes(_content(0.0245, 0.0079))
    done = CliRunner().invoke(command, ["show", str(path)], prog_name="edgeq")
    assert done.exit_code == 1
    assert "state_mismatch: output 'cache'" in done.stdout
