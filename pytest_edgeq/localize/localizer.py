"""Measure the error of every op over all samples."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq import litert
from pytest_edgeq.compare.executors.worker import unpacked
from pytest_edgeq.compare.measurement import AVERAGING, Arrays, InputWatches
from pytest_edgeq.compare.parallel import MOST_WORKERS, begin, in_order, on_one_thread
from pytest_edgeq.compare.reference import graph_module, quantizes_by_itself, undisturbed
from pytest_edgeq.localize.against_torch import AgainstTorch
from pytest_edgeq.localize.cause import NEAREST, ROUNDED, blame
from pytest_edgeq.localize.consumers import (
    MASKING,
    Consumers,
    mask_finding,
    masking_ops,
    rule_findings,
)
from pytest_edgeq.localize.execution import Execution, OpOutput
from pytest_edgeq.localize.float_forms import forms_of
from pytest_edgeq.localize.measured import (
    Codes,
    TensorErrors,
    channel_maxima,
    channel_steps,
    code_limits,
    errors_of,
    peak,
)
from pytest_edgeq.localize.origin import left_in_float, origin_findings
from pytest_edgeq.localize.rows import Diagnostics, LayerError, LayerErrors
from pytest_edgeq.localize.source_lines import source_line
from pytest_edgeq.localize.structure import Structure, by_name
from pytest_edgeq.numerics.findings import NO_HARM, WRONG_QPARAMS, Finding, Harm
from pytest_edgeq.numerics.health import more_than_chance
from pytest_edgeq.numerics.static_health import UNKNOWN, Calibration, Reason, keeps_nothing
from pytest_edgeq.runtimes.bounds import float_bound, float_reach, rounding_bound
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.boundary import code_range
from pytest_edgeq.tflite.constants import read_constant
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.op_dtypes import OpDtypes
from pytest_edgeq.tflite.ops import COMPARING, HOLDING, KEEPING_SCALE, NARROWING, facts_of
from pytest_edgeq.tflite.roles import roles_of
from pytest_edgeq.tflite.subgraph import Op

if TYPE_CHECKING:
    from pytest_edgeq.compare.quantized import QuantizedModel
    from pytest_edgeq.compare.samples import Sample
    from pytest_edgeq.localize.on_workers import CheckedSample

_UNKNOWN = 0.5
"""Rounding bound beyond ½ LSB, in LSB, of an op without a kernel rule: one more rounding."""

_INT32_LIMITS = (np.iinfo(np.int32).min, np.iinfo(np.int32).max)
_HUGE = 2.0**126  # half of a power of two below float32's maximum: only masks exceed it


@dataclass(slots=True, eq=False)
class _Output:
    """One output of an op."""

    limits: Codes | None  # range and scale of its codes; None without a single scale
    channels: npt.NDArray[np.float32] | None
    bound: float | None  # kernel error beyond ½ LSB, relative for floats; None if unknown
    slack: float  # relative error of the float kernel, to the greatest value
    reach: float  # least value that `bound` of a float output is relative to
    peak_weight: float  # greatest weight of a kernel that quantizes its own input


@dataclass(frozen=True, slots=True, eq=False)
class OpSampleErrors:
    """Errors of all ops on one sample."""

    measured: Mapping[int, TensorErrors]  # by tensor
    masks: Mapping[int, Finding]
    form: Arrays  # outputs of the float form, in the order of the file
    refused: Mapping[int, str]  # as `Execution.refused`
    inputs: InputWatches


_Measurement = tuple[_Output, TensorErrors]


@dataclass(frozen=True, slots=True, eq=False)
class ClippedRange:
    """Range of an intermediate tensor, and how far the float values exceed it."""

    op: Op
    tensor: int
    reach: tuple[float, float]  # the least and the greatest value of the codes
    observed: tuple[float, float]  # the least and the greatest float value
    share: float  # share of its values beyond the range, 0 to 1
    sqnr_db: float  # of the op on its own inputs
    samples: Sequence[int]  # indices of the measured samples with values beyond, most values first
    is_clipped: bool  # whether values lie beyond, and rounding does not make most of the op's error
    is_chance: bool

    @property
    def overshoot(self) -> float:
        """How far values exceed the range, as a share of its width."""
        (low, high), (least, greatest) = self.reach, self.observed
        return max(greatest - high, low - least, 0.0) / (high - low) if high > low else 0.0


class Localizer:
    """
    Measures the errors of a file op by op.

    The float form (`form`), its ops' partners (`pairs`) and the comparison of its outputs
    (`against_torch`) are known after the first sample.
    """

    def __init__(self, quantized: QuantizedModel, runtime: str = "builtin") -> None:
        reference = quantized.float_model
        if reference is None:
            raise ValueError(
                f"{quantized.name}: localize needs a reference: load the file with "
                "edgeq.load(tflite, reference=module)"
            )
        self.quantized = quantized
        self._runtime = runtime
        # A clone, whose interpreters with all tensors go with this object.
        self._edge = quantized.edge.clone()
        self._runner = self._edge.runner(runtime, keep=True)
        self.subgraph = quantized.edge.subgraph
        self._masking = list(masking_ops(self.subgraph))
        self._masks: dict[int, Finding] = {}
        self._outputs: dict[int, _Output] = {}  # by tensor, as the two others
        self._measured: dict[int, TensorErrors] = {}
        self._refused: dict[int, str] = {}
        self._is_averaged = quantized.flow in AVERAGING
        self._inputs = InputWatches(quantized.edge, averaged=self._is_averaged)
        self._beyond: dict[int, dict[int, int]] = {}
        """By the index of a sample as well, how many values lie beyond the range."""
        self._count = 0
        self._calibration = UNKNOWN
        self._open = contextlib.ExitStack()
        self.notes: list[str] = []

    def _start(self, sample: Sample) -> None:
        """Prepare the float form, which may need a first sample."""
        self._first = sample
        forms = forms_of(self.quantized, sample)
        self.against_torch = AgainstTorch(self.quantized, forms, sample)
        self._is_one_form = forms.checked is forms.exact
        self._modules = forms.modules
        quantized = self.quantized
        if forms.reference is None and not quantized.is_float_file_reference:
            self._note_rounding()
        self.prepare(forms.exact)

    def _note_rounding(self) -> None:
        reference, known = self.quantized.float_model, "quantizes by itself"
        if reference is not None and not quantizes_by_itself(reference):
            known = "returns only values of the file's output codes"
        self.notes.append(
            f"{self.quantized.reference_name} {known}: its outputs were compared with "
            "the file's, and ops with their own form in float alone"
        )

    def prepare(self, form: EdgeFile) -> None:
        """Prepare to measure ops against a float form, without comparing it with torch."""
        edge = self._edge
        self.form = form
        self._structure = Structure(edge, form)
        self.pairs = self._structure.pairs
        self._execution = Execution(edge, form, self._structure, self._runner)
        self._lows = self._lowest()

    def __enter__(self) -> Localizer:  # noqa: PYI034 # Self came with Python 3.11
        reference = self.quantized.float_model
        assert reference is not None, "unreachable because every flow has a reference"
        self._open.enter_context(undisturbed(reference, self.quantized.name))
        return self

    def __exit__(self, *raised: object) -> None:
        self._open.close()

    def update(self, sample: Sample, known: Mapping[str, Arrays] = MappingProxyType({})) -> None:
        """Measure every op on one sample."""
        if not self._count:
            self._start(sample)
        self._count_sample(sample.arrays() in self.quantized.ledger)
        self._add(self.measure(sample))
        self.against_torch.update(sample, known, is_run=self._is_one_form)

    def update_all(self, samples: Iterator[Sample], threads: int) -> None:
        """Measure samples, in parallel if the results do not depend on it."""
        with on_one_thread():
            if not begin(samples, self.quantized, threads, self.update):
                return

            def measure(
                execution: Execution, sample: Sample
            ) -> tuple[Sample, OpSampleErrors, dict[str, Arrays]]:
                errors, known = self.measure(sample, execution), dict[str, Arrays]()
                if not self.against_torch.is_done:  # else outputs are not compared any more
                    known["reference"] = self.against_torch.reference(sample)
                    if self._is_one_form:
                        known["form"] = errors.form
                return sample, errors, known

            def worker() -> Execution:
                return self._execution.clone(self._runtime)

            copies = (sample.clone() for sample in samples)
            count = min(threads, MOST_WORKERS)
            for sample, errors, known in in_order(copies, worker, measure, count):
                self._count_sample(sample.arrays() in self.quantized.ledger)
                self._add(errors)
                self.against_torch.update(sample, known)

    def tensors(self, sample: Sample) -> Iterator[OpOutput]:
        """Yield the outputs of the ops on one sample, in order."""
        return self._execution.run(self.quantized.input_names, sample.arrays())

    def add_checked(self, checked: CheckedSample, *, is_chosen: bool = True) -> None:
        """Add the next sample, which a worker measured; errors of ops only if it is chosen."""
        if checked.failure is not None:
            raise unpacked(checked.failure)
        self._count_sample(checked.is_known)
        if is_chosen and checked.errors is not None:
            self._add(checked.errors)
        if checked.peaks:
            self.against_torch.note(checked.peaks)
        if checked.differing is not None:
            self.against_torch.update(checked.differing)

    def measure(self, sample: Sample, execution: Execution | None = None) -> OpSampleErrors:
        """Measure every op on one sample without adding the errors."""
        execution = self._execution if execution is None else execution
        found, masks = dict[int, TensorErrors](), dict[int, Finding]()
        for made in execution.run(list(self.quantized.input_names), sample.arrays()):
            output = self._output(made)
            self._check_mask(made, masks)
            found[made.tensor] = self._tensor_errors(output, made)
        edge = self.quantized.edge
        inputs = InputWatches(edge, averaged=self._is_averaged)
        inputs.update(edge, self.quantized.input_names, sample.arrays())
        return OpSampleErrors(
            found, masks, execution.form_outputs(), dict(execution.refused), inputs
        )

    def _count_sample(self, is_known: bool) -> None:
        """Count the sample, and whether the file was calibrated on it."""
        evaluated, known, _ = self._calibration
        self._calibration = Calibration(
            evaluated + 1, known + is_known, self.quantized.flow == "recipe"
        )

    def _add(self, errors: OpSampleErrors) -> None:
        sample = self._calibration.evaluated - 1
        for tensor, measured in errors.measured.items():
            if beyond := measured.beyond_low + measured.beyond_high:
                self._beyond.setdefault(tensor, {})[sample] = beyond
            if tensor in self._measured:
                self._measured[tensor].merge(measured)
            else:
                self._measured[tensor] = measured
        self._masks = {**errors.masks, **self._masks}
        self._refused = {**errors.refused, **self._refused}
        self._inputs.merge(errors.inputs)
        self._count += 1

    def compare_outputs(
        self, sample: Sample, known: Mapping[str, Arrays] = MappingProxyType({})
    ) -> None:
        """Compare only the float form's outputs with torch's on one sample."""
        self._count_sample(sample.arrays() in self.quantized.ledger)
        self.against_torch.update(sample, known)

    def _check_mask(self, made: OpOutput, masks: dict[int, Finding]) -> None:
        """Record a mask that is clipped, or that leaves the scores no codes."""
        lowest = self._lows.get(made.op.index, math.inf)
        if lowest > MASKING or not made.value.size or made.op.index in masks:
            return
        wanted, file = (each.astype(np.float64) for each in (made.exact, made.value))
        tensor = self.subgraph.tensors[made.tensor]
        found = mask_finding(made.op, wanted, file, tensor, lowest)
        if found is not None:
            masks[made.op.index] = found

    def _lowest(self) -> dict[int, float]:
        """Return the least constant among the ops that mask scores, by op."""
        own: defaultdict[int, float] = defaultdict(lambda: math.inf)
        lows = own.copy()
        for pair in self._structure.constants:
            if (floats := pair.floats).dtype.kind == "f":
                own[pair.op.index] = min(own[pair.op.index], float(floats.min(initial=math.inf)))
        for ops in self._masking:
            for op, least in zip(ops, accumulate((own[op.index] for op in ops), min), strict=True):
                lows[op.index] = min(lows[op.index], least)
        return lows

    def settle(self) -> None:
        """Judge the samples whose outputs are judged together; `result` calls it, too."""
        if self._count:
            self.against_torch.settle()
            if self.against_torch.is_rounded:
                self._note_rounding()

    def result(self) -> LayerErrors:
        """Return the errors of all ops, and the op to blame."""
        if not self._count:
            raise ValueError(f"{self.quantized.name}: localize: no sample in inputs")
        self.settle()
        quantized, subgraph = self.quantized, self.subgraph
        entries = {
            entry.index: entry for entry in quantized.op_dtypes if entry.subgraph == subgraph.index
        }
        wider = self._wider()
        starved = {op.index for op in subgraph.ops if not wider.keys().isdisjoint(op.inputs)}
        found = self._findings(wider)
        consumers = Consumers(quantized.graph, subgraph.index)
        unused = consumers.unused(self._measured)
        rows, evidence = [], []
        for op in subgraph.ops:
            known = [index for index in op.outputs if index in self._measured]
            own = [(self._outputs[index], self._measured[index]) for index in known]
            entry, is_matched = entries[op.index], bool(own) or op.name in HOLDING
            # The file may have lost the names of modules.
            entry = replace(entry, module=entry.module or self._modules.get(entry.index))
            rows.append(_row(op, entry, own, found.get(op.index, ()), matched=is_matched))
            is_unused = not unused.isdisjoint(op.outputs)
            facts = self._diagnostics(op, entry, own, consumers, is_unused=is_unused)
            evidence.append(replace(facts, bias_limited=()) if op.index in starved else facts)
        matched = {row.index for row in rows if row.matched}
        judged = blame(rows, evidence, self._inputs.findings(self._calibration))
        return replace(
            judged,
            refused={index: self._refused[index] for index in self._refused.keys() - matched},
            reference=quantized.reference_name,
            differing=next((each.place.op for each in self._divergence_finding()), None),
            starved=self._structure.biased & starved,
            source_of=functools.cache(functools.partial(source_line, quantized, self._first)),
        )

    def _harm(self, op: Op, own: Sequence[_Measurement]) -> Harm:
        """Return the loss of an op beyond that of its inputs and of quantization."""
        worst, measured = max(own, key=lambda each: each[1].cumulative_loss)
        scale = None if worst.limits is None else worst.limits.scale
        if measured.excess_lsb > 0 and scale is not None:
            return Harm.of_rms(measured.rmse(scale) or 0.0)
        sources = (self.pairs.source(index) for index in op.inputs if index >= 0)
        known = [self._measured[i].cumulative_loss for i in sources if i in self._measured]
        lost = measured.cumulative_loss
        return NO_HARM if lost == -math.inf else Harm.decibels(lost - max([measured.loss, *known]))

    def clipped_ranges(self) -> list[ClippedRange]:
        """Return the ranges of intermediate tensors, in the order of the file."""
        source = self.pairs.source
        io_indices = {*self.subgraph.inputs, *map(source, self.subgraph.outputs)}
        averaged = self._is_averaged
        # Clipped values that a selection discards, as of an exponential in ELU, are no loss.
        consumers = Consumers(self.quantized.graph, self.subgraph.index)
        used = self._measured.keys() - consumers.unused(self._measured)
        found = []
        tensors = [(op, index) for op in self.subgraph.ops for index in op.outputs]
        for op, tensor in (each for each in tensors if each[1] in used):
            measured, limits = self._measured[tensor], self._outputs[tensor].limits
            if limits is None or source(tensor) in io_indices or not measured.elements:
                continue
            # What all consumers clamp it to is no loss.
            readers = self.subgraph.consumers[tensor]
            ends = [facts_of(each.name).ends or (-math.inf, math.inf) for each in readers]
            least = min((low for low, _ in ends), default=math.inf)
            greatest = max((high for _, high in ends), default=-math.inf)
            is_low = limits.floor > least + limits.scale / 2
            is_high = limits.ceiling < greatest - limits.scale / 2
            count = is_low * measured.beyond_low + is_high * measured.beyond_high
            beyond = self._beyond.get(tensor, {})
            is_chance = not more_than_chance(
                count, measured.elements, averaged=self._count if averaged else 0
            )
            found.append(
                ClippedRange(
                    op=op,
                    tensor=tensor,
                    reach=limits.reach,
                    observed=(
                        measured.smallest if is_low else max(measured.smallest, limits.floor),
                        measured.largest if is_high else min(measured.largest, limits.ceiling),
                    ),
                    share=count / measured.elements,
                    sqnr_db=-measured.loss,
                    samples=sorted(beyond, key=lambda index: -beyond[index]),
                    is_clipped=count > 0 and (measured.rmse(limits.scale) or 0.0) > ROUNDED,
                    is_chance=is_chance,
                )
            )
        return found

    def _is_mask_cut(self, op: Op) -> bool:
        """Whether the range clips a mask; the clipped part is no loss."""
        limits = code_limits(self.subgraph.tensors[op.outputs[0]]) if op.outputs else None
        lowest = self._lows.get(op.index, math.inf)
        return limits is not None and lowest < min(limits.floor, MASKING)

    def _findings(self, wider: Mapping[int, float]) -> dict[int, tuple[Finding, ...]]:
        quantized = self.quantized
        edge, form = quantized.edge, self.form
        partners = by_name(edge.signature, form.signature, "outputs")
        named = [(io_tensor.name, io_tensor.tensor.index) for io_tensor in edge.signature.outputs]
        outputs = [(name, index, partners[index]) for name, index in named if index in partners]
        parts = [*self._structure.findings(outputs)]
        simulated = quantized.simulated
        graph = graph_module(simulated)
        observed = litert.activation_scales(graph) if graph is not None else ()

        def rounded() -> list[npt.NDArray[np.floating]]:
            return [] if graph is None else [one.numpy() for one, _ in litert.constants_of(graph)]

        structure = self._structure
        if self.against_torch.aligned is not None:
            structure = Structure(edge, self.against_torch.aligned)
        covers_all = quantized.flow == "pt2e"
        parts += structure.constant_findings(observed, rounded, covers_all=covers_all, wider=wider)
        changed = {} if quantized.origin is None else origin_findings(edge, quantized.origin)
        rules = rule_findings(edge.graph, self.subgraph.index, structure.biased)
        # A consumer of a scale that was changed violates a rule, and is not at fault.
        parts += [
            each
            for each in rules
            if not changed or each.place.op in changed or each.kind != WRONG_QPARAMS
        ]
        parts += self._divergence_finding()
        masked = [[op.index for op in ops if op.index in self._masks] for ops in self._masking]
        parts += [self._masks[first] for first in {ops[0] for ops in masked if ops}]
        found: dict[int, tuple[Finding, ...]] = {}
        for each in parts:
            number = each.place.op or 0
            found[number] = (*found.get(number, ()), each)
        floats = {} if quantized.origin is None else left_in_float(edge, quantized.origin)
        return changed | found | floats

    def _wider(self) -> dict[int, float]:
        """Return width of values over width of range, for ranges of almost nothing."""
        edge, subgraph = self.quantized.edge, self.subgraph
        known = self._inputs.spans
        spans = {
            each.tensor.index: known[each.name]
            for each in edge.signature.inputs
            if each.name in known
        }
        for tensor, measured in self._measured.items():
            limits = self._outputs[tensor].limits
            if limits is not None and measured.elements:
                used = max(measured.largest, 0.0) - min(measured.smallest, 0.0)
                spans[tensor] = (limits.ceiling - limits.floor, used)
        wider = {i: used / span for i, (span, used) in spans.items() if keeps_nothing(span, used)}
        for op in subgraph.ops:
            if op.name in KEEPING_SCALE and op.inputs[0] in wider:
                wider |= dict.fromkeys(op.outputs, wider[op.inputs[0]])
        return wider

    def _divergence_finding(self) -> list[Finding]:
        """Return a finding on the form's first op that differs from torch."""
        divergence = self.against_torch.divergence
        if divergence is None:
            return []
        partners = {partner.index: number for number, partner in self.pairs.ops.items()}
        number = None if divergence.op is None else partners.get(divergence.op.index)
        if divergence.op is not None and divergence.op.name in HOLDING:
            maker = self.subgraph.producer.get(divergence.op.outputs[0])
            number = maker.index if maker is not None and maker.name in HOLDING else None
        text = (
            f"the file in float does not compute what {self.quantized.reference_name} does: its "
            f"output {divergence.output!r} has {divergence.sqnr_db:.3g} dB SQNR to "
            f"{self.quantized.reference_name}'s, which float32 does not explain"
        )
        reason = Reason()
        if divergence.op is not None:
            text += divergence.how
            if divergence.is_reordered:
                text += "; the output has torch's values in another order"
            if _samples_centres(self.form.graph, divergence.op):
                reason = NEAREST
        if divergence.is_negated:
            text = "its result is −1 × that of torch"
            reason = Reason(
                (
                    "its operands are exchanged, as litert-torch does with those of c − x where "
                    "something moves x in front (a transpose, a view)",
                ),
                "let torch subtract first, and move then",
            )
        op = self.subgraph.ops[-1 if number is None else number]
        return [op.wrong(text, causes=reason.causes, fix=reason.fix)]

    def _output(self, made: OpOutput) -> _Output:
        if made.tensor not in self._outputs:
            graph, op = self.quantized.graph, made.op
            tensor = graph.tensor(op, made.tensor)
            limits = code_limits(tensor)
            slack = float_bound(graph, op) if op.inputs and op.inputs[0] >= 0 else 0.0
            channels = None
            if limits is None and tensor.is_quantized:
                bound: float | None = _UNKNOWN
                channels = channel_steps(tensor)
            elif limits is None:
                bound = slack
                if op.name in COMPARING and graph.tensor(op, op.inputs[0]).is_quantized:
                    bound = None
            else:
                bound = rounding_bound(graph, op, output=op.outputs.index(made.tensor))
                bound = _UNKNOWN if bound is None else bound
            hybrid = self._execution.hybrids.get(op.index)
            self._outputs[made.tensor] = _Output(
                limits,
                channels,
                bound,
                slack,
                float_reach(graph, op) if op.inputs else 0.0,
                0.0 if hybrid is None else self._peak_weight(op),
            )
        return self._outputs[made.tensor]

    def _peak_weight(self, op: Op) -> float:
        graph = self.quantized.graph
        stored = [each for each in roles_of(graph, op).weights if each.tensor.is_constant]
        peaks = [float(np.abs(read_constant(graph, op, each).floats).max()) for each in stored]
        return max(peaks, default=math.inf)

    def _tensor_errors(self, output: _Output, made: OpOutput) -> TensorErrors:
        limits = output.limits
        found = errors_of(made.value, made.exact, made.rounded, made.whole, limits)
        if limits is not None and made.value.size:
            found.add_codes(made.codes, limits)
        if not math.isfinite(found.noise):
            nonfinite = ~np.isfinite(made.value)
            by_kernel = nonfinite & (made.value != made.rounded)
            # Rounding alone may make greater values overflow float32.
            nonfinite_by_rounding = nonfinite & (np.abs(made.whole) < _HUGE)
            found.nonfinite = int((by_kernel | nonfinite_by_rounding).sum())
            found.nonfinite_by_rounding = 0 if by_kernel.any() else found.nonfinite
        if made.op.name in NARROWING and made.value.size:
            found.whole_least = float(made.whole.min())
            found.whole_greatest = float(made.whole.max())
        # Kernels write any code for NaN and infinity: the op that returned it is blamed.
        if made.op.name == "QUANTIZE" and bool(
            (~np.isfinite(made.rounded) & np.isfinite(made.whole)).any()
        ):
            return found
        if (bound := output.bound) is not None and made.value.size:
            if output.channels is not None:
                found.excess_lsb = _excess_by_channel(output.channels, made) - bound
            elif limits is None:
                found.excess_lsb = self._excess_of_floats(output, bound, made, found)
            else:
                found.excess_lsb = found.off - 0.5 - bound
                if found.excess_lsb > 0:
                    # The float kernel in the comparison rounds, too.
                    size = max(made.input_peak, peak(made.rounded))
                    found.excess_lsb -= output.slack * size / limits.scale
        return found

    def _excess_of_floats(
        self, output: _Output, bound: float, made: OpOutput, found: TensorErrors
    ) -> float:
        if made.value.dtype.kind != "f":
            off = float(np.max(made.value.astype(np.float64) != made.rounded, initial=0.0))
            return math.inf if off else -1.0
        greatest, worst = found.peak, found.off
        if not math.isfinite(worst):
            # A mask of −inf in both is sound; NaN in the file alone is counted separately.
            finite = np.isfinite(made.value) & np.isfinite(made.rounded)
            if not np.array_equal(made.value[~finite], made.rounded[~finite], equal_nan=True):
                return math.inf
            value, rounded = made.value[finite], made.rounded[finite]
            greatest = peak(rounded)
            worst = float(np.abs(value - rounded).max(initial=0.0))
        size = max(greatest, output.reach, made.input_peak)
        allowed = 2 * bound * size
        if worst > allowed and made.halves is not None:
            hybrid_input, halves = made.halves
            tied = self._execution.hybrids[made.op.index].rounding_ambiguity(hybrid_input, halves)
            allowed += tied * output.peak_weight
        return worst / allowed - 1 if allowed else (math.inf if worst else -1.0)

    def _diagnostics(
        self,
        op: Op,
        entry: OpDtypes,
        own: Sequence[_Measurement],
        consumers: Consumers,
        *,
        is_unused: bool,
    ) -> Diagnostics:
        graph = self.quantized.graph
        roles = roles_of(graph, op)
        limited = tuple(
            int(channel)
            for stored in roles.biases
            if stored.tensor.is_constant and stored.tensor.dtype == "int32"
            for channel in np.flatnonzero(
                np.isin(read_constant(graph, op, stored).values, _INT32_LIMITS)
            )
        )
        maxima: tuple[float, ...] = ()
        weights = [each for each in roles.weights if each.tensor.is_constant]
        if entry.granularity == "per_tensor" and len(weights) == 1:
            maxima = channel_maxima(op, read_constant(graph, op, weights[0]).floats)
        known = Diagnostics(
            scheme=entry.scheme,
            bias_limited=limited,
            weight_maxima=maxima,
            unused=is_unused or self._is_mask_cut(op),
            calibration=self._calibration,
        )
        if not own:
            return known
        worst, measured = max(own, key=lambda each: each[1].loss)
        limits = worst.limits
        count = max(measured.elements, 1)
        has_codes = limits is not None and measured.least <= measured.greatest
        beyond, noise = (measured.beyond_low, measured.beyond_high), measured.channel_noise
        narrowed = None
        if self.quantized.flow != "recipe" and any(beyond):
            narrowed = consumers.narrowing_reason(op, self._measured)
        return replace(
            known,
            scale=None if limits is None else limits.scale,
            zero_point=None if limits is None else limits.zero_point,
            code_range=None if limits is None else (limits.low, limits.high),
            elements=measured.elements,
            averaged=self._count if self._is_averaged else 0,
            codes=(int(measured.least), int(measured.greatest)) if has_codes else None,
            beyond=(beyond[0] / count, beyond[1] / count),
            reference=(measured.smallest, measured.largest) if has_codes else None,
            channel_noise=() if noise is None else tuple(noise.tolist()),
            weight_granularity=entry.granularity,
            nonfinite=0 if is_unused else measured.nonfinite,
            nonfinite_by_rounding=measured.nonfinite_by_rounding > 0,
            range_widened=consumers.widening_reason(op),
            range_narrowed=narrowed,
            harm=self._harm(op, own),
        )


def _samples_centres(graph: OpGraph, op: Op) -> bool:
    """Whether an op samples pixel centres, unlike torch's "nearest"."""
    if op.name != "RESIZE_NEAREST_NEIGHBOR":
        return False
    before, made = (graph.tensor(op, each[0]).shape for each in (op.inputs, op.outputs))
    has_factors = all(size % own == 0 for own, size in zip(before, made, strict=True) if own)
    return graph.option(op, "HalfPixelCenters", False) and not has_factors


def _excess_by_channel(scales: npt.NDArray[np.float32], made: OpOutput) -> float:
    low, high = code_range(made.codes.dtype.name)
    inside = (made.codes > low) & (made.codes < high)  # clipped values show in the loss
    off = np.abs(made.value - made.rounded) / np.broadcast_to(scales, made.value.shape)
    return float(off[inside].max(initial=0.0)) - 0.5


def _row(
    op: Op,
    entry: OpDtypes,
    own: Sequence[_Measurement],
    records: tuple[Finding, ...],
    *,
    matched: bool,
) -> LayerError:
    errors: dict[str, Any] = {}
    if own:
        # An op with several outputs shows the worst of them.
        worst, found = max(own, key=lambda each: (each[1].excess_lsb, each[1].loss))
        scale = None if worst.limits is None else worst.limits.scale
        errors |= {
            "local_sqnr_db": -found.loss,
            "local_rmse_lsb": found.rmse(scale),
            "cumulative_sqnr_db": -found.cumulative_loss,
            "cumulative_rmse_lsb": found.rmse(scale, cumulative=True),
        }
        if scale is not None:
            errors["local_lsb_error"] = found.local_lsb
            errors["cumulative_lsb_error"] = found.cumulative_lsb
            errors["clipped"] = (
                (found.low + found.high) / found.elements if found.elements else None
            )
        if worst.bound is not None:
            errors["excess_lsb"] = found.excess_lsb
    dtypes = {
        "input": ",".join(entry.inputs),
        "weight": entry.weight,
        "bias": entry.bias,
        "output": ",".join(entry.outputs),
    }
    return LayerError(
        index=op.index,
        op=op.name,
        module=entry.module,
        dtypes={role: dtype for role, dtype in dtypes.items() if dtype},
        matched=matched,
        records=records,
        subgraph=op.subgraph,
        **errors,
    )
