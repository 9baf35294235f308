"""The marker `edgeq`: its keywords and their values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from pytest_edgeq.names import DEFAULT_PRESET, DEFAULT_RUNTIME, nearest
from pytest_edgeq.plugin.options.values import OptionSource, quantizer_of, runtime_of
from pytest_edgeq.runtimes.registry import Runtimes

MARKER: Final = (
    "edgeq(*, quantizers=[…], runtime=None): run the test once under each of these quantizers "
    "(for tests that ask for edgeq_quantizer), on this runtime. --edgeq-runtime wins over runtime."
)


class Marks(NamedTuple):
    """The keywords of `@pytest.mark.edgeq(…)`; None for absent ones."""

    quantizers: tuple[object, ...] | None = None
    runtime: str | None = None


def resolve_marks(marks: Iterable[pytest.Mark], rootdir: Path, runtimes: Runtimes) -> Marks:
    """Merge the markers `edgeq` on a test; the closest one wins for each keyword."""
    valid = Marks._fields
    said: dict[str, Any] = {}
    for mark in marks:
        if mark.args:
            raise pytest.UsageError(
                "the marker edgeq accepts keyword arguments only, got "
                f"{', '.join(map(repr, mark.args))}: write "
                f'@pytest.mark.edgeq(quantizers=["{DEFAULT_PRESET}"], runtime="{DEFAULT_RUNTIME}")'
            )
        for keyword, value in mark.kwargs.items():
            if keyword not in valid:
                raise pytest.UsageError(
                    f"the marker edgeq has no keyword {keyword!r}{nearest(keyword, valid)}\n"
                    f"  keywords: {', '.join(valid)}"
                )
            if value is not None:
                said.setdefault(keyword, value)
    for keyword, resolve in (("quantizers", _marked_quantizers), ("runtime", runtime_of)):
        if keyword in said:
            place = OptionSource(f"the marker edgeq({keyword}=…)", rootdir, runtimes)
            with place.errors():
                said[keyword] = resolve(said[keyword], place)
    return Marks(**said)


def check_quantizers_are_used(
    marks: Iterable[pytest.Mark], fixtures: Sequence[str], of_case: Iterable[pytest.Mark]
) -> None:
    """Check that a test that is itself marked with quantizers runs under them."""
    if "edgeq_quantizer" not in fixtures and any(map(_sets_quantizers, marks)):
        raise pytest.UsageError(
            "the marker edgeq(quantizers=…) has no effect: expected a test that uses the fixture "
            f"edgeq_quantizer, got the fixtures {', '.join(fixtures) or 'none'}; it would run "
            "once, under the default quantizer\n"
            "fix: add the argument edgeq_quantizer and hand it on, edgeq.quantize(…, "
            "quantizer=edgeq_quantizer), or leave quantizers=… out of the marker"
        )
    if any(map(_sets_quantizers, of_case)):
        raise pytest.UsageError(
            "the marker edgeq(quantizers=…) has no effect in pytest.param(…, marks=…): all cases "
            "of a test run under the same quantizers\n"
            "fix: mark the test function, or give the quantizer of each case: "
            '@pytest.mark.parametrize("…, edgeq_quantizer", [(…, "pt2e_static_int8"), …])'
        )


def _sets_quantizers(mark: pytest.Mark) -> bool:
    return mark.name == "edgeq" and mark.kwargs.get("quantizers") is not None


def _marked_quantizers(value: Any, place: OptionSource) -> tuple[object, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"expected a list of quantizers, got {value!r}; write [{value!r}]")  # noqa: TRY004
    if not value:
        raise ValueError("the list is empty, so the test would be skipped without a word")
    if all(isinstance(part, dict) for part in value):
        raise ValueError(
            "a list of dicts is one recipe; for a list of quantizers write quantizers=[recipe]"
        )
    return tuple(
        quantizer_of(str(part), place) if isinstance(part, (str, Path)) else part for part in value
    )
