"""Bounds on errors, their violations, and the sample counts that they need."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from numbers import Integral, Real
from typing import Any, TypeVar

from pytest_edgeq.names import nearest

from .arrays import kind_of, short_repr
from .findings import NONFINITE, OVER_BUDGET, ZERO_OUTPUT, Finding, Place
from .metric_table import LOWER_BOUNDED, METRICS, OF_TOKENS, UPPER_BOUNDED
from .results import OutputErrors, StageErrors
from .token_errors import LOGITS, PositionErrors

_KINDS = {"nonfinite": NONFINITE, "degenerate": ZERO_OUTPUT}
"""Kinds of findings on metrics without a bound."""

_DECIBELS = tuple(each.name for each in METRICS.values() if each.kind == "decibels")

# Similarities from here on are rounded in their distance from 1, so that 0.99987 is not 0.999.
_FEW_DIGITS = 0.9

# By metric: why an output lacks it, and what to bound instead.
_LACKS = {
    "max_lsb_error": ("has no scale, and so no LSB", "max_abs_error"),
    "top1_agreement": (
        "has no classes: it is not of rank 2 with 2 elements or more a row",
        "sqnr_db",
    ),
    **dict.fromkeys(
        OF_TOKENS,
        ("is not the logits of a language model over a sequence of tokens", "sqnr_db"),
    ),
}


T = TypeVar("T")


def _naming_bounds(cls: type[T]) -> type[T]:
    """Refuse unknown bounds, and bounds without a name, with the one that was probably meant."""
    init: Any = cls.__init__
    names = [field.name for field in fields(cls)]  # type: ignore[arg-type] # a dataclass

    @functools.wraps(init)
    def checked(self: T, *args: object, **bounds: object) -> None:
        known = f"\n  bounds: {', '.join(names)}"
        if args:
            given = ", ".join(map(short_repr, args))
            raise TypeError(
                f"Budget({given}): a bound needs its name: did you mean sqnr_db=…?{known}"
            )
        for name in bounds:
            if name not in names:
                raise TypeError(f"Budget({name}=…): no such bound{nearest(name, names)}{known}")
        init(self, **bounds)

    setattr(cls, "__init__", checked)  # noqa: B010 # mypy refuses the assignment
    return cls


@_naming_bounds
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Budget:
    """
    Bounds on errors; at least one must be set, the others are not checked.

    Non-finite values, and outputs where nothing was tested, are never accepted.

    Args:
        max_abs_error: greatest max|f−q|.
        mean_abs_error: greatest mean of `|f−q|`.
        rmse: greatest √mean((f−q)²).
        max_lsb_error: greatest max|f−q| / S, in steps of the output's own scale.
        sqnr_db: least SQNR over all samples, in dB.
        worst_sample_sqnr_db: least SQNR of any one sample, in dB.
        cosine_similarity: least cosine similarity.
        top1_agreement: least share of rows with the same top-1 class.
        kl: greatest mean KL divergence from the reference, in nats; of logits of language models.
        perplexity_ratio: greatest perplexity as a multiple of the reference's, 1 or more; of
            logits of language models.

    Raises:
        TypeError: a bound has no name or an unknown one, or is not a real number.
        ValueError: no bound is set, or one is not finite or could not fail.
    """

    max_abs_error: float | None = None
    mean_abs_error: float | None = None
    rmse: float | None = None
    max_lsb_error: float | None = None
    sqnr_db: float | None = None
    worst_sample_sqnr_db: float | None = None
    cosine_similarity: float | None = None
    top1_agreement: float | None = None
    kl: float | None = None
    perplexity_ratio: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                object.__setattr__(self, field.name, _checked(field.name, value))
        if not self.bounds():
            names = ", ".join(field.name for field in fields(self))
            raise ValueError(f"Budget() bounds nothing and would pass anything: set one of {names}")

    def __repr__(self) -> str:
        """Return the call that makes this budget, with the bounds set only, ready to paste."""
        return f"Budget({', '.join(f'{name}={value!r}' for name, value in self.bounds().items())})"

    def bounds(self) -> dict[str, float]:
        """Return the bounds that are set, by metric."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def violations(
        self,
        errors: OutputErrors | StageErrors,
        stage: str,
        positions: PositionErrors | None = None,
    ) -> list[Finding]:
        """
        Compare errors with this budget, output by output.

        With `positions`, the first violation of logits names the first position below the SQNR
        bound. An output with anything non-finite, or where nothing was tested, gets that one
        violation.

        Raises:
            ValueError: an output lacks a metric that is bounded.
        """
        outputs = _outputs(errors)
        self._require_metrics(outputs)
        return [
            violation
            for output in outputs
            for violation in self._violations(output, stage, positions)
        ]

    def needed(self, errors: OutputErrors | StageErrors) -> Budget | None:
        """
        Return the budget that this measurement would need, with the same bounds set; None without.

        Each is rounded outward to 3 significant digits (similarities near 1 in their distance from
        1). With an SQNR of +inf this budget's own bound stays.

        Raises:
            ValueError: an output lacks a metric that is bounded.
        """
        outputs = _outputs(errors)
        self._require_metrics(outputs)
        if any(output.nonfinite or output.degenerate for output in outputs):
            return None
        needed = {}
        for metric, bound in self.bounds().items():
            actual = getattr(errors, metric)
            is_exact = metric in _DECIBELS and actual == math.inf
            needed[metric] = bound if is_exact else loosened(metric, actual)
        return None if None in needed.values() else Budget(**needed)

    def _require_metrics(self, outputs: Sequence[OutputErrors]) -> None:
        for metric in self.bounds():
            if lacking := [output for output in outputs if getattr(output, metric) is None]:
                why, other = _LACKS[metric]
                text = ", ".join(f"output {each.name!r} {why}" for each in lacking)
                several = ", or give a budget per output" if len(outputs) > 1 else ""
                raise ValueError(f"{metric}: {text}; bound {other} instead{several}")

    def _violations(
        self, output: OutputErrors, stage: str, positions: PositionErrors | None
    ) -> list[Finding]:
        at = str(output.max_abs_index)
        if output.nonfinite:
            note = (
                f"{output.nonfinite_actual} in actual and {output.nonfinite_reference} in the "
                f"reference, of {output.n_elements} elements; the first at {at}"
            )
            return [_violation("nonfinite", stage, output, output.nonfinite, "at most 0", note)]
        if output.degenerate:
            note = (
                f"reference and actual are zero in all {output.n_elements} elements: "
                "nothing was tested; use inputs for which this output is not zero"
            )
            return [_violation("degenerate", stage, output, 1, "at most 0", note)]
        notes = dict.fromkeys(("max_abs_error", "max_lsb_error"), f"the greatest at {at}")
        notes["worst_sample_sqnr_db"] = f"sample {output.worst_sample}"
        where = ""
        if positions is not None and output.name == LOGITS:
            where = positions.where_below(self.sqnr_db)
        found: list[Finding] = []
        for metric, bound in self.bounds().items():
            actual = getattr(output, metric)
            if not METRICS[metric].accepts(actual, bound):
                expected = f"{'at most' if metric in UPPER_BOUNDED else 'at least'} {bound:.6g}"
                note = "; ".join(filter(None, (notes.get(metric), "" if found else where)))
                found.append(_violation(metric, stage, output, actual, expected, note))
        return found


def _violation(
    metric: str, stage: str, output: OutputErrors, actual: float, expected: str, note: str
) -> Finding:
    """Return the finding on a metric that does not keep its bound."""
    place, got = Place("output", output.name), f"{actual:.6g}"
    says = f"{metric}: expected {expected}, got {got}"
    return Finding(
        kind=_KINDS.get(metric, OVER_BUDGET),
        place=place,
        expected=expected,
        got=got,
        symptom=f"{stage}, {says}",
        headline=f"{stage}, {place}: {says}{f' ({note})' if note else ''}",
    )


def _outputs(errors: OutputErrors | StageErrors) -> list[OutputErrors]:
    return list(errors.outputs.values()) if isinstance(errors, StageErrors) else [errors]


def _checked(name: str, value: object) -> float:
    """Return a valid bound as int or float; raise with a fix if it is invalid."""
    given = f"Budget({name}={short_repr(value)})"
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{given}: expected a real number, got {kind_of(value)}")
    if not math.isfinite(value):
        raise ValueError(f"{given}: expected a finite number; leave out what is not bounded")
    number = int(value) if isinstance(value, Integral) else float(value)
    if name in UPPER_BOUNDED and number < 0:
        raise ValueError(
            f"{given}: an error is never negative; give the greatest accepted, 0 or more"
        )
    if name == "perplexity_ratio" and number < 1:
        raise ValueError(
            f"{given}: a ratio below 1 asks the file to predict better than its reference; give 1 "
            "or more, such as 1.02"
        )
    if name in _DECIBELS and number <= 0:
        raise ValueError(
            f"{given}: a bound of 0 dB or below accepts noise as loud as the signal and tests "
            "nothing; give a bound above 0 dB"
        )
    if name in LOWER_BOUNDED and name not in _DECIBELS and not 0 < number <= 1:
        raise ValueError(f"{given}: expected a share above 0 and at most 1, such as 0.99")
    return number


def loosened(metric: str, actual: float) -> float | None:
    """Return a valid bound of 3 significant digits that this value keeps, or None."""
    if not math.isfinite(actual):
        return None
    if metric == "perplexity_ratio":
        bound = 1 + _rounded(max(actual, 1.0) - 1, ROUND_CEILING)
    elif metric in UPPER_BOUNDED:
        bound = _rounded(actual, ROUND_CEILING)
    elif actual <= 0:
        return None
    elif metric not in _DECIBELS and actual >= _FEW_DIGITS:
        bound = Decimal(1) - _rounded(1.0 - actual, ROUND_CEILING)
    else:
        bound = _rounded(actual, ROUND_FLOOR)
    number = float(bound)
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() and number < 1e6 else number


def _rounded(value: float, rounding: str) -> Decimal:
    exact = Decimal(value)
    return exact and exact.quantize(Decimal((0, (1,), exact.adjusted() - 2)), rounding=rounding)
