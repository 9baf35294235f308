"""A file to open on a runtime; cheap to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_edgeq.runtimes.engines import Source
    from pytest_edgeq.runtimes.workers.target import Target
    from pytest_edgeq.tflite.graph import OpGraph
    from pytest_edgeq.tflite.modules import ModulePaths
    from pytest_edgeq.tflite.runtimes import Runtime
    from pytest_edgeq.tflite.subgraph import Signature


@dataclass(frozen=True, slots=True, eq=False)
class Opening:
    """A file to open on a runtime."""

    source: Source
    graph: OpGraph
    signature: Signature  # the entry point to run
    runtime: str
    threads: int
    own: Runtime | None = None  # the runner of a user's own runtime; None for a built-in one
    target: Target | None = None  # the target that runs it; None for this machine
    kernels: str = ""  # the built-in runtime whose kernels run it; a user's own runtime's name
    modules: ModulePaths | None = None  # to name ops
    keep: bool = False  # whether to keep every intermediate tensor
    foreign: bool = False  # whether the file was made elsewhere
