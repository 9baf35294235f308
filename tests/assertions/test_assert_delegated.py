"""assert_delegated: on words that the GPU engine printed, without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fixtures.tflite.make import CONVERTED
from fixtures.tflite.writer import one_op
from pytest_edgeq import assert_delegated
from pytest_edgeq.errors import UnmatchedError, UnrunnableError
from pytest_edgeq.runtimes import delegation
from pytest_edgeq.runtimes.runner import Runner
from tests.assertions.conftest import golden
from tests.runtimes.gpu.delegation_texts import printed, transposed, use_words

FILE = CONVERTED / "transposed.int8.tflite"


def test_ops_on_the_cpu_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """The unsupported ones first, with the engine's words."""
    transposed(monkeypatch)
    golden("delegated", lambda: assert_delegated(FILE))


def test_allowed_ops_may_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them must be allowed, also those that only follow."""
    transposed(monkeypatch)
    assert_delegated(FILE, allow=("TRANSPOSE_CONV", "TRANSPOSE"))
    with pytest.raises(AssertionError, match=r"^TRANSPOSE #0: .* \(1 of 8 ops\)"):
        assert_delegated(FILE, allow=["TRANSPOSE_CONV"])


def test_entries_of_allow_are_needed_and_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that matches nothing would hide the next op."""
    transposed(monkeypatch)
    with pytest.raises(
        UnmatchedError, match=r"^allow='CONV_2D' matches no op that runs on the CPU"
    ):
        assert_delegated(FILE, allow=("CONV_2D",))
    with pytest.raises(ValueError, match="TFLite has no operator 'TRANSPOSE_CONF'"):
        assert_delegated(FILE, allow=("TRANSPOSE_CONF",))
    with pytest.raises(TypeError, match="expected a sequence"):
        assert_delegated(FILE, allow="TRANSPOSE")


def test_a_file_on_the_gpu_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By path, and as bytes."""
    use_words(monkeypatch, printed(""), {})
    content = one_op("NEG", [{"dtype": "float32"}], [{"dtype": "float32"}])
    (tmp_path / "a.tflite").write_bytes(content)
    for model in (content, tmp_path / "a.tflite"):
        assert_delegated(model, "gpu_f32")


def test_a_refused_file_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the runtime's own text; nothing is to be allowed."""

    def refuse(self: Runner, *arguments: Any) -> None:
        raise UnrunnableError("gpu", "cannot load the .tflite file: ADD #31\ncause: none")

    monkeypatch.setattr(Runner, "__init__", refuse)
    monkeypatch.setattr(delegation, "_compile", lambda opening: ("no shader", False))
    with pytest.raises(
        AssertionError, match=r"^the gpu runtime cannot load the .*: ADD #31\ncause"
    ):
        assert_delegated(FILE)
