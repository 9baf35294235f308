"""Check that intermediate ranges do not clip values that calibration did not have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from pytest_edgeq.compare.measurement import Arrays, SampleRunner
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.reference import in_file_order, undisturbed
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.localize.localizer import ClippedRange, Localizer
from pytest_edgeq.localize.mistakes import BIT_DB, FAR
from pytest_edgeq.numerics.comparison import Comparison
from pytest_edgeq.numerics.findings import CLIPPED_ACTIVATION, Finding, Harm, input_findings
from pytest_edgeq.numerics.metrics import sqnr_db
from pytest_edgeq.numerics.static_health import Calibration
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.op_dtypes import entry_of
from pytest_edgeq.tflite.writing import write_clamped

_EXPLAINED = 0.5  # share of the file's error that the ranges alone must make
# Minimum share of ranges that values exceed by far, to fault a calibration of unknown samples.
_MANY = 1 / 8
_VERY_FAR = 0.5  # share of a range's width beyond which an overshoot of a single range is enough
_LEAST_RANGES = 5  # minimum number of ranges to judge them together


class _Errors(NamedTuple):
    """Sums over an output: the reference's squares, and squared errors."""

    signal: float
    file: float  # of the file
    clamped: float  # of the float form that is clamped to the file's ranges
    unexplained: float  # the part of the file's that clamping does not explain


def clipping_findings(
    quantized: QuantizedModel,
    runtime: str,
    localizer: Localizer,
    comparison: Comparison,
    calibration: Calibration,
) -> list[Finding]:
    """
    Return a finding if ranges of intermediate tensors make most of the file's loss.

    The float form runs on the worst samples with the values of each exceeded range clamped to it.
    Clipping makes what this explains of the file's error.

    The worst calibration sample must have lost less, by a bit (6.02 dB SQNR), or by two if chance
    explains how many values lie beyond: of 128 samples some exceed the largest of 32. If no
    calibration samples are known, many ranges or one must be exceeded far.
    """
    ranges = localizer.clipped_ranges()
    clipping = [each for each in ranges if each.is_clipped]
    if not clipping or quantized.edge.graph.is_stateful or calibration.is_own:
        return []
    if input_findings(comparison.health):
        return []  # they explain all errors behind them
    is_chance = all(each.is_chance for each in clipping)
    if is_chance and max(each.overshoot for each in clipping) < _VERY_FAR:
        return []
    reference = quantized.float_model
    assert reference is not None, "unreachable because outputs were compared"
    runner = SampleRunner(quantized, runtime)
    with undisturbed(reference, quantized.name):
        try:
            calibrated = _output_sqnr(quantized, runner)
            bits = 2 if is_chance else 1
            names = [
                name
                for name, errors in comparison.total.outputs.items()
                if errors.sqnr_db < calibrated.get(name, -np.inf) - bits * BIT_DB
                or (not calibrated and _exceeds_far(ranges))
            ]
            worst = [each.inputs for each in comparison.worst_samples] if names else []
            found = _with_clamped(quantized, runner, localizer, clipping, worst)
        except (RuntimeError, ValueError, TypeError):
            return []  # kernels may refuse a clamp, and samples may have become invalid
    for name in names:
        errors = found.get(name)
        if errors is not None and errors.unexplained < (1 - _EXPLAINED) * errors.file:
            return [_finding(quantized, clipping, name, errors, calibrated.get(name), calibration)]
    return []


def _exceeds_far(ranges: Sequence[ClippedRange]) -> bool:
    """Whether values exceed many ranges far, or one very far, beyond chance."""
    beyond = [each.overshoot for each in ranges if not each.is_chance]
    far = [each for each in beyond if each >= FAR]
    many = len(ranges) >= _LEAST_RANGES and len(far) >= max(2, _MANY * len(ranges))
    return many or max(beyond, default=0.0) >= _VERY_FAR


def _output_sqnr(quantized: QuantizedModel, runner: SampleRunner) -> dict[str, float]:
    """Return the least SQNR of each output over the kept calibration samples."""
    least: dict[str, float] = {}
    for sample in quantized.calibration_samples:
        reference, file = runner.both(sample)
        for name, errors in _errors(quantized, reference, file, file).items():
            least[name] = min(least.get(name, np.inf), sqnr_db(errors.signal, errors.file))
    return least


def _with_clamped(
    quantized: QuantizedModel,
    runner: SampleRunner,
    localizer: Localizer,
    ranges: Sequence[ClippedRange],
    samples: Iterable[Sample],
) -> dict[str, _Errors]:
    """Return the errors of the file and of the clamped form, by output."""
    form = localizer.form
    limits: dict[int, tuple[float, float]] = {}
    for each in ranges:
        partner = localizer.pairs.partner(each.tensor)
        if partner is not None:
            low, high = limits.get(partner, (-np.inf, np.inf))
            limits[partner] = max(low, each.reach[0]), min(high, each.reach[1])
    content = write_clamped(form.graph, form.signature.subgraph, limits)
    clamped = EdgeFile(content, runtimes=form.runtimes).at(form.key)
    wanted = [io_tensor.name for io_tensor in quantized.edge.signature.outputs]
    names = [io_tensor.name for io_tensor in clamped.signature.outputs]
    found: dict[str, _Errors] = {}
    for sample in samples:
        reference, file = runner.both(sample)
        made = clamped.decode(clamped.run(quantized.input_names, sample.arrays(), "builtin"))
        cut = in_file_order(list(zip(names, made, strict=True)), wanted, quantized.name)
        for name, errors in _errors(quantized, reference, file, cut).items():
            found[name] = _Errors(*np.add(errors, found.get(name, 0.0)))
    return found


def _errors(
    quantized: QuantizedModel, reference: Arrays, file: Arrays, clamped: Arrays
) -> dict[str, _Errors]:
    """Return the errors of one sample."""
    found = {}
    io_tensors = quantized.edge.signature.outputs
    for io_tensor, *values in zip(io_tensors, reference, file, clamped, strict=True):
        wanted, got, cut = (value.astype(np.float64).reshape(-1) for value in values)
        if wanted.size == got.size == cut.size:
            parts = wanted, got - wanted, cut - wanted, got - cut
            found[io_tensor.name] = _Errors(*(float(np.square(each).sum()) for each in parts))
    return found


def _finding(
    quantized: QuantizedModel,
    ranges: Sequence[ClippedRange],
    output: str,
    errors: _Errors,
    calibrated: float | None,
    calibration: Calibration,
) -> Finding:
    worst = min(ranges, key=lambda each: each.sqnr_db)
    shown = ", ".join(map(str, worst.samples[:4])) + (", …" if len(worst.samples) > 4 else "")
    others = f" and {len(ranges) - 1} more" if len(ranges) > 1 else ""
    file, clamped = (sqnr_db(errors.signal, each) for each in (errors.file, errors.clamped))
    causes = [
        f"clipping causes most of the loss of output {output!r}: with this range{others} the float "
        f"model has {clamped:.1f} dB SQNR on the worst samples, the file {file:.1f} dB"
    ]
    if calibrated is not None:
        causes.append(f"on calibration samples the file has {calibrated:.1f} dB or more")
    why = calibration.too_narrow()
    lost = (clamped if calibrated is None else calibrated) - file
    return Finding(
        kind=CLIPPED_ACTIVATION,
        place=entry_of(quantized.graph, worst.op, quantized.edge.modules).place,
        expected="values within the range of its codes, [{:.3g}, {:.3g}]".format(*worst.reach),
        got=(
            f"{100 * worst.share:.3g} % outside, as far as [{worst.observed[0]:.3g}, "
            f"{worst.observed[1]:.3g}] (sample{'s' if len(worst.samples) > 1 else ''} {shown})"
        ),
        harm=Harm.decibels(lost),
        causes=(*causes, *why.causes),
        fix=why.fix,
    )
