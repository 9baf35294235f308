"""
The `torchao` flow: `quantize_`, conversion in float, and quantized weights written back.

The converter has no quantized tensors. So it converts the model with dequantized weights, and then
codes, scales and zero points replace them in the file.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from pytest_edgeq import litert
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.reference import call_reference
from pytest_edgeq.quantize.request import Entry, Request
from pytest_edgeq.runtimes.edge import EdgeFile


def quantize_torchao(request: Request, config: Any) -> QuantizedModel:
    """
    Quantize a model by torchao's `quantize_` and convert it.

    The quantized copy is the simulated model. A `.tflite` op of scheme `dynamic` quantizes its
    activations as its kernels do, whatever the config says of them.
    """
    by_model: dict[int, torch.nn.Module] = {}
    for entry in request.entries:
        if id(entry.model) not in by_model:
            by_model[id(entry.model)] = litert.quantize_ao(entry.model, config, entry.name)
    simulated = [by_model[id(entry.model)] for entry in request.entries]
    by_weights = {key: litert.ao_weights(model, request.name) for key, model in by_model.items()}
    for entry, model in zip(request.entries, simulated, strict=True):
        _run(entry, model, config)
    plain = {key: litert.dequantized(model) for key, model in by_model.items()}
    traced = {entry.key: entry.traced(plain[id(entry.model)]) for entry in request.entries}
    float_tflite = request.session.convert(request.name, traced)
    weights = list(itertools.chain(*by_weights.values()))
    tflite, missing = litert.write_weights(float_tflite, weights)
    if missing:
        weights = []
        for key, each in by_weights.items():
            calls = [traced[entry.key] for entry in request.entries if id(entry.model) == key]
            unused = set.intersection(*map(_unused, calls))
            weights += [weight for weight in each if weight.name not in unused]
        tflite, missing = litert.write_weights(float_tflite, weights)
    if missing:
        raise ValueError(
            f"{request.name}: the converter folds {', '.join(missing)} with its neighbours into "
            "values that the codes cannot represent, or uses it in another op than "
            "FULLY_CONNECTED and EMBEDDING_LOOKUP. Fold a norm's weight into the layer before "
            "quantizing (of a batch norm: torch.nn.utils.fusion.fuse_linear_bn_eval; of a "
            "LayerNorm in front: linear.bias += linear.weight @ norm.bias, linear.weight *= "
            "norm.weight, then bias 0 and weight 1), leave the layer in float by an FqnToConfig, "
            "or take a recipe (recipe_dynamic_wi8_afp32)"
        )
    edge = request.edge(tflite)
    _check_kept(request, edge, weights)
    models = [functools.partial(by_model.__getitem__, id(entry.model)) for entry in request.entries]
    return request.finish("torchao", edge, simulated=models, quantizer=config)


def _run(entry: Entry, quantized: torch.nn.Module, config: Any) -> None:
    """Run a model quantized by torchao once: torchao lacks kernels for some layers."""
    try:
        call_reference(quantized, entry.sample)
    except Exception as error:
        raise RuntimeError(
            f"{entry.name} quantized by {type(config).__name__} does not run in torch: torchao has "
            "no kernel for a layer; name others by an FqnToConfig, and remove spectral_norm and "
            "pruning before\n"
            f"{type(error).__name__}: {error}"
        ) from error


def _unused(traced: litert.Traced) -> set[str]:
    """Return the names of the model's parameters that it never uses."""
    with litert.quiet():
        program = torch.export.export(
            traced.model, traced.args, dict(traced.kwargs), dynamic_shapes=traced.dynamic_shapes
        )
    names = program.graph_signature.inputs_to_parameters
    return {names[n.name] for n in program.graph.nodes if n.name in names and not n.users}


def _check_kept(
    request: Request, edge: EdgeFile, weights: Sequence[litert.QuantizedWeight]
) -> None:
    """Check that every quantized layer is in the file with its scheme and dtype."""
    promised = Counter(
        ("dynamic" if weight.dynamic else "weight_only", f"int{weight.bits}") for weight in weights
    )
    found = Counter((entry.scheme, entry.weight) for entry in edge.op_dtypes)
    for (scheme, dtype), count in promised.items():
        if found[scheme, dtype] < count:
            raise RuntimeError(
                f"{request.name}: of {count} layers quantized as {scheme} {dtype} the converter "
                f"kept {found[scheme, dtype]}: {edge.op_dtypes!r}. The rest would run in float"
            )
    layers = {weight.name.rpartition(".")[0] for weight in weights}
    for entry in edge.op_dtypes:
        if entry.module in layers and entry.scheme == "float" and entry.weight is not None:
            raise RuntimeError(
                f"{request.name}: {entry.where} is in float, though its layer is quantized: the "
                "layer is called several times, and one of the calls is folded with its "
                "neighbours. Leave the layer in float by an FqnToConfig"
            )
