from __future__ import annotations

from pathlib import Path, PurePosixPath, PureWindowsPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_edgeq.baselines.claims import Owner
from pytest_edgeq.baselines.paths import Layout

ROOT = Path("/root")
MODULE = ROOT / "tests" / "test_x.py"


def relative(test: str, name: str = "op_dtypes", *, directory: Path | None = None) -> str:
    """Tell the path of a claim's file from the root folder."""
    path = Layout(ROOT, directory).path(Owner(MODULE, test), name)
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize(
    ("test", "file"),
    [
        ("test_y", "test_y.op_dtypes.json"),
        ("TestX::test_y[int8-3]", "TestX.test_y[int8-3].op_dtypes.json"),
    ],
)
def test_a_plain_name_is_kept(test: str, file: str) -> None:
    """A name that stands on every file system is the file's name, without a hash."""
    assert relative(test) == f"tests/__edgeq__/test_x/{file}"


def test_a_folder_of_their_own() -> None:
    """With edgeq_snapshot_dir the path from rootdir is the path below it; `..` has another name."""
    found = relative("test_y", directory=ROOT / "remembered")
    outside = Layout(ROOT, ROOT / "kept").folder(Path("/elsewhere/test_x.py"))

    assert found == "remembered/tests/test_x/test_y.op_dtypes.json"
    assert outside == ROOT / "kept" / "__" / "elsewhere" / "test_x"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("test_y[A]", "n"), ("test_y[a]", "n")),
        (("test_y[a::b]", "n"), ("test_y[a.b]", "n")),
        (("test_y", "N"), ("test_y", "n")),
        (("test_y[x]", "b].c"), ("test_y[x].b]", "c")),
        (("test_Y", "n"), ("test_y", "n")),
        (("test_" + "y" * 300, "n"), ("test_" + "y" * 301, "n")),
    ],
)
def test_names_that_look_alike_have_files_of_their_own(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    """Where the plain names would meet on some file system, a hash keeps them apart."""
    assert relative(*one).casefold() != relative(*other).casefold()


@given(st.text(min_size=1).map(lambda text: f"test_y[{text}]"), st.text(min_size=1, max_size=300))
def test_every_file_name_stands_on_every_file_system(test: str, name: str) -> None:
    """For all ids and names it is one short part of a path, in ASCII."""
    file = PurePosixPath(relative(test, name)).name

    assert file.isascii()
    assert len(file) <= 220
    assert not set(file) & set('<>:"/\\|?*')
    assert file.isprintable()
    assert len(PureWindowsPath(file).parts) == 1
