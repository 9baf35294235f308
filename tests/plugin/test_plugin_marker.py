from __future__ import annotations

import pytest


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('["pt2e_static_int8"]', "takes keyword arguments only, got ['pt2e_static_int8']"),
        ('quantizer=["none"]', "no keyword 'quantizer' (did you mean quantizers"),
        ("threads=2", "no keyword 'threads'\n  keywords: quantizers, runtime"),
        ('runtime="fast"', "unknown runtime 'fast'; valid: xnnpack, builtin, reference, comp"),
        ('runtime=["xnnpack"]', "unknown runtime ['xnnpack']"),
        ('quantizers="none"', "expected a list of quantizers, got 'none'; write ['none']"),
        ("quantizers=[]", "the list is empty"),
        ("quantizers=[{}]", "a list of dicts is one recipe"),
        ('quantizers=["pt2e_int8"]', "unknown quantizer preset 'pt2e_int8' (did you mean"),
        ('quantizers=["gone.json"]', "there is no recipe file at "),
    ],
)
def test_a_wrong_marker_is_an_error_at_collection(
    pytester: pytest.Pytester, arguments: str, said: str
) -> None:
    """It is told without a traceback, with the test that carries it; nothing of it runs."""
    pytester.makepyfile(
        test_marked=f"""
        import pytest

        @pytest.mark.edgeq({arguments})
        def test_it(): pass
        """
    )

    result = pytester.runpytest()

    result.assert_outcomes(errors=1)
    assert said in result.stdout.str()
    assert "test_marked.py::test_it: the marker edgeq" in result.stdout.str()
    assert "Traceback" not in result.stdout.str()
    assert "During handling" not in result.stdout.str()


def test_a_wrong_marker_under_xdist(pytester: pytest.Pytester) -> None:
    """Every worker tells it as an error of collection; none crashes."""
    pytester.makepyfile("import pytest\n@pytest.mark.edgeq(threads=2)\ndef test_it(): pass\n")

    result = pytester.runpytest("-n", "2")

    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*has no keyword 'threads'", "*keywords: quantizers, runtime"])
    result.stdout.no_fnmatch_line("*INTERNALERROR*")


def test_a_wrong_marker_on_a_parameter_is_an_error_of_its_test(pytester: pytest.Pytester) -> None:
    """Marks of parameters are known only when the test is there."""
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.edgeq(seed=1)), 2])
        def test_it(x): pass
        """
    )

    result = pytester.runpytest()

    result.assert_outcomes(errors=1, passed=1)
    result.stdout.fnmatch_lines(["*test_it?1?*no keyword 'seed'*"])


def test_quantizers_of_a_test_that_uses_none_are_an_error(pytester: pytest.Pytester) -> None:
    """It would run under the default one; a module's marker may be for its other tests."""
    pytester.makepyfile(
        test_direct="""
        import pytest

        @pytest.mark.edgeq(quantizers=["none", "pt2e_dynamic_int8"])
        def test_it(tmp_path): pass
        """,
        test_fixture="""
        import pytest

        @pytest.fixture
        def model(edgeq_quantizer): return edgeq_quantizer

        @pytest.mark.edgeq(quantizers=["none", "pt2e_dynamic_int8"])
        def test_it(model): pass

        @pytest.mark.edgeq(runtime="builtin")
        def test_no_quantizer_is_marked(): pass
        """,
        test_module="""
        import pytest

        pytestmark = pytest.mark.edgeq(quantizers=["none", "pt2e_dynamic_int8"])

        def test_it(edgeq_quantizer): pass
        def test_what_needs_no_model(): pass
        """,
    )

    result = pytester.runpytest("--continue-on-collection-errors")

    result.assert_outcomes(errors=1, passed=6)
    result.stdout.fnmatch_lines(
        [
            "*test_direct.py::test_it: the marker edgeq(quantizers=…) has no effect: expected a "
            "test that uses the fixture edgeq_quantizer, got the fixtures tmp_path*",
            "*fix: add the argument edgeq_quantizer and hand it on*",
        ]
    )
    assert "Traceback" not in result.stdout.str()


def test_a_case_that_is_marked_with_quantizers_is_an_error(pytester: pytest.Pytester) -> None:
    """They would have no effect: a test runs under those of its function, if under any."""
    source = """
        import pytest

        MARK = pytest.mark.edgeq({mark})

        @pytest.mark.parametrize("x", [1, pytest.param(2, marks=MARK)])
        def test_it({fixtures}): pass
    """
    pytester.makepyfile(
        test_unused=source.format(mark='quantizers=["none"]', fixtures="x"),
        test_used=source.format(mark='quantizers=["none"]', fixtures="x, edgeq_quantizer"),
        test_runtime=source.format(mark='runtime="builtin"', fixtures="x"),
    )

    result = pytester.runpytest("--continue-on-collection-errors")

    result.assert_outcomes(errors=2, passed=2)
    result.stdout.fnmatch_lines(
        [
            "*test_unused.py::test_it[[]2]: the marker edgeq(quantizers=…) has no effect: expected "
            "a test that uses the fixture edgeq_quantizer, got the fixtures x*",
            "*test_used.py::test_it[[]*2*]: the marker edgeq(quantizers=…) has no effect in "
            "pytest.param*",
        ]
    )
    assert "Traceback" not in result.stdout.str()


def test_any_quantizer_may_be_marked(pytester: pytest.Pytester) -> None:
    """Presets, None, objects and recipes, each under a telling id; strict ids do not mind."""
    pytester.makeini("[pytest]\nstrict_parametrization_ids = true\n")
    pytester.makepyfile(
        """
        import pytest

        class Mine: pass

        MANY = ["pt2e_dynamic_int8", "none", None, Mine(), Mine(), [{"regex": ".*"}]]

        @pytest.mark.edgeq(quantizers=MANY)
        def test_it(edgeq_quantizer):
            assert edgeq_quantizer in MANY
        """
    )

    result = pytester.runpytest("-v", "-p", "no:randomly", "-W", "ignore")

    result.assert_outcomes(passed=6)
    names = ["pt2e_dynamic_int8", "none0", "none1", "Mine0", "Mine1", "recipe"]
    result.stdout.fnmatch_lines([f"*::test_it[[]{name}] PASSED*" for name in names])


def test_a_test_may_parametrize_the_quantizer_itself(pytester: pytest.Pytester) -> None:
    """What a test says of its own parameters stands, directly or through the fixture."""
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("x, edgeq_quantizer", [(1, "a"), (2, "b")])
        def test_direct(x, edgeq_quantizer): assert edgeq_quantizer in ("a", "b")

        @pytest.mark.parametrize(["edgeq_quantizer"], [("a",)], indirect=True)
        def test_indirect(edgeq_quantizer): assert edgeq_quantizer == "a"
        """
    )

    pytester.runpytest().assert_outcomes(passed=3)


def test_quantizers_of_fixtures(pytester: pytest.Pytester) -> None:
    """A fixture of any scope may ask for the quantizer: its tests run once under each."""
    pytester.makepyfile(
        """
        import pytest

        @pytest.fixture(scope="session")
        def model(edgeq_quantizer):
            return edgeq_quantizer

        def test_one(model): pass
        def test_other(model, edgeq_quantizer): assert model == edgeq_quantizer
        def test_none(): pass
        """
    )

    result = pytester.runpytest("--edgeq-quantizers=none,pt2e_static_int8,recipe_static_wi8_ai8")

    result.assert_outcomes(passed=7)
