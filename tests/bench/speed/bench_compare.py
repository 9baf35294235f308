"""
What `edgeq.compare` costs beyond the models it runs, and whether its memory grows.

Run it with `python -m tests.bench.speed.bench_compare`. It prints

- the share of time, on MobileNetV2 at 224×224, that is spent neither in torch's forward passes nor
  in the interpreter's invokes (goal: at most 5 % in every flow), by clocks around both;
- the peak memory of a process that compares 64 samples and of one that compares 4,096 (goal: the
  same; the samples together would take 200 MB).
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PRESETS = ("pt2e_static_int8", "recipe_static_wi8_ai8", "recipe_dynamic_wi8_afp32")


class _Clock:
    """Seconds spent in the functions that it stands around."""

    def __init__(self) -> None:
        self.spent = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Give the function with the clock around it."""

        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent += time.perf_counter() - started

        return call


def overhead(preset: str, samples: int = 48, repeats: int = 5) -> list[float]:
    """Give the share of time beyond torch and the interpreter, once a repeat."""
    import torch
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    from fixtures.models import normal
    from pytest_edgeq import Edgeq

    class MobileNet(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = MobileNetV2ForImageClassification(MobileNetV2Config())

        def forward(self, pixels: torch.Tensor) -> Any:
            return self.net(pixels).logits

    torch.set_num_threads(1)
    torch.manual_seed(0)
    maker = Edgeq()
    image = [normal(1, 3, 224, 224, seed=seed) for seed in range(4)]
    quantized = maker.quantize(MobileNet().eval(), (image[0],), quantizer=preset, calibration=image)
    clock = _Clock()
    no_grad = torch.no_grad()
    ((key, reference),) = quantized._references.items()
    assert reference.float_model is not None
    reference = dataclasses.replace(
        reference, float_model=clock.around(no_grad(reference.float_model))
    )
    if reference.make_simulated is not None:
        simulated: Any = clock.around(no_grad(reference.make_simulated()))
        reference = dataclasses.replace(reference, make_simulated=lambda: simulated)
    quantized._references = {key: reference}
    for edge in (quantized.edge, quantized.float_edge):
        if edge is not None:
            runner = edge.runner("xnnpack")
            runner.run = clock.around(runner.run)  # type: ignore[method-assign] # stands in
    shares = []
    for repeat in range(repeats + 1):
        data = [normal(1, 3, 224, 224, seed=1000 * repeat + i) for i in range(samples)]
        clock.spent = 0.0
        started = time.perf_counter()
        maker.compare(quantized, data)
        total = time.perf_counter() - started
        if repeat:
            shares.append((total - clock.spent) / clock.spent)
    return shares


def compare_many(tflite: str, samples: int) -> None:
    """Compare that many samples, converting nothing, and print the process's peak memory in MB."""
    import torch

    from fixtures.models import ResidualNet, normal, seeded
    from pytest_edgeq import Edgeq

    torch.set_num_threads(1)

    def stream() -> Iterator[torch.Tensor]:
        for seed in range(samples):
            yield normal(1, 3, 64, 64, seed=seed)

    maker = Edgeq()
    maker.compare(maker.load(tflite, reference=seeded(ResidualNet)), stream())
    # Not getrusage: its peak is inherited from the parent process (Linux, fork and exec).
    status = Path("/proc/self/status").read_text("ascii")
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    sys.stdout.write(f"{int(peak.split()[1]) / 1024:.1f}\n")


def peak_memory(tflite: Path, samples: int) -> float:
    """Peak memory in MB of a process of its own that compares that many samples."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.bench.speed.bench_compare", str(tflite), str(samples)],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    return float(result.stdout.splitlines()[-1])


def main() -> None:
    """Print both."""
    from fixtures.models import ResidualNet, normal, seeded
    from pytest_edgeq import Edgeq

    for preset in PRESETS:
        shares = overhead(preset)
        print(
            f"compare, MobileNetV2 at 224×224, {preset}, beyond torch and the interpreter: "
            f"median {statistics.median(shares):.2%}, {min(shares):.2%} … {max(shares):.2%}"
        )
    with tempfile.TemporaryDirectory() as folder:
        images = [normal(1, 3, 64, 64, seed=seed) for seed in range(8)]
        quantized = Edgeq(directory=Path(folder)).quantize(
            seeded(ResidualNet), (images[0],), calibration=images
        )
        for _ in range(3):
            few, many = (peak_memory(quantized.path, n) for n in (64, 4096))
            print(f"peak memory: 64 samples {few:.1f} MB, 4,096 {many:.1f} MB: ×{many / few:.3f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        compare_many(sys.argv[1], int(sys.argv[2]))
    else:
        main()
