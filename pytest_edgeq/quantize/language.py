"""Open the file of a language model with its float file and its Hugging Face module."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_edgeq.compare.language.layout import holds_language_model
from pytest_edgeq.compare.language.model import LanguageModel, Tokenizer
from pytest_edgeq.compare.reference import in_train_mode, module_tree, torch_module
from pytest_edgeq.quantize.session import Session
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.bundles import open_bundle
from pytest_edgeq.tflite.source import TflitePath

# What `export_hf` writes beside `model.tflite` for the layouts of several files.
_BESIDE = ("embedder", "auxiliary")


@dataclass(frozen=True, slots=True)
class Opened:
    """The sections of a language model's file."""

    sections: Mapping[str, EdgeFile]
    metadata: Any = None


def open_language(tflite: TflitePath | bytes, session: Session) -> Opened | None:
    """Open the sections of a bundle or the one of a `.tflite`; None of other models."""

    def edge(content: Path | bytes) -> EdgeFile:
        return EdgeFile(
            content,
            runtimes=session.runtimes,
            threads=session.threads,
            foreign=True,
            one_interpreter=True,
        )

    if isinstance(tflite, (bytes, bytearray, memoryview)):
        sections, metadata = {"model": edge(bytes(tflite))}, None
    else:
        path = Path(tflite)
        bundle = open_bundle(path)
        if bundle is not None:
            sections = {name: edge(content) for name, content in bundle.models.items()}
            metadata = bundle.metadata
        else:
            sections, metadata = {"model": edge(path)}, None
            if holds_language_model(sections):
                sections |= {
                    name: edge(other)
                    for name in _BESIDE
                    if _takes(sections["model"], name)
                    and (other := path.with_name(path.name.replace("model", name))).is_file()
                }
    return Opened(sections, metadata) if holds_language_model(sections) else None


def _takes(edge: EdgeFile, section: str) -> bool:
    """Return whether a file takes what a section computes."""
    name = {"embedder": "embeddings", "auxiliary": "pos_emb_cos"}[section]
    return any(each.name == name for key in edge.graph.signatures for each in key.inputs)


def load_language(
    opened: Opened,
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
        of_float = open_language(float_tflite, session)
        if of_float is None:
            raise ValueError(f"{name}: float_tflite: expected a file of a language model")
        float_sections = of_float.sections
    if reference is not None and not callable(reference):
        raise TypeError(
            f"reference: expected a Hugging Face module, got {type(reference).__name__}"
        )
    module = torch_module(reference)
    if module is not None and in_train_mode(module):
        raise ValueError(f"{name}: the reference is in train mode; call reference.eval() first")
    if module is not None and module is reference:
        for edge in (*opened.sections.values(), *float_sections.values()):
            edge.modules = module_tree(module)
    return LanguageModel(
        name=name,
        sections=opened.sections,
        float_sections=float_sections,
        metadata=opened.metadata,
        tokenizer=tokenizer,
        reference=reference,
        runtime=session.runtime,
        directory=session.directory,
        threads=session.threads,
        executor=session.executor,
    )
