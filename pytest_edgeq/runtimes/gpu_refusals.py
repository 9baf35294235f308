"""Explain why LiteRT's GPU engine rejects a file: the op, the cause, the fix, its messages."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from pytest_edgeq.errors import UnrunnableError
from pytest_edgeq.names import printable
from pytest_edgeq.runtimes.gpu_known import known_defect
from pytest_edgeq.runtimes.refusals import OTHER_KIND, refusing
from pytest_edgeq.runtimes.workers.link import CHATTER
from pytest_edgeq.tflite.cut import first_op_that
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.subgraph import Op

NO_ADAPTER: Final = "no adapter was selected"
NO_SHADER: Final = "a shader is wrong"
NO_OP: Final = "the GPU runs no op of the file"

# Errors after which the engine still computes, and a warning of shapes that is as bad.
_WRONG: Final = re.compile(r"^E\d{4} |^W\d{4} .*Shape mismatch|Validation error", re.MULTILINE)

# Of a constant of five axes or of int16: the ops that read it run on the CPU.
_LEFT: Final = re.compile(r"^E\d{4} .* \{\n(?: .*\n)*\} isn't \S+-convertible", re.MULTILINE)

_CHATTER: Final = re.compile(
    rf"{CHATTER.pattern}|{NO_ADAPTER}|{NO_SHADER}|{NO_OP}|WARNING: Logging|Warning: max"
    r"|\W*$|=== Source|(\s*at \w+ \()?third_party|└ Failed to modify"
    r"|.*(litert_compiled_model\.h|compiled_model\.cc)"
)
"""Lines that the engine prints for every file, positions in its source, and texts of ours."""

_PREFIX: Final = re.compile(r"^([EW]\d{4} \S+ +\d+ \S+ |ERROR: (\[\S+\] )?)")

_MOST_LINES: Final = 8

_CAUSES: Final = {
    re.escape(NO_SHADER): (
        "LiteRT logs an error for this op, mostly that its shader (the program for the GPU) does "
        "not compile, and still returns outputs, with arbitrary values. An app gets no error",
        "keep this part of the model in float, write it with other ops, or run the file on the CPU "
        "(runtime='xnnpack'); report the file to LiteRT",
    ),
    r"Shape mismatch": (
        "LiteRT's GPU engine stores every tensor as batch × height × width × channels, and two "
        "operands of this op get shapes that do not match. It rejects the whole file: an app that "
        "asks for GPU and CPU cannot load it either",
        "give the operands the rank of the result in the model, for example by unsqueeze, or keep "
        "the weights of the op in float",
    ),
    re.escape(NO_OP): (
        "LiteRT would run every op of the file on the CPU, so this would not test the GPU",
        "run the file with runtime='xnnpack'; edgeq show FILE --runtime {runtime} lists the ops "
        "with LiteRT's reasons",
    ),
}


def check_shaders(printed: str) -> None:
    """Raise a RuntimeError if the engine logged an error: it returns outputs all the same."""
    if found := _WRONG.search(printed := _LEFT.sub("", printed)):
        # That error first: a failure shows few lines.
        raise RuntimeError(f"{NO_SHADER}\n{printed[found.start() :]}\n{printed[: found.start()]}")


def said(printed: str) -> list[str]:
    """Return what the engine printed for this file, as lines of a failure."""
    lines = [line for line in printed.splitlines() if not _CHATTER.match(line)]
    shown = [printable(_PREFIX.sub("", line).rstrip()) for line in lines[:_MOST_LINES]]
    more = [f"… and {len(lines) - _MOST_LINES} more lines"] if len(lines) > _MOST_LINES else []
    return (
        [f"the engine said: {shown[0]}", *(f"  {each}" for each in (*shown[1:], *more))]
        if shown
        else []
    )


def gpu_refusal(
    what: str,
    error: str,
    graph: OpGraph,
    runtime: str,
    where: Callable[[Op], str],
    load: Callable[[bytes], object],
) -> UnrunnableError:
    """Return the error for a file that the GPU engine rejects, with the op that is to blame."""
    symptom = next((each for each in _CAUSES if re.search(each, error)), "")

    is_of_an_op = symptom and symptom != re.escape(NO_OP)
    refuses = refusing(load, symptom)
    found = (first_op_that(graph, each, refuses) for each in range(len(graph.subgraphs)))
    op = next((each for each in found if each is not None), None) if is_of_an_op else None
    lines = [f"cannot {what}{'' if op is None else f': {where(op)}'}"]
    if symptom:
        cause, fix = _CAUSES[symptom]
        known = None if op is None else known_defect(graph, op)
        if known is not None:
            cause, fix = f"{cause}. {known.cause}", f"{known.fix}; or {fix}"
        lines += [f"cause: {cause}", f"fix: {fix.format(runtime=runtime)}"]
    else:
        known_kinds = (text for each, text in OTHER_KIND.items() if re.search(each, error))
        lines += [f"cause: {text}" for text in known_kinds]
    first = error.splitlines()[0]
    words = said(error) or [f"the engine said: {printable(first)}"]
    return UnrunnableError(runtime, "\n".join((*lines, *words)), is_lacking=bool(symptom))
