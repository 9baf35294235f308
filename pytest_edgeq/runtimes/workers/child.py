"""Code that runs in a worker that isolates files; it imports little at module level."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pytest_edgeq.runtimes.engines import Source

    Array = npt.NDArray[np.generic]


class OpenFile:
    """A file open in the child; `own` is the pickle of a user's runtime."""

    def __init__(
        self,
        source: Source,
        signature: str | None,
        runtime: str,
        threads: int,
        keep: bool,
        own: bytes | None,
    ) -> None:
        from pytest_edgeq.runtimes.opening import Opening
        from pytest_edgeq.runtimes.runner import open_here
        from pytest_edgeq.tflite.graph import OpGraph

        runner = None
        if own is not None:
            import cloudpickle

            runner = cloudpickle.loads(own)
        graph = OpGraph.read(source)
        (chosen,) = (each for each in graph.signatures if each.key == signature)
        opening = Opening(source, graph, chosen, runtime, threads, runner, keep=keep)
        self._engine = open_here(opening)

    def run(self, parts: list[Mapping[str, Array]]) -> list[Array]:
        """Run one sample."""
        [inputs] = parts
        return self._engine.run(inputs)

    def tensors(self, indices: list[int]) -> list[Any]:
        """Return tensors as the last run left them."""
        return [self._engine.tensor(index) for index in indices]

    def close(self) -> None:
        """Close the file."""
        self._engine.close()
