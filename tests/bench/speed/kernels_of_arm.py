"""
Where the kernels of 64-bit ARM give other values than those of this machine, as a Markdown table.

Run it with `python -m tests.bench.speed.kernels_of_arm [--root DIR] [--samples N]`; it takes some
minutes. DIR is a root of `edgeq target arm64 DIR`, by default that of `EDGEQ_TEST_ARM64`. It runs
the files of `fixtures/tflite/converted` and EfficientNet-Lite0 with its ImageNet weights on XNNPACK
and on the builtin kernels, here and under QEMU, and the builtin kernels also on an emulated x86
without AVX2 (Nehalem, by `qemu-x86_64-static`). It prints

- the machines, with their releases and instruction sets;
- of each group of files how many give another output, and the greatest difference: of integer
  outputs in codes, of float outputs in parts of the largest value of the output.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fixtures.tflite.make import CONVERTED
from pytest_edgeq.numerics.target_machine import TargetMachine
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.runtimes.registry import Runtimes
from pytest_edgeq.runtimes.workers.arm64_root import make_arm64_root
from pytest_edgeq.runtimes.workers.remote_worker import facts
from pytest_edgeq.runtimes.workers.target import Target
from pytest_edgeq.tflite.boundary import encode
from pytest_edgeq.tflite.graph import OpGraph

Inputs = dict[str, npt.NDArray[Any]]

PRESETS = ("pt2e_static_int8", "recipe_static_wi8_ai8", "recipe_dynamic_wi8_afp32")

INTEGERS = ("int8", "recipe_static_wi8_ai8", "recipe_static_wi8_ai16")
"""Files of the fixtures with integer activations, by the part of their names behind the model's."""

GROUPS = {
    "int8 and 16×8, integer outputs": (INTEGERS, ("int8", "int16")),
    "int8, float outputs": (INTEGERS, ("float32",)),
    "weight-only": (("recipe_weight_only_wi8_afp32", "recipe_weight_only_wi4_afp32"), ("float32",)),
    "dynamic": (("recipe_dynamic_wi8_afp32",), ("float32",)),
    "float": (("float",), ("float32",)),
}
"""Kinds and dtypes of the outputs."""

COLUMNS = {
    "xnnpack, ARM against here": ("xnnpack", "arm64"),
    "builtin, ARM against here": ("builtin", "arm64:builtin"),
    "builtin, ARM against no AVX2": ("no_avx2:builtin", "arm64:builtin"),
}
"""Two runtimes each."""


class Difference(NamedTuple):
    """Outputs of one file on two runtimes."""

    codes: int  # greatest difference of integer outputs
    relative: float  # greatest difference of float outputs, in parts of the output's largest value


class Row(NamedTuple):
    """A group of files."""

    name: str  # of the group
    files: Sequence[tuple[EdgeFile, Sequence[Inputs]]]  # graphs with their inputs


def drawn(edge: EdgeFile, seed: int, length: int = 1) -> Inputs:
    """
    Draw inputs of a file: standard normal, as the file's own codes; indices below 4.

    `length` is that of each dimension whose length is free.
    """
    generator = np.random.default_rng(seed)
    found = {}
    for border in edge.signature.inputs:
        dtype = border.tensor.dtype
        shape = [length if n < 0 else n for n in border.tensor.shape_signature]
        if dtype in ("int32", "int64"):
            found[border.name] = generator.integers(0, 4, shape, dtype)
        else:
            found[border.name] = encode(generator.standard_normal(shape, np.float32), border)
    return found


def fixture_files(kinds: Sequence[str], outputs: Sequence[str]) -> list[Path]:
    """Return files of the fixtures by their kinds and the dtypes of their outputs."""
    found = []
    for path in sorted(CONVERTED.glob("*.tflite")):
        [signature] = OpGraph.read(path).signatures
        dtypes = {border.tensor.dtype for border in signature.outputs}
        if path.name.split(".")[1] in kinds and dtypes <= set(outputs):
            found.append(path)
    return found


def fixture_rows(runtimes: Runtimes, samples: int) -> Iterator[Row]:
    """Yield the groups of files of the fixtures."""
    for name, (kinds, outputs) in GROUPS.items():
        edges = [EdgeFile(path, runtimes=runtimes) for path in fixture_files(kinds, outputs)]
        files = [(edge, [drawn(edge, seed) for seed in range(samples)]) for edge in edges]
        yield Row(f"{len(files)} files of the fixtures: {name}", files)


def efficientnet_rows(runtimes: Runtimes, samples: int) -> Iterator[Row]:
    """Yield EfficientNet-Lite0 under each preset, on photographs."""
    from fixtures.efficientnet import efficientnet_lite0
    from fixtures.photographs import calibration_crops, evaluation_crops
    from pytest_edgeq import Edgeq

    edgeq = Edgeq(cache_dir=os.environ.get("EDGEQ_BENCH_CACHE"))
    model = efficientnet_lite0()
    for preset in PRESETS:
        calibration = None if "dynamic" in preset else calibration_crops(16)
        quantized = edgeq.quantize(
            model, tuple(evaluation_crops(1)), quantizer=preset, calibration=calibration
        )
        edge = EdgeFile(quantized.path.read_bytes(), runtimes=runtimes)  # outlives the session
        names = [border.name for border in edge.signature.inputs]
        crops = [edge.encode(names, [crop.numpy()]) for crop in evaluation_crops(samples)]
        yield Row(f"EfficientNet-Lite0, `{preset}`", [(edge, crops)])


def difference(edge: EdgeFile, samples: Sequence[Inputs], pair: tuple[str, str]) -> Difference:
    """Run a file on two runtimes."""
    codes, relative = 0, 0.0
    for inputs in samples:
        for one, other in zip(*(edge.runner(each).run(inputs) for each in pair), strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            apart = np.abs(one.astype(np.float64) - other).max()
            if one.dtype.kind == "f":
                largest = float(np.abs(one).max()) or 1.0
                relative = max(relative, float(apart) / largest)
            else:
                codes = max(codes, int(apart))
    return Difference(codes, relative)


def cell(found: Sequence[Difference]) -> str:
    """Say how files differ: how many, and by how much."""
    apart = [each for each in found if any(each)]
    if not apart:
        return "identical"
    codes = max(each.codes for each in apart)
    relative = max(each.relative for each in apart)
    told = [f"{codes} code{'s' if codes > 1 else ''}"] if codes else []
    told += [f"{relative:.1g} of the largest value"] if relative else []
    verb = "differs" if len(apart) == 1 else "differ"
    count = f"{len(apart)} {verb}, by up to " if len(found) > 1 else "up to "
    return count + " and ".join(told)


def table(rows: Sequence[Row], columns: dict[str, tuple[str, str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield f"| file | {' | '.join(columns)} |"
    yield f"| --- |{' --- |' * len(columns)}"
    for row in rows:
        cells = (
            cell([difference(edge, samples, pair) for edge, samples in row.files])
            for pair in columns.values()
        )
        yield f"| {row.name} | {' | '.join(cells)} |"


def main(say: Callable[[str], None] = print) -> None:
    """Print the machines and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=os.environ.get("EDGEQ_TEST_ARM64"))
    parser.add_argument("--samples", type=int, default=12)
    options = parser.parse_args()
    if options.root is None:
        parser.error("--root DIR of `edgeq target arm64 DIR`, or EDGEQ_TEST_ARM64, is needed")
    commands = {"arm64": make_arm64_root(options.root, say=lambda _: None)}
    columns = dict(COLUMNS)
    emulator = shutil.which("qemu-x86_64-static")
    if emulator is None:
        say("there is no qemu-x86_64-static, and so no column of an x86 without AVX2")
        columns.popitem()
    else:
        commands["no_avx2"] = [emulator, "-cpu", "Nehalem", sys.executable]
    runtimes = Runtimes(targets={name: Target(name, c, 300) for name, c in commands.items()})
    say(f"- here: {TargetMachine.of('', facts())}")
    for name, target in runtimes.targets.items():
        say(f"- {name}: {target.start()}")
    say("")
    rows = [*fixture_rows(runtimes, options.samples), *efficientnet_rows(runtimes, options.samples)]
    for line in table(rows, columns):
        say(line)
    runtimes.close()


if __name__ == "__main__":
    main()
