"""Open the file of a language model with its float file and its Hugging Face module."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_edgeq.compare.language.layout import holds_language_model
from pytest_edgeq.compare.language.model import LanguageModel, Tokenizer
from pytest_edgeq.compare.reference import in_train_mode, module_tree, torch_module
from pytest_edgeq.quantize.session import Session
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.bundles import Bundle, open_bundle
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.modules import exported_modules
from pytest_edgeq.tflite.source import TflitePath

# What `export_hf` writes beside `model.tflite` for the layouts of several files, and an input of
# the model that each computes.
_BESIDE = {"embedder": "embeddings", "auxiliary": "pos_emb_cos"}


def open_sections(tflite: TflitePath | bytes, session: Session) -> dict[str, EdgeFile]:
    """Open all models of a bundle, or a file and the files of its other sections."""
    build = session.runtimes.builder(foreign=True)

    def edge(source: TflitePath | bytes, section: str | None = None) -> EdgeFile:
        return EdgeFile(
            OpGraph.read(source, build, section),
            runtimes=session.runtimes,
            threads=session.threads,
            foreign=True,
            one_interpreter=True,
        )

    if (bundle := _bundle(tflite)) is not None:
        return {name: edge(tflite, name) for name in bundle.names}
    sections = {"model": edge(tflite)}
    if isinstance(tflite, (str, os.PathLike)) and holds_language_model(sections):
        path = Path(tflite)
        signatures = sections["model"].graph.signatures
        inputs = {each.name for signature in signatures for each in signature.inputs}
        for name, computed in _BESIDE.items():
            other = path.with_name(path.name.replace("model", name))
            if computed in inputs and other.is_file():
                sections[name] = edge(other)
    return sections


def _bundle(tflite: TflitePath | bytes) -> Bundle | None:
    return open_bundle(Path(tflite) if isinstance(tflite, (str, os.PathLike)) else tflite)


def load_language(
    tflite: TflitePath | bytes,
    sections: Mapping[str, EdgeFile],
    reference: Any,
    name: str,
    session: Session,
    float_tflite: TflitePath | bytes | None,
    tokenizer: Tokenizer | None,
) -> LanguageModel:
    """Return the model; a file as the reference is its float file."""
    if isinstance(reference, (str, os.PathLike, bytes)):
        float_tflite, reference = reference, None
    float_sections: Mapping[str, EdgeFile] = {}
    if isinstance(reference, LanguageModel):
        float_sections = {key: each.clone() for key, each in reference.sections.items()}
        reference = None
    elif float_tflite is not None:
        float_sections = open_sections(float_tflite, session)
        if not holds_language_model(float_sections):
            raise ValueError(f"{name}: float_tflite: expected a file of a language model")
    if reference is not None and not callable(reference):
        raise TypeError(
            f"reference: expected a Hugging Face module, got {type(reference).__name__}"
        )
    module = torch_module(reference)
    if module is not None and in_train_mode(module):
        raise ValueError(f"{name}: the reference is in train mode; call reference.eval() first")
    if module is not None and module is reference:
        tree = module_tree(module)
        for edge in (*sections.values(), *float_sections.values()):
            edge.modules = exported_modules(edge.graph, tree) or tree
    return LanguageModel(
        name=name,
        sections=sections,
        float_sections=float_sections,
        metadata=None if (bundle := _bundle(tflite)) is None else bundle.metadata,
        bundle=None if bundle is None else bundle.path,
        tokenizer=tokenizer,
        reference=reference,
        runtime=session.runtime,
        directory=session.directory,
        threads=session.threads,
        executor=session.executor,
    )
