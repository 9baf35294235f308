"""
What an executor costs and gains: samples per second on worker processes, and what travels.

Run it with `python -m tests.bench.speed.bench_executors [--samples N] [--repeats N]`; it takes some
minutes. It measures `edgeq.compare` of MobileNetV2 at 224×224 (random weights: time does not depend
on them), quantized by the default preset, and prints

- samples per second, and per core, of this process on one core and of 1, 2 and 4 worker processes,
  with the ratio to one worker; the rounds take turns, so that a machine that is busy is so for all;
- the same with samples that the workers read themselves;
- milliseconds of CPU that a sample takes on the workers and in the client, which a busy machine
  changes less: two workers that take no more than one are twice as fast on free cores;
- what the parts of a sample take: torch, the quantized torch graph, the file, the rest;
- bytes of the model and of a sample, and milliseconds of the client for each sample that it sends;
- from these, what the 50,000 images of ImageNet take on 8 and 64 workers.

`--model vit` measures ViT-B/16 in its place, in float torch and a file with dynamic ranges.
"""

from __future__ import annotations

import argparse
import functools
import os
import pickle
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

IMAGES = 50_000


def made(name: str) -> Any:
    """Quantize a model, with random weights."""
    import torch
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification
    from transformers.models.vit import ViTConfig, ViTForImageClassification

    from fixtures.models import normal
    from pytest_edgeq import Edgeq

    class Logits(torch.nn.Module):
        def __init__(self, net: Any) -> None:
            super().__init__()
            self.net = net

        def forward(self, pixels: torch.Tensor) -> Any:
            return self.net(pixels).logits

    torch.manual_seed(0)
    image = [normal(1, 3, 224, 224, seed=seed) for seed in range(4)]
    if name == "vit":
        config = ViTConfig()
        config.num_labels = 1000
        net: torch.nn.Module = ViTForImageClassification(config)
        options: dict[str, Any] = {"quantizer": "recipe_dynamic_wi8_afp32"}
    else:
        net = MobileNetV2ForImageClassification(MobileNetV2Config())
        options = {"calibration": image}
    model = Logits(net).eval()
    return Edgeq(cache_dir=os.environ.get("EDGEQ_BENCH_CACHE")).quantize(
        model, (image[0],), **options
    )


def images(count: int) -> Iterator[Any]:
    """Make noise of the size of an image, different each time."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return (torch.randn(1, 3, 224, 224, generator=generator) for _ in range(count))


def read(indices: range) -> Iterator[Any]:
    """Make the same on a worker."""
    import torch

    for index in indices:
        generator = torch.Generator().manual_seed(index)
        yield torch.randn(1, 3, 224, 224, generator=generator)


class Round(NamedTuple):
    """One round."""

    rate: float  # samples per second
    worker_ms: float  # cPU of the workers for a sample, in milliseconds
    client_ms: float  # cPU of this process for a sample


def _cpu() -> tuple[float, float]:
    """Return the seconds of CPU that this process's children, and it itself, have taken."""
    import psutil

    times = [each.cpu_times() for each in psutil.Process().children(recursive=True)]
    return sum(each.user + each.system for each in times), time.process_time()


def rates(
    quantized: Any, samples: int, repeats: int, workers: Sequence[int]
) -> dict[str, list[Round]]:
    """Measure each way to run, once a repeat; the ways take turns."""
    from pytest_edgeq import Edgeq

    here = Edgeq(threads=1)
    pools = {count: Edgeq(executor=f"processes:{count}") for count in workers}
    ways: dict[str, Callable[[int], Any]] = {
        "this process": lambda n: here.compare(quantized, images(n))
    }

    def sent(session: Edgeq, count: int) -> Any:
        return session.compare(quantized, images(count))

    def read_there(session: Edgeq, count: int) -> Any:
        return session.compare(quantized, session.samples(read, count))

    for count, session in pools.items():
        ways[f"{count} sent"] = functools.partial(sent, session)
        ways[f"{count} read"] = functools.partial(read_there, session)
    for way in ways.values():
        way(16)  # opens the model on every worker
    found: dict[str, list[Round]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            started, before = time.perf_counter(), _cpu()
            way(samples)
            seconds = time.perf_counter() - started
            spent = [1000 * (two - one) / samples for one, two in zip(before, _cpu(), strict=True)]
            found[name].append(Round(samples / seconds, *spent))
    for session in pools.values():
        session.close()
    return found


def parts(quantized: Any, samples: int = 12) -> dict[str, float]:
    """Return milliseconds that torch, the quantized graph, the file and a whole sample take."""
    import torch

    from pytest_edgeq import Edgeq, litert

    torch.set_num_threads(1)
    given = list(images(samples))

    def milliseconds(call: Callable[[Any], Any]) -> float:
        call(given[0])
        with torch.no_grad():
            seconds = []
            for image in given:
                started = time.perf_counter()
                call(image)
                seconds.append(time.perf_counter() - started)
        return 1000 * statistics.median(seconds)

    session = Edgeq(threads=1)
    found = {"torch": milliseconds(quantized.float_model)}
    if quantized.simulated is not None:
        found["quantized graph"] = milliseconds(litert.copied_to_run(quantized.simulated))
    if quantized.float_edge is not None:
        names = quantized.input_names
        found["float file"] = milliseconds(
            lambda image: quantized.float_edge.run(names, [image.numpy()], "xnnpack")
        )
    found["file"] = milliseconds(lambda image: quantized.run(image, runtime="xnnpack"))
    started = time.perf_counter()
    session.compare(quantized, given)
    found["whole sample"] = 1000 * (time.perf_counter() - started) / samples
    return found


def sending(quantized: Any) -> tuple[int, int, float]:
    """Return bytes of the model and of a sample, and the client's milliseconds a sample."""
    import hashlib

    from pytest_edgeq.compare.executors.remote import pickled_model

    bound = [quantized.spec.bind(image, "sample") for image in images(64)]
    content = pickled_model(quantized, "xnnpack", lambda: bound[0])
    started = time.perf_counter()
    size = 0
    digest = hashlib.sha256()
    for sample in bound:
        digest.update(sample.arrays()[0].data)
        size = len(pickle.dumps(sample))
    return len(content), size, 1000 * (time.perf_counter() - started) / len(bound)


def estimate(per_worker: float, client_ms: float, workers: int, model: int) -> str:
    """Return minutes for ImageNet, by workers with a core each, read there or sent."""
    computing = IMAGES / (per_worker * workers)
    sent = max(computing, IMAGES * client_ms / 1000)
    start = 10 + model * workers / 1e9 * 8  # seconds: imports, and the model by 1 Gbit/s
    return f"read there {(computing + start) / 60:.1f} min, sent {(sent + start) / 60:.1f} min"


def main() -> None:
    """Print all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("mobilenet", "vit"), default="mobilenet")
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=(1, 2, 4))
    options = parser.parse_args()
    quantized = made(options.model)
    cores = len(os.sched_getaffinity(0))
    print(f"{options.model}, {options.samples} samples a round, {cores} cores, {os.getloadavg()}")
    for name, spent in parts(quantized).items():
        print(f"  {name}: {spent:.1f} ms")
    model, size, sent_ms = sending(quantized)
    print(f"model {model / 1e6:.1f} MB, sample {size / 1e3:.0f} kB, sent in {sent_ms:.2f} ms")
    found = rates(quantized, options.samples, options.repeats, options.workers)
    for name, each in found.items():
        count = int(name.split()[0]) if name[0].isdigit() else 1
        base = found[f"1 {name.split()[1]}" if name[0].isdigit() else name]
        ratios = [one.rate / other.rate for one, other in zip(each, base, strict=True)]
        rate, worker_ms, client_ms = (statistics.median(one) for one in zip(*each, strict=True))
        print(
            f"{name:>13}: {rate:6.2f} samples/s, {rate / min(count, cores):6.2f} a core, "
            f"× {statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f}) of one; "
            f"CPU a sample: workers {worker_ms:.1f} ms, client {client_ms:.1f} ms"
        )
    worker_ms = statistics.median(each.worker_ms for each in found["1 read"])
    for workers in (8, 64):
        told = estimate(1000 / worker_ms, sent_ms, workers, model)
        print(f"ImageNet, {workers} workers with a core each: {told}")


if __name__ == "__main__":
    main()
