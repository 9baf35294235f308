"""Which ops run on a real GPU, or on Mesa's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from fixtures.tflite.make import CONVERTED
from fixtures.tflite.writer import FileWriter
from pytest_edgeq import Edgeq, assert_delegated
from pytest_edgeq.runtimes.delegation import Delegation, delegation_of
from pytest_edgeq.runtimes.edge import EdgeFile

pytestmark = pytest.mark.slow

NONE = "RELU_0_TO_1"


@pytest.fixture(scope="module")
def maker(gpu_command: list[str]) -> Iterator[Edgeq]:
    """A session with the target `mesa`."""
    made = Edgeq(targets={"mesa": gpu_command})
    yield made
    made.close()


def found(maker: Edgeq, source: Any) -> Delegation:
    """Return where the ops of a file run."""
    return maker.delegation(maker.load(source), "mesa:gpu")


def test_a_version_that_is_too_new(maker: Edgeq) -> None:
    """The engine's words, and an op that follows to the CPU."""
    ops = found(maker, CONVERTED / "transposed.int8.tflite").ops
    assert [each.runs_on for each in ops] == ["CPU", "CPU", *["GPU"] * 6]
    assert ops[1].words == "Max version supported: 3. Requested version 4."


@pytest.mark.parametrize(
    ("name", "op"),
    [("attention.int8", "ADD #31"), ("nested.recipe_weight_only_wi8_afp32", "FULLY")],
)
def test_a_file_that_is_refused_as_a_whole(maker: Edgeq, name: str, op: str) -> None:
    """The assertion fails with the op."""
    quantized = maker.load(CONVERTED / f"{name}.tflite")
    with pytest.raises(AssertionError, match=rf"^the mesa:gpu runtime cannot load .*: {op}"):
        assert_delegated(quantized, "mesa:gpu")


def drawn(seed: int) -> bytes:
    """Write a graph of random ops, some of which the engine does not support."""
    rng = random.Random(seed)
    names, ops = ["x", "y"], list[Any]()
    for at in range(rng.randint(3, 25)):
        recent = names[-4:]
        kind = rng.choice((NONE, "NEG", "ABS", "ADD", "ADD"))
        operands = (rng.choice(recent), rng.choice(names))[: 2 if kind == "ADD" else 1]
        options = ("AddOptions",) if kind == "ADD" else ()
        ops.append((kind, " ".join(operands), f"v{at}", *options))
        names.append(f"v{at}")
    read = {name for _, operands, *_ in ops for name in operands.split()}
    ends = " ".join(name for name in names[2:] if name not in read)
    file = FileWriter()
    file.graph().fill(*ops, inputs="x y", outputs=ends, key="main")
    return file.content()


@pytest.mark.parametrize("seed", range(20))
def test_groups_agree_with_the_count_of_the_engine(maker: Edgeq, seed: int) -> None:
    """In random graphs the engine runs as many ops as are stated."""
    edge = EdgeFile(drawn(seed), runtimes=maker.load(CONVERTED / "tied.int8.tflite").edge.runtimes)
    made = delegation_of(edge, "mesa:gpu")
    states = [each.runs_on for each in made.ops]
    assert not any("does not say" in each.words for each in made.ops)
    if "unknown" not in states:
        assert states.count("GPU") == made.n_on_gpu
