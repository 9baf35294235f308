from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_edgeq.baselines import store

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)
values = st.recursive(
    scalars | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def document(data: dict[str, Any], **fields: Any) -> store.Document:
    """Make a document around some data."""
    return store.Document(
        **{
            "kind": "op_dtype_map",
            "module": "test_x.py",
            "test": "test_y",
            "name": "op_dtypes",
            "producer": {"torch": "2.13.0"},
            "data": data,
            **fields,
        }
    )


@given(st.dictionaries(st.text(), values, max_size=4))
def test_what_is_rendered_is_read_back(data: dict[str, Any]) -> None:
    """The writer loses nothing, and its text ends with one newline."""
    text = store.render(document(data))

    assert json.loads(text)["data"] == data
    assert text.endswith("}\n")


def test_the_text_is_made_for_review() -> None:
    """Sorted keys, one op a line, so that a diff of two files reads op by op."""
    text = store.render(
        document({"ops": [{"op": "ADD", "inputs": ["int8", "int8"]}, {"op": "MUL", "inputs": []}]})
    )

    assert text == (
        "{\n"
        '  "data": {\n'
        '    "ops": [\n'
        '      {"inputs": ["int8", "int8"], "op": "ADD"},\n'
        '      {"inputs": [], "op": "MUL"}\n'
        "    ]\n"
        "  },\n"
        '  "edgeq_schema": 1,\n'
        '  "kind": "op_dtype_map",\n'
        '  "name": "op_dtypes",\n'
        '  "owner": {\n'
        '    "module": "test_x.py",\n'
        '    "test": "test_y"\n'
        "  },\n"
        '  "producer": {\n'
        '    "torch": "2.13.0"\n'
        "  }\n"
        "}\n"
    )


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, or a file that another program holds: the old content stands."""
    path = tmp_path / "a.json"
    path.write_text("old")

    def refuse(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="no space left"):
        store.write(path, b"new")

    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_the_file_is_for_all_to_read(tmp_path: Path) -> None:
    """A baseline has the permissions of any file that the user makes."""
    (tmp_path / "other").write_text("")
    store.write(tmp_path / "a.json", b"{}")

    assert os.stat(tmp_path / "a.json").st_mode == os.stat(tmp_path / "other").st_mode  # noqa: PTH116


def test_the_last_file_takes_its_folder_along(tmp_path: Path) -> None:
    """Deleting leaves no empty folders of ours, and none of the user's is touched."""
    one, other = (tmp_path / "__edgeq__" / "test_x" / name for name in ("a.json", "b.json"))
    for path in (one, other):
        store.write(path, b"{}")

    store.delete(one)
    assert other.exists()

    store.delete(other)
    assert list(tmp_path.iterdir()) == []


WHOLE = json.loads(store.render(document({})))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ["a.json is empty", "--edgeq-update=new"]),
        ("\udcff", ["not valid JSON", "can't decode byte 0xff"]),
        ('{"a": 1,\n  oops}', ["not valid JSON", "line 2, column 3", "--edgeq-update=new"]),
        (
            '{\n<<<<<<< HEAD\n"a": 1\n=======\n"a": 2\n>>>>>>> main\n}',
            ["unfinished merge", "line 2", "<<<<<<< HEAD", "--edgeq-update=changed"],
        ),
        ("[" * 100_000, ["maximum recursion depth"]),
        ("[]", ["no key 'edgeq_schema'"]),
        ("{}", ["no key 'edgeq_schema'"]),
        (json.dumps({**WHOLE, "edgeq_schema": 2}), ["edgeq_schema 2", "reads 1", "Upgrade"]),
        (json.dumps({**WHOLE, "edgeq_schema": True}), ["edgeq_schema True"]),
        (json.dumps({"edgeq_schema": 1}), ["content lacks kind, owner, name, data"]),
        (json.dumps({**WHOLE, "owner": {"test": "x"}}), ["content.owner lacks module"]),
        (json.dumps({**WHOLE, "kind": 1}), ["content.kind is not a text"]),
        (
            json.dumps({**WHOLE, "data": {"a": float("nan")}}),
            ["not valid JSON", "NaN is not a JSON number"],
        ),
        ('{"a": ' + "9" * 5000 + "}", ["not valid JSON", "Exceeds the limit"]),
        ('{"b": {"a": 1, "a": 2}}', ["not valid JSON", "the key 'a' occurs twice in one object"]),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str, said: list[str]) -> None:
    """Each says which file, what was seen and what to do."""
    path = tmp_path / "a.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))

    with pytest.raises(ValueError, match=r"^tests/a\.json ") as caught:
        store.read(path, "tests/a.json")

    for words in said:
        assert words in str(caught.value)


@pytest.mark.skipif(os.name != "posix", reason="Windows has no such files in a folder")
def test_what_is_no_file(tmp_path: Path) -> None:
    """A pipe is not waited for, and a device without an end is not read."""
    pipe, zeros = tmp_path / "pipe.json", tmp_path / "zeros.json"
    os.mkfifo(pipe)
    zeros.symlink_to("/dev/zero")
    for path in (pipe, zeros):
        with pytest.raises(ValueError, match=r"^a\.json is a pipe, a socket or a device, not a "):
            store.read(path, "a.json")


def test_a_byte_order_mark_and_windows_line_ends_do_not_matter(tmp_path: Path) -> None:
    """What an editor on Windows makes of a file still reads."""
    path = tmp_path / "a.json"
    text = store.render(document({"a": 1})).replace("\n", "\r\n")
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())

    assert store.read(path, "a.json") == document({"a": 1})
