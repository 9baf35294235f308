"""The directory: damaged entries are misses, never errors; nothing is half written."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_edgeq.quantize.cache import directory
from pytest_edgeq.quantize.cache.directory import Store, size_of

KEY, PARTS = "a" * 64, {"tflite": bytes(range(256)) * 40, "facts": b"{}", "empty": b""}


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


def test_every_changed_byte_and_length_is_seen(store: Store, said: list[str]) -> None:
    """In the header as in the parts; cut off anywhere, or longer."""
    store.write("convert", KEY, {"tflite": b"content"})
    path = _entry(store)
    whole = path.read_bytes()
    damaged = [whole[:length] for length in range(len(whole))]
    for place, byte in enumerate(whole):
        damaged.append(whole[:place] + bytes([byte ^ 0x81]) + whole[place + 1 :])
    for content in (*damaged, whole + b"x"):
        path.write_bytes(content)
        assert store.read("convert", KEY) is None, content
    path.write_bytes(whole)
    assert store.read("convert", KEY) == {"tflite": b"content"}
    assert all("damaged" in text and "runs again" in text for text in said)


def test_an_entry_under_another_name_is_foreign(store: Store, said: list[str]) -> None:
    """Whole as it is: it is not what was asked for."""
    store.write("convert", "b" * 64, PARTS)
    (store.directory / "convert" / f"{'b' * 64}.entry").rename(_entry(store))

    assert store.read("convert", KEY) is None
    assert "it is the entry convert/bbb" in said[0]


@pytest.mark.parametrize("kind", ["a folder", "a link to nothing", "a pipe", "a device"])
def test_what_is_no_file_is_a_miss(store: Store, said: list[str], kind: str) -> None:
    """And the result of the step takes its place, or is not kept where a folder is."""
    store.write("convert", "b" * 64, PARTS)
    path = _entry(store)
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(os.devnull if kind == "a device" else "gone")

    assert size_of(store.directory)[0] == 1
    assert store.read("convert", KEY) is None
    assert bool(said) == (kind != "a link to nothing")
    store.write("convert", KEY, PARTS)
    assert store.read("convert", KEY) == (None if kind == "a folder" else PARTS)


def _with_header(header: bytes, content: bytes = b"") -> bytes:
    whole = header + b"\n" + content
    return whole + hashlib.sha256(whole).digest()


@pytest.mark.parametrize(
    "told",
    [
        [],
        [f"convert/{KEY}", 1],
        [f"convert/{KEY}", [["x", "y"]]],
        [f"convert/{KEY}", [["x", -1]]],
        [f"convert/{KEY}", [["x", 1 << 40]]],
        [f"convert/{KEY}", [["x", float("inf")]]],
        ["convert/other", []],
        "\udcff",
        "[" * 50_000,
    ],
)
def test_a_header_of_another_program_is_damage(store: Store, said: list[str], told: Any) -> None:
    """Its hash is right; what it says is not."""
    header = told if isinstance(told, str) else json.dumps(told)
    store.write("convert", KEY, PARTS)
    _entry(store).write_bytes(_with_header(header.encode("utf-8", "surrogateescape")))

    assert store.read("convert", KEY) is None
    assert len(said) == 1
    assert "is damaged" in said[0]


def test_a_file_larger_than_memory_is_a_miss(store: Store, said: list[str]) -> None:
    """4 TiB of nothing, whatever its first line says of it."""
    store.write("convert", KEY, PARTS)
    size = 4 << 40
    header = json.dumps([f"convert/{KEY}", [["x", size]]]).encode()
    _entry(store).write_bytes(_with_header(header))
    os.truncate(_entry(store), _entry(store).stat().st_size + size)
    assert store.read("convert", KEY) is None
    assert ["is damaged" in text for text in said] == [True]


def test_a_path_that_no_system_takes_costs_a_warning(tmp_path: Path, said: list[str]) -> None:
    """One with a NUL in it."""
    store = Store(tmp_path / "a\0b", said.append)
    with store.lock("convert", KEY):
        store.write("convert", KEY, PARTS)
    assert store.read("convert", KEY) is None
    assert store.keys("convert", "") == []
    assert size_of(store.directory) == (0, 0)
    assert len(said) == 3


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


def test_the_directory_is_listed_once_for_many_small_entries(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process; a `stat` of each of thousands of files takes longer than a write."""
    listings: list[Path] = []
    files = directory._files

    def counted(folder: Path) -> Any:
        listings.append(folder)
        return files(folder)

    monkeypatch.setattr(directory, "_files", counted)
    limit = 64 * 30_000
    for number in range(20):
        Store(tmp_path, said.append, limit=limit).write("convert", str(number), {"x": bytes(1000)})
    assert len(listings) == 1
    Store(tmp_path, said.append, limit=limit).write("convert", "large", {"x": bytes(20_000)})
    assert len(listings) == 2


def _written_until_full(store: Store, limit: int) -> None:
    """Write entries of a kilobyte; the directory is never larger than its limit."""
    for number in range(8):
        store.write("convert", f"new{number}", {"x": bytes(1000)})
        assert size_of(store.directory)[1] <= limit


def test_what_is_no_file_does_not_stop_the_eviction(tmp_path: Path, said: list[str]) -> None:
    """Nor is it counted."""
    store = Store(tmp_path, said.append, limit=4000)
    store.write("convert", KEY, PARTS)
    for folder in (tmp_path, tmp_path / "convert"):
        folder.joinpath("loop.entry").symlink_to(folder / "loop.entry")
        os.mkfifo(folder / "pipe.entry")
    _written_until_full(store, 4000)

    assert said == []


def test_what_a_dead_writer_left_goes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an hour: before, it may still be written."""
    store.write("convert", KEY, PARTS)
    old, young = (store.directory / "convert" / f".{age}.entry.1-2" for age in ("old", "young"))
    for path in (old, young):
        path.write_bytes(b"part of an entry")
    os.utime(old, (time.time() - 4000,) * 2)
    monkeypatch.setattr(Store, "_room", {})  # a process lists all files at its first write
    store.write("convert", "b" * 64, PARTS)

    assert not old.exists()
    assert young.exists()
    assert len(store.keys("convert", "")) == 2


def test_files_of_others_are_left_alone(tmp_path: Path, said: list[str]) -> None:
    """Where a user names a directory that holds more than the cache."""
    paths = [tmp_path / name for name in (".env", "sub/.profile", "sub/deep/.a.entry.1-2")]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(9000))
        os.utime(path, (0, 0))
    _written_until_full(Store(tmp_path, said.append, limit=4000), 4000)

    assert all(path.exists() for path in paths)


def test_the_directory_may_be_deleted_at_any_time(store: Store, said: list[str]) -> None:
    """Also while a lock is held."""
    store.write("convert", KEY, PARTS)
    assert "*" in (store.directory / ".gitignore").read_text().splitlines()
    with store.lock("convert", KEY):
        shutil.rmtree(store.directory)
        assert store.read("convert", KEY) is None
        store.write("convert", KEY, PARTS)
    assert store.read("convert", KEY) == PARTS
    assert not said
