"""The `prebuilt` flow: a `.tflite` file made elsewhere, and its references."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_edgeq import litert
from pytest_edgeq.compare.foreign import (
    FileReference,
    OnnxReference,
    is_keras,
    looks_like_session,
)
from pytest_edgeq.compare.language.layout import holds_language_model
from pytest_edgeq.compare.language.model import Tokenizer
from pytest_edgeq.compare.quantized import QuantizedModel, Reference, SignatureReference
from pytest_edgeq.compare.reference import (
    as_module,
    as_tensor,
    graph_module,
    in_train_mode,
    module_tree,
    parameters_of,
    quantizes_by_itself,
    torch_module,
)
from pytest_edgeq.compare.samples import Sample, SampleSpec
from pytest_edgeq.names import nearest, readable
from pytest_edgeq.quantize.language import load_language, open_sections
from pytest_edgeq.quantize.session import Session, float_file
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.layout import LayoutArgument, Layouts
from pytest_edgeq.tflite.modules import ModulePaths, SignatureModules
from pytest_edgeq.tflite.source import TflitePath
from pytest_edgeq.tflite.subgraph import Signature, SignatureTensor
from pytest_edgeq.versions import import_torch

if TYPE_CHECKING:
    import torch


def load_prebuilt(
    tflite: TflitePath | bytes,
    reference: Reference | Mapping[str, Reference] | None,
    name: str,
    session: Session,
    layout: LayoutArgument = None,
    float_tflite: TflitePath | bytes | None = None,
    section: str | None = None,
    tokenizer: Tokenizer | None = None,
) -> QuantizedModel:
    """Open a file with its float file and its references."""
    build = session.runtimes.builder(foreign=True)
    sections: Mapping[str, EdgeFile] = {}
    if section is None and not isinstance(reference, Mapping):
        sections = open_sections(tflite, session)
    if holds_language_model(sections):
        return load_language(tflite, sections, reference, name, session, float_tflite, tokenizer)
    known = [each.graph for each in sections.values()]
    graph = known[0] if len(known) == 1 else OpGraph.read(tflite, build, section)
    if section is not None and graph.section is None:
        raise ValueError(f"{name}: section: expected a bundle, got a single .tflite file")
    if tokenizer is not None:
        raise ValueError(f"{name}: tokenizer: expected a language model, got another file")

    def opened(content: TflitePath | bytes) -> EdgeFile:
        other = OpGraph.read(content, build, graph.section)
        # The layout does not apply to a file with other inputs or outputs.
        own = layout if _has_io_of(other, graph) else None
        return EdgeFile(other, runtimes=session.runtimes, layout=own, foreign=True)

    float_edge = None if float_tflite is None else opened(float_tflite)
    if float_edge is not None:
        _check_io(graph, float_edge.graph, name)
    given_reference = float_edge if reference is None else reference
    references = {
        key: _reference(as_module(each), opened, key)
        for key, each in _by_signature(
            given_reference, [s.key for s in graph.signatures], name
        ).items()
    }
    for each in references.values():
        _check_reference(each, name)
    files = [each for each in references.values() if isinstance(each, FileReference)]
    if float_edge is None and len(files) == len(references) > 0:
        float_edge = _form_among(files, graph)
    for file in files:
        file.is_form = float_edge is not None and file.edge.graph is float_edge.graph
    trees = {
        key: module_tree(each) for key, each in references.items() if torch_module(each) is each
    }
    modules: ModulePaths | None = None
    if trees:
        one = len(graph.signatures) == 1
        modules = next(iter(trees.values())) if one else SignatureModules(trees)
    if isinstance(reference, QuantizedModel):
        modules = reference.edge.modules
    elif float_edge is not None:
        float_edge.modules = modules
    edge = EdgeFile(graph, modules=modules, runtimes=session.runtimes, layout=layout, foreign=True)
    return QuantizedModel(
        edge,
        name=name,
        flow="prebuilt",
        float_edge=float_edge,
        references={
            each.key: _reference_of(each, edge.layouts, references.get(each.key), name, session)
            for each in graph.signatures
        },
        runtime=session.runtime,
        directory=session.directory,
        threads=session.threads,
        executor=session.executor,
    )


def _reference(
    source: Any, opened: Callable[[TflitePath | bytes], EdgeFile], key: str | None
) -> Callable[..., Any]:
    """Return the reference of a signature: a callable, or the file that it names."""
    owner = getattr(source, "__self__", None)
    if isinstance(owner, QuantizedModel) and source == owner.run and owner.edge.graph.is_stateful:
        # `run` resets the state at each call, but samples are a stream.
        source = owner
    if isinstance(source, QuantizedModel):
        source = source.edge.clone()
    elif isinstance(source, (str, bytes, os.PathLike)):
        source = opened(source)
    if not isinstance(source, EdgeFile):
        reference: Callable[..., Any] = source
        return reference
    known = [each.key for each in source.graph.signatures]
    if len(known) == 1 or source.key is not None or key is None:
        return FileReference(source)
    if key not in known:
        raise ValueError(
            f"reference: the file has no signature {key!r}{nearest(key, map(str, known))}; it has "
            f"{known}"
        )
    return FileReference(source.at(key))


def _form_among(files: Sequence[FileReference], graph: OpGraph) -> EdgeFile | None:
    """Return the float file among references, if all references are that one."""
    first = files[0].edge
    same = all(each.edge.graph is first.graph and each.is_float for each in files)
    if not same or not _has_io_of(first.graph, graph):
        return None
    return EdgeFile(first.graph, runtimes=first.runtimes, layout=first.layout, foreign=True)


def _has_io_of(graph: OpGraph, other: OpGraph) -> bool:
    """Return whether two files have the same signatures, inputs and outputs."""

    def described(io_tensor: SignatureTensor) -> Any:
        return io_tensor.name, io_tensor.tensor.shape_signature

    return _io_of(graph, described) == _io_of(other, described)


def _io_of(
    graph: OpGraph, describe: Callable[[SignatureTensor], Any]
) -> dict[str | None, tuple[list[Any], list[Any]]]:
    """Return descriptions of the inputs and outputs of each signature, sorted."""
    return {
        each.key: (sorted(map(describe, each.inputs)), sorted(map(describe, each.outputs)))
        for each in graph.signatures
    }


def _check_io(graph: OpGraph, float_graph: OpGraph, name: str) -> None:
    """Refuse a float file with other signatures, or other inputs or outputs."""
    theirs = _io_of(float_graph, lambda io_tensor: io_tensor.name)
    for key, ours in _io_of(graph, lambda io_tensor: io_tensor.name).items():
        if theirs.get(key) != ours:
            where = "" if key is None else f" of the signature {key!r}"
            raise ValueError(
                f"{name}: float_tflite: expected the inputs and outputs {ours}{where}, got "
                f"{theirs.get(key, 'no such signature')}: give the float file of the same model"
            )


def _by_signature(reference: Any, keys: Sequence[str | None], name: str) -> dict[str | None, Any]:
    if reference is None:
        return {}
    if isinstance(reference, Mapping):
        known = [key for key in keys if key is not None]
        references: dict[str | None, Any] = {
            readable(str(key)): each for key, each in reference.items()
        }
        for key in references:
            if key not in known:
                raise ValueError(
                    f"{name}: reference: the file has no signature {key!r}"
                    f"{nearest(str(key), known)}; it has {known}"
                )
        return references
    is_file = isinstance(reference, (str, bytes, os.PathLike, EdgeFile))
    if is_file or (isinstance(reference, QuantizedModel) and reference.edge.key is None):
        return dict.fromkeys(keys, reference)
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
            "reference: expected a torch module, a callable, a file or a QuantizedModel, got "
            f"{type(reference).__name__}"
        )
    if not isinstance(reference, (FileReference, OnnxReference)) and not is_keras(reference):
        import_torch()  # which a function may do in its body: gradients and threads are set before
    module = torch_module(reference)
    if module is not None and in_train_mode(module):
        raise ValueError(f"{name}: the reference is in train mode; call reference.eval() first")


def _in_float(reference: Callable[..., Any]) -> torch.nn.Module | None:
    """Return the torch module of a reference without quantization, or None."""
    if not quantizes_by_itself(reference):
        return torch_module(reference)
    graph = graph_module(reference)
    return (
        litert.in_float(graph) if graph is not None and litert.holds_quantization(graph) else None
    )


def _reference_of(
    signature: Signature,
    layouts: Layouts,
    reference: Callable[..., Any] | None,
    name: str,
    session: Session,
) -> SignatureReference:
    names: tuple[str, ...] = ()
    positional, keeps_names = 0, False
    if reference is not None:
        known = parameters_of(reference)
        names, positional = (*known.positional, *known.keyword_only), len(known.positional)
        keeps_names = known.accepts_any_name and known.accepts_any_position
        inputs = [io_tensor.name for io_tensor in signature.inputs]
        if known.accepts_any_name and not keeps_names and known.required <= set(inputs):
            names += tuple(each for each in inputs if each not in names)
    spec = SampleSpec.of_signature(signature, names, positional, layouts, keeps_names=keeps_names)
    module = None if reference is None else _in_float(reference)
    if module is None:
        return SignatureReference(spec, reference)

    def traced(sample: Sample) -> litert.Traced:
        # torch.export merges two inputs that are the same tensor.
        copied = sample.clone().mapped(as_tensor)
        return litert.Traced(module, copied.args, copied.kwargs)

    key = signature.key or "serving_default"
    return SignatureReference(spec, reference, float_file=float_file(name, key, session, traced))
