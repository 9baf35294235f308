"""Baselines in runs of a user: missing, stored, changed, accepted."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from tests.projects import Project

ONE = "def test_a(remember): remember()\n"
FILE = "__edgeq__/test_x/test_a.op_dtypes.json"


def files(project: Project) -> list[str]:
    """List every baseline, and anything else that lies about in their folders."""
    return sorted(
        path.relative_to(project.path).as_posix()
        for folder in project.path.rglob("__edgeq__")
        for path in folder.rglob("*")
        if path.is_file()
    )


@pytest.mark.slow
def test_the_five_steps(
    remembering: Project, workers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing and changed fail and write nothing; an update accepts; the same passes."""
    file = remembering.path / FILE
    remembering.run(
        *workers,
        files=ONE,
        failed=1,
        shows=[
            '*AssertionError: no baseline is stored yet: op-dtype map "op_dtypes" (*',
            "*store it*: pytest test_x.py::test_a --edgeq-update=new",
            "=* edgeq =*",
            "Error: 1 baseline is not stored yet: see above what would be stored, and store *=new",
        ],
    )
    assert files(remembering) == []
    told = ["=* edgeq =*", "1 baseline was stored:", f"  {FILE}: 1 op, 0 of them in float"]
    remembering.run(*workers, "--edgeq-update=new", passed=1, shows=told)
    assert files(remembering) == [FILE]
    before = file.read_bytes()
    remembering.run(*workers, passed=1, hides="=* edgeq =*")

    monkeypatch.setenv("SCHEME", "float")
    remembering.run(
        *workers,
        failed=1,
        shows=[
            "*AssertionError: ADD #* (layer1.0) went from int8 to float32",
            f"*file: {FILE}",
            "*update: if the change is meant: pytest test_x.py::test_a --edgeq-update=changed",
            "Error: 1 baseline has changed: see in the failures above what changed and *=changed",
            # Nothing but line one is seen here, and not all of that.
            "FAILED test_x.py::test_a - AssertionError: ADD #* (layer1.0) went from int8*",
        ],
    )
    assert file.read_bytes() == before
    told = ["1 baseline was rewritten:", f"  {FILE}: 1 op, 1 of them in float"]
    remembering.run(*workers, "--edgeq-update=changed", passed=1, shows=told)
    assert json.loads(file.read_text())["data"]["ops"][0]["scheme"] == "float"
    remembering.run(*workers, passed=1)


def test_the_bare_flag_stores_and_rewrites_but_never_deletes(remembering: Project) -> None:
    """It means new and changed; obsolete files are reported with the flag that deletes them."""
    remembering.run("--edgeq-update", files=ONE, passed=1)
    remembering.run(
        "--edgeq-update",
        files="def test_a(remember): pass\ndef test_b(remember): remember()\n"
        "def test_c(remember): remember('one'); remember('two')\n",
        passed=3,
        shows=[
            "3 baselines were stored:",
            "Info: 1 baseline is obsolete; delete with --edgeq-update=prune:",
            f"  {FILE}: test_x.py::test_a passed without checking it",
        ],
    )
    assert FILE in files(remembering)


def test_a_failure_names_the_test_from_where_pytest_was_started(
    remembering: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is relative to rootdir, but the command must work in the current folder."""
    test = (
        "import pytest\nclass TestX:\n    @pytest.mark.parametrize('p', ['a b'])\n"
        "    def test_a(self, remember, p): remember()\n"
    )
    remembering.write({"pytest.ini": "[pytest]\n", "sub/test_x": test})
    monkeypatch.chdir(remembering.path / "sub")
    shows = [
        "*file: sub/__edgeq__/test_x/TestX.test_a[[]a_b]-*.op_dtypes.json",
        "*store it*: pytest 'test_x.py::TestX::test_a[[]a b]' --edgeq-update=new",
    ]
    remembering.run(shows=shows)
    remembering.run("test_x.py::TestX::test_a[a b]", "--edgeq-update=new", passed=1)
    remembering.run(passed=1)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["flag", "ini"])
def test_a_folder_of_their_own(remembering: Project, where: str) -> None:
    """Relative to rootdir, by the path of the test; obsolete files are found there, too."""
    ini = "[pytest]\n" + ("edgeq_snapshot_dir = kept\n" if where == "ini" else "")
    flag = ["--edgeq-snapshot-dir=kept"] if where == "flag" else []
    written = {"pytest.ini": ini, "sub/test_x": ONE}
    remembering.run("--edgeq-update", *flag, files=written, passed=1)
    kept = remembering.path / "kept" / "sub" / "test_x" / "test_a.op_dtypes.json"
    assert json.loads(kept.read_text())["owner"] == {"module": "sub/test_x.py", "test": "test_a"}
    assert files(remembering) == []
    remembering.run(*flag, passed=1)
    remembering.run(
        "--edgeq-update=prune",
        *flag,
        files={"sub/test_x": "def test_a(): pass  # claims nothing\n"},
        shows="1 baseline was deleted:",
    )
    assert not kept.exists()


def test_a_moved_folder_of_tests_keeps_its_files(remembering: Project) -> None:
    """Beside the test, a file names its owner by the module alone."""
    remembering.run("--edgeq-update", files={"one/test_x": ONE}, passed=1)
    (remembering.path / "one").rename(remembering.path / "two")
    remembering.run("two", passed=1, hides="=* edgeq =*")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("@pytest.fixture\ndef f(remember): remember()", "set up for"),
        ("@pytest.fixture\ndef f(remember):\n    yield\n    remember()", "torn down after"),
    ],
)
def test_a_claim_in_a_fixture_is_an_error(remembering: Project, body: str, said: str) -> None:
    """A fixture has no file of its own; the message says where to check instead."""
    told = f"*RuntimeError: *{said} test_x.py::test_a: check it in the body*"
    test = f"import pytest\n{body}\ndef test_a(f): pass\n"
    result = remembering.run("--edgeq-update=new", files=test, shows=told)
    assert result.parseoutcomes()["errors"] == 1
    assert files(remembering) == []


def test_a_fixture_that_the_body_asks_for_may_claim(remembering: Project) -> None:
    """What runs while the body runs is booked on the test, wherever it is written."""
    test = (
        "import pytest\n@pytest.fixture\ndef f(remember): remember()\n"
        "def test_a(request): request.getfixturevalue('f')\n"
    )
    remembering.run("--edgeq-update=new", files=test, passed=1)
    assert files(remembering) == [FILE]


def test_a_change_that_the_test_expects_is_not_reported(remembering: Project) -> None:
    """A test that passes because the check fails needs no advice at the end."""
    test = (
        "import pytest\ndef test_a(remember):\n    with pytest.raises(AssertionError): remember()\n"
    )
    remembering.run(files=test, passed=1, hides="=* edgeq =*")


@pytest.mark.slow
def test_groups_of_xdist_do_not_rename_the_owner(remembering: Project) -> None:
    """With --dist=loadgroup node ids end in the group, owners do not."""
    test = f"import pytest\n@pytest.mark.xdist_group('g')\n{ONE}def test_b(): pass\n"
    remembering.run("-n", "2", "--dist=loadgroup", "--edgeq-update", files=test, passed=2)
    assert files(remembering) == [FILE]
    remembering.run("-n", "0", passed=2)


def test_a_doctest_may_own_a_file(remembering: Project) -> None:
    """The owner is whatever item runs: a text file's examples, too."""
    Path("test_doc.txt").write_text(">>> getfixture('remember')()\n")
    remembering.run("--edgeq-update", passed=1)
    remembering.run(passed=1)
    [file] = files(remembering)
    assert file.startswith("__edgeq__/test_doc.txt/")


@pytest.mark.slow
def test_baselines_of_other_versions_are_told_on_every_run(
    remembering: Project, workers: tuple[str, ...]
) -> None:
    """In one line, passing or not; an update writes the versions down."""
    test = (
        "def test_a(remember): remember('one'); remember('two'){}\n"
        "def test_b(remember): remember()\n"
    )
    remembering.run(*workers, "--edgeq-update", files=test.format(""), passed=2)
    torch = importlib.metadata.version("torch")
    for path in remembering.path.glob("__edgeq__/test_x/test_a.*.json"):
        text = path.read_text("utf-8")
        assert f'"torch": "{torch}"' in text
        path.write_text(text.replace(f'"torch": "{torch}"', '"torch": "2.0.1"'), encoding="utf-8")
    told = (
        f"Info: 2 baselines are of other versions or options: torch 2.0.1 → {torch}; "
        "--edgeq-update=changed records these"
    )
    remembering.run(*workers, passed=2, shows=told)
    remembering.run(*workers, files=test.format("; assert 0"), shows=told)
    other = "*of other versions*"
    shows = "2 baselines were rewritten:"
    remembering.run(*workers, "--edgeq-update", shows=shows, hides=other)
    remembering.run(*workers, hides=other)
