"""
Every small model under every quantizer is as `cells.json` records it.

A cell that changed fails with the model, the flow, and what was and is. Each model is measured
under the default preset and one of the other flows, which take turns, most of them with `-m full`;
`python -m tests.bench.models.table` measures all of them anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from fixtures.models import TwinLists, samples, seeded
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.names import PRESETS
from tests.bench.models import cells, flatbuffer, measure, table
from tests.bench.models.cells import Cell
from tests.bench.models.measure import FLOWS, Measured, Worker

# A model in each flow, each of which has 300 s.
pytestmark = pytest.mark.timeout(600)

DATA = cells.load()
TABLE: cells.Table = DATA["cells"]
QUICK = ("pt2e_static_int8",)
TURNS = 12


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """Give the process that measures."""
    worker = Worker()
    yield worker
    worker.close()


@pytest.mark.sweep(0, slow=21)
@pytest.mark.parametrize("model", table.models())
def test_the_default_preset_is_as_recorded(worker: Worker, model: str) -> None:
    """What a user gets who names no quantizer."""
    check(worker, model, QUICK)


@pytest.mark.sweep(0, slow=13)
@pytest.mark.parametrize(
    ("model", "turn"), list(zip(table.models(), itertools.cycle(range(TURNS)), strict=False))
)
def test_other_flows_are_as_recorded(worker: Worker, model: str, turn: int) -> None:
    """Each of them with every twelfth model."""
    check(worker, model, [flow for flow in FLOWS if flow not in QUICK][turn::TURNS])


def check(worker: Worker, model: str, flows: Any) -> None:
    """Measure a model in some flows; fail with all that differs from the record."""
    records = {flow: TABLE[model][flow] for flow in flows}
    found = worker.measure(model, list(records))
    told = [
        line
        for flow, record in records.items()
        for line in complaint(model, flow, record, found[flow])
    ]
    n_cells = len([line for line in told if line.startswith(model)])
    assert not told, "\n".join(
        [
            f"{model}: {n_cells} of {len(flows)} cells are not as recorded",
            *told,
            f"if it is meant: python -m tests.bench.models.table {model}; review cells.json",
        ]
    )


def complaint(model: str, flow: str, record: Cell, found: Measured) -> list[str]:
    """Say what of a cell is not as recorded: nothing where it stands."""
    lines = cells.differences(record, found.cell)
    if not lines and not found.failures:
        return []
    return [
        f"{model} × {flow}:",
        *(f"  {line}" for line in (*lines, *found.failures)),
        f"  what it means: {cells.means(record, found.cell)}",
        f"  not {FLOWS[flow].promise} now:",
        *(f"    {line}" for line in found.listing[:10]),
    ]


def test_the_table_has_every_model_and_every_flow() -> None:
    """A preset or a model that is added without a cell is not tested."""
    assert list(TABLE) == table.models()
    assert {flow for row in TABLE.values() for flow in row} == set(FLOWS)
    assert all(len(row) == len(FLOWS) for row in TABLE.values())
    assert set(PRESETS) <= set(FLOWS)


def test_the_page_is_up_to_date() -> None:
    """What README links to says what `cells.json` says."""
    assert table.PAGE.read_text(encoding="utf-8") == table.page(DATA), (
        "the page is not what the data gives: python -m tests.bench.models.table --page"
    )


def test_a_verdict_is_what_the_ops_say() -> None:
    """A cell that names its promise has not one op of another scheme."""
    whole = 0
    for row in TABLE.values():
        for flow, cell in row.items():
            promise = FLOWS[flow].promise
            assert cell["verdict"] == cells.verdict(cell, promise)
            if cell["verdict"] == promise:
                whole += 1
                assert set(cell["ops"]) <= {promise, "integer"}
    # int8 and float stand for most of them; the table is not one of exceptions.
    assert whole > 100


def test_figures_are_clear_of_the_ends_of_their_class() -> None:
    """A kernel's rounding moves no cell to another class."""
    near = [
        f"{model} × {flow}: {cell['sqnr_db']} dB"
        for model, row in TABLE.items()
        for flow, cell in row.items()
        if cell["verdict"] != "error" and not cells.is_clear(cell["sqnr_db"])
    ]
    assert not near


def test_every_wrong_number_has_a_note() -> None:
    """A file that computes something else is explained by a reviewer, or it is not looked at."""
    bare = [
        f"{model} × {flow}"
        for model, row in TABLE.items()
        for flow, cell in row.items()
        if cell.get("numbers") == "wrong" and not cell.get("note")
    ]
    assert not bare


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Edgeq:
    """Quantize in this process."""
    return Edgeq(directory=tmp_path_factory.mktemp("models"))


def _observed(quantized: QuantizedModel, flow: str, like: Cell) -> Cell:
    numbers = {key: like[key] for key in ("numbers", "sqnr_db")}
    return {**measure.observe(quantized, FLOWS[flow].promise), **numbers}


@pytest.fixture(scope="module")
def with_float_add(maker: Edgeq) -> QuantizedModel:
    """Give what the whole table is about: a file whose ADD stayed in float without a word."""
    return maker.quantize(
        seeded(TwinLists),
        TwinLists.sample_inputs(),
        calibration=samples(TwinLists, 8),
        strict_export=False,
    )


@pytest.mark.slow
def test_an_op_in_float_fails_an_int8_cell(with_float_add: QuantizedModel) -> None:
    """The comparison of cells and the second reading each find it."""
    record = TABLE["TwinLists"]["pt2e_static_int8"]
    assert record["verdict"] == "int8"
    found = _observed(with_float_add, "pt2e_static_int8", record)
    assert found["verdict"] == "partly int8"
    told = complaint("TwinLists", "pt2e_static_int8", record, Measured(found, ["ADD: …"], []))
    assert "  verdict: int8 → partly int8" in told
    assert "  ADD: 1 int8 → 1 float" in told
    floats = [op.op for op in flatbuffer.read(with_float_add.tflite) if op.scheme == "float"]
    assert floats == ["ADD", "TRANSPOSE"]


def test_a_table_is_written_as_it_is_read() -> None:
    """A line a cell, and nothing lost."""
    text = cells.dump(DATA["versions"], TABLE)
    assert text == cells.PATH.read_text(encoding="utf-8")
    assert text.count("\n") == sum(len(row) + 2 for row in TABLE.values()) + 6 - 1
