"""
Compare the outputs of the float form with torch's at float32 precision.

If they differ, tensors of the float form that equal a torch tensor bound the wrong region.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pytest_edgeq.compare.foreign import keras_output_names
from pytest_edgeq.compare.measurement import Arrays
from pytest_edgeq.compare.reference import call_reference, in_file_order, torch_module
from pytest_edgeq.localize.constant_rounding import DRAWS, FEW_DRAWS, ConstantRounding
from pytest_edgeq.localize.execution import kept_outputs, output_tensors
from pytest_edgeq.localize.float_forms import Forms, axis_orders
from pytest_edgeq.localize.measured import Codes, code_limits, difference
from pytest_edgeq.localize.measured import peak as peak_of
from pytest_edgeq.localize.repairs import misordered_op, repaired_op
from pytest_edgeq.localize.structure import paired
from pytest_edgeq.runtimes.bounds import float_bound
from pytest_edgeq.runtimes.bounds.site import ULP
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.runtimes.runner import Runner
from pytest_edgeq.tflite.boundary import decode
from pytest_edgeq.tflite.ends import quantized_output
from pytest_edgeq.tflite.ops import BOUNDED, MOVING, facts_of
from pytest_edgeq.tflite.roles import roles_of
from pytest_edgeq.tflite.subgraph import Op, Subgraph

if TYPE_CHECKING:
    from pytest_edgeq.compare.quantized import QuantizedModel
    from pytest_edgeq.compare.samples import Sample

Array = npt.NDArray[Any]

_TorchOutputs = list[tuple[Array, Array | None]]
"""Outputs of torch in float32, and in float64 if it was run in float64."""

# Allowed distance from float64 as a multiple of torch float32's own.
# Over 45 small models it is 0.6 to 6: sums in another order, and approximate exponentials.
_TIMES = 16.0

# Relative distance from float32 beyond which float64 is no reference: 60 dB.
# RAFT, whose iterations accumulate, has 110 dB. Beyond, the forward differs in float64.
_MOST_NOISE = 2.0**-10

_ULPS = 16.0  # minimum tolerance, in units in the last place of the greatest value

_TIMES_ROUNDED = 2.0
"""Tolerance of references that quantize by themselves, as a multiple of the file's error."""

_KEPT = 8  # maximum number of unexplained samples that are kept to be judged together

_TINY = float(np.finfo(np.float64).tiny)

# Maximum number of ops between an unmatched constant and the difference it causes.
# A layer, a product and a sum, which the converter folds in one file and not in the other.
_IN_A_ROW = 3

_EQUAL = 2.0**-15  # greatest difference of two equal tensors, relative to the greatest value


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first output of the float form that differs from torch."""

    output: str  # name of the output in the file
    sqnr_db: float  # of the float form to torch there
    op: Op | None = None  # first that differs on torch's own values; None if torch has no graph
    how: str = ", although the operands of this op equal torch's"
    is_negated: bool = False  # whether the op returns −1 × torch's values
    is_reordered: bool = False  # whether the output has torch's values in another order


class _OutputDistance(NamedTuple):
    """Sums over an output's elements on one sample or several."""

    noise: float  # of the squared differences; infinite if the outputs cannot be compared
    signal: float  # of torch's squares
    allowed: float  # of the squared differences that float32 explains

    @property
    def is_explained(self) -> bool:
        """Whether the distance is within the float32 tolerance."""
        return self.noise <= self.allowed


class Tolerance:
    """Tolerance of a float form's outputs to torch's at float32 precision."""

    def __init__(
        self, outputs: Sequence[str], n_ops: int, noise: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        self._outputs, self._n_ops = list(outputs), n_ops
        self.noise = dict(noise)

    def compare(self, expected: _TorchOutputs, made: Sequence[Array]) -> Divergence | None:
        """Return the first output that exceeds the float32 tolerance to torch."""
        for output, ours, (theirs, precise) in zip(self._outputs, made, expected, strict=True):
            distance = self.distance(output, ours, theirs, precise)
            if not distance.is_explained:
                return self.divergence(output, distance, [(ours, theirs)])
        return None

    def divergence(
        self, output: str, distance: _OutputDistance, pairs: Sequence[tuple[Array, Array]]
    ) -> Divergence:
        """Describe the difference of an output; `pairs` are its values and torch's by sample."""
        same = all(
            self.distance(
                output, np.sort(ours, axis=None), np.sort(theirs, axis=None), None
            ).is_explained
            for ours, theirs in pairs
        )
        decibels = -math.inf
        if distance.signal and math.isfinite(distance.noise):
            decibels = 10 * math.log10(distance.signal / distance.noise)
        return Divergence(output, decibels, is_reordered=same)

    def distance(
        self,
        output: str,
        ours: Array,
        theirs: Array,
        precise: Array | None,
        *,
        peak: float = 0.0,
        rounding: float = 0.0,
    ) -> _OutputDistance:
        """Measure the distance of an output from torch's."""
        if theirs.dtype.kind != "f":
            return _OutputDistance(0.0, 0.0, 0.0)
        incomparable = _OutputDistance(math.inf, 0.0, 0.0)
        if ours.size != theirs.size:
            return incomparable
        one, two = (each.astype(np.float64).reshape(-1) for each in (ours, theirs))
        three = two if precise is None else precise.astype(np.float64).reshape(-1)
        finite = np.isfinite(two)
        if not np.isfinite(three[finite]).all():
            # A mask of the least float64 may overflow although that of float32 does not.
            precise, three = None, two
        if not np.array_equal(one[~finite], two[~finite], equal_nan=True):
            return incomparable
        if not finite.any():
            return _OutputDistance(0.0, 0.0, 0.0)
        one, two, three = one[finite], two[finite], three[finite]
        size = _rms(three)
        noise = _rms(two - three) / size if size else 0.0
        if noise > _MOST_NOISE:
            three = two
        elif precise is not None:
            self.noise[output] = max(self.noise.get(output, 0.0), noise)
        peak = max(peak, float(np.abs(three).max()))
        # If the float32 error is unknown, each op may be as far off.
        ulps = _ULPS if output in self.noise else _ULPS * self._n_ops
        allowed = _TIMES * self.noise.get(output, 0.0) * _rms(three) + ulps * ULP * peak + rounding
        squares = float(np.square(one - three).sum())
        noise = squares if math.isfinite(squares) else math.inf
        return _OutputDistance(noise, float(np.square(three).sum()), one.size * allowed**2)


@dataclass(frozen=True, slots=True, eq=False)
class _PendingSample:
    """A sample that exceeds the float32 tolerance, to be judged together with others."""

    sample: Sample
    expected: _TorchOutputs
    made: Sequence[Array]
    roundings: Sequence[float]  # by output, absolute rounding error of the op that computes it


class OutputCheck:
    """Compares the outputs of a float form with torch's; `differs` is for workers."""

    def __init__(
        self,
        quantized: QuantizedModel,
        form: EdgeFile,
        reference: Callable[..., Any] | None,
        noise: Mapping[str, float] = MappingProxyType({}),
        *,
        is_kept: bool,
    ) -> None:
        self._quantized, self.form, self._reference = quantized, form, reference
        self._is_own = reference is quantized.float_model
        self.is_kept = is_kept
        self._wanted = [io_tensor.name for io_tensor in quantized.edge.signature.outputs]
        self.tolerance = Tolerance(self._wanted, len(form.subgraph.ops), noise)
        self.peaks: Sequence[float] = ()

    def differs(self, sample: Sample, known: Mapping[str, Arrays]) -> bool:
        """Whether the outputs of the form exceed the float32 tolerance to torch's."""
        values = self._torch_outputs(sample, known)
        self.peaks = [peak_of(each) for each in values]
        expected: _TorchOutputs = [(each, None) for each in values]
        if self._is_explained(expected, known):
            return False
        self._run(self.form, sample)
        return self.tolerance.compare(expected, self._outputs()) is not None

    def reference(self, sample: Sample) -> Arrays:
        """Return the reference's outputs in the order of the file."""
        assert self._reference is not None, "unreachable because callers check `is_done`"
        outputs = call_reference(self._reference, sample)
        aliases = keras_output_names(self._reference)
        return in_file_order(outputs, self._wanted, self._quantized.name, aliases)

    def _torch_outputs(self, sample: Sample, known: Mapping[str, Arrays]) -> Arrays:
        values = known.get("reference", known.get("float") if self._is_own else None)
        return self.reference(sample) if values is None else values

    def _is_explained(self, expected: _TorchOutputs, known: Mapping[str, Arrays]) -> bool:
        """Whether outputs of the form that are known already are within the tolerance."""
        made = known.get("form", known.get("float_tflite") if self.is_kept else None)
        return made is not None and self.tolerance.compare(expected, made) is None

    @property
    def _runner(self) -> Runner:
        return self.form.runner("builtin", keep=True)

    def _run(self, form: EdgeFile, sample: Sample) -> Runner:
        runner = form.runner("builtin", keep=True)
        runner.run(form.encode(list(self._quantized.input_names), sample.arrays()))
        return runner

    def _outputs(self) -> Sequence[Array]:
        """Return the outputs of the form's last run, in the order of the file."""
        return kept_outputs(self.form, self._runner, self._quantized.edge)


class AgainstTorch(OutputCheck):
    """Compares the outputs of the float form with torch's, sample by sample."""

    def __init__(self, quantized: QuantizedModel, forms: Forms, first: Sample) -> None:
        kept = quantized.float_edge
        is_kept = kept is not None and kept.graph is forms.checked.graph
        super().__init__(quantized, forms.checked, forms.reference, is_kept=is_kept)
        self._forms = forms
        self._pending: list[_PendingSample] = []
        self._furthest: tuple[float, _PendingSample] | None = None
        self.aligned: EdgeFile | None = None
        # Before interpreters are open: it needs twice the memory of the weights.
        self._first_in_float64 = self._run_in_float64(first)
        self.peaks = [0.0] * len(self._wanted)
        self.divergence: Divergence | None = None
        self.is_rounded = False

    def update(
        self,
        sample: Sample,
        known: Mapping[str, Arrays] = MappingProxyType({}),
        *,
        is_run: bool = False,
    ) -> None:
        """
        Compare one sample; samples behind the first difference are skipped.

        If tolerance or rounding of constants is unknown, differing samples are kept for `settle`.
        """
        if self.is_done:
            return
        expected = self._expected(sample, known)
        self.note([peak_of(each) for each, _ in expected])
        if self.aligned is not None:
            self._run(self.form, sample)
        elif not is_run:
            if self._is_explained(expected, known):
                return
            self._run(self.form, sample)
        divergence = self.tolerance.compare(expected, self._outputs())
        if divergence is not None and expected[0][1] is None:
            precise = self._run_in_float64(sample)
            if precise is not None:
                expected = [(one, two) for (one, _), two in zip(expected, precise, strict=True)]
                divergence = self.tolerance.compare(expected, self._outputs())
        is_bounded = self._forms.perturbed is None and expected[0][1] is not None
        if self.aligned is None and not is_bounded:
            # One sample alone proves nothing. A stateful form must run all samples in order.
            if divergence is not None or self.form.graph.is_stateful:
                self._keep_pending(sample, expected, is_explained=divergence is None)
        elif divergence is not None and not self._is_explained_by_constants([(sample, expected)]):
            self.divergence = self._locate(sample, expected, divergence)

    def note(self, peaks: Sequence[float]) -> None:
        """Update the greatest magnitudes of torch's outputs."""
        self.peaks = [max(pair) for pair in zip(self.peaks, peaks, strict=True)]

    def settle(self) -> None:
        """Judge the pending samples; `divergence` and `aligned` are final afterwards."""
        furthest, self._furthest = self._furthest, None
        samples, self._pending = self._pending + ([] if furthest is None else [furthest[1]]), []
        if not samples:
            return
        samples = self._within_rounding(samples)
        pairs, nearest = [(e.sample, e.expected) for e in samples], self._forms.is_nearest
        if nearest and self._is_explained_by_constants(pairs):
            return
        found = self._first_unexplained(samples)
        if found is None or (not nearest and self._is_explained_by_constants(pairs)):
            return
        place, divergence = found
        self.form = self.form.clone()
        first = 0 if self.form.graph.is_stateful else place
        for each in samples[first : place + 1]:
            self._run(self.form, each.sample)
        self.divergence = self._locate(*pairs[place], divergence)

    def _within_rounding(self, samples: list[_PendingSample]) -> list[_PendingSample]:
        """
        Widen the tolerance to the file's own error for a quantizing reference.

        A reference does so if all its values for the file's quantized outputs are their codes.
        """
        graph, signature = self._quantized.graph, self._quantized.edge.signature
        tensors = [quantized_output(graph, signature, io_tensor) for io_tensor in signature.outputs]
        coded = [
            _is_quantized(value, limits)
            for each in samples
            for tensor, (value, _) in zip(tensors, each.expected, strict=True)
            if (limits := code_limits(tensor)) is not None and value.dtype.kind == "f"
        ]
        self.is_rounded = bool(coded) and all(coded)
        if not self.is_rounded:
            return samples
        edge, names = self._quantized.edge.clone(), list(self._quantized.input_names)
        allowed = []
        for each in samples:
            codes = edge.run(names, each.sample.arrays(), "builtin")
            roundings = [
                known + _TIMES_ROUNDED * _rms(made - decode(code, io_tensor).astype("f8"))
                for known, made, code, io_tensor in zip(
                    each.roundings, each.made, codes, signature.outputs, strict=True
                )
            ]
            allowed.append(dataclasses.replace(each, roundings=roundings))
        return allowed

    def _keep_pending(self, sample: Sample, expected: _TorchOutputs, *, is_explained: bool) -> None:
        """Keep a sample for `settle`: the first few, and the furthest of the others."""
        made = [each.copy() for each in self._outputs()]
        outputs = output_tensors(self.form, self._quantized.edge)
        rounding = [self._rounding_of_last_op(index) for index in outputs]
        new = _PendingSample(sample.clone(), expected, made, rounding)
        if len(self._pending) < _KEPT:
            self._pending.append(new)
        elif not is_explained and not self.form.graph.is_stateful:
            distances = self._distances(new)
            off = max(each.noise / max(each.allowed, _TINY) for each in distances)
            if self._furthest is None or off > self._furthest[0]:
                self._furthest = off, new

    def _distances(self, each: _PendingSample) -> list[_OutputDistance]:
        """Return the distance of a sample from torch, by output."""
        items = zip(self._wanted, each.made, each.expected, self.peaks, each.roundings, strict=True)
        return [
            self.tolerance.distance(name, made, *expected, peak=peak, rounding=rounding)
            for name, made, expected, peak, rounding in items
        ]

    def _first_unexplained(
        self, samples: Sequence[_PendingSample]
    ) -> tuple[int, Divergence] | None:
        """Return the first difference, of one sample or all, that no rounding explains."""
        by_sample = [self._distances(each) for each in samples]
        groups = [[place] for place in range(len(samples))]
        groups += [list(range(len(samples)))] if len(samples) > 1 else []
        pooled = [
            (output, group, _OutputDistance(*np.sum([by_sample[i][output] for i in group], axis=0)))
            for output in range(len(self._wanted))
            for group in groups
        ]
        tests = [each for each in pooled if not each[2].is_explained]
        if not tests:
            return None
        moves = None
        if self._forms.perturbed is not None and all(math.isfinite(d.noise) for *_, d in tests):
            moves = self._measure_moves(samples, tests)
        for output, group, distance in tests:
            if moves is not None and _is_within(moves, output, group, distance):
                continue
            name = self._wanted[output]
            pairs = [(samples[i].made[output], samples[i].expected[output][0]) for i in group]
            worst = max(group, key=lambda i: by_sample[i][output].noise)
            return worst, self.tolerance.divergence(name, distance, pairs)
        return None

    def _measure_moves(
        self,
        samples: Sequence[_PendingSample],
        tests: Sequence[tuple[int, list[int], _OutputDistance]],
    ) -> ConstantRounding:
        """Run the samples with constants that are drawn within half a step."""
        assert self._forms.perturbed is not None, "the caller has checked it"
        moves, names = ConstantRounding(), list(self._quantized.input_names)
        for seed in range(DRAWS):
            file = self._forms.perturbed(seed)
            for place, each in enumerate(samples):
                outputs = file.run(names, each.sample.arrays(), "builtin")
                named = zip((b.name for b in file.signature.outputs), outputs, strict=True)
                moved = in_file_order(list(named), self._wanted, self._quantized.name)
                for output, (one, two) in enumerate(zip(moved, each.made, strict=True)):
                    finite = np.isfinite(each.expected[output][0].reshape(-1))
                    if two.dtype.kind == "f":
                        moves.add(output, place, (one - two).reshape(-1)[finite])
            if seed + 1 == FEW_DRAWS and all(_is_within(moves, *test) for test in tests):
                break
        return moves

    def _rounding_of_last_op(self, index: int) -> float:
        """
        Return the absolute rounding error of the op that computes a tensor.

        A difference near 0 is as exact as its operands, a probability as 1. The error of a sum of
        products is bounded by the output's magnitude over all samples instead.
        """
        graph = self.form.graph
        op = self.form.subgraph.producer.get(index)
        if op is None:
            return 0.0
        if op.name in MOVING or facts_of(op.name).keeps_error:
            return max(map(self._rounding_of_last_op, op.inputs), default=0.0)
        if roles_of(graph, op).weights:
            return 0.0
        operands = (self._runner.tensor(i) for i in op.inputs if i >= 0)
        size = 1.0 if op.name in BOUNDED else max(map(peak_of, operands), default=0.0)
        return float_bound(graph, op) * size

    @property
    def is_done(self) -> bool:
        """Whether no further sample is compared: the form differs, or there is no reference."""
        return self.divergence is not None or self._reference is None

    @property
    def other_reference(self) -> Callable[..., Any] | None:
        """The reference of the form if it is not the model's own."""
        return None if self._is_own else self._reference

    def _is_explained_by_constants(self, samples: Sequence[tuple[Sample, _TorchOutputs]]) -> bool:
        """Whether the form equals torch once torch's constants replace its own."""
        if self.aligned is not None or self._forms.aligned is None:
            return False
        aligned = self._forms.aligned()
        if any(self._run_if_right(aligned, *each) is None for each in samples):
            return False
        self.form, self.aligned, self.is_kept = aligned, aligned, False
        return True

    def _expected(self, sample: Sample, known: Mapping[str, Arrays]) -> _TorchOutputs:
        """Return torch's outputs; for the first sample in float64 as well."""
        values = self._torch_outputs(sample, known)
        exact, self._first_in_float64 = self._first_in_float64, None
        none: Sequence[Array | None] = [None] * len(values)
        return list(zip(values, none if exact is None else exact, strict=True))

    def _run_in_float64(self, sample: Sample) -> Sequence[Array] | None:
        """Return the outputs of the reference in float64; None if it fails."""
        if torch_module(self._reference) is None:
            return None
        from pytest_edgeq.compare.torch_graphs import run_in_float64

        outputs = run_in_float64(self._reference, sample)
        if outputs is None:
            return None
        return in_file_order(outputs, self._wanted, self._quantized.name)

    def _locate(
        self, sample: Sample, expected: _TorchOutputs, divergence: Divergence
    ) -> Divergence:
        """Add the first op of the form that differs although its inputs equal torch's."""
        other = self._forms.converted
        as_converted = None if other is None else self._run_if_right(other, sample, expected)

        def is_right(form: EdgeFile) -> bool:
            return self._run_if_right(form, sample, expected) is not None

        repaired = None if as_converted is None else self._repaired(is_right)
        if repaired is not None:
            how = "; replacing this op by the reference's converted op fixes it"
            return dataclasses.replace(divergence, op=repaired, how=how)
        if torch_module(self._reference) is None:
            return divergence
        from pytest_edgeq.compare.torch_graphs import recorded

        known = recorded(self._reference, sample)
        if known is None:
            return divergence
        if as_converted is not None and other is not None:
            # Torch's graph lacks some of these.
            values = map(as_converted.tensor, _made(other.subgraph))
            known += [each.astype(np.float64) for each in values if each.dtype.kind == "f"]
        same = self._same_as_partners(as_converted)
        subgraph = self.form.subgraph
        tensor = self._runner.tensor
        equal = {i for i in _made(subgraph) if _is_among(tensor(i), known)} | {*subgraph.inputs}
        outputs = output_tensors(self.form, self._quantized.edge)
        last = outputs[self._wanted.index(divergence.output)]
        region = _backward_slice(subgraph, last, equal)
        unmatched = self._first_unlike_reference(
            subgraph, last, region, equal, is_known=as_converted is not None
        )
        first = _first_unlike_partner(subgraph, last, equal, same)
        found = unmatched or first or _first_that_differs(subgraph, region, equal)
        if found is None:
            return divergence
        op = found
        if unmatched is None:
            op = _wrong_mover(subgraph, op, same) or op
        made = tensor(op.outputs[0])
        negated = made.dtype.kind == "f" and _is_among(-made, known)
        if unmatched is None and op is found and not negated:
            misordered = misordered_op(self.form, op, is_right)
            if misordered is not None:
                how = "; reordering the axes of this op's result fixes it"
                return dataclasses.replace(divergence, op=misordered, how=how)
        return dataclasses.replace(divergence, op=op, is_negated=negated)

    def _repaired(self, is_right: Callable[[EdgeFile], bool]) -> Op | None:
        """Return the op whose replacement by its converted partner fixes the form."""
        converted, aligned = self._forms.converted, self._forms.aligned
        assert converted is not None, "the caller has run it"
        found = repaired_op(self.form, converted, is_right)
        if found is None and aligned is not None:
            # Sound constants may be folded differently than in the other file.
            found = repaired_op(aligned(), converted, is_right)
        return found

    def _first_unlike_reference(
        self, subgraph: Subgraph, last: int, region: set[int], equal: set[int], *, is_known: bool
    ) -> Op | None:
        """Return the first op with another name or other constants than the reference's."""
        substituted, unmatched = self._forms.substituted, self._forms.unmatched
        for numbers, outputs in (
            (region, substituted | unmatched),
            (
                _backward_slice(subgraph, last, set()),
                substituted if is_known else substituted | unmatched,
            ),
        ):
            for number in sorted(numbers):
                op = subgraph.ops[number]
                place = next((index for index in op.outputs if index in outputs), None)
                near = place is not None and (
                    not is_known
                    or place in substituted
                    or len(_backward_slice(subgraph, place, equal)) <= _IN_A_ROW
                )
                if near:
                    return op
        return None

    def _run_if_right(
        self, form: EdgeFile, sample: Sample, expected: _TorchOutputs
    ) -> Runner | None:
        """Run a float file; return None if its outputs differ from torch's."""
        runner = self._run(form, sample)
        made = kept_outputs(form, runner, self._quantized.edge)
        return runner if self.tolerance.compare(expected, made) is None else None

    def _same_as_partners(self, converted: Runner | None) -> dict[int, bool]:
        """Return by tensor whether it has its partner's values in the reference's float file."""
        form = self._forms.converted
        subgraph = self.form.subgraph
        same: dict[int, bool] = dict.fromkeys(subgraph.inputs, True)
        if form is None or converted is None:
            return same
        for number, partner in paired(self.form, form).ops.items():
            op = subgraph.ops[number]
            if partner.name != op.name:
                continue
            # A SPLIT and its partner may have different numbers of outputs.
            for here, there in zip(op.outputs, partner.outputs, strict=False):
                made, wanted = self._runner.tensor(here), converted.tensor(there)
                if made.shape == wanted.shape:
                    same[here] = not _is_moved(made, wanted)
        return same


def _made(subgraph: Subgraph) -> Iterator[int]:
    """Yield the tensors that ops compute."""
    return (index for op in subgraph.ops for index in op.outputs if index >= 0)


def _first_unlike_partner(
    subgraph: Subgraph, last: int, equal: set[int], same: Mapping[int, bool]
) -> Op | None:
    """
    Return the first op that differs from its partner in the reference's float file.

    A tensor may equal another one of torch's, or a permutation of it.
    """
    known = {i for i in equal if same.get(i, True)} | {i for i in same if same[i]}
    first = _first_that_differs(subgraph, _backward_slice(subgraph, last, known), known)
    return first if first is not None and not same.get(first.outputs[0], True) else None


def _wrong_mover(subgraph: Subgraph, op: Op, same: Mapping[int, bool]) -> Op | None:
    """
    Return the RESHAPE or TRANSPOSE in front of an op that moves other values than its partner.

    Its values still equal a torch tensor or a permutation of it, so its consumer differs first.
    """
    wrong = None
    for index in op.inputs:
        maker = subgraph.producer.get(index)
        while maker is not None and maker.name in ("RESHAPE", "TRANSPOSE"):
            wrong = maker if not same.get(maker.outputs[0], True) else wrong
            maker = subgraph.producer.get(maker.inputs[0])
    return wrong


def _first_that_differs(subgraph: Subgraph, region: set[int], equal: set[int]) -> Op | None:
    """Return the first op of a region whose inputs are all equal to torch's."""
    for op in subgraph.ops:
        live = (i for i in op.inputs if i >= 0 and not subgraph.tensors[i].is_constant)
        if op.index in region and all(i in equal or i not in subgraph.producer for i in live):
            return op
    return None


def _is_moved(made: Array, wanted: Array) -> bool:
    """Whether two tensors of one shape differ."""
    if wanted.dtype.kind != "f":
        return not np.array_equal(made, wanted)
    return not bool((difference(made, wanted) <= _EQUAL * peak_of(wanted)).all())


def _is_within(
    moves: ConstantRounding, output: int, group: Sequence[int], distance: _OutputDistance
) -> bool:
    """Whether float32 and the rounding of constants explain a distance."""
    limit = math.sqrt(distance.allowed) + math.sqrt(moves.limit(output, group))
    return math.sqrt(distance.noise) <= limit


def _is_quantized(values: Array, limits: Codes) -> bool:
    """Whether floats are dequantized codes, up to float32 rounding."""
    values = values[np.isfinite(values)].astype(np.float64)
    steps = np.rint(values / limits.scale)
    low, high = limits.low - limits.zero_point, limits.high - limits.zero_point
    near = np.abs(values - steps * limits.scale) <= ULP * np.abs(values)
    return bool((near & (steps >= low) & (steps <= high)).all())


def _rms(values: Array) -> float:
    """Return the root mean square of finite values."""
    finite = values[np.isfinite(values)]
    return float(np.sqrt(np.square(finite).mean())) if finite.size else 0.0


def _backward_slice(subgraph: Subgraph, last: int, equal: set[int]) -> set[int]:
    """Return the ops on the paths from torch-equal tensors to a tensor."""
    found: set[int] = set()
    left = [last]
    while left:
        op = subgraph.producer.get(left.pop())
        if op is None or op.index in found:
            continue
        found.add(op.index)
        left += [i for i in op.inputs if i >= 0 and i not in equal]
    return found


def _is_among(made: Array, values: Sequence[Array]) -> bool:
    """Whether one of these has a tensor's values, in any order of its axes."""
    if made.dtype.kind != "f" or not made.size:
        return True
    wanted = made.astype(np.float64).reshape(-1)
    near = _EQUAL * peak_of(wanted)
    return any(each.size == made.size and _same(each, wanted, near) for each in values)


def _same(value: Array, wanted: Array, near: float) -> bool:
    """Whether values are equal in some order of the axes."""
    sums = np.nansum(np.abs(value)), np.nansum(np.abs(wanted))
    if not abs(sums[0] - sums[1]) <= near * wanted.size:
        return False
    for order in axis_orders(value.shape):
        if (difference(value.transpose(order).reshape(-1), wanted) <= near).all():
            return True
    return False
