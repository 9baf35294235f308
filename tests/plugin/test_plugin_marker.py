"""The marker `edgeq`: its errors, and the quantizers that a test runs under."""

from __future__ import annotations

import pytest

from tests.projects import Project

WRONG = {
    '["pt2e_static_int8"]': "accepts keyword arguments only, got ['pt2e_static_int8']",
    'quantizer=["none"]': "no keyword 'quantizer' (did you mean quantizers",
    "threads=2": "no keyword 'threads'\n  keywords: quantizers, runtime",
    'runtime="fast"': "unknown runtime 'fast'; valid: xnnpack, builtin, reference, comp",
    'runtime=["xnnpack"]': "unknown runtime ['xnnpack']",
    'quantizers="none"': "expected a list of quantizers, got 'none'; write ['none']",
    "quantizers=[]": "the list is empty",
    "quantizers=[{}]": "a list of dicts is one recipe",
    'quantizers=["pt2e_int8"]': "unknown quantizer preset 'pt2e_int8' (did you mean",
    'quantizers=["gone.json"]': "there is no recipe file at ",
}


@pytest.mark.parametrize(
    "options", [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)], ids=["one", "two"]
)
def test_a_wrong_marker_is_an_error_at_collection(
    project: Project, options: tuple[str, ...]
) -> None:
    """The error names the test, without a traceback; the test does not run."""
    files = {
        f"test_{i}": f"import pytest\n@pytest.mark.edgeq({arguments})\ndef test_it(): pass\n"
        for i, arguments in enumerate(WRONG)
    }
    errors = len(WRONG) * (2 if options else 1)  # of each worker
    result = project.run(*options, files=files, errors=errors, hides="*INTERNALERROR*")
    text = result.stdout.str()
    for i, said in enumerate(WRONG.values()):
        assert f"test_{i}.py::test_it: the marker edgeq" in text
        assert said in text
    assert "Traceback" not in text
    assert "During handling" not in text


def test_a_wrong_marker_on_a_parameter_is_an_error_of_its_test(project: Project) -> None:
    """Marks of parameters are known only when the test is there."""
    test = """
        import pytest

        @pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.edgeq(seed=1)), 2])
        def test_it(x): pass
    """
    project.run(files=test, errors=1, passed=1, shows="*test_it?1?*no keyword 'seed'*")


def test_quantizers_of_a_test_that_uses_none_are_an_error(project: Project) -> None:
    """It would run under the default one; a module's marker may be for its other tests."""
    marked = 'edgeq(quantizers=["none", "pt2e_dynamic_int8"])'
    source = """
        import pytest

        MARK = pytest.mark.edgeq({mark})

        @pytest.mark.parametrize("x", [1, pytest.param(2, marks=MARK)])
        def test_it({fixtures}): pass
    """
    files = {
        "test_direct": f"import pytest\n@pytest.mark.{marked}\ndef test_it(tmp_path): pass\n",
        "test_fixture": f"""
            import pytest

            @pytest.fixture
            def model(edgeq_quantizer): return edgeq_quantizer

            @pytest.mark.{marked}
            def test_it(model): pass

            @pytest.mark.edgeq(runtime="builtin")
            def test_no_quantizer_is_marked(): pass
        """,
        "test_module": f"""
            import pytest

            pytestmark = pytest.mark.{marked}

            def test_it(edgeq_quantizer): pass
            def test_what_needs_no_model(): pass
        """,
        # Marks of a case: a test runs under those of its function, if under any.
        "test_runtime": source.format(mark='runtime="builtin"', fixtures="x"),
        "test_unused": source.format(mark='quantizers=["none"]', fixtures="x"),
        "test_used": source.format(mark='quantizers=["none"]', fixtures="x, edgeq_quantizer"),
    }
    result = project.run(
        "--continue-on-collection-errors",
        files=files,
        errors=3,
        passed=8,
        shows=[
            "*test_direct.py::test_it: the marker edgeq(quantizers=…) has no effect: expected a "
            "test that uses the fixture edgeq_quantizer, got the fixtures tmp_path*",
            "*fix: add the argument edgeq_quantizer and hand it on*",
            "*test_unused.py::test_it[[]2]: the marker edgeq(quantizers=…) has no effect: expected "
            "a test that uses the fixture edgeq_quantizer, got the fixtures x*",
            "*test_used.py::test_it[[]*2*]: the marker edgeq(quantizers=…) has no effect in "
            "pytest.param*",
        ],
    )
    assert "Traceback" not in result.stdout.str()


def test_any_quantizer_may_be_marked(project: Project) -> None:
    """Presets, None, objects and recipes, each under a telling id; strict ids do not mind."""
    test = """
        import pytest

        class Mine: pass

        MANY = ["pt2e_dynamic_int8", "none", None, Mine(), Mine(), [{"regex": ".*"}]]

        @pytest.mark.edgeq(quantizers=MANY)
        def test_it(edgeq_quantizer):
            assert edgeq_quantizer in MANY
    """
    names = ["pt2e_dynamic_int8", "none0", "none1", "Mine0", "Mine1", "recipe"]
    project.run(
        *("-v", "-W", "ignore"),
        files={"pytest.ini": "[pytest]\nstrict_parametrization_ids = true\n", "test_x": test},
        passed=6,
        shows=[f"*::test_it[[]{name}] PASSED*" for name in names],
    )


def test_tests_and_fixtures_with_quantizers(project: Project) -> None:
    """A test's own parameters win; a fixture of any scope may use one."""
    test = """
        import pytest

        @pytest.mark.parametrize("x, edgeq_quantizer", [(1, "a"), (2, "b")])
        def test_direct(x, edgeq_quantizer): assert edgeq_quantizer in ("a", "b")

        @pytest.mark.parametrize(["edgeq_quantizer"], [("a",)], indirect=True)
        def test_indirect(edgeq_quantizer): assert edgeq_quantizer == "a"

        @pytest.fixture(scope="session")
        def model(edgeq_quantizer):
            return edgeq_quantizer

        def test_one(model): pass
        def test_other(model, edgeq_quantizer): assert model == edgeq_quantizer
        def test_none(): pass
    """
    three = "--edgeq-quantizers=none,pt2e_static_int8,recipe_static_wi8_ai8"
    project.run(three, files=test, passed=10)
