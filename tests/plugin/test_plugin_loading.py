from __future__ import annotations

import re
import sys

import pytest

from pytest_edgeq.plugin.options.declared import OPTIONS

HEAVY = ("torch", "numpy", "litert_torch", "ai_edge_litert", "ai_edge_quantizer", "tensorflow")
CHARTS = ("bokeh", "jinja2", "PIL")
"""For --edgeq-html alone."""


def test_collecting_imports_nothing_heavy(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test file that does not use the fixture pays for no framework, header included."""
    # Other plugins may import what they like.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest(
        f"""
        import sys
        import pytest_edgeq

        def pytest_unconfigure():
            heavy = {(*HEAVY, "torchao", "ai_edge_torch", "jax", *CHARTS)}
            print("heavy:", sorted(set(heavy) & set(sys.modules)))
            print("loaded:", "pytest_edgeq.plugin" in sys.modules)
        """
    )
    pytester.makepyfile("def test_plain(): pass")

    result = pytester.runpytest_subprocess("-p", "pytest_edgeq.plugin")

    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["edgeq: runtime=*", "heavy: []", "loaded: True"])


def test_python_exits_without_looking_at_all_that_the_libraries_hold(
    pytester: pytest.Pytester,
) -> None:
    """The heap is frozen at exit where the session used the fixture, and only there."""
    pytester.makeconftest(
        """
        import atexit, gc

        # The first one that is registered runs last.
        atexit.register(lambda: print("frozen:", gc.get_freeze_count() > 0))
        """
    )
    pytester.makepyfile("def test_plain(): pass\ndef test_with_the_fixture(edgeq): pass")

    used = pytester.runpytest_subprocess()
    unused = pytester.runpytest_subprocess("-k", "plain")

    used.stdout.fnmatch_lines(["frozen: True"])
    unused.stdout.fnmatch_lines(["frozen: False"])


@pytest.mark.parametrize("option", ["-q", "-v"])
def test_collecting_imports_no_memory_and_no_pools(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """The memory and the thread pools are imported with the first test that runs."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeconftest(
        """
        import sys

        def pytest_unconfigure():
            late = ("pytest_edgeq.baselines.session", "pytest_edgeq.baselines.obsolete")
            print("late:", sorted({*late, "concurrent.futures"} & set(sys.modules)))
        """
    )
    pytester.makepyfile("def test_plain(): pass")

    result = pytester.runpytest_subprocess("-p", "pytest_edgeq.plugin", "--collect-only", option)

    result.stdout.fnmatch_lines(["late: []"])


@pytest.mark.parametrize("module", ["pytest_edgeq.baselines", "pytest_edgeq.baselines.obsolete"])
def test_snapshots_import_neither_pytest_nor_torch(pytester: pytest.Pytester, module: str) -> None:
    """Remembering files works outside of a test run, for instance from the command line."""
    heavy = (*HEAVY, "pytest", "_pytest")
    code = f"import sys, {module}; print(sorted(set({heavy!r}) & set(sys.modules)))"

    result = pytester.run(sys.executable, "-c", code)

    assert result.outlines == ["[]"]


def test_help_shows_one_group_with_every_option(pytester: pytest.Pytester) -> None:
    """`pytest --help` has the flags in one group and the ini names among the ini options."""
    result = pytester.runpytest("--help")

    text = result.stdout.str()
    assert result.ret == 0
    assert len(re.findall(r"^quantization regression tests \(pytest-edgeq\):$", text, re.M)) == 1
    for option in OPTIONS:
        assert len(re.findall(rf"^  {option.flag}[ =[]", text, re.M)) == 1
        assert len(re.findall(rf"^  {option.name} \((string|int|linelist)\)", text, re.M)) == 1


def test_markers_shows_the_marker(pytester: pytest.Pytester) -> None:
    """`pytest --markers` shows the marker with its keywords."""
    result = pytester.runpytest("--markers")

    result.stdout.fnmatch_lines(["@pytest.mark.edgeq(?, quantizers=*, runtime=None): *"])


def test_fixtures_are_documented(pytester: pytest.Pytester) -> None:
    """`pytest --fixtures` shows both fixtures with what they are for."""
    result = pytester.runpytest("--fixtures", "-p", "no:cacheprovider")

    result.stdout.fnmatch_lines(["edgeq_quantizer ?session scope?*"])
    result.stdout.fnmatch_lines(["edgeq ?session scope?*", "*Quantize a model*"])


def test_header_shows_settings_and_versions(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the run measures with; missing distributions and untried releases are told."""
    versions = {
        "torch": "2.15.0+cpu",
        "torchao": "0.18.0",
        "litert-converter": "0.5.0",
        "ai-edge-litert": "2.3.0",
        "litert-quantizer": "0.12.1",
    }
    monkeypatch.setattr("pytest_edgeq.versions.version_of", versions.get)

    result = pytester.runpytest(
        "--edgeq-runtime=builtin", "--edgeq-threads=3", "--edgeq-seed", "7", "--edgeq-update"
    )

    result.stdout.fnmatch_lines(
        [
            "edgeq: runtime=builtin threads=3 seed=7 update=changed,new",
            "edgeq: torch 2.15.0+cpu, torchao 0.18.0, litert-torch not installed, litert-converter "
            "0.5.0, ai-edge-litert 2.3.0, litert-quantizer 0.12.1",
            "edgeq: not tried with torch 2.15.0+cpu (tried: 2.9, 2.13, 2.14), "
            "litert-quantizer 0.12.1 (tried: 0.11)",
        ]
    )


def test_the_plugin_can_be_turned_off(pytester: pytest.Pytester) -> None:
    """With `-p no:edgeq` there is neither header nor option nor fixture."""
    pytester.makepyfile("def test_plain(edgeq): pass")

    result = pytester.runpytest("-p", "no:edgeq")

    result.assert_outcomes(errors=1)
    result.stdout.no_fnmatch_line("edgeq: runtime=*")
    result.stdout.fnmatch_lines(["*fixture 'edgeq' not found"])
    assert pytester.runpytest("-p", "no:edgeq", "--edgeq-update").ret == pytest.ExitCode.USAGE_ERROR


def test_no_state_is_left_on_config(pytester: pytest.Pytester) -> None:
    """All state is in the stash: no attribute on config, no option that was not declared."""
    pytester.makepyfile(
        """
        def test_state(pytestconfig):
            assert not [name for name in vars(pytestconfig) if "edgeq" in name]
            named = {name for name in vars(pytestconfig.option) if "edgeq" in name}
            assert {getattr(pytestconfig.option, name) for name in named} == {None}
        """
    )

    pytester.runpytest().assert_outcomes(passed=1)


def test_nothing_is_said_where_there_is_nothing_to_say(pytester: pytest.Pytester) -> None:
    """A run that remembers nothing has no section of ours."""
    pytester.makepyfile("def test_plain(): pass")

    pytester.runpytest().stdout.no_re_match_line("=+ edgeq =+")
