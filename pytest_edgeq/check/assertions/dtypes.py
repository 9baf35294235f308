"""Assert dtypes of inputs, outputs and ops, and how many ops there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pytest_edgeq.check.assertions.expect import (
    Dtype,
    DtypeByName,
    Model,
    edge_of,
    failed,
    granularities,
    known_op,
    op_of,
    parse_count,
    parse_dtype,
    parse_granularity,
    require_names,
    require_needed,
    select_ops,
    spread,
    table,
)
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.errors import UnmatchedError
from pytest_edgeq.litert.rules import static_recipe_ops
from pytest_edgeq.names import nearest
from pytest_edgeq.numerics.findings import UNEXPECTED_COUNT, UNEXPECTED_DTYPE, Finding, Place
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.op_dtypes import SCHEMES, OpDtypes
from pytest_edgeq.tflite.ops import QDQ, facts_of
from pytest_edgeq.tflite.roles import roles_of


class _Why(NamedTuple):
    """Why ops are in float."""

    cause: str
    fix: str = ""  # how to quantize them; empty if nothing is wrong with the flow
    by_design: bool = False


_NOTHING_QUANTIZED = _Why(
    "no op of this file is quantized; it is a float model. Was it built with the quantizer, and is "
    "it the file that you mean?",
    by_design=True,
)
_FLOAT_BY_DESIGN = _Why(
    "the schemes dynamic, weight_only and float16 store small weights and compute on floats by "
    "design; assert them with assert_op_dtypes(model, op, scheme=…), or quantize statically.",
    by_design=True,
)
_ELSEWHERE = _Why(
    "the tool that made the file has no pattern for {ops}, or their operands are in float; PT2E "
    "finds no ADD, MUL and CONCATENATION in a model that was exported non-strictly.",
    "configure that tool to quantize {them}.",
)
_BY_PT2E = _Why(
    "the PT2E quantizer does not annotate {ops}, or their operands are in float.",
    "{recipe}have a subclass of the quantizer annotate {them}, or replace {them} in the model.",
)
_NON_STRICT = _Why(
    "the model was exported non-strictly, and PT2E then finds no ADD, MUL and CONCATENATION.",
    "quantize with strict_export=True, which is the default (an exported program: export it with "
    "strict=True); where a warning says that torch.export refuses it, quantize by a recipe "
    "(recipe_static_wi8_ai8).",
)
_BY_RECIPE = _Why(
    "no rule of the recipe covers {ops}, or their operands are in float.",
    'give the recipe a rule with operation="*"; if it has one, replace {them} in the model.',
)
_NO_RECIPE = _Why(
    "ai-edge-quantizer has no static quantization for {ops}, whatever the recipe.",
    "replace {them} in the model by ops that it quantizes.",
)
_ON_PURPOSE = (
    "the quantizer leaves {modules} in float, by a config of None or a rule of no_quantize."
)

_ENDS_DECIDE = _Why(
    "the first and the last op decide. A model that starts with an op that stays in float has "
    "float inputs, one that ends in such an op (softmax, tanh, a normalization) float outputs; the "
    "caller on the device must feed and read exactly these dtypes."
)
_INT32 = _Why(
    "litert-torch lowers by way of JAX with 64-bit types off (enable_x64=False), so the file has "
    "int32 where the model has int64.",
    "pass int32 on the device, in which token ids and indices fit; tests pass torch's int64, "
    "and quantized.run converts it.",
)
_UINT8 = _Why(
    "the quantizers of torch write int8. Its codes are those of uint8 less 128, with the same "
    "scale and a zero point that is 128 less, so that the caller can turn one into the other: "
    "(codes.astype('int16') - 128).astype('int8'), and + 128 the other way."
)
_CHOSEN = _Why(
    "the quantizer's config, or the release that read it, chose otherwise for these ops; kernels "
    "and delegates are picked by exactly these dtypes."
)
# By the expected dtype and the file's.
_IO_CAUSES = {("int64", "int32"): _INT32, ("uint8", "int8"): _UINT8}


def assert_input_dtypes(model: Model, expected: DtypeByName) -> None:
    """
    Assert the dtypes of the file's inputs, as stored.

    Args:
        model: QuantizedModel, path or bytes.
        expected: One dtype for all, a sequence in order, or a dict by name (None: any dtype). In a
            file with several signatures the names are `<signature>:<name>`.

    Raises:
        AssertionError: A dtype differs, or the names or their number do not match.
        ValueError, TypeError: Not a dtype, nothing is expected, or not a model.
    """
    _assert_io_dtypes(edge_of(model), expected, "input")


def assert_output_dtypes(model: Model, expected: DtypeByName) -> None:
    """
    Assert the dtypes of the file's outputs, as stored.

    Args:
        model: QuantizedModel, path or bytes.
        expected: One dtype for all, a sequence in order, or a dict by name (None: any dtype). In a
            file with several signatures the names are `<signature>:<name>`.

    Raises:
        AssertionError: A dtype differs, or the names or their number do not match.
        ValueError, TypeError: Not a dtype, nothing is expected, or not a model.
    """
    _assert_io_dtypes(edge_of(model), expected, "output")


def _assert_io_dtypes(
    edge: EdgeFile, expected: DtypeByName, what: Literal["input", "output"]
) -> None:
    # Of several signatures, names say which.
    several = len(edge.signatures) > 1
    actual = [
        (f"{signature.key}:{io_tensor.name}" if several else io_tensor.name, io_tensor.tensor.dtype)
        for signature in edge.signatures
        for io_tensor in getattr(signature, f"{what}s")
    ]
    names, dtypes = [name for name, _ in actual], [dtype for _, dtype in actual]
    wanted = ["any" if e is None else parse_dtype(e) for e in spread(expected, names, what)]
    rows = list(zip(names, wanted, dtypes, strict=True))
    wrong = [row for row in rows if row[1] not in ("any", row[2])]
    if not wrong:
        return
    name, dtype, got = wrong[0]
    accepted: Any = dict(actual) if len(set(names)) == len(names) else dtypes
    accepted = dtypes[0] if len(set(dtypes)) == 1 else accepted
    place, why = Place(what, name), _IO_CAUSES.get((dtype, got), _ENDS_DECIDE)
    # A file may have thousands: differing ones come first.
    shown = [*wrong, *(row for row in rows if row not in wrong)]
    raise failed(
        Finding(
            kind=UNEXPECTED_DTYPE,
            place=place,
            expected=dtype,
            got=got,
            headline=f"{place}: expected {dtype}, got {got} ({len(wrong)} of {len(rows)} {what}s)",
            evidence=table(shown, (what, "expected", "got")),
            causes=(why.cause,),
            fix=why.fix,
            command=f"assert_{what}_dtypes(model, {accepted!r})",
        )
    )


def assert_op_dtypes(
    model: Model,
    op: str,
    *,
    input: Dtype | Sequence[Dtype] | None = None,
    weight: Dtype | None = None,
    bias: Dtype | None = None,
    output: Dtype | Sequence[Dtype] | None = None,
    scheme: str | None = None,
    granularity: str | None = None,
    module: str | None = None,
    count: int | None = None,
) -> None:
    """
    Assert dtypes, scheme and granularity of every op of one kind.

    Args:
        model: QuantizedModel, path or bytes.
        op: The operator's name in TFLite, for instance `CONV_2D`.
        input: dtype of every data operand, or a sequence in order.
        weight: dtype of the weight as stored.
        bias: dtype of the bias as stored.
        output: dtype of every result, or a sequence in order.
        scheme: One of `pytest_edgeq.tflite.op_dtypes.SCHEMES`.
        granularity: Of the weight: `per_tensor`, `per_channel` or `blockwise_<size>`. A weight with
            a single channel is both of the first two.
        module: A glob on the torch module path that selects ops. An op whose module is unknown
            matches none: pass `count`, too, if all must be found.
        count: How many such ops there must be, 1 or more; `assert_op_counts` asserts that there is
            none.

    Raises:
        AssertionError: An op differs, or none matches.
        ValueError, TypeError: Nothing is expected, or not a dtype, scheme or operator.
    """
    if scheme is not None and scheme not in SCHEMES:
        raise ValueError(
            f"unknown scheme {scheme!r}{nearest(str(scheme), SCHEMES)}; valid: {', '.join(SCHEMES)}"
        )
    asked: dict[str, Any] = {
        role: _parsed(role, value)
        for role, value in (
            ("input", input),
            ("weight", weight),
            ("bias", bias),
            ("output", output),
            ("granularity", granularity),
            ("scheme", scheme),
        )
        if value is not None
    }
    if not asked and count is None:
        raise ValueError(
            f"assert_op_dtypes(model, {op!r}) expects nothing: give input=, weight=, bias=, "
            "output=, scheme=, granularity= or count="
        )
    if count is not None and (count := parse_count("count", count)) == 0:
        raise ValueError(
            f"count=0: there is no op to check; write assert_op_counts(model, {{{op!r}: 0}})"
        )
    # An op of None would match every op.
    known_op(op)
    edge = edge_of(model)
    entries = select_ops(edge, op, module)
    if count is not None and len(entries) != count:
        among = f" with module={module!r}" if module is not None else ""
        counts = sorted(edge.op_dtypes.counts().items(), key=lambda each: -each[1])
        more = f" and {len(counts) - 8} more kinds" if len(counts) > 8 else ""
        raise failed(
            Finding(
                kind=UNEXPECTED_COUNT,
                place=Place("op", op),
                expected=str(count),
                got=f"{len(entries)}{among}",
                evidence=table([(e.where, e.scheme) for e in entries], ("op", "scheme")),
                causes=(
                    "the converter fuses, splits and drops ops, and a changed model has others; "
                    f"the file has {', '.join(f'{n} {name}' for name, n in counts[:8])}{more}",
                ),
                command=f"count={len(entries)}",
            )
        )
    wrong = [
        (entry, role, ", ".join(value) if isinstance(value, tuple) else str(value), actual)
        for entry in entries
        for role, value in asked.items()
        for meets, actual in (_meets(edge, entry, role, value),)
        if not meets
    ]
    if not wrong:
        return
    entry, role, value, actual = wrong[0]
    says = f"{role}: expected {value}, got {actual}"
    n_ops = len({(e.subgraph, e.index) for e, *_ in wrong})
    floats = [e for e, *_ in wrong if e.scheme == "float"]
    why = _why_float(model, edge, floats) if floats else _CHOSEN
    raise failed(
        Finding(
            kind=UNEXPECTED_DTYPE,
            place=entry.place,
            expected=value,
            got=actual,
            symptom=says,
            headline=f"{entry.where} {says} ({n_ops} of {len(entries)} {op})",
            evidence=table(
                [(e.where, *row) for e, *row in wrong], ("op", "field", "expected", "got")
            ),
            causes=(why.cause,),
            fix=why.fix,
            command="expect what the table shows, or narrow with module='glob'; to see all ops: "
            "for op in model.op_dtypes: print(op)",
        )
    )


def _parsed(role: str, expected: Any) -> Any:
    if role == "scheme":
        return expected
    if role == "granularity":
        return parse_granularity(expected)
    if role in ("input", "output") and isinstance(expected, (tuple, list)):
        if not expected:
            raise ValueError(f"{role}: an empty sequence expects nothing")
        return tuple(parse_dtype(dtype) for dtype in expected)
    return parse_dtype(expected)


def _meets(edge: EdgeFile, entry: OpDtypes, role: str, expected: Any) -> tuple[bool, str]:
    """Return whether a field of an op is as expected, and its actual value."""
    if role in ("input", "output"):
        actual = entry.inputs if role == "input" else entry.outputs
        if isinstance(expected, tuple):
            return actual == expected, ", ".join(actual) or f"no {role}"
        distinct = dict.fromkeys(actual)
        listed = ", ".join(distinct if len(distinct) < 2 else actual)
        return list(distinct) == [expected], listed or f"no {role}"
    if role == "granularity":
        op = op_of(edge, entry)
        names = [granularities(edge, op, w.tensor) for w in roles_of(edge.graph, op).weights]
        listed = " and ".join(
            sorted({" or ".join(name) or f"none ({entry.weight})" for name in names})
        )
        return bool(names) and all(expected in name for name in names), listed or "no weight"
    value = getattr(entry, role)
    return value == expected, str(value or f"no {role}")


def assert_op_counts(model: Model, expected: Mapping[str, int]) -> None:
    """
    Assert how many ops of some kinds the file has, over all its subgraphs.

    Args:
        model: QuantizedModel, path or bytes.
        expected: Count by the operator's name in TFLite; 0 asserts that there is none. `CUSTOM` is
            every custom op together, `CUSTOM:<code>` those of one code.

    Raises:
        AssertionError: A count differs.
        ValueError, TypeError: No operator of that name in TFLite, or not a count.
    """
    if not isinstance(expected, Mapping):
        raise TypeError(f"expected a dict such as {{'CONV_2D': 4}}, got {expected!r}")
    if not expected:
        raise ValueError("assert_op_counts(model, {}) expects nothing; give {'CONV_2D': 4}")
    wanted = {known_op(op): parse_count(op, count) for op, count in expected.items()}
    edge = edge_of(model)
    found = {
        op: [e for e in edge.op_dtypes if op in (e.op, e.op.partition(":")[0])] for op in wanted
    }
    wrong = [(op, n, len(found[op])) for op, n in wanted.items() if len(found[op]) != n]
    if not wrong:
        return
    op, count, actual = wrong[0]
    where = [(e.where, e.scheme) for op, *_ in wrong for e in found[op]]
    counts = ", ".join(f"{name} {n}" for name, n in edge.op_dtypes.counts().items())
    raise failed(
        Finding(
            kind=UNEXPECTED_COUNT,
            place=Place("op", op),
            expected=str(count),
            got=str(actual),
            headline=f"{op}: expected {count}, got {actual} ({len(wrong)} of {len(wanted)} counts "
            "differ)",
            evidence=(
                *table(wrong, ("op", "expected", "got")),
                *(("their places:", *table(where, ("op", "scheme"))) if where else ()),
                f"all counts: {counts or 'no op'}",
            ),
            causes=(
                "QUANTIZE and DEQUANTIZE are inserted where integer and float ops meet: another "
                "count means that an op changed between integer and float."
                if any(op in QDQ for op, *_ in wrong)
                else "the converter fuses, splits and drops ops, and a changed model has others.",
            ),
            command=", ".join(f"{op!r}: {n}" for op, _, n in wrong),
        )
    )


def assert_no_float_ops(model: Model, allow: Sequence[str] = ()) -> None:
    """
    Assert that no op has float operands or results.

    QUANTIZE and DEQUANTIZE are the boundaries of a float region and not counted themselves: count
    them with `assert_op_counts`. Ops of the schemes `dynamic`, `weight_only` and `float16` compute
    on floats, too; assert those with `assert_op_dtypes(model, op, scheme=…)`.

    Args:
        model: QuantizedModel, path or bytes.
        allow: Operators to ignore.

    Raises:
        AssertionError: An op has float operands or results, or an entry of `allow` was not needed.
        ValueError, TypeError: No operator of that name in TFLite.
    """
    require_names(allow)
    allowed = tuple(known_op(op) for op in allow)
    edge = edge_of(model)
    entries = [entry for entry in edge.op_dtypes if entry.op not in QDQ]
    if not entries:
        raise UnmatchedError(
            f"the model has no op but {edge.op_dtypes.counts() or 'none at all'}: there is nothing "
            "to check"
        )
    floats = {entry: dtypes for entry in entries if (dtypes := _floats(edge, entry))}
    kinds = sorted({entry.op for entry in floats})
    require_needed(allowed, kinds, "float op (QUANTIZE and DEQUANTIZE are never counted)")
    wrong = {entry: dtypes for entry, dtypes in floats.items() if entry.op not in allowed}
    if not wrong:
        return
    first, dtypes = next(iter(wrong.items()))
    why = _why_float(model, edge, list(wrong))
    got = " and ".join(dtypes)
    rows = [(e.where, ", ".join(e.inputs), ", ".join(e.outputs), e.scheme) for e in wrong]
    raise failed(
        Finding(
            kind=UNEXPECTED_DTYPE,
            place=first.place,
            expected="no float",
            got=got,
            headline=f"{first.where}: expected no float, got {got} "
            f"({len(wrong)} of {len(entries)} ops that compute)",
            evidence=table(rows, ("op", "inputs", "outputs", "scheme")),
            causes=(why.cause,),
            fix=why.fix,
            # For a file in float by design it would allow every op.
            command="" if why.by_design else f"allow={tuple(kinds)!r}",
        )
    )


def _floats(edge: EdgeFile, entry: OpDtypes) -> tuple[str, ...]:
    """Return the float dtypes among all operands and results of an op."""
    op = op_of(edge, entry)
    tensors = (edge.graph.tensor(op, index) for index in (*op.inputs, *op.outputs) if index >= 0)
    return tuple(dict.fromkeys(tensor.dtype for tensor in tensors if tensor.is_floating_point))


def _why_float(model: Model, edge: EdgeFile, wrong: Sequence[OpDtypes]) -> _Why:
    """Return why ops are in float, and how to quantize them."""
    schemes = {entry.scheme for entry in edge.op_dtypes} - {"integer"}
    if schemes == {"float"}:
        return _NOTHING_QUANTIZED
    if any(entry.scheme in ("dynamic", "weight_only", "float16") for entry in wrong):
        return _FLOAT_BY_DESIGN
    known = model if isinstance(model, QuantizedModel) and model.origin is None else None
    flow = "" if known is None else known.flow
    meant = frozenset[str]() if known is None else known.left_in_float
    on_purpose = [entry for entry in wrong if entry.module in meant]
    # A TRANSPOSE of the converter's, of no module, follows its operand.
    others = [
        entry
        for entry in wrong
        if entry.module not in meant and not (on_purpose and entry.module is None)
    ]
    if not others:
        modules = list(dict.fromkeys(str(entry.module) for entry in on_purpose))
        return _Why(_ON_PURPOSE.format(modules=_some(modules, "modules")))
    # In the order of the file: the first has often made the others float.
    kinds = list(dict.fromkeys(entry.op for entry in others))
    taken = [kind for kind in kinds if kind in static_recipe_ops()] if known is not None else []
    if flow == "recipe":
        return _formatted(_BY_RECIPE if taken else _NO_RECIPE, kinds)
    if known is None or flow != "pt2e":
        return _formatted(_ELSEWHERE, kinds)
    if not known.exported_strictly and all(facts_of(kind).needs_strict for kind in kinds):
        return _NON_STRICT
    recipe = (
        f"quantize by recipe_static_wi8_ai8, which quantizes {_some(taken)}; or " if taken else ""
    )
    return _formatted(_BY_PT2E, kinds, recipe=recipe)


def _formatted(why: _Why, kinds: Sequence[str], **more: str) -> _Why:
    names = {"ops": _some(kinds), "them": "them" if len(kinds) > 1 else "it", **more}
    return _Why(why.cause.format(**names), why.fix.format(**names))


def _some(names: Sequence[str], what: str = "kinds") -> str:
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} other {what}"
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
