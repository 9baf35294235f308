from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., pytest.RunResult]

ONE = "def test_a(remember): remember()\n"
FILE = "__edgeq__/test_x/test_a.op_dtypes.json"


def files(pytester: pytest.Pytester) -> list[str]:
    """List every baseline, and anything else that lies about in their folders."""
    return sorted(
        path.relative_to(pytester.path).as_posix()
        for folder in pytester.path.rglob("__edgeq__")
        for path in folder.rglob("*")
        if path.is_file()
    )


def test_the_five_steps(
    pytester: pytest.Pytester, run_everywhere: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing and changed fail and write nothing; an update accepts; the same passes."""
    pytester.makepyfile(test_x=ONE)
    file = pytester.path / FILE

    missing = run_everywhere()
    missing.assert_outcomes(failed=1)
    missing.stdout.fnmatch_lines(
        [
            '*AssertionError: no baseline is stored yet: op-dtype map "op_dtypes" (*',
            "*store it*: pytest test_x.py::test_a --edgeq-update=new",
            "=* edgeq =*",
            "Error: 1 check has no baseline yet: see above what would be stored, and store it with "
            "--edgeq-update=new",
        ]
    )
    assert files(pytester) == []

    stored = run_everywhere("--edgeq-update=new")
    stored.assert_outcomes(passed=1)
    stored.stdout.fnmatch_lines(
        ["=* edgeq =*", "1 baseline was stored:", f"  {FILE}: 1 op, 0 of them in float"]
    )
    assert files(pytester) == [FILE]
    before = file.read_bytes()

    same = run_everywhere()
    same.assert_outcomes(passed=1)
    same.stdout.no_re_match_line("=+ edgeq =+")

    monkeypatch.setenv("SCHEME", "float")
    changed = run_everywhere()
    changed.assert_outcomes(failed=1)
    changed.stdout.fnmatch_lines(
        [
            "*AssertionError: ADD #* (layer1.0) went from int8 to float32",
            f"*file: {FILE}",
            "*update: if the change is meant: pytest test_x.py::test_a --edgeq-update=changed",
            "Error: 1 check has changed: see in the failures above what changed and why; *=changed",
            # Nothing but line one is seen here, and not all of that.
            "FAILED test_x.py::test_a - AssertionError: ADD #* (layer1.0) went from int8*",
        ]
    )
    assert file.read_bytes() == before

    accepted = run_everywhere("--edgeq-update=changed")
    accepted.assert_outcomes(passed=1)
    accepted.stdout.fnmatch_lines(
        ["1 baseline was rewritten:", f"  {FILE}: 1 op, 1 of them in float"]
    )
    assert json.loads(file.read_text())["data"]["ops"][0]["scheme"] == "float"
    run_everywhere().assert_outcomes(passed=1)


def test_the_bare_flag_stores_and_rewrites_but_never_deletes(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bare is new and changed; what is obsolete is told with the flag that deletes it."""
    pytester.makepyfile(test_x=ONE)
    run("--edgeq-update").assert_outcomes(passed=1)
    monkeypatch.setenv("SCHEME", "float")
    pytester.makepyfile(
        test_x="def test_a(remember): pass\ndef test_b(remember): remember()\n"
        "def test_c(remember): remember('one'); remember('two')\n"
    )

    result = run("--edgeq-update")

    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(
        [
            "3 baselines were stored:",
            "Info: 1 baseline is obsolete; delete with --edgeq-update=prune:",
            f"  {FILE}: test_x.py::test_a passed without checking it",
        ]
    )
    assert FILE in files(pytester)


def test_a_failure_names_the_test_from_where_pytest_was_started(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is told from rootdir, but the command must work where the user stands."""
    pytester.makeini("[pytest]\n")
    sub = pytester.mkdir("sub")
    (sub / "test_x.py").write_text(
        "import pytest\nclass TestX:\n"
        '    @pytest.mark.parametrize("p", ["a b"])\n'
        "    def test_a(self, remember, p): remember()\n"
    )
    monkeypatch.chdir(sub)

    result = run()

    result.stdout.fnmatch_lines(
        [
            "*file: sub/__edgeq__/test_x/TestX.test_a[[]a_b]-*.op_dtypes.json",
            "*store it*: pytest 'test_x.py::TestX::test_a[[]a b]' --edgeq-update=new",
        ]
    )
    run("test_x.py::TestX::test_a[a b]", "--edgeq-update=new").assert_outcomes(passed=1)
    run().assert_outcomes(passed=1)


@pytest.mark.parametrize("where", ["flag", "ini"])
def test_a_folder_of_their_own(pytester: pytest.Pytester, run: Run, where: str) -> None:
    """Relative to rootdir, by the path of the test; obsolete files are found there, too."""
    pytester.makeini("[pytest]\n" + ("edgeq_snapshot_dir = kept\n" if where == "ini" else ""))
    sub = pytester.mkdir("sub")
    (sub / "test_x.py").write_text(ONE)
    flag = ["--edgeq-snapshot-dir=kept"] if where == "flag" else []

    run("--edgeq-update", *flag).assert_outcomes(passed=1)

    kept = pytester.path / "kept" / "sub" / "test_x" / "test_a.op_dtypes.json"
    assert json.loads(kept.read_text())["owner"] == {"module": "sub/test_x.py", "test": "test_a"}
    assert files(pytester) == []
    run(*flag).assert_outcomes(passed=1)

    (sub / "test_x.py").write_text("def test_a(): pass  # claims nothing\n")
    run("--edgeq-update=prune", *flag).stdout.fnmatch_lines(["1 baseline was deleted:"])
    assert not kept.exists()
    assert (pytester.path / "kept").is_dir()


def test_a_moved_folder_of_tests_keeps_its_files(pytester: pytest.Pytester, run: Run) -> None:
    """Beside the test, a file names its owner by the module alone."""
    one = pytester.mkdir("one")
    (one / "test_x.py").write_text(ONE)
    run("--edgeq-update").assert_outcomes(passed=1)
    one.rename(pytester.path / "two")

    result = run("two")

    result.assert_outcomes(passed=1)
    result.stdout.no_re_match_line("=+ edgeq =+")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("@pytest.fixture\ndef f(remember): remember()\ndef test_a(f): pass", "set up for"),
        (
            "@pytest.fixture\ndef f(remember):\n    yield\n    remember()\ndef test_a(f): pass",
            "torn down after",
        ),
    ],
)
def test_a_claim_in_a_fixture_is_an_error(
    pytester: pytest.Pytester, run: Run, body: str, said: str
) -> None:
    """A fixture has no file of its own; the message says where to check instead."""
    pytester.makepyfile(test_x=f"import pytest\n{body}\n")

    result = run("--edgeq-update=new")

    assert result.parseoutcomes()["errors"] == 1
    result.stdout.fnmatch_lines(
        [f"*RuntimeError: *{said} test_x.py::test_a: check it in the body*"]
    )
    assert files(pytester) == []


def test_a_fixture_that_the_body_asks_for_may_claim(pytester: pytest.Pytester, run: Run) -> None:
    """What runs while the body runs is booked on the test, wherever it is written."""
    pytester.makepyfile(
        test_x="import pytest\n@pytest.fixture\ndef f(remember): remember()\n"
        "def test_a(request): request.getfixturevalue('f')\n"
    )

    run("--edgeq-update=new").assert_outcomes(passed=1)
    assert files(pytester) == [FILE]


def test_two_values_for_one_name(pytester: pytest.Pytester, run: Run) -> None:
    """On update an error that stores neither."""
    pytester.makepyfile(test_x="def test_a(remember): remember(); remember(scheme='float')\n")

    result = run("--edgeq-update")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*ValueError: this test claims two different values as op-dtype*"])
    result.stdout.no_fnmatch_line("*was stored:")
    assert files(pytester) == []


def test_a_file_that_cannot_be_read_is_an_error_of_its_test(
    pytester: pytest.Pytester, run: Run
) -> None:
    """Update does not replace what could not be read: someone may want it back."""
    pytester.makepyfile(test_x=ONE)
    run("--edgeq-update").assert_outcomes(passed=1)
    (pytester.path / FILE).write_text("<<<<<<< HEAD\n")

    result = run("--edgeq-update")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*ValueError: *test_a.op_dtypes.json holds the marks of an unf*"])
    assert (pytester.path / FILE).read_text() == "<<<<<<< HEAD\n"


def test_a_change_that_the_test_expects_is_not_reported(
    pytester: pytest.Pytester, run: Run
) -> None:
    """A test that passes because the check fails needs no advice at the end."""
    pytester.makepyfile(
        test_x="import pytest\ndef test_a(remember):\n"
        "    with pytest.raises(AssertionError): remember()\n"
    )

    result = run()

    result.assert_outcomes(passed=1)
    result.stdout.no_re_match_line("=+ edgeq =+")


def test_records_are_on_the_reports(pytester: pytest.Pytester, run_everywhere: Run) -> None:
    """Other plugins find what a test claimed on its call report, as plain data."""
    pytester.makepyfile(test_x=ONE + "def test_b(): pass\n")
    run_everywhere("--edgeq-update").assert_outcomes(passed=2)
    with (pytester.path / "conftest.py").open("a") as file:
        file.write(
            "\ndef pytest_runtest_logreport(report):\n"
            "    import json, pathlib\n"
            "    if hasattr(report, 'edgeq'):\n"
            "        with open('records.jsonl', 'a') as file:\n"
            "            print(json.dumps(report.edgeq), file=file)\n"
        )

    run_everywhere()

    lines = (pytester.path / "records.jsonl").read_text().splitlines()
    records = {json.loads(line)["owner"]["test"]: json.loads(line)["claims"] for line in lines}
    claim = {"path": FILE, "category": "unchanged", "written": False, "note": ""}
    claim |= {"kind": "op_dtype_map", "change": None, "since": [], "stored": "", "remarks": []}
    assert records == {"test_a": [claim], "test_b": []}


def test_groups_of_xdist_do_not_rename_the_owner(pytester: pytest.Pytester, run: Run) -> None:
    """With --dist=loadgroup node ids end in the group, owners do not."""
    pytester.makepyfile(
        test_x="import pytest\n@pytest.mark.xdist_group('g')\n" + ONE + "def test_b(): pass\n"
    )

    run("-n", "2", "--dist=loadgroup", "--edgeq-update").assert_outcomes(passed=2)

    assert files(pytester) == [FILE]
    run("-n", "0").assert_outcomes(passed=2)


def test_a_doctest_may_own_a_file(pytester: pytest.Pytester, run: Run) -> None:
    """The owner is whatever item runs: a text file's examples, too."""
    Path("test_doc.txt").write_text(">>> getfixture('remember')()\n")

    run("--edgeq-update").assert_outcomes(passed=1)

    run().assert_outcomes(passed=1)
    [file] = files(pytester)
    assert file.startswith("__edgeq__/test_doc.txt/")


def test_baselines_of_other_versions_are_told_on_every_run(
    pytester: pytest.Pytester, run_everywhere: Run
) -> None:
    """In one line, passing or not; an update writes the versions down."""
    pytester.makepyfile(
        test_x="def test_a(remember): remember('one'); remember('two')\n"
        "def test_b(remember): remember()\n"
    )
    run_everywhere("--edgeq-update").assert_outcomes(passed=2)
    torch = importlib.metadata.version("torch")
    for path in pytester.path.glob("__edgeq__/test_x/test_*.json"):
        text = path.read_text("utf-8")
        if "test_b" in path.name:
            continue
        assert f'"torch": "{torch}"' in text
        path.write_text(text.replace(f'"torch": "{torch}"', '"torch": "2.0.1"'), encoding="utf-8")
    told = (
        f"Info: 2 baselines are of other versions or options: torch 2.0.1 → {torch}; "
        "--edgeq-update=changed writes these down"
    )

    passing = run_everywhere()
    passing.assert_outcomes(passed=2)
    passing.stdout.fnmatch_lines([told])
    pytester.makepyfile(
        test_x="def test_a(remember): remember('one'); remember('two'); assert 0\n"
        "def test_b(remember): remember()\n"
    )
    run_everywhere().stdout.fnmatch_lines([told])
    updated = run_everywhere("--edgeq-update")
    updated.stdout.fnmatch_lines(["2 baselines were rewritten:"])
    updated.stdout.no_fnmatch_line("*of other versions*")
    run_everywhere().stdout.no_fnmatch_line("*of other versions*")
