"""
Errors of the logits and of the cache of language models, position by position of each sequence.

A row of logits is the prediction after one token of a sequence; its place in the sequence is its
position. What is kept are sums of each row, some hundred bytes, so that errors can be pooled by
sequence, by position and by quarter, whatever the order in which the sequences came.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from .error_sums import IOSpec, OutputAccumulator
from .findings import aligned
from .metrics import Array, dot, json_number, short_numbers, sqnr_db
from .results import ElementError, OutputErrors, SampleErrors, StageErrors, metric_cell

LOGITS: Final = "logits"
"""The output that is measured at every position, by decode alone."""

WORST: Final = f"{LOGITS}, worst position"
"""The errors of the position with the least SQNR."""

_QUARTERS: Final = 4
_BLOCK: Final = 1 << 20  # elements that are held in float64 at a time

_SUMS: Final = (
    *("signal", "noise", "power", "product", "absolute", "largest", "magnitude", "peak"),
    *("kl", "kl_of_zeros", "nll", "nll_reference", "nll_squares"),
)
"""Columns of float64; of a row with anything non-finite they are NaN."""

_ROW: Final = np.dtype(
    [
        *((name, np.float64) for name in _SUMS),
        ("gap", np.float64),  # between the two greatest logits of the reference
        ("agrees", np.bool_),  # whether the first maximum is a maximum of the reference
        ("counts", np.bool_),  # whether the row is one of those that agreement is counted over
        ("first", np.bool_),  # whether the first logit of the reference is a maximum
        ("known", np.bool_),  # whether the next token is known
        *((name, np.int32) for name in ("nonfinite_reference", "nonfinite_actual", "at")),
        *((name, np.float64) for name in ("expected", "got")),  # the element `at`
    ]
)


@dataclass(frozen=True, slots=True, eq=False)
class TokenErrors:
    """The errors of the logits of one sequence, a row for each position."""

    sample: int  # index of the sequence
    start: int  # position of the first row
    vocab: int  # number of logits at each position
    dtype: str  # of what was measured
    rows: Array  # of `_ROW`

    @classmethod
    def measure(
        cls, sample: int, reference: Array, actual: Array, tokens: Array, *, start: int = 0
    ) -> TokenErrors:
        """
        Measure logits [n, vocab] against those of the reference, in blocks of positions.

        Row i is that of position `start` + i, and `tokens` are those that follow each row: −1 where
        it is not known, as after the last.
        """
        if reference.shape != actual.shape:
            raise ValueError(
                f"sequence {sample}: expected logits [positions, vocabulary] of one shape, got "
                f"{list(reference.shape)} of the reference and {list(actual.shape)} of the file"
            )
        n, vocab = reference.shape
        rows = np.zeros(n, _ROW)
        rows["known"] = tokens >= 0
        step = max(1, _BLOCK // vocab)
        for begin in range(0, n, step):
            block = slice(begin, begin + step)
            _measure(rows[block], reference[block], actual[block], tokens[block])
        rows["counts"] = _counted(rows, vocab)
        return cls(sample, start, vocab, actual.dtype.name, rows)

    def add_to(self, output: OutputAccumulator, begin: int = 0, end: int | None = None) -> float:
        """Add the rows of these positions to an output as one sample, and return its SQNR in dB."""
        low = max(begin - self.start, 0)
        rows = self.rows[low : None if end is None else max(end - self.start, 0)]
        if not rows.size:
            return math.inf
        nonfinite = int(rows["nonfinite_reference"].sum()), int(rows["nonfinite_actual"].sum())
        broken = rows["nonfinite_reference"] + rows["nonfinite_actual"] > 0
        at = int(broken.argmax() if broken.any() else rows["largest"].argmax())
        index = self.start + low + at, int(rows["at"][at])
        sides = float(rows["expected"][at]), float(rows["got"][at])
        element = ElementError(self.sample, index, *sides)
        sums = {name: float(rows[name].sum()) for name in _SUMS}
        sums |= {name: float(rows[name].max()) for name in ("largest", "peak")}
        counted = rows["counts"]
        errors = SampleErrors(
            sample=self.sample,
            n=rows.size * self.vocab,
            agreeing=int(np.count_nonzero(rows["agrees"] & counted)),
            rows=int(np.count_nonzero(counted)),
            first=int(np.count_nonzero(rows["first"] & counted)),
            positions=rows.size,
            tokens=int(np.count_nonzero(rows["known"])),
            **sums,
        )
        return output.add(errors, self.dtype, element, nonfinite)


def _measure(rows: Array, reference: Array, actual: Array, tokens: Array) -> None:
    """Fill the rows of a block, except which of them count."""
    f, q = (np.array(side, np.float64, order="C") for side in (reference, actual))
    finite_f, finite_q = np.isfinite(f), np.isfinite(q)
    rows["nonfinite_reference"] = np.count_nonzero(~finite_f, axis=1)
    rows["nonfinite_actual"] = np.count_nonzero(~finite_q, axis=1)
    finite = finite_f & finite_q
    broken = ~finite.all(axis=1)
    each = np.arange(len(rows))
    with np.errstate(all="ignore"):
        difference = f - q
        highest, choice = f.max(axis=1), q.argmax(axis=1)
        rows["agrees"] = f[each, choice] == highest
        rows["first"] = f[:, 0] == highest
        if f.shape[1] > 1:
            rows["gap"] = highest - np.partition(f, -2, axis=1)[:, -2]
        rows["signal"], rows["power"] = _row_dots(f, f), _row_dots(q, q)
        rows["product"], rows["noise"] = _row_dots(f, q), _row_dots(difference, difference)
        magnitudes = np.abs(difference)
        rows["absolute"], rows["largest"] = magnitudes.sum(axis=1), magnitudes.max(axis=1)
        rows["at"] = np.where(broken, (~finite).argmax(axis=1), magnitudes.argmax(axis=1))
        rows["expected"], rows["got"] = f[each, rows["at"]], q[each, rows["at"]]
        np.abs(f, out=magnitudes)
        rows["magnitude"], rows["peak"] = magnitudes.sum(axis=1), magnitudes.max(axis=1)
        _measure_distributions(rows, f, q, difference, tokens)
    for name in _SUMS:
        rows[name][broken] = math.nan


def _measure_distributions(
    rows: Array, f: Array, q: Array, difference: Array, tokens: Array
) -> None:
    """
    Fill in what depends on softmax(f) = p and softmax(q); both logits are overwritten.

    Both are relative to their own maxima, so that nothing overflows, and small differences keep
    their digits: KL = Σ p (f − q) − log(Σeᶠ / Σe^q).
    """
    each = np.arange(len(rows))
    highest, reached = f.max(axis=1), q.max(axis=1)
    f -= highest[:, None]
    q -= reached[:, None]
    difference -= (highest - reached)[:, None]
    given_f, given_q = f[each, tokens], q[each, tokens]
    exponentials = np.exp(f)
    whole_f = exponentials.sum(axis=1)
    mean_f, mean_difference = (_row_dots(exponentials, side) / whole_f for side in (f, difference))
    whole_q = np.exp(q, out=q).sum(axis=1)
    # The rounding of two equal sides is not a divergence below 0.
    rows["kl"] = np.maximum(mean_difference - np.log(whole_f / whole_q), 0)
    rows["kl_of_zeros"] = np.maximum(math.log(f.shape[1]) + mean_f - np.log(whole_f), 0)
    rows["nll"] = np.where(rows["known"], np.log(whole_q) - given_q, 0)
    rows["nll_reference"] = np.where(rows["known"], np.log(whole_f) - given_f, 0)
    rows["nll_squares"] = np.square(rows["nll"] - rows["nll_reference"])


def _row_dots(left: Array, right: Array) -> Array:
    return np.array([dot(*pair) for pair in zip(left, right, strict=True)])


def _counted(rows: Array, vocab: int) -> Array:
    """
    Return a mask of the rows that the agreement is counted over.

    Rows whose two greatest logits are nearer than twice the error measure chance. The error is the
    lower quartile of the rows' RMS errors, so that a cache that is broken from some position on
    does not excuse its own disagreements. If less than a quarter of the rows is left, all count: a
    file that is broken everywhere must not be judged by a few.
    """
    error = np.sqrt(rows["noise"] / vocab)
    finite = error[np.isfinite(error)]
    typical = float(np.quantile(finite, 0.25)) if finite.size else math.inf
    clear: Array = rows["gap"] > 2 * typical
    return clear if np.count_nonzero(clear) * 4 >= clear.size else np.ones_like(clear)


class TokenAccumulator:
    """Collects the errors of the sequences of one stage."""

    def __init__(self) -> None:
        self._sequences: dict[str, dict[int, TokenErrors]] = {}

    def add(self, name: str, errors: TokenErrors) -> float:
        """
        Add a sequence to an output, and return its SQNR in dB over all positions.

        It is NaN with anything non-finite, +inf without any error.
        """
        self._sequences.setdefault(name, {})[errors.sample] = errors
        return errors.add_to(OutputAccumulator(IOSpec(name)))

    def merge(self, other: TokenAccumulator) -> None:
        """Add the sequences of another accumulator, none of which is here."""
        for name, sequences in other._sequences.items():
            self._sequences.setdefault(name, {}).update(sequences)

    def stage(self) -> StageErrors:
        """Return the errors by output, pooled over all sequences and positions."""
        if not self._sequences:
            raise ValueError("no sequence was measured: the inputs are empty")
        names = sorted(self._sequences, key=lambda name: (name != LOGITS, name))
        return StageErrors({name: _pooled(name, self._of(name)) for name in names})

    def positions(self) -> PositionErrors:
        """Return the errors of the logits by position."""
        return _by_position(self._of(LOGITS))

    def _of(self, name: str) -> list[TokenErrors]:
        """Return the sequences in order, so that sums do not depend on how they were split."""
        return [errors for _, errors in sorted(self._sequences[name].items())]


def _pooled(
    name: str, sequences: list[TokenErrors], begin: int = 0, end: int | None = None
) -> OutputErrors:
    """Return the errors of all sequences between two positions."""
    output = OutputAccumulator(IOSpec(name))
    for errors in sequences:
        errors.add_to(output, begin, end)
    return output.result()


@dataclass(frozen=True, slots=True, eq=False)
class PositionErrors:
    """
    The errors of logits at each position, pooled over the sequences that reach it.

    Attributes:
        first: the first position; element i of the arrays is position `first` + i.
        n: number of sequences at each position.
        sqnr_db: SQNR at each position; NaN with anything non-finite, or without a sequence.
        kl: mean KL divergence in nats.
        agreement: share of the counted rows with the same greatest logit; NaN where none counts.
        outputs: the errors of each quarter of the longest sequence, and of the worst position.
    """

    first: int
    n: Array
    sqnr_db: Array
    kl: Array
    agreement: Array
    outputs: Mapping[str, OutputErrors]

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """The first position of each output, and the one behind its last."""
        edges = [self.first + self.n.size * part // _QUARTERS for part in range(_QUARTERS + 1)]
        quarters = enumerate(pairwise(edges), 1)
        named = {f"{LOGITS}, quarter {part}": pair for part, pair in quarters if pair[0] < pair[1]}
        worst = self.worst[0]
        return {**named, WORST: (worst, worst + 1)}

    @property
    def end(self) -> int:
        """The position behind the last one."""
        return self.first + self.n.size

    @property
    def worst(self) -> tuple[int, float]:
        """The position with the least SQNR, and its SQNR in dB; NaN is less than any number."""
        reached = np.where(np.isnan(self.sqnr_db), -math.inf, self.sqnr_db)
        at = int(np.where(self.n > 0, reached, math.inf).argmin())
        return self.first + at, float(self.sqnr_db[at])

    def first_below(self, db: float) -> int | None:
        """Return the first position whose SQNR is not at least `db`; None where all reach it."""
        below = (self.n > 0) & ~(self.sqnr_db >= db)
        return self.first + int(below.argmax()) if below.any() else None

    def where_below(self, db: float | None) -> str:
        """Return a text on the first position whose SQNR is below `db`, or on the worst one."""
        at = None if db is None else self.first_below(db)
        if at is None:
            position, lowest = self.worst
            return f"the worst SQNR is {lowest:.3g} dB, at position {position} of {self.end}"
        return f"the SQNR falls below {db:g} dB at position {at} of {self.end}"

    @property
    def summary(self) -> str:
        """The worst position and the SQNR of each quarter, in one line."""
        position, db = self.worst
        if db == math.inf:
            return "no error at any position"
        quarters = [each.sqnr_db for name, each in self.outputs.items() if name != WORST]
        return (
            f"worst at position {position} of {self.end} ({db:.3g} dB), quarters "
            f"{', '.join(f'{each:.3g}' for each in quarters)} dB"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain, JSON-able data with sorted keys; NaN and infinity as text."""
        return {
            "agreement": short_numbers(self.agreement),
            "first": self.first,
            "kl": short_numbers(self.kl),
            "n": self.n.tolist(),
            "outputs": {name: self.outputs[name].to_dict() for name in sorted(self.outputs)},
            "sqnr_db": short_numbers(self.sqnr_db),
        }

    def __str__(self) -> str:
        """Return a table with a row for each quarter and for the worst position."""
        metrics = ("sqnr_db", "kl", "top1_agreement", "perplexity_ratio")
        rows: list[tuple[str, ...]] = [("output", "positions", "sequences", *metrics)]
        for name, (begin, end) in self.ranges.items():
            output = self.outputs[name]
            places = str(begin) if end == begin + 1 else f"{begin} to {end - 1}"
            cells = (metric_cell(output, metric) for metric in metrics)
            rows.append((name, places, str(output.n_samples), *cells))
        return "\n".join(aligned(rows, numeric=range(2, 3 + len(metrics))))


def _by_position(sequences: list[TokenErrors]) -> PositionErrors:
    """Pool the errors of sequences, in their order."""
    first = min(each.start for each in sequences)
    last = max(each.start + each.rows.size for each in sequences)
    n, counted = (np.zeros(last - first, np.int64) for _ in range(2))
    sums = {name: np.zeros(last - first) for name in ("signal", "noise", "kl", "agrees")}
    for each in sequences:
        at = slice(each.start - first, each.start - first + each.rows.size)
        n[at] += 1
        counted[at] += each.rows["counts"]
        sums["agrees"][at] += each.rows["agrees"] & each.rows["counts"]
        for name in ("signal", "noise", "kl"):
            sums[name][at] += each.rows[name]
    pairs = zip(sums["signal"].tolist(), sums["noise"].tolist(), strict=True)
    decibels = np.array([sqnr_db(*pair) for pair in pairs])
    with np.errstate(invalid="ignore", divide="ignore"):
        kl, agreement = sums["kl"] / n, sums["agrees"] / counted
    found = PositionErrors(first, n, decibels, kl, agreement, {})
    outputs = {name: _pooled(name, sequences, *pair) for name, pair in found.ranges.items()}
    return replace(found, outputs=outputs)


class CacheError(NamedTuple):
    """One position of one cache tensor."""

    tensor: str
    position: int
    sqnr_db: float

    def __str__(self) -> str:
        return f"{self.tensor} at position {self.position}: {self.sqnr_db:.3g} dB"


class CacheErrors:
    """Signal and noise of each position of each tensor, summed over sequences; mergeable."""

    def __init__(self) -> None:
        self._sums: dict[str, Array] = {}  # [2, positions]: signal and noise

    def __bool__(self) -> bool:
        """Return whether anything was measured."""
        return bool(self._sums)

    @np.errstate(over="ignore", invalid="ignore")
    def add(self, reference: Mapping[str, Array], actual: Mapping[str, Array]) -> None:
        """Add one sequence, [positions, values] by tensor; without a cache nothing is added."""
        for name, expected in reference.items():
            wanted = expected.astype(np.float64)
            noise = np.square(wanted - actual[name]).sum(axis=1)
            self._add(name, np.stack([np.square(wanted).sum(axis=1), noise]))

    def merge(self, other: CacheErrors) -> None:
        """Add the sequences of another one."""
        for name, sums in other._sums.items():
            self._add(name, sums)

    def _add(self, name: str, sums: Array) -> None:
        known = self._sums.get(name)
        if known is not None:
            longest = max(known.shape[1], sums.shape[1])
            known, sums = (
                np.pad(each, ((0, 0), (0, longest - each.shape[1]))) for each in (known, sums)
            )
            sums = known + sums
        self._sums[name] = sums

    @property
    def worst(self) -> CacheError:
        """The position with the least SQNR; NaN is less than any."""
        return min(self._all(), key=lambda each: (not math.isnan(each.sqnr_db), each.sqnr_db))

    def first_below(self, db: float) -> CacheError | None:
        """Return the first position below a bound, and of its tensors that of the first layer."""
        bad = [each for each in self._all() if not each.sqnr_db >= db]
        return min(bad, key=lambda each: (each.position, _layer(each.tensor)), default=None)

    def _all(self) -> list[CacheError]:
        """Return the SQNR of each position of each tensor."""
        return [
            # Zero on both sides, as no token was read there, is no error.
            CacheError(name, position, sqnr_db(*pair) if pair.any() else math.inf)
            for name, sums in self._sums.items()
            for position, pair in enumerate(sums.T)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain, JSON-able data with sorted keys."""
        worst = self.worst
        return {
            "position": worst.position,
            "sqnr_db": json_number(worst.sqnr_db),
            "tensor": worst.tensor,
        }


def _layer(tensor: str) -> tuple[int, str]:
    return int(tensor.rsplit("_", 1)[1]), tensor
