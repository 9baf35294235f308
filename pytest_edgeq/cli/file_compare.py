"""Errors of one file against another, on the same samples; without torch."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.border_specs import border_spec
from pytest_edgeq.file_health import static_findings
from pytest_edgeq.numerics.comparison import Comparison, WorstSamples
from pytest_edgeq.numerics.error_sums import StageAccumulator
from pytest_edgeq.numerics.health import OutputHealth
from pytest_edgeq.numerics.inputs import InputHealth
from pytest_edgeq.numerics.side import Side
from pytest_edgeq.reference import in_file_order
from pytest_edgeq.tflite.edge import EdgeFile
from pytest_edgeq.tflite.input_quantization import quantized_inputs

__all__ = ["compare_files"]

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

    Args:
        reference: The file that is right by definition.
        edge: The file whose errors are measured.
        samples: Where each comes from, and floats (integers for integer inputs without a scale) in
            the order of the reference's inputs.
        runtime: Kernels that run both.
        name: For texts.

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
    specs = [border_spec(border.name, border.tensor) for border in edge.signature.outputs]
    total = StageAccumulator(specs)
    # How a file was calibrated is not known; by averages its ranges clip more.
    watches = [OutputHealth(spec, averaged=True) for spec in specs]
    input_watches = [
        (border.name, InputHealth(border_spec(border.name, tensor), averaged=True))
        for border, tensor in quantized_inputs(edge.graph, edge.signature)
    ]
    worst = WorstSamples()
    for index, (where, arrays) in enumerate(samples):
        expected = [
            (border.name, values)
            for border, values in zip(
                reference.signature.outputs,
                reference.decode(_run(reference, names, arrays, runtime, where)),
                strict=True,
            )
        ]
        codes = _run(edge, names, arrays, runtime, where)
        sides = [Side(each) for each in in_file_order(expected, outputs, name)]
        actual = [Side(each) for each in edge.decode(codes)]
        worst.offer(index, total.update(sides, actual), functools.partial(str, where))
        for watch, left, right, code in zip(watches, sides, actual, codes, strict=True):
            watch.update(left, right, code)
        given = edge.by_border(names, arrays)
        for border, input_watch in input_watches:
            input_watch.update(np.asarray(given[border]))
    findings = [finding for _, watch in input_watches for finding in watch.findings()]
    findings += [finding for watch in watches for finding in watch.findings()]
    return Comparison(
        name=name,
        flow="prebuilt",
        runtime=runtime,
        total=total.result(),
        health=(*findings, *static_findings(edge)),
        worst_samples=worst.result(),
    )


def _run(
    edge: EdgeFile, names: Sequence[str], arrays: Arrays, runtime: str, where: str
) -> list[npt.NDArray[Any]]:
    try:
        return edge.run(names, arrays, runtime)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {edge.path}: {error}") from None
