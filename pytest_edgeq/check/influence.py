"""Check that outputs follow each input by swapping it between two samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.compare.measurement import Arrays, SampleOutputs, SampleRunner
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.samples import Sample
from pytest_edgeq.localize.localizer import Localizer
from pytest_edgeq.localize.mistakes import BIT_DB
from pytest_edgeq.localize.resolution import FEW_CODES, CoarseTensor, first_coarse
from pytest_edgeq.numerics.findings import LOST_INPUT, USELESS, Finding, Place
from pytest_edgeq.numerics.metrics import sqnr_db
from pytest_edgeq.tflite.boundary import qparams
from pytest_edgeq.tflite.op_dtypes import entry_of

_SAMPLES = 4
"""Number of samples that are kept; each input is swapped in three pairs at most."""

_ABOVE_ROUNDING = 4.0
"""Power of a change over that of the output's own rounding from which it is judged: one bit."""

_ABOVE_NOISE = 10.0
"""Power of a change over that of the errors that come with the change by another input."""

_WAYS_OUT = (
    "scale these channels down in the model, and what reads them up, leave the op in float, or "
    "quantize activations to 16 bits"
)

_FIND_IT = (
    "leave the ops behind this input in float, one after the other, to find the one that loses it"
)

_FLOAT_NOISE = 1e-10
"""Power of a change over that of the output below which float32 may have made it."""


@dataclass(slots=True)
class _InputEffect:
    """Sums over the change of one output when one input is swapped."""

    power: float = 0.0  # of the reference's change
    noise: float = 0.0  # of the difference of the two changes
    signal: float = 0.0  # of the reference's output
    rounding: float = 0.0  # share of `noise` by rounding of the output itself

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


@dataclass(frozen=True, slots=True)
class _KeptOutputs:
    """A sample with its outputs."""

    sample: Sample
    reference: Arrays
    file: Arrays


@dataclass(slots=True, eq=False)
class _Swapped:
    """Changes of outputs by swapping one input, and the swapped pairs of samples."""

    changes: dict[str, _InputEffect] = field(default_factory=dict)
    pairs: list[tuple[Sample, Sample]] = field(default_factory=list)


class Influence:
    """
    Measures how much of the changes of each input reaches the outputs.

    For two samples a and b, input i of a is replaced by that of b. The change of the output in the
    file, q(a′) − q(a), is compared with that in the reference, r(a′) − r(a). Errors of the file
    that do not depend on input i cancel, so that a lost input shows even if other inputs make
    nearly all of the output. A change of which less than one bit (6.02 dB SQNR) is left is

    - not judged if its power is less than 4 × that of the output's own rounding, S²/12 on either
      side, or of float32's: a sound file loses such a change, too;
    - lost if, in addition, a tensor between input and output rounds it away in most channels, of
      which each uses 4 codes at most (`resolution.first_coarse`), or if its power is 10 × the
      errors that swapping any other input causes. All ops behind the inputs round anew in both
      swaps, so a sound file has no more noise in the change by i than in a larger one by j:
      noise(i) ≤ noise(j) < power(i) / 10 leaves 10 dB.

    Inputs are not swapped if the samples have other shapes or the same values, nor are masks:
    bools, and two values in more than two elements. A pair that the reference or the file refuses,
    or with a non-finite output, is skipped.

    The first pair that keeps a bit ends the measurement of an input: one additional run of
    reference and file for each input.
    """

    def __init__(self, quantized: QuantizedModel, runtime: str) -> None:
        self._quantized = quantized
        self._runner = SampleRunner(quantized, runtime)
        self._kept: list[_KeptOutputs] = []
        self._is_needed = len(quantized.input_names) > 1 and not quantized.edge.is_stateful

    def note(self, sample: Sample, outcome: SampleOutputs) -> None:
        """Keep one of the first samples with its outputs."""
        if self._is_needed and len(self._kept) < _SAMPLES:
            values = outcome.values
            self._kept.append(_KeptOutputs(sample.clone(), values["float"], values["edge"]))

    def findings(self, localizer: Localizer | None) -> list[Finding]:
        """Return a finding for each input that is lost."""
        swapped = {
            place: found
            for place in range(len(self._quantized.input_names) if len(self._kept) > 1 else 0)
            if (found := self._swap(place)).changes
        }
        lost = (self._lost(place, swapped, localizer) for place in swapped)
        return [each for each in lost if each is not None]

    def _swap(self, place: int) -> _Swapped:
        """Swap one input between neighbours until a pair shows that it counts."""
        found = _Swapped()
        for base, other in pairwise(self._kept):
            mixed = _mixed(base.sample, other.sample, place)
            changes = None if mixed is None else self._changes(base, mixed)
            if mixed is None or changes is None:
                continue
            found.pairs.append((base.sample, mixed))
            for name, change in changes.items():
                known = found.changes.setdefault(name, _InputEffect())
                known.power += change.power
                known.noise += change.noise
                known.signal += change.signal
                known.rounding += change.rounding
            visible = [each for each in found.changes.values() if each.is_visible]
            if visible and not any(each.is_lost for each in visible):
                break
        return found

    def _changes(self, base: _KeptOutputs, mixed: Sample) -> dict[str, _InputEffect] | None:
        """Return the changes by output; None if they cannot be compared."""
        quantized = self._quantized
        try:
            reference, file = self._runner.both(mixed)
        except Exception:  # the user's reference may refuse mixed inputs
            return None
        found = {}
        outputs = quantized.edge.signature.outputs
        for border, *values in zip(
            outputs, base.reference, reference, base.file, file, strict=True
        ):
            if len({value.shape for value in values}) > 1:
                return None
            if values[0].dtype.kind != "f":
                continue
            before, after, own_before, own_after = (value.astype(np.float64) for value in values)
            wanted, got = after - before, own_after - own_before
            if not (np.isfinite(wanted).all() and np.isfinite(got).all()):
                return None
            parameters = qparams(border.tensor)
            step = 0.0 if parameters is None else parameters[0]
            found[border.name] = _InputEffect(
                power=_power(wanted),
                noise=_power(got - wanted),
                signal=_power(before),
                rounding=2 * wanted.size * step**2 / 12,
            )
        return found

    def _lost(
        self, place: int, swapped: Mapping[int, _Swapped], localizer: Localizer | None
    ) -> Finding | None:
        """Return the finding on the output that loses an input's changes, if any."""
        own = swapped[place]
        lost = {name: each for name, each in own.changes.items() if each.is_lost}
        for name, change in sorted(lost.items(), key=lambda item: item[1].sqnr_db):
            coarse = None if localizer is None else self._coarse(place, name, own.pairs, localizer)
            if coarse is None and not self._is_above_others(name, place, swapped):
                continue
            return self._finding(place, name, change, len(own.pairs), coarse)
        return None

    def _finding(
        self, place: int, output: str, change: _InputEffect, pairs: int, coarse: CoarseTensor | None
    ) -> Finding:
        count = f"{pairs} pairs" if pairs > 1 else "a pair"
        share = sqnr_db(change.power, change.signal)
        return Finding(
            kind=LOST_INPUT,
            place=Place("input", self._quantized.input_names[place]),
            expected=(
                f"{BIT_DB:.3g} dB SQNR or more of what it changes in output {output!r}, which is "
                "one bit"
            ),
            got=(
                f"{change.sqnr_db:.1f} dB where it was swapped between {count} of samples (the "
                f"change has {share:.1f} dB of the output, whose own SQNR hides it)"
            ),
            harm=USELESS,
            causes=() if coarse is None else (self._cause(coarse),),
            fix=_FIND_IT if coarse is None else _WAYS_OUT,
        )

    def _cause(self, coarse: CoarseTensor) -> str:
        if coarse.op is None:
            where = "its own codes"
        else:
            edge = self._quantized.edge
            maker = edge.graph.subgraphs[edge.signature.subgraph].ops[coarse.op]
            where = f"the output of {entry_of(edge.graph, maker, edge.modules).where}"
        low, high = coarse.reach
        reach = f"its range [{low:.3g}, {high:.3g}]"
        if not coarse.wide:
            why = f"{reach} is too wide"
        else:
            shown = ", ".join(map(str, coarse.wide[:4])) + (", …" if len(coarse.wide) > 4 else "")
            one = len(coarse.wide) == 1
            why = f"channel{'' if one else 's'} {shown} take{'s' if one else ''} {reach}"
        codes = f"{coarse.codes} code{'' if coarse.codes == 1 else 's'}"
        return (
            f"in {where} {coarse.coarse} of {coarse.channels} channels round it away: each uses "
            f"{FEW_CODES} codes at most, in the median {codes}, as {why}"
        )

    def _is_above_others(self, name: str, place: int, swapped: Mapping[int, _Swapped]) -> bool:
        """Whether a change exceeds the noise in a larger one by another input."""
        own = swapped[place].changes[name]
        pairs = len(swapped[place].pairs)
        others = [
            (
                other.changes[name].power / len(other.pairs),
                other.changes[name].noise / len(other.pairs),
            )
            for at, other in swapped.items()
            if at != place and name in other.changes
        ]
        power = own.power / pairs
        noises = [noise for greater, noise in others if greater >= power]
        return bool(noises) and power > _ABOVE_NOISE * max(noises)

    def _coarse(
        self, place: int, output: str, pairs: Sequence[tuple[Sample, Sample]], localizer: Localizer
    ) -> CoarseTensor | None:
        edge = self._quantized.edge
        names = self._quantized.input_names
        at = {name: np.array(i) for i, name in enumerate(names)}
        borders = edge.by_input_name(names, [at[name] for name in names])
        start = next(
            each.tensor.index for each in edge.signature.inputs if int(borders[each.name]) == place
        )
        end = next(each.tensor.index for each in edge.signature.outputs if each.name == output)
        try:
            return first_coarse(localizer, start, end, pairs)
        except (RuntimeError, ValueError, TypeError):
            return None  # the kernels that keep tensors refuse the file


def _mixed(base: Sample, other: Sample, place: int) -> Sample | None:
    """Return the first sample with one input of the second; None if useless."""
    own, theirs = base.arrays()[place], other.arrays()[place]
    if own.shape != theirs.shape or own.dtype != theirs.dtype or np.array_equal(own, theirs):
        return None
    if _is_mask(own, theirs):
        return None
    tensors = list(base.tensors)
    tensors[place] = other.tensors[place]
    names = iter(base.kwargs)
    count = len(base.args)
    return Sample(tuple(tensors[:count]), {next(names): tensor for tensor in tensors[count:]})


def _is_mask(*arrays: npt.NDArray[Any]) -> bool:
    """Whether an input is a mask: bools, or only two values."""
    if arrays[0].dtype.kind == "b":
        return True
    values = np.concatenate([each.reshape(-1) for each in arrays])
    if arrays[0].size <= 2:
        return False
    return bool(((values == values.min()) | (values == values.max())).all())


def _power(values: npt.NDArray[np.float64]) -> float:
    return float(np.square(values).sum())
