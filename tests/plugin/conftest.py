"""Projects for pytest to run on inside of a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.projects import Project
from tests.shared_cache import shared_cache

_OWN_CACHE = ("test_plugin_cache", "test_plugin_options", "test_plugin_loading")

_REMEMBER = """
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
def project(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Project:
    """A project whose runs share the conversion cache of this one, unless they are about it."""
    directory = shared_cache()
    shares = Path(request.path).stem not in _OWN_CACHE and directory is not None
    monkeypatch.delenv("SCHEME", raising=False)
    return Project(pytester, monkeypatch, *([f"--edgeq-cache-dir={directory}"] if shares else []))


@pytest.fixture
def remembering(project: Project) -> Project:
    """A project whose fixture `remember` claims op-dtype maps."""
    project.write({"conftest": _REMEMBER})
    return project


@pytest.fixture(params=["one", pytest.param("two", marks=pytest.mark.slow)])
def workers(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The options of a run in one process, and on two workers of pytest-xdist."""
    return ("-p", "no:xdist") if request.param == "one" else ("-n", "2")
