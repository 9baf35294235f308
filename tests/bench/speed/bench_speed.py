"""
What the conversion cache and the cores save, as ratios that one run measures.

Run it with `python -m tests.bench.speed.bench_speed [ROW …]`; without rows it measures all of them,
which takes minutes. Every figure is the median of three pairs; the two sides of a pair run one
after the other, each in a process of its own, and imports are not counted. Rows:

- `second`, `first`: quantize, and compare on 16 samples, against the shortest script that quantizes
  the same model by litert-torch alone (exported strictly, or its sums stay in float) and runs the
  file once; with a filled and with an empty cache;
- `compare`: 1,024 samples of four convolutions (4 ms each) on one core, against torch's forward
  and both interpreters alone; and the peak memory of 8,192 samples against that of 256.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

REPEATS = 3
NETWORKS = ("resnet18", "mobilenetv2", "encoder")


def network(name: str) -> tuple[Any, Callable[[int], Any]]:
    """Return a model with random weights, and what makes a sample from a seed."""
    import torch
    import transformers
    from torch import nn

    class Logits(nn.Module):
        def __init__(self, net: Any) -> None:
            super().__init__()
            self.net = net

        def forward(self, pixels: torch.Tensor) -> Any:
            return self.net(pixels).logits

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(384, 6, 1536, batch_first=True, activation="gelu")
            self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

        def forward(self, tokens: torch.Tensor) -> Any:
            return self.layers(tokens)

    class Four(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = (3, 32, 32, 32, 32)
            pairs = itertools.pairwise(sizes)
            self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairs)
            self.head = nn.Linear(32, 10)

        def forward(self, x: torch.Tensor) -> Any:
            for conv in self.convs:
                x = torch.relu(conv(x))
            return self.head(x.mean((2, 3)))

    torch.manual_seed(0)
    if name == "resnet50":
        made: Any = Logits(transformers.ResNetForImageClassification(transformers.ResNetConfig()))
    elif name.startswith("resnet"):
        depths = [2 if name == "resnet18" else 1] * 4
        config = transformers.ResNetConfig(
            hidden_sizes=[64, 128, 256, 512], depths=depths, layer_type="basic"
        )
        made = Logits(transformers.ResNetForImageClassification(config))
    elif name == "vit_b_16":
        made = Logits(transformers.ViTForImageClassification(transformers.ViTConfig()))
    elif name == "mobilenetv2":
        made = Logits(
            transformers.MobileNetV2ForImageClassification(transformers.MobileNetV2Config())
        )
    else:
        made = Encoder() if name == "encoder" else Four()
    shape = {"encoder": (1, 128, 384), "four": (1, 3, 64, 80)}.get(name, (1, 3, 224, 224))

    def sample(seed: int) -> Any:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    return made.eval(), sample


def _script(name: str) -> float:
    """The shortest way by the libraries alone."""
    import copy

    import litert_torch
    import torch
    from ai_edge_litert.interpreter import Interpreter
    from litert_torch.quantize import pt2e_quantizer
    from litert_torch.quantize.quant_config import QuantConfig
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    _import_libraries()
    model, sample = network(name)
    started = time.perf_counter()
    config = pt2e_quantizer.get_symmetric_quantization_config(is_per_channel=True)
    quantizer = pt2e_quantizer.PT2EQuantizer().set_global(config)
    graph = torch.export.export(copy.deepcopy(model), (sample(0),), strict=True).module()
    prepared = prepare_pt2e(graph, quantizer)
    with torch.no_grad():
        for seed in range(4):
            prepared(sample(seed))
    converted = convert_pt2e(prepared, fold_quantize=False)
    edge = litert_torch.convert(
        converted, (sample(0),), quant_config=QuantConfig(pt2e_quantizer=quantizer)
    )
    interpreter = Interpreter(model_content=edge.model_content())
    interpreter.allocate_tensors()
    interpreter.invoke()
    return time.perf_counter() - started


def _import_libraries() -> None:
    """Import what either side needs, part of which torch imports with the first export."""
    import litert_torch  # noqa: F401
    import torch._dynamo
    import torch.export._trace  # noqa: F401
    import torchao.quantization.pt2e.quantize_pt2e  # noqa: F401


def _maker(cache: str, threads: int | None = None) -> Any:
    _import_libraries()

    from pytest_edgeq import Edgeq

    return Edgeq(cache_dir=cache or None, threads=threads)


def _ours(name: str, cache: str, *, compares: bool) -> float:
    model, sample = network(name)
    maker = _maker(cache)
    started = time.perf_counter()
    quantized = maker.quantize(model, (sample(0),), calibration=map(sample, range(4)))
    if compares:
        maker.compare(quantized, map(sample, range(100, 116)))
    return time.perf_counter() - started


def _compared(cache: str, count: int, *, bare: bool) -> float:
    import torch

    torch.set_num_threads(1)
    model, sample = network("four")
    maker = _maker(cache, 1)
    inputs = (sample(0),)
    quantized = maker.quantize(
        model, inputs, quantizer="recipe_static_wi8_ai8", calibration=map(sample, range(8))
    )

    def samples() -> Iterator[Any]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(count):
            yield torch.randn(inputs[0].shape, generator=generator)

    if not bare:
        maker.compare(quantized, [sample(1)])
        started = time.perf_counter()
        maker.compare(quantized, samples())
        return time.perf_counter() - started
    edges = quantized.edge.runner("xnnpack"), quantized.float_edge.runner("xnnpack")
    names = quantized.input_names
    codes = quantized.edge.encode(names, [inputs[0].numpy()])
    started = time.perf_counter()
    with torch.no_grad():
        for x in samples():
            model(x)
            edges[0].run(codes)
            edges[1].run({names[0]: x.numpy()})
    return time.perf_counter() - started


def _memory(cache: str, count: int) -> float:
    _compared(cache, count, bare=False)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


_MEASURES: dict[str, Callable[..., float]] = {
    "script": _script,
    "first": lambda name, cache: _ours(name, cache, compares=False),
    "second": lambda name, cache: _ours(name, cache, compares=True),
    "bare": lambda cache: _compared(cache, 1024, bare=True),
    "compare": lambda cache: _compared(cache, 1024, bare=False),
    "memory of 256": lambda cache: _memory(cache, 256),
    "memory of 8192": lambda cache: _memory(cache, 8192),
}


def _apart(measure: str, *arguments: str) -> float:
    """Measure in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.speed.bench_speed", "--measure", measure]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "LITERT_TORCH_SHOW_PROGRESS": "n"}
    done = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return float(json.loads(done.stdout.splitlines()[-1]))


def _pairs(one: Callable[[], float], other: Callable[[], float]) -> list[tuple[float, float]]:
    return [(one(), other()) for _ in range(REPEATS)]


def _told(what: str, pairs: list[tuple[float, float]], target: str, unit: str = "s") -> None:
    ratio = statistics.median(one / other for one, other in pairs)
    ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    sides = f"{ours:.2f} {unit} | {theirs:.2f} {unit}"
    inverse = f"{1 / ratio:.2f}× faster"
    print(f"| {what} | {sides} | {ratio:.3f} ({inverse}) | {target} |")


class _Cache:
    """A directory, emptied before each measure that wants it so."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp()

    def emptied(self) -> str:
        shutil.rmtree(self.path, ignore_errors=True)
        return self.path


def _empty(cache: _Cache, measure: str, name: str) -> float:
    return _apart(measure, name, cache.emptied())


def _rows(wanted: list[str]) -> None:
    cache = _Cache()
    for name in NETWORKS:
        if "first" in wanted:
            first = _pairs(
                functools.partial(_empty, cache, "first", name),
                functools.partial(_apart, "script", name),
            )
            _told(f"first quantize, {name}", first, "≤ 1.05")
        if "second" in wanted:
            _apart("second", name, cache.path)
            second = _pairs(
                functools.partial(_apart, "second", name, cache.path),
                functools.partial(_apart, "script", name),
            )
            _told(f"second quantize + compare, {name}", second, "≤ 0.2")
    if "compare" in wanted:
        _apart("compare", cache.path)
        pairs = _pairs(lambda: _apart("compare", cache.path), lambda: _apart("bare", cache.path))
        _told("compare on one core, of the models alone", pairs, "≤ 1.2")
        pairs = [(_apart("memory of 8192", cache.path), _apart("memory of 256", cache.path))]
        _told("peak memory of 8,192 samples, of 256", pairs, "flat", "MB")


def main(arguments: list[str]) -> None:
    """Print the table, or measure one side."""
    if arguments[:1] == ["--measure"]:
        print(json.dumps(_MEASURES[arguments[1]](*arguments[2:])))
        return
    print("| what | ours | the other side | ratio | target |")
    print("| --- | --- | --- | --- | --- |")
    _rows(arguments or ["first", "second", "compare"])


if __name__ == "__main__":
    main(sys.argv[1:])
