"""A few real conversions, made once a session, and functions that spoil and compare them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ai_edge_litert import schema_py_generated as schema

from fixtures import digits
from fixtures.models import DepthwiseSeparable, ResidualNet, SmallModel, net
from fixtures.tflite.writer import pack, unpack
from pytest_edgeq import Comparison, Edgeq, QuantizedModel
from pytest_edgeq.errors import findings_of
from pytest_edgeq.numerics.error_sums import IOSpec, StageAccumulator
from pytest_edgeq.numerics.findings import Finding
from tests.quantize import making, rules

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Keep torch on one thread: networks this small gain nothing from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def golden(name: str, check: Callable[[], None]) -> tuple[str, Finding]:
    """Compare a failure's text with golden/<name>.txt; return it and its first finding."""
    with pytest.raises(AssertionError) as caught:
        check()
    text = str(caught.value)
    assert f"{text}\n" == (GOLDEN / f"{name}.txt").read_text("utf-8")
    first, *others = findings_of(caught.value)
    assert all(each.title in text for each in (first, *others))
    assert {*first.reasons, *first.evidence} - {f"fix: {first.fix}"} <= {*text.splitlines()}
    assert first.fix in text
    return text, first


def labelled(n: int = digits.HELD_OUT) -> Iterator[tuple[torch.Tensor, int]]:
    """Held-out digits, one at a time."""
    held_out = digits.held_out()
    yield from zip(held_out.samples(), held_out.labels[:n].tolist(), strict=False)


@pytest.fixture(scope="session")
def reader() -> QuantizedModel:
    """A network that reads digits, int8 throughout."""
    return Edgeq().quantize(
        digits.trained(), tuple(digits.calibration(1)), calibration=digits.calibration(64)
    )


@pytest.fixture(scope="session")
def doubled() -> QuantizedModel:
    """A float file that gives its input, and the double."""
    double = net(lambda _, x: (x * 1.0, x * 2.0), "Double").eval()
    return Edgeq().quantize(double, (torch.zeros(1, 2),), quantizer=None)


def _made(quantizer: Any, model: type[SmallModel] = ResidualNet, **options: Any) -> Any:
    """Return the fixture of a model that is quantized once a session."""

    @pytest.fixture(scope="session")
    def quantized() -> QuantizedModel:
        return making.quantize(quantizer, model, n=4, **options)

    return quantized


static = _made("recipe_static_wi8_ai8")
"""int8 throughout by a recipe: no op is left in float."""
pt2e = _made("pt2e_static_int8")
"""int8 by PT2E, per channel; RELU, TRANSPOSE and MEAN stay in float."""
non_strict = _made("pt2e_static_int8", strict_export=False)
"""The same, exported non-strictly: both ADD stay in float, too."""
per_tensor = _made("pt2e_static_int8_per_tensor", DepthwiseSeparable)
"""A depthwise network whose weights have one scale each."""
depthwise = _made("recipe_static_wi8_ai8", DepthwiseSeparable)
"""The same per channel; xnnpack and builtin differ on it by 1 LSB."""
dynamic = _made("recipe_dynamic_wi8_afp32")
"""Integer weights, float activations."""
weight_only = _made("recipe_weight_only_wi8_afp32")
"""Integer weights behind a DEQUANTIZE."""
float16 = _made([rules.float16("CONV_2D")])
"""float16 weights behind a DEQUANTIZE."""
plain = _made(None)
"""No quantizer: a float model."""


def patch(model: QuantizedModel, change: Callable[[Any], None]) -> bytes:
    """Return the file with something changed in it, by the flatbuffer's object API."""
    content = unpack(model.tflite)
    change(content)
    return pack(content)


def operand(content: Any, op: str, position: int) -> Any:
    """Return an operand of the first op of a name, in the flatbuffer's object API."""
    code = getattr(schema.BuiltinOperator, op)
    codes = [
        index
        for index, opcode in enumerate(content.operatorCodes)
        if max(opcode.builtinCode, opcode.deprecatedBuiltinCode) == code
    ]
    graph = content.subgraphs[0]
    first = next(o for o in graph.operators if o.opcodeIndex in codes)
    return graph.tensors[first.inputs[position]]


def spoil(model: QuantizedModel, op: str, change: Callable[[Any, Any], Any]) -> QuantizedModel:
    """Change the weight of the first op of a name: its tensor and its data, in the file alone."""

    def spoil_weight(content: Any) -> None:
        weight = operand(content, op, 1)
        buffer = content.buffers[weight.buffer]
        buffer.data = change(weight, np.array(buffer.data))

    return model.with_tflite(patch(model, spoil_weight))


def comparison(
    scores: Any = (1.0, 2.0, 3.5), boxes: Any = (10.0, 20.0), **stages: Any
) -> Comparison:
    """Make a comparison of two outputs by hand: `scores` with a scale of 0.5, `boxes` float."""
    specs = [IOSpec("scores", 0.5, 0, -128, 127), IOSpec("boxes")]
    reference = [np.array([[1.0, 2.0, 3.0]]), np.array([[10.0, 20.0]])]
    total = StageAccumulator(specs)
    total.update(reference, [np.array([scores], float), np.array([boxes], float)])
    return Comparison(name="net", flow="pt2e", runtime="builtin", total=total.result(), **stages)
