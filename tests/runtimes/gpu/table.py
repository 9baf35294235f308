"""
Measure files on LiteRT's GPU engine, in float32 and float16, against XNNPACK.

    python -m tests.runtimes.gpu.table                      writes `converted.json`
    python -m tests.runtimes.gpu.table FILE…                measures other files and writes nothing
    python -m tests.runtimes.gpu.table --target COMMAND …   on a target, such as `DIR/python3` of
                                                            `edgeq target gpu DIR`

Without a target the GPU of this machine is used. Both print a table. Each file gets 16 random
samples: standard normal floats, all codes of int8, indices below 8.

The data has an outcome for each file and precision:

- `close`: the SQNR over all samples of the worst output is at least `sqnr_db`: the noise is the
  measured one and five standard errors of it, from its spread over the samples. A machine whose
  compiler fuses or orders operations otherwise rounds otherwise, as other samples do.
- `codes`: outputs are codes, at most `codes_off` apart; 0 is equality. Two roundings to float16
  move a result across a tie of two codes, so a test allows one more in float16.
- `partly`: likewise, with one of these bounds, and `n_on_cpu` ops run on the CPU.
- `wrong`: an SQNR below 30 dB without a message, also of a file that runs partly on the GPU.
- `refused`: the runtime refuses the file; `words` are the op and the engine's message.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fixtures.tflite.make import CONVERTED
from pytest_edgeq import Edgeq
from pytest_edgeq.errors import UnrunnableError
from pytest_edgeq.names import GPU_KERNELS
from pytest_edgeq.runtimes.delegation import delegation_of
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.boundary import numpy_dtype

DATA = Path(__file__).with_name("converted.json")
SAMPLES = 16
WRONG_DB = 30.0
_DEVIATIONS = 5
_BOUNDS = ("outcome", "n_on_cpu", "sqnr_db", "codes_off", "words")
Array = npt.NDArray[Any]


def samples(edge: EdgeFile) -> list[dict[str, Array]]:
    """Return random samples of a file's inputs, with a fixed seed."""
    rng = np.random.default_rng(0)

    def draw(shape: Sequence[int], dtype: Any) -> Array:
        if dtype == np.float32:
            return rng.standard_normal(shape).astype(dtype)
        limits = np.iinfo(dtype)
        low, high = (limits.min, limits.max + 1) if limits.bits < 32 else (0, 8)
        return rng.integers(low, high, shape).astype(dtype)

    return [
        {
            each.name: draw(each.tensor.shape, numpy_dtype(each.tensor.dtype))
            for each in edge.signature.inputs
        }
        for _ in range(SAMPLES)
    ]


def sqnr_db(expected: Sequence[Array], actual: Sequence[Array], deviations: float = 0.0) -> float:
    """
    Return the SQNR of an output over all samples, at most 200 dB.

    Args:
        expected: The output, by sample.
        actual: Likewise.
        deviations: How many standard errors of the samples' noise are added to the noise.
    """
    pairs = [
        (one.astype(np.float64), other.astype(np.float64))
        for one, other in zip(expected, actual, strict=True)
    ]
    noise = np.array([((one - other) ** 2).sum() for one, other in pairs])
    signal = float(sum((one**2).sum() for one, _ in pairs))
    if not np.isfinite(noise).all():
        return -math.inf
    spread = deviations * math.sqrt(len(noise)) * float(noise.std(ddof=1))
    whole = float(noise.sum()) + spread
    return min(10 * math.log10(signal / whole), 200.0) if whole and signal else 200.0


def measure(edge: EdgeFile, runtime: str) -> dict[str, Any]:
    """Return the outcome of a file on a GPU, with the measured `db` and `seconds` to open it."""
    edge = edge.at(edge.signatures[0].key)
    inputs = samples(edge)
    expected = [edge.runner("xnnpack").run(each) for each in inputs]
    started = time.perf_counter()
    try:
        runner = edge.runner(runtime)
        seconds = time.perf_counter() - started
        actual = [runner.run(each) for each in inputs]
    except UnrunnableError as error:
        if not error.is_lacking:
            raise
        return {"outcome": "refused", "words": _words(str(error))}
    outputs = [*zip(zip(*expected, strict=True), zip(*actual, strict=True), strict=True)]
    db = min(sqnr_db(*output) for output in outputs)
    made: dict[str, Any] = {"outcome": "wrong", "db": db, "seconds": seconds}
    if n_on_cpu := len(edge.graph.ops) - delegation_of(edge, runtime).n_on_gpu:
        made["n_on_cpu"] = n_on_cpu
    if db < WRONG_DB:
        return made
    if all(np.issubdtype(values.dtype, np.integer) for values in expected[0]):
        made["outcome"] = "codes"
        made["codes_off"] = max(
            int(np.abs(one.astype(np.int64) - other).max(initial=0))
            for output in outputs
            for one, other in zip(*output, strict=True)
        )
    else:
        made["outcome"] = "close"
        made["sqnr_db"] = math.floor(
            min(sqnr_db(*each, deviations=_DEVIATIONS) for each in outputs)
        )
    return made | {"outcome": "partly"} if n_on_cpu else made


def _words(refusal: str) -> str:
    """Return the op that a refusal names, and the first line of the engine's message."""
    found = re.search(r"\.tflite file: (.*)(?s:.*)the engine said: (.*)", refusal)
    assert found is not None, refusal
    return ": ".join(found.groups())


def _cell(part: dict[str, Any]) -> str:
    if part["outcome"] == "refused":
        return f"refused: {part['words']}"
    cells = [f"wrong: {part['db']:.1f} dB"] if part["outcome"] == "wrong" else []
    if "sqnr_db" in part:
        cells.append(f"≥ {part['sqnr_db']} dB")
    if (off := part.get("codes_off")) is not None:
        cells.append(f"{off} code{'s' * (off > 1)} off" if off else "same codes")
    if "n_on_cpu" in part:
        cells.append(f"{part['n_on_cpu']} ops on the CPU")
    return f"{', '.join(cells)} ({part['seconds']:.2f} s)"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table in Markdown; write the data if no file is named."""
    parser = argparse.ArgumentParser(prog="python -m tests.runtimes.gpu.table")
    parser.add_argument("--target", type=shlex.split, metavar="COMMAND")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    prefix = "mesa:" if given.target else ""
    edgeq = Edgeq(targets={"mesa": given.target} if given.target else {}, isolate="off")
    lines = []
    print("| file | float32 | float16 |\n| --- | --- | --- |")
    for file in given.files or sorted(CONVERTED.glob("*.tflite")):
        edge, name = edgeq.load(file).edge, file.name.removesuffix(".tflite")
        parts = {each: measure(edge, f"{prefix}{each}") for each in reversed(GPU_KERNELS)}
        print(f"| `{name}` | {' | '.join(map(_cell, parts.values()))} |", flush=True)
        for kernels, part in parts.items():
            row = {key: part[key] for key in _BOUNDS if key in part}
            lines.append(f"  {json.dumps(f'{name} {kernels}')}: {json.dumps(row)}")
    edgeq.close()
    if not given.files:
        DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
