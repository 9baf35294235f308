"""
What people use today, on the same cases: each peer says whether it would have raised the alarm.

- `assert_allclose`: |actual − desired| ≤ atol + rtol·|desired| of dequantized outputs and torch's,
  with numpy's defaults (rtol 1e-7, atol 0), and loosened to 1e-2 and to 1e-1.
- `compare_tflite_torch` of litert-torch 0.10.0: `np.allclose`, atol = rtol = 1e-5, against torch.
- `validate` of ai-edge-quantizer 0.10.0: mean squared error of each output against the float
  `.tflite`, below 1e-4 (its test of a depthwise convolution) or 1e-1 (of a linear layer).
- ExecuTorch's rule (`backends/test/harness/tester.py`): atol 1e-3 + qtol·scale, rtol 1e-3, NaN
  equals NaN, against the quantized torch graph where there is one; qtol 2 as its XNNPACK tests of
  convolutions pass (its default is 0).

`litert_torch.testing` imports `parameterized`, which litert-torch does not declare: the module of
`compare_tflite_torch` is loaded by its path, which needs nothing else.
"""

from __future__ import annotations

import functools
import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pytest_edgeq import QuantizedModel
from pytest_edgeq.litert.libraries import quiet
from tests.bench.detection.plain import Plain, Run
from tests.bench.detection.sound import Sample, Sound

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Subject:
    """What a peer is given."""

    sound: Sound  # the model as its user knows it
    build: QuantizedModel  # the file under test with the references that its user has
    float_tflite: bytes  # the float file that ai-edge-quantizer compares with
    run: Run | None = None  # what runs the file in place of LiteRT; None for LiteRT


Peer = Callable[[Subject], bool]


def unable(subject: Subject) -> frozenset[str]:
    """Names of the peers that raise on the sound build itself: they do not take such a model."""
    return frozenset(name for name, peer in PEERS.items() if _ask(peer, subject) is None)


def alarms(subject: Subject, without: frozenset[str]) -> dict[str, bool | None]:
    """Ask every peer."""
    told: dict[str, bool | None] = {}
    for name, peer in PEERS.items():
        if name in without or (subject.run is not None and name in _LITERT_ONLY):
            told[name] = None
        else:
            told[name] = _ask(peer, subject) is not False
    return told


def _ask(peer: Peer, subject: Subject) -> bool | None:
    try:
        return peer(subject)
    except (ValueError, RuntimeError, KeyError):
        return None


def _outputs(subject: Subject) -> list[tuple[list[Array], list[Array], Sample]]:
    plain = Plain(subject.build.tflite, run=subject.run)
    return [
        (plain.outputs(sample), _flat(subject.sound.module, sample), sample)
        for sample in subject.sound.evaluation
    ]


def _flat(model: Callable[..., Any], sample: Sample) -> list[Array]:
    with torch.no_grad():
        given = model(*sample)
    values: Sequence[torch.Tensor] = given if isinstance(given, (tuple, list)) else (given,)
    return [value.detach().numpy() for value in values]


def _allclose(rtol: float, atol: float) -> Peer:
    def peer(subject: Subject) -> bool:
        try:
            for actual, desired, _ in _outputs(subject):
                for one, other in zip(actual, desired, strict=True):
                    np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)
        except AssertionError:
            return True
        return False

    return peer


@functools.cache
def _model_coverage() -> Any:
    with quiet():
        package = importlib.util.find_spec("litert_torch")
        assert package is not None
        assert package.origin is not None
        path = Path(package.origin).parent / "testing" / "model_coverage" / "model_coverage.py"
        spec = importlib.util.spec_from_file_location("edgeq_model_coverage", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def _compare_tflite_torch(subject: Subject) -> bool:
    with quiet():
        import litert_torch

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.tflite"
            path.write_bytes(subject.build.tflite)
            edge = litert_torch.load(str(path))
            return not all(
                _model_coverage().compare_tflite_torch(edge, subject.sound.module.__call__, sample)
                for sample in subject.sound.evaluation
            )


def _validate(mse: float) -> Peer:
    def peer(subject: Subject) -> bool:
        return not max(_mean_squared_errors(subject)) < mse

    return peer


def _mean_squared_errors(subject: Subject) -> list[float]:
    from ai_edge_quantizer import model_validator
    from ai_edge_quantizer.utils.validation_utils import ValidationErrorMetric

    data = [
        {f"args_{i}": value.numpy() for i, value in enumerate(sample)}
        for sample in subject.sound.evaluation
    ]
    with quiet():
        found = model_validator.compare_model(
            subject.float_tflite,
            subject.build.tflite,
            {"serving_default": data},
            [ValidationErrorMetric.MSE],
            num_threads=1,
            validate_output_tensors_only=True,
        )
        result = found.get_signature_comparison_result("serving_default")
    return [metrics["mse"] for metrics in result.output_tensors.values()]


def _executorch(subject: Subject, *, qtol: int = 2) -> bool:
    reference = subject.build.simulated or subject.sound.module
    scales = Plain(subject.build.tflite).scales()
    for actual, _, sample in _outputs(subject):
        desired = _flat(reference, sample)
        for one, other, scale in zip(actual, desired, scales, strict=True):
            if one.shape != other.shape:
                return True
            close = torch.allclose(
                torch.from_numpy(one),
                torch.from_numpy(other),
                atol=1e-3 + qtol * scale,
                rtol=1e-3,
                equal_nan=True,
            )
            if not close:
                return True
    return False


PEERS: dict[str, Peer] = {
    "`assert_allclose`": _allclose(1e-7, 0.0),
    "`assert_allclose` 1e-2": _allclose(1e-2, 1e-2),
    "`assert_allclose` 1e-1": _allclose(1e-1, 1e-1),
    "`compare_tflite_torch`": _compare_tflite_torch,
    "`validate` MSE < 1e-4": _validate(1e-4),
    "`validate` MSE < 1e-1": _validate(1e-1),
    "ExecuTorch": _executorch,
}

_LITERT_ONLY = ("`compare_tflite_torch`", "`validate` MSE < 1e-4", "`validate` MSE < 1e-1")
"""They run LiteRT's interpreter and nothing else, so not the runner of a user's own."""
