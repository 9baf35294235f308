"""Convert torch models to `.tflite`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pytest_edgeq.litert.chatter import quiet
from pytest_edgeq.litert.decompositions import graphs_compiled_on_call, ops_listed_once
from pytest_edgeq.litert.exported import inline_contexts
from pytest_edgeq.litert.libraries import converter_module
from pytest_edgeq.litert.native import Native, lowered_by
from pytest_edgeq.litert.pt2e_graphs import pt2e_preset
from pytest_edgeq.litert.true_constants import true_constants

if TYPE_CHECKING:
    import torch


# The name of a file's only entry point.
SIGNATURE = "serving_default"


@dataclass(frozen=True, slots=True)
class Traced:
    """
    The model and the sample inputs of one signature.

    Attributes:
        model: In eval mode, or a graph of PT2E.
        args: Positional sample inputs.
        kwargs: Keyword sample inputs.
        dynamic_shapes: As for `torch.export.export`.
    """

    model: torch.nn.Module
    args: tuple[torch.Tensor, ...]
    kwargs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    dynamic_shapes: Any = None

    def of(self, model: torch.nn.Module) -> Traced:
        """Return the same inputs for another model."""
        return replace(self, model=model)


def export(
    traced: Traced, *, strict: bool = False, trains: bool = False, runs: bool = True
) -> torch.export.ExportedProgram:
    """Export a model as the converter does; faster if the graph never runs."""
    import torch

    with quiet(), contextlib.nullcontext() if runs else graphs_compiled_on_call():
        program = torch.export.export(
            traced.model,
            traced.args,
            dict(traced.kwargs),
            dynamic_shapes=traced.dynamic_shapes,
            strict=strict,
        )
    return _without_contexts(program, trains=trains)


def _without_contexts(
    program: torch.export.ExportedProgram, *, trains: bool = False
) -> torch.export.ExportedProgram:
    """Inline the regions of `torch.no_grad()` and the like; see `inline_contexts`."""
    inline_contexts(program.graph_module, trains=trains)
    outputs = program.graph.output_node().args[0]
    for spec, node in zip(program.graph_signature.output_specs, outputs, strict=True):
        if hasattr(node, "name"):  # else a constant
            spec.arg.name = node.name
    return program


def convert(
    signatures: Mapping[str, Traced],
    *,
    static: bool | None = None,
    second_pipeline: bool = False,
    programs: Mapping[str, torch.export.ExportedProgram] | None = None,
    native: Native | None = None,
) -> bytes:
    """Convert torch models to one `.tflite`."""
    with quiet():
        QuantConfig = converter_module("quantize.quant_config").QuantConfig

        config = None
        if static is not None:
            preset = "pt2e_static_int8" if static else "pt2e_dynamic_int8"
            config = QuantConfig(pt2e_quantizer=pt2e_preset(preset))
        converter: Any = converter_module()
        for name, traced in signatures.items():
            converter = converter.signature(
                name,
                traced.model,
                traced.args,
                dict(traced.kwargs) or None,
                dynamic_shapes=traced.dynamic_shapes,
            )
        # ai-edge-torch has neither the second pipeline nor the newer name of the content.
        pipeline = {"use_v2": True} if second_pipeline else {}
        exported = [(signatures[name].model, (programs or {}).get(name)) for name in signatures]
        with (
            true_constants(),
            ops_listed_once(),
            graphs_compiled_on_call(),
            _exported_before(exported),
            lowered_by(native, second_pipeline=second_pipeline),
        ):
            edge = converter.convert(quant_config=config, **pipeline)
            read = edge.model_content if hasattr(edge, "model_content") else edge.tflite_model
            content: bytes = read()
        return content


@contextlib.contextmanager
def _exported_before(
    exported: Iterable[tuple[torch.nn.Module, torch.export.ExportedProgram | None]],
) -> Iterator[None]:
    """
    Reuse exported programs in the converter; else export as `export`.

    litert-torch 0.10.0 exports each signature in order, and accepts no program
    (`_convert/core.py`, `export_torch_signature`).
    """
    import torch

    left = [each for each in exported if each[1] is not None]
    original = torch.export.export

    # litert-torch 0.9.4 passes the module by name.
    def export(mod: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if left and left[0][0] is mod:
            return left.pop(0)[1]
        return _without_contexts(original(mod, *args, **kwargs))

    torch.export.export = export
    try:
        yield
    finally:
        torch.export.export = original
