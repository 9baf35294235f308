"""Every code block of the README is run: its two commands by the pipeline, the rest here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fixtures.tflite.writer import pack, unpack
from pytest_edgeq import Edgeq
from pytest_edgeq.localize.cause import blame
from pytest_edgeq.localize.rows import Evidence
from pytest_edgeq.options import CI_VARIABLES
from pytest_edgeq.plugin.folding import folded
from tests.localize.rows import row
from tests.readme import blocks, commands
from tests.shared_cache import shared_cache


@pytest.fixture
def files(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The README's Python files, written as a reader would; not on CI, so that it may remember."""
    for name in CI_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    # What comes with the converter's own dependencies warns when pytest loads it; and pytest's own
    # plugin collects garbage five times in the end, 2 s among the objects of torch and jax.
    options = "-p no:anyio -p no:randomly -p no:xdist -p no:unraisableexception"
    if directory := shared_cache():
        options += f" --edgeq-cache-dir={directory}"
    monkeypatch.setenv("PYTEST_ADDOPTS", options)
    names = []
    for block in blocks():
        if block.language == "python":
            first = block.text.splitlines()[0]
            name = first.removeprefix("# ")
            assert re.fullmatch(r"# \w+\.py", first), "a block says in which file it stands"
            pytester.path.joinpath(name).write_text(block.text, encoding="utf-8")
            names.append(name)
    monkeypatch.syspath_prepend(str(pytester.path))
    return names


def test_every_block_is_of_a_kind_that_is_run() -> None:
    """Python blocks and the failure here, console blocks by the pipeline; no other kind."""
    assert [block.language for block in blocks()] == [
        "text",
        "console",
        "console",
        *["python"] * 2,
        *["text"] * 2,
        *["python"] * 6,
    ]


def test_the_layer_to_blame_is_told_as_shown() -> None:
    """The table has the columns of a real one, and the sentence stands above it."""
    texts = [block.text for block in blocks() if block.language == "text"]
    sentence, coverage, heading = texts[2].splitlines()[:3]
    zeroed = row(
        4,
        module="c2",
        findings=("the weight's codes: output channel 3 is zero (72 of 576 differ)",),
    )
    errors = blame([zeroed] * 13, [Evidence()] * 13)
    told = str(errors).splitlines()
    assert [sentence, coverage] == told[:2]
    assert heading.split() == told[2].split()


def test_the_gates_failure_is_as_shown(tmp_path: Path) -> None:
    """Two channels of the last convolution change places, two samples were calibrated with."""
    texts = [block.text for block in blocks() if block.language == "text"]
    shown = [line.removeprefix("E").strip() for line in texts[1].splitlines()[1:]]
    shown[0] = shown[0].removeprefix("AssertionError: ")
    names: dict[str, Any] = {}
    exec(next(block.text for block in blocks() if "class Classifier" in block.text), names)

    def images(n: int, seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(1, 3, 32, 32, generator=generator) for _ in range(n)]

    torch.manual_seed(0)
    edgeq = Edgeq(directory=tmp_path)
    quantized = edgeq.quantize(
        names["Classifier"]().eval(), (images(1, seed=0)[0],), calibration=images(32, seed=1)
    )
    shipped = unpack(quantized.tflite)
    [last] = [op for op in quantized.graph.ops if op.index == 5]
    weight = quantized.graph.tensor(last, last.inputs[1])
    codes = np.array(shipped.buffers[weight.buffer].data).reshape(weight.shape)
    codes[[3, 7]] = codes[[7, 3]]
    shipped.buffers[weight.buffer].data = codes.reshape(-1)

    with pytest.raises(AssertionError) as caught:
        edgeq.check(quantized.with_tflite(pack(shipped)), [*images(2, seed=1), *images(14, seed=3)])

    told = folded(str(caught.value).partition("\n\nnote: ")[0]).splitlines()
    # Another machine's last digits, and the widths of columns.
    plain = [[re.sub(r"[\d.−]+", "0", line).split() for line in text] for text in (shown, told)]
    assert plain[0] == plain[1]


def test_the_commands_pin_torch_and_stand_in_the_pipeline() -> None:
    """The pipeline runs what the README says, not a copy of it."""
    script = Path(__file__).parent.parent.joinpath(".ci", "run").read_text("utf-8")

    assert len(commands()) == 2
    assert all("pip install --quiet torch==2.13.0 . --group" in command for command in commands())
    assert "tests/readme.py" in script


@pytest.mark.slow
def test_the_examples_pass_and_the_failure_is_as_shown(
    pytester: pytest.Pytester, files: list[str]
) -> None:
    """First nothing is remembered; then all pass; then a real defect gives the text shown."""
    assert files == [
        "my_model.py",
        "test_model_quant.py",
        "test_quantizers.py",
        "test_mixed_precision.py",
        "test_accuracy.py",
        "test_two_sizes.py",
        "simulator.py",
        "conftest.py",
    ]
    first = pytester.runpytest_subprocess("test_model_quant.py")
    first.assert_outcomes(passed=2, failed=2)
    first.stdout.fnmatch_lines(["*op-dtype map*no baseline is stored yet*"])

    pytester.runpytest_subprocess("--edgeq-update").assert_outcomes(passed=9)
    pytester.runpytest_subprocess("test_model_quant.py").assert_outcomes(passed=4)

    simulated = pytester.runpytest_subprocess("test_quantizers.py", "--edgeq-runtime=simulator")
    simulated.assert_outcomes(passed=2)

    test = pytester.path / "test_model_quant.py"
    text = test.read_text("utf-8")
    changed = text.replace("seed=1))", "seed=1), strict_export=False)")
    assert changed != text
    test.write_text(changed, encoding="utf-8")
    result = pytester.runpytest_subprocess("test_model_quant.py", "-k", "every_op")
    result.assert_outcomes(failed=1, deselected=3)
    shown = next(block.text for block in blocks() if block.language == "text")
    lines = [line for line in shown.splitlines() if line.startswith(("E ", ">"))]

    assert len(lines) == 13
    result.stdout.fnmatch_lines([re.sub(r"([\[\]*?])", r"[\1]", line) for line in lines])
