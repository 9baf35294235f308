"""
The table's cells: what is recorded of a model in a flow, and how two such records differ.

A cell is plain data, one line of `cells.json`:

- `verdict`: the scheme that the flow promises, if every op but QUANTIZE, DEQUANTIZE and those on
  integers such as indices is of that scheme; else `partly …`, `not …`, or `error`;
- `ops`: how many of which op, by scheme; `borders`: how many QUANTIZE and DEQUANTIZE;
- `weights`: how they are stored, by op;
- `inputs`, `outputs`: dtypes at the file's borders;
- `numbers`: how near the file is to torch, see `NUMBERS`; `blame`: the stage that lost them;
  `sqnr_db` is what was measured, for the reader: it is not asserted;
- `warns`: the model was exported non-strictly, with a warning;
- of an error `raises` (its class), `upstream` (the class of the error that it wraps; null where
  pytest-edgeq refuses by itself) and `says` (words that its text must hold);
- `note`: a reviewer's sentence; kept while the cell stands.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

Cell = dict[str, Any]
Table = dict[str, dict[str, Cell]]

PATH = Path(__file__).with_name("cells.json")
BORDERS = ("QUANTIZE", "DEQUANTIZE")

NUMBERS = {"wrong": -math.inf, "close": 3.0, "exact": 70.0}
"""
Classes of the worst output's SQNR in dB, by their lower ends.

Float gives 130 dB and more, the schemes 5 (ranges that are averaged over samples of a few numbers
clip) to 64; a file that computes something else 1 or less.
"""

# Figures move with kernels and seeds. A recorded one stays so far from the ends of its class, and a
# measured one may lie so far beyond.
CLEARANCE_DB = 2.0
SLACK_DB = 1.5


def verdict(cell: Cell, promise: str) -> str:
    """Tell what a cell says of the promise of its flow."""
    if "raises" in cell:
        return "error"
    schemes = set(cell["ops"]) - {"integer"}
    if schemes == {promise}:
        return promise
    return f"{'partly' if promise in schemes else 'not'} {promise}"


def number_class(sqnr_db: float) -> str:
    """Give the class of a figure; NaN is wrong."""
    return [name for name, low in NUMBERS.items() if name == "wrong" or sqnr_db >= low][-1]


def is_of_class(name: str, sqnr_db: float) -> bool:
    """Whether a figure is of a class, or hardly beyond its ends."""
    return name in {number_class(sqnr_db - SLACK_DB), number_class(sqnr_db + SLACK_DB)}


def is_clear(sqnr_db: float) -> bool:
    """Whether a recorded figure is far enough from the ends of its class."""
    return number_class(sqnr_db - CLEARANCE_DB) == number_class(sqnr_db + CLEARANCE_DB)


def load(path: Path = PATH) -> dict[str, Any]:
    """Read `versions` and `cells`."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def dump(versions: dict[str, str], cells: Table) -> str:
    """Write a line a cell, so that a diff shows which have changed."""
    models = ",\n".join(
        f"  {json.dumps(model)}: {{\n"
        + ",\n".join(
            f"   {json.dumps(flow)}: {json.dumps(_recorded(cell), ensure_ascii=False)}"
            for flow, cell in row.items()
        )
        + "\n  }"
        for model, row in cells.items()
    )
    return f'{{\n "versions": {json.dumps(versions)},\n "cells": {{\n{models}\n }}\n}}\n'


def _recorded(cell: Cell) -> Cell:
    """Without the whole text of an error, which holds paths and addresses."""
    return {key: value for key, value in cell.items() if key != "text"}


def differences(was: Cell, now: Cell) -> list[str]:
    """Compare a recorded cell with a measured one."""
    if was["verdict"] == "error" or now["verdict"] == "error":
        return _differences_of_errors(was, now)
    lines = []
    if was["verdict"] != now["verdict"]:
        lines.append(f"verdict: {was['verdict']} → {now['verdict']}")
    before, after = _by_op(was), _by_op(now)
    for op in sorted({*before, *after}):
        if before.get(op) != after.get(op):
            lines.append(f"{op}: {before.get(op, 'none')} → {after.get(op, 'none')}")
    for key in ("weights", "borders", "inputs", "outputs", "warns", "blame"):
        if was.get(key) != now.get(key):
            lines.append(f"{key}: {_told(was.get(key))} → {_told(now.get(key))}")
    if not is_of_class(was["numbers"], now["sqnr_db"]):
        lines.append(
            f"numbers: {was['numbers']} ({was['sqnr_db']} dB) → {now['numbers']} "
            f"({now['sqnr_db']} dB)"
        )
    return lines


def _differences_of_errors(was: Cell, now: Cell) -> list[str]:
    if was["verdict"] != now["verdict"]:
        return [f"verdict: {_short(was)} → {_short(now)}"]
    lines = [
        f"{key}: {was[key]} → {now[key]}" for key in ("raises", "upstream") if was[key] != now[key]
    ]
    if was["says"] not in now["text"]:
        lines.append(f"says: {was['says']!r} → {now['says']!r}")
    return lines


def _short(cell: Cell) -> str:
    if cell["verdict"] != "error":
        return str(cell["verdict"])
    return f"error, {cell['upstream'] or cell['raises']}: {cell['says']}"


def _by_op(cell: Cell) -> dict[str, str]:
    schemes: dict[str, list[str]] = {}
    for scheme, ops in cell["ops"].items():
        for op, count in ops.items():
            schemes.setdefault(op, []).append(f"{count} {scheme}")
    return {op: " and ".join(sorted(told)) for op, told in schemes.items()}


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(value)
    return "none" if value is None else str(value)


def means(was: Cell, now: Cell) -> str:
    """Say in a sentence what a change of a cell means for those who read the table."""
    if now["verdict"] == "error" and was["verdict"] != "error":
        return "what was converted is refused now: a regression, here or upstream"
    if was["verdict"] == "error" and now["verdict"] != "error":
        return "what was refused is converted now: look whether the refusal, or a shim, can go"
    if now["verdict"] == "error":
        return "it is still refused, in other words: look whether they still teach"
    if now["numbers"] == "wrong" != was["numbers"]:
        return "the file computes something else than torch: the worst that a release can bring"
    if was["verdict"] != now["verdict"] and not was["verdict"].startswith(("partly", "not")):
        return "an op has left the promised scheme: the file that was whole is no longer"
    if was["verdict"] != now["verdict"]:
        return "ops have joined the promised scheme, or fewer are left of it"
    return "the converter or the quantizer fuses, splits or places ops otherwise than before"
