"""Measure a model's samples by an executor: pickle the model, read samples here or on workers."""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pytest_edgeq.compare.executors.pickled import CannotSendError, pickled
from pytest_edgeq.compare.executors.sample_executor import SampleExecutor
from pytest_edgeq.compare.executors.stream import SampleError, Stream
from pytest_edgeq.compare.executors.worker import Job, JobRunner, Task
from pytest_edgeq.compare.foreign import OnnxReference, is_keras
from pytest_edgeq.compare.language.model import LanguageModel
from pytest_edgeq.compare.parallel import on_one_thread, state_of
from pytest_edgeq.compare.quantized import QuantizedModel, SignatureReference
from pytest_edgeq.compare.reference import call_reference, graph_module, torch_module, undisturbed
from pytest_edgeq.compare.samples import Sample, SampleSource
from pytest_edgeq.errors import warn_user
from pytest_edgeq.names import GPU_KERNELS
from pytest_edgeq.progress import Step
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.runtimes.registry import Runtimes
from pytest_edgeq.runtimes.workers.settings import DEFAULT_SECONDS
from pytest_edgeq.runtimes.workers.target import Target

# A reference as a pickle, or a torch graph in the format of the conversion cache.
PickledReference = bytes | dict[str, bytes]


# Key, spec and ledger of a model's signature, its simulated reference, whether it has an origin.
_Signature = tuple[str | None, SignatureReference, PickledReference | None, bool]


def _opened(
    runtime: str,
    own: bytes | None,
    target: tuple[str, tuple[str, ...], float] | None,
    files: Sequence[Mapping[str, bytes]],
    settings: Mapping[str, Any],
    reference: PickledReference | None,
    labels: Mapping[str, Any],
    signature: _Signature | None,
) -> QuantizedModel:
    """Return a pickled model with new interpreters; without a signature a language model."""
    is_named = target is not None and runtime not in GPU_KERNELS
    runtimes = Runtimes(
        {} if own is None else {runtime: pickle.loads(own)},
        targets={target[0]: Target(*target)} if target is not None and is_named else {},
        seconds=DEFAULT_SECONDS if target is None else target[2],
    )
    edges, float_edges = (
        {key: EdgeFile(content, runtimes=runtimes, **settings) for key, content in each.items()}
        for each in files
    )
    float_model = None if reference is None else unpickled_reference(reference)
    if signature is None:
        return LanguageModel(
            sections=edges,
            float_sections=float_edges,
            reference=float_model,
            runtime=lambda: runtime,
            **labels,
        )
    key, known, simulated, has_origin = signature
    graph = None if simulated is None else unpickled_reference(simulated)
    make = None if graph is None else lambda: graph
    edge = edges[""].at(key)
    return QuantizedModel(
        edge,
        references={
            edge.signature.key: replace(known, float_model=float_model, make_simulated=make)
        },
        runtime=lambda: runtime,
        float_edge=float_edges[""].at(key) if float_edges else None,
        origin=edge if has_origin else None,
        **labels,
    )


def pickled_model(quantized: QuantizedModel, runtime: str, first: Callable[[], Sample]) -> bytes:
    """Return the pickle of a function that opens a model, or raise a CannotSendError."""
    edge = quantized.edge
    own, target = edge.runtimes.own.get(runtime), edge.runtimes.target_of(runtime)
    fix = "write it as a function or a class that opens its device when it is called"
    settings = {"threads": edge.threads, "layout": edge.layout, "modules": edge.modules}
    labels, signature = {"name": quantized.name}, None
    if isinstance(quantized, LanguageModel):
        sections = (quantized.sections, quantized.float_sections)
        settings["one_interpreter"] = True
    else:
        float_edge, simulated = quantized.float_edge, quantized.simulated
        sections = {"": edge}, {} if float_edge is None else {"": float_edge}
        labels["flow"] = quantized.flow
        signature = (
            edge.key,
            SignatureReference(quantized.spec, ledger=quantized.ledger),
            None if simulated is None else pickled_reference(simulated),
            quantized.origin is not None,
        )
    opened = functools.partial(
        _opened,
        runtime,
        None if own is None else pickled(own, f"the runtime {runtime!r}", fix),
        None if target is None else (target.name, target.command, target.seconds),
        tuple({key: bytes(each.graph.buffer[:]) for key, each in of.items()} for of in sections),
        settings,
        _reference(quantized, first),
        labels,
        signature,
    )
    return pickle.dumps(opened)


def _reference(quantized: QuantizedModel, first: Callable[[], Sample]) -> PickledReference | None:
    """Pickle the reference, or export it where it refuses, as parametrized modules do."""
    reference = quantized.float_model
    if reference is None:  # of a language model, whose float file serves as one
        return None
    is_language = isinstance(quantized, LanguageModel)  # an export has sequences of one length
    try:
        return pickled_reference(reference)
    except CannotSendError:
        module = torch_module(reference)
        if module is None or module is not reference or is_language:
            raise
        from pytest_edgeq.compare.torch_graphs import exported

        graph = exported(module, first())
        encoded = None if graph is None else _encoded(graph)
        if encoded is None:
            raise
        return encoded


def _encoded(graph: Any) -> PickledReference | None:
    """Return a graph in the format of the conversion cache; None where that has no place for it."""
    from pytest_edgeq.litert.digest import UnhashableError
    from pytest_edgeq.litert.graphs import encode_graph

    try:
        return encode_graph(graph)
    except UnhashableError:
        return None


def pickled_reference(reference: Callable[..., Any]) -> PickledReference:
    """Return a graph in the format of the conversion cache, or anything else as a pickle."""
    graph = graph_module(reference)
    encoded = None if graph is None else _encoded(graph)
    if encoded is not None:
        return encoded
    if isinstance(reference, OnnxReference):
        raise CannotSendError(
            "executor: the onnxruntime session of the reference cannot be sent to a worker\n"
            "fix: pass a function that makes the session when it is first called; or leave the "
            "executor out"
        )
    name = getattr(reference, "__name__", type(reference).__name__)
    if is_keras(reference):
        name = f"Keras model {name}"
    fix = (
        "pass a torch module, or a function that opens files and sessions when it is called; or "
        "leave the executor out"
    )
    return pickled(reference, f"the reference {name}", fix)


def unpickled_reference(reference: PickledReference) -> Any:
    """Return a copy of the reference."""
    if not isinstance(reference, dict):
        return pickle.loads(reference)
    from pytest_edgeq.litert.graphs import decode_graph

    return decode_graph(reference)


def _order_reason(quantized: QuantizedModel, first: Callable[[], Sample]) -> str:
    """Say why a sample's outputs depend on those before it; empty where they do not."""
    if isinstance(quantized, LanguageModel):
        return ""  # every sequence begins with an empty cache
    reference = quantized.float_model
    assert reference is not None, "unreachable because callers have looked"
    edges = [edge for edge in (quantized.edge, quantized.float_edge) if edge is not None]
    if any(edge.graph.is_stateful for edge in edges):
        return "the file keeps state from sample to sample"
    if torch_module(reference) is None:
        return ""
    before = state_of(quantized)
    if before is None:
        return "the reference has hooks, which may keep state from sample to sample"
    with undisturbed(reference, quantized.name) as changed, on_one_thread():
        call_reference(reference, first())
    is_same = not changed and before == state_of(quantized)
    return "" if is_same else "the reference changes when it is called"


def _bound(model: QuantizedModel, item: Any, index: int) -> Sample:
    return model.spec.bind(item, f"evaluation sample {index}")


class Reading:
    """Samples that are read once, here or by workers."""

    def __init__(
        self,
        quantized: QuantizedModel,
        inputs: object,
        items: Iterator[Any],
        sample_of: Callable[[Any], Sample] = lambda item: item,
        bind: Callable[[QuantizedModel, Any, int], Any] = _bound,
    ) -> None:
        self._quantized = quantized
        self.source = inputs if isinstance(inputs, SampleSource) else None
        self.items = items  # that are left here, also those that `first` has read
        self._sample_of, self._bind = sample_of, bind

    def first(self) -> Sample:
        """Read the first sample; its item is left all the same."""
        item = next(self.items)
        self.items = itertools.chain([item], self.items)
        return self._sample_of(item)

    def samples_of(self, task: Task) -> Iterator[Any]:
        """Read the samples of a task here."""
        if self.source is None:
            yield from map(pickle.loads, task.samples or ())
            return
        for index, item in enumerate(self.source.read(range(task.start, task.stop)), task.start):
            yield self._bind(self._quantized, item, index)

    def pickled(self, runtime: str) -> bytes | None:
        """Pickle the model; None, with a warning, where it must be measured here, in order."""
        quantized = self._quantized
        if self.source is not None and not len(self.source):
            self.first()  # raises
        if why := _order_reason(quantized, self.first):
            warn_user(
                f"executor: {quantized.name} was measured in this process, in order: {why}, so "
                "other processes would give other figures"
            )
            return None
        return pickled_model(quantized, runtime, self.first)

    def measure(
        self,
        engine: SampleExecutor,
        model: bytes,
        make_runner: Callable[[QuantizedModel], JobRunner],
        merge: Callable[[Any], None],
        step: Step,
        *,
        what: str = "the factory of the samples",
        on_read: Callable[[Any], None] = lambda sample: None,
        start: int = 0,
        extra: Callable[[], Any] = lambda: None,
        keeps_task: bool = False,
    ) -> tuple[str, ...]:
        """Measure the samples that are left by an engine; return the machines that did."""
        job = Job(self.source, self._bind, make_runner)
        stream = Stream(
            engine, model, job, self.items, step, what=what, on_read=on_read, next_index=start
        )
        try:
            stream.run(merge, extra)
        except SampleError as failed:
            if keeps_task:
                raise
            raise failed.error from failed.error.__cause__
        return tuple(sorted(stream.machines))
