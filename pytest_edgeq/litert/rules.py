"""The rules of a recipe: their checks, and the ops that they match."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_edgeq.litert.libraries import quiet, recipe_module
from pytest_edgeq.names import nearest
from pytest_edgeq.tflite.ops import nearest_op

_ALL = "*"
_NO_QUANTIZE = "no_quantize"
_SHOWN = 8


@dataclasses.dataclass(frozen=True, slots=True)
class ScopedOp:
    """An op of the float file with the name and scope that rules match."""

    # In the schema, for instance `TRANSPOSE_CONV`; `INPUT` and `OUTPUT` stand for the inputs and
    # outputs of a subgraph
    name: str
    # The text that a rule's regex is searched in: the names of the op's outputs, each followed by a
    # `;`; for `OUTPUT` those of its inputs
    scope: str
    where: str  # for texts


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a recipe, checked."""

    content: Mapping[str, Any]  # its dict, as in JSON
    place: str  # for texts: `rule 2 of 3`

    @property
    def json(self) -> str:
        """The rule itself, as hashable text."""
        return json.dumps(self.content)

    @property
    def quantizes(self) -> bool:
        """Whether it quantizes, rather than leaves in float."""
        return bool(self.content["algorithm_key"] != _NO_QUANTIZE)

    @property
    def names_an_operation(self) -> bool:
        """Whether it is for one operation, not for all that the library supports."""
        return bool(self.content["operation"] != _ALL)

    @property
    def may_pass_over(self) -> bool:
        """Whether it leaves small weights in float."""
        config = self.content.get("op_config", {})
        return self.quantizes and bool(config.get("min_weight_elements"))

    def refused(self, why: str) -> ValueError:
        """Return the error for the rule."""
        return ValueError(f"{self.place}: {why}\n  rule: {self.json}")

    def matches(self, op: ScopedOp) -> bool:
        """Return whether an op is of the rule's kind and within its scope."""
        wanted = self.content["operation"]
        return (wanted in (_ALL, _library_names().get(op.name))) and bool(
            re.search(self.content["regex"], op.scope)
        )


@functools.cache
def _library_names() -> dict[str, str]:
    """Return the library's own names of operations, by those of the schema."""
    from ai_edge_litert.schema_py_generated import BuiltinOperator

    known = recipe_module("utils.tfl_flatbuffer_utils").TFL_OP_CODE_TO_NAME
    ops = vars(BuiltinOperator).items()
    names = {schema: known[code].value for schema, code in ops if code in known}
    return names | {"INPUT": "INPUT", "OUTPUT": "OUTPUT"}


@functools.cache
def static_recipe_ops() -> frozenset[str]:
    """Return the ops that `recipe_static_wi8_ai8` quantizes, by their names in the schema."""
    policy = json.loads(recipe_module("default_policy").DEFAULT_JSON_POLICY)
    known = policy["ops_per_config"]["static_wi8_ai8"]
    return frozenset(schema for schema, name in _library_names().items() if name in known)


def check_rules(recipe: Sequence[Mapping[str, Any]], where: str) -> list[Rule]:
    """Check the rules of a recipe, without a model."""
    rules = []
    for number, content in enumerate(recipe, 1):
        rule = Rule(content, f"{where}, rule {number} of {len(recipe)}")
        _check_rule(rule)
        rules.append(rule)
    return rules


def _check_rule(rule: Rule) -> None:
    qtyping = recipe_module("qtyping")
    manager = recipe_module("recipe_manager")
    known: Sequence[str] = ("regex", "operation", "algorithm_key", "op_config")
    required = known[:3] if rule.content.get("algorithm_key") == _NO_QUANTIZE else known
    words = {"operation": qtyping.TFLOperationName, "algorithm_key": manager.AlgorithmName}
    _check_entries(rule, "", rule.content, known, required, words)
    regex = rule.content["regex"]
    try:
        re.compile(regex)
    except (re.error, TypeError) as error:
        raise rule.refused(f"regex {regex!r} is invalid: {error}") from None
    if not rule.quantizes:
        return
    config = rule.content["op_config"]
    fields = [each.name for each in dataclasses.fields(qtyping.OpQuantizationConfig)]
    words = {"compute_precision": qtyping.ComputePrecision}
    flags = ("explicit_dequantize", "skip_checks")
    # Without a `weight_tensor_config` the library raises a bare KeyError.
    _check_entries(rule, "op_config", config, fields, ("weight_tensor_config",), words, flags)
    # `block_size` is the older way to write a blockwise granularity. The library treats unknown
    # keys as parameters of the algorithm (0.6 to 0.11), so that a misspelt one has no effect.
    fields = [each.name for each in dataclasses.fields(qtyping.TensorQuantizationConfig)]
    words = {"granularity": qtyping.QuantGranularity, "dtype": qtyping.TensorDataType}
    for name in ("weight_tensor_config", "activation_tensor_config"):
        if name in config:
            tensor = config[name]
            known = (*fields, "block_size")
            _check_entries(rule, name, tensor, known, ("num_bits",), words, ("symmetric",))
            if type(tensor["num_bits"]) is not int:
                got = repr(tensor["num_bits"])
                raise rule.refused(f"{name}: num_bits: expected an integer, got {got}")
    try:
        qtyping.OpQuantizationConfig.from_dict(config)
    except (TypeError, ValueError) as error:
        raise rule.refused(f"op_config: {error}") from error
    operation = rule.content["operation"]
    supported = _operations(rule.json)
    if not supported or operation not in (_ALL, *supported):
        raise _unsupported(rule, operation)


def _check_entries(
    rule: Rule,
    place: str,
    entries: Any,
    known: Sequence[str],
    required: Sequence[str],
    words: Mapping[str, Any],
    flags: Sequence[str] = (),
) -> None:
    """Check the keys of a dict, the words of its enumerations, and its flags."""
    within = f"{place}: " if place else ""
    if not isinstance(entries, Mapping):
        raise rule.refused(f"{within}expected a dict, got {entries!r}")
    for key in entries:
        if key not in known:
            why = f"{within}unknown key {key!r}{nearest(str(key), known)}"
            raise rule.refused(f"{why}\n  known: {', '.join(known)}")
    if missing := [key for key in required if key not in entries]:
        raise rule.refused(f"{within}{' and '.join(map(repr, missing))} missing")
    for name in flags:
        if not isinstance(entries.get(name, False), bool):
            raise rule.refused(f"{within}{name}: expected true or false, got {entries[name]!r}")
    for name, enum in words.items():
        valid = [word.value for word in enum]
        if name in entries and entries[name] not in valid:
            word = str(entries[name])
            # The schema's name where the library has one of its own: TRANSPOSE_CONV is
            # CONV_2D_TRANSPOSE.
            own = _library_names().get(word) if name == "operation" else None
            near = nearest_op if name == "operation" else nearest
            hint = f" (did you mean {own}?)" if own else near(word, valid)
            raise rule.refused(f"unknown {name} {word!r}{hint}\n  known: {', '.join(valid)}")


def match_rules(rules: Sequence[Rule], ops: Sequence[ScopedOp]) -> list[int | None]:
    """
    Return the index of the rule that quantizes each op.

    The last rule that matches an op and whose config the library supports for it has priority. A
    rule all of whose ops are matched by later ones is valid. None stands for no rule.
    """
    matched: list[list[ScopedOp]] = [[] for _ in rules]
    supported = [False for _ in rules]
    winners: list[int | None] = []
    for op in ops:
        winner = None
        for index, rule in enumerate(rules):
            if rule.matches(op):
                matched[index].append(op)
                if not rule.quantizes or _library_names().get(op.name) in _operations(rule.json):
                    supported[index] = True
                    winner = index
        winners.append(winner)
    for rule, found, any_supported in zip(rules, matched, supported, strict=True):
        if not found:
            raise _no_match(rule, ops)
        if not any_supported:
            raise _unsupported(rule, _counted(found))
    _check_precedence(rules, ops, winners)
    return winners


def is_supported(rule: Mapping[str, Any], op: str) -> bool:
    """Return whether the library supports a valid rule's config for an op of TFLite."""
    return _library_names().get(op) in _operations(json.dumps(rule))


def _unsupported(rule: Rule, what: str) -> ValueError:
    """Return the error for a rule whose config the library does not support."""
    supported = ", ".join(_operations(rule.json)) or "no operation"
    # FULLY_CONNECTED is supported with most configs, and so has the most specific errors.
    words = _refusal(rule.json, what if rule.names_an_operation else "FULLY_CONNECTED")
    # The policy's own message is a dump of the config.
    reason = f"\n  {words}" if words and "was not found in the policy" not in words else ""
    return rule.refused(
        f"ai-edge-quantizer does not support this config for {what if what != _ALL else 'any op'}; "
        f"it does for {supported}{reason}",
    )


@functools.lru_cache(maxsize=256)
def _operations(rule: str) -> tuple[str, ...]:
    """Return the operations for which the library supports a rule's config."""
    names = [word.value for word in recipe_module("qtyping").TFLOperationName]
    return tuple(name for name in names if name != _ALL and _refusal(rule, name) is None)


def _refusal(rule: str, operation: str) -> str | None:
    """Return the library's reason against a rule for an operation, or None."""
    content = json.loads(rule)
    qtyping = recipe_module("qtyping")
    config = qtyping.OpQuantizationConfig.from_dict(content["op_config"])
    try:
        recipe_module("algorithm_manager").check_op_quantization_config(
            content["algorithm_key"], qtyping.TFLOperationName(operation), config
        )
    except ValueError as error:
        return str(error).replace("\n", " ")
    return None


def _check_precedence(
    rules: Sequence[Rule], ops: Sequence[ScopedOp], winners: Sequence[int | None]
) -> None:
    """
    Check that the library implements "later one has higher priority".

    It stores rules by their regex (0.4 to 0.11): a rule replaces the first one with the same regex,
    so that rules between the two override it; and a rule for `*` removes the earlier ones with its
    regex, also those for ops that it does not support.
    """
    qtyping = recipe_module("qtyping")
    manager = recipe_module("recipe_manager").RecipeManager()
    with quiet():
        manager.load_quantization_recipe([rule.content for rule in rules])
    read = qtyping.OpQuantizationConfig.from_dict
    for op, winner in zip(ops, winners, strict=True):
        name = _library_names().get(op.name)
        if name is None:
            continue
        actual = manager.get_quantization_configs(qtyping.TFLOperationName(name), op.scope)
        expected = _NO_QUANTIZE, None
        if winner is not None and (rule := rules[winner]).quantizes:
            expected = rule.content["algorithm_key"], read(rule.content["op_config"])
        if expected == actual or expected[0] == actual[0] == _NO_QUANTIZE:
            continue
        assert winner is not None  # the library applies no rule that does not match
        rule = rules[winner]
        twins = [
            other.place.split(", ")[-1]
            for other in rules
            if other is not rule and other.content["regex"] == rule.content["regex"]
        ]
        outcome = "leaves it in float" if actual[0] == _NO_QUANTIZE else "applies another"
        raise rule.refused(
            f"is the last rule for {op.where}, but ai-edge-quantizer {outcome}: it groups rules "
            f"with one regex ({' and '.join(twins)} has the same), and a rule for '*' removes the "
            "earlier ones with its regex. Write this rule's regex differently "
            f"({'(' + rule.content['regex'] + ')'!r} means the same), or remove the rule if the "
            "result is intended",
        )


def _no_match(rule: Rule, ops: Sequence[ScopedOp]) -> ValueError:
    regex, operation = rule.content["regex"], rule.content["operation"]
    scoped = [op for op in ops if re.search(regex, op.scope)]
    named = [op for op in ops if operation in (_ALL, _library_names().get(op.name))]
    if not named:
        return rule.refused(f"matches no op: there is no {operation} among {_counted(ops)}")
    why = f"matches no op: its regex is found in the scope of no {operation}"
    if operation == _ALL:
        why = "matches no op: its regex is found in the scope of none"
    elif scoped:
        why += f", only of {_counted(scoped)}"
    scopes = difflib.SequenceMatcher(b=regex.lower(), autojunk=False)

    def unlikeness(op: ScopedOp) -> int:
        scopes.set_seq1(op.scope.lower())
        return -scopes.find_longest_match().size

    likely = sorted(named, key=unlikeness)
    return rule.refused(
        f"{why}\n  It is searched in the names of an op's outputs; those of the last op are the "
        f"model's own. There are:\n{listed_ops(likely)}",
    )


def listed_ops(ops: Sequence[ScopedOp]) -> str:
    """List the first few ops with their scopes, one a line."""
    scopes = [op.scope if len(op.scope) <= 160 else f"{op.scope[:160]}…" for op in ops]
    rows = [f"    {op.where}: {scope}" for op, scope in zip(ops, scopes, strict=True)]
    more = [f"    … and {len(rows) - _SHOWN} more"] if len(rows) > _SHOWN else []
    return "\n".join(rows[:_SHOWN] + more)


def _counted(ops: Sequence[ScopedOp]) -> str:
    names = [op.name for op in ops]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
