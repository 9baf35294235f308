"""The `prebuilt` flow: a `.tflite` made elsewhere, and what it should compute."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from pytest_edgeq.flows.request import Session
from pytest_edgeq.quantized import QuantizedModel
from pytest_edgeq.reference import module_tree, parameter_names
from pytest_edgeq.samples import SampleSpec
from pytest_edgeq.tflite.edge import EdgeFile
from pytest_edgeq.tflite.source import TflitePath

__all__ = ["load_prebuilt"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True


def load_prebuilt(
    tflite: TflitePath | bytes,
    reference: Callable[..., Any] | None,
    name: str,
    session: Session,
) -> QuantizedModel:
    """
    Open a file and put it together with its reference.

    Raises:
        FileNotFoundError, ValueError, TypeError: As `Edgeq.load` says.
    """
    if reference is not None and not callable(reference):
        raise TypeError(
            f"reference: expected a torch module or a callable, got {type(reference).__name__}"
        )
    modules = None
    if isinstance(reference, torch.nn.Module):
        if any(module.training for module in reference.modules()):
            raise ValueError(f"{name}: the reference is in train mode; call reference.eval() first")
        modules = module_tree(reference)
    elif inspect.isclass(reference):
        raise TypeError(f"reference: got the class {reference.__name__}; instantiate it")
    edge = EdgeFile(tflite, modules=modules, threads=session.threads)
    return QuantizedModel(
        edge,
        name=name,
        flow="prebuilt",
        spec=SampleSpec.of_signature(edge.signature, *_parameters(reference)),
        runtime=session.runtime,
        float_model=reference,
        directory=session.directory,
    )


def _parameters(reference: Callable[..., Any] | None) -> tuple[tuple[str, ...], int]:
    """Names of a reference's parameters, and how many of them may be given by position."""
    if reference is None:
        return (), 0
    positional, by_name = parameter_names(reference)
    return (*positional, *by_name), len(positional)
