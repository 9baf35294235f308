"""One damaged file, known by its kind, a seed and a number."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from tests.faults.json_mutations import dump, mutate_json, mutate_value
from tests.faults.mutations import mutate_bytes, mutate_tflite
from tests.faults.seeds import tflite_seeds

KINDS = ("tflite", "baseline", "cache", "report")
"""What is damaged: a model, a baseline, an entry of the conversion cache, the record of a run."""


@dataclass(frozen=True, slots=True)
class Case:
    """A damaged file."""

    number: int
    origin: str  # name of the sound file
    damage: str  # what was done to it
    content: bytes = b""
    parts: dict[str, bytes] | None = None  # of an entry of the cache, whose own hashes are right


def case_of(kind: str, seed: str, number: int) -> Case:
    """Return a case, the same in every process and on every machine."""
    dice = random.Random(f"{kind} {seed} {number}")
    if kind == "tflite":
        seeds = tflite_seeds()
        # Each origin in turn, so that any run of numbers tries all of them alike.
        origin = sorted(seeds)[number % len(seeds)]
        content, damage = mutate_tflite(seeds[origin], dice)
        return Case(number, origin, damage, content)
    # Not for `.tflite` files, whose workers need not import torch.
    from tests.faults import stored_seeds

    if kind == "cache":
        entries = stored_seeds.cache_seeds()
        origin = sorted(entries)[number % len(entries)]
        parts, damage = _mutate_parts(entries[origin], dice)
        return Case(number, origin, damage, parts=parts)
    files = stored_seeds.baseline_seeds() if kind == "baseline" else stored_seeds.report_seeds()
    origin = sorted(files)[number % len(files)]
    content, damage = mutate_json(files[origin], dice)
    return Case(number, origin, damage, content)


def _mutate_parts(parts: dict[str, bytes], dice: random.Random) -> tuple[dict[str, bytes], str]:
    """Damage a part of an entry, or drop it."""
    name = dice.choice(sorted(parts))
    if dice.random() < 0.05:
        return {key: part for key, part in parts.items() if key != name}, f"no {name}"
    if parts[name][:1] in (b"{", b"[") and dice.random() < 0.8:
        value, damage = mutate_value(json.loads(parts[name]), dice)
        made = dump(value)
    else:
        made, damage = mutate_bytes(parts[name] or b"\0", dice)
    return {**parts, name: made}, f"{name}: {damage}"
