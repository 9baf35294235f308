"""Read and check the arguments of `edgeq.quantize`."""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from pytest_edgeq import litert
from pytest_edgeq.compare.reference import (
    as_module,
    in_train_mode,
    is_exported,
    is_quantized_by_torch_ao,
    model_name,
    parameters_of,
)
from pytest_edgeq.compare.samples import SampleSpec, is_tensor
from pytest_edgeq.names import nearest, readable
from pytest_edgeq.numerics.arrays import kind_of, short_repr
from pytest_edgeq.quantize.request import Entry, Request
from pytest_edgeq.quantize.session import Session


def make_request(
    model: Any,
    sample_inputs: Any,
    *,
    sample_kwargs: Mapping[str, Any] | None,
    calibration: Any,
    dynamic_shapes: Any,
    strict_export: bool,
    name: str | None,
    quantizer: str,
    session: Session,
    train: Any = None,
) -> Request:
    """Check the arguments of `edgeq.quantize`."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name: expected a string, got {name!r}")
    if isinstance(model, Mapping):
        model = {key: as_module(each) for key, each in model.items()}
    model = as_module(model)
    several = _signatures(model, sample_inputs)
    first = model if several is None else next(iter(several.values()))
    label = readable(name if name is not None else model_name(first))
    if several is None:
        given = {litert.SIGNATURE: (model, (sample_inputs, sample_kwargs))}
        samples, shapes = {litert.SIGNATURE: calibration}, {litert.SIGNATURE: dynamic_shapes}
    else:
        if sample_kwargs is not None:
            raise ValueError(
                "sample_kwargs: with several signatures the keyword inputs are part of "
                "sample_inputs: {signature: (args, kwargs)}"
            )
        samples = _by_signature("calibration", calibration, several)
        shapes = _by_signature("dynamic_shapes", dynamic_shapes, several)
        given = {k: (each, _args_and_kwargs(sample_inputs[k])) for k, each in several.items()}
    entries = [
        _entry(
            readable(key),
            each,
            inputs,
            calibration=samples[key],
            dynamic_shapes=shapes[key],
            name=label if several is None else f"{label}[{readable(key)}]",
            quantizer=quantizer,
        )
        for key, (each, inputs) in given.items()
    ]
    if train is not None and not callable(train):
        raise TypeError(f"train: expected a function of the prepared graph, got {train!r:.80}")
    if train is not None and len(entries) > 1:
        raise ValueError(
            f"{label}: train= supports one signature, got {len(entries)}: each has a graph of its "
            "own, and their trained weights would differ"
        )
    return Request(tuple(entries), strict_export, label, quantizer, session, train)


def _signatures(model: Any, sample_inputs: Any) -> dict[str, Any] | None:
    """Return the models by signature; None for one signature without a name."""
    named = isinstance(sample_inputs, Mapping) and not any(map(is_tensor, sample_inputs.values()))
    if isinstance(model, Mapping):
        if not named or not sample_inputs:
            raise TypeError(
                f"several models, by signature {list(model)}, need sample inputs by signature: "
                "sample_inputs={'encode': (tensor,), 'decode': (tensor,)}"
            )
        _require_same("sample_inputs", sample_inputs, "the models", model)
        return dict(model)
    return dict.fromkeys(sample_inputs, model) if named and sample_inputs else None


def _by_signature(what: str, values: Any, signatures: Mapping[str, Any]) -> dict[str, Any]:
    if values is None:
        return dict.fromkeys(signatures)
    if not isinstance(values, Mapping):
        raise TypeError(
            f"{what}: with several signatures expected a dict by signature {list(signatures)}, got "
            f"{type(values).__name__}"
        )
    _require_same(what, values, "sample_inputs", signatures)
    return dict(values)


def _require_same(what: str, keys: Iterable[str], other: str, known: Iterable[str]) -> None:
    keys, known = list(keys), list(known)
    if set(keys) != set(known):
        hint = "".join(nearest(key, known) for key in keys if key not in known)
        raise ValueError(
            f"{what} has the signatures {keys}, {other} {known}: they must be the same{hint}"
        )


def _args_and_kwargs(inputs: Any) -> tuple[Any, Any]:
    """Split the sample inputs of one signature, written as a sample."""
    if isinstance(inputs, Mapping):
        return None, inputs
    if isinstance(inputs, tuple) and len(inputs) == 2 and isinstance(inputs[1], Mapping):
        args, kwargs = inputs
        return args, kwargs
    return inputs, None


def _entry(key: str, model: Any, inputs: tuple[Any, Any], *, name: str, **options: Any) -> Entry:
    graph = None
    if is_exported(model) and (litert.holds_observers(model) or litert.holds_quantization(model)):
        graph, model = model, litert.float_side(model)
    sample_inputs, sample_kwargs = inputs
    is_swapped = isinstance(sample_inputs, torch.nn.Module)
    _check_model(
        model, name, "; the arguments are swapped: quantize(model, sample_inputs)" * is_swapped
    )
    args = _positional(sample_inputs)
    if sample_kwargs is not None and not isinstance(sample_kwargs, Mapping):
        raise TypeError(
            f"sample_kwargs: expected a dict of tensors, got {type(sample_kwargs).__name__}"
        )
    kwargs = dict(sample_kwargs or {})
    for where, value in [
        *((f"sample_inputs[{i}]", value) for i, value in enumerate(args)),
        *((f"sample_kwargs[{key!r}]", value) for key, value in kwargs.items()),
    ]:
        if not isinstance(value, torch.Tensor):
            hint = "; write torch.as_tensor(…) around it" if is_tensor(value) else ""
            raise TypeError(f"{where}: expected a torch.Tensor, got {kind_of(value)}{hint}")
    _check_names(model, kwargs, name)
    if not args and not kwargs:
        raise ValueError(
            f"{name}: no sample inputs: the model is traced with them. Pass "
            "sample_inputs=(torch.randn(1, 3, 224, 224),), or sample_kwargs={'name': tensor}"
        )
    spec = SampleSpec.of_inputs(
        args, kwargs, parameters_of(model).positional, dynamic=options["dynamic_shapes"] is not None
    )
    # torch.export (2.13) merges two inputs that are the same tensor, and the file then never reads
    # the second.
    args = tuple(value.clone() for value in args)
    kwargs = {name: value.clone() for name, value in kwargs.items()}
    return Entry(key, model, args, kwargs, spec, name=name, graph=graph, **options)


def _check_model(model: Any, label: str, swapped: str = "") -> None:
    if not isinstance(model, torch.nn.Module):
        what = "the class" if isinstance(model, type) else f"a {type(model).__name__}:"
        raise TypeError(
            f"expected a torch.nn.Module, got {what} {short_repr(model):.80}"
            + ("; instantiate it" if isinstance(model, type) else "")
            + swapped
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"{label} is a scripted or traced module, which cannot be exported; pass the nn.Module "
            "that it was made from"
        )
    training = in_train_mode(model)
    if litert.holds_observers(model) or litert.holds_quantization(model):
        raise ValueError(
            f"{label} holds a graph that PT2E has prepared or converted: pass that graph by "
            "itself, which is converted as it is, or the float model"
        )
    if litert.holds_ao_weights(model):
        raise ValueError(
            f"{label} is already quantized by torchao's quantize_ (it holds quantized weights), so "
            "there is no float model to compare with. Pass that, and the config as quantizer="
        )
    if litert.is_prepared_by_torch_ao(model):
        raise ValueError(
            f"{label} holds observers or fake quantizers of torch's eager or FX graph mode, which "
            "the converter cannot take. For a model that FX prepared, pass "
            "quantizer=pytest_edgeq.quantizer_from_fx(prepared), and its float_model as the model"
        )
    if any(map(is_quantized_by_torch_ao, model.modules())):
        raise ValueError(
            f"{label} holds modules that torch's eager or FX graph mode has quantized, which the "
            "converter cannot take. Pass the float model; this one can be the reference of a file: "
            "edgeq.load(path, reference=model)"
        )
    if training:
        which = "the model" if training[0] == "" else f"its submodule {training[0]!r}"
        raise ValueError(
            f"{label}: {which} is in train mode: dropout and batch "
            "statistics would be exported. Call model.eval() first"
        )


def _check_names(model: torch.nn.Module, kwargs: Iterable[str], label: str) -> None:
    """Refuse names that torch.fx (2.13) would write into a graph as invalid code."""
    for name in kwargs:
        if not name.isidentifier() or keyword.iskeyword(name):
            raise ValueError(
                f"{label}: the keyword input '{readable(name)}': expected the name of a variable, "
                "as torch.export makes one of it; rename the parameter"
            )
    for path, _ in (*model.named_parameters(), *model.named_buffers()):
        for part in path.split("."):
            if keyword.iskeyword(part) or any(each in part for each in '"\n\r\0'):
                raise ValueError(
                    f"{label}: {readable(path)}: expected names that are no Python keywords and "
                    "have no quotation marks or line breaks, as torch.export writes them into "
                    f"code, got '{readable(part)}'; rename this attribute or key of the model"
                )


def _positional(sample_inputs: Any) -> tuple[Any, ...]:
    if sample_inputs is None:
        return ()
    if is_tensor(sample_inputs):
        return (sample_inputs,)
    if isinstance(sample_inputs, Sequence) and not isinstance(sample_inputs, (str, bytes)):
        return tuple(sample_inputs)
    raise TypeError(
        f"sample_inputs: expected a tuple of tensors, got {type(sample_inputs).__name__}"
        + (
            "; keyword inputs are sample_kwargs, and signatures hold tuples: {name: (tensor,)}"
            if isinstance(sample_inputs, Mapping)
            else ""
        )
    )
