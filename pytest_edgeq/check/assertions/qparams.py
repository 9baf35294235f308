"""Assert quantization parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.check.assertions.expect import (
    Model,
    edge_of,
    failed,
    granularities,
    op_of,
    parse_count,
    parse_granularity,
    parse_number,
    select_ops,
    table,
)
from pytest_edgeq.errors import UnmatchedError
from pytest_edgeq.names import nearest
from pytest_edgeq.numerics.findings import UNEXPECTED_QPARAMS, Finding
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.boundary import code_range
from pytest_edgeq.tflite.op_dtypes import OpDtypes
from pytest_edgeq.tflite.ops import QDQ, facts_of
from pytest_edgeq.tflite.roles import roles_of
from pytest_edgeq.tflite.subgraph import Op, Tensor

_ROLES = ("weight", "bias", "input", "output")

_WHOLE_BYTES = ("int8", "uint8", "int16", "int32", "int64")

_WHY = {
    "quantized": "this operand is stored without a scale: it was not quantized at all.",
    "symmetric": "int8 kernels take weights with zero point 0 only; a delegate may refuse or "
    "misread others.",
    "zero_point": "some kernels fix it (−128 for the output of int8 softmax), and the code on the "
    "device may have it built in.",
    "granularity": "one scale for all channels costs accuracy where their ranges differ; a scale "
    "for each channel is refused by some delegates.",
    "scale_range": "a scale out of range comes from outliers in the calibration data, or from no "
    "calibration; a scale of 0 is never right; print(edgeq.localize(model, samples)) shows whether "
    "values fill the range.",
    "shared_with": "these operands are added, joined or compared as codes, without rescaling.",
}


def assert_qparams(
    model: Model,
    op: str | None = None,
    module: str | None = None,
    role: str = "weight",
    *,
    symmetric: bool | None = None,
    zero_point: int | None = None,
    granularity: str | None = None,
    scale_range: tuple[float, float] | None = None,
    shared_with: str | None = None,
) -> None:
    """
    Assert quantization parameters of one operand of the chosen ops.

    Args:
        model: QuantizedModel, path or bytes.
        op: The operator's name in TFLite; None for every op that has the operand, QUANTIZE and
            DEQUANTIZE aside.
        module: A glob on the torch module path. An op whose module is not known matches none.
        role: `weight`, `bias`, `input` or `output`. Optional biases that were left out are not
            looked at.
        symmetric: True: every zero point is 0; False: one is not.
        zero_point: What every zero point must be.
        granularity: `per_tensor`, `per_channel` or `blockwise_<size>`.
        scale_range: Least and greatest scale allowed, both inclusive; 0 itself never is.
        shared_with: A glob on the module path of other ops whose same operand must have the very
            same dtype, scales and zero points.

    Raises:
        AssertionError: A parameter differs, an operand is not quantized, or nothing matches.
        ValueError, TypeError: Nothing is expected, or an argument is of the wrong kind.
    """
    if role not in _ROLES:
        raise ValueError(
            f"unknown role {role!r}{nearest(str(role), _ROLES)}; valid: {', '.join(_ROLES)}"
        )
    checks: list[_Check] = []
    if symmetric is not None:
        if not isinstance(symmetric, (bool, np.bool_)):
            raise TypeError(f"symmetric: expected True or False, got {symmetric!r}")
        expected = "zero point 0" if symmetric else "a zero point other than 0"
        checks.append(
            ("symmetric", expected, lambda o: o.zeros * bool(o.zero_points.any() == symmetric))
        )
    if zero_point is not None:
        wanted = parse_count("zero_point", zero_point, least=-(2**31))
        checks.append(
            ("zero_point", str(wanted), lambda o: o.zeros * bool((o.zero_points != wanted).any()))
        )
    if granularity is not None:
        name = parse_granularity(granularity)
        checks.append(
            (
                "granularity",
                name,
                lambda o: (" or ".join(o.names) or "none") * (name not in o.names),
            )
        )
    if scale_range is not None:
        low, high = _bounds(scale_range)
        checks.append(
            ("scale_range", f"{low:.6g} … {high:.6g}", lambda o: _out_of_range(o, low, high))
        )
    if not checks and shared_with is None:
        raise ValueError(
            "assert_qparams expects nothing: give symmetric=, zero_point=, granularity=, "
            "scale_range= or shared_with="
        )
    edge = edge_of(model)
    chosen = _operands(edge, op, module, role)
    if shared_with is not None:
        others = _operands(edge, op, shared_with, role)
        chosen += others
        if len({(operand.op.where, id(operand.tensor)) for operand in chosen}) < 2:
            raise UnmatchedError(
                f"shared_with={shared_with!r} matches {chosen[0].op.where} itself and no other op: "
                "there is nothing to share with"
            )
        first = others[0]
        expected = f"{first.description} as {first.op.where}"
        checks.append(("shared_with", expected, lambda o: _unshared(first, o)))
    narrow = {"op='CONV_2D'": op, "module='glob'": module}
    _require(chosen, checks, role, [way for way, given in narrow.items() if given is None])


@dataclass(frozen=True, slots=True, eq=False)
class _Operand:
    """An operand of one op; `tensor` is None if it is missing."""

    op: OpDtypes
    tensor: Tensor | None
    scales: npt.NDArray[np.float32]
    zero_points: npt.NDArray[np.int64]
    names: tuple[str, ...]  # of its granularity

    @property
    def description(self) -> str:
        """Its parameters in few words."""
        if self.tensor is None or not self.tensor.is_quantized:
            return "not quantized"
        return f"{self.tensor.dtype}, {_several('scale', self.scales)}, {self.zeros}"

    @property
    def zeros(self) -> str:
        """Its zero points in few words."""
        return _several("zero point", self.zero_points)


_Check = tuple[str, str, Callable[[_Operand], str]]
"""An expectation: its name, what is expected, and the actual value of an operand if it is wrong."""


def _require(chosen: list[_Operand], checks: list[_Check], role: str, narrow: list[str]) -> None:
    wrong = []
    # With shared_with an operand may be chosen twice.
    for operand in {(o.op.where, id(o.tensor)): o for o in chosen}.values():
        if operand.tensor is None:
            wrong.append((operand.op, "quantized", f"a {role} in the file", "none"))
        elif not operand.tensor.is_quantized or not len(operand.scales):
            has = operand.tensor.dtype if not operand.tensor.is_quantized else "no scales"
            wrong.append((operand.op, "quantized", "a scale", has))
        else:
            wrong += [
                (operand.op, name, expected, actual)
                for name, expected, check in checks
                if (actual := check(operand))
            ]
    if not wrong:
        return
    op, name, expected, actual = wrong[0]
    rows = [(each.where, *row) for each, *row in wrong]
    n_wrong, n_ops = len({row[0] for row in rows}), len({operand.op.where for operand in chosen})
    says = f"{role} {name}: expected {expected}, got {actual}"
    found = Finding(
        kind=UNEXPECTED_QPARAMS,
        place=op.place,
        expected=expected,
        got=actual,
        symptom=says,
        headline=f"{op.where} {says} ({n_wrong} of {n_ops} ops)",
        evidence=table(rows, ("op", "parameter", "expected", "got")),
        causes=tuple(f"{each}: {_WHY[each]}" for each in dict.fromkeys(row[1] for row in rows)),
        command="expect what the file has.",
    )
    narrowed = f"to narrow: {', '.join(narrow)}; " if narrow and n_ops > 1 else ""
    raise failed(found, f"{narrowed}update: {found.command}")


def _operands(edge: EdgeFile, op: str | None, module: str | None, role: str) -> list[_Operand]:
    found = []
    for entry in select_ops(edge, op, module):
        if op is None and entry.op in QDQ:
            continue
        raw = op_of(edge, entry)
        roles = roles_of(edge.graph, raw)
        tensors = {
            "weight": [stored.tensor for stored in roles.weights],
            "bias": [stored.tensor for stored in roles.biases],
            "input": list(roles.inputs),
            "output": list(roles.outputs),
        }[role]
        for tensor in tensors:
            scales = edge.graph.scales(raw.subgraph, tensor)
            zero_points = _zero_points(edge, raw, tensor)
            names = granularities(edge, raw, tensor)
            found.append(_Operand(entry, tensor, scales, zero_points, names))
        # An op whose weight is computed at run time is no error.
        wanted = op is not None and role != "bias" and not facts_of(op).computed_weight
        if wanted and not tensors:
            none = np.empty(0)
            found.append(_Operand(entry, None, none.astype("f4"), none.astype("i8"), ()))
    if not any(operand.tensor is not None for operand in found):
        narrowed = f" in {module!r}" if module is not None else ""
        raise UnmatchedError(f"no {op or 'op'}{narrowed} has a {role}: there is nothing to check")
    return found


def _zero_points(edge: EdgeFile, op: Op, tensor: Tensor) -> npt.NDArray[np.int64]:
    """Return the zero points; of blocks those in the tensor that the file names."""
    if tensor.block_scales < 0:
        return tensor.zero_points
    if tensor.block_zero_points < 0:
        return np.zeros(1, np.int64)
    holder = edge.graph.tensor(op, tensor.block_zero_points)
    if not holder.is_constant or holder.dtype not in _WHOLE_BYTES:
        raise ValueError(
            f"the zero points of {tensor.name!r} are kept in a tensor of dtype {holder.dtype} that "
            "cannot be read here"
        )
    return edge.graph.constant(holder).view(np.dtype(holder.dtype)).astype(np.int64)


def _several(what: str, values: npt.NDArray[Any]) -> str:
    if not len(values):
        return f"no {what}"
    least, most = float(values.min()), float(values.max())
    if least == most:
        return f"{what} {least:.6g}"
    return f"{len(values)} {what}s {least:.6g} … {most:.6g}"


def _bounds(bounds: Any) -> tuple[float, float]:
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise TypeError(f"scale_range: expected (least, greatest), got {bounds!r}")
    low, high = (parse_number("scale_range", bound) for bound in bounds)
    if not 0 <= low <= high < math.inf:
        raise ValueError(f"scale_range: expected 0 ≤ least ≤ greatest < inf, got {bounds!r}")
    return low, high


def _out_of_range(operand: _Operand, low: float, high: float) -> str:
    """Return the scales unless all are within bounds and above 0, and what they reach."""
    scales = operand.scales.astype(np.float64)
    # Written so that NaN fails it.
    inside = (low <= scales) & (scales <= high) & (scales > 0)
    if inside.all():
        return ""
    reach = ""
    if len(scales) > 1:
        reach = f" ({int((~inside).sum())} of {len(scales)} outside)"
    elif operand.tensor is not None and len(scales) == len(operand.zero_points) == 1:
        ends = np.array(code_range(operand.tensor.dtype)) - operand.zero_points[0]
        least, most = ends * scales[0]
        reach = f", range [{least:.3g}, {most:.3g}]"
    return _several("scale", scales) + reach


def _unshared(first: _Operand, operand: _Operand) -> str:
    """Return an operand's parameters unless they are those of the first."""
    one, two = first.tensor, operand.tensor
    assert two is not None, "unreachable because missing operands are reported before"
    if (
        one is not None
        and one.dtype == two.dtype
        and np.array_equal(first.scales, operand.scales)
        and np.array_equal(first.zero_points, operand.zero_points)
    ):
        return ""
    if one is not None and len(first.scales) == len(operand.scales) > 1:
        n = int(np.sum(first.scales != operand.scales))
        return f"{operand.description} ({n} of {len(first.scales)} scales differ)"
    return operand.description
