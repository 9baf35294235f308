"""Errors of one file against another, on the same samples; without torch."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy.typing as npt

from pytest_edgeq.compare.file_health import static_findings
from pytest_edgeq.compare.measurement import Measurement, SampleOutputs
from pytest_edgeq.compare.reference import in_file_order
from pytest_edgeq.numerics.comparison import Comparison
from pytest_edgeq.runtimes.edge import EdgeFile

Arrays = Sequence[npt.NDArray[Any]]


def compare_files(
    reference: EdgeFile,
    edge: EdgeFile,
    samples: Iterable[tuple[str, Arrays]],
    *,
    runtime: str,
    name: str,
) -> Comparison:
    """
    Run both files on each sample, in order, and measure the errors of one against the other.

    Returns:
        The stage `total`. `worst_samples` hold where the samples come from as their inputs.

    Raises:
        ValueError: No sample, one that does not fit, or outputs that differ in number, names or
            shape.
        TypeError: Integers where floats belong, or the other way round.
        RuntimeError: The kernels refuse a file.
    """
    names = [border.name for border in reference.signature.inputs]
    outputs = [border.name for border in edge.signature.outputs]
    # How a file was calibrated is not known; by averages its ranges clip more.
    measurement = Measurement(edge, names, {"total": ("float", "edge")}, averaged=True)
    for index, (where, arrays) in enumerate(samples):
        given = reference.decode(_run(reference, names, arrays, runtime, where))
        expected = [
            (border.name, values)
            for border, values in zip(reference.signature.outputs, given, strict=True)
        ]
        codes = _run(edge, names, arrays, runtime, where)
        values = {"float": in_file_order(expected, outputs, name), "edge": edge.decode(codes)}
        outcome = SampleOutputs(codes, values)
        measurement.update(index, arrays, outcome, functools.partial(str, where))
    return Comparison(
        name=name,
        flow="prebuilt",
        runtime=runtime,
        total=measurement.stages()["total"],
        health=(*measurement.findings(), *static_findings(edge)),
        worst_samples=measurement.worst.result(),
    )


def _run(
    edge: EdgeFile, names: Sequence[str], arrays: Arrays, runtime: str, where: str
) -> list[npt.NDArray[Any]]:
    try:
        return edge.run(names, arrays, runtime)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {edge.path}: {error}") from None
