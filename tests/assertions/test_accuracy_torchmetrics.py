"""assert_accuracy_drop with metrics of torchmetrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchmetrics import MeanSquaredError, Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)
from torchmetrics.regression import PearsonCorrCoef

from fixtures.models import net
from pytest_edgeq import Edgeq, QuantizedModel, assert_accuracy_drop
from pytest_edgeq.check.assertions.scoring import CallableScorer, MetricScorer
from pytest_edgeq.numerics.paired import SEED, RightWrong
from tests.assertions.conftest import golden, labelled, spoil

METRICS: dict[str, Callable[[], Metric]] = {
    "accuracy": lambda: MulticlassAccuracy(10, average="micro"),
    "accuracy by class": lambda: MulticlassAccuracy(10),
    "F1": lambda: MulticlassF1Score(10),
    "AUROC": lambda: MulticlassAUROC(10),
    "AUROC in bins": lambda: MulticlassAUROC(10, thresholds=20),
    "calibration error": lambda: MulticlassCalibrationError(10),
}


# Measured: the calibration error becomes 0.34 larger.
def test_reversed_filters_fail(reader: QuantizedModel) -> None:
    """The filters of the second convolution in another order, in the file alone."""

    def reversed_filters(weight: Any, data: Any) -> Any:
        return data.reshape(weight.shape)[::-1].reshape(-1)

    model, metric = spoil(reader, "CONV_2D", reversed_filters), METRICS["calibration error"]()
    with pytest.raises(AssertionError, match=r"expected at most 0\.03, got 0\.\d+ \(500 samples\)"):
        assert_accuracy_drop(model, labelled(), metric, max_drop=0.03)


def _pairs(n: int, noise: float) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Logits of ten classes, the same with noise, and the label, which they mostly have right."""
    generator = torch.Generator().manual_seed(5)
    for i in range(n):
        logits = torch.randn(1, 10, generator=generator)
        logits[0, i % 10] += 2.5
        yield logits, logits + noise * torch.randn(1, 10, generator=generator), i % 10


def _scorer(metric: Metric, n: int = 60, noise: float = 1.5) -> MetricScorer:
    scorer = MetricScorer(metric)
    for i, (before, after, label) in enumerate(_pairs(n, noise)):
        scorer.add(scorer.score(i, (before, after), label, {1}))
    return scorer


@pytest.mark.sweep(1)
@pytest.mark.parametrize("metric", METRICS)
def test_scores_are_the_metrics_own(metric: str) -> None:
    """As if it had seen all samples at once."""
    scores = _scorer(METRICS[metric]()).result()
    before, after, label = zip(*_pairs(60, 1.5), strict=True)
    one, other, target = METRICS[metric](), METRICS[metric](), torch.tensor(label)
    one.update(torch.cat(before), target)
    other.update(torch.cat(after), target)
    # float32 sums in another order.
    assert scores.float_score == pytest.approx(float(one.compute()), rel=1e-6)
    assert scores.edge_score == pytest.approx(float(other.compute()), rel=1e-6)
    drop = scores.float_score - scores.edge_score
    assert scores.evidence.drop == (drop if metric != "calibration error" else -drop)
    assert scores.higher_is_better is (metric != "calibration error")


@pytest.mark.sweep(1)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.filterwarnings("ignore:No positive samples in targets")
def test_a_resample_is_the_metric_on_its_draws(metric: str) -> None:
    """Updated with each sample as often as it was drawn, it computes the same for both models."""
    scorer = _scorer(METRICS[metric]())
    random = np.random.default_rng(SEED)
    resamples = len(scorer._times) - 1
    draws = np.array([random.poisson(1.0, resamples) for _ in range(60)])
    drops = scorer._resampled()
    for row in (0, 7, resamples - 1):
        one, other = METRICS[metric](), METRICS[metric]()
        for times, (before, after, label) in zip(draws[:, row], _pairs(60, 1.5), strict=True):
            for _ in range(times):
                one.update(before, torch.tensor([label]))
                other.update(after, torch.tensor([label]))
        drop = float(one.compute()) - float(other.compute())
        assert drops[row] == pytest.approx(drop * scorer._sign, abs=1e-6)


def test_bounds_agree_with_exact_ones() -> None:
    """Accuracy, by a Metric and as right or wrong."""
    by_metric = MetricScorer(MulticlassAccuracy(10, average="micro"))
    by_callable = CallableScorer(lambda outputs, label: outputs.argmax(-1) == label)
    for i, (before, after, label) in enumerate(_pairs(400, 1.0)):
        scorers: tuple[Any, ...] = (by_metric, by_callable)
        for scorer in scorers:
            scorer.add(scorer.score(i, (before, after), label, {1}))
    one, other = by_metric.result().evidence, by_callable.result().evidence
    assert isinstance(other, RightWrong)
    assert one.drop == pytest.approx(other.drop, abs=1e-6)
    # As above; and the exact bounds are wider by half a sample on each side, 10 % of the width.
    width = other.bounds.high - other.drop
    assert one.bounds.high == pytest.approx(other.bounds.high, abs=0.25 * width)


def test_the_users_metric_is_left_as_it_is(reader: QuantizedModel) -> None:
    """What it had seen before counts for nothing, and stays."""
    metric = MulticlassAccuracy(10, average="micro")
    metric.update(torch.eye(10), torch.zeros(10, dtype=torch.int64))
    before = str(metric.metric_state)
    assert_accuracy_drop(reader, labelled(60), metric, max_drop=0.3)
    assert float(metric.compute()) == pytest.approx(0.1)
    assert str(metric.metric_state) == before


def test_text_of_a_rise() -> None:
    """The golden text: where less is better the drop is a rise."""
    scaled = net(lambda _, x: x * 0.75, "Scaled").eval()
    model = Edgeq().quantize(scaled, (torch.zeros(1, 4),), quantizer=None)
    loaded = Edgeq().load(model.tflite, reference=lambda x: x)
    inputs = [
        (np.full((1, 4), i % 5, np.float32), torch.full((1, 4), i % 5 + 1.0)) for i in range(80)
    ]
    golden("accuracy_rise", lambda: assert_accuracy_drop(loaded, inputs, MeanSquaredError(), 0.05))


class Correlation(PearsonCorrCoef):
    """Says which way is better; its means and variances do not add up."""

    higher_is_better = True


@pytest.mark.parametrize(
    ("metric", "error", "text"),
    [
        (MulticlassConfusionMatrix(10), ValueError, "a drop of it has no sign"),
        (MetricCollection([MulticlassAccuracy(10)]), ValueError, "A collection holds several"),
        (MulticlassAccuracy(10) + 1.0, ValueError, "CompositionalMetric: does not say which way"),
        (Correlation(), TypeError, "its state '.*' is neither summed nor a list"),
        (MulticlassAccuracy(6000), ValueError, "sums 24,000 numbers"),
        (MulticlassAccuracy(10, average=None), TypeError, r"one number, got shape \[10\]"),
        (MeanSquaredError(), ValueError, r"outputs \[1, 10\] float32 and label \[1\] int64"),
        (MulticlassAccuracy, TypeError, r"make one, MulticlassAccuracy\(…\)"),
    ],
    ids=lambda value: None if isinstance(value, str) else "x",
)
def test_metrics_that_cannot_be_judged(
    reader: QuantizedModel, metric: Any, error: type[Exception], text: str
) -> None:
    """No sign, no states that can be drawn anew, too many numbers, several values, misfits."""
    with pytest.raises(error, match=text):
        assert_accuracy_drop(reader, labelled(20), metric)


def test_a_float_model_that_has_nothing_right(reader: QuantizedModel) -> None:
    """Labels of another order: no drop could ever be seen."""
    wrong = ((image, (label + 1) % 10) for image, label in labelled(10))
    with pytest.raises(ValueError, match="the float model scores 0, the worst there is"):
        assert_accuracy_drop(reader, wrong, MulticlassAccuracy(10, average="micro"))


def test_labels_get_a_batch_dimension() -> None:
    """A number stands for a batch of one."""
    scorer = MetricScorer(MulticlassAccuracy(10, average="micro"))
    logits = torch.eye(10)[3:4]
    for i, label in enumerate((3, np.int64(3), np.array([3]), torch.tensor(3))):
        scorer.add(scorer.score(i, (logits, logits), label, {1}))
    assert scorer.result().float_score == 1.0


def test_nan_of_a_metric() -> None:
    """Not a score."""
    scorer = MetricScorer(MeanSquaredError())
    scorer.add(
        scorer.score(0, (torch.tensor([[float("nan")]]), torch.zeros(1, 1)), torch.zeros(1, 1), {1})
    )
    with pytest.raises(ValueError, match="MeanSquaredError, float: expected a finite score"):
        scorer.result()
