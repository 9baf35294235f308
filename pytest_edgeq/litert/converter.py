"""Convert torch models to `.tflite`."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from pytest_edgeq.litert.configs import replaced
from pytest_edgeq.litert.exported import inline_contexts
from pytest_edgeq.litert.libraries import converter_module, quiet
from pytest_edgeq.litert.native import lowered_by
from pytest_edgeq.litert.pt2e_graphs import pt2e_preset

if TYPE_CHECKING:
    from pytest_edgeq.litert.native import Native

# The name of a file's only entry point.
SIGNATURE = "serving_default"


@dataclass(frozen=True, slots=True)
class Traced:
    """The model and the sample inputs of one signature, as for `torch.export.export`."""

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
    with (
        quiet(),
        contextlib.nullcontext() if runs else graphs_compiled_on_call(),
        guards_as_written() if strict else contextlib.nullcontext(),
    ):
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
    programs: Mapping[str, torch.export.ExportedProgram] | None = None,
    native: Native | None = None,
) -> bytes:
    """Convert torch models to one `.tflite`."""
    with quiet():
        config = None
        if static is not None:
            preset = "pt2e_static_int8" if static else "pt2e_dynamic_int8"
            quantization = converter_module("quantize.quant_config")
            config = quantization.QuantConfig(pt2e_quantizer=pt2e_preset(preset))
        converter: Any = converter_module()
        for name, traced in signatures.items():
            converter = converter.signature(
                name,
                traced.model,
                traced.args,
                dict(traced.kwargs) or None,
                dynamic_shapes=traced.dynamic_shapes,
            )
        exported = [(signatures[name].model, (programs or {}).get(name)) for name in signatures]
        with (
            true_constants(),
            kept_layouts(),
            graphs_compiled_on_call(),
            composite_ops_listed_once(),
            kernels_for_present_devices(),
            _exported_before(exported),
            histories_shared(),
            jax_functions_kept(),
            lowered_by(native),
        ):
            edge = converter.convert(quant_config=config)
            content: bytes = edge.model_content()
        return content


def _exported_before(
    exported: Iterable[tuple[torch.nn.Module, torch.export.ExportedProgram | None]],
) -> AbstractContextManager[None]:
    """
    Reuse exported programs in the converter; else export as `export`.

    litert-torch 0.10.0 exports each signature in order, and accepts no program
    (`_convert/core.py`, `export_torch_signature`).
    """
    left = [each for each in exported if each[1] is not None]
    original, hides_stacks = torch.export.export, torch.fx.config.do_not_emit_stack_traces

    def export(mod: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if left and left[0][0] is mod:
            return left.pop(0)[1]
        # A failure names the line of the model by these stacks; `histories_shared` hides others.
        with replaced(torch.fx.config, do_not_emit_stack_traces=hides_stacks):
            return _without_contexts(original(mod, *args, **kwargs))

    return replaced(torch.export, export=export)


def graphs_compiled_on_call() -> AbstractContextManager[None]:
    """
    Compile the graphs that torch creates or changes meanwhile only when they are called.

    torch 2.13 generates and compiles Python code for each graph that an export or a converter pass
    creates or changes, about 80 in a conversion, and nearly all are never called: 12 % of the time.
    """
    compiled = torch.fx.GraphModule.recompile

    def recompile(self: torch.fx.GraphModule) -> None:
        codegen = self.graph._codegen
        if isinstance(codegen, torch.fx.graph._PyTreeCodeGen):
            self._in_spec, self._out_spec = codegen.pytree_info[1:]

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            compiled(self)
            return self(*args, **kwargs)

        type(self).forward = forward

    return replaced(torch.fx.GraphModule, recompile=recompile)


@contextlib.contextmanager
def composite_ops_listed_once() -> Iterator[None]:
    """
    Make torch list its composite ops once, and again only after others were registered.

    torch 2.13 walks all registered ops for each of the three `run_decompositions` of a conversion,
    and for two of their decomposition tables: 290 of the 1,700 ms of a small network.
    """

    def listed() -> set[Any]:
        registered = torch._C._dispatch_get_registrations_for_dispatch_key(
            "CompositeImplicitAutograd"
        )
        return _composite_ops(tuple(registered))

    with (
        replaced(torch.export.exported_program, _collect_all_valid_cia_ops=listed),
        replaced(torch.export.decomp_utils, _collect_all_valid_cia_ops=listed),
    ):
        yield


@functools.lru_cache(maxsize=1)
def _composite_ops(registered: tuple[str, ...]) -> set[Any]:
    listed: set[Any] = torch._export.utils._collect_all_valid_cia_ops()
    return listed


def kernels_for_present_devices() -> AbstractContextManager[None]:
    """
    Make torch replace the kernels of composite ops for the devices of this machine alone.

    torch 2.13 does so for 9 backends, and for the autograd of 12, in each of the three
    `run_decompositions` of a conversion: 34,000 kernels in all, for each of which
    `OperatorBase.py_impl` evaluates annotations, a fifth of a small network's time.
    """
    program = torch.export.exported_program
    accelerator = torch.accelerator.current_accelerator()
    devices = {"CPU", "Meta"} | ({accelerator.type.upper()} if accelerator is not None else set())
    keys = {
        name: [key for key in everywhere if key.name.removeprefix("Autograd") in devices]
        for name, everywhere in vars(program).items()
        if name.endswith("_KEYS_TO_OVERRIDE")
    }
    return replaced(program, **keys)


def guards_as_written() -> AbstractContextManager[None]:
    """
    Make a strict export keep the expressions of its guards as they are written.

    torch 2.13 compiles guards, which an export does not use, to find violated constraints, and
    before that moves common subexpressions of their code into variables, in quadratic time: half of
    the time of the strict export of a ResNet-18.
    """
    passes = SimpleNamespace(count=lambda exprs: None, replace=lambda expr: ([], expr))
    return replaced(importlib.import_module("torch._dynamo.guards"), PyExprCSEPass=lambda: passes)


@contextlib.contextmanager
def histories_shared() -> Iterator[None]:
    """
    Make torch share the history of a node with its copies, and record none of its own stacks.

    torch 2.13 copies the history (`from_node`), deeply, whenever one of the three
    `run_decompositions` of a conversion runs or copies a node: 7 % of a conversion's time. Nothing
    modifies a history. For nodes without a stack, such as a QUANTIZE, it formats its own: 3 %.
    """
    shallow = SimpleNamespace(copy=copy.copy, deepcopy=list)
    with (
        replaced(torch.fx.traceback, copy=shallow),
        replaced(torch.fx.config, do_not_emit_stack_traces=True),
    ):
        yield


def jax_functions_kept() -> AbstractContextManager[None]:
    """
    Lower each function by JAX once in a process.

    litert-torch 0.10.0 (`backend/jax_bridge/_wrap.py`) lowers each op and shape by JAX, and
    translates the text, once in a conversion: 12 % of the time of a second conversion. In its keys
    6 equals 6.0, so that `arange(6)` would get the floats of an `arange(6.0)` before it.
    """
    bridge = converter_module("backend.jax_bridge._wrap")
    lower, translate = bridge._lower_to_ir_text, bridge._stablehlo_to_vhlo
    fingerprint_of = bridge.get_cache_fingerprint

    def fingerprint(*args: Any, **kwargs: Any) -> Hashable:
        found = fingerprint_of(*args, **kwargs)
        return found and _typed(found)

    def lowered(*call: Any, ir_input_names: Any = None) -> Any:
        text, inputs = lower(*call, ir_input_names=ir_input_names)
        key = fingerprint(*call, ir_input_names)
        return functools.partial(_kept, ("text", key), text) if key else text, inputs

    def translated(text: str) -> Any:
        return _kept(("bytecode", text), functools.partial(translate, text))

    return replaced(
        bridge,
        get_cache_fingerprint=fingerprint,
        _lower_to_ir_text=lowered,
        _stablehlo_to_vhlo=translated,
    )


def _typed(item: Any) -> Hashable:
    """Return a key in which 1, 1.0 and True differ, and 0.0 and -0.0."""
    if isinstance(item, tuple):
        return tuple(map(_typed, item))
    return type(item), item.hex() if isinstance(item, float) else item


_lowered_by_jax: dict[Hashable, Any] = {}


def _kept(key: Hashable, make: Callable[[], Any]) -> Any:
    if key not in _lowered_by_jax:
        _lowered_by_jax[key] = make()
    return _lowered_by_jax[key]


def true_constants() -> AbstractContextManager[None]:
    """
    Make the converter write the model's own constants, and not modify the model.

    litert-torch 0.10.0, `backend/inline_consts.py`: a constant whose memory is not contiguous (a
    transposed buffer, weights in channels-last layout) is copied, the copy's address used as the
    key of a cache, and the copy freed. The next one of the same shape often gets the same address,
    and so the file silently contains one layer's weights twice. It also clamps infinite values in
    the model's own memory, such as those of an attention mask.
    """
    inline_consts = converter_module("backend.inline_consts")
    fingerprint, clamp = inline_consts._ConstantFingerprint, inline_consts._clamp_inf_values
    alive: list[torch.Tensor] = []

    class KeptAlive:
        @staticmethod
        def from_tensor(tensor: torch.Tensor) -> Any:
            alive.append(tensor)
            return fingerprint.from_tensor(tensor)

    def clamp_copy(tensor: torch.Tensor) -> torch.Tensor:
        clamped: torch.Tensor = clamp(tensor.clone()) if tensor.isinf().any() else tensor
        return clamped

    return replaced(inline_consts, _ConstantFingerprint=KeptAlive, _clamp_inf_values=clamp_copy)


def kept_layouts() -> AbstractContextManager[None]:
    """
    Make the converter remember the layout of a dequantized tensor with several consumers.

    litert-torch 0.10.0, `OptimizeLayoutTransposesPass.insert_t_q_dq`: to permute the operand of one
    consumer it replaces the metadata of the DEQUANTIZE by a dict that the new nodes share, marked
    with the permuted layout. Another consumer then reads a tensor of the wrong layout ("Attempting
    to broadcast a dimension of length"), or is refused ("Attempting to convert non-NHWC compatible
    node"). So no residual block could be left in float between quantized layers.
    """
    name = "_convert.fx_passes.optimize_layout_transposes_pass.pass_body"
    layouts = converter_module(name).OptimizeLayoutTransposesPass
    insert = layouts.insert_t_q_dq

    def insert_t_q_dq(
        self: Any, graph: Any, input_dq: Any, target: Any, transpose: Any, meta: dict[str, Any]
    ) -> Any:
        kept = input_dq.meta
        inserted = insert(self, graph, input_dq, target, transpose, meta)
        input_dq.meta = kept
        return inserted

    return replaced(layouts, insert_t_q_dq=insert_t_q_dq)
