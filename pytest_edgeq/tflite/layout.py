"""
Layouts: the channel axis of inputs and outputs in file and reference.

Samples, and the results of `run`, always have the reference's layout. They are permuted at the
inputs and outputs of the file, and only on request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pytest_edgeq.names import nearest
from pytest_edgeq.tflite.subgraph import Signature, SignatureTensor

LAYOUTS = ("nwc", "nhwc", "ndhwc", "ncw", "nchw", "ncdhw")
"""One letter a dimension: batch, channels, depth, height, width."""

LayoutArgument: TypeAlias = "str | Mapping[str, str] | None"


class Layouts:
    """The inputs and outputs of a file whose channel axis differs from the reference's."""

    def __init__(self, layout: LayoutArgument, signatures: Sequence[Signature]) -> None:
        shapes = [
            (each.name, each.tensor.shape_signature)
            for signature in signatures
            for each in (*signature.inputs, *signature.outputs)
        ]
        self._words: dict[tuple[str, int], str] = {}
        if isinstance(layout, Mapping):
            for name, word in layout.items():
                self._words |= _of_name(name, word, shapes)
        elif layout is not None:
            self._words = _of_rank(_known(layout, "layout"), shapes)

    def of(self, io_tensor: SignatureTensor) -> str | None:
        """Return the file's layout of an input or output; None if the reference's."""
        return self._words.get((io_tensor.name, len(io_tensor.tensor.shape_signature)))

    def axes(self, io_tensor: SignatureTensor) -> tuple[int, int] | None:
        """Return the channel axis in the reference and in the file; None if equal."""
        word = self.of(io_tensor)
        return None if word is None else _move(word)

    def shape(self, io_tensor: SignatureTensor) -> tuple[int, ...]:
        """Return a shape in the reference's layout, −1 for any length."""
        word, shape = self.of(io_tensor), io_tensor.tensor.shape_signature
        return shape if word is None else _permuted(shape, *reversed(_move(word)))

    def to_file(self, io_tensor: SignatureTensor, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a view of an input in the file's layout."""
        word = self.of(io_tensor)
        # Another number of dimensions is reported where shapes are checked.
        if word is None or value.ndim != len(word):
            return value
        return np.moveaxis(value, *_move(word))

    def from_file(self, io_tensor: SignatureTensor, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a view of an output in the reference's layout."""
        word = self.of(io_tensor)
        return value if word is None else np.moveaxis(value, *reversed(_move(word)))


UNTURNED = Layouts(None, ())
"""File and reference agree."""


_Shapes: TypeAlias = Sequence[tuple[str, tuple[int, ...]]]


def _of_name(name: str, word: Any, known: _Shapes) -> dict[Any, str]:
    names = list(dict(known))
    if name not in names:
        raise ValueError(
            f"layout: the file has no input or output {name!r}{nearest(str(name), names)}; it has "
            f"{names}"
        )
    word = _known(word, f"layout of {name!r}")
    shapes = [shape for each, shape in known if each == name]
    if all(len(shape) != len(word) for shape in shapes):
        raise ValueError(
            f"layout: {word!r} has {len(word)} dimensions, and {name!r} has "
            f"{len(shapes[0])} in the file: {list(shapes[0])}"
        )
    return {(name, len(word)): word}


def _of_rank(word: str, known: _Shapes) -> dict[Any, str]:
    found = {(name, len(word)): word for name, shape in known if len(shape) == len(word)}
    if not found:
        shapes = {name: list(shape) for name, shape in known}
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
    """Return the channel axis in the reference, and in the file."""
    return (1, len(word) - 1) if word.endswith("c") else (len(word) - 1, 1)


def _permuted(shape: Sequence[int], source: int, target: int) -> tuple[int, ...]:
    lengths = list(shape)
    lengths.insert(target, lengths.pop(source))
    return tuple(lengths)


def fits(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Return whether a shape agrees with that of a file, in which −1 is any length."""
    return len(shape) == len(wanted) and all(
        length in (-1, actual) for length, actual in zip(wanted, shape, strict=True)
    )


def mismatch_hint(reference: Sequence[int], file: Sequence[int]) -> str:
    """Suggest a layout if two shapes differ only in the channel axis, else nothing."""
    words = [
        word
        for word in LAYOUTS
        if len(word) == len(reference) and fits(_permuted(reference, *_move(word)), file)
    ]
    if not words:
        return ""
    ways = " or ".join(
        f'layout="{word}" if the file keeps them '
        + ("last and the reference first" if word.endswith("c") else "first and the reference last")
        for word in words
    )
    return (
        f"; only the place of the channels differs, and nothing is permuted by default: pass {ways}"
    )
