"""Other plugins that store data take the plain dict of a map."""

from __future__ import annotations

import pytest

from tests.projects import Project

OP = {
    "subgraph": 0,
    "op": "FULLY_CONNECTED",
    "module": "fc",
    "inputs": ["int8"],
    "weight": "int8",
    "bias": "int32",
    "outputs": ["int8"],
    "granularity": "per_channel",
    "scheme": "int8",
}
SIDE = [{"name": "x", "dtype": "int8", "shape": [1, 8]}]
OP_MAP = {"inputs": SIDE, "outputs": SIDE, "ops": [OP]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "store"),
    [
        ("def test_it(snapshot): assert OP_MAP == snapshot", "--snapshot-update"),
        ("def test_it(data_regression): data_regression.check(OP_MAP)", "--regen-all"),
    ],
    ids=["syrupy", "pytest-regressions"],
)
def test_the_map_works_with_other_snapshot_plugins(
    project: Project, monkeypatch: pytest.MonkeyPatch, test: str, store: str
) -> None:
    """It is stored and compared by the neighbours, with our plugin loaded."""
    for variable in ("PYTEST_ADDOPTS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD"):  # which leave them out
        monkeypatch.delenv(variable)
    head = f"OP_MAP = {OP_MAP!r}\n"
    ignore = ("-W", "ignore")
    project.run(*ignore, files=f"{head}\n{test}\n", process=True, ret=1)
    project.run(*ignore, store, process=True)
    project.run(*ignore, process=True, passed=1, shows="edgeq: *")
    other = f"{head}OP_MAP['ops'][0]['weight'] = 'int4'\n\n{test}\n"
    project.run(*ignore, files=other, process=True, failed=1)
