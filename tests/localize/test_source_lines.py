"""The line of the model's code that calls the op to blame."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fixtures.models import ResidualNet, residual, samples
from pytest_edgeq import Budget, Edgeq, assert_within_budget
from pytest_edgeq.compare.torch_graphs import exported_graph
from pytest_edgeq.localize import source_lines
from pytest_edgeq.localize.source_lines import source_line
from pytest_edgeq.numerics.findings import Place
from tests.bench.detection.defects_file import defect
from tests.localize.builds import PT2E, STATIC, Build

HEAD = "logits: Tensor = self.fc(x.mean((2, 3)))"
STEM = "x = torch.relu(self.stem(image))"
BLOCK = "return torch.relu(self.bn(self.conv_a(x)) + x)"

FORWARDS = {kind: kind.forward for kind in (ResidualNet, residual.ResidualBlock)}


@pytest.fixture(autouse=True)
def _own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor of this process unpickles classes in place, with code that has no file."""
    for kind, forward in FORWARDS.items():
        monkeypatch.setattr(kind, "forward", forward)


def line(code: str) -> str:
    """Return the line as the text names it."""
    path = Path(residual.__file__)
    number = path.read_text("utf-8").splitlines().index(f"        {code}") + 1
    return f"{path.name}:{number}: {code}"


@pytest.mark.parametrize("flow", [PT2E, STATIC])
def test_a_failure_names_the_line(build: Build, maker: Edgeq, flow: str) -> None:
    """`localize`, `check` and a budget's failure name the line that calls the blamed op."""
    quantized = build(ResidualNet, flow)
    found = defect(quantized.tflite, "channel zeroed")
    assert found is not None
    broken, evaluation = quantized.with_tflite(found.tflite), list(samples(ResidualNet, 3, seed=2))
    errors = maker.localize(broken, evaluation)
    assert errors.finding.place.module == "fc"
    source = f"source: {line(HEAD)}"

    assert str(errors).splitlines()[1] == source
    assert source in errors.finding.to_dict()["evidence"]
    with pytest.raises(AssertionError) as caught:
        maker.check(broken, evaluation)
    assert source in str(caught.value).splitlines()
    with pytest.raises(AssertionError) as caught:
        assert_within_budget(maker.compare(broken, evaluation), Budget(sqnr_db=90))
    assert source in str(caught.value).splitlines()


def test_a_sound_model_is_not_exported_again(
    build: Build, maker: Edgeq, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is looked up where nothing is wrong."""
    monkeypatch.setattr(source_lines, "source_line", lambda *_: pytest.fail("looked up"))
    monkeypatch.setattr("pytest_edgeq.localize.localizer.source_line", source_lines.source_line)
    with pytest.warns(UserWarning, match="outside a test nothing is remembered"):
        maker.check(build(ResidualNet, STATIC), samples(ResidualNet, 3, seed=2))


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["refresh", "on"])
def test_a_model_from_the_cache(tmp_path_factory: pytest.TempPathFactory, cache: str) -> None:
    """Its graph has no stack traces: the reference is exported."""
    folder = tmp_path_factory.getbasetemp() / "source_lines_cache"
    edgeq = Edgeq(cache_dir=folder, cache=cache)
    made = edgeq.quantize(
        ResidualNet().eval(),
        ResidualNet.sample_inputs(),
        calibration=samples(ResidualNet, 2, seed=1),
    )
    (sample,) = made.calibration_samples[:1]
    assert source_line(made, sample, Place("op", "CONV_2D", 0, "stem")) == line(STEM)
    assert source_line(made, sample, Place("op", "ADD", 0, "layer1.0")) == line(BLOCK)
    assert source_line(made, sample, Place("op", "CONV_2D", 0, "gone")) == ""
    assert source_line(made, sample, Place("output", "output_0")) == ""


def test_a_module_of_several_lines(maker: Edgeq) -> None:
    """The one of the op's kind is named; of several, none."""

    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 2.5
            x = torch.tanh(x + 1)
            return x + 3

    made = maker.quantize(Two().eval(), (torch.ones(1, 4),), quantizer=None)
    sample = made.spec.bind((torch.ones(1, 4),), "sample")
    assert exported_graph(made.float_model, sample) is not None
    assert source_line(made, sample, Place("op", "MUL", 0, "")).endswith(": x = x * 2.5")
    assert source_line(made, sample, Place("op", "TANH", 0, "")).endswith("torch.tanh(x + 1)")
    assert source_line(made, sample, Place("op", "ADD", 0, "")) == ""
