"""Values that no network should give, at every door of `numerics`: a result or a sentence."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pytest_edgeq.numerics.budget import Budget
from pytest_edgeq.numerics.error_sums import IOSpec, StageAccumulator
from pytest_edgeq.numerics.metric_table import LOWER_BOUNDED, UPPER_BOUNDED
from pytest_edgeq.numerics.results import StageErrors
from tests.faults.sentences import is_sentence

Array = npt.NDArray[Any]

# The same examples in every run.
derandomized = settings(derandomize=True, deadline=None, max_examples=60)

FLOATS = (np.float16, np.float32, np.float64)
INTEGERS = (np.int8, np.uint8, np.int16, np.int32, np.int64, np.bool_)

SPECIAL = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    5e-324,
    1e-45,
    6e-8,
    3.4e38,
    1.7e308,
    math.inf,
    -math.inf,
    math.nan,
)
NUMBERS = st.sampled_from(SPECIAL) | st.floats()


@st.composite
def arrays(draw: st.DrawFn, dtypes: Any = FLOATS + INTEGERS) -> Array:
    """Any array of up to three dimensions, of none, and without elements."""
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    if dtype.kind != "f":
        return draw(hnp.arrays(dtype, shape))
    values = draw(hnp.arrays(np.float64, shape, elements=NUMBERS))
    with np.errstate(over="ignore"):
        return np.asarray(values.astype(dtype))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Array, Array]:
    """Two sides of one output; most often of one shape."""
    reference = draw(arrays())
    if draw(st.booleans()):
        return reference, draw(arrays())
    actual = draw(hnp.arrays(np.float64, reference.shape, elements=NUMBERS))
    with np.errstate(over="ignore", invalid="ignore"):
        return reference, np.asarray(actual.astype(draw(st.sampled_from(FLOATS))))


def measured(reference: Array, actual: Array, scale: float | None) -> StageErrors | None:
    """Return the errors of one sample; None where a sentence tells why there are none."""
    stage = StageAccumulator([IOSpec("y", scale)])
    try:
        stage.update([reference], [actual])
        return stage.result()
    except (ValueError, TypeError) as error:
        if not is_sentence(error):
            raise
        return None


SCALES = st.none() | st.sampled_from((1e-45, 1e-9, 0.5, 3e38))


@given(pairs(), SCALES)
@derandomized
def test_errors_are_measured_or_refused(both: tuple[Array, Array], scale: float | None) -> None:
    """And what is measured can be stored: NaN and infinities are told by name."""
    errors = measured(*both, scale)
    if errors is None:
        return
    json.dumps(errors.to_dict(), allow_nan=False)
    output = errors.outputs["y"]
    assert output.n_elements == both[0].size
    assert output.nonfinite == sum(int((~np.isfinite(side)).sum()) for side in both)


@given(pairs(), SCALES, st.sampled_from((*UPPER_BOUNDED, *LOWER_BOUNDED)), NUMBERS)
@derandomized
def test_a_budget_is_kept_broken_or_refused(
    both: tuple[Array, Array], scale: float | None, metric: str, bound: float
) -> None:
    """NaN never keeps one."""
    errors = measured(*both, scale)
    if errors is None:
        return
    try:
        budget = Budget(**{metric: bound})
        violations = budget.violations(errors, "total")
        needed = budget.needed(errors)
    except (ValueError, TypeError) as error:
        if not is_sentence(error):
            raise
        return
    for violation in violations:
        assert str(violation)
    if errors.outputs["y"].nonfinite:
        assert violations
    if needed is not None:
        assert repr(needed)
