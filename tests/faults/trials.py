"""
What is tried with a damaged file, in a process of its own: see `pool`.

`python -m tests.faults.trials SEED FIRST LAST` writes lines: `stage WHAT` at each step, and
`done OUTCOME TEXT`.
"""

from __future__ import annotations

import math
import os
import resource
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.cases import Case, case_of
from tests.faults.sentences import is_sentence

MEMORY_BYTES = 4 << 30
"""What a process may allocate beyond what it has when it starts."""

_STEP_SECONDS = 5
"""Bound on a step in the child process that a file is first run in; of a sound one it is 0.01 s."""

_RUNTIMES = ("xnnpack", "builtin")
_INPUT_ELEMENTS = 1 << 20

_CRASHED = "crashed in the child"


def _try_tflite(case: Case, stage: Callable[[str], None]) -> str:
    from pytest_edgeq.cli.commands.show_command import _document, _findings
    from pytest_edgeq.errors import CrashedError
    from pytest_edgeq.runtimes.edge import EdgeFile
    from pytest_edgeq.runtimes.registry import BUILT_IN
    from pytest_edgeq.runtimes.workers.policy import Isolation

    # As `edgeq.load` opens it.
    isolation = Isolation("auto", seconds=_STEP_SECONDS, memory=MEMORY_BYTES)
    runtimes = BUILT_IN.isolated(isolation)
    stage("load")
    source: Path | bytes = case.content
    # Kernels that write into a constant end the process where it lies in a mapped file.
    if case.number % 2:
        source = Path("damaged.tflite")
        source.write_bytes(case.content)
    try:
        edge = EdgeFile(source, runtimes=runtimes, foreign=True)
    except CrashedError:
        return _CRASHED
    stage("map")
    edge.op_dtypes.to_dict()
    stage("show")
    _document(Path("x.tflite"), edge, *_findings(edge, None), None)
    told = []
    for signature in edge.graph.signatures:
        view = edge.at(signature.key or "") if signature.key is not None else edge
        for runtime in (*_RUNTIMES, "compiled")[: 3 if case.number % 8 == 0 else 2]:
            stage(f"{runtime} load {signature.key}")
            try:
                view.runner(runtime)
                arrays = _inputs(signature)
                if arrays is None:
                    told.append("not fed")
                    continue
                stage(f"{runtime} run {signature.key}")
                names = [border.name for border in signature.inputs]
                view.decode(view.run(names, arrays, runtime))
                told.append("ran")
            except Exception as error:
                if not is_sentence(error):
                    raise
                is_crash = isinstance(error, CrashedError)
                told.append(_CRASHED if is_crash else "refused by the runtime")
    worst = next((each for each in (_CRASHED, "ran") if each in told), None)
    return worst or (told[0] if told else "mapped")


def _inputs(signature: Any) -> list[Any] | None:
    """Return an array for each input, None where one would be too large."""
    import numpy as np

    from pytest_edgeq.tflite.boundary import numpy_dtype

    rng = np.random.default_rng(0)
    arrays = []
    for border in signature.inputs:
        tensor = border.tensor
        shape = [max(1, side) for side in tensor.shape] if -1 in tensor.shape else tensor.shape
        if any(side < 0 for side in shape) or math.prod(shape) > _INPUT_ELEMENTS:
            return None
        dtype = numpy_dtype(tensor.dtype) or np.dtype(np.float32)
        if tensor.is_quantized or dtype.kind == "f":
            arrays.append(rng.uniform(-1, 1, shape).astype(np.float32))
        else:
            arrays.append(rng.integers(0, 2, shape).astype(dtype))
    return arrays


def _say(protocol: int, text: str) -> None:
    os.write(protocol, text.replace("\n", " ⏎ ").encode("utf-8", "backslashreplace") + b"\n")


def main() -> None:
    """Try each case that is asked for."""
    seed, first, last = map(int, sys.argv[1:])
    with Path("/proc/self/statm").open() as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, now + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    protocol = os.dup(1)
    # What the package and the libraries print is no part of the protocol.
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory(prefix="edgeq-faults-") as folder:
        os.chdir(folder)
        for number in range(first, last):
            _say(protocol, "stage start")
            case = case_of(seed, number)
            try:
                outcome = _try_tflite(case, lambda what: _say(protocol, f"stage {what}"))
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                if is_sentence(error):
                    _say(protocol, f"done refused {said}")
                else:
                    frames = traceback.extract_tb(error.__traceback__)[-4:]
                    where = " ".join(f"{Path(each.filename).name}:{each.lineno}" for each in frames)
                    _say(protocol, f"done bare {said[:300]} [{where}]")
            else:
                _say(protocol, f"done ran {outcome}")


if __name__ == "__main__":
    main()
