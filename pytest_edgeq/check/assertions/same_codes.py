"""Assert that the kernels of several runtimes compute the same codes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_edgeq.check.assertions.expect import Model, edge_of, failed, parse_number, table
from pytest_edgeq.check.op_pairs import first_differing_op
from pytest_edgeq.compare.failed_samples import FailedSamples, attach_samples
from pytest_edgeq.compare.quantized import QuantizedModel
from pytest_edgeq.compare.samples import SampleSpec, read_samples
from pytest_edgeq.errors import UnmatchedError
from pytest_edgeq.localize.single_ops import SingleOps
from pytest_edgeq.numerics.comparison import WorstSamples
from pytest_edgeq.numerics.findings import RUNTIMES_DIFFER, Finding, Place
from pytest_edgeq.numerics.metrics import least_sqnr_db
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.ends import quantized_output
from pytest_edgeq.tflite.subgraph import SignatureTensor, Tensor

Array = npt.NDArray[Any]


def assert_runtimes_agree(
    model: Model,
    inputs: Iterable[Any],
    max_lsb_error: float,
    runtimes: Sequence[str] = ("xnnpack", "builtin", "reference"),
) -> None:
    """
    Assert that the kernels of several runtimes compute the same codes, within a tolerance.

    Kernels round differently and the difference grows with depth, so there is no default: measure
    yours. Outputs that are integers without a scale (a class, an index) must be equal.

    Args:
        model: QuantizedModel, path or bytes.
        inputs: Samples, read once.
        max_lsb_error: Greatest difference of two codes of one output, in LSB.
        runtimes: Two or more; each is compared with the first. Targets (`arm64`, `arm64:builtin`)
            and runtimes of your own are known to a QuantizedModel, not to a path or bytes. If a
            target differs, the failure names the first op whose codes differ when it is run alone.

    Raises:
        AssertionError: Codes differ by more, or an output is float and has no LSB.
        ValueError, TypeError: An unknown runtime, fewer than two, no or bad samples, a bound that
            is negative or not finite.
        RuntimeError: A runtime cannot load the file.
        ModuleNotFoundError: A runtime needs a package that is not installed.
    """
    bound = parse_number("max_lsb_error", max_lsb_error)
    if not 0 <= bound < math.inf:
        raise ValueError(f"max_lsb_error: expected 0 or more, and finite, got {max_lsb_error!r}")
    names = (runtimes,) if isinstance(runtimes, str) else tuple(runtimes)
    if len(names) < 2 or len(set(names)) < len(names):
        raise ValueError(f"runtimes: expected two or more different ones, got {runtimes!r}")
    edge = edge_of(model, inputs)
    for runtime in names:
        edge.runtimes.check(runtime)
    outputs = edge.signature.outputs
    tensors = [quantized_output(edge.graph, edge.signature, each) for each in outputs]
    for each, tensor in zip(outputs, tensors, strict=True):
        if not tensor.dtype.startswith(("int", "uint", "bool")):
            raise UnmatchedError(
                f"output {each.name!r} is {each.tensor.dtype} and has no LSB: compare such a model "
                "on each runtime with edgeq.compare(model, inputs, runtime=…) and a Budget"
            )
    known = model if isinstance(model, QuantizedModel) else None
    spec = SampleSpec.of_signature(edge.signature) if known is None else known.spec
    input_names = tuple(each.name for each in spec.inputs)
    edge.restart()
    first, *others = names
    pairs = {
        other: [_CodePair(*each, first, other) for each in zip(outputs, tensors, strict=True)]
        for other in others
    }
    worst = {other: WorstSamples() for other in others}
    n_samples = 0
    for index, sample in enumerate(read_samples(inputs, spec, "evaluation")):
        encoded = edge.encode(input_names, sample.arrays())
        codes = {name: edge.runner(name).run(encoded) for name in names}
        expected = edge.decode(codes[first])
        for other in others:
            for pair, one, two in zip(pairs[other], codes[first], codes[other], strict=True):
                pair.update(index, one, two)
            sqnr_db = least_sqnr_db(expected, edge.decode(codes[other]))
            worst[other].offer(index, sqnr_db, sample.clone)
        n_samples += 1
    every = [pair for other in others for pair in pairs[other]]
    empty = [pair for pair in every if not pair.n_codes]
    if not every or empty:
        raise UnmatchedError(
            f"output {empty[0].io_tensor.name!r} had no element in any sample: nothing was compared"
            if empty
            else "the model has no outputs: there is nothing to compare"
        )
    wrong = [pair for pair in every if not pair.worst <= (bound if pair.tensor.is_quantized else 0)]
    if wrong:
        shown = worst[wrong[0].other].result()
        codes_there = edge.encode(input_names, shown[0].inputs.arrays())
        error = _runtimes_differ(edge, wrong, len(every), bound, codes_there)
        if known is not None:
            attach_samples(error, FailedSamples(known, wrong[0].other, first, shown, n_samples))
        raise error


@dataclass(slots=True)
class _CodePair:
    """One output on two runtimes, over all samples."""

    io_tensor: SignatureTensor
    # With the codes, behind a DEQUANTIZE that op's input; classes and indices have no scale.
    tensor: Tensor
    first: str
    other: str
    worst: float = 0.0
    at: str = ""
    n_differ: int = 0
    n_codes: int = 0

    def update(self, sample: int, one: Array, two: Array) -> None:
        """Compare the codes of one sample."""
        self.n_codes += max(one.size, two.size)
        if one.shape != two.shape:
            # Never subtracted: numpy would broadcast one to the other.
            self.n_differ += max(one.size, two.size)
            if self.worst < math.inf:
                self.worst = math.inf
                self.at = f"sample {sample}: shape {list(one.shape)} and {list(two.shape)}"
            return
        if self.tensor is not self.io_tensor.tensor:
            one, two = (np.rint(each / float(self.tensor.scales[0])) for each in (one, two))
        # A difference in float64 does not wrap; it may round to 0 although codes differ.
        a, b = one.astype(np.float64), two.astype(np.float64)
        with np.errstate(invalid="ignore"):
            steps = np.nan_to_num(np.maximum(np.abs(a - b), 1.0), nan=math.inf, posinf=math.inf)
        steps = np.where((one != two) & ~(np.isnan(a) & np.isnan(b)), steps, 0.0)
        self.n_differ += int(np.count_nonzero(steps))
        most = float(steps.max(initial=0.0))
        if most > self.worst:
            index = np.unravel_index(int(steps.argmax()), steps.shape)
            where = [int(i) for i in index]
            self.worst = most
            self.at = f"sample {sample}, index {where}: {one[index]} and {two[index]}"


def _runtimes_differ(
    edge: EdgeFile, wrong: list[_CodePair], n_pairs: int, bound: float, inputs: Mapping[str, Array]
) -> AssertionError:
    first = wrong[0]
    expected = f"at most {bound:g} LSB" if first.tensor.is_quantized else "equal values"
    scaled = [pair.worst for pair in wrong if pair.tensor.is_quantized]
    why, command = "", ""
    if any(edge.runtimes.target_of(name) is not None for name in (first.first, first.other)):
        why = first_differing_op(SingleOps(edge), first.first, first.other, inputs)
    causes = [
        why
        or "kernels round differently by 1 LSB an op, and it adds up with depth; far more than "
        "that is a kernel that computes something else."
    ]
    if math.inf in (pair.worst for pair in wrong):
        causes.append("no bound accepts other shapes, NaN or infinity: one runtime is wrong")
    elif len(scaled) < len(wrong):
        causes.append("a class or an index has no tolerance: its scores are nearly tied")
    else:
        command = f"max_lsb_error={max(scaled):g}"
    place, between = Place("output", first.io_tensor.name), f"{first.first} and {first.other}"
    rows = [
        (
            pair.io_tensor.name,
            f"{pair.first}, {pair.other}",
            f"{pair.worst:g}",
            f"{pair.n_differ} of {pair.n_codes}",
            pair.at,
        )
        for pair in wrong
    ]
    says = f"expected {expected}, got {first.worst:g}"
    found = Finding(
        kind=RUNTIMES_DIFFER,
        place=place,
        expected=expected,
        got=f"{first.worst:g}",
        symptom=f"{between}: {says}",
        headline=f"{place}, {between}: {says} ({len(wrong)} of {n_pairs} pairs)",
        evidence=table(rows, ("output", "runtimes", "worst", "codes that differ", "worst at")),
        causes=tuple(causes),
        command=command and f"{command}, if depth explains it",
    )
    return failed(found, *([f"update, if depth explains it: {command}"] if command else []))
