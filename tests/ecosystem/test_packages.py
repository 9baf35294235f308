"""The sdist and the wheel: what is in them, and that they pass tests outside of the checkout."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import pytest_edgeq
from tests.ecosystem.overlay import ROOT, Overlay

# Environments are installed, and parts of this suite run in them.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

PACKAGE = Path(pytest_edgeq.__file__).parent

SUBSET = (
    *("tests/plugin/test_plugin_loading.py", "tests/plugin/test_plugin_errors.py"),
    *("tests/baselines/test_baselines_store.py", "tests/test_public_api.py"),
)


@pytest.fixture
def unpacked(built: Path, tmp_path: Path) -> Path:
    """The sdist's folder."""
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4; Debian 12 has 3.11.2
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(tmp_path)
    return tmp_path / path.name.removesuffix(".tar.gz")


def test_an_index_accepts_them(newest: Overlay, built: Path) -> None:
    """The metadata are whole, and the README can be rendered."""
    run = newest.run("-m", "twine", "check", "--strict", *built.iterdir(), cwd=built)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("PASSED") == 2


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    """With its data files and `py.typed`, without tests and without a path of this machine."""
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    stored = {name for name in contents if not name.split("/")[0].endswith(".dist-info")}
    expected = {
        path.relative_to(PACKAGE.parent).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert stored == expected
    assert "pytest_edgeq/py.typed" in stored
    for path in (ROOT, Path(sys.prefix)):
        assert [name for name, data in contents.items() if str(path).encode() in data] == []


def test_the_wheel_passes_the_tests_of_the_sdist(
    newest: Overlay, wheel: Path, unpacked: Path, tmp_path: Path
) -> None:
    """Outside of the checkout, and without the sdist's own copy of the package."""
    (unpacked / "pytest_edgeq").rename(unpacked / "not_imported")
    overlay = Overlay.make(tmp_path / "installed", newest)
    overlay.install("--no-deps", "--force-reinstall", str(wheel))

    where = overlay.run(
        *("-c", "import pytest_edgeq; print(pytest_edgeq.__file__)"), cwd=tmp_path, imports=unpacked
    )
    assert Path(where.stdout.strip()).is_relative_to(overlay.site_packages), where
    run = overlay.run("-m", "pytest", "-q", *SUBSET, cwd=unpacked, imports=unpacked)
    assert run.returncode == 0, run.stdout + run.stderr
