"""Make the parcel of a model: the file and its references, as a worker opens them."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pytest_edgeq import litert
from pytest_edgeq.cache.digest import UnknownError, digest_of
from pytest_edgeq.cache.graphs import decode_graph, encode_graph
from pytest_edgeq.executors.parcel import Parcel
from pytest_edgeq.executors.pickled import CannotTravelError, pickled
from pytest_edgeq.executors.torch_settings import TorchSettings
from pytest_edgeq.foreign import OnnxReference, is_keras
from pytest_edgeq.numerics.health import SampleLedger
from pytest_edgeq.parallel import on_one_thread, state_of
from pytest_edgeq.quantized import Counterpart, QuantizedModel
from pytest_edgeq.reference import as_tensor, call_reference, torch_module, undisturbed
from pytest_edgeq.samples import InputSpec, Sample, SampleSpec
from pytest_edgeq.targets.target import Target
from pytest_edgeq.tflite.edge import EdgeFile
from pytest_edgeq.tflite.registry import Runtimes

Part = tuple[str, Any]
"""How something travels, `graph` or `pickle`, and what."""

Probe = Sample
"""A sample that references are run on before any worker gets them."""


@dataclass(frozen=True, slots=True)
class _Model:
    """
    A `QuantizedModel` in parts that any process can read.

    Attributes:
        name: Of the model.
        flow: That made the file.
        key: The signature that was chosen, or None.
        file: Content of the file.
        float_file: Content of a recipe flow's float file.
        settings: Of both files: threads of an interpreter, layout, names of modules.
        spec: What a sample must hold.
        reference: The reference.
        simulated: The quantized torch graph.
        ledger: Digests of the calibration samples.
        has_origin: Whether the file was put in the place of the one that the flow made.
        own: The user's own runtime of this name, pickled.
        target: Of the runtime: its name, the command and seconds; each worker starts it by itself.
        runtime: Kernels to run on.
        torch: Settings of torch in the client.
    """

    name: str
    flow: str
    key: str | None
    file: bytes
    float_file: bytes | None
    settings: dict[str, Any]
    spec: SampleSpec
    reference: Part
    simulated: Part | None
    ledger: SampleLedger
    has_origin: bool
    own: bytes | None
    target: tuple[str, tuple[str, ...], float] | None
    runtime: str
    torch: TorchSettings


def probe_of(spec: SampleSpec) -> Probe | None:
    """
    Return a sample of noise, and zeros where whole numbers belong; None of unknown shapes.

    It shows whether a reference can run elsewhere without reading one of the user's samples.
    """
    generator = np.random.default_rng(0)

    def made(spec: InputSpec) -> Any:
        shape = spec.shape
        if spec.dtype.startswith("float"):
            values: Any = generator.standard_normal(shape).astype(spec.dtype)
        else:
            values = np.zeros(shape, spec.dtype)
        return torch.from_numpy(values)

    try:
        if any(-1 in each.shape for each in spec.inputs):
            return None
        return Sample(
            tuple(map(made, spec.args)), {name: made(each) for name, each in spec.kwargs.items()}
        )
    except TypeError:  # a dtype that numpy or torch lacks
        return None


def dependent(quantized: QuantizedModel, probe: Probe) -> str:
    """
    Say why samples may depend on those before them; empty where they do not.

    Raises:
        CannotTravelError: The reference cannot be sent to another process.
        Exception: What the reference raises on the probe.
    """
    reference = quantized.float_model
    assert reference is not None, "unreachable because callers have looked"
    edges = [edge for edge in (quantized.edge, quantized.float_edge) if edge is not None]
    if any(edge.is_stateful for edge in edges):
        return "the file keeps state from sample to sample"
    owner = torch_module(reference)
    if owner is not None:
        if any(each._forward_hooks or each._forward_pre_hooks for each in owner.modules()):
            return "the reference has hooks, which may keep state from sample to sample"
        before: object = state_of(quantized)
    else:
        before = _pickled_reference(reference)
    with undisturbed(reference, quantized.name) as changed, on_one_thread():
        call_reference(reference, probe)
    after = state_of(quantized) if owner is not None else _pickled_reference(reference)
    if changed or before != after:
        return "the reference changes when it is called"
    return ""


def model_parcel(quantized: QuantizedModel, runtime: str, probe: Probe) -> tuple[Parcel, str]:
    """
    Return the parcel of a model, and why it must not be used; empty where it may.

    The reference travels as an exported program where that gives the same bits on the probe, else
    as it is, by cloudpickle.

    Raises:
        CannotTravelError: The reference, or a runtime of the user's own, cannot be pickled.
    """
    known = _PARCELS.get(quantized)
    state = _identity(quantized, runtime)
    if known is not None and state is not None and known[0] == state:
        return known[1], ""
    own = quantized.edge.runtimes.own.get(runtime)
    fix = "write it as a function or a class that opens its device when it is called"
    packed_own = None if own is None else pickled(own, f"the runtime {runtime!r}", fix)
    reference = quantized.float_model
    assert reference is not None, "unreachable because callers have looked"
    with on_one_thread(), undisturbed(reference, quantized.name):
        part = _exported(reference, quantized, probe)
        if part is None:
            part = ("pickle", _pickled_reference(reference))
            if not _same_bits(reference, opened_part(part), probe):
                return Parcel.of(b""), "a copy of the reference gives other figures"
        simulated = _simulated(quantized, probe)
    if simulated is not None and simulated[0] == "":
        return Parcel.of(b""), "a copy of the quantized torch graph gives other figures"
    parcel = Parcel.of(pickle.dumps(_parts(quantized, runtime, part, simulated, packed_own)))
    if state is not None:
        # Of now: torch.export puts copies in the place of attributes that are containers.
        _PARCELS[quantized] = _identity(quantized, runtime), parcel
    return parcel, ""


_PARCELS: weakref.WeakKeyDictionary[QuantizedModel, tuple[object, Parcel]] = (
    weakref.WeakKeyDictionary()
)
"""The last parcel of each model, which takes seconds to make."""


def _parts(
    quantized: QuantizedModel,
    runtime: str,
    reference: Part,
    simulated: Part | None,
    own: bytes | None,
) -> _Model:
    edge = quantized.edge
    settings = {"threads": edge.threads, "layout": edge.layout, "modules": edge.modules}
    return _Model(
        quantized.name,
        quantized.flow,
        edge.key,
        quantized.tflite,
        quantized.float_tflite,
        settings,
        quantized.spec,
        reference,
        simulated,
        quantized.ledger,
        quantized.origin is not None,
        own,
        _target(quantized, runtime),
        runtime,
        TorchSettings.current(),
    )


def _target(quantized: QuantizedModel, runtime: str) -> tuple[str, tuple[str, ...], float] | None:
    target = quantized.edge.runtimes.target_of(runtime)
    return None if target is None else (target.name, target.command, target.seconds)


def opened_model(content: bytes) -> tuple[QuantizedModel, str, TorchSettings]:
    """Return the model of a parcel with new interpreters, its runtime and torch's settings."""
    told: _Model = pickle.loads(content)
    own = {} if told.own is None else {told.runtime: pickle.loads(told.own)}
    targets = {} if told.target is None else {told.target[0]: Target(*told.target)}
    runtimes = Runtimes(own, targets=targets)

    def edge_of(content: bytes) -> EdgeFile:
        edge = EdgeFile(content, runtimes=runtimes, **told.settings)
        return edge if told.key is None else edge.at(told.key)

    edge = edge_of(told.file)
    simulated = None if told.simulated is None else opened_part(told.simulated)
    counterpart = Counterpart(
        told.spec,
        opened_part(told.reference),
        None if simulated is None else lambda: simulated,
        ledger=told.ledger,
    )
    model = QuantizedModel(
        edge,
        name=told.name,
        flow=told.flow,
        counterparts={edge.signature.key: counterpart},
        runtime=lambda: told.runtime,
        float_edge=None if told.float_file is None else edge_of(told.float_file),
        origin=edge if told.has_origin else None,
    )
    return model, told.runtime, told.torch


def _identity(quantized: QuantizedModel, runtime: str) -> object:
    """Return what tells that a model is as it was; None where that cannot be told."""
    owner = torch_module(quantized.float_model)
    if owner is None:
        return None
    try:
        weights = digest_of(dict(owner.state_dict()))
    except UnknownError:
        return None
    own = quantized.edge.runtimes.own.get(runtime)
    where = _target(quantized, runtime)
    return runtime, id(own), where, weights, state_of(quantized), TorchSettings.current()


def _exported(
    reference: Callable[..., Any], quantized: QuantizedModel, probe: Probe
) -> Part | None:
    """Return an exported program that computes the same bits; None where there is none."""
    module = torch_module(reference)
    fixed = all(-1 not in each.shape for each in quantized.spec.inputs)
    if module is None or module is not reference or not fixed:
        return None  # of a shape of its own a program computes what it was traced with
    args = tuple(as_tensor(each).clone() for each in probe.args)
    kwargs = {name: as_tensor(each).clone() for name, each in probe.kwargs.items()}
    try:
        with litert.quiet(), torch.no_grad():
            graph = torch.export.export(module, args, kwargs, strict=False).module()
            assert isinstance(graph, torch.fx.GraphModule), "torch.export gives graph modules"
            if not _is_plain(graph):
                return None
            parts = encode_graph(graph)
        same = _same_bits(reference, decode_graph(parts), probe)
    except Exception:  # torch.export raises whatever the forward met: it is pickled then
        return None
    return ("graph", parts) if same else None


def _is_plain(graph: torch.fx.GraphModule) -> bool:
    """Whether outputs nest in Python's own containers, which any process has."""
    codegen = graph.graph._codegen
    spec = getattr(getattr(codegen, "pytree_info", None), "out_spec", None)
    waiting = [spec]
    while waiting:
        each = waiting.pop()
        if each is None or (each.type not in (None, tuple, list, dict) and not each.is_leaf()):
            return False
        waiting += each.children()
    return True


def _simulated(quantized: QuantizedModel, probe: Probe) -> Part | None:
    """Return the quantized torch graph; an empty name where no copy gives the same bits."""
    simulated = quantized.simulated
    if simulated is None:
        return None
    part = _graph(simulated)
    ours, theirs = (litert.copied_to_run(each) for each in (simulated, opened_part(part)))
    return part if _same_bits(ours, theirs, probe) else ("", b"")


def _graph(module: Callable[..., Any]) -> Part:
    """Return a graph in the project's own format, or anything else as a pickle."""
    try:
        if isinstance(module, torch.fx.GraphModule):
            return "graph", encode_graph(module)
    except UnknownError:
        pass
    return "pickle", _pickled_reference(module)


def other_reference(reference: Callable[..., Any], probe: Probe) -> Part | None:
    """
    Return how a torch graph travels that is used in place of the reference.

    Raises:
        CannotTravelError: It cannot be pickled.
    """
    part = _graph(reference)
    with on_one_thread():
        return part if _same_bits(reference, opened_part(part), probe) else None


def _pickled_reference(reference: Callable[..., Any]) -> bytes:
    name = getattr(reference, "__name__", type(reference).__name__)
    fix = (
        "pass a torch module, or a function that opens files and sessions when it is called; or "
        "leave the executor out"
    )
    if isinstance(reference, OnnxReference):
        raise CannotTravelError(
            "executor: the onnxruntime session of the reference cannot travel to a worker\n"
            "fix: pass a function that makes the session when it is first called; or leave the "
            "executor out"
        )
    if is_keras(reference):
        name = f"Keras model {name}"
    return pickled(reference, f"the reference {name}", fix)


def opened_part(part: Part) -> Any:
    """Return the module or callable that a part is."""
    kind, content = part
    return decode_graph(content) if kind == "graph" else pickle.loads(content)


def _same_bits(one: Callable[..., Any], other: Callable[..., Any], probe: Probe) -> bool:
    return _bits(call_reference(one, probe)) == _bits(call_reference(other, probe))


def _bits(outputs: Sequence[tuple[str | None, Any]]) -> list[object]:
    return [(key, each.dtype.str, each.shape, each.tobytes()) for key, each in outputs]
