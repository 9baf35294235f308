from __future__ import annotations

import ast
from pathlib import Path

import pytest_edgeq
from pytest_edgeq.tflite.flatbuffer import enum_names
from pytest_edgeq.tflite.ops import OPS

NAMES = set(enum_names("BuiltinOperator").values())
ROOT = Path(pytest_edgeq.__file__).parent

ALLOWED = {
    ("runtimes/bounds/rounding.py", "_RULES"): "functions, whose modules cite the kernels",
    ("litert/simulated.py", "_FAMILIES"): "keys are torch's ops, and what each is lowered to",
    ("runtimes/unsafe.py", "_RULES"): "functions, which cite the kernels",
    ("runtimes/gpu_known.py", "_ELEMENTWISE"): "of one release of the GPU engine, measured",
    ("runtimes/gpu_known.py", "_DEFECTS"): "of one release of the GPU engine, measured",
    ("check/gpu_ops.py", "BY_EXPONENTIALS"): "of one release of the GPU engine, measured",
    ("check/gpu_ops.py", "BY_ELEMENT"): "functions; on the CPU one tolerance serves a whole tensor",
    ("check/gpu_ops.py", "STEPS"): "matters in float16 alone",
}


def tables(code: str) -> dict[str, set[str]]:
    """Return the variables of a module that hold two names of ops or more."""
    found: dict[str, set[str]] = {}
    for node in ast.parse(code).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            values = [x.value for x in ast.walk(node.value) if isinstance(x, ast.Constant)]
            lists = [{*each.split()} for each in values if isinstance(each, str)]
            # Not a sentence that names ops.
            names = set[str]().union(*(words for words in lists if words <= NAMES))
            if len(names) > 1:
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                found[ast.unparse(target)] = names
    return found


def test_facts_of_ops_have_one_home() -> None:
    """A fact that an op has by its name is a column of `OpFacts`."""
    paths = {path: path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py")}
    found = {(name, each) for path, name in paths.items() for each in tables(path.read_text())}
    assert found - {("tflite/ops.py", each) for _, each in found} == set(ALLOWED)
    assert {name for name in OPS if not name.startswith("CUSTOM:")} <= NAMES
