"""Baselines that no test owns any more: found, reported, pruned; and those left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.projects import Files, Project

BOTH = "def test_a(remember): remember()\ndef test_b(remember): remember()\n"
PLAIN = "def test_a(): pass\ndef test_b(): pass\n"
ONLY_B = "def test_b(remember): remember()\n"
PYTEST = "import pytest\n"

FILE = "  __edgeq__/test_x/test_{0}.op_dtypes.json"
PASSED = f"{FILE}: test_x.py::test_{{0}} passed without checking it"
NO_TEST = f"{FILE}: there is no test test_x.py::test_{{0}}"
IN_PART = "Warning: no obsolete baselines were looked for in 1 module that did not run completely:"
FOUND = ("*obsolete; *", "*deleted*")

ERROR, PRUNE = "--edgeq-obsolete=error", "--edgeq-update=prune"


@pytest.fixture
def stored(remembering: Project) -> dict[str, Path]:
    """The files of two tests."""
    remembering.run("--edgeq-update", files=BOTH, passed=2)
    return {name: remembering.path / FILE.format(name).strip() for name in "ab"}


TWO = pytest.param("def test_new(): assert 0\n", NO_TEST, ("-n", "2"), marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("now", "why", "options"),
    [
        ("def test_a(): pass\n", PASSED, ()),
        ("", NO_TEST, ()),
        ("def test_new(): assert 0\n", NO_TEST, ()),
        (f"{PYTEST}@pytest.mark.skip\ndef test_new(): pass\n", NO_TEST, ()),
        TWO,
    ],
    ids=["unclaimed", "gone", "fails", "skipped", "two"],
)
def test_an_obsolete_file_is_reported_fails_if_asked_and_is_pruned(
    remembering: Project, stored: dict[str, Path], now: str, why: str, options: tuple[str, ...]
) -> None:
    """Its test passed without it, or a complete run did not collect its test."""
    info = "Info: 1 baseline is obsolete; delete with --edgeq-update=prune:"
    shows = ["=* edgeq =*", info, why.format("a")]
    told = remembering.run(*options, files=now + ONLY_B, shows=shows)
    shows = ["Error: 1 baseline is obsolete; *", why.format("a")]
    failed = remembering.run(*options, ERROR, ret=1, shows=shows)
    assert failed.parseoutcomes() == told.parseoutcomes()
    assert stored["a"].exists()
    shows = ["1 baseline was deleted:", FILE.format("a")]
    remembering.run(*options, ERROR, PRUNE, ret=told.ret, shows=shows)
    assert [path.exists() for path in stored.values()] == [False, True]
    remembering.run(*options, ret=told.ret, hides="=* edgeq =*")


_FIXTURE = f"{PYTEST}@pytest.fixture\ndef f():"


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("now", "args"),
    [
        ("def test_a(): assert 0, 'before the claim'\n", ()),
        (f"{PYTEST}def test_a(): pytest.skip()\n", ()),
        (f"{PYTEST}@pytest.mark.skip\ndef test_a(): pass\n", ()),
        (f"{PYTEST}@pytest.mark.xfail\ndef test_a(): assert 0\n", ()),
        (f"{_FIXTURE} 1/0\ndef test_a(f): pass\n", ()),
        (f"{_FIXTURE}\n    yield\n    1/0\ndef test_a(f): pass\n", ()),
        ("def test_a(): pass\n", ("-k", "nothing")),
        ("def test_a(): pass\n", ("--collect-only", "-q")),
    ],
    ids=["fails", "skips", "skipped", "xfails", "set-up", "teardown", "deselected", "collect-only"],
)
def test_what_is_not_known_is_left_alone(
    remembering: Project, stored: dict[str, Path], now: str, args: tuple[str, ...]
) -> None:
    """If its owner did not run to the end, a file is neither reported nor deleted."""
    remembering.run(PRUNE, ERROR, *args, files=now + "test_b = test_a\n", hides=FOUND)
    assert all(path.exists() for path in stored.values())


def test_a_parameter_that_was_removed(remembering: Project, workers: tuple[str, ...]) -> None:
    """Of three parameters one is left, and its baseline with it."""
    text = f"{PYTEST}@pytest.mark.parametrize('p', [{{}}])\ndef test_a(p, remember): remember()\n"
    remembering.run(*workers, "--edgeq-update", files=text.format("1, 2, 3"), passed=3)
    remembering.run(*workers, PRUNE, files=text.format("2"), shows="2 baselines were deleted:")
    left = (remembering.path / "__edgeq__" / "test_x").iterdir()
    assert [path.name for path in left] == ["test_a[2].op_dtypes.json"]


def test_a_module_that_was_renamed(
    remembering: Project, stored: dict[str, Path], workers: tuple[str, ...]
) -> None:
    """Its baselines belong to nobody, also in the run that fails for want of new ones."""
    (remembering.path / "test_x.py").rename(remembering.path / "test_y.py")
    shows = [
        "Error: 2 baselines are obsolete; *",
        f"{FILE.format('a')}: there is no module test_x.py",
    ]
    remembering.run(*workers, ERROR, failed=2, shows=shows)
    shows = ["2 baselines were stored:", "2 baselines were deleted:"]
    remembering.run(*workers, "--edgeq-update=new,prune", passed=2, shows=shows)
    assert not stored["a"].parent.exists()


@pytest.mark.parametrize("options", [(), ("--edgeq-snapshot-dir=kept",)], ids=str)
def test_a_module_that_is_not_run_keeps_its_files(
    remembering: Project, options: tuple[str, ...]
) -> None:
    """Here and in other folders; a module that is gone loses its own there, too."""
    files = {"test_x": BOTH, "sub/test_y": BOTH, "sub/test_z": BOTH}
    remembering.run("--edgeq-update", *options, files=files, passed=6)
    (remembering.path / "sub" / "test_z.py").unlink()
    shows = ["2 baselines were deleted:", "  *sub/*test_z/test_a.*"]
    remembering.run("sub/test_y.py", PRUNE, *options, shows=shows)
    assert len(list(remembering.path.rglob("*/test_?.op_dtypes.json"))) == 4


_NAMED = "only tests named on the command line were collected"
_NEW = "def test_new(): pass\n"
TWO_IN_PART = pytest.param(
    *(PLAIN, ("-n", "2", "-k", "test_a or elsewhere"), "1 of 2 tests was deselected"),
    marks=pytest.mark.slow,
)


@pytest.mark.parametrize(
    ("now", "args", "why"),
    [
        (f"{PYTEST}pytest.importorskip('not_there')\n{BOTH}", (), "it was skipped"),
        ("import not_there\n", ("--continue-on-collection-errors",), "it could not be collected"),
        (PLAIN, ("-k", "test_a or elsewhere"), "1 of 2 tests was deselected"),
        (PLAIN, ("test_x.py::test_a",), _NAMED),
        (_NEW, ("test_x.py::test_new",), _NAMED),
        (
            _NEW,
            ("--edgeq-quantizers=pt2e_static_int8",),
            "--edgeq-quantizers replaced the quantizers of its tests",
        ),
        ("def test_new(): assert 0\ndef test_more(): pass\n", ("-x",), "*test_* did not run to *"),
        (f"{PYTEST}def test_new(): pytest.exit('enough')\n", (), "*test_* did not run to the end"),
        TWO_IN_PART,
    ],
    ids=["skip", "import-error", "by-name", "named", "another", "quantizers", "x", "exit", "two"],
)
def test_a_module_that_ran_in_part_is_not_judged(
    remembering: Project, stored: dict[str, Path], now: str, args: tuple[str, ...], why: str
) -> None:
    """Its baselines stay, and a run that was to look for obsolete ones says why it did not."""
    files: Files = {"test_x": now, "test_w": "def test_elsewhere(): pass\n"}
    shows = [IN_PART, f"  test_x.py: {why}"]
    remembering.run(PRUNE, ERROR, *args, files=files, shows=shows, hides=FOUND)
    assert all(path.exists() for path in stored.values())
    remembering.run(*args, hides="*no obsolete baselines*")


def test_only_what_failed_last_is_a_run_in_part(
    remembering: Project, stored: dict[str, Path]
) -> None:
    """Without a word to plugins, pytest leaves the other tests of the module out."""
    remembering.run(files="def test_new(): assert 0\ndef test_more(): pass\n")
    remembering.run(
        "--last-failed", PRUNE, shows=[IN_PART, "  test_x.py: --last-failed chose its tests"]
    )
    assert all(path.exists() for path in stored.values())


def test_a_crashed_worker_loses_nothing(remembering: Project, stored: dict[str, Path]) -> None:
    """Claims of finished tests survive, and the test that crashed is not taken for finished."""
    remembering.write(
        "import os\ndef test_a(remember): remember(); remember('more')\n"
        "def test_b(remember): os._exit(1)\n"
    )
    # One worker, so that the one that crashes has finished the other test before.
    remembering.run(
        *("-n", "1", "--max-worker-restart=0", "--edgeq-update=new,prune"),
        passed=1,
        failed=1,
        shows=[
            "1 baseline was stored:",
            "  __edgeq__/test_x/test_a.more.json: 1 op, 0 of them in float",
            IN_PART,
            "  test_x.py: its worker did not finish",
        ],
        hides=FOUND,
    )
    assert all(path.exists() for path in stored.values())


@pytest.mark.slow
def test_a_test_that_ran_twice_must_have_passed_twice(
    remembering: Project, stored: dict[str, Path]
) -> None:
    """With --dist=each, a test that fails on one worker keeps its file."""
    now = "def test_a(worker_id): assert worker_id == 'gw0'\ndef test_b(): pass\n"
    shows = ["*: 1 baseline is obsolete; *", PASSED.format("b")]
    remembering.run(
        "-n", "2", "--dist=each", files=now, shows=shows, hides="*test_a.op_dtypes.json"
    )


def test_files_that_cannot_be_read_or_were_copied_are_kept(
    remembering: Project, stored: dict[str, Path]
) -> None:
    """A damaged file has no known owner; a copy belongs to the test at its place."""
    strange, copy = (stored["a"].with_name(f"{each}.json") for each in ("strange", "test_c.op"))
    strange.write_text("{")
    copy.write_bytes(stored["a"].read_bytes())
    warning = "Warning: __edgeq__/test_x/strange.json is not valid JSON: *"
    remembering.run(PRUNE, ERROR, passed=2, shows=warning, hides="*deleted*")
    assert strange.exists()
    assert copy.exists()


def test_a_file_that_is_used_by_another_than_its_owner_is_noted(
    remembering: Project, stored: dict[str, Path]
) -> None:
    """After a renaming of test and file: it serves, and the run says how to make it right."""
    file = stored["a"].rename(stored["a"].with_name("test_c.op_dtypes.json"))
    noted = "Info: *names test_x.py::test_a as its owner, but test_x.py::test_c*"
    remembering.run(files="def test_c(remember): remember()\n", passed=1, shows=noted)
    remembering.run("--edgeq-update=changed", passed=1)
    assert json.loads(file.read_text())["owner"]["test"] == "test_c"


def test_the_last_file_takes_the_folder_along(
    remembering: Project, stored: dict[str, Path]
) -> None:
    """Each is listed with its reason; the empty folder is removed, too."""
    shows = ["Info: 2 baselines are obsolete; *", PASSED.format("a"), PASSED.format("b")]
    remembering.run(files=PLAIN, shows=shows)
    remembering.run(PRUNE, shows="2 baselines were deleted:")
    assert not (remembering.path / "__edgeq__").exists()
