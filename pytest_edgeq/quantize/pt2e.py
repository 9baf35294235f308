"""
The `pt2e` flow: export, prepare, calibrate, convert, lower to `.tflite`.

Each step is torchao's or the converter's own; `litert/` works around their bugs.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch

from pytest_edgeq import litert
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.reference import call_reference, is_exported
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.errors import Warned, warn_user, warnings_kept
from pytest_edgeq.progress import Progress
from pytest_edgeq.quantize.cache.parts import Simulation
from pytest_edgeq.quantize.conversion_refusals import refusal, refuse_clearly
from pytest_edgeq.quantize.request import Entry, Request
from pytest_edgeq.quantize.session import Session, float_file
from pytest_edgeq.runtimes.process_state import seeded


def quantize_pt2e(request: Request, quantizer: Any) -> QuantizedModel:
    """Quantize a model with a PT2E quantizer."""
    session, strict, train = request.session, request.strict_export, request.train
    if any(entry.graph is not None for entry in request.entries):
        session.cache.refuse(request.name, "its graph was prepared elsewhere")
    if train is not None:
        session.cache.refuse(request.name, "train= may do something else each time")
        simulations = {
            entry.key: _train(entry, quantizer, session.progress, strict=strict, train=train)
            for entry in request.entries
        }
    else:
        simulations = {
            entry.key: _simulate(entry, quantizer, session, strict=strict)
            for entry in request.entries
        }
    weights_alone = any(each.weights_alone for each in simulations.values())
    static = any(each.static for each in simulations.values()) and not weights_alone
    traced = {entry.key: entry.traced() for entry in request.entries}
    tflite = session.convert(
        request.name, traced, strict_export=strict, simulations=simulations, static=static
    )
    graphs = [each.graph for each in simulations.values()]
    floats = [
        float_file(
            request.name, entry.key, session, _in_float(entry, request, simulations[entry.key])
        )
        for entry in request.entries
    ]
    refused = any(each.strict_refusal is not None for each in simulations.values())
    quantized = request.finish(
        "pt2e",
        request.edge(tflite),
        simulated=graphs,
        float_files=floats,
        quantizer=quantizer,
        strict_export="refused by torch.export" if refused else str(strict),
    )
    annotated = frozenset().union(*(each.annotated for each in simulations.values()))
    _warn_left_in_float(quantized, annotated)
    return quantized


def _in_float(
    entry: Entry, request: Request, simulation: Simulation
) -> Callable[[Sample], litert.Traced]:
    """Return a function that returns the model without quantization, also after training."""
    own = entry.graph is not None and litert.trains_quantization(entry.graph)

    def in_float(_: Sample) -> litert.Traced:
        if request.train is None and not own:
            return entry.traced()
        return entry.traced(litert.without_rounding(simulation.graph()))

    return in_float


def _warn_left_in_float(quantized: QuantizedModel, annotated: Container[tuple[str, str]]) -> None:
    """Warn of ops left in float though the quantizer annotated their weight."""
    left = [
        entry.where
        for entry in quantized.op_dtypes
        if entry.scheme == "float" and (entry.module, entry.op) in annotated
    ]
    if left:
        warn_user(
            f"{quantized.name}: {len(left)} op(s) stay in float though the quantizer annotated "
            f"their weights: {', '.join(left[:5])}. The converter quantizes an op only with its "
            "input and its output quantized, too, or with its weight alone: annotate all three"
        )


def _prepared(
    entry: Entry, quantizer: Any, session: Session, *, strict: bool
) -> tuple[torch.fx.GraphModule, str | None]:
    """Return the graph with observers, and why strict export refused the model, if so."""
    if entry.graph is not None:  # which has quantize nodes if the user has converted it
        return litert.own_graph(entry.graph), None
    graph, strict_refusal = exported_graph(entry, session, strict=strict)
    prepared = refuse_clearly(
        entry.name,
        "the quantizer",
        lambda: litert.prepare_pt2e(graph, instance_of(quantizer)),
        [entry.traced()],
    )
    return prepared, strict_refusal


def exported_graph(
    entry: Entry, session: Session, *, strict: bool
) -> tuple[torch.fx.GraphModule, str | None]:
    """Export a model to a graph of its own; return also why strict export refused it, if so."""
    with session.progress.step("export", entry.name):
        if is_exported(entry.model):
            return litert.own_graph(entry.model), None
        exports = {} if entry.exports is None else entry.exports
        if strict not in exports:
            # Seeded, because a stored key skips it: later samples must not depend on it.
            with seeded(session.seed):
                exports[strict] = _export(entry, strict=strict)
        program, strict_refusal = exports[strict]
        with litert.quiet():
            # Regions of no_grad, inlined by now, may write parameters.
            return copy.deepcopy(program.module()).requires_grad_(False), strict_refusal


def instance_of(quantizer: Any) -> Any:
    """Return the quantizer of a preset; another one unchanged."""
    return litert.pt2e_preset(quantizer) if isinstance(quantizer, str) else quantizer


def _simulate(entry: Entry, quantizer: Any, session: Session, *, strict: bool) -> Simulation:
    """Calibrate a model on its samples, and return the quantized graph."""
    cache = session.cache
    prepared = functools.cache(lambda: _prepared(entry, quantizer, session, strict=strict))
    # The key of the graph before any sample.
    graph_key = functools.cache(lambda: cache.graph_key(prepared()[0], strict, prepared()[1]))
    make_key = functools.partial(cache.prepared_key, entry.name, graph_key)
    key = traced_key = None
    if entry.graph is None:
        # Annotators read more of an exported model than its trace contains.
        if isinstance(quantizer, str) and strict and not is_exported(entry.model):
            with session.progress.step("export", entry.name):
                traced_key = cache.traced_key(entry.traced(), quantizer)
        key = make_key(traced_key)
    with session.progress.step("calibrate", entry.name, entry.calibration) as step:
        samples = step.each(entry.calibration_samples())
        simulation = cache.simulate(
            key, entry.name, samples, lambda read: _calibrate(entry, *prepared(), read), make_key
        )
    if simulation.strict_refusal is not None:
        warn_user(_refused_strictly(entry.name, simulation.strict_refusal))
    for warned in simulation.warned:
        warned.repeat()
    return simulation


def _calibrate(
    entry: Entry,
    prepared: torch.fx.GraphModule,
    strict_refusal: str | None,
    samples: Iterator[Sample],
) -> tuple[Simulation, bool]:
    """Run the samples through the observers; also return whether they were needed."""
    needs_data = litert.needs_data(prepared)
    warned: list[Warned] = []
    is_calibrated = entry.graph is not None and entry.calibration is None
    with torch.no_grad():
        if is_calibrated:
            pass  # the user has run it
        elif needs_data:
            for index, sample in enumerate(samples):
                call = functools.partial(call_reference, prepared, sample)
                what = f"calibration sample {index}"
                with warnings_kept() as kept:
                    refuse_clearly(entry.name, what, call, [entry.traced()])
                warned += kept
        else:
            # Observers of weights read them when the graph runs; fixed ones need nothing.
            with warnings_kept() as warned:
                call_reference(prepared, entry.sample)
    uncalibrated = litert.uncalibrated(prepared)
    if uncalibrated:
        raise ValueError(
            f"{entry.name}: {len(uncalibrated)} activation(s) were never calibrated: "
            f"{', '.join(uncalibrated[:5])}. Converted so, their scale would be meaningless; "
            "calibrate with samples that reach these parts of the model"
        )
    finish = litert.finish_pt2e if entry.graph is None else litert.finish_own
    simulated = refuse_clearly(entry.name, "the quantizer", lambda: finish(prepared))
    return _simulation(simulated, strict_refusal, dict.fromkeys(warned)), needs_data


def _simulation(
    graph: torch.fx.GraphModule, strict_refusal: str | None = None, warned: Iterable[Warned] = ()
) -> Simulation:
    return Simulation(
        lambda: graph,
        litert.is_static(graph),
        litert.holds_weights_alone(graph),
        frozenset(litert.quantized_weights(graph)),
        strict_refusal,
        tuple(warned),
    )


def _train(
    entry: Entry,
    quantizer: Any,
    progress: Progress,
    *,
    strict: bool,
    train: Callable[[torch.fx.GraphModule], Any],
) -> Simulation:
    """Train the graph by the user's function, and return the quantized graph."""
    refusal = None
    if entry.graph is not None:
        prepared = litert.own_graph(entry.graph, trains=True)
    else:
        graph, refusal = _graph_to_train(entry, progress, strict=strict)
        prepared = refuse_clearly(
            entry.name, "the quantizer", lambda: litert.prepare_qat(graph, instance_of(quantizer))
        )
    if not litert.trains_quantization(prepared):
        raise ValueError(
            f"{entry.name}: train= was given, but {entry.quantizer} inserts no fake quantizer, so "
            "training would see nothing of the quantization. Use 'pt2e_qat_int8' or a config with "
            "is_qat=True, or leave train= out"
        )
    with progress.step("train", entry.name):
        answer = train(prepared)
    _check_trained(entry.name, prepared, answer)
    simulated = refuse_clearly(entry.name, "the quantizer", lambda: litert.finish_qat(prepared))
    return _simulation(simulated, refusal)


def _graph_to_train(
    entry: Entry, progress: Progress, *, strict: bool
) -> tuple[torch.fx.GraphModule, str | None]:
    """Return a model's exported graph, and why strict export refused it."""
    if is_exported(entry.model):
        return litert.own_graph(entry.model, trains=True), None
    with progress.step("export", entry.name):
        exported, refusal = _export_with_free_batch(entry, strict=strict), None
        if exported is None:
            exported, refusal = _export(entry, strict=strict, trains=True)
    if refusal is not None:
        warn_user(_refused_strictly(entry.name, refusal))
    with litert.quiet():
        return copy.deepcopy(exported.module()), refusal


def _check_trained(name: str, prepared: torch.fx.GraphModule, answer: Any) -> None:
    if isinstance(answer, torch.nn.Module) and answer is not prepared:
        raise ValueError(
            f"{name}: train() returned another module, a {type(answer).__name__}; what is "
            "converted is the graph that it was given. Train that one in place, or load the "
            "trained state into it: prepared.load_state_dict(trained.state_dict())"
        )
    broken = litert.not_finite(prepared)
    if broken:
        raise ValueError(
            f"{name}: after train(), {len(broken)} tensor(s) of the graph are not finite: "
            f"{', '.join(broken[:5])}. The training diverged: lower the learning rate, or clip "
            "the gradients"
        )
    unseen, observed = litert.unseen(prepared)
    if unseen:
        never = len(unseen) == observed
        raise ValueError(
            f"{name}: train() never ran the prepared graph: none of its {observed} fake quantizers "
            "saw any data. Call it in train(): prepared(inputs)"
            if never
            else f"{name}: in train(), {len(unseen)} of {observed} fake quantizers saw no data: "
            f"{', '.join(unseen[:5])}. Converted so, their scale would be meaningless"
        )


def _export_with_free_batch(entry: Entry, *, strict: bool) -> torch.export.ExportedProgram | None:
    """Export for training, with a dynamic batch size."""
    tensors = (*entry.args, *entry.kwargs.values())
    if entry.dynamic_shapes is not None or len({t.shape[:1] for t in tensors}) != 1:
        return None
    if tensors[0].dim() == 0:
        return None
    # Two of each, because torch.export treats a batch of one as a constant.
    twice = dataclasses.replace(
        entry,
        args=tuple(torch.cat([t, t]) for t in entry.args),
        kwargs={name: torch.cat([t, t]) for name, t in entry.kwargs.items()},
    )
    free = torch.export.ShapesCollection()  # type: ignore[no-untyped-call] # torch's own gap
    for tensor in (*twice.args, *twice.kwargs.values()):
        free[tensor] = {0: torch.export.Dim.AUTO}
    twice.dynamic_shapes = free
    try:
        exported = litert.export(twice.traced(), strict=strict, trains=True)
    except Exception:
        # Whatever it was, the export with the samples' own batch reports it, or succeeds.
        return None
    values = [
        n.meta["val"]
        for n in exported.graph.nodes
        if n.name in exported.graph_signature.user_inputs
    ]
    return exported if all(isinstance(v.shape[0], torch.SymInt) for v in values) else None


def _export(
    entry: Entry, *, strict: bool, trains: bool = False
) -> tuple[torch.export.ExportedProgram, str | None]:
    """Export a model, non-strictly if strict export refuses it; return its reason."""
    export = functools.partial(litert.export, entry.traced(), trains=trains)

    def not_strict() -> torch.export.ExportedProgram:
        return refuse_clearly(
            entry.name,
            "torch.export",
            lambda: export(strict=False),
            [entry.traced()],
            is_annotated=False,
            strict_export=strict,
        )

    if not strict:
        return not_strict(), None
    try:
        return export(strict=True), None
    except (MemoryError, OSError) as error:  # not the model's: the next try may succeed
        text = refusal(entry.name, "torch.export", error, [entry.traced()])
        raise RuntimeError(text) from error
    except Exception as error:
        # torch.export raises whatever the model's own code met while it was traced.
        strict_error = error
    exported = not_strict()
    first = str(strict_error).strip().splitlines()
    return exported, f"{type(strict_error).__name__}: {first[0] if first else ''}"


def _refused_strictly(name: str, why: str) -> str:
    return (
        f"{name}: torch.export(strict=True) refuses the model ({why}), so it was exported with "
        "strict=False. The PT2E annotators match no ADD, MUL and CONCATENATION in such a graph and "
        "leave them in float: check with assert_no_float_ops. Make the model strictly exportable, "
        "or pass strict_export=False to say that you know"
    )
