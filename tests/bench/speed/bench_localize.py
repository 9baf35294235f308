"""
What `edgeq.localize` costs a sample, as ratios of one run. Run it: it is not a test.

`python -m tests.bench.speed.bench_localize` converts each model under each flow (some minutes;
names of models as arguments choose among them), then takes 4 samples, one after the other, again
and again by

- one forward of the float torch model and one run of the file on the builtin kernels with every
  tensor kept: the yardstick, of which localize may cost three (goal);
- localize;
- ai-edge-quantizer's comparison of the float and the quantized file, all tensors, all metrics, on
  the same kernels (goal: localize is faster).

Ratios are of the medians of processor time, all on one thread, so that a busy machine changes them
little. The first sample, for which the float form is made, stands apart. Last, how much the
process's memory grows from the first 100 samples to 500 (goal: by nothing that grows with them).
Linux only.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fixtures import digits
from fixtures.models import integers, normal
from pytest_edgeq import Edgeq, QuantizedModel, litert
from pytest_edgeq.compare.samples import Sample, read_samples
from pytest_edgeq.localize.localizer import Localizer
from tests.test_architectures import MODELS, Wrapped

PRESETS = ("pt2e_static_int8", "recipe_static_wi8_ai8", "recipe_dynamic_wi8_afp32")
ROUNDS = 7
COUNT = 4

Make = Callable[[], nn.Module]
Give = Callable[[int], torch.Tensor]


def _resnet18() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic")
    config.num_labels = 10
    return Wrapped(ResNetForImageClassification(config), "logits")


def _mobilenet_v2() -> nn.Module:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    return Wrapped(MobileNetV2ForImageClassification(MobileNetV2Config()), "logits")


def _vit_tiny() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=192, num_attention_heads=3, intermediate_size=768)
    return Wrapped(ViTForImageClassification(config), "logits")


def _minilm() -> nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    return Wrapped(BertModel(config), "last_hidden_state")


def _image(size: int) -> Give:
    return lambda seed: normal(1, 3, size, size, seed=seed)


def _ids(seed: int) -> torch.Tensor:
    return integers(1, 128, below=30522, seed=seed)


def _digit(seed: int) -> torch.Tensor:
    place = seed % len(digits.training())
    return digits.training().images[place : place + 1]


NETS: dict[str, tuple[Make, Give]] = {
    "digits": (digits.trained, _digit),
    **{f"{name} at 32": MODELS[name][:2] for name in ("resnet", "vit")},
    "bert with 16 tokens": MODELS["bert"][:2],
    "mobilenet_v2 at 224": (_mobilenet_v2, _image(224)),
    "resnet18 at 128": (_resnet18, _image(128)),
    "vit_tiny at 224": (_vit_tiny, _image(224)),
    "minilm with 128 tokens": (_minilm, _ids),
}


def _settled(make: Make, sample: Give) -> nn.Module:
    """Let batch norms learn what comes in, or the activations of random weights vanish."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for seed in range(0, 16, 4):
            model(torch.cat([sample(seed + i) for i in range(4)]))
    return model.eval()


def _timed(function: Callable[[], Any]) -> float:
    started = time.process_time()
    function()
    return time.process_time() - started


def measure(model: nn.Module, quantized: QuantizedModel, sample: Give) -> dict[str, float]:
    """Give milliseconds of processor time a sample, and seconds of matching."""
    from ai_edge_quantizer import model_validator
    from ai_edge_quantizer.utils.validation_utils import ValidationErrorMetric

    traced = litert.Traced(model, (sample(0),))
    float_file = litert.convert({litert.SIGNATURE: traced})
    spent: dict[str, list[float]] = {}
    forward = torch.no_grad()(model)
    kept = quantized.edge.runner("builtin", keep=True)
    names = quantized.input_names
    with Localizer(quantized) as localizer:

        def localize(given: Sequence[Sample]) -> None:
            for each in given:
                localizer.update(each)

        (first,) = read_samples([sample(1000)], quantized.spec, "evaluation")
        matching = _timed(lambda: localize([first]))
        seeds = range(1001, 1001 + COUNT)
        given = list(read_samples(map(sample, seeds), quantized.spec, "given"))
        arrays = [each.arrays() for each in given]
        encoded = [quantized.edge.encode(names, each) for each in arrays]
        # A file's own input is int8 where the float one's is float32; it takes those as well.
        # Ids are int64 in torch and int32 in either file.
        data = [
            {
                name: each.astype(np.int32) if each.dtype == np.int64 else each
                for name, each in zip(names, held, strict=True)
            }
            for held in arrays
        ]
        ways: dict[str, tuple[int, Callable[[], Any]]] = {
            "torch": (COUNT, lambda: [forward(*each.args) for each in given]),
            "invoke": (COUNT, lambda: [kept.run(each) for each in encoded]),
            "localize": (COUNT, lambda: localize(given)),
            "validate": (
                len(data),
                lambda: model_validator.compare_model(
                    float_file,
                    quantized.tflite,
                    {"serving_default": data},
                    error_metrics=list(ValidationErrorMetric),
                    use_xnnpack=False,
                    num_threads=1,
                ),
            ),
        }
        localize(given)
        for place in range(ROUNDS):
            for name, (size, function) in ways.items():
                if name == "validate" and place > 1:
                    continue
                try:
                    spent.setdefault(name, []).append(_timed(function) / size)
                except ValueError as error:
                    # Tensors of one name and other sizes: it gives up on files of PT2E flows.
                    if name != "validate" or "same size" not in str(error):
                        raise
    medians = {name: 1e3 * statistics.median(each) for name, each in spent.items() if each}
    return medians | {"matching": matching}


def _resident() -> float:
    """This process's memory in MB."""
    status = Path("/proc/self/status").read_text("ascii")
    return int(next(li for li in status.splitlines() if li.startswith("VmRSS:")).split()[1]) / 1024


def growth(quantized: QuantizedModel, sample: Give) -> float:
    """Give by how many MB the process grows from 100 samples to 500."""

    def stream() -> Iterator[torch.Tensor]:
        return (sample(seed) for seed in range(500))

    with Localizer(quantized) as localizer:
        before = 0.0
        for place, each in enumerate(read_samples(stream(), quantized.spec, "evaluation")):
            if place == 100:
                before = _resident()
            localizer.update(each)
        return _resident() - before


def main(names: list[str]) -> None:
    """Print a line a model and flow."""
    torch.set_num_threads(1)
    maker = Edgeq()
    for net, (make, sample) in NETS.items():
        if names and not any(net.startswith(name) for name in names):
            continue
        model = _settled(make, sample)
        for preset in PRESETS:
            calibration = map(sample, range(100, 116))
            quantized = maker.quantize(
                model, (sample(0),), quantizer=preset, calibration=calibration
            )
            spent = measure(model, quantized, sample)
            yardstick = spent["torch"] + spent["invoke"]
            peer = (
                f"×{spent['localize'] / spent['validate']:.2f} of validate"
                if "validate" in spent
                else "validate gives up (sizes)"
            )
            ours = spent["localize"]
            print(
                f"{net}, {preset}: torch {spent['torch']:.2f} + invoke {spent['invoke']:.2f} ms, "
                f"localize {ours:.2f} ms, × {ours / yardstick:.2f}; {peer}; "
                f"matching once {spent['matching']:.2f} s",
                flush=True,
            )
            if net == "resnet at 32":
                print(f"{net}, {preset}: memory grows by {growth(quantized, sample):.1f} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
