"""`QuantizedModel`: the final `.tflite` and the references that it is held against."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_edgeq.numerics.health import SampleLedger
from pytest_edgeq.samples import SampleSpec
from pytest_edgeq.tflite.edge import EdgeFile

if TYPE_CHECKING:
    import numpy as np
    import torch

    from pytest_edgeq.tflite.graph import OpGraph, SignatureTensor
    from pytest_edgeq.tflite.op_dtypes import OpDtypeMap
    from pytest_edgeq.tflite.source import TflitePath


__all__ = ["Border", "QuantizedModel"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True


@dataclass(frozen=True, slots=True)
class Border:
    """
    An input or an output of the file.

    Attributes:
        name: In the file's signature, for instance `args_0` or `output_0`.
        dtype: As stored, for instance `int8`.
        shape: −1 where any length will do.
        scale: Of a quantized border, else None.
        zero_point: Of a quantized border, else None.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    scale: float | None
    zero_point: int | None


class QuantizedModel:
    """
    What a flow made of a model; `edgeq.quantize` and `edgeq.load` give it.

    Attributes:
        name: For texts and for the files made from it.
        flow: `pt2e`, `recipe`, `float` (no quantizer) or `prebuilt`.
        float_model: The reference: the torch module, any callable for a loaded file, or None.
        simulated: The quantized torch graph of a PT2E flow, else None.
        spec: What a sample must hold.
        ledger: Digests of the calibration samples.
    """

    def __init__(
        self,
        edge: EdgeFile,
        *,
        name: str,
        flow: str,
        spec: SampleSpec,
        runtime: Callable[[], str],
        float_model: Callable[..., Any] | None = None,
        simulated: torch.fx.GraphModule | None = None,
        float_edge: EdgeFile | None = None,
        ledger: SampleLedger | None = None,
        directory: Path | None = None,
    ) -> None:
        self.name = name
        self.flow = flow
        self.spec = spec
        self.float_model = float_model
        self.simulated = simulated
        self._edge = edge
        self._float_edge = float_edge
        self._runtime = runtime
        self._directory = directory
        self._path = edge.path
        self.ledger = ledger if ledger is not None else SampleLedger()

    def __repr__(self) -> str:
        return f"<QuantizedModel {self.name!r}: {self.flow} flow, {self.op_dtypes!r}>"

    @property
    def edge(self) -> EdgeFile:
        """The file with its interpreters."""
        return self._edge

    @property
    def float_edge(self) -> EdgeFile | None:
        """The float file of a recipe flow with its interpreters."""
        return self._float_edge

    @property
    def tflite(self) -> bytes:
        """The file's content."""
        return bytes(self._edge.graph.buffer[:])

    @property
    def float_tflite(self) -> bytes | None:
        """The unquantized `.tflite` between torch and a recipe, None in other flows."""
        return None if self._float_edge is None else bytes(self._float_edge.graph.buffer[:])

    @property
    def path(self) -> Path:
        """Where the file lies; one that was made here is written at the first call."""
        if self._path is None:
            # A folder of its own, because two models may bear one name; it goes with the model
            # where nobody gave a place.
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
        return len(self._edge.graph.buffer)

    @property
    def graph(self) -> OpGraph:
        """The file's op graph."""
        return self._edge.graph

    @property
    def op_dtypes(self) -> OpDtypeMap:
        """What each op of the file computes in."""
        return self._edge.op_dtypes

    @property
    def inputs(self) -> tuple[Border, ...]:
        """The file's inputs, in its own order."""
        return tuple(_border(border) for border in self._edge.signature.inputs)

    @property
    def outputs(self) -> tuple[Border, ...]:
        """The file's outputs, in the model's own order."""
        return tuple(_border(border) for border in self._edge.signature.outputs)

    @property
    def runtime(self) -> str:
        """The runtime that is used where a call names none."""
        return self._runtime()

    def run(
        self, *args: Any, runtime: str | None = None, **kwargs: Any
    ) -> dict[str, np.ndarray[Any, Any]]:
        """
        Run the file: float in, float out. A file that keeps state starts anew at each call.

        Args:
            *args: Tensors or arrays as the model takes them.
            runtime: Kernels to run on; the session's own by default.
            **kwargs: Keyword inputs.

        Returns:
            The outputs by name, in the model's own order: inputs are quantized with rounding half
            to even and clipping, outputs dequantized by their own parameters.

        Raises:
            ValueError, TypeError: Inputs that do not fit, or an unknown runtime.
            RuntimeError: The kernels cannot allocate the file.
        """
        sample = self.spec.bind((args, kwargs), "the input")
        self._edge.restart()
        codes = self._edge.run(self.input_names, sample.arrays(), runtime or self.runtime)
        names = (border.name for border in self._edge.signature.outputs)
        return dict(zip(names, self._edge.decode(codes), strict=True))

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of a sample's tensors in order: `args_0`, …, then the keywords."""
        return tuple(spec.name for spec in self.spec.inputs)

    def with_tflite(self, tflite: TflitePath | bytes) -> QuantizedModel:
        """
        Hold another file against the same references.

        Args:
            tflite: Path or content, for instance of the artifact that a build really ships.

        Raises:
            FileNotFoundError, ValueError, TypeError: As `edgeq.load` does.
        """
        edge = EdgeFile(tflite, modules=self._edge.modules, threads=self._edge.threads)
        return QuantizedModel(
            edge,
            name=self.name,
            flow=self.flow,
            spec=self.spec,
            runtime=self._runtime,
            float_model=self.float_model,
            simulated=self.simulated,
            float_edge=self._float_edge,
            ledger=self.ledger,
            directory=self._directory,
        )


def _border(border: SignatureTensor) -> Border:
    tensor = border.tensor
    single = tensor.is_quantized and len(tensor.scales) == 1
    return Border(
        border.name,
        tensor.dtype,
        tensor.shape_signature,
        float(tensor.scales[0]) if single else None,
        int(tensor.zero_points[0]) if single else None,
    )
