"""Ops of another file in place of a file's own."""

from __future__ import annotations

import numpy as np

from fixtures.tflite.writer import chain, constant
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.writing import Graft, write_with


def _file(name: str, options: str, factor: float) -> bytes:
    """Write (x, x · factor) given to an op."""
    ops = ("MUL", "x factor", "product", "MulOptions"), (name, "x product", "y", options)
    row = constant(np.full((1, 4), factor))
    return chain(*ops, inputs="x", outputs="y", key="main", factor=row)


def _run(content: bytes) -> float:
    """Return what a file makes of 3."""
    (value,) = EdgeFile(content).runner("builtin").run({"x": np.full((1, 4), 3, np.float32)})
    return float(value.flat[0])


def test_each_part_is_taken_over_alone_and_together() -> None:
    """Code and options, operands, a constant."""
    content = _file("ADD", "AddOptions", 2.0)
    file, other = (EdgeFile(c).graph for c in (content, _file("SUB", "SubOptions", 5.0)))
    (mul, add), (its_mul, sub) = (graph.subgraphs[0].ops for graph in (file, other))
    x, product = add.inputs
    kind = Graft(add, sub, replaces_kind=True)
    constant = Graft(mul, its_mul, constants=frozenset({1}))
    whole = Graft(add, sub, replaces_kind=True, operands={0: product, 1: x})

    assert _run(content) == 3 + 3 * 2
    assert _run(write_with(file, other, [kind])) == 3 - 3 * 2
    assert _run(write_with(file, other, [constant])) == 3 + 3 * 5
    assert _run(write_with(file, other, [Graft(add, sub, operands={0: product})])) == 2 * 3 * 2
    assert _run(write_with(file, other, [kind, constant])) == 3 - 3 * 5
    assert _run(write_with(file, other, [whole])) == 3 * 2 - 3
    assert [_run(write_with(file, other, [part])) for part in whole.parts()] == [-3, 12, 6]
