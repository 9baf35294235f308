from __future__ import annotations

import json
import sys

import pytest

from pytest_edgeq.names import PRESETS, RUNTIMES, quantizer_ids, unknown_preset
from pytest_edgeq.plugin.options.values import CI_VARIABLES, ci_variable

STUB = """
import sys
import types

stub = types.ModuleType("pytest_edgeq.edgeq")
class Edgeq:
    def __init__(
        self,
        *,
        runtime,
        threads,
        seed,
        directory,
        memory,
        runtimes,
        localize_timeout,
        cache_dir,
        cache,
        cache_log,
        journal,
        progress,
        isolate,
        isolate_timeout,
        isolate_memory,
        executor,
    ):
        self.executor = executor
        self.runtime, self.threads, self.seed = runtime, threads, seed
        self.directory, self.memory = directory, memory
        self.localize_timeout = localize_timeout
        self.cache, self.cache_dir = cache, cache_dir
        self.isolate, self.isolate_timeout = isolate, isolate_timeout
        self.isolate_memory = isolate_memory
    def close(self):
        pass
stub.Edgeq = Edgeq
sys.modules["pytest_edgeq.edgeq"] = stub
"""


def refused(pytester: pytest.Pytester, *args: str) -> str:
    """Run pytest with something wrong, and give its message."""
    pytester.makepyfile("def test_plain(): pass")
    result = pytester.runpytest(*args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    text = f"{result.stderr}{result.stdout}"
    assert "INTERNALERROR" not in text
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("runtime", "xnnpak", "unknown runtime 'xnnpak' (did you mean xnnpack?); valid: xnnpack,"),
        ("runtime", "tpu", "valid: " + ", ".join(RUNTIMES)),
        ("threads", "-1", "expected an integer from 0, got '-1'"),
        ("threads", "two", "expected an integer"),
        ("seed", "-1", "expected an integer from 0 to 4294967295, got '-1'"),
        ("seed", str(2**32), "expected an integer from 0 to 4294967295"),
        ("localize", "on", "'on' is none of the valid values: auto, off"),
        ("localize_timeout", "0", "expected an integer from 1, got '0'"),
        ("cache", "of", "'of' is none of the valid values: on, off, refresh"),
        ("cache_dir", "tox.ini", "tox.ini is a file; a folder is wanted"),
        ("isolate", "yes", "'yes' is none of the valid values: auto, on, off"),
        ("isolate_timeout", "0", "expected an integer from 1, got '0'"),
        ("isolate_memory", "4X", "expected a size such as 4G, 512M or 2048 (MiB), got '4X'"),
        ("artifacts", "tox.ini", "tox.ini is a file; a folder is wanted"),
        ("artifacts", "tox.ini/sub", "expected a folder that can be written, got "),
        ("json", ".", " is a folder; a file is wanted"),
        ("json", "x" * 300, "xxx: File name too long"),
        ("cache_dir", "x" * 300, "xxx: File name too long"),
        ("html", ".", " is a folder; a file is wanted"),
        ("obsolete", "fail", "'fail' is none of the valid values: info, error"),
        ("update", "all", "'all' is none of the valid values: new, changed, tighten, prune"),
        ("quantizers", "pt2e_int8", "did you mean pt2e_qat_int8 or pt2e_static_int8"),
        ("quantizers", "pt2e_int8", ", ".join(PRESETS)),
        ("quantizers", ",", "names no quantizer"),
        ("quantizers", "none,none", "none is named more than once"),
        ("quantizers", "gone.json", "there is no recipe file at "),
        ("snapshot_dir", "tox.ini", "tox.ini is a file; a folder is wanted"),
    ],
)
@pytest.mark.parametrize("where", ["flag", "ini"])
def test_a_wrong_value_is_a_usage_error_that_lists_the_valid_ones(
    pytester: pytest.Pytester, where: str, option: str, value: str, said: str
) -> None:
    """Wherever it was written, the run stops at once and says where and what would be valid."""
    flag = f"--edgeq-{option.replace('_', '-')}"
    pytester.makefile(".ini", tox="[pytest]\n" + (f"edgeq_{option} = {value}\n" * (where == "ini")))

    text = refused(pytester, *([f"{flag}={value}"] if where == "flag" else []))

    assert said in text
    assert (flag if where == "flag" else f"ini option edgeq_{option}") in text


def test_the_extra_of_the_html_page_is_looked_for_when_the_run_starts(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By flag and ini; a run that asks for no page does not need it."""
    monkeypatch.setitem(sys.modules, "bokeh", None)
    said = "charts and pictures of a report need packages that are not installed: "
    assert f"--edgeq-html: {said}" in refused(pytester, "--edgeq-html=report.html")
    assert pytester.runpytest().ret == pytest.ExitCode.OK
    pytester.makeini("[pytest]\nedgeq_html = report.html\n")
    assert f"ini option edgeq_html: {said}" in refused(pytester)
    assert not (pytester.path / "report.html").exists()


def test_update_does_not_swallow_a_path_in_silence(pytester: pytest.Pytester) -> None:
    """Argparse takes the path for the flag's value; the message says how to write it."""
    text = refused(pytester, "--edgeq-update", "test_update.py")

    assert "'test_update.py' is none of the valid values" in text
    assert "write --edgeq-update=new,changed (with '=')" in text


@pytest.mark.parametrize("variable", CI_VARIABLES)
def test_update_is_refused_on_ci(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """A pipeline never accepts a change by itself; the message names the variable."""
    monkeypatch.setenv(variable, "yes")

    text = refused(pytester, "--edgeq-update")

    assert f"the environment variable {variable} is set to 'yes'" in text
    assert "--edgeq-update: baselines are never written on CI" in text


def test_update_in_the_ini_is_refused_on_ci_too(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that is always on must not be the way around."""
    monkeypatch.setenv("CI", "true")
    pytester.makeini("[pytest]\nedgeq_update = new\n")

    assert "ini option edgeq_update: baselines are never" in refused(pytester)
    pytester.runpytest("--edgeq-update=").assert_outcomes(passed=1)


@pytest.mark.parametrize("value", ["", "0", "false", "FALSE"])
def test_a_variable_that_says_no_is_no_ci(value: str) -> None:
    """CI=false is how people turn it off."""
    assert ci_variable({"CI": value}) is None
    assert ci_variable({"CI": value, "TRAVIS": "1"}) == "TRAVIS"


@pytest.mark.parametrize("option", ["runtime", "quantizers"])
@pytest.mark.parametrize(
    ("ini", "marker", "flag", "runtime", "quantizers"),
    [
        (None, None, None, "default", "default"),
        ("a", None, None, "a", "a"),
        (None, "b", None, "b", "b"),
        (None, None, "c", "c", "c"),
        ("a", "b", None, "b", "b"),
        ("a", None, "c", "c", "c"),
        (None, "b", "c", "c", "b"),
        ("a", "b", "c", "c", "b"),
        # A flag that repeats the default is a flag.
        ("a", "b", "default", "default", "b"),
    ],
)
def test_precedence(
    pytester: pytest.Pytester,
    option: str,
    ini: str | None,
    marker: str | None,
    flag: str | None,
    runtime: str,
    quantizers: str,
) -> None:
    """Runtime: command line, marker, ini. Quantizers: marker, command line, ini."""
    expected = runtime if option == "runtime" else quantizers
    values = {
        "runtime": {"default": "xnnpack", "a": "builtin", "b": "reference", "c": "builtin"},
        "quantizers": {
            "default": "pt2e_static_int8",
            "a": "pt2e_dynamic_int8",
            "b": "recipe_static_wi8_ai8",
            "c": "recipe_static_wi8_ai16",
        },
    }[option]
    pytester.makeconftest(STUB)
    if ini:
        pytester.makeini(f"[pytest]\nedgeq_{option} = {values[ini]}\n")
    value = repr(values[marker] if option == "runtime" else [values[marker]]) if marker else ""
    pytester.makepyfile(
        f"""
        import pytest

        {f"@pytest.mark.edgeq({option}={value})" if marker else ""}
        def test_it(edgeq, edgeq_quantizer):
            got = {"edgeq.runtime()" if option == "runtime" else "edgeq_quantizer"}
            assert got == {values[expected]!r}
        """
    )

    result = pytester.runpytest(*([f"--edgeq-{option}={values[flag]}"] if flag else []))

    result.assert_outcomes(passed=1)


def test_the_rest_of_the_options_reach_the_fixture(pytester: pytest.Pytester) -> None:
    """The command line beats the ini for the number of threads and the seed."""
    pytester.makeconftest(STUB)
    pytester.makeini(
        "[pytest]\nedgeq_threads = 2\nedgeq_seed = 3\nedgeq_localize_timeout = 5\n"
        "edgeq_cache = refresh\nedgeq_cache_dir = kept\nedgeq_executor = processes:3\n"
        "edgeq_isolate = on\nedgeq_isolate_timeout = 7\nedgeq_isolate_memory = 1500\n"
    )
    pytester.makepyfile(
        """
        from pytest_edgeq.plugin.state import memory_of

        def test_it(edgeq, request):
            assert (edgeq.threads, edgeq.seed) == (2, 4)
            switch = request.config.getoption("edgeq_localize")
            assert edgeq.localize_timeout == (0 if switch == "off" else 5)
            assert edgeq.directory.is_dir()
            assert edgeq.cache == "refresh"
            assert edgeq.executor == "processes:3"
            assert edgeq.cache_dir == request.config.rootpath / "kept"
            assert edgeq.memory is memory_of(request.config)
            assert (edgeq.isolate, edgeq.isolate_timeout) == ("on", 7)
            assert edgeq.isolate_memory == 1500 * 2**20
        """
    )

    pytester.runpytest("--edgeq-seed=4").assert_outcomes(passed=1)
    pytester.runpytest("--edgeq-seed=4", "--edgeq-localize=off").assert_outcomes(passed=1)


def test_the_runtime_is_that_of_the_test_that_runs(pytester: pytest.Pytester) -> None:
    """The session's fixture serves tests with other markers, and fixtures of module scope."""
    pytester.makeconftest(STUB)
    pytester.makepyfile(
        """
        import pytest

        @pytest.fixture(scope="module")
        def early(edgeq):
            return edgeq.runtime()

        @pytest.mark.edgeq(runtime="builtin")
        def test_marked(edgeq, early):
            assert (edgeq.runtime(), early) == ("builtin", "builtin")

        def test_plain(edgeq):
            assert edgeq.runtime() == "xnnpack"

        @pytest.mark.edgeq(runtime="builtin")
        class TestClass:
            @pytest.mark.edgeq(quantizers=[None])
            def test_each_keyword_counts_by_itself(self, edgeq, edgeq_quantizer):
                assert (edgeq.runtime(), edgeq_quantizer) == ("builtin", None)

            @pytest.mark.edgeq(runtime="reference")
            def test_the_closest_marker_counts(self, edgeq):
                assert edgeq.runtime() == "reference"
        """
    )

    pytester.runpytest("-p", "no:randomly").assert_outcomes(passed=4)


def test_native_toml_takes_numbers(pytester: pytest.Pytester) -> None:
    """In pytest's own TOML table numbers are numbers, and lists of names are strings."""
    pytest.importorskip("pytest", minversion="9.0")
    pytester.makepyprojecttoml(
        '[tool.pytest]\nedgeq_threads = 2\nedgeq_quantizers = "none,pt2e_dynamic_int8"\n'
    )
    pytester.makepyfile("def test_plain(edgeq_quantizer): pass")

    pytester.runpytest().assert_outcomes(passed=2)

    pytester.makepyprojecttoml('[tool.pytest]\nedgeq_quantizers = ["none"]\n')
    assert 'ini option edgeq_quantizers: expected a string, such as "a,b"' in refused(pytester)


def test_a_recipe_file_is_relative_to_where_it_is_named(pytester: pytest.Pytester) -> None:
    """On the command line to the current folder, in the ini to its file; ids are its stem."""
    recipe = pytester.mkdir("recipes") / "mine.json"
    recipe.write_text(json.dumps([]))
    pytester.makeini("[pytest]\nedgeq_quantizers = recipes/mine.json\n")
    pytester.makepyfile(
        f"def test_it(edgeq_quantizer): assert edgeq_quantizer == {str(recipe.resolve())!r}"
    )

    for args in ((), ("--edgeq-quantizers=recipes/mine.json",)):
        result = pytester.runpytest("-v", *args)
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines(["*::test_it[[]mine] PASSED*"])


def test_ids_of_quantizers_are_names_and_unique() -> None:
    """The strict mode of pytest refuses equal ids, so equal names are counted."""

    class Mine:
        pass

    recipe: list[object] = [{}]
    many = ["pt2e_static_int8", "/a/mine.json", None, Mine(), Mine(), recipe, "recipe0"]
    expected = ["pt2e_static_int8", "mine", "none", "Mine0", "Mine1", "recipe", "recipe0"]

    assert quantizer_ids(many) == expected
    assert quantizer_ids([recipe, "recipe0", recipe]) == ["recipe1", "recipe0", "recipe2"]


def test_an_unknown_preset_is_told_with_its_nearest() -> None:
    """Line one has the nearest names, line two all of them."""
    first, second = unknown_preset("recipe_dynamic_wi8").splitlines()

    assert "'recipe_dynamic_wi8' (did you mean recipe_dynamic_wi8_afp32" in first
    assert second.endswith(", ".join(PRESETS))
    assert "did you mean" not in unknown_preset("zzz")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "int8",
            "pt2e_static_int8 or pt2e_static_int8_per_tensor or pt2e_dynamic_int8",
        ),
        ("wi4", "recipe_dynamic_wi4_afp32 or recipe_weight_only_wi4_afp32"),
        ("qat", "pt2e_qat_int8"),
    ],
)
def test_a_part_of_a_presets_name_is_told_with_the_whole(name: str, told: str) -> None:
    """The first word that comes to mind is a part of several names, the default one first."""
    assert unknown_preset(name).splitlines()[0] == (
        f"unknown quantizer preset {name!r} (did you mean {told}?)"
    )
