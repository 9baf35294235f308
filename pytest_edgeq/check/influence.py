"""Check that outputs follow each input by swapping it between two samples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pytest_edgeq.compare.measurement import Arrays, SampleOutputs, SampleRunner
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.localize.localizer import Localizer
from pytest_edgeq.localize.mistakes import BIT_DB, channels_text
from pytest_edgeq.localize.resolution import FEW_CODES, CoarseTensor, first_coarse
from pytest_edgeq.numerics.findings import LOST_INPUT, USELESS, Finding, Place, counted
from pytest_edgeq.numerics.metrics import sqnr_db
from pytest_edgeq.tflite.boundary import qparams
from pytest_edgeq.tflite.op_dtypes import entry_of

_SAMPLES = 4  # number of samples that are kept; each input is swapped in three pairs at most
# Power of a change over that of the output's own rounding from which it is judged: one bit.
_ABOVE_ROUNDING = 4.0
# Power of a change over that of the errors that come with the change by another input.
_ABOVE_NOISE = 10.0
_OUTLIER = "see whether one calibration sample is an outlier that widens the range"
_BITS = "or quantize activations to 16 bits"

_FIND_IT = (
    "leave the ops behind this input in float, one after the other, to find the one that loses it"
)

# Power of a change over that of the output below which float32 may have made it.
_FLOAT_NOISE = 1e-10


class _InputChange(NamedTuple):
    """Sums over the change of one output when one input is swapped."""

    power: float  # of the reference's change
    noise: float  # of the difference of the two changes
    signal: float  # of the reference's output
    rounding: float  # share of `noise` by rounding of the output itself

    @property
    def sqnr_db(self) -> float:
        """SQNR of the change in dB; NaN without any."""
        return sqnr_db(self.power, self.noise)

    @property
    def is_visible(self) -> bool:
        """Whether the change exceeds the output's own rounding, and float32's."""
        floor = max(_ABOVE_ROUNDING * self.rounding, _FLOAT_NOISE * self.signal)
        return self.power > floor

    @property
    def is_lost(self) -> bool:
        """Whether less than a bit of a visible change is left."""
        return self.is_visible and not self.sqnr_db >= BIT_DB


class _Swapped(NamedTuple):
    """Changes of outputs by swapping one input, and the swapped pairs of samples."""

    changes: dict[str, _InputChange]
    pairs: list[tuple[Sample, Sample]]


class Influence:
    """
    Measures how much of the changes of each input reaches the outputs.

    For two samples a and b, input i of a is replaced by that of b. The change of the output in the
    file, q(a′) − q(a), is compared with that in the reference, r(a′) − r(a): errors of the file
    that do not depend on input i cancel. A change of which less than one bit (6.02 dB SQNR) is left
    is lost if rounding of the output does not explain it, and

    - a tensor between input and output has too few codes for it (`resolution.first_coarse`), or
    - its power is 10 × the errors that swapping any other input causes. All ops behind the inputs
      round anew in both swaps, so a sound file has no more noise in the change by i than in a
      larger one by j: noise(i) ≤ noise(j) < power(i) / 10 leaves 10 dB.

    Pairs that cannot be compared are skipped. The first pair that keeps a bit ends the measurement
    of an input.
    """

    def __init__(self, quantized: QuantizedModel, runtime: str) -> None:
        self._quantized = quantized
        self._runner = SampleRunner(quantized, runtime)
        self._kept: list[tuple[Sample, Arrays, Arrays]] = []
        self._is_needed = len(quantized.input_names) > 1 and not quantized.edge.graph.is_stateful

    def note(self, sample: Sample, outcome: SampleOutputs) -> None:
        """Keep one of the first samples with its outputs."""
        if self._is_needed and len(self._kept) < _SAMPLES:
            values = outcome.values
            self._kept.append((sample.clone(), values["float"], values["edge"]))

    def findings(self, localizer: Localizer | None) -> list[Finding]:
        """Return a finding for each input that is lost."""
        swapped = [self._swap(place) for place in range(len(self._quantized.input_names))]
        lost = (self._lost(place, swapped, localizer) for place in range(len(swapped)))
        return [each for each in lost if each is not None]

    def _swap(self, place: int) -> _Swapped:
        """Swap one input between neighbours until a pair shows that it counts."""
        found = _Swapped({}, [])
        for (base, *outputs), (other, *_) in pairwise(self._kept):
            mixed = _mixed(base, other, place)
            changes = None if mixed is None else self._changes(outputs, mixed)
            if mixed is None or changes is None:
                continue
            found.pairs.append((base, mixed))
            for name, change in changes.items():
                found.changes[name] = _InputChange(*np.add(change, found.changes.get(name, 0.0)))
            visible = [each for each in found.changes.values() if each.is_visible]
            if visible and not any(each.is_lost for each in visible):
                break
        return found

    def _changes(self, before: Sequence[Arrays], mixed: Sample) -> dict[str, _InputChange] | None:
        """Return the changes by output; None if they cannot be compared."""
        try:
            after = self._runner.both(mixed)
        except Exception:  # the user's reference may refuse mixed inputs
            return None
        found = {}
        io_tensors = self._quantized.edge.signature.outputs
        for io_tensor, *values in zip(io_tensors, *before, *after, strict=True):
            if len({value.shape for value in values}) > 1:
                return None
            if values[0].dtype.kind != "f":
                continue
            real, file, real_after, file_after = (value.astype(np.float64) for value in values)
            wanted, got = real_after - real, file_after - file
            if not (np.isfinite(wanted).all() and np.isfinite(got).all()):
                return None
            parameters = qparams(io_tensor.tensor)
            step = 0.0 if parameters is None else parameters[0]
            power, noise, signal = (
                float(np.square(each).sum()) for each in (wanted, got - wanted, real)
            )
            found[io_tensor.name] = _InputChange(
                power, noise, signal, 2 * wanted.size * step**2 / 12
            )
        return found

    def _lost(
        self, place: int, swapped: Sequence[_Swapped], localizer: Localizer | None
    ) -> Finding | None:
        """Return the finding on the output that loses an input's changes, if any."""
        own = swapped[place]
        lost = {name: each for name, each in own.changes.items() if each.is_lost}
        for name, change in sorted(lost.items(), key=lambda item: item[1].sqnr_db):
            coarse = None if localizer is None else self._coarse(place, name, own.pairs, localizer)
            if coarse is None and not self._is_above_others(name, place, swapped):
                continue
            count = f"{len(own.pairs)} pairs" if len(own.pairs) > 1 else "a pair"
            share = sqnr_db(change.power, change.signal)
            return Finding(
                kind=LOST_INPUT,
                place=Place("input", self._quantized.input_names[place]),
                expected=f"{BIT_DB:.3g} dB SQNR or more of the change that it causes in output "
                f"{name!r}",
                got=f"{change.sqnr_db:.1f} dB where it was swapped between {count} of samples (the "
                f"change is {share:.1f} dB relative to the output: the smaller it is, the less its "
                "loss shows in the output's SQNR)",
                harm=USELESS,
                causes=() if coarse is None else (self._cause(coarse),),
                fix=_FIND_IT if coarse is None else _fix(coarse),
            )
        return None

    def _cause(self, coarse: CoarseTensor) -> str:
        if coarse.op is None:
            where = "its own codes"
        else:
            edge = self._quantized.edge
            maker = entry_of(edge.graph, edge.subgraph.ops[coarse.op], edge.modules)
            where = f"the output of {maker.where}"
        low, high = coarse.reach
        reach = f"its range [{low:.3g}, {high:.3g}]"
        why = "; ".join((f"{reach} is too wide for them", *coarse.widened.causes))
        if coarse.wide:
            why = f"{channels_text(coarse.wide)} fill{'s' * (len(coarse.wide) == 1)} {reach}"
        return (
            f"in {where} rounding removes the change from {coarse.coarse} of {coarse.channels} "
            f"channels: each of them uses {FEW_CODES} codes at most, in the median "
            f"{counted(coarse.codes, 'code')}, as {why}"
        )

    def _is_above_others(self, name: str, place: int, swapped: Sequence[_Swapped]) -> bool:
        """Whether a change exceeds the noise in a larger one by another input."""
        power = swapped[place].changes[name].power / len(swapped[place].pairs)
        noises = [
            other.changes[name].noise / len(other.pairs)
            for other in (*swapped[:place], *swapped[place + 1 :])
            if name in other.changes and other.changes[name].power / len(other.pairs) >= power
        ]
        return bool(noises) and power > _ABOVE_NOISE * max(noises)

    def _coarse(
        self, place: int, output: str, pairs: Sequence[tuple[Sample, Sample]], localizer: Localizer
    ) -> CoarseTensor | None:
        edge = self._quantized.edge
        names = self._quantized.input_names
        positions = edge.by_input_name(names, [np.array(i) for i in range(len(names))])
        start = next(
            each.tensor.index
            for each in edge.signature.inputs
            if int(positions[each.name]) == place
        )
        end = next(each.tensor.index for each in edge.signature.outputs if each.name == output)
        try:
            return first_coarse(localizer, start, end, pairs)
        except (RuntimeError, ValueError, TypeError):
            return None  # the kernels that keep tensors refuse the file


def _fix(coarse: CoarseTensor) -> str:
    """Return how to represent the coarse channels by more codes."""
    if coarse.wide:
        wide = channels_text(coarse.wide)
        return f"scale {wide} down in the model and the consumers up, {_BITS}"
    return f"{coarse.widened.fix or _OUTLIER}, {_BITS}"


def _mixed(base: Sample, other: Sample, place: int) -> Sample | None:
    """Return the first sample with one input of the second; None if useless."""
    own, theirs = base.arrays()[place], other.arrays()[place]
    if own.shape != theirs.shape or own.dtype != theirs.dtype or np.array_equal(own, theirs):
        return None
    values = np.concatenate([own.reshape(-1), theirs.reshape(-1)])
    has_two = ((values == values.min()) | (values == values.max())).all()
    if own.dtype.kind == "b" or (own.size > 2 and has_two):
        return None  # a mask
    tensors = list(base.tensors)
    tensors[place] = other.tensors[place]
    count = len(base.args)
    kwargs = dict(zip(base.kwargs, tensors[count:], strict=True))
    return Sample(tuple(tensors[:count]), kwargs)
