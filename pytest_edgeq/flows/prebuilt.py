"""The `prebuilt` flow: a `.tflite` made elsewhere, and what it should compute."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pytest_edgeq import litert
from pytest_edgeq.flows.request import Session, float_file
from pytest_edgeq.foreign import is_keras, looks_like_session
from pytest_edgeq.quantized import Counterpart, QuantizedModel
from pytest_edgeq.reference import (
    as_tensor,
    in_train_mode,
    module_tree,
    parameter_names,
    torch_module,
)
from pytest_edgeq.samples import Sample, SampleSpec
from pytest_edgeq.suggest import nearest
from pytest_edgeq.tflite.edge import EdgeFile
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.layout import LayoutArgument, Layouts
from pytest_edgeq.tflite.modules import ModulePaths, SignatureModules
from pytest_edgeq.tflite.source import TflitePath
from pytest_edgeq.tflite.subgraph import Signature

__all__ = ["load_prebuilt"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True


def load_prebuilt(
    tflite: TflitePath | bytes,
    reference: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None,
    name: str,
    session: Session,
    layout: LayoutArgument = None,
    float_tflite: TflitePath | bytes | None = None,
) -> QuantizedModel:
    """
    Open a file, and the float file beside it, and put them together with the references.

    Raises:
        FileNotFoundError, ValueError, TypeError: As `Edgeq.load` says.
    """
    build = session.runtimes.builder(foreign=True)
    graph = OpGraph.read(tflite, build)
    references = _by_signature(reference, [each.key for each in graph.signatures], name)
    for each in references.values():
        _check_reference(each, name)
    trees = {
        key: module_tree(each)
        for key, each in references.items()
        if isinstance(each, torch.nn.Module) and not is_keras(each)
    }
    modules: ModulePaths | None = None
    if trees:
        one = len(graph.signatures) == 1
        modules = next(iter(trees.values())) if one else SignatureModules(trees)
    options: dict[str, Any] = {
        "modules": modules,
        "runtimes": session.runtimes,
        "layout": layout,
        "foreign": True,
    }
    edge = EdgeFile(graph, **options)
    float_edge = None
    if float_tflite is not None:
        float_edge = EdgeFile(OpGraph.read(float_tflite, build), **options)
        _check_borders(edge, float_edge, name)
    return QuantizedModel(
        edge,
        name=name,
        flow="prebuilt",
        float_edge=float_edge,
        counterparts={
            each.key: _counterpart(each, edge.layouts, references.get(each.key), name, session)
            for each in graph.signatures
        },
        runtime=session.runtime,
        directory=session.directory,
        threads=session.threads,
        executor=session.executor,
    )


def _check_borders(edge: EdgeFile, float_edge: EdgeFile, name: str) -> None:
    """Refuse a float file with other signatures, or other inputs or outputs."""
    for signature in edge.signatures:
        ours = _borders(signature)
        theirs = [_borders(each) for each in float_edge.signatures if each.key == signature.key]
        if theirs != [ours]:
            where = "" if signature.key is None else f" of the signature {signature.key!r}"
            raise ValueError(
                f"{name}: float_tflite: expected the inputs and outputs {ours}{where}, got "
                f"{theirs[0] if theirs else 'no such signature'}: give the float file of the same "
                "model"
            )


def _borders(signature: Signature) -> tuple[list[str], list[str]]:
    inputs, outputs = (
        sorted(border.name for border in each) for each in (signature.inputs, signature.outputs)
    )
    return inputs, outputs


def _by_signature(reference: Any, keys: Sequence[str | None], name: str) -> dict[str | None, Any]:
    if reference is None:
        return {}
    if isinstance(reference, Mapping):
        known = [key for key in keys if key is not None]
        for key in reference:
            if key not in known:
                raise ValueError(
                    f"{name}: reference: the file has no signature {key!r}"
                    f"{nearest(str(key), known)}; it has {known}"
                )
        return dict(reference)
    if len(keys) > 1:
        raise ValueError(
            f"{name}: the file has {len(keys)} signatures {list(keys)}: say which one the "
            f"reference is for, reference={{{keys[0]!r}: model}}"
        )
    return {keys[0]: reference}


def _check_reference(reference: Any, name: str) -> None:
    if inspect.isclass(reference):
        raise TypeError(f"reference: got the class {reference.__name__}; instantiate it")
    if looks_like_session(reference):
        raise TypeError(
            f"reference: a {type(reference).__name__} cannot be called with a sample; wrap it: "
            "reference=pytest_edgeq.onnx_reference(session)"
        )
    if not callable(reference):
        raise TypeError(
            f"reference: expected a torch module or a callable, got {type(reference).__name__}"
        )
    module = torch_module(reference)
    if module is not None and in_train_mode(module):
        raise ValueError(f"{name}: the reference is in train mode; call reference.eval() first")


def _counterpart(
    signature: Signature,
    layouts: Layouts,
    reference: Callable[..., Any] | None,
    name: str,
    session: Session,
) -> Counterpart:
    names: tuple[str, ...] = ()
    positional = 0
    if reference is not None:
        first, by_name = parameter_names(reference)
        names, positional = (*first, *by_name), len(first)
    spec = SampleSpec.of_signature(signature, names, positional, layouts)
    module = None if reference is None else torch_module(reference)
    if module is None:
        return Counterpart(spec, reference)

    def traced(sample: Sample) -> litert.Traced:
        # Of one tensor that stands for two inputs torch.export makes one.
        args = tuple(as_tensor(each).clone() for each in sample.args)
        kwargs = {key: as_tensor(each).clone() for key, each in sample.kwargs.items()}
        return litert.Traced(module, args, kwargs)

    key = signature.key or "serving_default"
    return Counterpart(spec, reference, float_file=float_file(name, key, session, traced))
