"""Options: values that are refused, precedence, and what reaches `Edgeq`."""

from __future__ import annotations

import inspect
import json
import sys

import pytest

from pytest_edgeq import Edgeq
from pytest_edgeq.names import PRESETS, unknown_preset
from pytest_edgeq.plugin.options.declared import OPTIONS
from pytest_edgeq.plugin.options.values import ci_variable
from tests.projects import Project

# Takes whatever the fixture gives, and keeps it.
STUB = """
import sys
import types

stub = types.ModuleType("pytest_edgeq.edgeq")
class Edgeq:
    def __init__(self, **keywords):
        self.__dict__.update(keywords)
    def close(self):
        pass
stub.Edgeq = Edgeq
sys.modules["pytest_edgeq.edgeq"] = stub
"""


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("runtime", "xnnpak", "unknown runtime 'xnnpak' (did you mean xnnpack?); valid: xnnpack,"),
        ("threads", "two", "expected an integer from 0, got 'two'"),
        ("seed", str(2**32), "expected an integer from 0 to 4294967295, got '4294967296'"),
        ("cache", "of", "'of' is none of the valid values: on, off, refresh"),
        ("cache_dir", "tox.ini", "tox.ini is a file; a folder is wanted"),
        ("cache_dir", "x" * 300, "xxx: File name too long"),
        ("isolate_memory", "4X", "expected a size such as 4G, 512M or 2048 (MiB), got '4X'"),
        ("artifacts", "tox.ini/sub", "expected a folder that can be written, got "),
        ("json", ".", " is a folder; a file is wanted"),
        ("json", "/no/such/dir/x.json", "there is no folder /no/such/dir"),
        ("artifacts", "/no/such/dir/x", "there is no folder /no/such/dir"),
        ("update", "all", "'all' is none of the valid values: new, changed, tighten, prune"),
        ("quantizers", "pt2e_int8", "did you mean pt2e_qat_int8 or pt2e_static_int8"),
        ("quantizers", "pt2e_int8", ", ".join(PRESETS)),
        ("quantizers", ",", "names no quantizer"),
        ("quantizers", "none,none", "none is named more than once"),
        ("quantizers", "gone.json", "there is no recipe file at "),
    ],
)
def test_a_wrong_value_is_a_usage_error_that_lists_the_valid_ones(
    project: Project, option: str, value: str, said: str
) -> None:
    """The run stops at once, and names the option and the valid values."""
    flag = f"--edgeq-{option.replace('_', '-')}"
    project.refuses(f"{flag}={value}", files={"tox.ini": "[pytest]\n"}, shows=[flag, said])


def test_a_wrong_value_of_the_ini(project: Project) -> None:
    """Is named with the ini's option."""
    for option, value, said in (
        ("seed", "-1", "expected an integer from 0 to 4294967295, got '-1'"),
        ("obsolete", "fail", "'fail' is none of the valid values: info, error"),
    ):
        ini = {"pytest.ini": f"[pytest]\nedgeq_{option} = {value}\n"}
        project.refuses(files=ini, shows=[f"ini option edgeq_{option}: ", said])


def test_the_extra_of_the_html_page_is_looked_for_when_the_run_starts(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By flag and ini; a run that asks for no page does not need it."""
    monkeypatch.setitem(sys.modules, "bokeh", None)
    said = "charts and pictures of a report need packages that are not installed: "
    project.refuses("--edgeq-html=report.html", shows=f"--edgeq-html: {said}")
    project.run(passed=1)
    ini = {"pytest.ini": "[pytest]\nedgeq_html = report.html\n"}
    project.refuses(files=ini, shows=f"ini option edgeq_html: {said}")
    assert not (project.path / "report.html").exists()


def test_update_does_not_swallow_a_path_in_silence(project: Project) -> None:
    """Argparse reads the path as the flag's value; the message says how to write it."""
    shows = [
        "'test_update.py' is none of the valid values",
        "write --edgeq-update=new,changed (with '=')",
    ]
    project.refuses("--edgeq-update", "test_update.py", shows=shows)
    project.run("--edgeq-update", "new", shows="edgeq: *update=new", passed=1)


def test_update_is_refused_on_ci(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline never accepts a change by itself, nor by an update that is always on."""
    monkeypatch.setenv("GITLAB_CI", "yes")
    said = (
        "baselines are never written on CI, and the environment variable GITLAB_CI is set to 'yes'"
    )
    project.refuses("--edgeq-update", shows=f"--edgeq-update: {said}")
    ini = {"pytest.ini": "[pytest]\nedgeq_update = new\n"}
    project.refuses(files=ini, shows=f"ini option edgeq_update: {said}")
    project.run("--edgeq-update=", passed=1)


@pytest.mark.parametrize("value", ["", "0", "false", "FALSE"])
def test_a_variable_that_says_no_is_no_ci(value: str) -> None:
    """CI=false is how people turn it off."""
    assert ci_variable({"CI": value}) is None
    assert ci_variable({"CI": value, "TRAVIS": "1"}) == "TRAVIS"


VALUES = {
    "runtime": {"default": "xnnpack", "a": "builtin", "b": "reference", "c": "builtin"},
    "quantizers": {
        "default": "pt2e_static_int8",
        "a": "pt2e_dynamic_int8",
        "b": "recipe_static_wi8_ai8",
        "c": "recipe_static_wi8_ai16",
    },
}


@pytest.mark.parametrize(
    ("ini", "marker", "flag", "runtime", "quantizers"),
    [
        (None, None, None, "default", "default"),
        ("a", "b", None, "b", "b"),
        ("a", None, "c", "c", "c"),
        ("a", "b", "c", "c", "b"),
        # A flag that repeats the default is a flag.
        ("a", "b", "default", "default", "b"),
    ],
)
def test_precedence(
    project: Project,
    ini: str | None,
    marker: str | None,
    flag: str | None,
    runtime: str,
    quantizers: str,
) -> None:
    """Runtime: command line, marker, ini. Quantizers: marker, command line, ini."""
    one, many = VALUES["runtime"], VALUES["quantizers"]
    lines = [f"edgeq_{option} = {each[ini]}\n" for option, each in VALUES.items() if ini]
    mark = "pytest.mark.edgeq()"
    if marker:
        mark = f"pytest.mark.edgeq(runtime={one[marker]!r}, quantizers=[{many[marker]!r}])"
    test = f"""
        import pytest

        @{mark}
        def test_it(edgeq, edgeq_quantizer):
            assert (edgeq.runtime(), edgeq_quantizer) == {(one[runtime], many[quantizers])}
    """
    flags = [f"--edgeq-{option}={each[flag]}" for option, each in VALUES.items() if flag]
    files = {"conftest": STUB, "pytest.ini": "[pytest]\n" + "".join(lines), "test_x": test}
    project.run(*flags, files=files, passed=1)


def test_options_reach_edgeq(project: Project) -> None:
    """The command line beats the ini."""
    ini = """
        [pytest]
        edgeq_threads = 2
        edgeq_seed = 3
        edgeq_localize_timeout = 5
        edgeq_suggest = 9
        edgeq_cache = refresh
        edgeq_cache_dir = kept
        edgeq_executor = processes:3
        edgeq_isolate = on
        edgeq_isolate_timeout = 7
        edgeq_isolate_memory = 1500
    """
    test = """
        from pytest_edgeq.plugin.state import memory_of

        def test_it(edgeq, request):
            assert (edgeq.threads, edgeq.seed) == (2, 4)
            switch = request.config.getoption("edgeq_localize")
            assert edgeq.localize_timeout == (0 if switch == "off" else 5)
            assert edgeq.suggest_timeout == (300 if switch == "off" else 9)
            assert edgeq.directory.is_dir()
            assert edgeq.cache == "refresh"
            assert edgeq.executor == "processes:3"
            assert edgeq.cache_dir == request.config.rootpath / "kept"
            assert edgeq.memory is memory_of(request.config)
            assert (edgeq.isolate, edgeq.isolate_timeout) == ("on", 7)
            assert edgeq.isolate_memory == 1500 * 2**20
    """
    project.run(
        "--edgeq-seed=4", files={"conftest": STUB, "pytest.ini": ini, "test_x": test}, passed=1
    )
    project.run("--edgeq-seed=4", "--edgeq-localize=off", "--edgeq-suggest", passed=1)


def test_keywords_of_edgeq_are_options() -> None:
    """With the same names and defaults, except for those that the plugin passes."""
    named = {"suggest_timeout": "suggest"}
    given = {"directory", "memory", "runtimes", "cache_log", "progress", "journal"}
    parameters = inspect.signature(Edgeq).parameters
    keywords = {named.get(name, name): each for name, each in parameters.items()}
    options = {option.stem: option.default for option in OPTIONS}
    assert keywords.keys() - given <= options.keys()
    # None and () are what 0 and nothing say in an option; these tests have a cache of their own.
    other = {"threads", "check_targets", "cache_dir"}
    for name in keywords.keys() - given - other:
        assert (keywords[name].default or "") == (options[name] or ""), name


def test_the_runtime_is_that_of_the_test_that_runs(project: Project) -> None:
    """The session's fixture serves tests with other markers, and fixtures of module scope."""
    test = """
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
    project.run(files={"conftest": STUB, "test_x": test}, passed=4)


def test_native_toml_takes_numbers(project: Project) -> None:
    """In pytest's own TOML table numbers are numbers, and lists of names are strings."""
    pytest.importorskip("pytest", minversion="9.0")
    toml = "[tool.pytest]\nedgeq_threads = 2\nedgeq_quantizers = {}\n"
    test = "def test_plain(edgeq_quantizer): pass"
    files = {"pyproject.toml": toml.format('"none,pt2e_dynamic_int8"'), "test_x": test}
    project.run(files=files, passed=2)
    files = {"pyproject.toml": toml.format('["none"]')}
    said = 'ini option edgeq_quantizers: expected a string, such as "a,b"'
    project.refuses(files=files, shows=said)


def test_a_recipe_file_is_relative_to_where_it_is_named(project: Project) -> None:
    """On the command line to the current folder, in the ini to its file; ids are its stem."""
    recipe = project.path / "recipes" / "mine.json"
    files = {
        "recipes/mine.json": json.dumps([]),
        "pytest.ini": "[pytest]\nedgeq_quantizers = recipes/mine.json\n",
        "test_x": f"def test_it(edgeq_quantizer): assert edgeq_quantizer == {str(recipe)!r}",
    }
    for args in ((), ("--edgeq-quantizers=recipes/mine.json",)):
        project.run("-v", *args, files=files, passed=1, shows="*::test_it[[]mine] PASSED*")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("recipe_dynamic_wi8", "recipe_dynamic_wi8_afp32 or *"),
        ("int8", "pt2e_static_int8 or pt2e_static_int8_per_tensor or pt2e_dynamic_int8"),
        ("wi4", "recipe_dynamic_wi4_afp32 or recipe_weight_only_wi4_afp32"),
        ("qat", "pt2e_qat_int8"),
    ],
)
def test_an_unknown_preset_is_named_with_its_nearest(name: str, told: str) -> None:
    """Line one has those that are near or have it as a part, line two all of them."""
    first, second = unknown_preset(name).splitlines()
    start = f"unknown quantizer preset {name!r} (did you mean {told.removesuffix('*')}"
    assert first.startswith(start)
    assert second.endswith(", ".join(PRESETS))
    assert "did you mean" not in unknown_preset("zzz")
