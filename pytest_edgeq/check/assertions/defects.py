"""Assert that a comparison, or a file, shows no defect, and that a GPU runs all of a file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from pytest_edgeq.check.assertions.expect import (
    Model,
    edge_of,
    known_op,
    require_comparison,
    require_names,
    require_needed,
    table,
)
from pytest_edgeq.check.verdict import Verdict
from pytest_edgeq.compare.file_health import conformance_findings
from pytest_edgeq.errors import failure, grouped, warn_user
from pytest_edgeq.numerics.comparison import Comparison
from pytest_edgeq.numerics.findings import PARTLY_ON_CPU, Finding, ordered
from pytest_edgeq.runtimes.delegation import SUPPORTED, delegation_of
from pytest_edgeq.tflite.conformance import RULE_NAMES


def assert_healthy(comparison: Comparison, allow: Sequence[str] = ()) -> None:
    """
    Assert that a comparison shows no defect, whatever its errors are.

    Defects are outputs that are constant or not finite, ranges that clip their values, scales that
    were never calibrated, evaluated samples that were used for calibration, and more.

    Args:
        comparison: From `edgeq.compare`.
        allow: Kinds of findings to ignore, such as `"clipped_output"`.

    Raises:
        AssertionError: Lists the findings, the most harmful first; or an entry of `allow` matches
            none.
        TypeError: Not a comparison, or `allow` is no sequence.
    """
    require_comparison(comparison)
    require_names(allow)
    kinds = sorted({each.kind for each in comparison.health})
    require_needed(allow, kinds, "finding")
    wrong = [each for each in ordered(comparison.health) if each.kind not in allow]
    if not wrong:
        return
    verdict = Verdict([replace(each, headline=f"{each.kind}: {each.title}") for each in wrong])
    text = verdict.text(comparison.name, unwritten=False)
    raise failure(wrong, f"{text}\nupdate: allow={tuple(kinds)!r}")


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
    require_names(allow)
    allowed = {each if each in RULE_NAMES else known_op(each) for each in allow}
    edge = edge_of(model)
    warnings = conformance_findings(edge, warnings=True)
    findings = (*conformance_findings(edge), *warnings)
    known = sorted({name for each in findings for name in (each.kind, each.place.name)})
    require_needed(allow, known, "op that does not conform")
    left = [each for each in findings if not {each.kind, each.place.name} & allowed]
    for each in left:
        if each in warnings:
            warn_user(f"{each.kind}: {each.sentence}")
    wrong = [each for each in left if each not in warnings]
    if not wrong:
        return
    first, ops = wrong[0], len({each.place for each in wrong})
    headline = f"{first.kind}: {first.title} ({ops} of {len(edge.op_dtypes)} ops do not conform)"
    rows = [(str(each.place), each.kind, each.symptom) for each in wrong]
    evidence = table(rows, ("op", "rule", "what")) if len(rows) > 1 else ()
    raise failure([replace(first, headline=headline, evidence=evidence)])


def assert_delegated(model: Model, runtime: str = "gpu", allow: Sequence[str] = ()) -> None:
    """
    Assert that LiteRT's GPU engine runs every op of a file.

    The file is compiled on the runtime. Ops that it does not run are also compiled one by one, to
    name them with the engine's messages. `edgeq.delegation` returns the same as data.

    Args:
        model: QuantizedModel, path or bytes.
        runtime: `gpu`, `gpu_f32`, or those of a target (`TARGET:gpu`; not for a path or bytes).
        allow: Operators that may run on the CPU.

    Raises:
        AssertionError: An op does not run on the GPU, or may not, the engine rejects the whole
            file, or an entry of `allow` was not needed.
        ValueError, TypeError: No operator of that name in TFLite, or no runtime on a GPU.
        RuntimeError: There is no GPU, or its process ended.
    """
    require_names(allow)
    allowed = {known_op(each) for each in allow}
    found = delegation_of(edge_of(model), runtime)
    if found.refusal is not None:
        raise failure(grouped([found.refusal]))
    kinds = sorted({each.place.name for each in found.not_on_gpu})
    require_needed(allow, kinds, "op that runs on the CPU")
    wrong = [each for each in found.not_on_gpu if each.place.name not in allowed]
    if not wrong:
        return
    # Unsupported ops first: they keep the others from the GPU.
    wrong.sort(key=lambda each: each.words in SUPPORTED)
    first = wrong[0]
    rows = [(str(each.place), str(each)) for each in wrong]
    fix = next((fix for words, fix in _FIXES.items() if re.search(words, first.words)), "")
    raise failure(
        [
            Finding(
                kind=PARTLY_ON_CPU,
                place=first.place,
                expected=f"on the GPU ({runtime})",
                got=str(first),
                headline=f"{first.place}: expected on the GPU ({runtime}), got {first} "
                f"({len(wrong)} of {len(found.ops)} ops)",
                causes=(
                    "unsupported ops split the graph, and only one part of it runs on the GPU. "
                    "Tensors are copied between GPU and CPU in every run, and an app that asks for "
                    "the GPU alone cannot load the file",
                ),
                fix=fix,
                evidence=table(rows, ("op", "runs")),
                command=f"allow={tuple(kinds)!r}",
            )
        ]
    )


_FIXES: Final = {
    "Max version": "write this part of the model with another op, or convert with a release of the "
    "converter that writes a lower version of the op",
    "Tensor type": "quantize the op to int8, or keep it in float",
    "": "write this part of the model with other ops, or move it to the start or end of the model, "
    "where it splits off less",
}
"""How to get an op onto the GPU, by the engine's message."""
