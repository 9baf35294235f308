"""The oldest litert-torch that `pyproject.toml` allows, and the nightly builds: presets convert."""

from __future__ import annotations

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

ONE_MODEL = "ConvBnRelu and (static or qat) or LayerNormGelu and not (static or qat)"
"""Each preset on one model, and torchao."""

PROJECT = """
import pytest
from torchao.quantization import Int8WeightOnlyConfig

from fixtures.models import ConvBnRelu, LayerNormGelu, samples, seeded
from pytest_edgeq.names import PRESETS

QUANTIZERS = {"torchao": Int8WeightOnlyConfig()} | {preset: preset for preset in PRESETS}


def _observe(model, graph):
    for sample in samples(model, 16):
        graph(*sample)


def _cases():
    for name in QUANTIZERS:
        for model in (ConvBnRelu, LayerNormGelu)[name == "torchao" :]:
            yield pytest.param(model, name, id=f"{model.__name__}-{name}")


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
    """Conversion, baselines and kernels."""
    made = once_a_run(
        stack, lambda folder: Overlay.make(folder).install("--no-deps", *STACKS[stack])
    )
    (tmp_path / "test_stack.py").write_text(PROJECT, "utf-8")
    options = ("-q", "-p", "no:anyio", "--edgeq-update=new")
    run = Overlay(made).run("-m", "pytest", *options, "-k", chosen, cwd=tmp_path, imports=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{cases} passed" in run.stdout.splitlines()[-1], run.stdout
