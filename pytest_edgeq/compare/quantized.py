"""`QuantizedModel`: the final `.tflite` file and its references."""

from __future__ import annotations

import copy
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from pytest_edgeq.compare.foreign import FileReference
from pytest_edgeq.compare.reference import name_of
from pytest_edgeq.compare.samples import Sample, SampleSpec
from pytest_edgeq.names import readable
from pytest_edgeq.numerics.samples import SampleLedger
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.boundary import qparams

if TYPE_CHECKING:
    from concurrent.futures import Executor

    import numpy as np
    import torch

    from pytest_edgeq.compare.executors.sample_executor import SampleExecutor
    from pytest_edgeq.compare.executors.session_executor import SessionExecutor
    from pytest_edgeq.litert.converter import Traced
    from pytest_edgeq.tflite.graph import OpGraph
    from pytest_edgeq.tflite.layout import LayoutArgument
    from pytest_edgeq.tflite.op_dtypes import OpDtypeMap
    from pytest_edgeq.tflite.source import TflitePath
    from pytest_edgeq.tflite.subgraph import SignatureTensor


Reference: TypeAlias = "Callable[..., Any] | str | os.PathLike[str] | bytes | QuantizedModel"
"""A reference of a loaded file, as `Edgeq.load` accepts it."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """
    An input or an output of the file.

    Attributes:
        name: In the file's signature, for instance `args_0` or `output_0`.
        dtype: As stored, for instance `int8`.
        shape: −1 where any length will do.
        scale: Of a quantized input or output, else None.
        zero_point: Of a quantized input or output, else None.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    scale: float | None
    zero_point: int | None


class FloatSize(NamedTuple):
    """
    Size of the model in float.

    Attributes:
        size_bytes: The size.
        of: Description of what was counted.
    """

    size_bytes: int
    of: str


@dataclass(slots=True)
class FloatFile:
    """The reference converted in float, once, at the first call."""

    # return the model and its inputs; those of a loaded file are a sample's
    traced: Callable[[Sample], Traced]
    convert: Callable[[Traced], bytes]  # return the content of the file for them
    _content: bytes = field(default=b"", init=False)

    def __call__(self, sample: Sample) -> bytes:
        """Return the file's content."""
        self._content = self._content or self.convert(self.traced(sample))
        return self._content


@dataclass(frozen=True, slots=True)
class SignatureReference:
    """The references and samples of one signature of a file."""

    spec: SampleSpec  # inputs that a sample must have
    # the reference: the torch module, any callable for a loaded file, or None
    float_model: Callable[..., Any] | None = None
    # return the quantized torch graph, always the same one; None in a flow that has none
    make_simulated: Callable[[], torch.nn.Module] | None = None
    # the reference converted in float; None where the flow keeps that file itself, or the reference
    # is no torch module
    float_file: FloatFile | None = None
    ledger: SampleLedger = field(default_factory=SampleLedger)  # digests of the calibration samples
    calibration_samples: Sequence[Sample] = ()  # a few of them


class QuantizedModel:
    """
    A `.tflite` file with its references, returned by `edgeq.quantize` and `edgeq.load`.

    For a file with several signatures it stands for the whole: its ops and its size. Choose one
    with `.signature(name)` to run or compare it.

    Attributes:
        name: For texts and for the files made from it.
        flow: `pt2e`, `recipe`, `torchao`, `float` (no quantizer) or `prebuilt`.
        quantizer: A preset, a path, the class of a quantizer or `recipe`; None of a loaded file.
        threads: Cores that assertions may use for its samples.
        edge: The file with its interpreters.
        float_edge: The float file of a recipe flow with its interpreters.
        origin: The file that the flow made, if another one replaced it; else None.
        options: Arguments of `quantize`, as text, for baselines; empty where the flow did not make
            the file.
    """

    def __init__(
        self,
        edge: EdgeFile,
        *,
        name: str,
        flow: str,
        references: Mapping[str | None, SignatureReference],
        runtime: Callable[[], str],
        float_edge: EdgeFile | None = None,
        directory: Path | None = None,
        origin: EdgeFile | None = None,
        threads: int = 1,
        left_in_float: frozenset[str] = frozenset(),
        quantizer: str | None = None,
        executor: SessionExecutor | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.flow = flow
        self.quantizer = quantizer
        self.options = {} if options is None or origin is not None else options
        self._references = references
        self.edge = edge
        self.float_edge = float_edge
        self._runtime = runtime
        self._directory = directory
        self.origin = origin
        self.threads = threads
        self._executor = executor
        self._left_in_float = left_in_float
        self._path = edge.path
        self._views: dict[str, QuantizedModel] = {}
        self.made_by: Any = None  # request and quantizer of the call of `quantize`

    def __repr__(self) -> str:
        return f"<QuantizedModel {self.name!r}: {self.flow} flow, {self.op_dtypes!r}>"

    @property
    def signatures(self) -> tuple[str, ...]:
        """Names of the entry points: the chosen one, else all of the file."""
        return tuple(each.key for each in self.edge.signatures if each.key is not None)

    def signature(self, name: str) -> QuantizedModel:
        """
        Choose one signature of the file, to run it and to compare it.

        Its ops and its size are still those of the whole file.

        Raises:
            ValueError: The file has no such signature.
        """
        if name not in self._views:
            edge = self.edge.at(name)
            float_edge = None if self.float_edge is None else self.float_edge.at(name)
            label = f"{self.name}[{readable(name)}]"
            origin = self.origin
            if origin is not None and len(origin.graph.signatures) > 1:
                origin = origin.at(name)
            self._views[name] = self._with_edge(
                edge, float_edge=float_edge, name=label, origin=origin
            )
        return self._views[name]

    def _with_edge(self, edge: EdgeFile, **changes: Any) -> QuantizedModel:
        other = copy.copy(self)
        vars(other).update(changes, edge=edge, _path=edge.path, _views={})
        if other.origin is not None:
            other.options = {}
            other.made_by = None
        return other

    def clone(self) -> QuantizedModel:
        """Return the same model with interpreters of its own."""
        float_edge = None if self.float_edge is None else self.float_edge.clone()
        return self._with_edge(self.edge.clone(), float_edge=float_edge)

    def engine(self, executor: Executor | None = None) -> SampleExecutor | None:
        """Return the engine that measures its samples; None if this process does."""
        from pytest_edgeq.compare.executors.session_executor import SessionExecutor

        return (self._executor or SessionExecutor()).engine(executor)

    @property
    def _reference(self) -> SignatureReference:
        return self._references[self.edge.signature.key]

    @property
    def has_layers_to_choose(self) -> bool:
        """Whether layers of the model can be chosen to be left in float."""
        if self.made_by is None or self.flow == "float":
            return False
        request, _ = self.made_by
        is_prepared = any(entry.graph is not None for entry in request.entries)
        return len(request.entries) == 1 and request.train is None and not is_prepared

    @property
    def spec(self) -> SampleSpec:
        """Inputs that a sample must have."""
        return self._reference.spec

    @property
    def float_model(self) -> Callable[..., Any] | None:
        """The reference: the torch module, any callable for a loaded file, or None."""
        return self._reference.float_model

    @property
    def has_reference(self) -> bool:
        """Whether there is something to compare the file with."""
        return self.float_model is not None

    @property
    def reference_name(self) -> str:
        """Name of the reference in texts, such as `torch` or `the Keras model`."""
        return name_of(self.float_model)

    @property
    def is_float_file_reference(self) -> bool:
        """Whether the reference is the float file itself."""
        return isinstance(self.float_model, FileReference) and self.float_model.is_form

    @property
    def simulated(self) -> torch.nn.Module | None:
        """The quantized torch graph, built at first use; None in a flow without one."""
        make = self._reference.make_simulated
        return None if make is None else make()

    @property
    def float_file(self) -> FloatFile | None:
        """The reference in float; None for a callable, or if the flow keeps it."""
        return self._reference.float_file

    @property
    def exported_strictly(self) -> bool:
        """Whether the quantized graph was exported strictly, and so names its sources."""
        nodes = (node for module in self._simulated_graphs() for node in module.graph.nodes)
        return any("source_fn_stack" in node.meta for node in nodes)

    @property
    def left_in_float(self) -> frozenset[str]:
        """Paths of the modules that the quantizer's configuration leaves in float."""
        from pytest_edgeq import litert

        paths = map(litert.modules_left_in_float, self._simulated_graphs())
        return self._left_in_float.union(*paths)

    def _simulated_graphs(self) -> list[torch.fx.GraphModule]:
        """Return the quantized torch graphs of all signatures."""
        makers = [reference.make_simulated for reference in self._references.values()]
        graphs = [make() for make in makers if make is not None]
        return [cast("torch.fx.GraphModule", each) for each in graphs if hasattr(each, "graph")]

    @property
    def ledger(self) -> SampleLedger:
        """Digests of the calibration samples."""
        return self._reference.ledger

    @property
    def calibration_samples(self) -> Sequence[Sample]:
        """A few of the calibration samples; none of a loaded file."""
        return self._reference.calibration_samples

    @property
    def tflite(self) -> bytes:
        """The file's content."""
        return bytes(self.edge.graph.buffer[:])

    @property
    def float_tflite(self) -> bytes | None:
        """The unquantized `.tflite` between torch and a recipe, None in other flows."""
        return None if self.float_edge is None else bytes(self.float_edge.graph.buffer[:])

    @property
    def path(self) -> Path:
        """Path of the file; the first call writes a file that was made here."""
        if self._path is None:
            # A folder of its own, because two models may have the same name. A temporary one is
            # removed with the model.
            if self._directory is not None:
                Path(self._directory).mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix="edgeq-", dir=self._directory))
            if self._directory is None:
                weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            stem = "".join(c if c.isalnum() or c in "-_." else "_" for c in self.name)
            self._path = folder / f"{stem or 'model'}.tflite"
            self._path.write_bytes(self.tflite)
        return self._path

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return len(self.edge.graph.buffer)

    @property
    def sha256(self) -> str:
        """Hash of the file's content, in hexadecimal."""
        return self.edge.graph.sha256

    @property
    def float_size(self) -> FloatSize | None:
        """Size of the model in float; None if it is not known."""
        if self.float_edge is not None:
            return FloatSize(len(self.float_edge.graph.buffer), "the float .tflite")
        torch = sys.modules.get("torch")
        references = [each.float_model for each in self._references.values()]
        if torch is None or not all(isinstance(each, torch.nn.Module) for each in references):
            return None
        # Several signatures may share weights.
        tensors = {
            id(tensor): tensor
            for module in cast("list[Any]", references)
            for tensor in (*module.parameters(), *module.buffers())
        }
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        return FloatSize(size, "the torch model's parameters and buffers") if size else None

    @property
    def graph(self) -> OpGraph:
        """The file's op graph."""
        return self.edge.graph

    @property
    def op_dtypes(self) -> OpDtypeMap:
        """The dtypes in which each op of the file computes."""
        return self.edge.op_dtypes

    @property
    def inputs(self) -> tuple[FileTensor, ...]:
        """The file's inputs, in its own order."""
        return tuple(_io_tensor(io_tensor) for io_tensor in self.edge.signature.inputs)

    @property
    def outputs(self) -> tuple[FileTensor, ...]:
        """The file's outputs, in the model's own order."""
        return tuple(_io_tensor(io_tensor) for io_tensor in self.edge.signature.outputs)

    @property
    def runtime(self) -> str:
        """The default runtime of its calls."""
        return self._runtime()

    def run(
        self, *args: Any, runtime: str | None = None, **kwargs: Any
    ) -> dict[str, np.ndarray[Any, Any]]:
        """
        Run the file with float inputs, and return float outputs.

        A file that keeps state starts anew at each call.

        Args:
            *args: Tensors or arrays, as the model's positional inputs.
            runtime: Runtime to use: `xnnpack`, `builtin`, `reference`, `compiled`, `tensorflow`,
                `gpu`, `gpu_f32`, `TARGET` or `TARGET:KERNELS`, or one of your own; the session's
                own by default.
            **kwargs: Keyword inputs.

        Returns:
            The outputs by name, in the model's own order: inputs are quantized with rounding half
            to even and clipping, outputs dequantized by their own parameters.

        Raises:
            ValueError, TypeError: Inputs that do not fit, or an unknown runtime.
            RuntimeError: The kernels cannot allocate the file.
            ModuleNotFoundError: The runtime needs a package that is not installed.
        """
        sample = self.spec.bind((args, kwargs), "the input")
        self.edge.restart()
        codes = self.edge.run(self.input_names, sample.arrays(), runtime or self.runtime)
        names = (io_tensor.name for io_tensor in self.edge.signature.outputs)
        return dict(zip(names, self.edge.decode(codes), strict=True))

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of a sample's tensors in order: `args_0`, …, then the keywords."""
        return tuple(spec.name for spec in self.spec.inputs)

    def with_tflite(
        self,
        tflite: TflitePath | bytes,
        *,
        layout: LayoutArgument = None,
        section: str | None = None,
    ) -> QuantizedModel:
        """
        Return a model that compares another file with the same references.

        Args:
            tflite: Path or content, for instance of the artifact that a build really ships.
            layout: As for `edgeq.load`; by default that of this model's own file.
            section: As for `edgeq.load`.

        Raises:
            FileNotFoundError, ValueError, TypeError: As `edgeq.load`.
        """
        edge = EdgeFile(
            tflite,
            section=section or self.graph.section,
            modules=self.edge.modules,
            threads=self.edge.threads,
            runtimes=self.edge.runtimes,
            layout=self.edge.layout if layout is None else layout,
            foreign=True,
        )
        theirs, ours = [each.key for each in edge.graph.signatures], list(self._references)
        references = self._references
        if len(theirs) == len(ours) == 1:
            # The name of an only entry point need not match.
            references = {theirs[0]: self._reference}
        elif set(theirs) != set(ours):
            raise ValueError(f"the file has the signatures {theirs}, the model {ours}")
        elif len(self.signatures) == 1:
            edge = edge.at(self.signatures[0])
        # A file of another tool, or in another layout, is not compared with the flow's file.
        is_claimed = self.flow != "prebuilt" and layout is None
        origin = (self.origin or self.edge) if is_claimed else None
        return self._with_edge(edge, origin=origin, _references=references)


def _io_tensor(io_tensor: SignatureTensor) -> FileTensor:
    tensor = io_tensor.tensor
    scale, zero_point = qparams(tensor) or (None, None)
    return FileTensor(io_tensor.name, tensor.dtype, tensor.shape_signature, scale, zero_point)
