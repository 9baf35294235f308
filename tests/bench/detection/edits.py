"""Changes of files for several tests: each makes one, and gives the op that it is seen at."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from fixtures.models import SmallModel
from pytest_edgeq import Edgeq
from pytest_edgeq.localize.rows import LayerErrors
from tests.bench.detection.flatfile import FlatFile
from tests.localize.builds import Build, localized

Change = Callable[[FlatFile], int]
Defect = tuple[type[SmallModel], str | None, Change]


def localized_with(maker: Edgeq, build: Build, defect: Defect) -> tuple[int, LayerErrors]:
    """Where a model's file was changed, and what is told of it."""
    kind, flow, change = defect
    quantized = build(kind, flow)
    file = FlatFile(quantized.tflite)
    op = change(file)
    return op, localized(maker, quantized.with_tflite(file.content()), kind)


def ops_of(file: FlatFile, name: str = "FULLY_CONNECTED") -> list[int]:
    """The ops of a name, in execution order."""
    return [i for i in range(len(file.operators)) if file.name(i) == name]


def edited(file: FlatFile, op: int, operand: int, change: Callable[[np.ndarray], None]) -> None:
    """Change a copy of a constant that an op takes, and store it."""
    tensor = int(file.operators[op].inputs[operand])
    values = file.constant(tensor)
    assert values is not None
    values = values.copy()
    change(values)
    file.store(tensor, values)


def zeroed_channel(file: FlatFile, op: int, channel: int) -> None:
    """Wipe one channel of an op's weight."""

    def wipe(values: np.ndarray) -> None:
        values[channel] = 0

    edited(file, op, 1, wipe)


def rescaled(file: FlatFile, tensors: Iterable[int], factor: float) -> None:
    """Give tensors of one scale another one."""
    for tensor in tensors:
        parameters = file.tensor(tensor).quantization
        parameters.scale = [parameters.scale[0] * factor]


def moved_bias(place: int) -> Change:
    """Another value of one bias of an op, or, at −1, of what the first ADD adds for it."""

    def move(values: np.ndarray) -> None:
        values.flat[1] = -2 * values.flat[1]

    def change(file: FlatFile) -> int:
        op = place if place >= 0 else ops_of(file, "ADD")[0]
        edited(file, op, 2 if place >= 0 else 1, move)
        return op

    return change


def halved_row(place: int) -> Change:
    """A row of the weight of this linear layer, half as large."""

    def halve(values: np.ndarray) -> None:
        values[1] = values[1] // 2 if values.dtype == "int8" else values[1] / 2

    def change(file: FlatFile) -> int:
        op = ops_of(file)[place]
        edited(file, op, 1, halve)
        return op

    return change


def negated_row(name: str, place: int) -> Change:
    """A row of the weight of this op of a name, turned over."""

    def change(file: FlatFile) -> int:
        op = ops_of(file, name)[place]
        edited(file, op, 1, lambda values: np.negative(values[2], out=values[2]))
        return op

    return change
