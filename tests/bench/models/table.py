"""
What becomes of every small model under every quantizer: the table's data and its page.

    python -m tests.bench.models.table               measures all of it anew (minutes)
    python -m tests.bench.models.table ResidualNet   measures the rows of some models
    python -m tests.bench.models.table --page        writes the page alone

Both files that it writes, `cells.json` and `README.md`, are to be reviewed: the diff of the first
has a line a cell.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from tests.bench.models import cells
from tests.bench.models.cells import Cell, Table
from tests.bench.models.measure import FLOWS, Worker

PAGE = Path(__file__).with_name("README.md")
_LIBRARIES = ("torch", "litert-torch", "ai-edge-litert", "torchao", "ai-edge-quantizer")

# Ops that hold weights: one of them left in float costs most.
_WEIGHTED = ("CONV_", "DEPTHWISE_CONV_", "EMBEDDING_LOOKUP", "FULLY_CONNECTED", "TRANSPOSE_CONV")

_HEAD = """\
<!-- written by `python -m tests.bench.models.table`; what stands here is measured, not promised -->
# Every model under every quantizer

What becomes of the small models of [`fixtures/models`](../../../fixtures/models) in each flow, read
from the files. `test_models_table.py` measures every cell anew and fails where one has changed.

Measured with {versions}.
`python -m tests.bench.models.table` writes this page and its data, [`cells.json`](cells.json).

| word | meaning |
| --- | --- |
| `int8`, `int16x8`, `dynamic`, `weight_only`, `float` | every op is of that scheme, but for \
QUANTIZE and DEQUANTIZE, and for ops on integers such as indices |
| `int8`, float: … | the ops named stayed in float; in bold those that hold weights |
| error | refused, and by whom; the words stand below |
| wrong numbers | the file is converted and runs, and does not compute what torch does (less than \
3 dB SQNR): the stage that lost them is named |
| 17 dB | how near to torch the file is, SQNR of the worst output, where it is less than 20 dB |

Under `dynamic` and `weight_only` ops without weights compute in float by design.
"""


def models() -> list[str]:
    """Names of the rows, in the order of `fixtures.models.ALL`."""
    from fixtures.models import ALL

    return [model.__name__ for model in ALL]


def page(data: dict[str, object]) -> str:
    """Write the page from the data alone."""
    versions: dict[str, str] = data["versions"]  # type: ignore[assignment] # as `dump` wrote it
    table: Table = data["cells"]  # type: ignore[assignment] # as `dump` wrote it
    made = ", ".join(f"{name} {version}" for name, version in versions.items())
    parts = [_HEAD.format(versions=made)]
    for title, flows in _groups(list(FLOWS)).items():
        parts.append(f"\n## {title}\n\n")
        parts.append(_row(["model", *(f"`{flow}`" for flow in flows)]))
        parts.append(_row(["---"] * (len(flows) + 1)))
        for model, row in table.items():
            parts.append(_row([model, *(_brief(row[flow], flow) for flow in flows)]))
    parts.append("\n## Refused, and wrong\n\n")
    parts.append(_row(["flow", "model", "what", "words"]))
    parts.append(_row(["---"] * 4))
    for (where, *told), names in _alike(table).items():
        parts.append(_row([where, ", ".join(names), *told]))
    return "".join(parts)


def _groups(flows: list[str]) -> dict[str, list[str]]:
    titles = {
        "pt2e": "PT2E",
        "torchao": "torchao `quantize_`",
        "recipe": "Recipes",
        "None": "Float",
    }
    groups: dict[str, list[str]] = {}
    for flow in flows:
        groups.setdefault(titles[flow.split("_")[0]], []).append(flow)
    return groups


def _alike(table: Table) -> dict[tuple[str, ...], list[str]]:
    """Models by the flows in which the same is to be told of them, and by what that is."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for model, row in table.items():
        flows: dict[tuple[str, ...], list[str]] = {}
        for flow, cell in row.items():
            if cell["verdict"] == "error" or cell["numbers"] == "wrong" or "note" in cell:
                flows.setdefault(tuple(_long(cell)), []).append(f"`{flow}`")
        for told, names in flows.items():
            key = "all" if len(names) == len(row) else ", ".join(names)
            groups.setdefault((key, *told), []).append(model)
    return groups


def _row(columns: list[str]) -> str:
    return f"| {' | '.join(columns)} |\n"


def _brief(cell: Cell, flow: str) -> str:
    if cell["verdict"] == "error":
        return "error" if cell["upstream"] else "error (ours)"
    promise = FLOWS[flow].promise
    schemes = [promise, *sorted(set(cell["ops"]) - {promise, "integer"})]
    parts = []
    for scheme in schemes:
        ops = cell["ops"].get(scheme, {})
        if scheme == promise:
            parts.append(f"`{promise}`" if ops else f"no `{promise}`")
        else:
            parts.append(f"{scheme}: {', '.join(_op(op, n) for op, n in ops.items())}")
    if cell["numbers"] == "wrong":
        parts.append("**wrong numbers**")
    elif cell["sqnr_db"] < 20:
        parts.append(f"{cell['sqnr_db']:.0f} dB")
    return "; ".join(parts)


def _op(op: str, count: int) -> str:
    told = op if count == 1 else f"{count} {op}"
    return f"**{told}**" if op.startswith(_WEIGHTED) else told


def _long(cell: Cell) -> list[str]:
    note = cell.get("note", "")
    if cell["verdict"] == "error":
        words = f"“{cell['says']}”".replace("|", "\\|")
        who = f"{cell['upstream']} upstream" if cell["upstream"] else f"{cell['raises']}, ours"
        return [who, f"{words} {note}".strip()]
    if cell["numbers"] == "wrong":
        return [f"wrong numbers after {cell['blame']}", note]
    return ["", note]


def measured(names: list[str], old: Table) -> Table:
    """Measure rows anew, and keep what is not noise and what a reviewer wrote."""
    worker = Worker()
    table: Table = {}
    try:
        for name in models():
            if name not in names:
                if name in old:
                    table[name] = old[name]
                continue
            found = worker.measure(name, FLOWS)
            table[name] = {}
            for flow, each in found.items():
                was = old.get(name, {}).get(flow)
                table[name][flow] = _settled(was, each.cell)
                _tell(name, flow, was, each.cell, each.failures)
    finally:
        worker.close()
    return table


def _settled(was: Cell | None, now: Cell) -> Cell:
    """Give the cell as it was where it stands; figures and words that moved are noise."""
    return was if was is not None and not cells.differences(was, now) else now


def _tell(name: str, flow: str, was: Cell | None, now: Cell, failures: list[str]) -> None:
    lines = [*(cells.differences(was, now) if was else [f"new: {now['verdict']}"]), *failures]
    if now["verdict"] != "error" and not cells.is_clear(now["sqnr_db"]):
        lines.append(f"{now['sqnr_db']} dB is too near the end of a class")
    for line in lines:
        print(f"{name} × {flow}: {line}", flush=True)


def main(arguments: list[str]) -> None:
    """Write the data and the page."""
    data = cells.load() if cells.PATH.exists() else {"versions": {}, "cells": {}}
    if arguments != ["--page"]:
        unknown = set(arguments) - set(models())
        if unknown:
            sys.exit(f"no such model: {', '.join(sorted(unknown))}")
        table = measured(arguments or models(), data["cells"])
        versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
        cells.PATH.write_text(cells.dump(versions, table), encoding="utf-8")
        data = cells.load()
    PAGE.write_text(page(data), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
