"""The directory: damaged entries are misses, never errors; nothing is half written."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_edgeq.cache.directory import Store, size_of

KEY, PARTS = "a" * 64, {"tflite": bytes(range(256)) * 40, "facts": b"{}", "empty": b""}


@pytest.fixture
def said() -> list[str]:
    """The warnings of the store."""
    return []


@pytest.fixture
def store(tmp_path: Path, said: list[str]) -> Store:
    """An empty one."""
    return Store(tmp_path / "cache", said.append)


def _entry(store: Store) -> Path:
    return store.directory / "convert" / f"{KEY}.entry"


def test_what_was_written_is_read(store: Store, said: list[str]) -> None:
    """Every part, to the byte; another key and another kind have nothing."""
    assert store.read("convert", KEY) is None
    store.write("convert", KEY, PARTS)

    assert store.read("convert", KEY) == PARTS
    assert store.read("convert", "b" * 64) is None
    assert store.read("quantize", KEY) is None
    assert store.keys("convert", "a") == [KEY]
    assert store.keys("convert", "b") == []
    assert size_of(store.directory) == (1, _entry(store).stat().st_size)
    assert not said


def test_every_changed_byte_is_seen(store: Store, said: list[str]) -> None:
    """In the header as in the parts."""
    store.write("convert", KEY, {"tflite": b"content"})
    path = _entry(store)
    whole = path.read_bytes()
    for place in range(len(whole)):
        for changed in (whole[place] ^ 1, whole[place] ^ 0x80):
            path.write_bytes(whole[:place] + bytes([changed]) + whole[place + 1 :])
            assert store.read("convert", KEY) is None, place
    assert said
    assert all("damaged" in text and "runs again" in text for text in said)


def test_every_length_but_its_own_is_seen(store: Store, said: list[str]) -> None:
    """Cut off anywhere, or longer."""
    store.write("convert", KEY, {"tflite": b"content"})
    path = _entry(store)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert store.read("convert", KEY) is None, length
    path.write_bytes(whole + b"x")
    assert store.read("convert", KEY) is None
    path.write_bytes(whole)
    assert store.read("convert", KEY) == {"tflite": b"content"}


def test_an_entry_under_another_name_is_foreign(store: Store, said: list[str]) -> None:
    """Whole as it is: it is not what was asked for."""
    store.write("convert", "b" * 64, PARTS)
    (store.directory / "convert" / f"{'b' * 64}.entry").rename(_entry(store))

    assert store.read("convert", KEY) is None
    assert "it is the entry convert/bbb" in said[0]


@pytest.mark.parametrize("kind", ["a folder", "a link to nothing"])
def test_what_is_no_file_is_a_miss(store: Store, said: list[str], kind: str) -> None:
    """And the result of the step is not kept, or takes its place."""
    store.write("convert", "b" * 64, PARTS)
    if kind == "a folder":
        _entry(store).mkdir()
    else:
        _entry(store).symlink_to(store.directory / "nowhere")

    assert store.read("convert", KEY) is None
    store.write("convert", KEY, PARTS)
    assert bool(said) == (kind == "a folder")


def test_a_place_that_cannot_be_written_costs_a_warning(tmp_path: Path, said: list[str]) -> None:
    """A file where the directory should be, for the superuser too; each problem is told once."""
    tmp_path.joinpath("cache").write_text("not a directory")
    store = Store(tmp_path / "cache", said.append)
    for _ in range(2):
        with store.lock("convert", KEY):
            store.write("convert", KEY, PARTS)
        assert store.read("convert", KEY) is None
    assert len(said) == len(set(said))
    assert any("cannot be written" in text for text in said)
    assert any("cannot be locked" in text for text in said)


def test_a_full_disk_leaves_nothing_behind(store: Store, said: list[str]) -> None:
    """`/dev/full` stands for it: the entry is none, and no temporary file is left."""
    store.write("convert", "b" * 64, PARTS)
    before = sorted(store.directory.rglob("*"))
    opened = Path.open

    def full(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode == "wb":
            self.symlink_to("/dev/full")
        return opened(self, mode, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", full)
        store.write("convert", KEY, PARTS)

    assert sorted(store.directory.rglob("*")) == before
    assert "No space left" in said[0]


def test_the_least_recently_used_entries_go(tmp_path: Path, said: list[str]) -> None:
    """Reading counts as a use."""
    size = 1000
    store = Store(tmp_path, said.append, limit=3 * (size + 250))
    for number in range(3):
        store.write("convert", str(number), {"x": bytes(size)})
        os.utime(tmp_path / "convert" / f"{number}.entry", (number, number))
    assert store.read("convert", "0")
    store.write("convert", "3", {"x": bytes(size)})

    assert store.keys("convert", "") == ["0", "2", "3"]
    assert size_of(tmp_path)[1] <= 3 * (size + 250)


def test_what_others_write_is_counted_before_it_is_much(tmp_path: Path, said: list[str]) -> None:
    """Each of two writers recounts the directory after a sixteenth of the limit."""
    one, other = (Store(tmp_path, said.append, limit=160_000) for _ in range(2))
    for number in range(40):
        one.write("convert", f"one{number}", {"x": bytes(5_000)})
        other.write("convert", f"other{number}", {"x": bytes(5_000)})
        assert size_of(tmp_path)[1] <= 160_000 * (1 + 3 / 16)
    assert size_of(tmp_path)[1] > 100_000
    assert said == []


def test_what_a_dead_writer_left_goes(store: Store) -> None:
    """After an hour: before, it may still be written."""
    store.write("convert", KEY, PARTS)
    old, young = (store.directory / "convert" / f".{age}.entry.1-2" for age in ("old", "young"))
    for path in (old, young):
        path.write_bytes(b"part of an entry")
    os.utime(old, (time.time() - 4000,) * 2)
    # A process looks at all files with its first write.
    Store(store.directory, pytest.fail).write("convert", "b" * 64, PARTS)

    assert not old.exists()
    assert young.exists()
    assert len(store.keys("convert", "")) == 2


def test_the_directory_may_be_deleted_at_any_time(store: Store, said: list[str]) -> None:
    """Also while a lock is held."""
    store.write("convert", KEY, PARTS)
    with store.lock("convert", KEY):
        shutil.rmtree(store.directory)
        assert store.read("convert", KEY) is None
        store.write("convert", KEY, PARTS)
    assert store.read("convert", KEY) == PARTS
    assert not said


def test_version_control_does_not_see_it(store: Store) -> None:
    """A directory beside the tests is not committed by accident."""
    store.write("convert", KEY, PARTS)
    assert "*" in (store.directory / ".gitignore").read_text().splitlines()


def _hold(directory: Path, pipe: Any, *, dies: bool) -> None:
    store = Store(directory, print)
    with store.lock("convert", KEY):
        pipe.send("held")
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        pipe.recv()
        store.write("convert", KEY, PARTS)


@pytest.mark.parametrize("dies", [False, True])
def test_one_process_works_and_the_other_waits(store: Store, *, dies: bool) -> None:
    """It reads what the first wrote, or works itself where the first was killed."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_hold, args=(store.directory, theirs), kwargs={"dies": dies})
    process.start()
    assert ours.recv() == "held"
    if not dies:
        ours.send("go on")
    with store.lock("convert", KEY):
        assert store.read("convert", KEY) == (None if dies else PARTS)
    process.join()
    assert process.exitcode == (-signal.SIGKILL if dies else 0)
