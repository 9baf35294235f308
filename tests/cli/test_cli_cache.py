"""`edgeq cache`: directory, size, and clearing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_edgeq.quantize.cache.directory import Store
from tests.cli.conftest import Refused, Run


def refuse(text: str) -> None:
    """Fail on any problem of the store."""
    raise AssertionError(text)


def filled(directory: Path) -> Store:
    """Make a cache of two entries."""
    store = Store(directory, refuse)
    store.write("convert", "a1", {"tflite": b"x" * 1_500_000})
    store.write("export", "b2", {"graph": b"y" * 500_000})
    return store


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Make a cache where the plugin keeps it, and go to that rootdir."""
    monkeypatch.chdir(tmp_path)
    return filled(tmp_path / ".pytest_cache" / "d" / "edgeq")


def test_where_it_is_and_how_large(
    store: Store, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the rootdir, and from a folder below it."""
    here = run("cache")
    below = tmp_path / "tests" / "deeper"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    deeper = run("cache", "--json")

    text = ".pytest_cache/d/edgeq: 2 entries, 2.0 MB, at most 2,147.5 MB\n"
    assert (here.exit_code, here.stdout) == (0, text)
    document = json.loads(deeper.stdout)
    assert Path(document["directory"]) == store.directory
    assert (document["entries"], document["exists"]) == (2, True)


def test_clear_asks(store: Store, run: Run) -> None:
    """Only a yes deletes; entries go, lock files stay, and the plugin goes on with an empty one."""
    with store.lock("convert", "a1"):
        pass

    refused = run("cache", "clear", given="n\n")
    assert refused.exit_code == 1
    assert "Delete 2 entries, 2.0 MB in .pytest_cache/d/edgeq? [y/N]" in refused.stderr
    assert store.read("convert", "a1") is not None

    agreed = run("cache", "clear", given="y\n")
    assert agreed.exit_code == 0
    assert agreed.stdout.endswith(".pytest_cache/d/edgeq: deleted 2 entries, 2.0 MB\n")
    assert store.read("convert", "a1") is None
    assert len(list((store.directory / "locks").iterdir())) == 1
    assert run("cache").stdout.startswith(".pytest_cache/d/edgeq: 0 entries, 0.0 MB")


def test_clear_without_asking(run: Run, tmp_path: Path) -> None:
    """By `--yes`, in the directory of `--dir`; a second time there is nothing to delete."""
    filled(tmp_path / "cache")

    first = run("cache", "clear", "--yes", "--dir", tmp_path / "cache", "--json")
    second = run("cache", "clear", "--dir", tmp_path / "cache")

    assert json.loads(first.stdout)["deleted_entries"] == 2
    assert (second.exit_code, second.stdout) == (
        0,
        f"{tmp_path / 'cache'}: deleted 0 entries, 0.0 MB\n",
    )


def test_another_folder_is_left_alone(refused: Refused, tmp_path: Path) -> None:
    """Files that end in .entry and are not the cache's."""
    folder = tmp_path / "journal" / "2024"
    folder.mkdir(parents=True)
    (folder / "diary.entry").write_text("mine")

    says = "is no conversion cache of pytest-edgeq: nothing was deleted"
    refused("cache", "clear", "--yes", "--dir", tmp_path / "journal", says=says)

    assert (folder / "diary.entry").read_text() == "mine"


def test_yes_to_nothing(refused: Refused) -> None:
    """A usage error: the word `clear` was forgotten."""
    refused("cache", "--yes", says="--yes confirms `edgeq cache clear`")
