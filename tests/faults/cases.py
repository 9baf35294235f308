"""One damaged file, known by a seed and a number."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.faults.mutations import mutate_tflite
from tests.faults.seeds import tflite_seeds


@dataclass(frozen=True, slots=True)
class Case:
    """A damaged file."""

    number: int
    origin: str  # name of the sound file
    damage: str  # what was done to it
    content: bytes


def case_of(seed: int, number: int) -> Case:
    """Return a case, the same in every process and on every machine."""
    dice = random.Random(f"tflite {seed} {number}")
    seeds = tflite_seeds()
    # Each origin in turn, so that any run of numbers tries all of them alike.
    origin = sorted(seeds)[number % len(seeds)]
    content, damage = mutate_tflite(seeds[origin], dice)
    return Case(number, origin, damage, content)
