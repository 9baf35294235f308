"""`Edgeq`: what the `edgeq` fixture gives."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pytest_edgeq.numerics.comparison import Comparison
    from pytest_edgeq.quantized import QuantizedModel
    from pytest_edgeq.snapshots.session import SnapshotSession
    from pytest_edgeq.tflite.source import TflitePath


__all__ = ["Edgeq"]

# A user's test shows the user's line and the message, not how we came to it.
__tracebackhide__ = True


class Edgeq:
    """
    Quantize models, load files, compare them with torch, and remember what was accepted.

    Inside pytest the fixture `edgeq` is one of these; outside, `Edgeq()` serves for all but what is
    remembered.

    Args:
        runtime: Kernels that run files where a call names none, or a callable that tells.
        threads: Of every interpreter.
        seed: Of the random number generators of torch, numpy and Python while a model is
            quantized.
        directory: Where files are written; a temporary folder by default.
        memory: What remembers; given by the plugin.

    Raises:
        ValueError: Unknown runtime, or a number of threads or a seed out of range.
        TypeError: A number of threads or a seed that is no whole number.
    """

    def __init__(
        self,
        *,
        runtime: str | Callable[[], str] = "xnnpack",
        threads: int = 1,
        seed: int = 0,
        directory: Path | None = None,
        memory: SnapshotSession | None = None,
    ) -> None:
        from pytest_edgeq.flows.request import Session
        from pytest_edgeq.tflite.runtimes import check_runtime

        for setting, value in (("threads", threads), ("seed", seed)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{setting}: expected a whole number, got {value!r}")
        if threads < 1:
            raise ValueError(f"threads: expected at least 1, got {threads}")
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed: expected 0 … 2**32 − 1, got {seed}")
        if isinstance(runtime, str):
            fixed = check_runtime(runtime)
            tell: Callable[[], str] = lambda: fixed  # noqa: E731 # a name for one value
        else:
            tell = runtime
        self._session = Session(tell, threads, seed, directory)
        self._memory = memory

    def quantize(
        self,
        model: torch.nn.Module,
        sample_inputs: Any = None,
        *,
        quantizer: Any = "pt2e_static_int8",
        calibration: Iterable[Any] | None = None,
        sample_kwargs: Mapping[str, torch.Tensor] | None = None,
        dynamic_shapes: Any = None,
        strict_export: bool = True,
        name: str | None = None,
    ) -> QuantizedModel:
        """
        Quantize a torch model and convert it to `.tflite`.

        The model is left as it was: parameters, buffers, training flag and hooks.

        Args:
            model: In eval mode.
            sample_inputs: A tuple of tensors that the model is traced with.
            quantizer: A preset's name (`pytest_edgeq.presets.PRESETS`), a torchao PT2E `Quantizer`
                instance, an ai-edge-quantizer recipe (list of dicts, or a `.json` path), or None
                for plain float.
            calibration: Any iterable of samples, each a tensor, a tuple of tensors or a dict;
                read once, in order, and only by quantizers that need it.
            sample_kwargs: Keyword inputs to trace with.
            dynamic_shapes: As `torch.export.export` takes it.
            strict_export: Of PT2E flows. A model that strict export refuses is exported
                non-strictly with a warning.
            name: For texts and files; the class's name by default.

        Returns:
            The file with the references to hold it against.

        Raises:
            TypeError: Not a module, not a quantizer, or a sample of another kind or dtype.
            ValueError: A model in train mode, missing, empty or bad calibration data, an unknown
                preset, or a model in which nothing was quantized.
            FileNotFoundError: The recipe's path does not exist.
            RuntimeError: torch.export, the converter or the kernels refuse the model.
        """
        from pytest_edgeq.flows.request import make_request, seeded
        from pytest_edgeq.flows.resolve import describe, run_flow

        request = make_request(
            model,
            sample_inputs,
            sample_kwargs=sample_kwargs,
            calibration=calibration,
            dynamic_shapes=dynamic_shapes,
            strict_export=strict_export,
            name=name,
            quantizer=describe(quantizer),
            session=self._session,
        )
        with seeded(self._session.seed):
            return run_flow(request, quantizer)

    def load(
        self,
        tflite: TflitePath | bytes,
        *,
        reference: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> QuantizedModel:
        """
        Take a `.tflite` file made elsewhere.

        Args:
            tflite: Path or content.
            reference: What it should compute: a torch module in eval mode, or any callable on the
                samples' own tensors or arrays. Without one it cannot be compared.
            name: For texts and files; the file's stem by default.

        Raises:
            FileNotFoundError: No such file.
            ValueError: Not a whole `.tflite` file, or a reference in train mode.
            TypeError: Neither a path nor bytes, or a reference that cannot be called.
        """
        from pytest_edgeq.flows.prebuilt import load_prebuilt

        if name is None:
            name = Path(tflite).stem if isinstance(tflite, (str, os.PathLike)) else "model"
        return load_prebuilt(tflite, reference, name, self._session)

    def compare(
        self, quantized: QuantizedModel, inputs: Iterable[Any], *, runtime: str | None = None
    ) -> Comparison:
        """
        Measure the errors of every stage on the same samples.

        Args:
            quantized: From `quantize` or `load`.
            inputs: Any iterable of samples; read once, in order, one held at a time.
            runtime: Kernels that run the file; the session's own by default.

        Raises:
            ValueError: No sample, one that does not fit, no reference, an unknown runtime, or
                outputs that differ from the reference's in number or shape.
            TypeError: A sample of another kind or dtype.
            RuntimeError: The kernels cannot allocate the file.
        """
        from pytest_edgeq.compare import compare

        _require_model("compare", quantized)
        return compare(quantized, inputs, runtime=runtime or self._session.runtime())

    def check_op_dtypes(self, quantized: QuantizedModel, *, name: str | None = None) -> None:
        """
        Hold the op-dtype map against the one that was remembered for this test.

        Args:
            quantized: From `quantize` or `load`.
            name: Of the remembered file; needed where a test remembers several models.

        Raises:
            AssertionError: Nothing is remembered yet, or the map has changed.
            ValueError: The remembered file cannot be read.
            RuntimeError: Not called from the body of a test.
        """
        _require_model("check_op_dtypes", quantized)
        if self._memory is None:
            raise RuntimeError(
                "check_op_dtypes remembers by test: call it on the fixture `edgeq` in a test"
            )
        self._memory.check("op_dtype_map", name or "op_dtypes", quantized.op_dtypes.to_dict())


def _require_model(method: str, quantized: object) -> None:
    from pytest_edgeq.quantized import QuantizedModel

    if not isinstance(quantized, QuantizedModel):
        hint = "; load the file first: edgeq.load(path, reference=model)"
        known = isinstance(quantized, (str, bytes, os.PathLike))
        raise TypeError(
            f"{method}: expected what edgeq.quantize or edgeq.load gives, got "
            f"{type(quantized).__name__}{hint if known else ''}"
        )
