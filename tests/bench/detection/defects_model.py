"""
Defects made in torch, in the quantizer or in its data: another build.

What the user believes the model to be stays the reference. Where weights or layers are wrong, the
file alone is the defective build's, as when what ships was made from a wrong checkpoint
(`with_tflite`); where only the quantization is wrong, the build is quantized anew from the same
module and held against what was remembered of the sound one.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pytest_edgeq import Edgeq, QuantizedModel
from tests.bench.detection.flatfile import shuffled
from tests.bench.detection.sound import Sample, Sound, build

# A converter without types.
# mypy: disable-error-code="misc, no-any-return"

_WEIGHTED = (nn.Conv2d, nn.Linear)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


class NotApplicableError(Exception):
    """The model or the flow has nothing that this kind of defect could sit in."""


@dataclass(frozen=True)
class Rebuilt:
    """A defective build."""

    kind: str  # as in `KINDS`
    place: str  # what was changed, in words
    quantized: QuantizedModel = field(repr=False)  # the file with the references that its user has
    # where the defect sits, any of which is a right answer; empty where it sits in no single layer
    modules: frozenset[str] = frozenset()


Made = tuple[str, QuantizedModel, frozenset[str]]


def rebuilt(maker: Edgeq, sound: Sound, kind: str, seed: int = 0) -> Rebuilt:
    """
    Build a model with a defect.

    Args:
        maker: Quantizes.
        sound: What is to be made defective.
        kind: Of `KINDS`.
        seed: Draws the layer and the noise.

    Raises:
        NotApplicableError: Nothing to make defective.
        ValueError: The plugin refuses to make such a file.
    """
    place, quantized, modules = KINDS[kind](maker, sound, random.Random(f"{kind} {seed}"))
    return Rebuilt(kind, place, quantized, modules)


# In the quantizer. ------------------------------------------------------------------------------


def _annotation_dropped(maker: Edgeq, sound: Sound, rng: random.Random) -> Made:
    for module in shuffled(_weighted(sound), rng):
        quantizer = _without(sound, module)
        try:
            quantized = _again(maker, sound, quantizer)
        except ValueError as error:
            # An op that was fused with the next layer's bears that one's name.
            if "matches no op" not in str(error):
                raise
            continue
        if quantized.op_dtypes.to_dict() == sound.quantized.op_dtypes.to_dict():
            # The converter quantizes it all the same, as weights of dynamic ops.
            continue
        alike = _named_alike(sound, module) if sound.flow.startswith("recipe_") else {module}
        return f"{module} left in float", quantized, frozenset(alike)
    raise NotApplicableError("no layer has an op of its own name")


def _named_alike(sound: Sound, module: str) -> set[str]:
    """Return the modules that a recipe's regex for one of them matches: class and last name."""
    kind, last = type(sound.module.get_submodule(module)), module.rsplit(".", 1)[-1]
    return {
        name
        for name, each in sound.module.named_modules()
        if type(each) is kind and name.rsplit(".", 1)[-1] == last
    }


def _without(sound: Sound, module: str) -> Any:
    """The flow's quantizer, which knows nothing of one layer."""
    if sound.flow.startswith("recipe_"):
        from pytest_edgeq.litert.recipes import load_recipe

        layer = type(sound.module.get_submodule(module)).__name__
        rules = load_recipe(sound.flow)
        regex = f".*{layer}_{module.rsplit('.', 1)[-1]}[;/].*"
        return [*rules, {**rules[0], "regex": regex, "algorithm_key": "no_quantize"}]

    from litert_torch.quantize.pt2e_quantizer import PT2EQuantizer
    from torchao.quantization.pt2e.quantizer import QuantizationAnnotation

    class Without(PT2EQuantizer):
        def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
            for node in model.graph.nodes:
                stack = list(node.meta.get("nn_module_stack", {}).values())
                if node.op == "call_function" and stack and stack[-1][0] == module:
                    # What is annotated already, no pattern takes.
                    node.meta["quantization_annotation"] = QuantizationAnnotation(_annotated=True)
            return super().annotate(model)

    return Without().set_global(_pt2e_preset(sound.flow).global_config)


def _per_tensor(maker: Edgeq, sound: Sound, _: random.Random) -> Made:
    if sound.flow == "pt2e_static_int8":
        quantizer: Any = "pt2e_static_int8_per_tensor"
    elif sound.flow.startswith("recipe_"):
        quantizer = _changed_rules(sound, granularity="TENSORWISE")
    else:
        raise NotApplicableError("per tensor already, or no preset without channels")
    return "weights per tensor", _again(maker, sound, quantizer), frozenset()


def _asymmetric(maker: Edgeq, sound: Sound, _: random.Random) -> Made:
    if sound.flow.startswith("recipe_"):
        quantizer = _changed_rules(sound, symmetric=False)
    else:
        # Its quantizer's own annotators refuse such a weight: "Unsupported quantization_spec".
        raise NotApplicableError("PT2EQuantizer refuses weights with zero points")
    return "weights with zero points", _again(maker, sound, quantizer), frozenset()


def _unshared(maker: Edgeq, sound: Sound, _: random.Random) -> Made:
    if not sound.flow.startswith("pt2e_static"):
        raise NotApplicableError("only PT2E annotates parameters as shared")
    from litert_torch.quantize.pt2e_quantizer import PT2EQuantizer
    from torchao.quantization.pt2e.quantizer import SharedQuantizationSpec

    changed = []

    class Unshared(PT2EQuantizer):
        def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
            annotated = super().annotate(model)
            for node in model.graph.nodes:
                found = node.meta.get("quantization_annotation")
                if found is None:
                    continue
                for operand, spec in found.input_qspec_map.items():
                    if isinstance(spec, SharedQuantizationSpec):
                        found.input_qspec_map[operand] = self.global_config.input_activation
                        changed.append(node.name)
                if isinstance(found.output_qspec, SharedQuantizationSpec):
                    found.output_qspec = self.global_config.output_activation
                    changed.append(node.name)
            return annotated

    quantizer = Unshared().set_global(_pt2e_preset(sound.flow).global_config)
    quantized = _again(maker, sound, quantizer)
    if not changed:
        raise NotApplicableError("nothing is shared")
    return f"{', '.join(sorted(set(changed)))} with parameters of their own", quantized, frozenset()


def _non_strict(maker: Edgeq, sound: Sound, _: random.Random) -> Made:
    if not sound.flow.startswith("pt2e_static"):
        raise NotApplicableError("only PT2E's annotators look at what strict export writes")
    quantized = build(maker, sound.net, sound.flow, sound.module, strict_export=False)
    return "strict_export=False", quantized, frozenset()


# In the calibration. ----------------------------------------------------------------------------


def _calibrated(
    words: str, change: Callable[[list[Sample]], list[Sample]]
) -> Callable[[Edgeq, Sound, random.Random], Made]:
    def make(maker: Edgeq, sound: Sound, _: random.Random) -> Made:
        if "static" not in sound.flow:
            raise NotApplicableError("nothing is calibrated")
        samples = change(sound.net.calibration())
        quantized = build(maker, sound.net, sound.flow, sound.module, calibration=samples)
        return f"calibrated {words}", quantized, frozenset()

    return make


def _times(samples: list[Sample], factor: float) -> list[Sample]:
    return [tuple(value * factor for value in sample) for sample in samples]


def _outlier(samples: list[Sample]) -> list[Sample]:
    middle = len(samples) // 2
    return [*samples[:middle], *_times(samples[middle : middle + 1], 1000), *samples[middle + 1 :]]


def _unnormalised(samples: list[Sample]) -> list[Sample]:
    # ImageNet's: what 0 … 255 looks like to a model that takes (value − 117) / 58.
    return [tuple(value * 58.0 + 117.0 for value in sample) for sample in samples]


def _never(_: Edgeq, sound: Sound, __: random.Random) -> Made:
    """By hand, because the plugin refuses; the file is held against the sound references."""
    if not sound.flow.startswith("pt2e_static"):
        raise NotApplicableError("recipes refuse to quantize without calibration")
    from pytest_edgeq.litert.libraries import quiet

    with quiet():
        import litert_torch
        from litert_torch.quantize.quant_config import QuantConfig
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

        quantizer = _pt2e_preset(sound.flow)
        inputs = sound.net.trace()
        exported = torch.export.export(sound.module, inputs, strict=True).module()
        prepared = prepare_pt2e(exported, quantizer)
        converted = convert_pt2e(prepared, fold_quantize=False)
        config = QuantConfig(pt2e_quantizer=quantizer)
        edge = litert_torch.convert(converted, inputs, quant_config=config)
        content = edge.model_content()
    return "never calibrated", sound.quantized.with_tflite(bytes(content)), frozenset()


# In torch. --------------------------------------------------------------------------------------


class _ByTheBatch(nn.Module):
    """A batch norm as in train mode: by the mean and the variance of the batch at hand."""

    def __init__(self, norm: nn.BatchNorm1d | nn.BatchNorm2d) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give the features normed."""
        axes = (0, *range(2, x.dim()))
        centred = x - x.mean(axes, keepdim=True)
        variance = (centred * centred).mean(axes, keepdim=True)
        shape = (1, -1, *(1,) * (x.dim() - 2))
        normed = centred * torch.rsqrt(variance + self.eps)
        return normed * self.weight.reshape(shape) + self.bias.reshape(shape)


class _Normed(nn.Module):
    """A batch norm as a product and a sum, which nothing folds into the convolution before it."""

    def __init__(self, norm: nn.BatchNorm1d | nn.BatchNorm2d) -> None:
        super().__init__()
        assert norm.running_var is not None
        assert norm.running_mean is not None
        factor = norm.weight / torch.sqrt(norm.running_var + norm.eps)
        shape = (1, -1, *(1,) * (2 if isinstance(norm, nn.BatchNorm2d) else 0))
        self.factor = nn.Parameter(factor.detach().reshape(shape))
        shift = norm.bias - norm.running_mean * factor
        self.shift = nn.Parameter(shift.detach().reshape(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Give the features normed."""
        # A clamp that changes nothing keeps the product out of the convolution.
        return torch.clamp(x, -1e4, 1e4) * self.factor + self.shift


def _train_mode_norm(maker: Edgeq, sound: Sound, _: random.Random) -> Made:
    module = _norms_replaced(sound, _ByTheBatch)
    return "batch norms by the batch's own statistics", _shipped(maker, sound, module), frozenset()


def _norm_not_folded(maker: Edgeq, sound: Sound, _: random.Random) -> Made:
    module = _norms_replaced(sound, _Normed)
    return "batch norms not folded", _shipped(maker, sound, module), frozenset()


def _norms_replaced(sound: Sound, by: Callable[[Any], nn.Module]) -> nn.Module:
    module = copy.deepcopy(sound.module)
    names = [name for name, each in module.named_modules() if isinstance(each, _NORMS)]
    if not names:
        raise NotApplicableError("no batch norm")
    for name in names:
        module.set_submodule(name, by(module.get_submodule(name)))
    return module.eval()


def _perturbed(share: float) -> Callable[[Edgeq, Sound, random.Random], Made]:
    def make(maker: Edgeq, sound: Sound, rng: random.Random) -> Made:
        module = copy.deepcopy(sound.module)
        name = rng.choice(_weighted(sound))
        weight = module.get_submodule(name).weight
        assert isinstance(weight, nn.Parameter)
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        with torch.no_grad():
            noise = torch.randn(weight.shape, generator=generator)
            weight += share * weight.std() * noise
        words = f"weights of {name} off by {share:.0%} of their deviation"
        return words, _shipped(maker, sound, module), frozenset((name,))

    return make


def _dead_channel(maker: Edgeq, sound: Sound, rng: random.Random) -> Made:
    module = copy.deepcopy(sound.module)
    name = rng.choice(_weighted(sound))
    layer = module.get_submodule(name)
    assert isinstance(layer, _WEIGHTED)
    channel = rng.randrange(len(layer.weight))
    with torch.no_grad():
        layer.weight[channel] = 1e-9
        if layer.bias is None:
            layer.bias = nn.Parameter(torch.zeros(len(layer.weight)))
        layer.bias[channel] = 5.0
    return f"channel {channel} of {name} dead", _shipped(maker, sound, module), frozenset((name,))


def _bgr(maker: Edgeq, sound: Sound, _: random.Random) -> Made:
    """The file was made for BGR and is fed with RGB: what reads the image has turned channels."""
    module = copy.deepcopy(sound.module)
    first = {
        name: each
        for name, each in module.named_modules()
        if isinstance(each, nn.Conv2d) and each.in_channels == 3
    }
    if not first:
        raise NotApplicableError("no image of three channels")
    with torch.no_grad():
        for each in first.values():
            each.weight.copy_(each.weight.flip(1))
    return "made for BGR", _shipped(maker, sound, module), frozenset(first)


# Shared. ----------------------------------------------------------------------------------------


def _weighted(sound: Sound) -> list[str]:
    return [name for name, each in sound.module.named_modules() if isinstance(each, _WEIGHTED)]


def _pt2e_preset(flow: str) -> Any:
    from pytest_edgeq.litert.pt2e_graphs import pt2e_preset

    return pt2e_preset(flow)


def _changed_rules(sound: Sound, **changes: Any) -> list[dict[str, Any]]:
    from pytest_edgeq.litert.recipes import load_recipe

    rules = load_recipe(sound.flow)
    for rule in rules:
        rule["op_config"]["weight_tensor_config"].update(changes)
    return rules


def _again(maker: Edgeq, sound: Sound, quantizer: Any) -> QuantizedModel:
    """The same module quantized otherwise."""
    return build(maker, sound.net, quantizer, sound.module)


def _shipped(maker: Edgeq, sound: Sound, module: nn.Module) -> QuantizedModel:
    """Another module quantized likewise; its file is held against the sound references."""
    made = build(maker, sound.net, sound.flow, module)
    return sound.quantized.with_tflite(made.tflite)


KINDS: dict[str, Callable[[Edgeq, Sound, random.Random], Made]] = {
    "annotation dropped": _annotation_dropped,
    "per-channel → per-tensor": _per_tensor,
    "symmetric → asymmetric weights": _asymmetric,
    "shared parameters unshared": _unshared,
    "calibrated on zeros": _calibrated("on zeros", lambda samples: _times(samples, 0.0)),
    "calibrated on 0.05 ×": _calibrated("on 0.05 ×", lambda samples: _times(samples, 0.05)),
    "calibrated on one sample": _calibrated("on one sample", lambda samples: samples[:1]),
    "calibrated with an outlier × 1000": _calibrated("with one sample × 1000", _outlier),
    "calibrated unnormalised": _calibrated("on unnormalised inputs", _unnormalised),
    "never calibrated": _never,
    "batch norm in train mode": _train_mode_norm,
    "batch norm not folded": _norm_not_folded,
    "non-strict export": _non_strict,
    "weights perturbed by 1 %": _perturbed(0.01),
    "weights perturbed by 5 %": _perturbed(0.05),
    "dead channel, bias 5": _dead_channel,
    "made for BGR": _bgr,
}

LEFT_IN_FLOAT = frozenset(("annotation dropped",))
"""The kinds that leave a layer exact: its dtype tells of it, and no error."""

DRAWN = frozenset(
    (
        "annotation dropped",
        "weights perturbed by 1 %",
        "weights perturbed by 5 %",
        "dead channel, bias 5",
    )
)
"""The kinds for which another seed is another case."""
