"""Explain why ops are in float, and how to quantize them, by the flow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pytest_edgeq.check.assertions.expect import Model
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.litert.rules import static_recipe_ops
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.op_dtypes import OpDtypes
from pytest_edgeq.tflite.ops import facts_of


class Why(NamedTuple):
    """Why ops are in float."""

    cause: str
    fix: str = ""  # how to quantize them; empty if nothing is wrong with the flow
    by_design: bool = False


_NOTHING_QUANTIZED = Why(
    "no op of this file is quantized; it is a float model. Was it built with the quantizer, and is "
    "it the file that you mean?",
    by_design=True,
)
_FLOAT_BY_DESIGN = Why(
    "the schemes dynamic, weight_only and float16 store small weights and compute on floats by "
    "design; assert them with assert_op_dtypes(model, op, scheme=…), or quantize statically.",
    by_design=True,
)
_ELSEWHERE = Why(
    "the tool that made the file has no pattern for {ops}, or their operands are in float; PT2E "
    "finds no ADD, MUL and CONCATENATION in a model that was exported non-strictly.",
    "configure that tool to quantize {them}.",
)
_BY_PT2E = Why(
    "the PT2E quantizer does not annotate {ops}, or their operands are in float.",
    "{recipe}have a subclass of the quantizer annotate {them}, or take another op in the model.",
)
_NON_STRICT = Why(
    "the model was exported non-strictly, and PT2E then finds no ADD, MUL and CONCATENATION.",
    "quantize with strict_export=True, which is the default (an exported program: export it with "
    "strict=True); where a warning says that torch.export refuses it, quantize by a recipe "
    "(recipe_static_wi8_ai8).",
)
_BY_RECIPE = Why(
    "no rule of the recipe takes {ops}, or ai-edge-quantizer has none for {them}.",
    'give the recipe a rule with operation="*"; what it has no way for takes another op in the '
    "model.",
)
_ON_PURPOSE = (
    "the quantizer was told to leave {modules} in float, by a config of None or a rule of "
    "no_quantize."
)


def why_float(model: Model, edge: EdgeFile, wrong: Sequence[OpDtypes]) -> Why:
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
        return Why(_ON_PURPOSE.format(modules=_some(modules, "modules")))
    # In the order of the file: the first has often made the others float.
    kinds = list(dict.fromkeys(entry.op for entry in others))
    if flow == "recipe":
        return _formatted(_BY_RECIPE, kinds)
    if known is None or flow != "pt2e":
        return _formatted(_ELSEWHERE, kinds)
    if not known.exported_strictly and all(facts_of(kind).needs_strict for kind in kinds):
        return _NON_STRICT
    taken = [kind for kind in kinds if kind in static_recipe_ops()]
    recipe = f"quantize by recipe_static_wi8_ai8, which takes {_some(taken)}; or " if taken else ""
    return _formatted(_BY_PT2E, kinds, recipe=recipe)


def _formatted(why: Why, kinds: Sequence[str], **more: str) -> Why:
    names = {"ops": _some(kinds), "them": "them" if len(kinds) > 1 else "it", **more}
    return Why(why.cause.format(**names), why.fix.format(**names))


def _some(names: Sequence[str], what: str = "kinds") -> str:
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} other {what}"
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
