"""Name the first op that the kernels of two machines round differently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.errors import CopyError, UnrunnableError
from pytest_edgeq.localize.single_ops import OpGroup, SingleOps
from pytest_edgeq.numerics.target_machine import TargetMachine
from pytest_edgeq.runtimes.workers.remote_worker import facts
from pytest_edgeq.tflite.op_dtypes import entry_of
from pytest_edgeq.tflite.subgraph import Op

Inputs = Mapping[str, npt.NDArray[Any]]


def first_differing_op(ops: SingleOps, one: str, other: str, inputs: Inputs) -> str:
    """Describe the first op whose codes differ when two runtimes run it alone, if any."""
    try:
        found = _first_difference(ops, one, other, inputs)
    except (UnrunnableError, CopyError, ValueError):  # the difference itself is already reported
        return ""
    if found is None:
        return ""
    group, op, tensor, (n_differ, n_codes, worst) = found
    edge, runtimes = ops.edge, ops.edge.runtimes
    kernels = {runtimes.kernels_of(each) for each in (one, other)}
    text = (
        f"{entry_of(edge.graph, op, edge.modules).where}, run alone on the same inputs, differs in "
        f"{n_differ} of {n_codes} codes, by up to {worst:.3g}:\n  "
        f"{_who(kernels, [runtimes.machine_of(each) for each in (one, other)])}"
    )
    if kernels == {"xnnpack"} or runtimes.target_of(one) is runtimes.target_of(other):
        return text
    names = [
        "xnnpack" if runtimes.target_of(each) is None else each.partition(":")[0]
        for each in (one, other)
    ]
    codes = [group.run(name)[op.index, tensor] for name in names]
    same = "gives the same" if _difference(*codes) is None else "does not give the same"
    return f"{text}; XNNPACK {same} on both"


def _first_difference(
    ops: SingleOps, one: str, other: str, inputs: Inputs
) -> tuple[OpGroup, Op, int, tuple[int, int, float]] | None:
    """Return the first op that differs, its group and output, and how far the output differs."""
    for group in ops.groups(inputs):
        outputs = [group.run(each) for each in (one, other)]
        for op, tensor in group.cut.outputs:
            if ops.edge.graph.tensor(op, tensor).is_floating_point:
                continue  # float32 rounds everywhere
            found = _difference(*(each[op.index, tensor] for each in outputs))
            if found is not None:
                return group, op, tensor, found
    return None


def _difference(mine: npt.NDArray[Any], theirs: npt.NDArray[Any]) -> tuple[int, int, float] | None:
    """Return how many codes differ, of how many, and by how much."""
    if mine.shape != theirs.shape:
        return None  # not a rounding difference
    steps = np.abs(mine.astype(np.float64) - theirs.astype(np.float64))
    steps = np.where(np.isnan(steps), 0.0, steps)
    count = int(np.count_nonzero(steps))
    return (count, steps.size, float(steps.max())) if count else None


def _who(kernels: set[str], targets: list[TargetMachine | None]) -> str:
    """Return in words which kernels round differently: by release, AVX2 or machine."""
    machines = [each or TargetMachine.of("", facts()) for each in targets]
    releases = list(dict.fromkeys(f"{each.package} {each.release}" for each in machines))
    if len(releases) > 1:
        return f"kernels of {' and '.join(releases)} round this op otherwise"
    with_avx2 = [machine for machine in machines if "AVX2" in machine.features]
    # Measured: without AVX2 (Nehalem, emulated) builtin computes ARM's codes, with it others.
    if kernels == {"builtin"} and len(with_avx2) == 1:
        return "x86 with AVX2 rounds this op otherwise"
    named = " and ".join(dict.fromkeys(machine.machine for machine in machines))
    return f"kernels of {named} round this op otherwise"
