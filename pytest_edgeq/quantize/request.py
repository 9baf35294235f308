"""The input of a flow: checked models, sample inputs and calibration data."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pytest_edgeq import litert
from pytest_edgeq.compare.quantized import FloatFile, QuantizedModel, SignatureReference
from pytest_edgeq.compare.reference import module_tree
from pytest_edgeq.compare.samples import Sample, SampleSpec, read_samples
from pytest_edgeq.names import PRESETS
from pytest_edgeq.numerics.samples import SampleLedger
from pytest_edgeq.quantize.session import Session
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.modules import ModulePaths, SignatureModules
from pytest_edgeq.tflite.ops import QDQ

_KEPT = 4  # calibration samples that are kept, to compare the losses of others with theirs


@dataclass(slots=True)
class Entry:
    """One requested signature, checked."""

    key: str  # the signature's name in the file
    model: torch.nn.Module  # in eval mode
    args: tuple[torch.Tensor, ...]  # positional sample inputs
    kwargs: dict[str, torch.Tensor]  # keyword sample inputs
    spec: SampleSpec  # inputs that a sample must have, from the sample inputs
    calibration: Iterable[Any] | None  # the user's samples; read at most once
    dynamic_shapes: Any
    name: str  # for texts: the model's, followed by the signature if there are several
    quantizer: str
    # the graph that the user has prepared or converted by PT2E, if the model is one; then `model`
    # is this graph without observers and rounding
    graph: torch.fx.GraphModule | None = None
    # digests of the calibration samples, to recognize them in the evaluation
    ledger: SampleLedger = field(default_factory=SampleLedger)
    kept: list[Sample] = field(default_factory=list)  # a few of these samples, drawn from all
    # the exported model and why strict export refused it, if later conversions are to share it
    exports: dict[bool, tuple[torch.export.ExportedProgram, str | None]] | None = None

    @property
    def sample(self) -> Sample:
        """The sample inputs, as a sample."""
        return Sample(self.args, self.kwargs)

    def traced(self, model: torch.nn.Module | None = None) -> litert.Traced:
        """Return the converter's input: the model, or a flow's copy of it."""
        model = self.model if model is None else model
        return litert.Traced(model, self.args, self.kwargs, self.dynamic_shapes)

    def calibration_samples(self) -> Iterator[Sample]:
        """Read the calibration data, once."""
        if self.calibration is None:
            raise ValueError(
                f"{self.name}: quantizer {self.quantizer} needs calibration data and got none: its "
                "activation ranges come from samples. Pass calibration=[sample, …], inputs as the "
                "model will see them: dozens for PT2E; 100 or more for recipes, which average over "
                "samples"
            )
        kind, draw = "calibration", random.Random(0)
        for count, sample in enumerate(
            read_samples(self.calibration, self.spec, kind, finite=True)
        ):
            self.ledger.add(sample.arrays())
            if count < _KEPT:
                self.kept.append(sample.clone())
            elif (place := draw.randrange(count + 1)) < _KEPT:
                self.kept[place] = sample.clone()
            yield sample


def fresh(entry: Entry) -> Entry:
    """Return an entry that has read no calibration samples yet, and shares the export."""
    return replace(entry, ledger=SampleLedger(), kept=[])


@dataclass(frozen=True, slots=True)
class Request:
    """One call of `edgeq.quantize`, checked."""

    entries: tuple[Entry, ...]  # one a signature of the file
    strict_export: bool  # whether PT2E flows export strictly
    name: str
    quantizer: str
    session: Session
    # trains the graph of a QAT quantizer, if given
    train: Callable[[torch.fx.GraphModule], Any] | None = None

    def edge(self, tflite: bytes) -> EdgeFile:
        """Open a file to which the models were converted."""
        first = self.entries[0].model
        if all(entry.model is first for entry in self.entries):
            modules: ModulePaths = module_tree(first)
        else:
            modules = SignatureModules({e.key: module_tree(e.model) for e in self.entries})
        try:
            return EdgeFile(tflite, modules=modules, runtimes=self.session.runtimes)
        except ValueError as error:
            message = str(error).partition("says ")[2].partition("; build")[0] or str(error)
            raise RuntimeError(
                f"{self.name}: expected a file that interpreters open, got one that they refuse: "
                f"{message}\ncause: converter and quantizer wrote it so, without an error: a fault "
                "upstream. Seen where a recipe quantizes a constant differently for two consumers\n"
                "fix: leave such ops in float by a rule of no_quantize, or quantize by PT2E"
            ) from error

    def finish(
        self,
        flow: str,
        edge: EdgeFile,
        *,
        simulated: Sequence[Callable[[], torch.nn.Module]] = (),
        float_edge: EdgeFile | None = None,
        float_files: Sequence[FloatFile] = (),
        left_in_float: frozenset[str] = frozenset(),
        quantizer: Any = None,
        strict_export: str | None = None,
    ) -> QuantizedModel:
        """Check the finished file and combine it with its references."""
        if flow != "float":
            _check_something_is_quantized(edge, self)
        references: dict[str | None, SignatureReference] = {}
        for index, entry in enumerate(self.entries):
            view = edge.at(entry.key)
            if float_edge is not None:
                _check_outputs_are_kept(view, float_edge.at(entry.key), entry.name)
            _check_output_names(view, entry.name)
            # Conversion succeeds for files that no kernel runs: fail now, not at the first run.
            names = [spec.name for spec in entry.spec.inputs]
            view.run(names, entry.sample.arrays(), self.session.runtime())
            references[entry.key] = SignatureReference(
                entry.spec,
                entry.model,
                simulated[index] if simulated else None,
                float_files[index] if float_files else None,
                entry.ledger,
                entry.kept,
            )
        return QuantizedModel(
            edge,
            name=self.name,
            flow=flow,
            references=references,
            runtime=self.session.runtime,
            float_edge=float_edge,
            directory=self.session.directory,
            threads=self.session.threads,
            executor=self.session.executor,
            left_in_float=left_in_float,
            quantizer=self.quantizer,
            options=self._options(quantizer, strict_export),
        )

    def _options(self, quantizer: Any, strict_export: str | None) -> dict[str, str]:
        """Return the options that op dtypes depend on, as text."""
        options = {"quantizer": Path(self.quantizer).name}
        if strict_export is not None:
            options["strict_export"] = strict_export
        if self.quantizer not in PRESETS:
            settings = litert.settings_of(quantizer)
            options |= {f"quantizer.{path}": text for path, text in settings.items()}
        return options


def _check_outputs_are_kept(edge: EdgeFile, float_edge: EdgeFile, name: str) -> None:
    """
    Refuse a file to which a recipe added outputs.

    ai-edge-quantizer 0.10.0, for some outputs with other consumers (a GRU's last state), adds a
    requantized output and keeps the old one, and the signature names only one of them.
    """
    before = [io_tensor.tensor.name for io_tensor in float_edge.signature.outputs]
    after = [io_tensor.tensor.name for io_tensor in edge.signature.outputs]
    if len(after) != len(before):
        raise ValueError(
            f"{name}: ai-edge-quantizer made {len(after)} outputs ({', '.join(after)}) of the "
            f"{len(before)} of the float file: an output that another op reads, too, was "
            "requantized, and the old one was kept. Quantize by PT2E, leave that op in float by a "
            "rule of no_quantize, or return only tensors that no op of the model reads"
        )


def _check_output_names(edge: EdgeFile, name: str) -> None:
    outputs = edge.signature.outputs
    nameless = [io_tensor for io_tensor in outputs if io_tensor.name == io_tensor.tensor.name]
    # Of outputs with equal names the last is named; without any, the tensors have the names.
    if 0 < len(nameless) < len(outputs):
        raise ValueError(
            f"{name}: of {len(outputs)} outputs the file names "
            f"{len(outputs) - len(nameless)}, so {len(nameless)} could never be read. The "
            "converter joins the keys of nested outputs with '_', and two keys came out the "
            f"same ({', '.join(io_tensor.tensor.name for io_tensor in outputs)}); rename one"
        )


def _check_something_is_quantized(edge: EdgeFile, request: Request) -> None:
    schemes = {entry.scheme for entry in edge.op_dtypes if entry.op not in QDQ}
    if schemes <= {"float", "integer"}:
        counts = ", ".join(f"{n} {op}" for op, n in edge.op_dtypes.counts().items())
        raise ValueError(
            f"{request.name}: nothing was quantized by {request.quantizer}: every op of the file "
            f"computes in float ({counts}). The quantizer annotated or matched no op of this "
            "model: choose one that knows its ops, or pass quantizer=None if float is meant"
        )
