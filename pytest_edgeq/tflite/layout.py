"""
Layouts: where the file keeps the channels of an input or an output, and where its reference does.

Samples, and what `run` gives, are always laid out as the reference has it. They are turned at the
border of the file, and only where that was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pytest_edgeq.names import nearest
from pytest_edgeq.tflite.subgraph import Signature, SignatureTensor

LAYOUTS = ("nwc", "nhwc", "ndhwc", "ncw", "nchw", "ncdhw")
"""As many letters as dimensions: batch, channels, depth, height, width."""

LayoutArgument: TypeAlias = "str | Mapping[str, str] | None"


class Layouts:
    """
    The inputs and outputs of a file whose channels stand elsewhere than in the reference.

    Raises:
        TypeError: Neither a string, a dict of strings by name, nor None.
        ValueError: Unknown, or it fits nothing in the file.
    """

    def __init__(self, layout: LayoutArgument, signatures: Sequence[Signature]) -> None:
        borders = [border for each in signatures for border in (*each.inputs, *each.outputs)]
        self._words: dict[tuple[str, int], str] = {}
        if layout is None:
            return
        if isinstance(layout, Mapping):
            for name, word in layout.items():
                self._words |= _of_name(name, word, borders)
            return
        self._words = _of_rank(_known(layout, "layout"), borders)

    def of(self, border: SignatureTensor) -> str | None:
        """How the file lays a border out, None where the reference does it likewise."""
        return self._words.get((border.name, len(border.tensor.shape_signature)))

    def axes(self, border: SignatureTensor) -> tuple[int, int] | None:
        """Where the reference keeps a border's channels and where the file does; None if alike."""
        word = self.of(border)
        return None if word is None else _move(word)

    def shape(self, border: SignatureTensor) -> tuple[int, ...]:
        """A border's shape as the reference has it, −1 where any length will do."""
        word, shape = self.of(border), border.tensor.shape_signature
        return shape if word is None else _turned(shape, *reversed(_move(word)))

    def to_file(self, border: SignatureTensor, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Turn what the reference takes, a view of it, into the file's layout."""
        word = self.of(border)
        # Another number of dimensions is told where shapes are checked.
        if word is None or value.ndim != len(word):
            return value
        return np.moveaxis(value, *_move(word))

    def from_file(self, border: SignatureTensor, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Turn what the file gives, a view of it, into the reference's layout."""
        word = self.of(border)
        return value if word is None else np.moveaxis(value, *reversed(_move(word)))


UNTURNED = Layouts(None, ())
"""File and reference agree."""


def _of_name(name: str, word: Any, borders: Sequence[SignatureTensor]) -> dict[Any, str]:
    names = list(dict.fromkeys(border.name for border in borders))
    if name not in names:
        raise ValueError(
            f"layout: the file has no input or output {name!r}{nearest(str(name), names)}; it has "
            f"{names}"
        )
    word = _known(word, f"layout of {name!r}")
    shapes = [border.tensor.shape_signature for border in borders if border.name == name]
    if all(len(shape) != len(word) for shape in shapes):
        raise ValueError(
            f"layout: {word!r} has {len(word)} dimensions, and {name!r} has "
            f"{len(shapes[0])} in the file: {list(shapes[0])}"
        )
    return {(name, len(word)): word}


def _of_rank(word: str, borders: Sequence[SignatureTensor]) -> dict[Any, str]:
    found = {
        (border.name, len(word)): word
        for border in borders
        if len(border.tensor.shape_signature) == len(word)
    }
    if not found:
        shapes = {border.name: list(border.tensor.shape_signature) for border in borders}
        raise ValueError(
            f"layout: no input or output of the file has the {len(word)} dimensions of {word!r}: "
            f"{shapes}"
        )
    return found


def _known(word: Any, where: str) -> str:
    if not isinstance(word, str):
        raise TypeError(
            f"{where}: expected one of {', '.join(LAYOUTS)}, or a dict of them by the names of "
            f"inputs and outputs, got {word!r}"
        )
    if word not in LAYOUTS:
        raise ValueError(
            f"{where}: unknown layout {word!r}{nearest(word, LAYOUTS)}; valid: {', '.join(LAYOUTS)}"
        )
    return word


def _move(word: str) -> tuple[int, int]:
    """Where the reference keeps the channels, and where the file does."""
    return (1, len(word) - 1) if word.endswith("c") else (len(word) - 1, 1)


def _turned(shape: Sequence[int], source: int, target: int) -> tuple[int, ...]:
    lengths = list(shape)
    lengths.insert(target, lengths.pop(source))
    return tuple(lengths)


def mismatch_hint(reference: Sequence[int], file: Sequence[int]) -> str:
    """Give what to pass where two shapes differ in the place of the channels only, else nothing."""
    words = [
        word
        for word in LAYOUTS
        if len(word) == len(reference) == len(file)
        and _fits(_turned(reference, *_move(word)), file)
    ]
    if not words:
        return ""
    ways = " or ".join(
        f'layout="{word}" if the file keeps them '
        + ("last and the reference first" if word.endswith("c") else "first and the reference last")
        for word in words
    )
    return f"; only the place of the channels differs, and nothing is turned unasked: pass {ways}"


def _fits(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    return all(length in (-1, actual) for length, actual in zip(wanted, shape, strict=True))
