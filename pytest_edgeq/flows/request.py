"""What a flow is given: the model, its sample inputs and its calibration data, checked."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pytest_edgeq import litert
from pytest_edgeq.numerics.health import SampleLedger
from pytest_edgeq.quantized import QuantizedModel
from pytest_edgeq.reference import module_tree, parameter_names
from pytest_edgeq.samples import Sample, SampleSpec, is_tensor, read_samples
from pytest_edgeq.tflite.edge import EdgeFile
from pytest_edgeq.tflite.op_dtypes import BORDER_OPS

__all__ = ["Request", "Session", "make_request", "seeded"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True


@dataclass(frozen=True, slots=True)
class Session:
    """
    What the `edgeq` fixture fixes for every model.

    Attributes:
        runtime: Gives the runtime that is effective now.
        threads: Of every interpreter.
        seed: Of the random number generators while a model is quantized.
        directory: Where files are written; None makes a temporary folder when needed.
    """

    runtime: Callable[[], str]
    threads: int
    seed: int
    directory: Path | None


@dataclass(slots=True)
class Request:
    """
    One call of `edgeq.quantize`, checked.

    Attributes:
        model: In eval mode.
        args: Positional sample inputs.
        kwargs: Keyword sample inputs.
        spec: What they say that a sample must be.
        calibration: As the user gave it; read at most once.
        ledger: Digests of the calibration samples read, to meet them again among the evaluated.
    """

    model: torch.nn.Module
    args: tuple[torch.Tensor, ...]
    kwargs: dict[str, torch.Tensor]
    spec: SampleSpec
    calibration: Iterable[Any] | None
    dynamic_shapes: Any
    strict_export: bool
    name: str
    quantizer: str
    session: Session
    ledger: SampleLedger = field(default_factory=SampleLedger)

    @property
    def sample(self) -> Sample:
        """The sample inputs, as a sample."""
        return Sample(self.args, self.kwargs)

    def calibration_samples(self) -> Iterator[Sample]:
        """
        Read the calibration data, once.

        Raises:
            ValueError: There is none, or a sample that does not fit or is not finite.
        """
        if self.calibration is None:
            raise ValueError(
                f"quantizer {self.quantizer} needs calibration data and got none: its activation "
                "ranges come from samples. Pass calibration=[sample, …], inputs as the model will "
                "see them: dozens for PT2E; 100 or more for recipes, which average over samples"
            )
        for sample in read_samples(self.calibration, self.spec, "calibration", finite=True):
            self.ledger.add(sample.arrays())
            yield sample

    def edge(self, tflite: bytes) -> EdgeFile:
        """Open a file that this model was converted to."""
        return EdgeFile(tflite, modules=module_tree(self.model), threads=self.session.threads)

    def finish(
        self,
        flow: str,
        edge: EdgeFile,
        *,
        simulated: torch.fx.GraphModule | None = None,
        float_edge: EdgeFile | None = None,
    ) -> QuantizedModel:
        """
        Check the finished file and put it together with its references.

        Raises:
            RuntimeError: The runtime cannot allocate or run the file.
            ValueError: Nothing in it is quantized, or two outputs came out with one name.
        """
        outputs = edge.signature.outputs
        nameless = [border for border in outputs if border.name == border.tensor.name]
        if nameless:
            raise ValueError(
                f"{self.name}: of {len(outputs)} outputs the file names "
                f"{len(outputs) - len(nameless)}, so {len(nameless)} could never be read. The "
                "converter joins the keys of nested outputs with '_', and two keys came out the "
                f"same ({', '.join(border.tensor.name for border in outputs)}); rename one"
            )
        if flow != "float":
            _check_something_is_quantized(edge, self)
        # Conversion succeeds for files that no kernel takes; better now than in the first run.
        names = [spec.name for spec in self.spec.inputs]
        edge.run(names, self.sample.arrays(), self.session.runtime())
        return QuantizedModel(
            edge,
            name=self.name,
            flow=flow,
            spec=self.spec,
            runtime=self.session.runtime,
            float_model=self.model,
            simulated=simulated,
            float_edge=float_edge,
            ledger=self.ledger,
            directory=self.session.directory,
        )


def _check_something_is_quantized(edge: EdgeFile, request: Request) -> None:
    schemes = {entry.scheme for entry in edge.op_dtypes if entry.op not in BORDER_OPS}
    if schemes <= {"float", "integer"}:
        counts = ", ".join(f"{n} {op}" for op, n in edge.op_dtypes.counts().items())
        raise ValueError(
            f"{request.name}: nothing was quantized by {request.quantizer}: every op of the file "
            f"computes in float ({counts}). The quantizer annotated or matched no op of this "
            "model: choose one that knows its ops, or pass quantizer=None if float is meant"
        )


def make_request(
    model: Any,
    sample_inputs: Any,
    *,
    sample_kwargs: Mapping[str, Any] | None,
    calibration: Iterable[Any] | None,
    dynamic_shapes: Any,
    strict_export: bool,
    name: str | None,
    quantizer: str,
    session: Session,
) -> Request:
    """
    Check what `edgeq.quantize` was given.

    Raises:
        TypeError: The model is not a module, or a sample input not a tensor.
        ValueError: The model is in train mode, prepared or quantized already; no sample inputs.
    """
    if not isinstance(model, torch.nn.Module):
        what = "the class" if isinstance(model, type) else f"a {type(model).__name__}:"
        raise TypeError(
            f"expected a torch.nn.Module, got {what} {model!r:.80}"
            + ("; instantiate it" if isinstance(model, type) else "")
        )
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name: expected a string, got {name!r}")
    label = name if name is not None else type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"{label} is a scripted or traced module, which cannot be exported; pass the nn.Module "
            "that it was made from"
        )
    training = [path for path, module in model.named_modules() if module.training]
    if litert.holds_observers(model):
        raise ValueError(
            f"{label} is already prepared for PT2E quantization (it holds observers); converted as "
            "it is, nothing would be quantized. Pass the float model, and the quantizer as "
            "quantizer="
        )
    if litert.holds_quantization(model):
        raise ValueError(
            f"{label} is already quantized (its graph holds quantize and dequantize nodes); "
            "converted without its quantizer's config, every op would stay in float between them. "
            "Pass the float model, and the quantizer as quantizer="
        )
    if training:
        which = "the model" if training[0] == "" else f"its submodule {training[0]!r}"
        raise ValueError(
            f"{label}: {which} is in train mode: dropout and batch "
            "statistics would be exported. Call model.eval() first"
        )
    args = _positional(sample_inputs)
    if sample_kwargs is not None and not isinstance(sample_kwargs, Mapping):
        raise TypeError(
            f"sample_kwargs: expected a dict of tensors, got {type(sample_kwargs).__name__}"
        )
    kwargs = dict(sample_kwargs or {})
    for where, value in [
        *((f"sample_inputs[{i}]", value) for i, value in enumerate(args)),
        *((f"sample_kwargs[{key!r}]", value) for key, value in kwargs.items()),
    ]:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{where}: expected a torch.Tensor, got {type(value).__name__}")
    if not args and not kwargs:
        raise ValueError(
            f"{label}: no sample inputs: the model is traced with them. Pass "
            "sample_inputs=(torch.randn(1, 3, 224, 224),), or sample_kwargs={'name': tensor}"
        )
    spec = SampleSpec.of_inputs(
        args, kwargs, parameter_names(model)[0], dynamic=dynamic_shapes is not None
    )
    return Request(
        model=model,
        args=args,
        kwargs=kwargs,
        spec=spec,
        calibration=calibration,
        dynamic_shapes=dynamic_shapes,
        strict_export=strict_export,
        name=label,
        quantizer=quantizer,
        session=session,
    )


def _positional(sample_inputs: Any) -> tuple[Any, ...]:
    if sample_inputs is None:
        return ()
    if is_tensor(sample_inputs):
        return (sample_inputs,)
    if isinstance(sample_inputs, Sequence) and not isinstance(sample_inputs, (str, bytes)):
        return tuple(sample_inputs)
    raise TypeError(
        f"sample_inputs: expected a tuple of tensors, got {type(sample_inputs).__name__}"
        + ("; pass a dict as sample_kwargs" if isinstance(sample_inputs, Mapping) else "")
    )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Fix the random number generators of torch, numpy and Python for a while."""
    python, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)
