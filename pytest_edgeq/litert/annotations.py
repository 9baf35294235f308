"""Quantizers' annotations, normalized for torchao and the converter, or refused."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch

from pytest_edgeq.litert.configs import WEIGHT_ALONE, RefusedError, op_name
from pytest_edgeq.litert.libraries import pt2e_module

# Axis of an op's output channels in its weight, the only one for which kernels have scales;
# and the places of weight and bias among the op's arguments.
_WEIGHT, _BIAS = 1, 2
_OUTPUT_AXIS = {
    "conv1d": 0,
    "conv2d": 0,
    "conv3d": 0,
    "linear": 0,
    "conv_transpose1d": 1,
    "conv_transpose2d": 1,
}


def normalize_annotations(model: Any) -> None:
    """
    Normalize the annotations of a graph for torchao and the converter.

    - Those on tensors that are not floating point are dropped, and those that share their
      parameters. With strict export the converter's annotators accept integer tensors and Python
      scalars, too, and the observers then fail (`"histogram_cpu" not implemented for 'Long'`;
      litert-torch 0.10.0, torchao 0.18.0).
    - A tensor concatenated with itself gets another spec: the annotators of litert-torch 0.10.0 and
      torchao 0.18.0 let it share parameters with itself (`RecursionError`).
    - Those on activations that are quantized dynamically are dropped: kernels compute these
      parameters themselves as soon as the weight is quantized, and the converter cannot lower the
      node (`KeyError: getitem`; litert-torch 0.10.0).
    - Observers and fake quantizers of `torch.ao.quantization` become torchao's of the same name:
      torchao 0.18.0 silently removes those of torch, or fails on them
      (`'_PartialWrapper' object has no attribute '__name__'`).
    - Scales for the channels of a transposed convolution's weight become those of its output
      channels, the only ones in kernels, though torchao's XNNPACKQuantizer annotates axis 0.
    - `FixedQParamsFakeQuantize` becomes the spec with fixed parameters: torchao 0.18.0 passes it an
      argument that it does not have (`unexpected keyword argument 'dtype'`).

    Raises:
        RefusedError: A spec that no `.tflite` kernel, or not the converter, supports.
    """
    annotated = [n for n in model.graph.nodes if n.meta.get("quantization_annotation") is not None]
    constructors: dict[Any, Any] = {}
    dropped: set[Any] = set()
    for node in annotated:
        annotation = node.meta["quantization_annotation"]
        dynamic = False
        for operand, spec in list(annotation.input_qspec_map.items()):
            normalized = _by_output_channel(
                node, operand, _normalized(_unshared(node, operand, spec), constructors)
            )
            dynamic |= _is_dynamic(normalized)
            if (spec is not None and normalized is None) or _drops(model, operand, normalized):
                del annotation.input_qspec_map[operand]
                dropped |= {operand, (operand, node)}
            else:
                _check(node, operand, normalized)
                annotation.input_qspec_map[operand] = normalized
        normalized = _normalized(annotation.output_qspec, constructors)
        dynamic |= _is_dynamic(normalized)
        if _drops(model, node, normalized):
            annotation.output_qspec = None
            dropped.add(node)
        else:
            _check(node, node, normalized)
            annotation.output_qspec = normalized
        operands = annotation.input_qspec_map.items()
        if dynamic and not any(spec is not None and is_constant(each) for each, spec in operands):
            raise RefusedError(
                f"{node.name} ({node.target}): its activations are annotated to be quantized "
                "dynamically, but no weight of it is quantized: kernels do the one only with the "
                "other. Annotate its weight, too, or leave it out"
            )
        if dynamic:
            node.meta[WEIGHT_ALONE] = True
    _drop_shares(annotated, dropped)


def _unshared(node: Any, operand: Any, spec: Any) -> Any:
    """Return another spec for an operand that shares its parameters with itself."""
    QuantizationSpec = pt2e_module("quantizer").QuantizationSpec
    SharedQuantizationSpec = pt2e_module("quantizer").SharedQuantizationSpec
    if not isinstance(spec, SharedQuantizationSpec) or spec.edge_or_node != (operand, node):
        return spec
    for each in (operand, *node.all_input_nodes, *operand.users):
        annotation = each.meta.get("quantization_annotation")
        if annotation is not None:
            for found in (annotation.output_qspec, annotation.input_qspec_map.get(operand)):
                if isinstance(found, QuantizationSpec):
                    return found
    return None


def _drops(model: Any, node: Any, spec: Any) -> bool:
    """Return whether a graph cannot hold a spec for a node's output."""
    if spec is None or _is_dynamic(spec) or getattr(spec, "dtype", None) is torch.float32:
        return spec is not None
    value = node.meta.get("val")
    if value is None and node.op == "get_attr":
        value = operator.attrgetter(node.target)(model)
    if isinstance(value, (tuple, list)):
        value = value[0]
    if value is None:
        return False  # a node that the quantizer inserted
    return not (isinstance(value, torch.Tensor) and value.dtype.is_floating_point)


def _is_dynamic(spec: Any) -> bool:
    return bool(getattr(spec, "is_dynamic", False))


def _drop_shares(annotated: list[Any], dropped: set[Any]) -> None:
    """Drop annotations that share parameters with dropped ones, transitively."""
    SharedQuantizationSpec = pt2e_module("quantizer").SharedQuantizationSpec
    before = -1
    while len(dropped) != before:
        before = len(dropped)
        for node in annotated:
            annotation = node.meta["quantization_annotation"]
            for operand, spec in list(annotation.input_qspec_map.items()):
                if isinstance(spec, SharedQuantizationSpec) and spec.edge_or_node in dropped:
                    del annotation.input_qspec_map[operand]
                    dropped.add((operand, node))
            spec = annotation.output_qspec
            if isinstance(spec, SharedQuantizationSpec) and spec.edge_or_node in dropped:
                annotation.output_qspec = None
                dropped.add(node)


def is_constant(node: Any) -> bool:
    """Return whether a node is a parameter, a buffer, or computed only from such."""
    seen, left = {node}, [node]
    while left:
        each = left.pop()  # a loop, as a graph may be deeper than Python's stack
        if each.op == "get_attr":
            continue
        if each.op != "call_function" or not each.all_input_nodes:
            return False
        new = [n for n in each.all_input_nodes if n not in seen]
        seen.update(new)
        left += new
    return True


def _normalized(spec: Any, constructors: dict[Any, Any]) -> Any:
    """Return a spec that torchao can use; equal ones stay equal, for sharing."""
    specs = pt2e_module("quantizer")
    if not isinstance(spec, specs.QuantizationSpec):
        return spec
    constructor = spec.observer_or_fake_quant_ctr
    if constructor not in constructors:
        constructors[constructor] = _torchao_constructor(constructor)
    own = constructors[constructor]
    if _parts(own)[0] is pt2e_module("fake_quantize").FixedQParamsFakeQuantize:
        fixed = own().activation_post_process
        return specs.FixedQParamsQuantizationSpec(
            dtype=spec.dtype,
            scale=float(fixed.scale),
            zero_point=int(fixed.zero_point),
            quant_min=spec.quant_min,
            quant_max=spec.quant_max,
            qscheme=spec.qscheme,
        )
    return dataclasses.replace(spec, observer_or_fake_quant_ctr=own)


def _by_output_channel(node: Any, operand: Any, spec: Any) -> Any:
    """Return the spec of a transposed convolution's weight with scales of its outputs."""
    transposed = _OUTPUT_AXIS.get(op_name(node)) == 1 and operand is node.args[_WEIGHT]
    has_axis = getattr(spec, "ch_axis", None) is not None
    return dataclasses.replace(spec, ch_axis=1) if transposed and has_axis else spec


def _parts(constructor: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return a constructor's class, its arguments, and its callable arguments."""
    if not hasattr(constructor, "p"):
        return constructor, {}, {}
    kind, arguments, callables = _parts(constructor.p.func)
    return (
        kind,
        {**arguments, **constructor.p.keywords},
        {**callables, **constructor.callable_args},
    )


def _torchao_constructor(constructor: Any) -> Any:
    """Return torchao's counterpart of a constructor of torch."""
    kind, arguments, callables = _parts(constructor)
    foreign = (
        torch.ao.quantization.observer.ObserverBase,
        torch.ao.quantization.fake_quantize.FakeQuantizeBase,
    )
    if not isinstance(kind, type) or not issubclass(kind, foreign):
        return constructor
    name = kind.__name__.lstrip("_")
    modules = map(pt2e_module, ("observer", "fake_quantize", "learnable_fake_quantize"))
    counterpart = next((getattr(module, name) for module in modules if hasattr(module, name)), None)
    if counterpart is None or not kind.__module__.startswith("torch.ao.quantization"):
        raise RefusedError(
            f"{kind.__module__}.{kind.__name__} is an observer of torch.ao.quantization, which "
            "torchao's PT2E removes from the graph: derive it from one of "
            "torchao.quantization.pt2e.observer"
        )
    # torchao's initializes itself from the first data.
    own = ("scale", "zero_point", "channel_len") if name == "LearnableFakeQuantize" else ()
    arguments = {
        key: _torchao_constructor(value) if key == "observer" else value
        for key, value in arguments.items()
        if key not in own
    }
    partial = counterpart.with_args(**arguments)
    return partial.with_callable_args(**callables) if callables else partial


def _check(node: Any, tensor: Any, spec: Any) -> None:
    """Refuse a spec that neither the converter nor any kernel supports."""
    dtype = getattr(spec, "dtype", None)
    if dtype is None:
        return
    where = f"{node.name} ({node.target})"
    axis = _OUTPUT_AXIS.get(op_name(node))
    place = next((i for i, each in enumerate(node.args) if each is tensor and i), None)
    if axis is not None and place == _BIAS:
        if dtype not in (torch.int32, torch.qint32):
            raise RefusedError(
                f"{where}: its bias is annotated as {dtype}, but kernels take int32 with the scale "
                "input × weight. Leave the bias out: the converter quantizes it so by itself"
            )
        return
    constructor = _parts(getattr(spec, "observer_or_fake_quant_ctr", None))[0]
    placeholder = pt2e_module("observer").PlaceholderObserver
    if isinstance(constructor, type) and issubclass(constructor, placeholder):
        raise RefusedError(
            f"{where}: PlaceholderObserver looks at no values, so that a static {dtype} spec finds "
            "no range: use one that does (MinMaxObserver, HistogramObserver), or is_dynamic=True"
        )
    qscheme = getattr(spec, "qscheme", None)
    per_channel = qscheme in (torch.per_channel_affine, torch.per_channel_symmetric)
    if axis is not None and place == _WEIGHT and is_constant(tensor):
        if dtype not in (torch.int8, torch.qint8):
            raise RefusedError(
                f"{where}: its weight is annotated as {dtype}, but PT2E graphs are converted with "
                "int8 weights only. 4-bit weights come from a recipe: "
                "quantizer='recipe_dynamic_wi4_afp32'"
            )
        # A linear layer's kernels support one zero point, but not one a channel.
        one_for_all = qscheme == torch.per_tensor_affine and op_name(node) == "linear"
        if qscheme in (torch.per_tensor_affine, torch.per_channel_affine) and not one_for_all:
            raise RefusedError(
                f"{where}: its weight is annotated with {qscheme}, but kernels take weights with "
                "zero point 0: use torch.per_channel_symmetric or torch.per_tensor_symmetric"
            )
        if per_channel and getattr(spec, "ch_axis", None) != axis:
            raise RefusedError(
                f"{where}: its weight is annotated with a scale for each channel of axis "
                f"{spec.ch_axis}, but kernels take them for output channels: ch_axis={axis}"
            )
        return
    if per_channel and axis is not None and place == _WEIGHT:
        raise RefusedError(
            f"{where}: its weight {tensor.name} is computed when the model runs, and annotated "
            f"with {qscheme}, which kernels know of stored weights alone: hold it in a parameter "
            "or a buffer, or leave the op in float"
        )
    if per_channel and not is_constant(tensor):
        raise RefusedError(
            f"{where}: its activation is annotated with {qscheme}, but kernels take one scale for "
            "an activation: use torch.per_tensor_affine"
        )
    if dtype in (torch.uint8, torch.quint8):
        raise RefusedError(
            f"{where}: annotated as {dtype}, but the converter (litert-torch 0.10) writes the zero "
            "points of int8 into uint8 tensors: use torch.int8 with quant_min=-128, quant_max=127"
        )
    if dtype is torch.int16 and axis is not None:
        raise RefusedError(
            f"{where}: annotated as torch.int16, but the converter (litert-torch 0.10) stores its "
            "bias as int32, which the 16-bit kernels read as int64: use "
            "quantizer='recipe_static_wi8_ai16'"
        )
    if dtype not in (torch.int8, torch.qint8, torch.int16):
        raise RefusedError(
            f"{where}: annotated as {dtype}, which the converter cannot lower: use torch.int8"
        )
