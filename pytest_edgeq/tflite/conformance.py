"""Check the quantization of each op against TFLite's kernels, without a run."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pytest_edgeq.numerics.findings import Finding
from pytest_edgeq.tflite.boundary import qparams
from pytest_edgeq.tflite.constants import dequantized
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.ops import KEEPING_SCALE, MOVING, OpFacts, facts_of
from pytest_edgeq.tflite.roles import present, roles_of
from pytest_edgeq.tflite.same import ratio_text, unexpected_qparams
from pytest_edgeq.tflite.subgraph import Op, Tensor

# Ops that do not rescale have the same scale and zero point at input and output.
SAME_SCALE = "same_scale"
# Kernels of some ops write a fixed scale and zero point, whatever the file says.
OUTPUT_SCALE = "output_scale"
# A weight is symmetric, and so are int16 activations: their zero point is 0.
WEIGHT_ZERO_POINT, INT16_ZERO_POINT = "weight_zero_point", "int16_zero_point"
# If all int16 scales are powers of two, kernels shift, and one shift must be zero.
POWER_OF_TWO = "power_of_two"
# The scale of a bias is input scale × weight scale, and its zero point 0.
BIAS_SCALE = "bias_scale"
# A per-channel weight is quantized along the axis that the kernels read.
CHANNEL_AXIS = "channel_axis"
# Some kernel supports the dtypes of the operands and outputs together.
DTYPES = "dtypes"

RULE_NAMES = (
    *(SAME_SCALE, OUTPUT_SCALE, WEIGHT_ZERO_POINT, INT16_ZERO_POINT),
    *(POWER_OF_TWO, BIAS_SCALE, CHANNEL_AXIS, DTYPES),
)

# Relative: the furthest code of int8 moves by 1/8 LSB. The scale of a bias may also be that of
# another observer of the same tensor, of which the converter (litert-torch 0.10.0) keeps one.
_ALIKE = 2.0**-10
_OBSERVED = 2.0**-8


@dataclass(frozen=True, slots=True)
class RuleViolation:
    """A violation of one rule by one op."""

    rule: str  # one of `RULE_NAMES`
    op: Op
    symptom: str  # the file's parameters and the expected ones, in one clause
    cause: str  # how the kernels treat it
    fix: str
    is_warning: bool = False  # whether TFLite's CPU kernels compute it as the file says

    def finding(self, **known: Any) -> Finding:
        """Return the finding on the op, of the rule's kind unless `known` has another."""
        own = {"kind": self.rule, "causes": (self.cause,), "fix": self.fix}
        return self.op.wrong(self.symptom, **own | known)


def violations_of(graph: OpGraph, op: Op) -> Iterator[RuleViolation]:
    """Yield the rule violations of one op."""
    rules = facts_of(op.name)
    if rules.source and not rules.dynamic:
        yield from _dtypes(graph, op, rules)
        yield from _same_scale(graph, op, rules)
        yield from _output_scale(graph, op, rules)
        if rules.symmetric:
            yield from _int16(graph, op)
        for place in rules.one_scale:
            tensor = graph.tensor(op, op.inputs[place])
            if tensor.is_quantized and len(tensor.scales) > 1:
                yield _several_scales(op, _operand(graph, op, place), tensor)
    if rules.dynamic:
        found = list(_weighted_dtypes(graph, op, rules))
        yield from found
        if not found:  # else the other rules are those of another kernel
            yield from _weight(graph, op, rules)
            yield from _bias(graph, op, rules)
            if op.name != "EMBEDDING_LOOKUP":
                yield from _int16(graph, op)
    yield from _shifts(graph, op)


def _data(graph: OpGraph, op: Op) -> list[tuple[str, Tensor]]:
    """Return the data operands and the outputs, each with its name."""
    inputs_of_op = {tensor.index for tensor in roles_of(graph, op).inputs}
    inputs = [
        (_operand(graph, op, place), graph.tensor(op, index))
        for place, index in enumerate(op.inputs)
        if index in inputs_of_op
    ]
    several = len(op.outputs) > 1
    outputs = [
        (f"output {place}" if several else "its output", graph.tensor(op, index))
        for place, index in enumerate(op.outputs)
    ]
    return [*inputs, *outputs]


def _operand(graph: OpGraph, op: Op, place: int) -> str:
    if (op.name, place) == ("PADV2", 2):
        return "constant_values"
    constant = graph.tensor(op, op.inputs[place]).is_constant
    return f"constant operand {place}" if constant else f"input {place}"


_DTYPE_FIX = (
    "quantize all of its operands alike, as a recipe does (recipe_static_wi8_ai8), or leave the op "
    "in float"
)


def _dtypes(graph: OpGraph, op: Op, rules: OpFacts) -> Iterator[RuleViolation]:
    data = _data(graph, op)
    quantized = {tensor.dtype for _, tensor in data if tensor.is_quantized}
    floats = [(name, t) for name, t in data if t.is_floating_point]
    for dtype in sorted(quantized.intersection(rules.without)):
        yield RuleViolation(
            DTYPES,
            op,
            f"it is quantized to {dtype}",
            f"its kernels compute {dtype} without scale and zero point",
            "leave the op in float",
        )
    known = rules.to.get(data[0][1].dtype)
    if known is not None and data[-1][1].dtype == known:
        return
    if len(quantized) > 1 or (quantized and floats):
        yield _mixed(op, data)


def _mixed(op: Op, data: Iterable[tuple[str, Tensor]]) -> RuleViolation:
    operands = ", ".join(f"{name} {tensor.dtype}" for name, tensor in data)
    return RuleViolation(
        DTYPES,
        op,
        f"its dtypes are {operands}",
        "no kernel has them together: they refuse the file, or read codes of one as another's",
        _DTYPE_FIX,
    )


_SAME_FIX = (
    "quantize them with one range (SharedQuantizationSpec in PT2E), or leave the op in float"
)


def _same_scale(graph: OpGraph, op: Op, rules: OpFacts) -> Iterator[RuleViolation]:
    output = graph.tensor(op, op.outputs[0])
    expected = qparams(output)
    if expected is None or output.dtype in rules.rescaling:
        return
    by_place = {
        place: actual
        for place in (i for i in rules.same if present(op, [i]))
        if (actual := qparams(graph.tensor(op, op.inputs[place]))) is not None
        and graph.tensor(op, op.inputs[place]).dtype == output.dtype
        and not _means_the_same(graph, op, place, output)
    }
    cause = "its kernels work on the codes and do not rescale" + (
        ", or refuse the file" if rules.refused else ""
    )
    if by_place and len(set(by_place.values())) == 1:
        [actual] = set(by_place.values())
        whose = _operand(graph, op, next(iter(by_place)))
        outputs = [qparams(graph.tensor(op, index)) for index in op.outputs]
        # TOPK_V2's second output counts, and has no scale.
        wrong = next((each for each in outputs if each and _differ(actual, each, rules)), None)
        if wrong and (text := unexpected_qparams("its output", wrong, actual, whose)):
            yield RuleViolation(SAME_SCALE, op, text, cause, _SAME_FIX)
        return
    for place, actual in by_place.items():
        name = _operand(graph, op, place)
        text = unexpected_qparams(name, actual, expected, "the output")
        if text and _differ(actual, expected, rules):
            yield RuleViolation(SAME_SCALE, op, text, cause, _SAME_FIX)


def _differ(one: tuple[float, int], other: tuple[float, int], rules: OpFacts) -> bool:
    if one[1] != other[1] or rules.refused:
        return one != other
    # Not `>`, which NaN would pass.
    return not abs(one[0] - other[0]) <= _ALIKE * abs(other[0])


def _means_the_same(graph: OpGraph, op: Op, place: int, output: Tensor) -> bool:
    """Return whether a constant's codes represent equal values in the output's parameters."""
    tensor = graph.tensor(op, op.inputs[place])
    if not tensor.is_constant or tensor.is_sparse or tensor.is_external or place == 0:
        return False
    if op.name in ("PADV2", "PACK", "CONCATENATION"):
        return False  # whose kernels compare the parameters
    own, target = qparams(tensor), qparams(output)
    assert own is not None
    assert target is not None
    if not (own[0] > 0 and target[0] > 0):
        return False
    values = dequantized(graph, op.subgraph, tensor)
    codes = values / own[0] + own[1]
    return bool(np.abs((codes - target[1]) * target[0] - values).max(initial=0.0) <= target[0] / 2)


def _output_scale(graph: OpGraph, op: Op, rules: OpFacts) -> Iterator[RuleViolation]:
    output = graph.tensor(op, op.outputs[0])
    actual, wanted = qparams(output), rules.outputs.get(output.dtype)
    if actual is None or wanted is None:
        return
    scale, zero_point = wanted
    has_scale = abs(actual[0] / scale - 1) <= rules.exact
    if zero_point == actual[1] and has_scale:
        return
    computed = has_scale and rules.moves_zero_point and output.dtype != "int16"
    text = unexpected_qparams(
        "its output", actual, (scale, zero_point), "the specification" if computed else "the kernel"
    )
    assert text is not None
    yield RuleViolation(
        OUTPUT_SCALE,
        op,
        text,
        "TFLite's specification fixes the zero point: CPU kernels also compute others, which clip "
        "values at one end, and accelerators may refuse them"
        if computed
        else "its kernels write these whatever the file says, or refuse the file",
        "give its output FixedQParamsQuantizationSpec"
        f"(scale=1/{round(1 / scale)}, zero_point={zero_point}) in PT2E, quantize by a recipe, or "
        "leave the op in float",
        is_warning=computed,
    )


def _int16(graph: OpGraph, op: Op) -> Iterator[RuleViolation]:
    for name, tensor in _data(graph, op):
        parameters = qparams(tensor)
        if tensor.dtype == "int16" and parameters is not None and parameters[1] != 0:
            yield RuleViolation(
                INT16_ZERO_POINT,
                op,
                f"{name} is int16 and has zero point {parameters[1]}, expected 0",
                "its int16 kernels ignore the zero point, or refuse the file",
                "quantize int16 activations symmetrically",
            )
            return


def _several_scales(op: Op, name: str, tensor: Tensor) -> RuleViolation:
    return RuleViolation(
        CHANNEL_AXIS,
        op,
        f"{name} has {len(tensor.scales)} scales, expected 1",
        f"its kernels of {tensor.dtype} read one scale for all values, and give other values or "
        "zeros",
        "quantize that operand per tensor, or leave the op in float",
    )


def _weighted_dtypes(graph: OpGraph, op: Op, rules: OpFacts) -> Iterator[RuleViolation]:
    if op.name == "EMBEDDING_LOOKUP":
        return  # its input counts rows, and its output may be float
    data, weight = (graph.tensor(op, op.inputs[i]) for i in (rules.inputs[0], rules.weights[0]))
    output = graph.tensor(op, op.outputs[0])
    bias = _bias_of(graph, op, rules)
    biases = [] if bias is None else [("bias", bias)]
    operands = [("input", data), ("weight", weight), *biases, ("its output", output)]
    if data.is_floating_point:
        if weight.is_quantized and weight.dtype not in rules.dynamic and weight.dtype != "int2":
            yield RuleViolation(
                DTYPES,
                op,
                f"its weight is {weight.dtype} and its input {data.dtype}",
                f"its kernels support {' and '.join(sorted(rules.dynamic))} weights with float "
                "inputs, and refuse others or read them as these",
                "quantize the weight symmetrically to int8, or leave it in float",
            )
        elif output.is_quantized or (bias is not None and not bias.is_floating_point):
            yield _mixed(op, operands)
        return
    if not data.is_quantized:
        return
    if weight.is_floating_point:
        if op.name == "BATCH_MATMUL":
            yield RuleViolation(
                DTYPES,
                op,
                f"its first operand is {data.dtype} and the second {weight.dtype}",
                "its kernels support codes with floats only as the second operand; a dynamic "
                "recipe quantizes a constant in either place",
                "compute (bᵀ aᵀ)ᵀ in place of a b in the model, or leave the op in float",
            )
        else:
            yield _mixed(op, operands)
    elif output.is_floating_point and not weight.is_constant and _of_constants(graph, op):
        yield RuleViolation(
            DTYPES,
            op,
            f"its input is {data.dtype} and its output {output.dtype}",
            "no kernel supports this; one operand is computed from constants alone (learned "
            "queries): PT2E leaves such a product in float, and the converter removes the "
            "DEQUANTIZE in front of it",
            "quantize by a recipe (recipe_static_wi8_ai8), or leave the layer that reads the "
            "constant in float",
        )
    elif (
        output.dtype not in (data.dtype, rules.to.get(data.dtype))
        or (data.dtype == "uint8") != (weight.dtype == "uint8")
        or (weight.dtype == "int16" and op.name != "BATCH_MATMUL")
        or (bias is not None and bias.dtype not in _bias_dtypes(graph, op, data))
    ):
        yield _mixed(op, operands)


def _of_constants(graph: OpGraph, op: Op) -> bool:
    """Return whether an operand is computed only from constants."""
    subgraph = graph.subgraphs[op.subgraph]
    fixed = {tensor.index for tensor in subgraph.tensors if tensor.is_constant} | {-1}
    for each in subgraph.ops[: op.index]:
        if fixed.issuperset(each.inputs):
            fixed.update(each.outputs)
    return any(index in fixed for index in op.inputs if index >= 0)


def _bias_dtypes(graph: OpGraph, op: Op, data: Tensor) -> tuple[str, ...]:
    if data.dtype != "int16":
        return ("int32",)
    # TensorType.INT32; without it the kernels read 64 bits a value.
    is_declared = graph.option(op, "QuantizedBiasType", 0) == 2
    return ("int64", "int32") if is_declared else ("int64",)


def _bias_of(graph: OpGraph, op: Op, rules: OpFacts) -> Tensor | None:
    return next((graph.tensor(op, index) for index in present(op, rules.biases)), None)


def _weight(graph: OpGraph, op: Op, rules: OpFacts) -> Iterator[RuleViolation]:
    """Check axis and zero points of a weight."""
    data, weight = (graph.tensor(op, op.inputs[i]) for i in (rules.inputs[0], rules.weights[0]))
    if not weight.is_quantized or not len(weight.scales):
        return
    dynamic = data.is_floating_point or (
        op.name == "EMBEDDING_LOOKUP" and graph.tensor(op, op.outputs[0]).is_floating_point
    )
    several = len(weight.scales) > 1
    if several:
        axis, read = weight.quantized_dimension, rules.axis
        if op.name == "BATCH_MATMUL" and dynamic:
            # With a transposed operand the axis is another, which was not tested.
            read = axis if graph.option(op, "AdjY", False) else len(weight.shape) - 1
        if op.name == "EMBEDDING_LOOKUP" and not dynamic:
            read = None
        if read is None:
            yield _several_scales(op, "its weight", weight)
        elif axis != read:
            yield RuleViolation(
                CHANNEL_AXIS,
                op,
                f"its weight's scales lie along axis {axis}, expected axis {read}",
                f"its kernels read one scale for each index of axis {read}, or refuse the file",
                f"quantize the weight along axis {read}, that of its output channels",
            )
    if not weight.zero_points.any() or (data.dtype == "uint8" and not several):
        return
    if op.name == "EMBEDDING_LOOKUP" and not dynamic:
        return  # it copies codes
    known = not several and not dynamic and weight.dtype == "int8"
    known = known and data.dtype in rules.zero_point
    if known and (op.name == "BATCH_MATMUL" or not weight.is_constant):
        return  # of two activations each has one
    yield _asymmetric(graph, op, weight, is_warning=known)


def _asymmetric(graph: OpGraph, op: Op, weight: Tensor, *, is_warning: bool) -> RuleViolation:
    point = int(weight.zero_points[weight.zero_points != 0][0])
    cause = "its kernels take 0 whatever the file says, or refuse the file"
    fix = "quantize the weight symmetrically"
    if is_warning:
        cause = (
            "TFLite's CPU kernels compute it, but the specification demands 0, so accelerators may "
            "refuse the file or leave it out"
        )
    elif op.name == "EMBEDDING_LOOKUP":
        fix = (
            "dynamic PT2E quantization writes such tables, even if its config leaves the embedding "
            "out: quantize the model by a recipe (recipe_dynamic_wi8_afp32), or statically "
            "(pt2e_static_int8), which keeps the table in float"
        )
    elif not weight.is_constant:
        fix = (
            "the weight is computed, and has the range of an activation: hold it in a buffer of "
            "the module, which is quantized as a weight, or leave the op in float"
        )
    symptom = f"its weight has zero point {point}, expected 0".replace("-", "−")
    return RuleViolation(WEIGHT_ZERO_POINT, op, symptom, cause, fix, is_warning)


def _bias(graph: OpGraph, op: Op, rules: OpFacts) -> Iterator[RuleViolation]:
    bias = _bias_of(graph, op, rules)
    data, weight = (graph.tensor(op, op.inputs[i]) for i in (rules.inputs[0], rules.weights[0]))
    if bias is None or not bias.is_quantized or not data.is_quantized:
        return
    if bias.zero_points.any():
        point = int(bias.zero_points[bias.zero_points != 0][0])
        yield RuleViolation(
            BIAS_SCALE,
            op,
            f"its bias has zero point {point}, expected 0",
            "its kernels take 0 whatever the file says, or refuse the file",
            "write the bias with zero point 0",
        )
    parameters = qparams(data)
    if parameters is None or not len(weight.scales):
        return
    product = weight.scales.astype(np.float64) * parameters[0]
    if len(bias.scales) not in (1, len(product)) and len(product) != 1:
        return  # `verify` has checked their number
    if bias.is_constant and not bias.is_external and not graph.stored(bias).any():
        return  # zeros of any scale, which TensorFlow shares between convolutions without a bias
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (bias.scales / product).reshape(-1)
    wrong = ~(np.abs(ratios - 1) <= _OBSERVED)
    if wrong.any():
        # The converter (litert-torch 0.10.0) writes it so: the kernels add as much more or less.
        shared = is_shared(graph, op, data.index)
        yield RuleViolation(
            BIAS_SCALE,
            op,
            f"its bias has {ratio_text(float(ratios[wrong][0]))} × the scale of its input × that "
            "of its weight",
            "the kernels add the bias's codes as multiples of input scale × weight scale, and do "
            "not look at its own",
            "write the bias with scale = input scale × weight scale",
            is_warning=shared,
        )


def is_shared(
    graph: OpGraph, op: Op, index: int, chosen: Collection[tuple[float, int]] = ()
) -> bool:
    """
    Return whether an op's input has another consumer that keeps its scale.

    The converter (litert-torch 0.10.0) sets the input's scale to that of such a pool or resize, but
    leaves the bias of a convolution on that input quantized for the observed scale. If that scale
    is one that the quantizer has chosen, the other consumer's output need not have it as well.
    """
    subgraph = graph.subgraphs[op.subgraph]
    above = {op.index}
    own = qparams(subgraph.tensors[index])
    stored = [(float(np.float32(scale)), zero_point) for scale, zero_point in chosen]
    while True:
        others = (each for each in subgraph.ops if index in each.inputs)
        keeping = [o for o in others if o.name in KEEPING_SCALE and o.index not in above]
        if any(qparams(subgraph.tensors[each.outputs[0]]) == own for each in keeping):
            return True
        if keeping and qparams(subgraph.tensors[index]) in stored:
            return True
        maker = subgraph.producer.get(index)
        if maker is None or maker.name not in MOVING or not passes_codes_through(graph, maker):
            return False
        index = maker.inputs[0]
        above.add(maker.index)


def passes_codes_through(graph: OpGraph, op: Op) -> bool:
    """Return whether an op passes its input's codes and scale through unchanged."""
    if op.name not in KEEPING_SCALE:
        return False
    source, result = graph.tensor(op, op.inputs[0]), graph.tensor(op, op.outputs[0])
    same = np.array_equal(source.scales, result.scales)
    return same and np.array_equal(source.zero_points, result.zero_points)


def _shifts(graph: OpGraph, op: Op) -> Iterator[RuleViolation]:
    """Check int16 ADD and SUB, which shift if all scales are powers of two."""
    if op.name not in ("ADD", "SUB"):
        return
    tensors = [graph.tensor(op, index) for index in (*op.inputs[:2], op.outputs[0])]
    parameters = [qparams(tensor) for tensor in tensors if tensor.dtype == "int16"]
    scales = [each[0] for each in parameters if each is not None]
    shifts = len(scales) == 3 and all(map(is_power_of_two, scales))
    if not shifts or not graph.option(op, "PotScaleInt16", False):
        return
    first, second, output = (round(math.log2(scale)) for scale in scales)
    if max(first, second) == output:
        return
    yield RuleViolation(
        POWER_OF_TWO,
        op,
        f"its scales are 2^{first} and 2^{second}, and its output's 2^{output}, expected "
        f"2^{max(first, second)}",
        "the kernels shift where all scales are powers of two, and refuse a file whose output "
        "scale is not the greater input scale",
        "give its output that scale, or set pot_scale_int16 of the op to false",
    )


def is_power_of_two(scale: float) -> bool:
    """Return whether `CheckedLog2` in quantization_util.cc accepts a scale as a power of two."""
    if scale <= 0:
        return False
    power = math.log2(scale)
    return abs(power - round(power)) < 1e-3
