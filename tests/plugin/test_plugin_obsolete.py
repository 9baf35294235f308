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


OBSOLETE = "*: 1 remembered file is obsolete (its test passed without checking it); *"


def test_a_file_that_its_test_does_not_claim_is_obsolete(
    pytester: pytest.Pytester, run_everywhere: Run, stored: dict[str, Path]
) -> None:
    """It is told; with `error` the run fails; only prune deletes it, and only it."""
    pytester.makepyfile(test_x="def test_a(): pass\ndef test_b(remember): remember()\n")

    told = run_everywhere()
    told.stdout.fnmatch_lines(
        [
            "=* edgeq =*",
            "Info: 1 remembered file is obsolete (its test passed without checking it); delete "
            "with --edgeq-update=prune:",
            "  __edgeq__/test_x/test_a.op_dtypes.json",
        ]
    )
    assert told.ret == 0

    failed = run_everywhere("--edgeq-obsolete=error")
    failed.stdout.fnmatch_lines(["Error: 1 remembered file is obsolete *"])
    failed.assert_outcomes(passed=2)
    assert failed.ret == pytest.ExitCode.TESTS_FAILED
    assert stored["a"].exists()

    pruned = run_everywhere("--edgeq-obsolete=error", "--edgeq-update=prune")
    pruned.stdout.fnmatch_lines(
        ["1 remembered file was deleted:", "  __edgeq__/test_x/test_a.op_dtypes.json"]
    )
    assert pruned.ret == 0
    assert [path.exists() for path in stored.values()] == [False, True]
    run_everywhere().stdout.no_re_match_line("=+ edgeq =+")


@pytest.mark.sweep(5)
@pytest.mark.parametrize(
    ("now", "args"),
    [
        ("import pytest\npytest.importorskip('not_there')\n" + BOTH, ()),
        ("import pytest\npytest.skip('no', allow_module_level=True)\n" + BOTH, ()),
        ("import not_there\n", ()),
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
        ("def test_other(): pass\n", ()),
        ("import pytest\ndef test_a(): pytest.exit('enough')\ndef test_b(): pass\n", ()),
    ],
    ids=[
        "importorskip",
        "module-skip",
        "import-error",
        "fails-before-claim",
        "skips",
        "skipped",
        "xfails",
        "set-up-fails",
        "teardown-fails",
        "deselected",
        "collect-only",
        "renamed",
        "exits",
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


def test_a_deselected_test_keeps_its_file_while_another_loses_its(
    pytester: pytest.Pytester, run: Run, stored: dict[str, Path]
) -> None:
    """What ran decides for itself alone."""
    pytester.makepyfile(test_x="def test_a(): pass\ndef test_b(): pass\n")

    result = run("--edgeq-update=prune", "-k", "test_a")

    result.stdout.fnmatch_lines(["1 remembered file was deleted:"])
    assert [path.exists() for path in stored.values()] == [False, True]


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
        ["1 remembered file was stored:", "  __edgeq__/test_x/test_a.more.json"]
    )
    result.stdout.no_re_match_line(".*(obsolete|deleted)")
    assert all(path.exists() for path in stored.values())


def test_a_crashed_worker_among_two(
    pytester: pytest.Pytester, run: Run, stored: dict[str, Path]
) -> None:
    """The other worker's obsolete file is told all the same."""
    pytester.makepyfile(test_x="import os\ndef test_a(): pass\ndef test_b(remember): os._exit(1)\n")

    result = run("-n", "2", "--max-worker-restart=0")

    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines([OBSOLETE, "  __edgeq__/test_x/test_a.op_dtypes.json"])
    result.stdout.no_fnmatch_line("*test_b.op_dtypes.json")


def test_a_test_that_ran_twice_must_have_passed_twice(
    pytester: pytest.Pytester, run: Run, stored: dict[str, Path]
) -> None:
    """With --dist=each, one worker's failure makes the file unknown for all."""
    pytester.makepyfile(
        test_x="def test_a(worker_id): assert worker_id == 'gw0'\ndef test_b(): pass\n"
    )

    result = run("-n", "2", "--dist=each")

    result.stdout.fnmatch_lines([OBSOLETE, "  __edgeq__/test_x/test_b.op_dtypes.json"])
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
    """Two files, their tests, them."""
    pytester.makepyfile(test_x="def test_a(): pass\ndef test_b(): pass\n")

    result = run("--edgeq-update=prune", "--co", "-q")
    result.stdout.no_fnmatch_line("*deleted*")

    result = run()
    result.stdout.fnmatch_lines(
        ["Info: 2 remembered files are obsolete (their tests passed without checking them); *"]
    )


def test_the_last_file_takes_the_folder_along(
    pytester: pytest.Pytester, run: Run, stored: dict[str, Path]
) -> None:
    """Nothing of ours is left when nothing is remembered any more."""
    pytester.makepyfile(test_x="def test_a(): pass\ndef test_b(): pass\n")

    run("--edgeq-update=prune").stdout.fnmatch_lines(["2 remembered files were deleted:"])

    assert not (pytester.path / "__edgeq__").exists()


def test_a_failing_run_stays_failed(
    pytester: pytest.Pytester, run: Run, stored: dict[str, Path]
) -> None:
    """The status of obsolete files does not hide that of failed tests, nor the other way round."""
    pytester.makepyfile(test_x="def test_a(): pass\ndef test_b(): assert 0\n")

    assert run("--edgeq-obsolete=error").ret == pytest.ExitCode.TESTS_FAILED
    assert run().ret == pytest.ExitCode.TESTS_FAILED
