"""What tests of known bugs share: whether one still happens, and the libraries' own calls."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fixtures.models import normal
from pytest_edgeq import Edgeq, QuantizedModel, litert
from pytest_edgeq.litert.libraries import recipe_module

Still = Callable[[bool], None]


@pytest.fixture
def maker(tmp_path: Path) -> Edgeq:
    """Quantize and compare; writes into a folder of the test's own."""
    return Edgeq(directory=tmp_path)


@pytest.fixture
def still(request: pytest.FixtureRequest) -> Iterator[Still]:
    """
    Ask whether the bug of the test's marker happens; the test fails where it does not.

    The marker `known_bug("litert-torch 0.10.0", …, then="…")` says with which versions the bug was
    seen, and what goes with the test.
    """
    marker = request.node.get_closest_marker("known_bug")
    assert marker is not None, "a test of a known bug says with which versions it was seen"
    asked = []

    def ask(happens: bool) -> None:
        asked.append(happens)
        if not happens:
            pytest.fail(_fixed(*marker.args, **marker.kwargs), pytrace=False)

    yield ask
    assert asked, "the test has not asked whether the bug still happens"


def _fixed(*seen: str, then: str) -> str:
    names = [each.rsplit(" ", 1)[0] for each in seen]
    now = [f"{name} {importlib.metadata.version(name)}" for name in names]
    if now == list(seen):
        return (
            f"the bug does not happen with {', '.join(seen)}, with which it was seen: nothing was "
            "fixed upstream, so the test (its model, or a library beside these) has changed"
        )
    return (
        f"fixed upstream in {', '.join(now)} (seen with {', '.join(seen)}): "
        f"remove this test; {then}"
    )


def normals(count: int, *shape: int, seed: int) -> list[tuple[Tensor, ...]]:
    """Samples of one tensor each, standard normal."""
    return [(normal(*shape, seed=1000 * seed + i),) for i in range(count)]


def by_pt2e(
    model: nn.Module, calibration: Iterable[tuple[Tensor, ...]], *, dynamic: bool, strict: bool
) -> tuple[Any, bytes]:
    """The quantized graph and the file, as the libraries' own pages have one call them."""
    with litert.quiet():
        import litert_torch
        from litert_torch.quantize import pt2e_quantizer as converters
        from litert_torch.quantize.quant_config import QuantConfig
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

        config = converters.get_symmetric_quantization_config(
            is_per_channel=True, is_dynamic=dynamic
        )
        quantizer = converters.PT2EQuantizer().set_global(config)
        sample, *others = calibration
        exported = torch.export.export(model, sample, strict=strict).module()
        prepared = prepare_pt2e(exported, quantizer)
        with torch.no_grad():
            for each in (sample, *others):
                prepared(*each)
        converted = convert_pt2e(prepared, fold_quantize=False)
        edge = litert_torch.convert(
            converted, sample, quant_config=QuantConfig(pt2e_quantizer=quantizer)
        )
    return converted, edge.model_content()


def converted(model: nn.Module, sample: tuple[Tensor, ...]) -> bytes:
    """The float file."""
    return litert.convert({litert.SIGNATURE: litert.Traced(model, sample)})


def by_recipe(
    float_tflite: bytes, name: str, calibration: Iterable[tuple[Tensor, ...]] = ()
) -> bytes:
    """ai-edge-quantizer's own three calls."""
    with litert.quiet(), contextlib.redirect_stdout(None):
        quantizer = recipe_module("quantizer").Quantizer(
            float_tflite, getattr(recipe_module("recipe"), name)()
        )
        data = {litert.SIGNATURE: [{"args_0": sample.numpy()} for (sample,) in calibration]}
        ranges = quantizer.calibrate(data, num_threads=1)
        return bytes(quantizer.quantize(ranges).quantized_model)


def interpret(tflite: bytes) -> Any:
    """The interpreter of a file, with the kernels that it takes by itself."""
    from ai_edge_litert.interpreter import Interpreter

    return Interpreter(model_content=tflite, num_threads=1)


def raised(call: Callable[[], Any], *words: str) -> bool:
    """Whether a call raises with all these words; another error is not swallowed."""
    try:
        call()
    except Exception as error:
        if not all(word in str(error) for word in words):
            raise
        return True
    return False


def assert_error(call: Callable[[], Any], error: type[Exception], *words: str) -> None:
    """Whatever a user has to read: all these words, in this order."""
    with pytest.raises(error) as caught:
        call()
    told = str(caught.value)
    places = [told.find(word) for word in words]
    assert -1 not in places, told
    assert places == sorted(places), told


def db(reference: Any, actual: Any) -> float:
    """SQNR in dB."""
    noise = float(np.square(reference - actual).sum())
    return 10 * math.log10(float(np.square(reference).sum()) / noise) if noise else math.inf


def gate(maker: Edgeq, quantized: QuantizedModel, inputs: Iterable[tuple[Tensor, ...]]) -> str:
    """What the default gate says of a model; nothing where it passes."""
    with warnings.catch_warnings():
        # Here nothing is remembered, which it tells.
        warnings.filterwarnings("ignore", message="edgeq.check: baselines were not checked")
        try:
            maker.check(quantized, inputs)
        except AssertionError as error:
            return str(error)
    return ""
