"""Full disks, folders that nobody may write, other file systems, other sessions."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_edgeq.quantize.cache.directory import Store
from tests.faults.sessions import SCHEMES, Project
from tests.waiting import output_of

# Several sessions of pytest, of up to 120 s each on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

Mount = Callable[[str], Path]

ENTRY = {"file": bytes(200_000)}


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Give file systems of a size, which root can make on Linux."""
    made: list[Path] = []

    def mounted(size: str) -> Path:
        folder = tmp_path / f"disk{len(made)}"
        folder.mkdir()
        command = ("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
        except FileNotFoundError:
            pytest.skip("a disk of a given size is made by mount, of Linux")
        if done.returncode:
            pytest.skip(f"only root may mount a disk of a given size: {done.stderr.strip()}")
        made.append(folder)
        return folder

    yield mounted
    for folder in made:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=100)


@contextlib.contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """Let nobody write to a file system, not even root."""
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=100)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True, timeout=100)


def fill(disk: Path, *, leave: int) -> Path:
    """Write a file that leaves so many bytes of a file system."""
    path = disk / "filler"
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    path.write_bytes(bytes(free - leave))
    return path


def test_a_full_disk_fails_the_test_with_a_sentence(mount: Mount) -> None:
    """What was stored is whole; the summary does not advise what has just failed."""
    disk = mount("1m")
    project = Project(disk, count=6)
    filler = fill(disk, leave=110_000)

    code, text = project.run(SCHEMES[0], "--edgeq-update=new", "--tb=short")

    assert code == 1
    assert "\nE   OSError: baseline not stored: __edgeq__/test_it/test_it[" in text
    assert "json: No space left on device\nE   cause: the file system refused the write" in text
    assert "\nE   fix: let this user write there, or free space, then run" in text
    assert "could not be written: see in the failures above why" in text
    assert "--edgeq-update=new" not in text.partition("short test summary")[0]
    stored = project.schemes()
    assert 0 < len(stored) < 6
    assert project.other_files() == []
    filler.unlink()
    assert project.run(SCHEMES[0], "--edgeq-update=new")[0] == 0
    assert len(project.schemes()) == 6


def test_a_full_disk_leaves_the_old_baselines(mount: Mount) -> None:
    """A rewrite that fails has changed nothing."""
    disk = mount("1m")
    project = Project(disk, count=6)
    assert project.run(SCHEMES[0], "--edgeq-update=new")[0] == 0
    fill(disk, leave=8_000)

    code, text = project.run(SCHEMES[1], "--edgeq-update=changed", "--tb=short")

    assert code == 1
    assert text.count("\nE   OSError: baseline not stored: ") == 6
    assert set(project.schemes().values()) == {SCHEMES[0]}
    assert project.other_files() == []
    assert project.run(SCHEMES[0])[0] == 0


def test_baselines_on_a_disk_that_is_read_only(mount: Mount) -> None:
    """They are compared; to store them fails with a sentence."""
    disk = mount("1m")
    project = Project(disk, count=2)
    assert project.run(SCHEMES[0], "--edgeq-update=new")[0] == 0
    with read_only(disk):
        same = project.run(SCHEMES[0], "-p", "no:cacheprovider")
        changed = project.run(SCHEMES[1], "-p", "no:cacheprovider", "--edgeq-update", "--tb=short")

    assert same[0] == 0, same[1]
    assert changed[0] == 1
    assert "\nE   OSError: baseline not stored: __edgeq__/test_it/test_it[" in changed[1]
    assert "Read-only file system" in changed[1]
    assert "\nE   fix: let this user write there, or free space, then run" in changed[1]


def test_a_cache_on_a_full_disk_and_on_one_that_is_read_only(mount: Mount) -> None:
    """Nothing is kept, which is told, and what was kept is read."""
    disk = mount("1m")
    told: list[str] = []
    store = Store(disk / "cache", told.append)
    store.write("convert", "one", ENTRY)
    fill(disk, leave=50_000)

    store.write("convert", "two", ENTRY)

    (text,) = told
    assert "No space left on device" in text
    assert text.endswith("; the result is not kept")
    assert [path.name for path in (disk / "cache" / "convert").iterdir()] == ["one.entry"]
    told.clear()
    with read_only(disk):
        other = Store(disk / "cache", told.append)
        with other.lock("convert", "one"):
            assert other.read("convert", "one") == ENTRY
        other.write("convert", "three", ENTRY)
    assert any("Read-only file system" in text for text in told)
    assert any("cannot be locked" in text for text in told) or len(told) == 1


def test_a_cache_on_another_file_system(mount: Mount, tmp_path: Path) -> None:
    """By its own path, and by a link from the first file system."""
    disk = mount("2m")
    link = tmp_path / "cache"
    link.symlink_to(disk, target_is_directory=True)
    told: list[str] = []
    for folder in (disk, link):
        store = Store(folder, told.append)
        with store.lock("convert", folder.name):
            store.write("convert", folder.name, ENTRY)
    assert all(
        Store(disk, told.append).read("convert", name) == ENTRY for name in (disk.name, "cache")
    )
    assert told == []


def test_two_sessions_that_update_at_once(tmp_path: Path) -> None:
    """Each file is of one of them, whole; the next run says which of them differ."""
    project = Project(tmp_path)
    sessions = [project.start(scheme, "--edgeq-update") for scheme in SCHEMES]
    for session in sessions:
        text = output_of(session, 120)
        assert session.returncode == 0, text

    found = project.schemes()

    assert len(found) == project.count
    assert project.other_files() == []
    _, text = project.run(SCHEMES[0], "--tb=no")
    differ = list(found.values()).count(SCHEMES[1])
    assert (f"{differ} failed" in text) == (differ > 0), text
