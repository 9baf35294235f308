"""Defects that show on a GPU alone are told by `check`, and their sound counterparts are not."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from pytest_edgeq.names import GPU_KERNELS
from tests.runtimes.gpu.cases import CASES, Case

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.*outside a test nothing is remembered"),
    pytest.mark.filterwarnings("ignore:.*the reference quantizes by itself"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_defect_is_told_and_its_counterpart_is_not(
    case: Case, checking: Callable[..., str]
) -> None:
    """In each precision in which it shows, with the op and the kind of the cause."""
    samples = case.samples(6)
    text = checking(case.build(), samples)
    for kernels in GPU_KERNELS:
        # Of two runtimes with equal outputs the ops of one are compared.
        is_told = re.search(rf"mesa:{kernels}\b", text) is not None
        assert is_told <= (kernels in case.precisions), text
    assert case.op in text, text
    assert case.says in text, text
    assert checking(case.counterpart(), samples) == ""
