"""
What a target costs beside its kernels: `edgeq.compare` on a local Python, against this process.

Run it with `python -m tests.bench.speed.bench_targets [--samples N] [--repeats N]`; it takes some
minutes. It compares MobileNetV2 at 224×224 (random weights: time does not depend on them) with its
file on `xnnpack` here and on a target that is the same Python, without emulation. The ways take
turns, so that a machine that is busy is so for both. It prints

- seconds of `compare` for each way, on one core and on all that there are, and the ratio within a
  turn (goal: the median at most 1.15). Samples are sent ahead: on one core the target computes
  beside torch, which may make the ratio less than 1;
- the same for seconds of CPU, of this process and of the target together;
- milliseconds that a sample takes to be packed and unpacked, beside those of a run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

PRESETS = ("pt2e_static_int8", "recipe_dynamic_wi8_afp32")


def mobilenet(preset: str) -> Any:
    """Quantize MobileNetV2, with random weights, in a session that has the target."""
    import torch
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    from fixtures.models import normal
    from pytest_edgeq import Edgeq

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = MobileNetV2ForImageClassification(MobileNetV2Config())

        def forward(self, pixels: torch.Tensor) -> Any:
            return self.net(pixels).logits

    torch.manual_seed(0)
    image = [normal(1, 3, 224, 224, seed=seed) for seed in range(4)]
    maker = Edgeq(
        targets={"local": [sys.executable]}, cache_dir=os.environ.get("EDGEQ_BENCH_CACHE")
    )
    calibration = None if "dynamic" in preset else image
    model = Logits().eval()
    return maker.quantize(model, (image[0],), quantizer=preset, calibration=calibration)


class Turn(NamedTuple):
    """One `compare` in this process and one on the target."""

    wall: tuple[float, float]  # seconds of both
    cpu: tuple[float, float]  # seconds of CPU of both


def _cpu() -> float:
    """Return the seconds of CPU that this process and its children have taken."""
    import psutil

    times = [each.cpu_times() for each in psutil.Process().children(recursive=True)]
    return float(sum(each.user + each.system for each in times)) + time.process_time()


def turns(quantized: Any, threads: int, samples: int, repeats: int) -> list[Turn]:
    """Return seconds of `compare`, once a repeat."""
    from fixtures.models import normal
    from pytest_edgeq import Edgeq

    session = Edgeq(threads=threads)
    data = [normal(1, 3, 224, 224, seed=100 + index) for index in range(samples)]

    def taken(runtime: str, count: int) -> tuple[float, float]:
        started, before = time.perf_counter(), _cpu()
        session.compare(quantized, data[:count], runtime=runtime)
        return time.perf_counter() - started, _cpu() - before

    for runtime in ("xnnpack", "local"):
        taken(runtime, 2)
    found = []
    for repeat in range(repeats):
        order = ("xnnpack", "local") if repeat % 2 else ("local", "xnnpack")
        both = {runtime: taken(runtime, samples) for runtime in order}
        found.append(Turn(*zip(both["xnnpack"], both["local"], strict=True)))
    return found


def parts(quantized: Any) -> dict[str, float]:
    """Return milliseconds of a run here, of one on the target, and of a sample's frame."""
    from fixtures.models import normal
    from pytest_edgeq.runtimes.workers.remote_worker import pack, unpack_head, unpack_parts

    image = normal(1, 3, 224, 224, seed=7)
    edge = quantized.edge
    encoded = edge.encode(quantized.input_names, [image.numpy()])
    [array] = encoded.values()
    payload = memoryview(b"".join(pack({}, [array])[1:]))

    def milliseconds(call: Callable[[], object]) -> float:
        call()
        taken = []
        for _ in range(50):
            started = time.perf_counter()
            call()
            taken.append(time.perf_counter() - started)
        return 1000 * statistics.median(taken)

    return {
        "a run here": milliseconds(lambda: edge.runner("xnnpack").run(encoded)),
        "a run on the target": milliseconds(lambda: edge.runner("local").run(encoded)),
        f"packing {array.nbytes / 1e3:.0f} kB": milliseconds(lambda: pack({}, [array])),
        "unpacking": milliseconds(lambda: unpack_parts(*unpack_head(payload))),
    }


def ratio(found: Sequence[tuple[float, float]]) -> str:
    """Return the ratio of the target to this process, and the seconds of both."""
    ratios = [there / here for here, there in found]
    here, there = (statistics.median(each) for each in zip(*found, strict=True))
    return (
        f"×{statistics.median(ratios):.3f} ({min(ratios):.3f} … {max(ratios):.3f}), "
        f"{here:.2f} s here, {there:.2f} s on the target"
    )


def main() -> None:
    """Print all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    cores = len(os.sched_getaffinity(0))
    for preset in PRESETS:
        quantized = mobilenet(preset)
        print(f"MobileNetV2 at 224×224, {preset}, {cores} cores, load {os.getloadavg()[0]:.1f}")
        for name, spent in parts(quantized).items():
            print(f"  {name}: {spent:.2f} ms")
        for threads in sorted({1, cores}):
            found = turns(quantized, threads, options.samples, options.repeats)
            print(f"  compare of {options.samples} samples, {threads} threads:")
            print(f"    {ratio([each.wall for each in found])}")
            print(f"    CPU {ratio([each.cpu for each in found])}", flush=True)


if __name__ == "__main__":
    main()
