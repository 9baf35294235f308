"""Localization on real files: what is sound stays unblamed, and a defect is found where it sits."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from fixtures.models import EmbeddingMean, ResidualNet, SmallModel, integers, net, samples, seeded
from pytest_edgeq import Edgeq
from pytest_edgeq.localize.rows import LOWERING, SOUND
from tests.bench.detection.defects_file import defect
from tests.bench.detection.defects_model import rebuilt
from tests.bench.detection.nets import EncoderBlock
from tests.bench.detection.sound import NETS, sound
from tests.localize.builds import DYNAMIC, PT2E, STATIC, Build, blamed, localized
from tests.localize.rows import culprit

pytestmark = pytest.mark.figures

FLOWS = (PT2E, STATIC, DYNAMIC, "recipe_weight_only_wi8_afp32", None)


MODELS = (ResidualNet, EmbeddingMean, EncoderBlock)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("flow", FLOWS, ids=str)
@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_a_sound_file_is_matched_and_not_blamed(
    maker: Edgeq, build: Build, kind: type[SmallModel], flow: str | None
) -> None:
    """Every op is measured, and none computes anything else."""
    errors = localized(maker, build(kind, flow), kind)

    assert [row.name for row in errors.rows if not row.matched] == []
    assert errors.coverage == errors.weight_coverage == 1
    assert blamed(errors) == {}
    judged = [row for row in errors.rows if row.excess_lsb is not None]
    # What hands a weight on, and what rounds within a group, has no bound of its own.
    assert len(judged) > 0.5 * len(errors.rows)
    assert all(row.local_sqnr_db is not None for row in judged)


@pytest.mark.parametrize("factor", [0.0, 1e-4, 1000.0, -1000.0])
def test_inputs_beyond_the_range_are_no_lowering_error(
    maker: Edgeq, build: Build, factor: float
) -> None:
    """All codes saturated, or all at the zero point, is what torch does too, clipped."""
    inputs = [(each[0] * factor,) for each in samples(ResidualNet, 3, seed=2)]
    for flow in (PT2E, STATIC):
        assert blamed(maker.localize(build(ResidualNet, flow), inputs)) == {}


def test_it_says_the_same_each_time(maker: Edgeq, build: Build) -> None:
    """Not a digit differs, and the data is plain JSON."""
    quantized = build(ResidualNet, STATIC)
    first, second = (localized(maker, quantized, ResidualNet).to_dict() for _ in range(2))

    assert json.loads(json.dumps(first, allow_nan=False)) == first
    assert json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)


@pytest.mark.slow
def test_a_constant_that_is_rounded_at_run_time_is_rounded(maker: Edgeq) -> None:
    """A QUANTIZE stands between it and the ADD; the float module has it as it is."""
    inputs = [(integers(1, 6, below=17, seed=seed),) for seed in range(40)]

    def forward(self: Any, ids: torch.Tensor) -> Any:
        return self.head(self.tokens(ids) + self.places(torch.arange(6)))

    layers = {"tokens": nn.Embedding(17, 8), "places": nn.Embedding(6, 8), "head": nn.Linear(8, 3)}
    model = net(forward, **layers).eval()
    made = maker.quantize(model, inputs[0], quantizer=PT2E, calibration=inputs[1:33])

    errors = maker.localize(maker.load(made.tflite, reference=model), inputs[33:])

    assert "QUANTIZE" in [row.op for row in errors.rows]
    assert blamed(errors) == {}


DEFECTS = (
    ("weight: sign of the largest", "weight"),
    ("weight: one bit", "weight"),
    ("channel zeroed", "weight"),
    ("weights swapped with same-shaped", "weight"),
    ("weight scale × 1.02, all channels", "weight"),
    ("bias ± 1", "bias"),
    ("activation scale × 1.02", "scale"),
    ("zero point ± 1", "zero point"),
    ("stride changed", ""),
    ("fused activation swapped", "fused activation: expected RELU, got "),
)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("kind", "word"), DEFECTS, ids=[kind for kind, _ in DEFECTS])
def test_a_defect_is_found_where_it_sits(maker: Edgeq, build: Build, kind: str, word: str) -> None:
    """The culprit is the op that was changed, and the sentence tells of what."""
    flow = (PT2E, STATIC)[[each for each, _ in DEFECTS].index(kind) % 2]
    quantized = build(ResidualNet, flow)
    found = defect(quantized.tflite, kind)
    if found is None:
        pytest.fail(f"ResidualNet has no place for {kind}")

    errors = localized(maker, quantized.with_tflite(found.tflite), ResidualNet)

    assert culprit(errors).verdict == LOWERING
    assert culprit(errors).index in found.ops, f"{found.place}, and got:\n{errors}"
    assert word in errors.cause, f"{found.place}, and got:\n{errors}"


def test_a_layer_left_in_float_is_named_and_no_error(maker: Edgeq) -> None:
    """It loses nothing and may be meant: the one thing to tell where nothing else is wrong."""
    made = sound(maker, NETS["Mlp"], DYNAMIC)
    found = rebuilt(maker, made, "annotation dropped")
    loaded = maker.load(found.quantized.tflite, reference=made.module)
    for quantized in (found.quantized, loaded):
        errors = maker.localize(quantized, made.evaluation)

        assert culprit(errors).module in found.modules
        assert culprit(errors).verdict == SOUND
        assert "it computes in float32, where 3 others with weights are" in errors.cause


# What is refused. --------------------------------------------------------------------------------


def test_what_cannot_be_localized_is_refused(maker: Edgeq, build: Build) -> None:
    """A file alone, kernels that overwrite what lies between, and no sample."""
    made, inputs = build(ResidualNet, PT2E), list(samples(ResidualNet, 3, seed=2))
    with pytest.raises(ValueError, match=r"needs a reference: .* edgeq\.load\("):
        maker.localize(maker.load(made.tflite), inputs)
    with pytest.raises(ValueError, match="keeps no intermediate tensors; these do: builtin"):
        maker.localize(made, inputs, runtime="xnnpack")
    with pytest.raises(ValueError, match="no sample"):
        maker.localize(made, [])


class Branching(ResidualNet):
    """Takes another way by what comes in, which no graph can."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Give the logits, or twice them."""
        logits = super().forward(image)
        return logits * 2 if bool(image.sum() > 1e9) else logits


def test_a_reference_without_a_graph_is_told_with_the_exporter_s_words(
    maker: Edgeq, build: Build
) -> None:
    """Its outputs are still held against the file."""
    tflite = build(ResidualNet, STATIC).tflite
    loaded = maker.load(tflite, reference=seeded(Branching))

    with pytest.warns(UserWarning, match=r"cannot be converted in float: (.|\n)*GuardOnDataDep"):
        errors = localized(maker, loaded, ResidualNet)

    assert blamed(errors) == {}


@pytest.mark.slow
def test_a_bound_method_and_a_double_precision_model_are_references(
    maker: Edgeq, build: Build
) -> None:
    """What is compared with it can be localized with it."""
    tflite = build(ResidualNet, STATIC).tflite
    bound = maker.load(tflite, reference=seeded(ResidualNet).forward)
    double = net(
        lambda self, image: self.inner(image.double()).float(),
        "Precise",
        inner=seeded(ResidualNet).double(),
    )
    precise = maker.load(tflite, reference=double.eval())
    with pytest.warns(UserWarning, match="the converter refuses Precise"):
        errors = localized(maker, precise, ResidualNet)
    for each in (errors, localized(maker, bound, ResidualNet)):
        assert each.coverage == 1
        assert blamed(each) == {}


@pytest.mark.slow
def test_another_model_s_reference_is_not_called_sound(maker: Edgeq, build: Build) -> None:
    """Other weights are findings; another network computes something else."""
    tflite = build(ResidualNet, STATIC).tflite
    other = seeded(ResidualNet, seed=5)
    errors = localized(maker, maker.load(tflite, reference=other), ResidualNet)
    assert "weight" in errors.cause

    size = ResidualNet.sample_inputs()[0].numel()
    alien = nn.Sequential(nn.Flatten(), nn.Linear(size, 7)).eval()
    errors = localized(maker, maker.load(tflite, reference=alien), ResidualNet)
    assert "does not compute what torch does" in errors.cause
