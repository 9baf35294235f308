"""The oldest litert-torch that `pyproject.toml` allows, and the nightly builds: presets convert."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.ecosystem.overlay import ROOT, Overlay
from tests.roots import Provide

# Environments are installed, and models are converted in them.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

STACKS = {
    "litert-torch-0.9.4": (
        *("litert-torch==0.9.4", "litert-converter==0.4.*", "ai-edge-litert==2.2.*"),
        "ai-edge-quantizer==0.9.*",
    ),
    "nightly": (
        *("--pre", "litert-torch-nightly", "litert-converter>=0.6.0.dev0"),
        *("ai-edge-litert-nightly", "ai-edge-quantizer-nightly"),
    ),
}
"""Requirements of each stack: the versions that its litert-torch pins."""

UPSTREAM_BUGS: dict[str, dict[str, str]] = {"litert-torch-0.9.4": {}, "nightly": {}}
"""Cases that fail by a bug of the libraries, `model-quantizer`, and why; one that passes fails."""

ONE_MODEL = "ConvBnRelu and (static or qat) or LayerNormGelu and not (static or qat)"
"""Each preset on one model, and torchao."""

PROJECT = """
import json
from pathlib import Path

import pytest
from torchao.quantization import Int8WeightOnlyConfig

from fixtures.models import ConvBnRelu, LayerNormGelu, samples, seeded
from pytest_edgeq.names import PRESETS

BUGS = json.loads(Path(__file__).with_name("bugs.json").read_text("utf-8"))
QUANTIZERS = {"torchao": Int8WeightOnlyConfig()} | {preset: preset for preset in PRESETS}


def _observe(model, graph):
    for sample in samples(model, 16):
        graph(*sample)


def _cases():
    for name in QUANTIZERS:
        for model in (ConvBnRelu, LayerNormGelu)[name == "torchao" :]:
            case = f"{model.__name__}-{name}"
            marks = [pytest.mark.xfail(strict=True, reason=BUGS[case])] if case in BUGS else []
            yield pytest.param(model, name, id=case, marks=marks)


@pytest.mark.parametrize(("model", "name"), [*_cases()])
def test_sound(edgeq, model, name):
    quantized = edgeq.quantize(
        seeded(model),
        model.sample_inputs(),
        quantizer=QUANTIZERS[name],
        calibration=samples(model, 16),
        **({"train": lambda graph: _observe(model, graph)} if name == "pt2e_qat_int8" else {}),
    )
    edgeq.check(quantized, samples(model, 40, seed=100))
"""


@pytest.mark.parametrize(
    ("stack", "chosen", "cases"),
    [
        pytest.param("litert-torch-0.9.4", ONE_MODEL, 11, id="litert-torch-0.9.4, one model"),
        # Each preset on both, and torchao on the one that has linear layers.
        *(pytest.param(stack, "", 21, marks=pytest.mark.full) for stack in STACKS),
    ],
)
def test_check_passes_with_every_preset(
    stack: str, chosen: str, cases: int, once_a_run: Provide, tmp_path: Path
) -> None:
    """Conversion, baselines and kernels; a bug of the libraries has a row in the table."""
    made = once_a_run(
        stack, lambda folder: Overlay.make(folder).install("--no-deps", *STACKS[stack])
    )
    (tmp_path / "bugs.json").write_text(json.dumps(UPSTREAM_BUGS[stack]), "utf-8")
    (tmp_path / "test_stack.py").write_text(PROJECT, "utf-8")
    options = ("-q", "-rxX", "-p", "no:anyio", "--edgeq-update=new")
    run = Overlay(made).run("-m", "pytest", *options, "-k", chosen, cwd=tmp_path, imports=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    counts = re.findall(r"(\d+) (?:passed|xfailed)", run.stdout.splitlines()[-1])
    assert sum(map(int, counts)) == cases, run.stdout
