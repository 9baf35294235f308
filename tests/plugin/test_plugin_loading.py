"""Imports at start-up, help, header and fixtures."""

from __future__ import annotations

import re
import sys

import pytest

from pytest_edgeq.plugin.options.declared import OPTIONS
from tests.projects import Project

HEAVY = ("torch", "numpy", "litert_torch", "ai_edge_litert", "ai_edge_quantizer", "tensorflow")
CHARTS = ("bokeh", "jinja2", "PIL")
"""For --edgeq-html alone."""
OWN = (
    *("names", "progress", "versions", "baselines.paths", "runtimes.registry"),
    *("quantize.cache.directory", "baselines.regular_files"),  # count cached conversions
    *("runtimes.workers.settings", "runtimes.workers.target_spec"),
    *("plugin.controller", "plugin.html_extras", "plugin.markers", "plugin.options.declared"),
    *("plugin.options.values", "plugin.state", "plugin.terminal_progress"),
)
"""Modules of this package that a run imports in which no test uses it."""


@pytest.mark.parametrize("options", [(), ("--collect-only", "-v")], ids=["run", "collect"])
def test_the_plugin_imports_nothing_heavy(
    project: Project, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    """A test that does not use the fixture waits for few modules, each without dependencies."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p edgeq")  # other plugins may import what they like
    absent = (*HEAVY, "torchao", "ai_edge_torch", "jax", *CHARTS, "concurrent.futures", "filelock")
    conftest = f"""
        import sys
        from pathlib import Path
        import pytest_edgeq

        def pytest_unconfigure():
            print("heavy:", sorted(set({absent}) & set(sys.modules)))
            own = [
                name.removeprefix("pytest_edgeq.")
                for name, module in sys.modules.items()
                if name.startswith("pytest_edgeq.")
                and Path(module.__file__).stem != "__init__"
            ]
            print("more:", sorted(set(own) - set({OWN})))
    """
    files = {"conftest": conftest, "test_x": "def test_plain(): pass"}
    shows = ["edgeq: runtime=*", "heavy: []", "more: []"]
    project.run(*options, files=files, process=True, shows=shows)


@pytest.mark.slow
def test_python_exits_without_looking_at_all_that_the_libraries_hold(project: Project) -> None:
    """The heap is frozen at exit where the session used the fixture, and only there."""
    # The first one that is registered runs last.
    conftest = (
        "import atexit, gc\natexit.register(lambda: print('frozen:', gc.get_freeze_count() > 0))\n"
    )
    test = "def test_plain(): pass\ndef test_with_the_fixture(edgeq): pass"
    files = {"conftest": conftest, "test_x": test}
    project.run(files=files, process=True, shows="frozen: True")
    project.run("-k", "plain", process=True, shows="frozen: False")


def test_baselines_import_neither_pytest_nor_torch(pytester: pytest.Pytester) -> None:
    """Remembering files works outside of a test run, for instance from the command line."""
    heavy = (*HEAVY, "pytest", "_pytest")
    code = (
        "import sys, pytest_edgeq.baselines.obsolete; "
        f"print(sorted(set({heavy!r}) & set(sys.modules)))"
    )
    assert pytester.run(sys.executable, "-c", code).outlines == ["[]"]


def test_help_markers_and_fixtures(project: Project) -> None:
    """One group with every flag, the ini names, the marker's keywords, both fixtures."""
    text = project.run("--help", ret=0).stdout.str()
    assert len(re.findall(r"^quantization regression tests \(pytest-edgeq\):$", text, re.M)) == 1
    for option in OPTIONS:
        assert len(re.findall(rf"^  {option.flag}[ =[]", text, re.M)) == 1
        assert len(re.findall(rf"^  {option.name} \((string|int|linelist)\)", text, re.M)) == 1
    marker = "@pytest.mark.edgeq(?, quantizers=*, runtime=None): *"
    project.run("--markers", shows=marker)
    result = project.run("--fixtures", shows=["edgeq ?session scope?*", "*Quantize a model*"])
    result.stdout.fnmatch_lines(["edgeq_quantizer ?session scope?*"])


def test_header_shows_settings_and_versions(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings and releases; missing distributions and untried releases are named."""
    versions = {
        "torch": "2.15.0+cpu",
        "torchao": "0.18.0",
        "litert-converter": "0.5.0",
        "litert-quantizer": "0.12.1",
    }
    monkeypatch.setattr("pytest_edgeq.versions.version_of", versions.get)
    project.run(
        *("--edgeq-runtime=builtin", "--edgeq-threads=3", "--edgeq-seed", "7", "--edgeq-update"),
        shows=[
            "edgeq: runtime=builtin threads=3 seed=7 update=changed,new",
            "edgeq: torch 2.15.0+cpu, torchao 0.18.0, litert-converter 0.5.0, ai-edge-litert not "
            "installed, litert-quantizer 0.12.1",
            "edgeq: not tried with torch 2.15.0+cpu (tried: 2.13), litert-quantizer 0.12.1 (tried: "
            "without it)",
        ],
    )


def test_the_plugin_can_be_turned_off(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `-p no:edgeq` there is neither header nor option nor fixture."""
    monkeypatch.delenv("PYTEST_ADDOPTS")
    test = "def test_plain(edgeq): pass"
    shows, hides = "*fixture 'edgeq' not found", "edgeq: runtime=*"
    project.run("-p", "no:edgeq", files=test, errors=1, shows=shows, hides=hides)
    project.run("-p", "no:edgeq", "--edgeq-update", ret=pytest.ExitCode.USAGE_ERROR)


def test_nothing_is_left_and_nothing_is_said_without_a_need(project: Project) -> None:
    """All state is in the stash; a run that remembers nothing has no section of ours."""
    test = """
        def test_state(pytestconfig):
            assert not [name for name in vars(pytestconfig) if "edgeq" in name]
            named = {name for name in vars(pytestconfig.option) if "edgeq" in name}
            assert {getattr(pytestconfig.option, name) for name in named} == {None}
    """
    project.run(files=test, passed=1, hides="=* edgeq =*")
