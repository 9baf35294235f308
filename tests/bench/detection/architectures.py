"""
Architectures by others: sound builds of each, of which no op may be called wrong.

    python -m tests.bench.detection.architectures                  all, under four flows: hours
    python -m tests.bench.detection.architectures bert resnet10t --flow pt2e_static_int8
    python -m tests.bench.detection.architectures --list           the names with their families

The networks are those of transformers, timm and torchvision: small in width and depth, not in kind,
with seeded weights, as no hub is reached. A line a build, with what was said of it; with
`--json PATH` every one of them in a file.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import itertools
import json
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pytest_edgeq import Edgeq
from pytest_edgeq.errors import findings_of
from pytest_edgeq.localize.rows import LOWERING
from pytest_edgeq.numerics.findings import Finding
from tests.bench.detection.sound import FLOAT, Net, Sample, sound

FLOWS = (FLOAT, "recipe_dynamic_wi8_afp32", "recipe_static_wi8_ai8", "pt2e_static_int8")
"""The first is plain float, `quantizer=None`."""

_CLASSES = 10
_VOCABULARY = 100
_TOKENS = 16
_CALIBRATED, _JUDGED = 8, 3


@dataclass(frozen=True)
class Architecture:
    """A network of a library, made small, and its data."""

    name: str  # for tables; of timm the name of the model there
    family: str
    make: Callable[[], nn.Module]  # gives the module with random weights, which the caller seeds
    sample: Callable[[int], Sample]  # gives the inputs of a seed

    def model(self) -> nn.Module:
        """Give the module in eval mode, always with the same weights, none of them trivial."""
        torch.manual_seed(0)
        made = self.make().eval()
        settle(made, [self.sample(300 + i) for i in range(4)])
        return made


@dataclass(frozen=True)
class Result:
    """What was said of one build."""

    name: str
    family: str
    flow: str
    verdict: str = "sound"  # or `alarm`, `refused` (no file), `failed` (no answer about the file)
    told: str = ""  # the first line of the cause or of the error
    # of every op that is called wrong, then those of `edgeq.check`; the last lines of a refusal
    findings: tuple[str, ...] = ()
    ops: int = 0
    coverage: float = 0.0  # share of the ops that were paired
    unpaired: tuple[str, ...] = ()  # names of the others
    sqnr_db: float | None = None  # of the output to torch's
    quantize_s: float = 0.0
    localize_s: float = 0.0

    def __str__(self) -> str:
        """Lay it out as a line."""
        line = f"{self.name:32} {self.family:16} {self.flow:25}"
        if self.verdict != "refused":
            sqnr = "–" if self.sqnr_db is None else f"{self.sqnr_db:.1f}"
            line += f" {self.ops:5} ops {self.coverage:6.1%} {sqnr:>6} dB"
        line += f" {self.quantize_s:5.1f} s {self.localize_s:5.1f} s  {self.verdict}"
        return f"{line}: {self.told}" if self.told else line


def settle(model: nn.Module, samples: Sequence[Sample]) -> None:
    """
    Move parameters off their initial values, and batch norms to what comes in, not quite exactly.

    Zeroed last layers and layer scales of 1e-6 would hide all that is wrong behind them; with
    statistics of 0 and 1 the activations of random weights vanish or explode with depth.
    """
    generator = torch.Generator().manual_seed(1)

    def noise(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator)

    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or parameter.numel() == 0:
                continue
            least, greatest = parameter.min().item(), parameter.max().item()
            if least != greatest:
                # Of 32 features, what is initialised for a thousand says next to nothing.
                gain = (parameter.std() * parameter[0].numel() ** 0.5).item()
                if parameter.dim() > 1 and 0 < gain < 0.6:
                    parameter.mul_(0.8 / gain)
                continue
            if least == 0 and parameter.squeeze().dim() > 1:
                parameter.copy_(noise(parameter) / parameter[0].numel() ** 0.5)
            elif abs(least) < 0.2:
                # A layer scale, or a bias.
                middle = 0.0 if least == 0 else 0.5
                parameter.copy_(middle + 0.1 * noise(parameter))
            else:
                parameter.copy_(least * (1 + 0.1 * noise(parameter)))

    def meet(module: nn.Module, given: Any) -> None:
        (met,) = given
        assert isinstance(module, nn.modules.batchnorm._BatchNorm)
        assert module.running_mean is not None, "unreachable because no network goes without"
        assert module.running_var is not None, "unreachable because it comes with the mean"
        others = [d for d in range(met.dim()) if d != 1]
        # Of a single position there is no variance.
        variance = met.var(others, correction=0).clamp(min=0.1 * met.var().item() + 1e-4)
        module.running_mean.copy_(met.mean(others) + 0.2 * variance.sqrt() * noise(variance))
        module.running_var.copy_(variance * (1 + 0.1 * noise(variance)).clamp(0.7, 1.3))

    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    handles = [norm.register_forward_pre_hook(meet) for norm in norms]
    if norms:
        with torch.no_grad():
            model(*(torch.cat(tensors) for tensors in zip(*samples, strict=True)))
    for handle in handles:
        handle.remove()


def net(name: str) -> Net:
    """Give an architecture with its data: static flows calibrate on eight samples of it."""
    architecture = ARCHITECTURES[name]

    def inputs(stream: int) -> Iterator[Sample]:
        return (architecture.sample(100 * stream + i) for i in itertools.count())

    return Net(name, lambda _: architecture.model(), inputs, _JUDGED, _CALIBRATED, large=True)


# ------------------------------------------------------------------------------------- inputs


def _image(size: int, seed: int) -> Sample:
    """A smooth field with a little noise, as photographs are."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(1, 3, 5, 5, generator=generator)
    smooth = nn.functional.interpolate(coarse, (size, size), mode="bicubic", align_corners=False)
    return (smooth + 0.2 * torch.randn(1, 3, size, size, generator=generator),)


def _two_images(size: int, seed: int) -> Sample:
    return (*_image(size, 2 * seed), *_image(size, 2 * seed + 1))


def _video(frames: int, size: int, seed: int) -> Sample:
    images = [_image(size, frames * seed + i)[0] for i in range(frames)]
    return (torch.stack(images, dim=2),)


def _ids(seed: int) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    # Not the special ones, of which padding may be masked or looked for.
    return (torch.randint(5, _VOCABULARY, (1, _TOKENS), generator=generator),)


def _pixels_and_ids(size: int, seed: int) -> Sample:
    return (*_ids(seed), *_image(size, seed))


def _noise(*shape: int) -> Callable[[int], Sample]:
    def sample(seed: int) -> Sample:
        return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)),)

    return sample


# ------------------------------------------------------------------------------------- makers


class Picked(nn.Module):
    """A network with one tensor as its output."""

    def __init__(self, net: nn.Module, output: str | int, arguments: Sequence[str] = ()) -> None:
        super().__init__()
        self.net, self.output, self.arguments = net, output, tuple(arguments)

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        """Give one of the outputs."""
        if self.arguments:
            made = self.net(**dict(zip(self.arguments, given, strict=True)))
        else:
            made = self.net(*given)
        value: torch.Tensor = made[self.output]
        return value


class Encoder(nn.Module):
    """The first half of a network of two."""

    def __init__(self, net: nn.Module, argument: str) -> None:
        super().__init__()
        self.net, self.argument = net, argument

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Give the last states."""
        value: torch.Tensor = self.net(**{self.argument: given}).last_hidden_state
        return value


class Permuted(nn.Module):
    """A network that takes videos with the frames in front of the channels."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """Give the logits."""
        value: torch.Tensor = self.net(pixel_values=given.permute(0, 2, 1, 3, 4)).logits
        return value


@functools.cache
def _library(name: str) -> Any:
    """
    Import a library, with a torchvision that was built for CUDA beside a torch that was not, too.

    It looks two operators up that come with its kernels, and whatever finds it imports it: timm,
    and most models of transformers.
    """
    if importlib.util.find_spec("torchvision") is not None:
        _define_kernels()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@functools.cache
def _define_kernels() -> torch.library.Library | None:
    # The schemas go with what is given back.
    if "torchvision" in sys.modules or hasattr(torch.ops.torchvision, "nms"):
        return None
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for op in ("nms", "qnms"):
        schema = f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        library.define(schema)  # type: ignore[no-untyped-call]
    return library


def _tuples(value: Any) -> Any:
    """Return the same with tuples in place of lists, which timm and torchvision expect."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _timm(row: dict[str, Any], arguments: dict[str, Any]) -> nn.Module:
    made: nn.Module = _library("timm").create_model(row["name"], num_classes=_CLASSES, **arguments)
    if "blocks" in row:  # how many of each stage are kept, where no argument says it
        for module in made.modules():
            stage = getattr(module, "blocks", None)
            if isinstance(stage, (nn.Sequential, nn.ModuleList)):
                module.blocks = stage[: row["blocks"]]
    return made


def _torchvision(row: dict[str, Any], arguments: dict[str, Any]) -> nn.Module:
    _library("torchvision")
    module, _, function = f"torchvision.models.{row['name']}".rpartition(".")
    made: nn.Module = getattr(_library(module), function)(weights=None, **arguments)
    return Picked(made, row["output"]) if "output" in row else made


def _transformers(row: dict[str, Any]) -> nn.Module:
    kind = getattr(_library("transformers"), row["model"])
    net = kind(kind.config_class(**row["arguments"]))
    return Picked(net, row.get("output", "last_hidden_state"), row.get("inputs", ("input_ids",)))


def _made(row: dict[str, Any]) -> nn.Module:
    if row["library"] == "transformers":
        return _transformers(row)
    make = _timm if row["library"] == "timm" else _torchvision
    return make(row, {key: _tuples(each) for key, each in row.get("arguments", {}).items()})


def _sampler(kind: str, *numbers: int) -> Callable[[int], Sample]:
    makers: dict[str, Callable[..., Sample]] = {
        "ids": _ids,
        "image": _image,
        "two images": _two_images,
        "video": _video,
        "pixels and ids": _pixels_and_ids,
    }
    return _noise(*numbers) if kind == "noise" else functools.partial(makers[kind], *numbers)


def _read(row: dict[str, Any]) -> Architecture:
    """Read a row of `architectures.json`."""
    name = row["name"]
    if row["library"] == "torchvision":
        name = f"torchvision_{name.rpartition('.')[2]}"
    usual = ["ids"] if row["library"] == "transformers" else ["image", row.get("size", 64)]
    sample = _sampler(*row.get("sample", usual))
    return Architecture(name, row["family"], functools.partial(_made, row), sample)


def _vgg() -> nn.Module:
    _library("timm")
    widths = [8, "M", 16, "M", 16, 16, "M", 32, 32, "M", 32, 32, "M"]
    kind = _library("timm.models.vgg").VGG
    made: nn.Module = kind(
        widths, num_classes=_CLASSES, norm_layer=nn.BatchNorm2d, mlp_ratio=1 / 64
    )
    return made


def _volo() -> nn.Module:
    _library("timm")
    four = {"layers": (1,) * 4, "embed_dims": (32,) * 4, "num_heads": (2,) * 4}
    kind = _library("timm.models.volo").VOLO
    made: nn.Module = kind(img_size=64, num_classes=_CLASSES, **four)
    return made


_SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_layers": 1,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "vocab_size": _VOCABULARY,
}


def _whisper() -> nn.Module:
    library = _library("transformers")
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = library.WhisperConfig(**_SEQ2SEQ, **tokens, num_mel_bins=16, max_source_positions=32)
    return Encoder(library.WhisperModel(config).encoder, "input_features")


def _bart() -> nn.Module:
    library = _library("transformers")
    config = library.BartConfig(**_SEQ2SEQ, max_position_embeddings=32)
    return Encoder(library.BartModel(config).encoder, "input_ids")


def _videomae() -> nn.Module:
    library = _library("transformers")
    config = library.VideoMAEConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_frames=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_labels=_CLASSES,
    )
    return Permuted(library.VideoMAEForVideoClassification(config))


_ROWS = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
ARCHITECTURES = {
    each.name: each
    for each in (
        *map(_read, _ROWS),
        Architecture("vgg_bn", "vgg", _vgg, functools.partial(_image, 64)),
        Architecture("volo", "volo", _volo, functools.partial(_image, 64)),
        Architecture("whisper-encoder", "whisper", _whisper, _noise(1, 16, 64)),
        Architecture("bart-encoder", "bart", _bart, _ids),
        Architecture("videomae", "video", _videomae, functools.partial(_video, 4, 32)),
    )
}


# ------------------------------------------------------------------------------------- command


def judged(maker: Edgeq, name: str, flow: str) -> Result:
    """Build, localize and check, whatever fails; nothing is remembered."""
    result = Result(name, ARCHITECTURES[name].family, flow)
    began = time.perf_counter()
    try:
        built = sound(maker, net(name), flow)
    except Exception as error:  # any library's
        result = replace(result, verdict="refused", quantize_s=time.perf_counter() - began)
        # The converter's own words come last.
        return replace(result, told=_first(error), findings=tuple(str(error).splitlines()[-3:]))
    converted = time.perf_counter()
    result = replace(result, quantize_s=converted - began)
    checked: tuple[Finding, ...] = ()
    try:
        errors = maker.localize(built.quantized, built.evaluation)
        localized = time.perf_counter()
        sqnr = maker.compare(built.quantized, built.evaluation).total.sqnr_db
        try:
            maker.check(built.quantized, built.evaluation)
        except AssertionError as error:
            checked = findings_of(error)
            if not checked:
                raise
    except Exception as error:  # ours, or of what ours calls
        result = replace(result, verdict="failed", localize_s=time.perf_counter() - converted)
        frames = traceback.format_tb(error.__traceback__)
        return replace(result, told=_first(error), findings=tuple(frames))
    wrong = [row for row in errors.rows if row.verdict == LOWERING]
    return replace(
        result,
        verdict="alarm" if wrong or checked else "sound",
        told=errors.cause.splitlines()[0] if wrong else "".join(map(str, checked[:1])),
        findings=(
            *(f"{r.name}: {r.excess_lsb}; {'; '.join(r.findings)}" for r in wrong),
            *map(str, checked),
        ),
        ops=len(errors.rows),
        coverage=errors.coverage,
        unpaired=tuple(row.name for row in errors.rows if not row.matched),
        sqnr_db=sqnr,
        localize_s=localized - converted,
    )


def _first(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"


def totals(results: Sequence[Result]) -> str:
    """Count verdicts and paired ops, by flow and of all."""
    lines = []
    for flow in (*FLOWS, "all"):
        of = [each for each in results if flow in (each.flow, "all")]
        if not of:
            continue
        verdicts = Counter(each.verdict for each in of)
        ops = sum(each.ops for each in of)
        paired = sum(round(each.coverage * each.ops) for each in of)
        counts = ", ".join(
            f"{verdicts[verdict]} {verdict}" for verdict in ("sound", "alarm", "refused", "failed")
        )
        share = f"{paired} of {ops} ops paired" + (f" ({paired / ops:.2%})" if ops else "")
        lines.append(f"{flow}: {len(of)} builds, {counts}; {share}")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run the command; 1 where a sound build was called wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.detection.architectures")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of an architecture")
    parser.add_argument("--flow", action="append", choices=FLOWS)
    parser.add_argument("--json", type=Path, metavar="PATH", help="where every result is written")
    parser.add_argument("--cache-dir", type=Path, metavar="PATH", help="keeps conversions")
    parser.add_argument("--list", action="store_true", help="names and families only")
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.names) - set(ARCHITECTURES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if chosen.list:
        for each in ARCHITECTURES.values():
            print(f"{each.name:40} {each.family}")
        return 0
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    maker = Edgeq(cache_dir=chosen.cache_dir)
    results = []
    for name in chosen.names or ARCHITECTURES:
        for flow in chosen.flow or FLOWS:
            results.append(judged(maker, name, flow))
            print(results[-1], flush=True)
            if chosen.json is not None:
                chosen.json.write_text(json.dumps([asdict(r) for r in results], indent=1))
    print(totals(results))
    return int(any(each.verdict == "alarm" for each in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
