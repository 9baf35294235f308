"""The text of a first test of a model, with what was measured when it was written."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from pytest_edgeq.cli.factory import Factory
from pytest_edgeq.cli.first_measurement import CALIBRATION, CHECKED, COMPARED, Measured
from pytest_edgeq.cli.placeholders import Placeholders
from pytest_edgeq.names import DEFAULT_PRESET

_WIDTH = 88


def render(
    factory: Factory,
    samples: Placeholders,
    measured: Measured,
    *,
    quantizer: str,
    gives_inputs: bool,
) -> str:
    """Return the module's text."""
    sections = [
        _head(factory, measured),
        _samples(samples),
        _fixture(factory, samples, quantizer, gives_inputs),
        _dtypes(measured),
        _baseline(),
        _errors(measured),
        _gate(measured),
    ]
    return "\n\n\n".join("\n".join(section) for section in sections) + "\n"


def _head(factory: Factory, measured: Measured) -> list[str]:
    names = ["assert_input_dtypes", "assert_output_dtypes"]
    names += [] if measured.budget is None else ["Budget", "assert_within_budget"]
    names += [] if measured.health else ["assert_healthy"]
    names += ["assert_op_dtypes"] if measured.weighted else []
    names += [] if measured.all_float else ["assert_no_float_ops"]
    return [
        '"""',
        f"Quantization tests of {factory.module}:{factory.path}, begun by `edgeq init`.",
        "",
        "First replace the random data in `samples`, then store the baselines:",
        "",
        "    pytest --edgeq-update",
        "",
        "and commit the folder __edgeq__ that it writes beside this file. From then on `pytest`",
        "fails when an op dtype or an error is not what was accepted.",
        '"""',
        "",
        "import pytest",
        "import torch",
        "",
        f"from {factory.module} import {factory.name}",
        "from pytest_edgeq import (",
        *(f"    {name}," for name in sorted(names, key=lambda name: (name.islower(), name))),
        ")",
    ]


def _samples(samples: Placeholders) -> list[str]:
    code = samples.code
    made = [
        "    return [",
        *(f"        {line}" for line in code),
        "        for _ in range(n)",
        "    ]",
    ]
    if len(code) == 1 and len(short := f"    return [{code[0]} for _ in range(n)]") <= _WIDTH:
        made = [short]
    integers = ["# Random integers: give each input values of its own range."]
    return [
        "# REPLACE random data by real data, preprocessed as on the device: ranges that are",
        "# calibrated on noise, and errors that are measured on it, are not those of your model.",
        *(integers if samples.has_integers else []),
        "def samples(n, seed):",
        "    generator = torch.Generator().manual_seed(seed)",
        *made,
    ]


def _fixture(
    factory: Factory, samples: Placeholders, quantizer: str, gives_inputs: bool
) -> list[str]:
    built = factory.path if factory.is_model else f"{factory.path}()"
    model = [f"    model = {built}.eval()  # load its weights here"]
    if gives_inputs:
        model = [f"    model, _ = {built}", "    model.eval()  # load its weights here"]
    given = "samples(1, seed=0)[0]"
    arguments = [given if samples.by_name is None else f"sample_kwargs={given}"]
    if quantizer != DEFAULT_PRESET:
        arguments.append(f'quantizer="{quantizer}"')
    arguments.append(f"calibration=samples({CALIBRATION}, seed=1)")
    return [
        "# Quantized once for all tests of this file.",
        '@pytest.fixture(scope="module")',
        "def quantized(edgeq):",
        "    torch.manual_seed(0)  # of weights that are not loaded",
        *model,
        "    return edgeq.quantize(",
        "        model,",
        *(f"        {argument}," for argument in arguments),
        "    )",
    ]


def _dtypes(measured: Measured) -> list[str]:
    lines = [
        "# The code that calls the model fills and reads buffers of these dtypes, and the target",
        "# has kernels for these ops.",
        "def test_dtypes(quantized):",
        f"    assert_input_dtypes(quantized, {_expected(measured.inputs)})",
        f"    assert_output_dtypes(quantized, {_expected(measured.outputs)})",
    ]
    for ops in measured.weighted:
        lines += [
            "    assert_op_dtypes(",
            "        quantized,",
            f'        "{ops.op}",',
            f'        scheme="{ops.scheme}",',
            f'        weight="{ops.weight}",',
            *([f'        granularity="{ops.granularity}",'] if ops.granularity else []),
            f"        count={ops.count},",
            "    )",
        ]
    if measured.all_float:
        return lines
    if not measured.float_ops:
        return [*lines, "    assert_no_float_ops(quantized)"]
    return [
        *lines,
        "    # In float today: each costs time on an integer target, and conversions around it.",
        "    assert_no_float_ops(",
        "        quantized,",
        "        allow=(",
        *(f'            "{op}",' for op in measured.float_ops),
        "        ),",
        "    )",
    ]


def _expected(dtypes: Sequence[str]) -> str:
    """Return one dtype for all, or all in order."""
    if len(set(dtypes)) == 1:
        return f'"{dtypes[0]}"'
    return f"[{', '.join(f'{dtype!r}' for dtype in dtypes)}]".replace("'", '"')


def _baseline() -> list[str]:
    return [
        "# Every op as it was accepted: the first run fails, because no baseline is stored yet.",
        "def test_every_op_is_as_accepted(edgeq, quantized):",
        "    edgeq.check_op_dtypes(quantized)",
    ]


def _errors(measured: Measured) -> list[str]:
    figures = ", ".join(f"{stage} {value:.4g} dB" for stage, value in measured.figures.items())
    lines = [
        "# Errors against torch, on samples that the calibration has not seen.",
        *_comment(f"Measured on {COMPARED} random samples (SQNR): {figures}."),
        "def test_errors(edgeq, quantized):",
        f"    comparison = edgeq.compare(quantized, samples({COMPARED}, seed=2))",
    ]
    if measured.budget is None:
        lines += [
            "    # No bound could fail on these samples. With real ones, ask for a budget by",
            "    # edgeq.suggest_budget(comparison) and assert_within_budget(comparison, …).",
        ]
    else:
        lines += [
            "    # What a rebuild may not exceed, as edgeq.suggest_budget(comparison) derives it.",
            "    assert_within_budget(",
            "        comparison,",
            "        Budget(",
            *(f"            {key}={value!r}," for key, value in measured.budget.bounds().items()),
            "        ),",
            "    )",
        ]
    if measured.health:
        lines.append("    # pytest_edgeq.assert_healthy(comparison) fails on random samples:")
        lines += [line for text in measured.health for line in _comment(text, "    ")]
    else:
        lines.append("    assert_healthy(comparison)")
    return [*lines, "    edgeq.check_errors(comparison)"]


def _gate(measured: Measured) -> list[str]:
    body = [
        "def test_it_may_ship(edgeq, quantized):",
        f"    edgeq.check(quantized, samples({CHECKED}, seed=3))",
    ]
    if not measured.refused:
        return ["# All that is known against a file, at once.", *body]
    return [
        "# edgeq.check refuses this file today:",
        *_comment(measured.refused),
        "# Make it pass, or find out why the file may ship all the same.",
        *(f"# {line}" for line in body),
    ]


def _comment(text: str, indent: str = "") -> Iterator[str]:
    for line in text.splitlines():
        yield from textwrap.wrap(
            line,
            _WIDTH,
            initial_indent=f"{indent}# ",
            subsequent_indent=f"{indent}#   ",
            break_long_words=False,
            break_on_hyphens=False,
        )
