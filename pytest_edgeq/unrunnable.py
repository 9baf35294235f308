"""The errors of files that cannot be run or read."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_edgeq.numerics.findings import BLOCKING, CANNOT_RUN, Finding, Place


class UnrunnableError(RuntimeError):
    """
    A runtime cannot load or run a file.

    Attributes:
        runtime: Its name.
        told: What the text says of it, behind `the xnnpack runtime `.
        is_lacking: Whether the kernels lack an op of the file, or cannot take files of its kind;
            others can.
        broken: The rule of the kernels that the refused op does not keep, where there is one.
    """

    def __init__(
        self, runtime: str, told: str, *, is_lacking: bool = False, broken: Finding | None = None
    ) -> None:
        super().__init__(runtime, told)
        self.runtime, self.told, self.is_lacking = runtime, told, is_lacking
        self.broken = broken

    def __str__(self) -> str:
        """Say it of the one runtime."""
        first, *lines = self.told.splitlines()
        if self.broken is not None:
            lines = [f"cause: {'; '.join((self.broken.symptom, *self.broken.causes))}", *lines]
            lines.insert(1, f"fix: {self.broken.fix}")
        return "\n".join([f"the {self.runtime} runtime {first}", *lines])


class CrashedError(UnrunnableError):
    """A runtime ended the process that it ran in, or was ended by a bound on time or memory."""


class CopyError(RuntimeError):
    """A runtime cannot load or run a file that was written from the user's: no fault of theirs."""


class UnreadableError(ValueError):
    """The values of a constant of a file cannot be read."""


class CrashedConversionError(RuntimeError):
    """A library ended the process that a conversion ran in, or was ended by a bound."""


def grouped(refusals: Iterable[UnrunnableError]) -> list[Finding]:
    """Return findings on refusals, one for all runtimes that say the same."""
    names: dict[tuple[str, Finding | None], list[str]] = {}
    for each in refusals:
        known = names.setdefault((each.told, each.broken), [])
        known += [] if each.runtime in known else [each.runtime]
    found = []
    for (told, broken), known in names.items():
        title, *lines = f"the {_listed(known)} {told}".splitlines()
        place = Place("runtime", ", ".join(known))
        found.append(
            Finding(
                kind=CANNOT_RUN,
                place=place,
                headline=title,
                evidence=tuple(lines),
                explained_by=() if broken is None else (broken,),
                harm=BLOCKING,
            )
        )
    return found


def _listed(names: list[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last} runtimes" if first else f"{last} runtime"
