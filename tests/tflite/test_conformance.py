"""What a file says of its quantization against what the kernels compute, rule by rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_edgeq.tflite.conformance import (
    BIAS_SCALE,
    CHANNEL_AXIS,
    DTYPES,
    INT16_ZERO_POINT,
    OUTPUT_SCALE,
    POWER_OF_TWO,
    SAME_SCALE,
    WEIGHT_ZERO_POINT,
    RuleViolation,
    violations_of,
)
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.ops import OPS
from tests.tflite.one_op_files import CHANNELS, KINDS, RESOLVERS, data_of, errors, layer, run, write

CONVERTED = sorted(Path("fixtures/tflite").glob("*/*.tflite"))
_BASE = {"int8": (1 / 64, 3), "uint8": (1 / 64, 128), "int16": (1 / 16384, 0)}
_WIDE = {"int8": (1 / 12, 3), "uint8": (1 / 12, 128), "int16": (3e-4, 0)}
_POSITIVE = {"int8": (1 / 127, 0), "uint8": (1 / 127, 0), "int16": (1 / 16384, 0)}

# Kernels that compute something else of sound files, ai-edge-litert 2.3.0.
_WRONG_KERNELS = {("SUM", "int8"): {"reference"}, ("SUM", "int16"): {"reference"}}


def found(content: bytes) -> list[RuleViolation]:
    """Read a file and return its violations."""
    graph = OpGraph.read(content)
    return [each for op in graph.ops for each in violations_of(graph, op)]


def rules(content: bytes) -> list[str]:
    """Return the rules that a file violates."""
    return [each.rule for each in found(content)]


def sound(op: str, dtype: str) -> list[tuple[float, int]]:
    """Parameters of the data operands and of the output with which kernels compute an op."""
    # NEG negates codes.
    given = (_POSITIVE if KINDS[op].low > 0 or op == "NEG" else _BASE)[dtype]
    row = OPS[op]
    made = row.outputs.get(dtype, given if row.same else _WIDE[dtype])
    return [*[given] * len(data_of(op)), made]


def computed(op: str, dtype: str, parameters: list[tuple[float, int]]) -> bool:
    """Whether all kernels compute the file, up to rounding."""
    told = errors(op, dtype, parameters)
    most = 1 if dtype != "int16" else 3
    return all(
        error <= most
        for runtime, error in told.items()
        if runtime not in _WRONG_KERNELS.get((op, dtype), ())
    )


def content_of(op: str, dtype: str, parameters: list[tuple[float, int]]) -> bytes:
    """Write a file of one op whose tensors have one dtype."""
    return write(op, [dtype] * len(parameters), parameters)


def scaled(parameters: tuple[float, int], by: float = 1.5) -> tuple[float, int]:
    """Return other parameters."""
    return parameters[0] * by, parameters[1]


CHOSEN = [
    *((op, "int8") for op in sorted(KINDS) if op not in ("FLOOR_DIV", "REVERSE_SEQUENCE")),
    *((op, "int16") for op in ("BATCH_TO_SPACE_ND", "DIV", "LEAKY_RELU", "LOGISTIC", "REDUCE_MAX")),
    *((op, "int16") for op in ("RELU6", "RESIZE_NEAREST_NEIGHBOR", "SLICE", "SOFTMAX", "TANH")),
    *((op, "uint8") for op in ("CONCATENATION", "MIRROR_PAD", "SCATTER_ND", "SPLIT", "SQUEEZE")),
]
"""Each op in int8, which kernels have of all but two, and some in other dtypes."""


@pytest.mark.sweep(16)
@pytest.mark.parametrize(("op", "dtype"), CHOSEN)
def test_another_output_scale_is_a_violation_where_a_kernel_does_not_compute_it(
    op: str, dtype: str
) -> None:
    """Every kernel computes the sound file. Other ops rescale, and conform with any scale."""
    *given, made = sound(op, dtype)
    assert not found(content_of(op, dtype, [*given, made]))
    assert computed(op, dtype, [*given, made])

    parameters = [*given, scaled(made)]
    demands = (OPS[op].same and dtype not in OPS[op].rescaling) or dtype in OPS[op].outputs
    rule = OUTPUT_SCALE if dtype in OPS[op].outputs else SAME_SCALE
    assert rules(content_of(op, dtype, parameters)) == ([rule] if demands else [])
    assert computed(op, dtype, parameters) is not bool(demands)


@pytest.mark.parametrize("op", [op for op in sorted(KINDS) if len(OPS[op].same) > 1])
@pytest.mark.parametrize("by", [1.5, 1.0])
def test_an_operand_of_another_scale_or_zero_point_is_named(op: str, by: float) -> None:
    """The output has the first operand's, so the other one is wrong."""
    one, two, *rest = sound(op, "int8")
    other = scaled(two, by) if by != 1 else (two[0], two[1] + 5)
    parameters = [one, other, *rest]

    [violation] = found(content_of(op, "int8", parameters))

    names = {"PADV2": "constant_values", "SELECT": "input 2", "SELECT_V2": "input 2"}
    assert violation.rule == SAME_SCALE
    assert violation.symptom.startswith(names.get(op, "input 1"))
    assert not computed(op, "int8", parameters)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("op", [op for op in sorted(KINDS) if OPS[op].symmetric])
def test_int16_has_zero_points_of_zero(op: str) -> None:
    """Some kernels refuse the file, or compute it without."""
    parameters = [(scale, 5) for scale, _ in sound(op, "int16")]

    told = rules(content_of(op, "int16", parameters))

    assert INT16_ZERO_POINT in told
    assert not computed(op, "int16", parameters)


def test_a_constant_of_another_scale_that_has_the_same_codes_conforms() -> None:
    """A clamp at 0: the zero point is 0 whatever the scale."""
    shared, other = (1 / 64, 0), (1 / 16, 0)
    zeros, ones = np.zeros((1, 8), np.int8), np.full((1, 8), 16, np.int8)

    def rules_of(constant: Any) -> list[str]:
        dtypes = ["int8"] * 3
        return rules(write("MAXIMUM", dtypes, [shared, other, shared], {1: constant}))

    assert not rules_of(zeros)
    assert rules_of(ones) == [SAME_SCALE]


def test_the_fill_value_of_a_pad_has_the_parameters_of_the_output() -> None:
    """tensorflow#43010: the kernels compare parameters, whatever the value is."""
    fill = {1: np.array([-127], np.int8)}
    sound_file = write("PADV2", ["int8"] * 3, [(1 / 127, 3)] * 3, fill)
    broken = write("PADV2", ["int8"] * 3, [(1 / 127, 3), (1 / 127, 0), (1 / 127, 3)], fill)

    assert not found(sound_file)
    [violation] = found(broken)
    assert violation.finding().message.startswith(
        "constant_values: expected the output's zero point 3, got 0"
    )
    assert all(run(broken, runtime, [np.zeros((1, 4), np.int8)]) is None for runtime in RESOLVERS)


@pytest.mark.parametrize(
    ("op", "dtypes"),
    [
        ("PADV2", ["int16", "float32", "int16"]),
        ("ADD", ["int8", "float32", "int8"]),
        ("MUL", ["int8", "int16", "int8"]),
        ("EXP", ["int8", "float32"]),
        ("TANH", ["float32", "int8"]),
        ("PRELU", ["float32", "int8", "float32"]),
        ("PRELU", ["int16", "int16", "int16"]),
        ("FLOOR_DIV", ["int8", "int8", "int8"]),
    ],
)
def test_dtypes_that_no_kernel_has_together(op: str, dtypes: list[str]) -> None:
    """The same op in float conforms."""
    assert rules(write(op, dtypes, [(1 / 64, 0)] * len(dtypes))) == [DTYPES]
    assert not rules(write(op, ["float32"] * len(dtypes), [(1.0, 0)] * len(dtypes)))


def test_a_softmax_of_int8_may_give_int16() -> None:
    """XNNPACK and the optimized kernels compute it."""
    assert not rules(write("SOFTMAX", ["int8", "int16"], [(1 / 64, 0), (1 / 32768, 0)]))


@pytest.mark.parametrize("op", ["ADD", "SUB"])
def test_int16_sums_in_powers_of_two_have_the_greater_scale(op: str) -> None:
    """Where one scale is no power of two the kernels multiply."""
    one, two = (2.0**-13, 0), (2.0**-12, 0)

    for output, told in ((two, []), ((2.0**-11, 0), [POWER_OF_TWO]), ((3e-4, 0), [])):
        parameters = [one, two, output]
        assert rules(content_of(op, "int16", parameters)) == told
        assert computed(op, "int16", parameters) is not bool(told)


def errors_of(case: dict[str, Any]) -> dict[str, float]:
    """How far kernels are from a layer in float, in steps of the output, by runtime."""
    content, floats, inputs, step = layer(**case)
    expected = run(floats, "builtin", [inputs[1]] if inputs else [])
    assert expected is not None
    told = {}
    for runtime in RESOLVERS:
        got = run(content, runtime, [inputs[0]] if inputs else [])
        if got is None:
            told[runtime] = np.inf
            continue
        [values], point = got, 128 if got[0].dtype == np.uint8 else 0
        floats_of = values if values.dtype == np.float32 else (values.astype(float) - point) * step
        told[runtime] = float(np.abs(floats_of - expected[0]).max() / step)
    return told


_PER_CHANNEL: dict[str, Any] = {"scales": CHANNELS}
_16X8: dict[str, Any] = {"data": "int16", "bias": "int64"}
_DYNAMIC: dict[str, Any] = {"data": "float32", "bias": "float32"}
_UINT8: dict[str, Any] = {"data": "uint8", "weight": "uint8", "point": 128}
_CONVOLUTIONS = ("CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV")
_ALL = (*_CONVOLUTIONS, "FULLY_CONNECTED")

SOUND: list[dict[str, Any]] = [
    *({"op": op} for op in (*_ALL, "BATCH_MATMUL", "EMBEDDING_LOOKUP")),
    *({"op": op, **_PER_CHANNEL} for op in _ALL),
    *({"op": op, **_PER_CHANNEL, **_16X8} for op in _ALL),
    *({"op": op, **_PER_CHANNEL, **_DYNAMIC} for op in _ALL),
    *({"op": op, **_UINT8} for op in _ALL),
    {"op": "EMBEDDING_LOOKUP", **_PER_CHANNEL, "output": "float32"},
    {"op": "BATCH_MATMUL", **_DYNAMIC, "scales": CHANNELS},
    {"op": "BATCH_MATMUL", "point": 6},
    {"op": "BATCH_MATMUL", "data": "int16"},
    {"op": "BATCH_MATMUL", "data": "int16", "weight": "int16"},
    *(
        {"op": op, **_16X8, "bias": "int32", "fields": {"quantizedBiasType": 2}}
        for op in ("CONV_2D", "FULLY_CONNECTED", "TRANSPOSE_CONV")
    ),
    *({"op": op, "weight": "int4", "scales": (0.04,)} for op in ("CONV_2D", "FULLY_CONNECTED")),
]

BROKEN: list[tuple[dict[str, Any], str]] = [
    *(({"op": op, "point": 6}, WEIGHT_ZERO_POINT) for op in _CONVOLUTIONS),
    *(({"op": op, "point": 6, **_PER_CHANNEL}, WEIGHT_ZERO_POINT) for op in _ALL),
    *(({"op": op, "point": 6, **_PER_CHANNEL, **_16X8}, WEIGHT_ZERO_POINT) for op in _ALL),
    *(({"op": op, "point": 6, **_PER_CHANNEL, **_DYNAMIC}, WEIGHT_ZERO_POINT) for op in _ALL),
    ({"op": "BATCH_MATMUL", "point": 6, **_DYNAMIC}, WEIGHT_ZERO_POINT),
    ({"op": "BATCH_MATMUL", "point": 6, "data": "int16"}, WEIGHT_ZERO_POINT),
    ({"op": "EMBEDDING_LOOKUP", "point": 6, "output": "float32"}, WEIGHT_ZERO_POINT),
    ({"op": "FULLY_CONNECTED", "weight": "int4", "scales": (0.04,), "point": 1}, WEIGHT_ZERO_POINT),
    ({"op": "CONV_2D", **_PER_CHANNEL, "axis": 3}, CHANNEL_AXIS),
    ({"op": "TRANSPOSE_CONV", **_PER_CHANNEL, "axis": 3}, CHANNEL_AXIS),
    ({"op": "FULLY_CONNECTED", **_PER_CHANNEL, "axis": 1}, CHANNEL_AXIS),
    ({"op": "FULLY_CONNECTED", **_PER_CHANNEL, "axis": 1, **_DYNAMIC}, CHANNEL_AXIS),
    ({"op": "CONV_2D", **_PER_CHANNEL, "axis": 3, **_DYNAMIC}, CHANNEL_AXIS),
    ({"op": "BATCH_MATMUL", **_PER_CHANNEL}, CHANNEL_AXIS),
    ({"op": "BATCH_MATMUL", **_PER_CHANNEL, "axis": 1, **_DYNAMIC}, CHANNEL_AXIS),
    ({"op": "EMBEDDING_LOOKUP", **_PER_CHANNEL}, CHANNEL_AXIS),
    *(({"op": op, "bias_point": 50}, BIAS_SCALE) for op in _CONVOLUTIONS),
    *(({"op": op, "output": "float32"}, DTYPES) for op in (*_ALL, "BATCH_MATMUL")),
    *(({"op": op, "output": "int16"}, DTYPES) for op in _ALL),
    *(({"op": op, "bias": "float32"}, DTYPES) for op in _ALL),
    *(({"op": op, **_DYNAMIC, **_PER_CHANNEL, "bias": "int32"}, DTYPES) for op in _ALL),
    *(({"op": op, **_DYNAMIC, "output": "int8"}, DTYPES) for op in _ALL),
    *(({"op": op, **_16X8, "bias": "int32"}, DTYPES) for op in _ALL),
    *(({"op": op, **_16X8, "weight": "int16"}, DTYPES) for op in _ALL),
    *(({"op": op, **_16X8, "output": "int8"}, DTYPES) for op in _ALL),
    *(({"op": op, "weight": "uint8", "point": 128}, DTYPES) for op in _ALL),
    *(
        ({"op": op, **_DYNAMIC, "weight": "uint8", "point": 128}, DTYPES)
        for op in ("CONV_2D", "TRANSPOSE_CONV", "FULLY_CONNECTED")
    ),
    *(
        ({"op": op, **_DYNAMIC, "weight": "int4", "scales": tuple(c * 9 for c in CHANNELS)}, DTYPES)
        for op in ("DEPTHWISE_CONV_2D", "TRANSPOSE_CONV")
    ),
]


def _id(case: Any) -> str:
    if isinstance(case, str):
        return case
    told = {**case, "scales": len(case["scales"])} if "scales" in case else case
    return "-".join(str(v) if k == "op" else f"{k}_{v}" for k, v in told.items())


@pytest.mark.sweep(10)
@pytest.mark.parametrize("case", SOUND, ids=_id)
def test_sound_layers_conform_and_are_computed(case: dict[str, Any]) -> None:
    """Also those of older tools, of uint8."""
    assert not found(layer(**case)[0])
    assert max(errors_of(case).values()) <= 1.5


@pytest.mark.sweep(20)
@pytest.mark.parametrize(("case", "rule"), BROKEN, ids=_id)
def test_broken_layers_are_violations_and_not_computed(case: dict[str, Any], rule: str) -> None:
    """Of each, some kernel refuses the file or computes something else."""
    told = found(layer(**case)[0])

    assert [each.rule for each in told] == [rule]
    assert not told[0].is_warning
    assert max(errors_of(case).values()) > 1.5


@pytest.mark.parametrize("data", ["int8", "int16"])
def test_a_weight_zero_point_that_cpu_kernels_compute_is_a_warning(data: str) -> None:
    """Of a FULLY_CONNECTED with one scale alone."""
    case: dict[str, Any] = {"op": "FULLY_CONNECTED", "point": 6, "data": data}
    case["bias"] = "int64" if data == "int16" else "int32"

    [warning] = found(layer(**case)[0])

    assert (warning.rule, warning.is_warning) == (WEIGHT_ZERO_POINT, True)
    assert "accelerators may refuse" in warning.finding().message
    assert max(errors_of(case).values()) <= 1.5


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_a_zero_point_of_a_sigmoid_that_cpu_kernels_compute_is_a_warning(dtype: str) -> None:
    """The specification has one; the kernels cut values off at an end of another's range."""
    given, (scale, zero_point) = sound("LOGISTIC", dtype)

    [warning] = found(content_of("LOGISTIC", dtype, [given, (scale, zero_point + 3)]))

    assert (warning.rule, warning.is_warning) == (OUTPUT_SCALE, True)
    assert "accelerators may refuse" in warning.finding().message
    [violation] = found(content_of("LOGISTIC", dtype, [given, (scale * 2, zero_point)]))
    assert (violation.rule, violation.is_warning) == (OUTPUT_SCALE, False)


@pytest.mark.parametrize("op", _ALL)
@pytest.mark.parametrize("factor", [4.0, 1.01])
def test_the_scale_of_a_bias_is_the_product(op: str, factor: float) -> None:
    """Kernels read the codes as multiples of the product: the scale in the file is not read."""
    case: dict[str, Any] = {"op": op, **_PER_CHANNEL, "bias_factor": factor}

    [violation] = found(layer(**case)[0])

    assert violation.rule == BIAS_SCALE
    assert (
        violation.symptom
        == f"its bias has {factor:g} × the scale of its input × that of its weight"
    )
    # The codes are those of the product, so kernels compute another bias than the file says.
    assert max(errors_of(case).values()) <= 1.5


def test_the_scale_of_a_bias_may_be_that_of_another_observer() -> None:
    """litert-torch 0.10.0 keeps one of two observers of a tensor: their ranges hardly differ."""
    assert not found(layer("CONV_2D", **_PER_CHANNEL, bias_factor=1 + 2.0**-9)[0])


def test_a_bias_of_zeros_may_have_any_scale() -> None:
    """TensorFlow 2.21 shares one bias of zeros between all convolutions without a bias, in 16×8."""
    case: dict[str, Any] = {**_PER_CHANNEL, **_16X8, "bias_factor": 4.0}
    assert rules(layer("CONV_2D", **case)[0]) == [BIAS_SCALE]
    assert not found(layer("CONV_2D", **case, has_bias=False)[0])


def test_the_fix_of_a_computed_filter_is_to_hold_it() -> None:
    """A filter that the model computes has the range of an activation."""
    content = layer("DEPTHWISE_CONV_2D", point=-64, is_computed=True)[0]

    [violation] = found(content)

    assert violation.symptom == "its weight has zero point −64, expected 0"
    assert "hold it in a buffer" in violation.fix
    assert not found(layer("DEPTHWISE_CONV_2D", is_computed=True)[0])


@pytest.mark.parametrize("path", CONVERTED, ids=lambda path: path.name)
def test_converted_files_conform(path: Path) -> None:
    """Neither of litert-torch 0.10.0 nor of 0.9.4 is one reported."""
    assert not found(path.read_bytes())
