from __future__ import annotations

import pytest

OP_MAP = {
    "inputs": [{"name": "x", "dtype": "int8", "shape": [1, 8]}],
    "outputs": [{"name": "y", "dtype": "int8", "shape": [1, 8]}],
    "ops": [
        {
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
    ],
}


@pytest.fixture(autouse=True)
def _with_neighbours(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the plugins in that these tests are about."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)


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
    pytester: pytest.Pytester, test: str, store: str
) -> None:
    """The plain dict of a map is stored and compared by the neighbours, with our plugin loaded."""
    pytester.makepyfile(f"OP_MAP = {OP_MAP!r}\n\n{test}\n")

    assert pytester.runpytest_subprocess("-W", "ignore").ret == pytest.ExitCode.TESTS_FAILED
    pytester.runpytest_subprocess("-W", "ignore", store)
    result = pytester.runpytest_subprocess("-W", "ignore")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["edgeq: *"])

    pytester.makepyfile(f"OP_MAP = {OP_MAP!r}\nOP_MAP['ops'][0]['weight'] = 'int4'\n\n{test}\n")
    pytester.runpytest_subprocess("-W", "ignore").assert_outcomes(failed=1)
