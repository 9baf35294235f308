"""The converted files on the GPU engine, with the outcomes of `converted.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import pytest

from fixtures.tflite.make import CONVERTED
from pytest_edgeq import Edgeq, assert_runtimes_agree
from pytest_edgeq.names import GPU_KERNELS
from pytest_edgeq.runtimes.edge import EdgeFile
from tests.runtimes.gpu.cases import CASES, DEFECT_DB, SOUND_DB
from tests.runtimes.gpu.table import DATA, measure, samples, sqnr_db

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.*outside a test nothing is remembered"),
    pytest.mark.filterwarnings("ignore:.*the reference quantizes by itself"),
]

EXPECTED = json.loads(DATA.read_text("utf-8"))

RELEASE = "2.3.0"
"""The ai-edge-litert of the outcomes, and of the known bugs."""

OTHER_CPU_DB = {"gpu": 3, "gpu_f32": 12}
"""How much nearer to XNNPACK the GPU may be by chance on the processor of the table, whose kernels
sum in one order of several: in float32 up to four times the rounding, in float16 hardly."""

POINTWISE = "computes a 1×1 depthwise convolution with several outputs per channel wrongly"

KNOWN_BUGS = {
    "attention.int8": "cannot compute int8 operands of different ranks",
    "nested.recipe_static_wi8_ai16": "sums and products of int16, and computes them wrongly",
    "nested.recipe_weight_only_wi4_afp32": "operands of this op get shapes that do not match",
    "nested.recipe_weight_only_wi8_afp32": "operands of this op get shapes that do not match",
    "transposed.float": POINTWISE,
    "transposed.int8": POINTWISE,
}
"""Files that the engine refuses or computes wrong, with the sentence that explains it."""


def test_the_table_is_complete() -> None:
    """It has all files in both precisions, and the known bugs are those that are not right."""
    names = [file.name.removesuffix(".tflite") for file in CONVERTED.glob("*.tflite")]
    assert EXPECTED.keys() == {f"{name} {kernels}" for name in names for kernels in GPU_KERNELS}
    bad = {
        key.split()[0] for key, row in EXPECTED.items() if row["outcome"] in ("wrong", "refused")
    }
    assert bad == KNOWN_BUGS.keys()


@pytest.mark.sweep(0, slow=len(EXPECTED) // 3)  # the two kernels in turn
@pytest.mark.parametrize("name", EXPECTED)
def test_the_outcome_is_as_expected(name: str, gpu_session: Edgeq) -> None:
    """A release that computes a file otherwise, also a known bug right, needs a new table."""
    file, kernels = name.split()
    expected, runtime = EXPECTED[name], f"mesa:{kernels}"
    edge = gpu_session.load(CONVERTED / f"{file}.tflite").edge
    got = measure(edge, runtime)
    fix = f"of {RELEASE}; on {edge.runtimes.machine_of(runtime)} it is {got}: make the table again"
    for key in ("outcome", "n_on_cpu", "words"):
        assert got.get(key) == expected.get(key), fix
    assert got.get("db", 0) >= expected.get("sqnr_db", 0) - OTHER_CPU_DB[kernels], fix
    # Rounding to float16, and to float32 on a processor that fuses other operations, moves a
    # result across a tie of two codes.
    assert got.get("codes_off", 0) <= expected.get("codes_off", 0) + 1, fix


@pytest.mark.parametrize("name", KNOWN_BUGS)
def test_a_known_bug_is_explained(name: str, checking: Callable[..., str]) -> None:
    """By `check`, on random samples."""
    content = (CONVERTED / f"{name}.tflite").read_bytes()
    inputs = [list(each.values()) for each in samples(EdgeFile(content))]
    assert KNOWN_BUGS[name] in checking(content, inputs)


def test_a_sum_overflows_float16(gpu_session: Edgeq, checking: Callable[..., str]) -> None:
    """12,544 values near 10, of an engine that keeps sums in float16 where it could scale them."""
    [case] = [each for each in CASES if each.name == "sum_overflow"]
    content, inputs = case.build(), case.samples(4)
    edge = gpu_session.load(content).edge
    [name] = [each.name for each in edge.signature.inputs]

    def outputs(runtime: str) -> list[npt.NDArray[Any]]:
        return [edge.runner(runtime).run({name: each})[0] for [each] in inputs]

    expected = outputs("xnnpack")
    seen = {each: sqnr_db(expected, outputs(f"mesa:{each}")) for each in GPU_KERNELS}
    fix = f"a bug of {RELEASE}; on {edge.runtimes.machine_of('mesa:gpu')} it is {seen}"
    assert seen["gpu"] < DEFECT_DB, fix
    assert seen["gpu_f32"] >= SOUND_DB, fix
    text = checking(content, inputs)
    found = re.search(r"'mesa:gpu'.*: SUM #0.*\ncause: overflow: (.*) is above", text)
    assert found is not None, text
    assert float(found[1].replace(",", "")) == pytest.approx(125_440, rel=0.01)


def test_codes_that_differ_name_the_gpu(gpu_session: Edgeq) -> None:
    """With the precision in which it computes, and not the machine's processor."""
    edge = (model := gpu_session.load(CONVERTED / "functional_convs.int8.tflite")).edge
    inputs = [[each.astype("float32") / 100 for each in one.values()] for one in samples(edge)]
    said = r"\n  LiteRT's GPU engine computes this op in float16, then rounds to codes"
    with pytest.raises(AssertionError, match=said):
        assert_runtimes_agree(model, inputs, 0, ("xnnpack", "mesa:gpu"))
