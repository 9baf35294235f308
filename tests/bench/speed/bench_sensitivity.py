"""
What sensitivities cost, against runs of the quantized graph. Run it: it is not a test.

`python -m tests.bench.speed.bench_sensitivity [NET …]` quantizes each network by the default preset
and prints the wall time of measuring its n layers and groups of layers as a multiple of n runs of
the quantized graph on the same samples, with one thread. Goal: at most 1.2. Both are measured
twice, in turns, so that load changes both sides.
"""

from __future__ import annotations

import sys
import time
import warnings

from tests.bench.speed.bench_speed import network

COUNT = 4
NETWORKS = ("mobilenetv2", "resnet50", "encoder", "efficientnet_lite0")


def measure(name: str) -> None:
    """Print the line of one network."""
    import torch

    from pytest_edgeq import Edgeq, litert
    from pytest_edgeq.compare.reference import call_reference
    from pytest_edgeq.quantize.mixed.simulated import SimulatedLayers

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if name == "efficientnet_lite0":
        from fixtures.efficientnet import efficientnet_lite0
        from fixtures.photographs import evaluation_crops

        model, inputs = efficientnet_lite0(), list(evaluation_crops(COUNT))
    else:
        model, sample = network(name)
        inputs = [sample(n) for n in range(COUNT)]
    quantized = Edgeq(threads=1).quantize(model.eval(), (inputs[0],), calibration=inputs)
    samples = [quantized.spec.bind(each, "sample") for each in inputs]
    engine = SimulatedLayers(quantized, *quantized.made_by)
    assert isinstance(quantized.simulated, torch.fx.GraphModule)
    simulated = litert.copied_to_run(quantized.simulated)

    def run_plain() -> float:
        started = time.perf_counter()
        for each in samples:
            call_reference(simulated, each)
        return time.perf_counter() - started

    def run_layers() -> float:
        started = time.perf_counter()
        engine.sensitivity(samples)
        return time.perf_counter() - started

    run_plain()
    plain, layers = (
        sum(both) for both in zip(*[(run_plain(), run_layers()) for _ in "12"], strict=True)
    )
    count = len(engine.candidates)
    print(
        f"{name}: {len(engine.layers)} layers, {len(engine.groups)} groups, {COUNT} samples: "
        f"{layers / 2:.1f} s, the graph {plain / 2:.2f} s: × {layers / plain / count:.2f} of "
        f"{count} runs",
        flush=True,
    )


if __name__ == "__main__":
    for each in sys.argv[1:] or NETWORKS:
        measure(each)
