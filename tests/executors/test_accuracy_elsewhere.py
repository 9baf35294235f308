"""`assert_accuracy_drop` by an executor: the same scores, bounds and texts."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics.classification import MulticlassAUROC

from pytest_edgeq import Edgeq, QuantizedModel, assert_accuracy_drop
from pytest_edgeq.check.assertions import scoring
from pytest_edgeq.compare.executors import stream
from pytest_edgeq.compare.failed_samples import attached_samples
from tests.executors.conftest import AtOnce, Threads


@pytest.fixture(scope="module")
def pairs(quantized: QuantizedModel, given: list[Any]) -> list[tuple[Any, Any]]:
    """Samples with the class that torch sees, but for each third, which has another one."""
    reference: Any = quantized.float_model
    with torch.no_grad():
        classes = [reference(*sample).argmax(-1) for sample in given]
    return [
        (s, (c + (i % 3 == 0)) % 10) for i, (s, c) in enumerate(zip(given, classes, strict=True))
    ]


def _squared(outputs: Any, label: Any) -> Any:
    return ((outputs - label) ** 2).mean()


METRICS: dict[str, Any] = {
    "right or wrong": lambda outputs, label: outputs.argmax(-1) == label,
    "numbers": _squared,
    "lists": MulticlassAUROC(10, thresholds=None),
}


def _text(model: QuantizedModel, pairs: Any, metric: Any, executor: Executor | None) -> str:
    with pytest.raises(AssertionError) as failure:
        assert_accuracy_drop(model, pairs, metric, 1e-9, executor=executor)
    shown = attached_samples(failure.value)
    assert shown is not None
    assert len(shown.worst) == 3
    return f"{failure.value}\nsamples: {[each.index for each in shown.worst]}"


@pytest.mark.filterwarnings("ignore:No (positive|negative) samples in targets:UserWarning")
@pytest.mark.parametrize("name", METRICS)
def test_scores_do_not_depend_on_workers(
    name: str,
    quantized: QuantizedModel,
    pairs: list[Any],
    threads: Threads,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor the samples kept; the text has all figures. Chunks of one pair and of several."""
    monkeypatch.setattr(scoring, "METRIC_RESAMPLES", 50)
    monkeypatch.setattr(scoring, "LIST_RESAMPLES", 10)
    alone = _text(quantized, pairs, METRICS[name], None)
    monkeypatch.setattr(stream, "_SECONDS", 0.0)
    assert _text(quantized, iter(pairs), METRICS[name], threads(5)) == alone


def test_pairs_are_read_where_they_are_used(
    quantized: QuantizedModel, pairs: list[Any], threads: Threads
) -> None:
    """A factory of pairs; one that gives none is an error with the sample's number."""
    right = METRICS["right or wrong"]
    source = Edgeq.samples(lambda indices: (pairs[index] for index in indices), len(pairs))
    assert _text(quantized, source, right, threads(2)) == _text(quantized, pairs, right, None)
    wrong = Edgeq.samples(lambda indices: (pairs[index][0][0] for index in indices), len(pairs))
    with pytest.raises(TypeError, match="sample 0: expected a pair"):
        assert_accuracy_drop(quantized, wrong, right, 0.5, executor=threads(2))


def test_a_metric_or_label_that_cannot_travel_is_refused(
    quantized: QuantizedModel, pairs: list[Any], tmp_path: Path
) -> None:
    """Before anything runs; a label with the index of its sample."""
    executor = AtOnce(1)
    (tmp_path / "classes").write_text("0")
    with (
        (tmp_path / "classes").open() as file,
        pytest.raises(TypeError, match=r"the metric, .* cannot be sent to a worker: an open file"),
    ):
        assert_accuracy_drop(
            quantized, pairs, lambda outputs, label: bool(file), 0.5, executor=executor
        )
    assert not executor.count
    labelled = [*pairs[:2], (pairs[2][0], (each for each in [1]))]
    with pytest.raises(TypeError, match=r"sample 2, or its label, cannot be sent to a worker: "):
        assert_accuracy_drop(quantized, labelled, lambda *_: True, 0.5, executor=AtOnce(2))


def test_the_executor_of_the_session_serves_its_models(
    quantized: QuantizedModel, pairs: list[Any]
) -> None:
    """Without an argument."""
    executor = AtOnce(1)
    session = Edgeq(executor=executor)
    loaded = session.load(quantized.tflite, reference=quantized.float_model)
    right = METRICS["right or wrong"]
    expected = _text(loaded, pairs, right, None).replace("ResidualNet", "")
    assert executor.count
    assert expected == _text(quantized, pairs, right, None).replace("ResidualNet", "")


@dataclasses.dataclass
class _Label:
    value: int


class _Elsewhere(AtOnce):
    """Workers that cannot import the module of the test."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a task without it."""
        module = sys.modules.pop(__name__)
        try:
            return super().submit(fn, *args, **kwargs)
        finally:
            sys.modules[__name__] = module


def test_labels_of_a_test_module_travel(
    quantized: QuantizedModel, pairs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By value, as the metric does, to workers that lack the module."""
    monkeypatch.setattr(sys, "path", [])

    class Local(_Label):
        pass

    kinds = (_Label, Local)
    labelled = [(s, kinds[i % 2](int(label))) for i, (s, label) in enumerate(pairs)]

    def metric(outputs: Any, label: Any) -> bool:
        return isinstance(label, _Label) and int(outputs.argmax(-1)) == label.value

    alone = _text(quantized, labelled, metric, None)
    assert _text(quantized, labelled, metric, _Elsewhere(2)) == alone


class _OwnError(Exception):
    pass


def test_what_the_users_code_raises_is_raised_here(
    quantized: QuantizedModel, pairs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception keeps its class and the lines that raised it; a local class, its text."""
    monkeypatch.setattr(sys, "path", [])

    class LocalError(Exception):
        pass

    def raising(error: BaseException) -> Callable[[Any, Any], bool]:
        def metric(outputs: Any, label: Any) -> bool:
            if label == 7:
                raise error
            return True

        return metric

    labelled = [(sample, index) for index, (sample, _) in enumerate(pairs)]
    kinds: dict[type[BaseException], type[BaseException]] = {
        _OwnError: _OwnError,
        LocalError: RuntimeError,
        SystemExit: SystemExit,
        type(pytest.fail.Exception("")): RuntimeError,
    }
    for kind, expected in kinds.items():
        metric = raising(kind("no label"))
        with pytest.raises(expected, match="no label") as error:
            assert_accuracy_drop(quantized, labelled, metric, 0.5, executor=_Elsewhere(2))
        if sys.version_info >= (3, 11):
            (note,) = error.value.__notes__
            assert note.startswith("raised on a worker, of sample 7:\n")
            (place,) = (line for line in note.splitlines() if line.startswith("  File "))
            assert place.endswith("in metric")
