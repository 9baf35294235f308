"""
A text of the changes between two op-dtype maps.

Line one is the most important change, because pytest's short summary shows nothing else. Then
follow the ops that changed, appeared and disappeared, and why it matters.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pytest_edgeq.baselines.align import Pair, Row, align, fields
from pytest_edgeq.numerics.findings import (
    FILE,
    OP_DTYPES_CHANGED,
    DiffKind,
    DiffLine,
    DiffPart,
    Finding,
    Place,
    counted,
)
from pytest_edgeq.tflite.ops import QDQ

_SHOWN_ROWS: Final = 10
_SHOWN_PLACES: Final = 6
_QDQ_RANK: Final = 10
_FIELDS: Final = ("op", "scheme", "inputs", "weight", "granularity", "bias", "outputs", "subgraph")

_EFFECT_FLOAT: Final = (
    "effect: an op in float costs time, memory and conversions on an integer target, and "
    "a target without float kernels refuses the model."
)
_EFFECT_IO: Final = (
    "effect: the code that calls the model fills and reads these buffers by dtype, shape "
    "and position."
)
_EFFECT_GPU: Final = (
    "effect: tensors between ops on the GPU and on the CPU are copied in every run, and an app "
    "that asks for the GPU alone loads no file with ops on the CPU."
)
_EFFECT: Final = (
    "effect: the file still converts and runs, but not in the way that was accepted; "
    "accuracy, size and the kernels on the target may differ."
)


class _Group(NamedTuple):
    """Ops that changed in the same way; `text` describes it, after the op's name."""

    rank: int
    text: str
    pairs: list[Pair]


def describe_change(
    old: Mapping[str, Any], new: Mapping[str, Any], *, sides: tuple[str, str] = ("stored", "now")
) -> Finding | None:
    """
    Return how two op-dtype maps differ; None where nothing does.

    The torch module of an op counts for nothing: renaming an attribute changes no file. dtype,
    granularity, scheme, op, order, inputs and outputs all count.
    """
    io_changes = [
        change
        for part in ("inputs", "outputs")
        for change in _io_changes(part[:-1], old[part], new[part])
    ]
    others = [
        f"{key} went from {_value(old.get(key))} to {_value(new.get(key))}"
        for key in sorted({*old, *new} - {"inputs", "outputs", "ops"})
        if key not in old or key not in new or old[key] != new[key]
    ]
    before, after = old["ops"], new["ops"]
    if old.get("delegation") != new.get("delegation"):
        # Of another runtime: one change, not one of each op.
        before, after = (
            [{key: row[key] for key in row if key != "delegation"} for row in rows]
            for rows in (before, after)
        )
    ops = _OpChanges(before, after)
    if not (ops.alignment.size or io_changes or others):
        return None
    diff = [*ops.table(sides), *ops.came_and_went(sides[0])]
    if io_changes:
        diff.append(_line("inputs and outputs:", kind="heading"))
        diff += [_line(f"  {change}", kind="changed") for change in io_changes]
    diff += map(_line, others)
    effect = _EFFECT_FLOAT if ops.to_float else _EFFECT_IO if io_changes else _EFFECT
    effect = _EFFECT_GPU if effect is _EFFECT and ops.delegated else effect
    return Finding(
        kind=OP_DTYPES_CHANGED,
        place=FILE,
        headline=ops.first_line([*others, *io_changes]),
        diff=tuple(diff),
        evidence=(effect,),
    )


class _OpChanges:
    """The changes between two lists of ops, and how they are described."""

    def __init__(self, old: Sequence[Row], new: Sequence[Row]) -> None:
        self.old, self.new = old, new
        self.alignment = align(old, new)
        self._changed = [(old[before], new[after]) for before, after in self.alignment.changed]
        ways: dict[tuple[int, str], list[Pair]] = defaultdict(list)
        for pair, rows in zip(self.alignment.changed, self._changed, strict=True):
            ways[_way(*rows)].append(pair)
        groups = []
        for (rank, text), pairs in ways.items():
            only_qdq = all(new[after]["op"] in QDQ for _, after in pairs)
            groups.append(_Group(rank + _QDQ_RANK * only_qdq, text, pairs))
        # The most telling way first.
        self._groups = sorted(groups, key=lambda each: (each.rank, -len(each.pairs), each.pairs[0]))

    @property
    def to_float(self) -> bool:
        """Whether an op computes in float that did not before, or appeared so."""
        changed = (was["scheme"] != "float" == now["scheme"] for was, now in self._changed)
        return bool(self._new_floats) or any(changed)

    @property
    def delegated(self) -> bool:
        """Whether an op runs elsewhere than before, GPU or CPU."""
        return any(was.get("delegation") != now.get("delegation") for was, now in self._changed)

    @property
    def _new_floats(self) -> list[int]:
        """Ops that appeared and compute in float, in a file that does not throughout."""
        if all(row["scheme"] in ("float", "integer") or row["op"] in QDQ for row in self.new):
            return []
        appeared = ((index, self.new[index]) for index in self.alignment.appeared)
        return [i for i, row in appeared if row["scheme"] == "float" and row["op"] not in QDQ]

    def first_line(self, others: Sequence[str]) -> str:
        floats = len(self._new_floats)
        moved = [after for _, after in self.alignment.moved]
        came_and_went = [
            f"{_several(rows, indices)} {verb}"
            for verb, rows, indices in (
                (
                    f"appeared, {floats} in float" if floats else "appeared",
                    self.new,
                    self.alignment.appeared,
                ),
                ("disappeared", self.old, self.alignment.disappeared),
                ("moved", self.new, moved),
            )
            if indices
        ]
        # QUANTIZE and DEQUANTIZE follow from other changes, which are shown first.
        shown = [group for group in self._groups if group.rank < _QDQ_RANK][:2]
        if not (shown or others or came_and_went):
            shown = list(self._groups[:1])
        parts = [self._group_text(group) for group in shown]
        if others:
            more = counted(len(others) - 1, "more such change")
            parts.append(others[0] + (f" ({more})" if others[1:] else ""))
        parts += came_and_went
        if left := len(self.alignment.changed) - sum(len(group.pairs) for group in shown):
            parts.append(f"{counted(left, 'more op')} changed")
        return "; ".join(parts)

    def _group_text(self, group: _Group) -> str:
        counts = Counter(self.old[before]["op"] for before, _ in group.pairs)
        (op, count), *more = counts.most_common()
        if more:
            return f"{_several(self.old, [before for before, _ in group.pairs])}{group.text}"
        places = [_place(self.new, after) for _, after in group.pairs[:2]]
        if count == 1:
            return f"{places[0]._replace(name=op)}{group.text}"
        shown = ", ".join(each.module or each.number for each in places)
        return f"{count} {op} ({shown}{', …' if count > 2 else ''}){group.text}"

    def table(self, sides: tuple[str, str]) -> list[DiffLine]:
        """Return a table of the ops that changed, the most important first."""
        if not self.alignment.changed:
            return []
        pairs = [pair for group in self._groups for pair in group.pairs]
        rows = [[[DiffPart(text)] for text in ("op", "module", " → ".join(sides))]]
        for before, after in pairs[:_SHOWN_ROWS]:
            old, new = self.old[before], self.new[after]
            name = str(_place(self.new, after)._replace(module=None))
            rows.append([[DiffPart(name)], _modules(old, new), _field_changes(old, new)])
        widths = [max(_length(row[column]) for row in rows) for column in range(2)]
        lines = [_line(f"changed ops ({len(pairs)} of {len(self.new)}):", kind="heading")]
        for *columns, change in rows:
            parts = [DiffPart("  ")]
            for cell, width in zip(columns, widths, strict=True):
                parts += [*cell, DiffPart(" " * (width - _length(cell) + 2))]
            lines.append(_line(*parts, *change, kind="changed" if lines[1:] else "plain"))
        return [*lines, *_hidden(len(pairs))]

    def came_and_went(self, old_side: str) -> list[DiffLine]:
        lines = []
        listed: tuple[tuple[str, DiffKind, Sequence[Row], list[int]], ...] = (
            ("appeared", "added", self.new, self.alignment.appeared),
            (
                f"disappeared (numbers of the {old_side} map)",
                "removed",
                self.old,
                self.alignment.disappeared,
            ),
        )
        for verb, kind, rows, indices in listed:
            if indices:
                by_op: dict[str, list[int]] = defaultdict(list)
                for index in indices:
                    by_op[rows[index]["op"]].append(index)
                kinds = sorted(by_op.items(), key=lambda item: (item[0] in QDQ, -len(item[1])))
                lines.append(_line(f"{verb}:", kind="heading"))
                lines += [_line(f"  {len(i)} {op}: {_some(rows, i)}", kind=kind) for op, i in kinds]
        if self.alignment.moved:
            lines.append(_line("moved:", kind="heading"))
            for before, after in self.alignment.moved[:_SHOWN_ROWS]:
                here, there = _place(self.old, before), _place(self.new, after)
                parts = _went(here.number, there.number)
                lines.append(_line(f"  {there}: ", *parts, kind="changed"))
            lines += _hidden(len(self.alignment.moved))
        return lines


def _way(old: Row, new: Row) -> tuple[int, str]:
    """Return how an op changed: a rank (lower is more important), and the text after its name."""
    if old["op"] != new["op"]:
        return 0, f" became {new['op']}"
    if old["scheme"] != new["scheme"]:
        before, after = _computes_in(old), _computes_in(new)
        rank = 0 if new["scheme"] == "float" else 1
        if before == after:
            return rank, f": scheme went from {old['scheme']} to {new['scheme']}"
        return rank, f" went from {before} to {after}"
    if old.get("delegation") != new.get("delegation"):
        # Supported ops follow others to the CPU.
        rank = 2 if ": supported, " in new["delegation"] else 1
        return rank, f": {old['delegation']} → {new['delegation']}"
    for key in ("weight", "granularity"):
        if old[key] != new[key]:
            return 2, f": weight went from {_weight(old)} to {_weight(new)}"
    for key in (*_FIELDS, *sorted(set(old) | set(new))):
        if key != "module" and old.get(key) != new.get(key):
            name = key[:-1] if key in ("inputs", "outputs") else key
            return 3, f": {name} went from {_value(old.get(key))} to {_value(new.get(key))}"
    raise AssertionError("unreachable, because only ops that differ are listed")


def _computes_in(row: Row) -> str:
    """Return the computation dtype of an op for texts, or the scheme if it is hybrid."""
    if row["scheme"] not in ("float", "integer"):
        return str(row["scheme"])
    dtypes = [*row["outputs"], *row["inputs"]]
    return str(dtypes[0]) if dtypes else str(row["scheme"])


def _weight(row: Row) -> str:
    return " ".join(str(row[key]) for key in ("weight", "granularity") if row[key]) or "none"


def _several(rows: Sequence[Row], indices: Sequence[int]) -> str:
    """Count ops by name: `2 DEQUANTIZE and 1 QUANTIZE`, `12 ops (4 ADD, 3 MUL, …)`."""
    if len(indices) == 1:
        return str(_place(rows, indices[0]))
    counts = Counter(rows[index]["op"] for index in indices).most_common()
    # What becomes of QUANTIZE and DEQUANTIZE follows from the others.
    counts.sort(key=lambda each: each[0] in QDQ)
    counted = [f"{count} {op}" for op, count in counts]
    if len(counted) <= 2:
        return " and ".join(counted)
    return f"{sum(count for _, count in counts)} ops ({counted[0]}, {counted[1]}, …)"


def _hidden(count: int) -> list[DiffLine]:
    more = count - _SHOWN_ROWS
    return [_line(f"  … and {more} more", kind="changed")] if more > 0 else []


def _length(cell: Sequence[DiffPart]) -> int:
    return sum(len(part.text) for part in cell)


def _modules(old: Row, new: Row) -> list[DiffPart]:
    before, after = old["module"] or "-", new["module"] or "-"
    return [DiffPart(after)] if before == after else _went(before, after)


def _field_changes(old: Row, new: Row) -> list[DiffPart]:
    more = sorted({*fields(old), *fields(new)} - set(_FIELDS))
    parts: list[DiffPart] = []
    for key in (*_FIELDS, *more):
        if old.get(key) != new.get(key):
            parts.append(DiffPart(f"; {key} " if parts else f"{key} "))
            parts += _went(_value(old.get(key)), _value(new.get(key)))
    return parts


def _went(old: str, new: str) -> list[DiffPart]:
    return [DiffPart(old, "old"), DiffPart(" → "), DiffPart(new, "new")]


def _line(*parts: DiffPart | str, kind: DiffKind = "plain") -> DiffLine:
    return DiffLine(
        tuple(DiffPart(part) if isinstance(part, str) else part for part in parts), kind
    )


def _some(rows: Sequence[Row], indices: Sequence[int]) -> str:
    """List ops of one name, without it."""
    places = [_place(rows, index) for index in indices[:_SHOWN_PLACES]]
    shown = ", ".join(str(each).removeprefix(f"{each.name} ") for each in places)
    hidden = len(indices) - _SHOWN_PLACES
    return f"{shown} and {hidden} more" if hidden > 0 else shown


def _io_changes(side: str, old: Sequence[Row], new: Sequence[Row]) -> list[str]:
    """Return the changes of the inputs or the outputs of a model."""
    before, after = [_io_key(row) for row in old], [_io_key(row) for row in new]
    if before == after or (
        # No name is left, and the number is equal: they were renamed, not replaced.
        len(before) == len(after) and not set(before) & set(after)
    ):
        pairs = list(zip(old, new, strict=True))
        return [change for pair in pairs for change in _io_change(side, *pair)]
    changes = []
    by_key = {_io_key(row): row for row in new}
    for row in old:
        if (twin := by_key.get(_io_key(row))) is None:
            changes.append(f"{side} {row['name']!r} ({row['dtype']}) disappeared")
        else:
            changes += _io_change(side, row, twin)
    changes += [
        f"{side} {row['name']!r} ({row['dtype']}) appeared"
        for row in new
        if _io_key(row) not in before
    ]
    common = [key for key in before if key in after]
    if common != [key for key in after if key in before]:
        names = [", ".join(str(row["name"]) for row in rows) for rows in (old, new)]
        changes.append(f"the order of the {side}s went from {names[0]} to {names[1]}")
    if not changes:
        changes.append(f"the number of {side}s went from {len(old)} to {len(new)}")
    return changes


def _io_key(row: Row) -> Hashable:
    return row.get("signature"), row["name"]


def _io_change(side: str, old: Row, new: Row) -> list[str]:
    changes = []
    if old["name"] != new["name"]:
        changes.append(f"{side} {old['name']!r} is now named {new['name']!r}")
    # The dtype comes first: it is what the caller's code breaks on.
    for key in ("dtype", *sorted({*old, *new} - {"dtype", "name"})):
        if old.get(key) != new.get(key):
            what = "" if key == "dtype" else f": {key}"
            changes.append(
                f"{side} {new['name']!r}{what} went from {old.get(key)} to {new.get(key)}"
            )
    return changes


def _place(rows: Sequence[Row], index: int) -> Place:
    """Return the place of an op; rows are those of all subgraphs, one behind the other."""
    row = rows[index]
    number = sum(each["subgraph"] == row["subgraph"] for each in rows[:index])
    return Place("op", row["op"], number, row["module"], row["subgraph"])


def _value(value: object) -> str:
    """Show a field's value: dtypes without brackets and quotes."""
    if isinstance(value, list):
        words = [str(part) for part in value]
        if len(words) > 2 and len(set(words)) == 1:
            return f"{len(words)} × {words[0]}"
        return ", ".join(words) or "none"
    return "none" if value is None else str(value)
