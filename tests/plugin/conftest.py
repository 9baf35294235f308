"""Projects for pytest to run on inside of a test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_edgeq.plugin.options.values import CI_VARIABLES
from tests.shared_cache import shared_cache

Run = Callable[..., pytest.RunResult]

# Other people's plugins make a run inside of a test slow, and pytest-randomly its order random,
# which is what some tests are about. pytest's own for exceptions in finalizers collects garbage
# five times in the end: 2 s among the objects of torch and jax.
_WITHOUT = (
    "anyio",
    "datadir",
    "hypothesispytest",
    "jaxtyping",
    "randomly",
    "regressions",
    "syrupy",
    "timeout",
    "unraisableexception",
)

_ROOT = Path(__file__).parents[2]

_CONVERTING = (
    "test_plugin_artifacts",
    "test_plugin_check",
    "test_plugin_end_to_end",
    "test_plugin_errors",
    "test_plugin_neighbours",
    "test_plugin_report",
    "test_plugin_runtimes",
    "test_plugin_tracebacks",
)

_CONFTEST = """
import os
import pytest
from pytest_edgeq.plugin.state import memory_of


def op_map(scheme):
    dtype = "float32" if scheme == "float" else scheme
    row = {
        "subgraph": 0, "op": "ADD", "module": "layer1.0", "inputs": [dtype, dtype],
        "weight": None, "bias": None, "outputs": [dtype], "granularity": None, "scheme": scheme,
    }
    side = [{"name": "x", "dtype": "int8", "shape": [1, 8]}]
    return {"inputs": side, "outputs": side, "ops": [row]}


@pytest.fixture(scope="session")
def remember(request):
    # What `edgeq.check_op_dtypes` does, without a model.
    def check(name="op_dtypes", scheme=None):
        __tracebackhide__ = True
        data = op_map(scheme or os.environ.get("SCHEME", "int8"))
        memory_of(request.config).check("op_dtype_map", name, data)

    return check
"""


@pytest.fixture(autouse=True)
def _no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a run on CI and one on a desk the same."""
    for variable in (*CI_VARIABLES, "SCHEME"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(autouse=True)
def _options_of_runs(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, cache_option: str
) -> None:
    """
    Leave other plugins out of the runs inside of tests; after pytester, which clears it.

    Projects of runs in processes of their own find the models of this repository, which is on the
    path of an editable install alone.
    """
    options = [*(f"-p no:{name}" for name in _WITHOUT), f"-o pythonpath={_ROOT}", cache_option]
    monkeypatch.setenv("PYTEST_ADDOPTS", " ".join(options))


@pytest.fixture
def run_here(pytester: pytest.Pytester) -> Run:
    """Run pytest in this process, which spares each run the import of torch and the converter."""

    def run(*args: str) -> pytest.RunResult:
        # Warnings are errors in this run.
        return pytester.runpytest_inprocess("-W", "default", *args)

    return run


@pytest.fixture
def cache_option(request: pytest.FixtureRequest) -> str:
    """The option by which runs that convert models share the conversion cache of this one."""
    directory = shared_cache()
    converts = Path(request.path).stem in _CONVERTING
    return f"--edgeq-cache-dir={directory}" if converts and directory is not None else ""


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    """Run pytest in a project whose fixture `remember` claims op-dtype maps."""
    pytester.makeconftest(_CONFTEST)

    def runs(*args: str) -> pytest.RunResult:
        return pytester.runpytest(*args)

    return runs


@pytest.fixture(
    params=[
        pytest.param(("-p", "no:xdist"), id="without-xdist"),
        pytest.param(("-n", "0"), id="n0"),
        pytest.param(("-n", "2"), id="n2", marks=pytest.mark.slow),
    ]
)
def run_everywhere(run: Run, request: pytest.FixtureRequest) -> Run:
    """Run pytest in that project without pytest-xdist, with it, and on two workers."""

    def runs(*args: str) -> pytest.RunResult:
        return run(*request.param, *args)

    return runs
