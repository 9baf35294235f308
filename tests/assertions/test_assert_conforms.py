"""assert_conforms: the rules of kernels, without a run."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from fixtures.tflite.writer import chain
from pytest_edgeq import Edgeq, assert_conforms
from pytest_edgeq.errors import UnmatchedError
from tests.assertions.conftest import golden
from tests.tflite.one_op_files import layer

CONVERTED = Path("fixtures/tflite/converted")


def three_ops(scale: float = 0.5, zero_point: int = 0) -> bytes:
    """Write a RESHAPE, a SQUEEZE and a LOGISTIC; only the last one rescales."""
    x = {"dtype": "int8", "scales": [0.5]}
    return chain(
        ("RESHAPE", "x", "a", "ReshapeOptions", {"newShape": [1, 4]}),
        ("SQUEEZE", "a", "b", "SqueezeOptions", {"squeezeDims": [0]}),
        ("LOGISTIC", "b", "y"),
        inputs="x",
        outputs="y",
        x=x,
        a=x | {"scales": [scale], "zero_points": [zero_point]},
        b=x | {"shape": (4,)},
        y=x | {"shape": (4,), "scales": [1 / 256], "zero_points": [-128]},
    )


def test_sound_files_pass(tmp_path: Path) -> None:
    """Bytes, a path and a model."""
    path = tmp_path / "a.tflite"
    path.write_bytes(three_ops())
    for model in (three_ops(), path, Edgeq().load(path), CONVERTED / "attention.int8.tflite"):
        assert_conforms(model)


def test_ops_are_named_with_cause_and_fix() -> None:
    """The first one, and a table of all."""
    golden("conforms", lambda: assert_conforms(three_ops(1.0, 3)))


def test_what_is_allowed_is_not_looked_at() -> None:
    """An operator, or a rule."""
    broken = three_ops(1.0)
    assert_conforms(broken, allow=("same_scale",))
    assert_conforms(broken, allow=["RESHAPE", "SQUEEZE"])
    with pytest.raises(AssertionError, match=r"^same_scale: SQUEEZE #1: .* \(1 of 3 ops do not"):
        assert_conforms(broken, allow=("RESHAPE",))


@pytest.mark.parametrize("allow", ["PADV2", "LOGISTIC", "bias_scale"])
def test_an_entry_that_matches_nothing_is_an_error(allow: str) -> None:
    """It would hide the next one."""
    with pytest.raises(UnmatchedError, match=f"^allow='{allow}' matches no op that does not conf"):
        assert_conforms(three_ops(1.0), allow=("same_scale", allow))
    with pytest.raises(UnmatchedError, match=f"^allow='{allow}' matches no op that does not conf"):
        assert_conforms(three_ops(), allow=(allow,))


def test_unknown_names_are_refused() -> None:
    """Neither an operator nor a rule."""
    with pytest.raises(ValueError, match="same_scales"):
        assert_conforms(three_ops(), allow=("same_scales",))
    with pytest.raises(TypeError, match="expected a sequence"):
        assert_conforms(three_ops(), allow="PADV2")


def test_what_only_accelerators_refuse_is_a_warning() -> None:
    """CPU kernels compute it."""
    content = layer("FULLY_CONNECTED", point=6)[0]
    with pytest.warns(UserWarning, match="accelerators may refuse"):
        assert_conforms(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_conforms(content, allow=("weight_zero_point",))
