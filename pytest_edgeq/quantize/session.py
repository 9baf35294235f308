"""Settings that all models of a session share, and float files that are converted on demand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_edgeq.compare.executors.session_executor import SessionExecutor
from pytest_edgeq.compare.quantized import FloatFile
from pytest_edgeq.progress import Progress
from pytest_edgeq.runtimes.process_state import frozen_heap, seeded
from pytest_edgeq.runtimes.registry import Runtimes

if TYPE_CHECKING:
    from pytest_edgeq import litert
    from pytest_edgeq.compare.samples import Sample
    from pytest_edgeq.quantize.cache.conversions import ConversionCache


@dataclass(frozen=True)
class Session:
    """Settings of the `edgeq` fixture, common to all models."""

    runtime: Callable[[], str]  # return the current default runtime
    threads: int
    seed: int  # of the random number generators while a model is quantized
    directory: Path | None  # where files are written; None makes a temporary folder when needed
    runtimes: Runtimes
    localize_seconds: float  # time limit for a failed check to find the layer to blame
    # open what runs the steps of conversions, or reads their results
    open_cache: Callable[[], ConversionCache]
    progress: Progress = field(default_factory=Progress)  # receives the steps that may take long
    # return the process that runs native steps of a model's conversion, by the model's name; None
    # for this one
    native: Callable[[str], litert.Native | None] = lambda name: None
    executor: SessionExecutor = field(default_factory=SessionExecutor)  # measures samples elsewhere

    @functools.cached_property
    def cache(self) -> ConversionCache:
        """The conversion cache; files that are only read need none, and no torch."""
        return self.open_cache()

    def convert(
        self,
        name: str,
        signatures: Mapping[str, litert.Traced],
        *,
        strict_export: bool = True,
        **annotated: Any,
    ) -> bytes:
        """Convert as `ConversionCache.convert`; report progress, and explain refusals."""
        from pytest_edgeq.quantize.conversion_refusals import refuse_clearly

        def step() -> bytes:
            with self.progress.step("convert", name):
                return self.cache.convert(name, signatures, native=self.native(name), **annotated)

        return refuse_clearly(
            name,
            "the converter",
            step,
            signatures.values(),
            is_annotated=bool(annotated),
            strict_export=strict_export,
        )


def float_file(
    name: str, key: str, session: Session, traced: Callable[[Sample], litert.Traced]
) -> FloatFile:
    """Return the float file of a signature, converted on demand."""

    def convert(inputs: litert.Traced) -> bytes:
        with seeded(session.seed), frozen_heap():
            return session.convert(name, {key: inputs})

    return FloatFile(traced, convert)
