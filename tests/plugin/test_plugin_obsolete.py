from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., pytest.RunResult]

BOTH = "def test_a(remember): remember()\ndef test_b(remember): remember()\n"


@pytest.fixture
def stored(pytester: pytest.Pytester, run: Run) -> dict[str, Path]:
    """The files of two tests."""
    pytester.makepyfile(test_x=BOTH)
    run("--edgeq-update").assert_outcomes(passed=2)
    folder = pytester.path / "__edgeq__" / "test_x"
    return {name: folder / f"test_{name}.op_dtypes.json" for name in "ab"}


OBSOLETE = "*: 1 baseline is obsolete; delete with --edgeq-update=prune:"
PASSED = (
    "  __edgeq__/test_x/test_{0}.op_dtypes.json: test_x.py::test_{0} passed without checking it"
)
NO_TEST = "  __edgeq__/test_x/test_{0}.op_dtypes.json: there is no test test_x.py::test_{0}"
PLAIN = "def test_a(): pass\ndef test_b(): pass\n"
IN_PART = "Warning: no obsolete baselines were looked for in 1 module that did not run completely:"


def test_a_file_that_its_test_does_not_claim_is_obsolete(
    pytester: pytest.Pytester, run_everywhere: Run, stored: dict[str, Path]
) -> None:
    """It is told; with `error` the run fails; only prune deletes it, and only it."""
    pytester.makepyfile(test_x="def test_a(): pass\ndef test_b(remember): remember()\n")

    told = run_everywhere()
    told.stdout.fnmatch_lines(
        [
            "=* edgeq =*",
            "Info: 1 baseline is obsolete; delete with --edgeq-update=prune:",
            PASSED.format("a"),
        ]
    )
    assert told.ret == 0

    failed = run_everywhere("--edgeq-obsolete=error")
    failed.stdout.fnmatch_lines(["Error: 1 baseline is obsolete; *"])
    failed.assert_outcomes(passed=2)
    assert failed.ret == pytest.ExitCode.TESTS_FAILED
    assert stored["a"].exists()

    pruned = run_everywhere("--edgeq-obsolete=error", "--edgeq-update=prune")
    pruned.stdout.fnmatch_lines(
        ["1 baseline was deleted:", "  __edgeq__/test_x/test_a.op_dtypes.json"]
    )
    assert pruned.ret == 0
    assert [path.exists() for path in stored.values()] == [False, True]
    run_everywhere().stdout.no_re_match_line("=+ edgeq =+")


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    ("now", "args"),
    [
        ("def test_a(): assert 0, 'before the claim'\ndef test_b(): assert 0\n", ()),
        ("import pytest\ndef test_a(): pytest.skip()\ntest_b = test_a\n", ()),
        ("import pytest\n@pytest.mark.skip\ndef test_a(): pass\ntest_b = test_a\n", ()),
        ("import pytest\n@pytest.mark.xfail\ndef test_a(): assert 0\ntest_b = test_a\n", ()),
        (
            "import pytest\n@pytest.fixture\ndef f(): 1/0\ndef test_a(f): pass\ntest_b = test_a\n",
            (),
        ),
        (
            "import pytest\n@pytest.fixture\ndef f():\n    yield\n    1/0\n"
            "def test_a(f): pass\ntest_b = test_a\n",
            (),
        ),
        ("def test_a(): pass\ntest_b = test_a\n", ("-k", "nothing")),
        ("def test_a(): pass\ntest_b = test_a\n", ("--collect-only",)),
    ],
    ids=[
        "fails-before-claim",
        "skips",
        "skipped",
        "xfails",
        "set-up-fails",
        "teardown-fails",
        "deselected",
        "collect-only",
    ],
)
def test_what_is_not_known_is_left_alone(
    pytester: pytest.Pytester, run: Run, stored: dict[str, Path], now: str, args: tuple[str, ...]
) -> None:
    """Whatever kept an owner from running to its end, its file is neither told nor deleted."""
    pytester.makepyfile(test_x=now)

    result = run("--edgeq-update=prune", "--edgeq-obsolete=error", *args)

    result.stdout.no_re_match_line(".*(obsolete|deleted)")
    assert all(path.exists() for path in stored.values())


@pytest.mark.parametrize(
    "now",
    [
        "def test_b(remember): remember()\n",
        "import pytest\n@pytest.mark.parametrize('p', [1])\ndef test_a(p): pass\n"
        "def test_b(remember): remember()\n",
        "class TestIt:\n    def test_a(self): pass\ndef test_b(remember): remember()\n",
        "def test_new(): assert 0\ndef test_b(remember): remember()\n",
        "import pytest\n@pytest.mark.skip\ndef test_new(): pass\n"
        "def test_b(remember): remember()\n",
    ],
    ids=["removed", "parametrized", "into-a-class", "renamed-and-fails", "renamed-and-skipped"],
)
def test_a_file_whose_test_is_gone_is_obsolete(
    pytester: pytest.Pytester, run_everywhere: Run, stored: dict[str, Path], now: str
) -> None:
    """A complete run of the module did not collect its owner: told, failing and pruned if asked."""
    pytester.makepyfile(test_x=now)

    run_everywhere().stdout.fnmatch_lines(["Info: 1 baseline is obsolete; *", NO_TEST.format("a")])
    failed = run_everywhere("--edgeq-obsolete=error")
    failed.stdout.fnmatch_lines(["Error: 1 baseline is obsolete; *", NO_TEST.format("a")])
    assert failed.ret == pytest.ExitCode.TESTS_FAILED
    pruned = run_everywhere("--edgeq-obsolete=error", "--edgeq-update=prune")
    pruned.stdout.fnmatch_lines(["1 baseline was deleted:", "  __edgeq__/test_x/test_a.*.json"])
    assert [path.exists() for path in stored.values()] == [False, True]
    run_everywhere().stdout.no_re_match_line("=+ edgeq =+")


def test_a_parameter_that_was_removed(pytester: pytest.Pytester, run_everywhere: Run) -> None:
    """Of three parameters one is left, and its baseline with it."""
    text = (
        "import pytest\n@pytest.mark.parametrize('p', [{}])\ndef test_a(p, remember): remember()\n"
    )
    pytester.makepyfile(test_x=text.format("1, 2, 3"))
    run_everywhere("--edgeq-update").assert_outcomes(passed=3)
    pytester.makepyfile(test_x=text.format("2"))

    run_everywhere("--edgeq-update=prune").stdout.fnmatch_lines(["2 baselines were deleted:"])

    left = (pytester.path / "__edgeq__" / "test_x").iterdir()
    assert [path.name for path in left] == ["test_a[2].op_dtypes.json"]


def test_a_module_that_was_renamed(
    pytester: pytest.Pytester, run_everywhere: Run, stored: dict[str, Path]
) -> None:
    """The baselines of a module that does not exist any more belong to nobody."""
    (pytester.path / "test_x.py").unlink()
    pytester.makepyfile(test_y=BOTH)

    told = run_everywhere("--edgeq-update=new,prune")

    told.assert_outcomes(passed=2)
    told.stdout.fnmatch_lines(["2 baselines were stored:", "2 baselines were deleted:"])
    assert not stored["a"].parent.exists()


def test_a_module_that_was_renamed_and_has_stored_nothing_yet(
    pytester: pytest.Pytester, run_everywhere: Run, stored: dict[str, Path]
) -> None:
    """It is told in the run that fails for want of baselines, too."""
    (pytester.path / "test_x.py").rename(pytester.path / "test_y.py")
    told = run_everywhere("--edgeq-obsolete=error")
    told.assert_outcomes(failed=2)
    told.stdout.fnmatch_lines(
        [
            "Error: 2 baselines are obsolete; *",
            "  __edgeq__/test_x/test_a.op_dtypes.json: there is no module test_x.py",
        ]
    )


@pytest.mark.parametrize("directory", ["", "--edgeq-snapshot-dir=kept"])
def test_a_module_that_is_not_run_keeps_its_files(
    pytester: pytest.Pytester, run: Run, directory: str
) -> None:
    """Here and in other folders; a module that is gone loses its own there, too."""
    pytester.makepyfile(**{"test_x": BOTH, "sub/test_y": BOTH, "sub/test_z": BOTH})
    options = [directory] if directory else []
    run("--edgeq-update", *options).assert_outcomes(passed=6)
    (pytester.path / "sub" / "test_z.py").unlink()

    told = run("sub/test_y.py", "--edgeq-update=prune", *options)

    told.stdout.fnmatch_lines(["2 baselines were deleted:", "  *sub/*test_z/test_a.*"])
    assert len(list(pytester.path.rglob("*/test_?.op_dtypes.json"))) == 4


@pytest.mark.parametrize(
    ("now", "args", "why"),
    [
        ("import pytest\npytest.importorskip('not_there')\n" + BOTH, (), "it was skipped"),
        ("import pytest\npytest.skip('no', allow_module_level=True)\n", (), "it was skipped"),
        ("import not_there\n", ("--continue-on-collection-errors",), "it could not be collected"),
        (PLAIN, ("-k", "test_a or elsewhere"), "1 of 2 tests was deselected"),
        (PLAIN, ("--deselect", "test_x.py::test_a"), "1 of 2 tests was deselected"),
        (PLAIN, ("test_x.py::test_a",), "only tests named on the command line were collected"),
        (
            "def test_new(): pass\n",
            ("test_x.py::test_new",),
            "only tests named on the command line were collected",
        ),
        (
            "def test_new(): pass\n",
            ("--edgeq-quantizers=pt2e_static_int8",),
            "--edgeq-quantizers replaced the quantizers of its tests",
        ),
    ],
    ids=[
        "importorskip",
        "module-skip",
        "import-error",
        "deselected-by-name",
        "deselected-by-id",
        "named",
        "another-named",
        "other-quantizers",
    ],
)
def test_a_module_that_ran_in_part_is_not_judged(
    pytester: pytest.Pytester,
    run_everywhere: Run,
    stored: dict[str, Path],
    now: str,
    args: tuple[str, ...],
    why: str,
) -> None:
    """Its baselines stay, and a run that was to look for obsolete ones says why it did not."""
    pytester.makepyfile(test_x=now, test_elsewhere="def test_elsewhere(): pass\n")

    asked = run_everywhere("--edgeq-update=prune", "--edgeq-obsolete=error", *args)

    asked.stdout.fnmatch_lines([IN_PART, f"  test_x.py: {why}"])
    asked.stdout.no_re_match_line(".*(is obsolete|are obsolete|deleted)")
    assert all(path.exists() for path in stored.values())
    run_everywhere(*args).stdout.no_fnmatch_line("*no obsolete baselines*")


@pytest.mark.parametrize(
    ("now", "args"),
    [("assert 0", ("-x",)), ("import pytest; pytest.exit('enough')", ())],
    ids=["first-failure", "exits"],
)
def test_a_run_that_was_stopped_judges_nothing(
    pytester: pytest.Pytester, run: Run, stored: dict[str, Path], now: str, args: tuple[str, ...]
) -> None:
    """Tests that were collected and never ran are named."""
    pytester.makepyfile(test_x=f"def test_new(): {now}\ndef test_more(): pass\n")

    told = run("--edgeq-update=prune", *args)

    told.stdout.fnmatch_lines([IN_PART, "  test_x.py: *test_* did not run to the end"])
    assert all(path.exists() for path in stored.values())


def test_only_what_failed_last_is_a_run_in_part(
    pytester: pytest.Pytester, run: Run, stored: dict[str, Path]
) -> None:
    """Without a word to plugins, pytest leaves the other tests of the module out."""
    pytester.makepyfile(test_x="def test_new(): assert 0\ndef test_more(): pass\n")
    run()

    told = run("--last-failed", "--edgeq-update=prune")

    told.stdout.fnmatch_lines([IN_PART, "  test_x.py: --last-failed chose its tests"])
    assert all(path.exists() for path in stored.values())


def test_a_crashed_worker_loses_nothing(
    pytester: pytest.Pytester, run: Run, stored: dict[str, Path]
) -> None:
    """Claims of finished tests survive, and the test that crashed is not taken for finished."""
    pytester.makepyfile(
        test_x="import os\n"
        "def test_a(remember): remember(); remember('more')\n"
        "def test_b(remember): os._exit(1)\n"
    )

    # One worker, so that the one that crashes has finished the other test before.
    result = run("-n", "1", "--max-worker-restart=0", "--edgeq-update=new,prune")

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "1 baseline was stored:",
            "  __edgeq__/test_x/test_a.more.json: 1 op, 0 of them in float",
            IN_PART,
            "  test_x.py: its worker did not finish",
        ]
    )
    result.stdout.no_re_match_line(".*(is obsolete|deleted)")
    assert all(path.exists() for path in stored.values())


def test_a_crashed_worker_among_two(
    pytester: pytest.Pytester, run: Run, stored: dict[str, Path]
) -> None:
    """The module whose test was lost is not judged, another one is."""
    pytester.makepyfile(
        test_x="import os\ndef test_a(): pass\ndef test_b(): os._exit(1)\n", test_y=BOTH
    )
    run("test_y.py", "--edgeq-update").assert_outcomes(passed=2)
    pytester.makepyfile(test_y="def test_a(): pass\n")

    result = run("-n", "2", "--max-worker-restart=0", "--edgeq-obsolete=error", "--dist=loadfile")

    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "Error: 2 baselines are obsolete; *",
            PASSED.replace("_x", "_y").format("a"),
            NO_TEST.replace("_x", "_y").format("b"),
            IN_PART,
            "  test_x.py: test_b did not run to the end",
        ]
    )


def test_a_test_that_ran_twice_must_have_passed_twice(
    pytester: pytest.Pytester, run: Run, stored: dict[str, Path]
) -> None:
    """With --dist=each, a test that fails on one worker keeps its file."""
    pytester.makepyfile(
        test_x="def test_a(worker_id): assert worker_id == 'gw0'\ndef test_b(): pass\n"
    )

    result = run("-n", "2", "--dist=each")

    result.stdout.fnmatch_lines([OBSOLETE, PASSED.format("b")])
    result.stdout.no_fnmatch_line("*test_a.op_dtypes.json")


def test_files_that_cannot_be_read_are_told_and_kept(
    pytester: pytest.Pytester, run: Run, stored: dict[str, Path]
) -> None:
    """Whose they are cannot be told, so they are nobody's to delete."""
    strange = stored["a"].with_name("strange.json")
    strange.write_text("{")

    result = run("--edgeq-update=prune", "--edgeq-obsolete=error")

    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["Warning: __edgeq__/test_x/strange.json is not valid JSON: *"])
    assert strange.exists()


def test_a_copied_file_is_not_its_first_owners(
    pytester: pytest.Pytester, run: Run, stored: dict[str, Path]
) -> None:
    """A file that was copied to another test's place is left to that test."""
    copy = stored["a"].with_name("test_c.op_dtypes.json")
    copy.write_bytes(stored["a"].read_bytes())

    run("--edgeq-update=prune").stdout.no_fnmatch_line("*deleted*")

    assert copy.exists()


def test_a_file_that_is_used_by_another_than_its_owner_is_noted(
    pytester: pytest.Pytester, run: Run, stored: dict[str, Path]
) -> None:
    """After a renaming of test and file: it serves, and the run says how to make it right."""
    stored["a"].rename(stored["a"].with_name("test_c.op_dtypes.json"))
    pytester.makepyfile(test_x="def test_c(remember): remember()\n")

    noted = run()
    noted.assert_outcomes(passed=1)
    noted.stdout.fnmatch_lines(
        ["Info: *names test_x.py::test_a as its owner, but test_x.py::test_c*"]
    )

    run("--edgeq-update=changed").assert_outcomes(passed=1)
    owner = json.loads(stored["a"].with_name("test_c.op_dtypes.json").read_text())["owner"]
    assert owner["test"] == "test_c"


def test_several_obsolete_files_are_told_in_the_plural(
    pytester: pytest.Pytester, run: Run, stored: dict[str, Path]
) -> None:
    """Each with its reason."""
    pytester.makepyfile(test_x="def test_a(): pass\ndef test_b(): pass\n")

    result = run("--edgeq-update=prune", "--co", "-q")
    result.stdout.no_fnmatch_line("*deleted*")

    result = run()
    result.stdout.fnmatch_lines(
        ["Info: 2 baselines are obsolete; *", PASSED.format("a"), PASSED.format("b")]
    )


def test_the_last_file_takes_the_folder_along(
    pytester: pytest.Pytester, run: Run, stored: dict[str, Path]
) -> None:
    """Nothing of ours is left when nothing is remembered any more."""
    pytester.makepyfile(test_x="def test_a(): pass\ndef test_b(): pass\n")

    run("--edgeq-update=prune").stdout.fnmatch_lines(["2 baselines were deleted:"])

    assert not (pytester.path / "__edgeq__").exists()


def test_a_failing_run_stays_failed(
    pytester: pytest.Pytester, run: Run, stored: dict[str, Path]
) -> None:
    """The status of obsolete files does not hide that of failed tests, nor the other way round."""
    pytester.makepyfile(test_x="def test_a(): pass\ndef test_b(): assert 0\n")

    assert run("--edgeq-obsolete=error").ret == pytest.ExitCode.TESTS_FAILED
    assert run().ret == pytest.ExitCode.TESTS_FAILED
