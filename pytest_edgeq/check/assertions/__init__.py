"""
Assertions of a test about a quantized model, one function each.

`dtypes`, `qparams`, `numbers` (budgets, size), `accuracy` (with `scoring`),
`same_codes` of runtimes, `defects`; `expect` parses what users expect.

Every function accepts a QuantizedModel, a path or the bytes of a `.tflite` file, raises
AssertionError and works outside pytest. A name without a match is an `UnmatchedError`,
which is an AssertionError, too.
"""

from __future__ import annotations

from pytest_edgeq.check.assertions.accuracy import assert_accuracy_drop
from pytest_edgeq.check.assertions.defects import assert_conforms, assert_delegated, assert_healthy
from pytest_edgeq.check.assertions.dtypes import (
    assert_input_dtypes,
    assert_no_float_ops,
    assert_op_counts,
    assert_op_dtypes,
    assert_output_dtypes,
)
from pytest_edgeq.check.assertions.numbers import assert_size, assert_within_budget
from pytest_edgeq.check.assertions.qparams import assert_qparams
from pytest_edgeq.check.assertions.same_codes import assert_runtimes_agree

__all__ = [
    "assert_accuracy_drop",
    "assert_conforms",
    "assert_delegated",
    "assert_healthy",
    "assert_input_dtypes",
    "assert_no_float_ops",
    "assert_op_counts",
    "assert_op_dtypes",
    "assert_output_dtypes",
    "assert_qparams",
    "assert_runtimes_agree",
    "assert_size",
    "assert_within_budget",
]
