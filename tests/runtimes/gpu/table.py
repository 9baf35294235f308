"""
What the GPU engine makes of each converted file, in float16 and float32, against XNNPACK.

    python -m tests.runtimes.gpu.table PYTHON             writes `converted.json`
    python -m tests.runtimes.gpu.table PYTHON FILE…       measures other files and writes nothing

PYTHON is one with ai-edge-litert and a Vulkan adapter. Both print a table. Each file gets 16 random
samples: standard normal floats, all codes of int8, indices below 8.

A row of the data has, by kernels, the outcome and what bounds it:

- `close`: a bound of the SQNR over all samples, `sqnr_db`, of the worst output: the noise is what
  was seen and five standard errors of it, from its spread over the samples. A machine whose
  compiler fuses or orders operations otherwise rounds otherwise, as other samples do.
- `codes`: outputs are codes, `codes_off` the greatest distance that was seen; 0 is equality. Two
  roundings to float16 move a result across a tie of two codes, so a test may add one in float16.
- `wrong`: less than 20 dB without a message.
- `logged`: the engine logged an error and answered; `words` are from the log.
- `refused`: nothing was computed; `words` are from the log.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from ai_edge_litert.interpreter import Interpreter

DATA = Path(__file__).with_name("converted.json")
KERNELS = ("gpu_f32", "gpu")
SAMPLES = 16
WRONG_DB = 20.0
_DEVIATIONS = 5
_CONVERTED = Path(__file__).parents[3] / "fixtures" / "tflite" / "converted"
_ENGINE = Path(__file__).with_name("engine.py")
Array = npt.NDArray[Any]
Sample = list[Array]


def samples(content: bytes, count: int = SAMPLES) -> list[Sample]:
    """Return random samples of a file's inputs, with a fixed seed."""
    rng = np.random.default_rng(0)

    def draw(shape: Sequence[int], dtype: Any) -> Array:
        if dtype == np.float32:
            return rng.standard_normal(shape).astype(dtype)
        limits = np.iinfo(dtype)
        low, high = (limits.min, limits.max + 1) if limits.bits < 32 else (0, 8)
        return rng.integers(low, high, shape).astype(dtype)

    inputs = Interpreter(model_content=content).get_input_details()
    return [[draw(each["shape"], each["dtype"]) for each in inputs] for _ in range(count)]


def reference(content: bytes, inputs: Sequence[Sample]) -> list[Sample]:
    """Return XNNPACK's outputs."""
    interpreter = Interpreter(model_content=content, num_threads=1)
    interpreter.allocate_tensors()
    outputs = []
    for sample in inputs:
        for detail, values in zip(interpreter.get_input_details(), sample, strict=True):
            interpreter.set_tensor(detail["index"], values)
        interpreter.invoke()
        details = interpreter.get_output_details()
        outputs.append([interpreter.get_tensor(detail["index"]) for detail in details])
    return outputs


def sqnr_db(expected: Sequence[Array], actual: Sequence[Array], deviations: float = 0.0) -> float:
    """
    Return the ratio of signal to difference over all samples of an output, at most 200 dB.

    Args:
        expected: An output, by sample.
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


def complaint(log: Sequence[str]) -> str:
    """Return the first line of a log that tells of an unsupported op or an error."""
    for line in log:
        if found := re.match(r"E\d{4} .*?\] (?:.*(?:error|INVALID_ARGUMENT): )?(.*)", line):
            return found[1]
        if found := re.match(r"([A-Z0-9_]+: .*?\.)( |$)(?!\])", line):
            return found[1]
    return ""


def outcome(expected: Sequence[Sample], result: dict[str, Any]) -> dict[str, Any]:
    """Return a row's part for one precision."""
    log = [line for line in result["log"] if not line.startswith(("INFO", "WARNING"))]
    words = complaint(log)
    if "error" in result:
        return {"outcome": "refused", "words": words}
    if words:
        return {"outcome": "logged", "words": words}
    answers = result["answers"]
    outputs = [*zip(zip(*expected, strict=True), zip(*answers, strict=True), strict=True)]
    if min(sqnr_db(*output) for output in outputs) < WRONG_DB:
        return {"outcome": "wrong"}
    if all(np.issubdtype(values.dtype, np.integer) for values in expected[0]):
        distances = [
            int(np.abs(one.astype(np.int64) - other).max(initial=0))
            for pair in zip(expected, answers, strict=True)
            for one, other in zip(*pair, strict=True)
        ]
        return {"outcome": "codes", "codes_off": max(distances)}
    floor = min(sqnr_db(*output, deviations=_DEVIATIONS) for output in outputs)
    return {"outcome": "close", "sqnr_db": math.floor(floor)}


def measure(python: str, files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Run files in both precisions; return a row a file, with the seconds of compilation."""
    inputs = {file: samples(file.read_bytes()) for file in files}
    expected = {file: reference(file.read_bytes(), inputs[file]) for file in files}
    jobs = [
        (
            file.read_bytes(),
            inputs[file],
            kernels,
            [(values.shape, values.dtype.str) for values in expected[file][0]],
        )
        for file in files
        for kernels in KERNELS
    ]
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "jobs"), Path(folder, "answers")
        given.write_bytes(pickle.dumps(jobs))
        subprocess.run([python, _ENGINE, given, made], check=True, stderr=subprocess.DEVNULL)
        results = iter(pickle.loads(made.read_bytes()))
    rows: dict[str, dict[str, Any]] = {}
    for file in files:
        row = rows[file.name.removesuffix(".tflite")] = {}
        for kernels in KERNELS:
            result = next(results)
            row[kernels] = {**outcome(expected[file], result), "seconds": result.get("seconds")}
    return rows


def _cell(part: dict[str, Any]) -> str:
    seconds = f" ({part['seconds']:.2f} s)" if part["seconds"] is not None else ""
    match part["outcome"]:
        case "close":
            return f"≥ {part['sqnr_db']} dB{seconds}"
        case "codes":
            off = part["codes_off"]
            return (f"{off} code{'s' * (off > 1)} off" if off else "same codes") + seconds
        case "wrong":
            return f"wrong{seconds}"
        case other:
            return f"{other}: {part['words']}"


def page(rows: dict[str, dict[str, Any]]) -> str:
    """Return the rows as a table in Markdown."""
    lines = ["| file | float32 | float16 |", "| --- | --- | --- |"]
    lines += [
        f"| `{name}` | {' | '.join(_cell(row[kernels]) for kernels in KERNELS)} |"
        for name, row in rows.items()
    ]
    return "\n".join(lines)


def write(rows: dict[str, dict[str, Any]]) -> None:
    """Write the data: one line for each file and precision, without times."""
    parts = {
        f"{name} {kernels}": {key: part[key] for key in part if key != "seconds"}
        for name, row in rows.items()
        for kernels, part in row.items()
    }
    lines = [f"  {json.dumps(name)}: {json.dumps(part)}" for name, part in parts.items()]
    DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    measured = measure(
        sys.argv[1], [Path(each) for each in sys.argv[2:]] or sorted(_CONVERTED.glob("*.tflite"))
    )
    print(page(measured))
    if not sys.argv[2:]:
        write(measured)
