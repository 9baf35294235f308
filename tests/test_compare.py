"""`edgeq.compare` and `edgeq.load`: what is measured is what happened, and bad data is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fixtures.models import ResidualNet, samples, seeded
from pytest_edgeq import Edgeq, QuantizedModel

pytestmark = pytest.mark.figures


@pytest.fixture(scope="module")
def residual(maker: Edgeq) -> QuantizedModel:
    """A sound int8 model."""
    return maker.quantize(
        seeded(ResidualNet), ResidualNet.sample_inputs(), calibration=samples(ResidualNet, 16)
    )


def test_the_worst_samples_are_kept(maker: Edgeq, residual: QuantizedModel) -> None:
    """Their inputs are copies: a loader that reuses its buffer does not change them."""
    buffer = torch.empty_like(ResidualNet.sample_inputs()[0])
    expected = [sample[0].clone() for sample in samples(ResidualNet, 10, seed=4)]

    def loader() -> Iterator[torch.Tensor]:
        for sample in expected:
            buffer.copy_(sample)
            yield buffer

    comparison = maker.compare(residual, loader())

    assert len(comparison.worst_samples) == 3
    assert comparison.worst_samples[0].sqnr_db == comparison.total.worst_sample_sqnr_db
    for worst in comparison.worst_samples:
        assert torch.equal(worst.inputs.args[0], expected[worst.index])


def test_nothing_to_evaluate(maker: Edgeq, residual: QuantizedModel) -> None:
    """An empty iterable is no pass."""
    with pytest.raises(ValueError, match="evaluation: there is no sample in the list"):
        maker.compare(residual, [])
    used = samples(ResidualNet, 1)
    list(used)
    with pytest.raises(ValueError, match="generator yields its samples once"):
        maker.compare(residual, used)


@pytest.mark.parametrize("runtime", ["xnnpack", "builtin", "reference", "compiled"])
def test_every_runtime_runs_the_file(maker: Edgeq, residual: QuantizedModel, runtime: str) -> None:
    """And the comparison says which one it was."""
    comparison = maker.compare(residual, samples(ResidualNet, 4, seed=3), runtime=runtime)

    assert comparison.runtime == runtime
    assert comparison.total.sqnr_db > 20


def test_a_file_without_a_reference(maker: Edgeq, residual: QuantizedModel) -> None:
    """It runs, but there is nothing to compare it with."""
    loaded = maker.load(residual.path)
    assert loaded.flow == "prebuilt"
    assert loaded.run(*ResidualNet.sample_inputs())["output_0"].shape == (1, 10)
    with pytest.raises(ValueError, match=r"no reference.*reference=model"):
        maker.compare(loaded, samples(ResidualNet, 1))


def test_a_loaded_file_measures_like_the_one_it_was_written_from(
    maker: Edgeq, residual: QuantizedModel
) -> None:
    """From a path and from bytes, against the module and against a plain callable."""
    data = list(samples(ResidualNet, 4, seed=3))
    expected = maker.compare(residual, data).total.to_dict()
    model = residual.float_model
    assert isinstance(model, nn.Module)

    def plain(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        with torch.no_grad():
            result: np.ndarray[Any, Any] = model(torch.from_numpy(x)).numpy()
            return result

    from_path = maker.load(residual.path, reference=model)
    from_bytes = maker.load(residual.tflite, reference=plain)

    assert maker.compare(from_path, data).total.to_dict() == expected
    assert maker.compare(from_bytes, [x.numpy() for (x,) in data]).total.to_dict() == expected
    assert from_path.name == residual.path.stem
    assert [e.module for e in from_path.op_dtypes] == [e.module for e in residual.op_dtypes]


@pytest.mark.parametrize(
    ("reference", "error", "told"),
    [
        (lambda x: (x, x), ValueError, r"the reference returns 2 output\(s\).*the file 1"),
        (lambda x: x, ValueError, r"output_0.*\(?1, 3, 16, 16|1×3×16×16"),
        (lambda x: None, TypeError, "returned a NoneType among its outputs"),
    ],
)
def test_a_reference_that_does_not_fit(
    maker: Edgeq, residual: QuantizedModel, reference: Any, error: type[Exception], told: str
) -> None:
    """Another number of outputs, another shape (never broadcast), no tensor at all."""
    loaded = maker.load(residual.tflite, reference=reference)
    with pytest.raises(error, match=told):
        maker.compare(loaded, samples(ResidualNet, 1))


def test_references_that_are_refused(maker: Edgeq, residual: QuantizedModel) -> None:
    """A module in train mode, a class, something that cannot be called."""
    with pytest.raises(ValueError, match="the reference is in train mode"):
        maker.load(residual.tflite, reference=seeded(ResidualNet).train())
    with pytest.raises(TypeError, match="got the class ResidualNet; instantiate it"):
        maker.load(residual.tflite, reference=ResidualNet)
    with pytest.raises(
        TypeError, match="expected a torch module, a callable, a file or a QuantizedModel, got int"
    ):
        maker.load(residual.tflite, reference=3)  # type: ignore[arg-type] # what is tested


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda x: (x, x), "expected 1 positional input, got 2"),
        (lambda x: (x.repeat(2, 1, 1, 1),), "split the batch"),
        (lambda x: (x * torch.nan,), "768 NaN, which has no code"),
    ],
)
def test_inputs_that_do_not_fit(
    maker: Edgeq, residual: QuantizedModel, make: Any, said: str
) -> None:
    """Too many, another shape (the interpreter would resize itself), NaN in a quantized one."""
    inputs = make(*ResidualNet.sample_inputs())
    for use in (lambda: residual.run(*inputs), lambda: maker.compare(residual, [inputs])):
        with pytest.raises(ValueError, match=said):
            use()


def test_run_quantizes_and_dequantizes_as_the_file_says(residual: QuantizedModel) -> None:
    """Against the formula, by hand, on raw codes from an interpreter of its own."""
    from ai_edge_litert.interpreter import Interpreter

    (sample,) = ResidualNet.sample_inputs(3)
    (given,), (taken,) = residual.inputs, residual.outputs
    assert given.scale is not None
    assert given.zero_point is not None
    assert taken.scale is not None
    assert taken.zero_point is not None
    codes = np.clip(np.rint(sample.numpy() / np.float32(given.scale)) + given.zero_point, -128, 127)
    interpreter = Interpreter(model_content=residual.tflite)
    result = interpreter.get_signature_runner()(args_0=codes.astype(np.int8))["output_0"]
    steps = (result.astype(np.int32) - taken.zero_point).astype(np.float32)
    expected = steps * np.float32(taken.scale)

    np.testing.assert_array_equal(residual.run(sample)["output_0"], expected)


def test_the_path_is_written_when_asked_for(residual: QuantizedModel, tmp_path: Path) -> None:
    """The folder is made with it, and two models of one name do not overwrite one another."""
    folder = tmp_path / "not" / "yet"
    edgeq = Edgeq(directory=folder)
    model, again = edgeq.load(residual.tflite), edgeq.load(residual.tflite)
    assert not folder.exists()
    assert model.path.is_relative_to(folder)
    assert model.path.read_bytes() == model.tflite
    assert model.size_bytes == model.path.stat().st_size
    assert again.path != model.path
    assert model.path == model.path
