"""Assert that TFLite's kernels support the quantization of a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_edgeq.check.assertions.expect import Model, edge_of, known_op, table
from pytest_edgeq.compare.file_health import conformance_findings
from pytest_edgeq.errors import UnmatchedError, failure, warn_user
from pytest_edgeq.names import nearest
from pytest_edgeq.tflite.conformance import RULE_NAMES


def assert_conforms(model: Model, allow: Sequence[str] = ()) -> None:
    """
    Assert that each op is quantized as TFLite's kernels require; nothing is run.

    The rules are those of TFLite's quantization specification
    (https://ai.google.dev/edge/litert/models/quantization_spec) that some kernel relies on:
    `same_scale` (ops that do not rescale), `output_scale` (LOGISTIC, SOFTMAX and others),
    `weight_zero_point`, `int16_zero_point`, `power_of_two` (of int16), `bias_scale`,
    `channel_axis` and `dtypes` (of the operands of one op). A weight zero point that the CPU
    kernels compute and accelerators may refuse is a warning.

    Args:
        model: QuantizedModel, path or bytes.
        allow: Operators, and names of rules, to ignore.

    Raises:
        AssertionError: An op does not conform, or an entry of `allow` was not needed.
        ValueError, TypeError: Neither an operator of TFLite nor a rule.
    """
    if isinstance(allow, str):
        raise TypeError(f"allow: expected a sequence, got {allow!r}; write ({allow!r},)")
    allowed = [each if each in RULE_NAMES else known_op(each) for each in allow]
    edge = edge_of(model)
    warnings = conformance_findings(edge, warnings=True)
    findings = (*conformance_findings(edge), *warnings)
    known = sorted({name for each in findings for name in (each.kind, each.place.name)})
    for entry in allowed:
        if entry not in known:
            raise UnmatchedError(
                f"allow={entry!r} matches no op that does not conform{nearest(entry, known)}; take "
                "it out, or it will hide the next one"
            )
    left = [each for each in findings if not {each.kind, each.place.name} & set(allowed)]
    wrong = [each for each in left if each not in warnings]
    for each in left:
        if each in warnings:
            warn_user(f"{each.kind}: {each.sentence}")
    if not wrong:
        return
    first, ops = wrong[0], len({each.place for each in wrong})
    headline = f"{first.kind}: {first.title} ({ops} of {len(edge.op_dtypes)} ops do not conform)"
    rows = [(str(each.place), each.kind, each.symptom) for each in wrong]
    evidence = table(rows, ("op", "rule", "what")) if len(rows) > 1 else ()
    raise failure([replace(first, headline=headline, evidence=evidence)])
