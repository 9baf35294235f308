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
    """
    A network of a library, made small, and its data.

    Attributes:
        name: For tables; of timm the name of the model there.
        family: What it is a kind of.
        make: Gives the module with random weights, which the caller seeds.
        sample: Gives the inputs of a seed.
    """

    name: str
    family: str
    make: Callable[[], nn.Module]
    sample: Callable[[int], Sample]

    def model(self) -> nn.Module:
        """Give the module in eval mode, always with the same weights, none of them trivial."""
        torch.manual_seed(0)
        made = self.make().eval()
        settle(made, [self.sample(300 + i) for i in range(4)])
        return made


@dataclass(frozen=True)
class Result:
    """
    What was said of one build.

    Attributes:
        name: Of the architecture.
        family: Of the architecture.
        flow: That it went through.
        verdict: `sound`, `alarm`, `refused` (no file) or `failed` (no answer about the file).
        told: The first line of the cause or of the error.
        findings: Of every op that is called wrong: its name, excess in LSB, and what was found;
            then those of `edgeq.check`; of a refusal its last lines; of a failure where it was
            raised.
        ops: How many the file has.
        coverage: Share of them that were paired.
        unpaired: Names of the others.
        sqnr_db: Of the output to torch's.
        quantize_s: Seconds.
        localize_s: Seconds.
    """

    name: str
    family: str
    flow: str
    verdict: str = "sound"
    told: str = ""
    findings: tuple[str, ...] = ()
    ops: int = 0
    coverage: float = 0.0
    unpaired: tuple[str, ...] = ()
    sqnr_db: float | None = None
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


ARCHITECTURES: dict[str, Architecture] = {}
"""All of them by name."""


def _add(
    name: str, family: str, make: Callable[[], nn.Module], sample: Callable[[int], Sample]
) -> None:
    assert name not in ARCHITECTURES, name
    ARCHITECTURES[name] = Architecture(name, family, make, sample)


def _timm(
    name: str, family: str, size: int = 64, *, blocks: int | None = None, **arguments: Any
) -> None:
    """
    A model of timm.

    Args:
        name: There.
        family: What it is a kind of.
        size: Of the images, in pixels.
        blocks: How many of each stage are kept, where no argument says it.
        arguments: What is other than the name stands for.
    """

    def make() -> nn.Module:
        made: nn.Module = _library("timm").create_model(name, num_classes=_CLASSES, **arguments)
        if blocks is not None:
            for module in made.modules():
                stage = getattr(module, "blocks", None)
                if isinstance(stage, (nn.Sequential, nn.ModuleList)):
                    module.blocks = stage[:blocks]
        return made

    _add(name, family, make, functools.partial(_image, size))


def _vision(
    path: str,
    family: str,
    sample: Callable[[int], Sample],
    output: str | int | None = None,
    **arguments: Any,
) -> None:
    """A model of torchvision.models, `segmentation.fcn_resnet50`, without weights."""

    def make() -> nn.Module:
        _library("torchvision")
        module, _, function = f"torchvision.models.{path}".rpartition(".")
        made: nn.Module = getattr(_library(module), function)(weights=None, **arguments)
        return made if output is None else Picked(made, output)

    _add(f"torchvision_{path.rpartition('.')[2]}", family, make, sample)


_STATES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 32,
}
_VIT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": _CLASSES,
}
_CAUSAL: dict[str, Any] = {
    **_STATES,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED: dict[str, Any] = {**_CAUSAL, "num_key_value_heads": 2}


def _transformer(
    name: str,
    family: str,
    model: str,
    settings: dict[str, Any],
    output: str = "last_hidden_state",
    arguments: Sequence[str] = ("input_ids",),
    sample: Callable[[int], Sample] = _ids,
    **more: Any,
) -> None:
    """A model of transformers with these settings in its config."""

    def make() -> nn.Module:
        kind = getattr(_library("transformers"), model)
        return Picked(kind(kind.config_class(**settings, **more)), output, arguments)

    _add(name, family, make, sample)


_LOGITS: dict[str, Any] = {"output": "logits"}
_PIXELS: dict[str, Any] = {"arguments": ("pixel_values",), "sample": functools.partial(_image, 32)}
_PIXELS_64: dict[str, Any] = {**_PIXELS, "sample": functools.partial(_image, 64)}

# ------------------------------------------------------------------------------------- timm

_ONES = (1, 1, 1, 1)
_SMALL_VIT: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 4,
}

_timm("resnet10t", "resnet")
_timm("resnext50_32x4d", "resnet", layers=_ONES)
_timm("seresnext26d_32x4d", "resnet", layers=_ONES)
_timm("ecaresnet26t", "resnet", layers=_ONES)
_timm("resnetblur50", "resnet", layers=_ONES)
_timm("skresnet18", "sknet", layers=_ONES)
_timm("resnest14d", "resnest")
_timm("res2net50_14w_8s", "res2net", layers=_ONES)
_timm("resnetv2_50", "resnetv2", layers=_ONES)
_timm("resnetv2_50d_gn", "resnetv2", layers=_ONES)
_timm("mobilenetv1_100", "mobilenet v1")
_timm("mobilenetv2_035", "mobilenet v2")
_timm("mobilenetv3_small_050", "mobilenet v3")
_timm("mobilenetv4_conv_small_035", "mobilenet v4")
_timm("test_efficientnet", "efficientnet")
_timm("tinynet_e", "efficientnet")
_timm("tf_efficientnet_lite0", "efficientnet")
_timm("test_efficientnet_gn", "efficientnet")
_timm("test_efficientnet_evos", "efficientnet")
_timm("mixnet_s", "efficientnet")
_timm("fbnetc_100", "efficientnet")
_timm("lcnet_035", "efficientnet")
_timm("mnasnet_small", "mnasnet")
_timm("densenet121", "densenet", block_config=(2, 2, 2, 2), growth_rate=8)
_timm("regnetx_002", "regnet")
_timm("regnety_002", "regnet")
_timm("convnext_atto", "convnext", depths=_ONES)
_timm("convnextv2_atto", "convnext", depths=_ONES)
_SWIN: dict[str, Any] = {
    "img_size": 64,
    "embed_dim": 16,
    "depths": (2, 2),
    "num_heads": (2, 4),
    "window_size": 4,
}
_timm("swin_tiny_patch4_window7_224", "swin", **_SWIN)
_timm("swinv2_tiny_window8_256", "swin v2", **_SWIN)
_timm("swinv2_cr_tiny_ns_224", "swin v2", **_SWIN)
_timm("vit_tiny_patch16_224", "vit", 32, **_SMALL_VIT)
_timm("vit_relpos_small_patch16_224", "vit", 32, **_SMALL_VIT)
_timm("vit_small_patch14_reg4_dinov2", "dinov2", 32, **_SMALL_VIT)
_timm("deit_tiny_distilled_patch16_224", "deit", 32, **_SMALL_VIT)
_timm("deit3_small_patch16_224", "deit", 32, **_SMALL_VIT)
_timm("eva02_tiny_patch14_224", "eva", 32, **_SMALL_VIT)
_timm("beit_base_patch16_224", "beit", 32, **_SMALL_VIT)
_MAXVIT: dict[str, Any] = {
    "img_size": 64,
    "depths": (1, 1, 1, 1),
    "embed_dim": (16, 16, 32, 32),
    "stem_width": 16,
    "transformer_dim_head": 8,
}
_timm("maxvit_pico_rw_256", "maxvit", **_MAXVIT)
_timm("coatnet_pico_rw_224", "coatnet", **_MAXVIT)
_timm("coatnet_rmlp_nano_rw_224", "coatnet", **_MAXVIT)
_timm("xcit_nano_12_p16_224", "xcit", img_size=64, embed_dim=32, depth=2)
_timm("cait_xxs24_224", "cait", 32, **_SMALL_VIT)
_timm("fastvit_t8", "fastvit", layers=_ONES)
_timm("botnet26t_256", "botnet", img_size=64, width_factor=0.25)
_timm("halonet26t", "halonet", img_size=256, size=256, width_factor=0.125)
_timm("mobileone_s0", "mobileone", width_factor=0.5)
_timm("repvgg_a0", "repvgg", width_factor=0.25)
_timm("mobilevit_xxs", "mobilevit")
_timm("mobilevitv2_050", "mobilevit")
_timm("poolformer_s12", "poolformer", blocks=1)
_timm("caformer_s18", "metaformer", blocks=1)
_timm("mixer_s16_224", "mlp-mixer", img_size=64, blocks=2)
_timm("gmlp_ti16_224", "gmlp", img_size=64, blocks=2)
_timm("resmlp_12_224", "resmlp", img_size=64, blocks=2)
_timm("coat_lite_tiny", "coat", img_size=64, serial_depths=_ONES, embed_dims=(16, 16, 32, 32))
_timm("coat_tiny", "coat", img_size=64, serial_depths=_ONES, parallel_depth=1)
_timm("levit_128s", "levit", img_size=64, depth=(1, 1, 1))
_timm("efficientformer_l1", "efficientformer", 224, depths=_ONES)
_timm("efficientformerv2_s0", "efficientformer", img_size=64, depths=_ONES)
_timm("ghostnet_050", "ghostnet")
_timm("ghostnetv2_100", "ghostnet")
_timm("repghostnet_050", "ghostnet")
_timm("hrnet_w18_small", "hrnet")
_timm("dpn48b", "dpn", k_sec=_ONES)
_timm("test_nfnet", "nfnet")
_timm("dm_nfnet_f0", "nfnet", depths=_ONES, channels=(16, 32, 32, 64), group_size=8)
_timm("pvt_v2_b0", "pvt v2", depths=_ONES)
_timm("twins_pcpvt_small", "twins", img_size=64, depths=_ONES)
_timm("twins_svt_small", "twins", img_size=64, depths=_ONES)
_timm("crossvit_tiny_240", "crossvit", 240, depth=((1, 1, 0),))
_timm("edgenext_xx_small", "edgenext", depths=_ONES)
_timm("convit_tiny", "convit", 32, **_SMALL_VIT)
_timm("visformer_tiny", "visformer", img_size=64, depth=(1, 1, 1))
_timm("pit_ti_224", "pit", img_size=64, depth=(1, 1, 1))
_timm("tnt_s_legacy_patch16_224", "tnt", 32, img_size=32, depth=2, embed_dim=48)
_timm("gcvit_xxtiny", "gcvit", img_size=64, blocks=1)
_timm("davit_tiny", "davit", depths=_ONES, embed_dims=(16, 32, 32, 64), num_heads=(2, 2, 4, 4))
_timm("focalnet_tiny_srf", "focalnet", blocks=1)
_timm("mvitv2_tiny", "mvit", img_size=64, blocks=1)
_timm("sequencer2d_s", "sequencer", 32, img_size=32, layers=_ONES)
_timm("convmixer_768_32", "convmixer", blocks=2)
_timm("cspresnet50", "cspnet")
_timm("ese_vovnet19b_slim_dw", "vovnet")
_timm("dla46_c", "dla")
_timm("xception41", "xception")
_timm("rexnet_100", "rexnet", width_mult=0.5)
_timm("hgnetv2_b0", "hgnet")
_timm("mambaout_femto", "mambaout", depths=_ONES)
_timm("efficientvit_b0", "efficientvit")
_timm("efficientvit_m0", "efficientvit", img_size=64)
_timm("repvit_m0_9", "repvit", depth=_ONES)
_timm("starnet_s1", "starnet", depths=_ONES)
_timm("swiftformer_xs", "swiftformer")
_timm("tiny_vit_5m_224", "tiny vit", 224, depths=_ONES)
_timm("inception_next_atto", "inception", depths=_ONES)
_timm("fasternet_t0", "fasternet", depths=_ONES)
_timm("hiera_tiny_224", "hiera", img_size=(64, 64), stages=_ONES, embed_dim=16)


def _vgg() -> nn.Module:
    _library("timm")
    widths = [8, "M", 16, "M", 16, 16, "M", 32, 32, "M", 32, 32, "M"]
    norm = nn.BatchNorm2d
    made: nn.Module = _library("timm.models.vgg").VGG(
        widths, num_classes=_CLASSES, norm_layer=norm, mlp_ratio=1 / 64
    )
    return made


def _volo() -> nn.Module:
    _library("timm")
    made: nn.Module = _library("timm.models.volo").VOLO(
        layers=(1, 1, 1, 1),
        img_size=64,
        num_classes=_CLASSES,
        embed_dims=(32, 32, 32, 32),
        num_heads=(2, 2, 2, 2),
    )
    return made


_add("vgg_bn", "vgg", _vgg, functools.partial(_image, 64))
_add("volo", "volo", _volo, functools.partial(_image, 64))

# ------------------------------------------------------------------------------- torchvision

_vision("squeezenet1_1", "squeezenet", functools.partial(_image, 64), num_classes=_CLASSES)
_vision("shufflenet_v2_x0_5", "shufflenet", functools.partial(_image, 64), num_classes=_CLASSES)
_vision("mnasnet0_5", "mnasnet", functools.partial(_image, 64), num_classes=_CLASSES)
_vision(
    "googlenet", "googlenet", functools.partial(_image, 64), aux_logits=False, init_weights=False
)
_vision(
    "segmentation.lraspp_mobilenet_v3_large",
    "segmentation",
    functools.partial(_image, 64),
    "out",
    weights_backbone=None,
)
_vision(
    "segmentation.deeplabv3_mobilenet_v3_large",
    "segmentation",
    functools.partial(_image, 64),
    "out",
    weights_backbone=None,
)
_vision(
    "segmentation.fcn_resnet50",
    "segmentation",
    functools.partial(_image, 32),
    "out",
    weights_backbone=None,
)
_vision("video.r3d_18", "video", functools.partial(_video, 4, 32), num_classes=_CLASSES)
_vision("optical_flow.raft_small", "optical flow", functools.partial(_two_images, 128), 0)

# ------------------------------------------------------------------------------ transformers

_transformer("bert", "bert", "BertModel", _STATES)
_transformer("roberta", "roberta", "RobertaModel", _STATES)
_transformer("albert", "albert", "AlbertModel", _STATES, embedding_size=16)
_transformer("electra", "electra", "ElectraModel", _STATES, embedding_size=16)
_transformer("mpnet", "mpnet", "MPNetModel", _STATES)
_transformer("data2vec-text", "data2vec", "Data2VecTextModel", _STATES)
_transformer("squeezebert", "squeezebert", "SqueezeBertModel", _STATES, embedding_size=32)
_transformer("roformer", "roformer", "RoFormerModel", _STATES)
_transformer("convbert", "convbert", "ConvBertModel", _STATES)
_transformer("esm", "esm", "EsmModel", _STATES, pad_token_id=1, mask_token_id=2)
_transformer(
    "modernbert",
    "modernbert",
    "ModernBertModel",
    _STATES,
    pad_token_id=0,
    bos_token_id=1,
    cls_token_id=1,
    eos_token_id=2,
    sep_token_id=2,
    global_attn_every_n_layers=2,
    local_attention=8,
)
_transformer(
    "mobilebert",
    "mobilebert",
    "MobileBertModel",
    _STATES,
    embedding_size=16,
    intra_bottleneck_size=16,
)
_transformer(
    "deberta-v2",
    "deberta",
    "DebertaV2Model",
    _STATES,
    relative_attention=True,
    pos_att_type=["p2c", "c2p"],
)
_transformer(
    "deberta",
    "deberta",
    "DebertaModel",
    _STATES,
    relative_attention=True,
    pos_att_type=["p2c", "c2p"],
)
_transformer(
    "distilbert",
    "distilbert",
    "DistilBertModel",
    {"vocab_size": _VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64},
)
_transformer(
    "xlnet",
    "xlnet",
    "XLNetModel",
    {"vocab_size": _VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
    use_mems_eval=False,
)
_GPT2: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_transformer("gpt2", "gpt2", "GPT2LMHeadModel", _GPT2, **_LOGITS)
_transformer("gptj", "gptj", "GPTJForCausalLM", _GPT2, **_LOGITS, rotary_dim=4)
_transformer("codegen", "codegen", "CodeGenForCausalLM", _GPT2, **_LOGITS, rotary_dim=4)
_transformer(
    "gpt-neo",
    "gpt-neo",
    "GPTNeoForCausalLM",
    {
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": 32,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
        "use_cache": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    **_LOGITS,
)
_transformer("gpt-neox", "gpt-neo", "GPTNeoXForCausalLM", _CAUSAL, **_LOGITS)
_transformer("opt", "opt", "OPTForCausalLM", _CAUSAL, **_LOGITS, ffn_dim=64, word_embed_proj_dim=32)
_transformer(
    "bloom",
    "bloom",
    "BloomForCausalLM",
    {"vocab_size": _VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "use_cache": False},
    **_LOGITS,
)
_transformer("falcon", "falcon", "FalconForCausalLM", _CAUSAL, **_LOGITS)
_transformer("llama", "llama", "LlamaForCausalLM", _GROUPED, **_LOGITS)
_transformer("qwen2", "qwen", "Qwen2ForCausalLM", _GROUPED, **_LOGITS)
_transformer("qwen3", "qwen", "Qwen3ForCausalLM", _GROUPED, **_LOGITS, head_dim=8)
_transformer("gemma2", "gemma", "Gemma2ForCausalLM", _GROUPED, **_LOGITS, head_dim=8)
_transformer(
    "gemma3", "gemma", "Gemma3ForCausalLM", _GROUPED, **_LOGITS, head_dim=8, sliding_window=4
)
_transformer("mistral", "mistral", "MistralForCausalLM", _GROUPED, **_LOGITS, sliding_window=4)
_transformer("phi", "phi", "PhiForCausalLM", _CAUSAL, **_LOGITS)
_transformer("phi3", "phi", "Phi3ForCausalLM", _GROUPED, **_LOGITS)
_transformer("stablelm", "stablelm", "StableLmForCausalLM", _GROUPED, **_LOGITS)
_transformer("olmo2", "olmo", "Olmo2ForCausalLM", _GROUPED, **_LOGITS)
_transformer("cohere", "cohere", "CohereForCausalLM", _GROUPED, **_LOGITS)
_transformer("granite", "granite", "GraniteForCausalLM", _GROUPED, **_LOGITS)
_transformer(
    "t5-encoder",
    "t5",
    "T5EncoderModel",
    {
        "vocab_size": _VOCABULARY,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
    },
)
_transformer(
    "mamba",
    "mamba",
    "MambaForCausalLM",
    {
        "vocab_size": _VOCABULARY,
        "hidden_size": 16,
        "state_size": 4,
        "num_hidden_layers": 1,
        "use_cache": False,
    },
    **_LOGITS,
)
_transformer(
    "rwkv",
    "rwkv",
    "RwkvForCausalLM",
    {
        "vocab_size": _VOCABULARY,
        "hidden_size": 16,
        "attention_hidden_size": 16,
        "num_hidden_layers": 2,
        "use_cache": False,
    },
    **_LOGITS,
)
_transformer("vit", "vit", "ViTForImageClassification", _VIT, **_LOGITS, **_PIXELS)
_transformer("deit", "deit", "DeiTForImageClassification", _VIT, **_LOGITS, **_PIXELS)
_transformer("dinov2", "dinov2", "Dinov2ForImageClassification", _VIT, **_LOGITS, **_PIXELS)
_transformer(
    "beit",
    "beit",
    "BeitForImageClassification",
    _VIT,
    **_LOGITS,
    **_PIXELS,
    use_relative_position_bias=True,
)
_transformer(
    "data2vec-vision",
    "data2vec",
    "Data2VecVisionForImageClassification",
    _VIT,
    **_LOGITS,
    **_PIXELS,
    use_relative_position_bias=True,
)
_transformer(
    "yolos",
    "detr",
    "YolosForObjectDetection",
    {**_VIT, "image_size": (32, 32)},
    output="pred_boxes",
    **_PIXELS,
    num_detection_tokens=8,
)
_transformer(
    "segformer",
    "segformer",
    "SegformerForSemanticSegmentation",
    {
        "depths": [1, 1, 1, 1],
        "hidden_sizes": [16, 16, 32, 32],
        "num_attention_heads": [1, 2, 2, 4],
        "decoder_hidden_size": 32,
        "num_labels": _CLASSES,
    },
    **_LOGITS,
    **_PIXELS_64,
)
_transformer(
    "cvt",
    "cvt",
    "CvtForImageClassification",
    {"embed_dim": [16, 32, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3]},
    **_LOGITS,
    **_PIXELS_64,
)
_transformer(
    "resnet",
    "resnet",
    "ResNetForImageClassification",
    {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 2], "num_labels": 10},
    **_LOGITS,
    **_PIXELS_64,
)
_CLIP: dict[str, Any] = {**_STATES, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
_transformer("clip-text", "clip", "CLIPTextModel", _CLIP)
_transformer("clip-vision", "clip", "CLIPVisionModel", _VIT, **_PIXELS)
_transformer(
    "clip",
    "clip",
    "CLIPModel",
    {"text_config": _CLIP, "vision_config": _VIT, "projection_dim": 16},
    output="logits_per_image",
    arguments=("input_ids", "pixel_values"),
    sample=functools.partial(_pixels_and_ids, 32),
)
_transformer("siglip-vision", "siglip", "SiglipVisionModel", _VIT, **_PIXELS)
_AUDIO: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16, 16),
    "conv_stride": (5, 4, 2),
    "conv_kernel": (10, 8, 4),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
_WAVE: dict[str, Any] = {"arguments": ("input_values",), "sample": _noise(1, 1600)}
_transformer("wav2vec2", "wav2vec2", "Wav2Vec2Model", _AUDIO, **_WAVE)
_transformer("hubert", "hubert", "HubertModel", _AUDIO, **_WAVE)
_transformer("wavlm", "wav2vec2", "WavLMModel", _AUDIO, **_WAVE)
_transformer(
    "audio-spectrogram",
    "ast",
    "ASTForAudioClassification",
    {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_length": 64,
        "num_mel_bins": 32,
        "num_labels": _CLASSES,
    },
    output="logits",
    arguments=("input_values",),
    sample=_noise(1, 64, 32),
)
_transformer(
    "patchtst",
    "patchtst",
    "PatchTSTForPrediction",
    {
        "num_input_channels": 3,
        "context_length": 64,
        "patch_length": 8,
        "patch_stride": 8,
        "num_hidden_layers": 2,
        "d_model": 32,
        "num_attention_heads": 4,
        "ffn_dim": 64,
        "prediction_length": 8,
    },
    output="prediction_outputs",
    arguments=("past_values",),
    sample=_noise(1, 64, 3),
)


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
    config = library.WhisperConfig(
        **_SEQ2SEQ,
        num_mel_bins=16,
        max_source_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return Encoder(library.WhisperModel(config).encoder, "input_features")


def _bart() -> nn.Module:
    library = _library("transformers")
    config = library.BartConfig(**_SEQ2SEQ, max_position_embeddings=32)
    return Encoder(library.BartModel(config).encoder, "input_ids")


def _videomae() -> nn.Module:
    library = _library("transformers")
    config = library.VideoMAEConfig(**_VIT, num_frames=4)
    return Permuted(library.VideoMAEForVideoClassification(config))


_add("whisper-encoder", "whisper", _whisper, _noise(1, 16, 64))
_add("bart-encoder", "bart", _bart, _ids)
_add("videomae", "video", _videomae, functools.partial(_video, 4, 32))


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
