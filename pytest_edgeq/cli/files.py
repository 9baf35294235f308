"""Open the files and runtimes that a command names, and describe inputs and outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_edgeq.cli.text import table
from pytest_edgeq.names import RUNTIMES

if TYPE_CHECKING:
    from pytest_edgeq.runtimes.edge import EdgeFile
    from pytest_edgeq.runtimes.registry import Runtimes
    from pytest_edgeq.tflite.subgraph import SignatureTensor

# The package itself says what is wrong with a path, and which files are near.
PATH = click.Path(path_type=Path)

section_option = click.option(
    "--section", metavar="NAME", help="The model to open, of a bundle (.litertlm, .task)."
)


def open_files(
    *paths: Path, section: str | None, runtimes: Runtimes | None = None
) -> list[EdgeFile]:
    """Open files, and bundles at a section."""
    from pytest_edgeq.runtimes.edge import EdgeFile
    from pytest_edgeq.runtimes.registry import BUILT_IN

    known = BUILT_IN if runtimes is None else runtimes
    edges = [EdgeFile(path, section=section, runtimes=known, foreign=True) for path in paths]
    if section is not None and all(edge.graph.section is None for edge in edges):
        raise ValueError(f"--section: expected a bundle, got {paths[0]}, a single .tflite file")
    return edges


def label_of(path: Path | str, section: str | None) -> str:
    """Return the name of a file, or of a model of a bundle, in texts."""
    return str(path) if section is None else f"{path}:{section}"


@contextlib.contextmanager
def project_runtimes(name: str) -> Iterator[Runtimes]:
    """Provide the runtimes that include this one; end a target that was started."""
    from pytest_edgeq.runtimes.registry import Runtimes

    found = Runtimes()
    # The ini is read only for a name that it may define, as it starts pytest.
    if name not in RUNTIMES:
        from pytest_edgeq.plugin.project_targets import project_targets
        from pytest_edgeq.runtimes.workers.target import make_targets

        hint = "a target is one of edgeq_targets in the ini file that pytest reads here"
        found = Runtimes(targets=make_targets(*project_targets()), hint=hint)
        found.check(name)
    with contextlib.closing(found):
        yield found


def io_document(entry: SignatureTensor) -> dict[str, Any]:
    """Return name, dtype, shape and quantization parameters of an input or an output, JSON-able."""
    from pytest_edgeq.numerics.metrics import json_number

    tensor = entry.tensor
    return {
        "dtype": tensor.dtype,
        "granularity": tensor.granularity,
        "name": entry.name,
        "scales": [json_number(float(scale)) for scale in tensor.scales],
        "shape": list(tensor.shape_signature),
        "zero_points": [int(point) for point in tensor.zero_points],
    }


def io_table(entries: tuple[SignatureTensor, ...]) -> list[str]:
    """Return a table of inputs or outputs."""
    rows = []
    for entry in entries:
        tensor = entry.tensor
        scale = point = ""
        if tensor.is_quantized and len(tensor.scales) == 1:
            scale, point = f"{tensor.scales[0]:.6g}", str(tensor.zero_points[0])
        elif tensor.is_quantized:
            scale = str(tensor.granularity)
        rows.append((entry.name, tensor.dtype, str(list(tensor.shape_signature)), scale, point))
    numbers = ("scale", "zero point")
    return table(("name", "dtype", "shape", *numbers), rows, numbers=numbers)
