"""Kernels of 64-bit ARM, emulated: which give the codes of this machine, and which do not."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fixtures.tflite import make, stacks
from fixtures.tflite.writer import pack, unpack
from pytest_edgeq import Edgeq
from pytest_edgeq.localize.rows import LOWERING
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.runtimes.registry import Runtimes
from pytest_edgeq.runtimes.workers.remote_worker import facts
from pytest_edgeq.runtimes.workers.target import Target
from tests.bench.speed.kernels_of_arm import INTEGERS, Difference, difference, drawn, fixture_files
from tests.runtimes.targets.conftest import drawn as samples_of

# An emulated CPU, and a root that is downloaded for it.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NO_AVX2 = shutil.which("qemu-x86_64-static") or shutil.which("qemu-x86_64")
if platform.machine() != "x86_64":
    NO_AVX2 = None

INTEGER_FILES = fixture_files(INTEGERS, ("int8", "int16"))

WITH_SOFTMAX = "decomposed.recipe_static_wi8_ai8.tflite"


def _apart(runtimes: Runtimes, path: Path, one: str, other: str) -> Difference:
    edge = EdgeFile(path, runtimes=runtimes)
    return difference(edge, [drawn(edge, seed) for seed in range(3)], (one, other))


@pytest.fixture(scope="module")
def runtimes(arm64_command: list[str]) -> Iterator[Runtimes]:
    """An emulated ARM, and an emulated x86 without AVX2 where there is one."""
    commands = {"arm64": arm64_command}
    if NO_AVX2 is not None:
        commands["no_avx2"] = [NO_AVX2, "-cpu", "Nehalem", sys.executable]
    made = Runtimes(targets={name: Target(name, words, 120) for name, words in commands.items()})
    yield made
    made.close()


@pytest.fixture(scope="module")
def edgeq(arm64_command: list[str]) -> Iterator[Edgeq]:
    """A session with the target."""
    session = Edgeq(targets={"arm64": arm64_command}, target_timeout=120)
    yield session
    session.close()


def test_xnnpack_gives_the_same_codes_on_arm(runtimes: Runtimes) -> None:
    """Of all files that compute in integers but one, in which a softmax is off by a code."""
    for path in INTEGER_FILES:
        bound = 2 if path.name == WITH_SOFTMAX else 0
        assert _apart(runtimes, path, "xnnpack", "arm64").codes <= bound, path.name


def test_float_files_differ_by_rounding(runtimes: Runtimes) -> None:
    """On both kinds of kernels; float32 has steps of 1.2e-7."""
    for kernels in ("xnnpack", "builtin"):
        for path in fixture_files(("float",), ("float32",)):
            apart = _apart(runtimes, path, kernels, f"arm64:{kernels}")
            assert apart.relative <= 1e-5, path.name


@pytest.mark.skipif(NO_AVX2 is None, reason="needs an x86 with qemu-x86_64-static")
def test_builtin_kernels_without_avx2_give_the_codes_of_arm(runtimes: Runtimes) -> None:
    """So it is AVX2 that differs, not x86."""
    differs_here = 0
    for path in INTEGER_FILES:
        assert _apart(runtimes, path, "no_avx2:builtin", "arm64:builtin").codes == 0, path.name
        differs_here += _apart(runtimes, path, "builtin", "arm64:builtin").codes > 0
    assert differs_here or "AVX2" not in facts()["features"]


def test_a_damaged_layer_is_named_on_arm(edgeq: Edgeq) -> None:
    """By the tensors that come back from there; the sound file has none."""
    path = make.CONVERTED / "batch_norms.int8.tflite"
    model, samples = stacks.build("batch_norms"), samples_of("batch_norms", 4)
    file = unpack(path.read_bytes())
    graph = file.subgraphs[0]
    convolutions = [op for op in EdgeFile(path).graph.ops if op.name == "CONV_2D"]
    damaged = convolutions[-1]
    buffer = file.buffers[graph.tensors[damaged.inputs[1]].buffer]
    buffer.data = -np.asarray(buffer.data).view(np.int8)

    sound = edgeq.load(path, reference=model)
    wrong = edgeq.load(pack(file), reference=model)

    assert edgeq.localize(sound, samples, runtime="arm64:builtin").culprit is None
    culprit = edgeq.localize(wrong, samples, runtime="arm64:builtin").culprit
    assert culprit is not None
    assert (culprit.index, culprit.op, culprit.verdict) == (damaged.index, "CONV_2D", LOWERING)
