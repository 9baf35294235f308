"""Files that are none: each is refused with what was seen and what to do, and nothing crashes."""

from __future__ import annotations

import io
import os
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fixtures.tflite import make
from fixtures.tflite.writer import FileWriter, chain, one_op, pack, unpack
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.op_dtypes import OpDtypeMap
from pytest_edgeq.tflite.source import open_tflite

SOUND = make.CONVERTED / "nested.int8.tflite"


def test_a_path_is_mapped_and_bytes_are_used_where_they_stand() -> None:
    """Nothing is copied, and both give the same map."""
    content = SOUND.read_bytes()
    assert open_tflite(content) is content
    assert not isinstance(open_tflite(SOUND), bytes)
    assert open_tflite(str(SOUND))[:8] == content[:8]
    by_path, by_content = OpDtypeMap(OpGraph.read(SOUND)), OpDtypeMap(OpGraph.read(content))
    assert by_path == by_content
    assert OpDtypeMap(OpGraph.read(bytearray(content))) == by_content  # type: ignore[arg-type]


def test_a_missing_path_names_its_neighbours(tmp_path: Path) -> None:
    """A typo is the usual cause."""
    (tmp_path / "model_int8.tflite").touch()
    with pytest.raises(FileNotFoundError, match=r"no \.tflite file at .*holds model_int8\.tflite"):
        open_tflite(tmp_path / "model_int4.tflite")
    with pytest.raises(FileNotFoundError, match=r"no \.tflite file at"):
        open_tflite(tmp_path / "nowhere" / "model.tflite")


def test_a_folder_and_an_empty_file(tmp_path: Path) -> None:
    """Neither is a file that was damaged."""
    with pytest.raises(IsADirectoryError, match="is a folder"):
        open_tflite(tmp_path)
    empty = tmp_path / "empty.tflite"
    empty.touch()
    with pytest.raises(ValueError, match="is empty"):
        open_tflite(empty)
    with pytest.raises(ValueError, match="0 bytes are no"):
        open_tflite(b"")


def test_a_path_that_the_system_refuses(tmp_path: Path) -> None:
    """Its own error names the path and says why; it is not taken for a file that is missing."""
    path = tmp_path / ("x" * 300)
    with pytest.raises(OSError, match="cannot be opened: File name too long"):
        open_tflite(path)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names or files")
def test_a_path_that_is_no_text_and_a_pipe(tmp_path: Path) -> None:
    """The interpreter takes the one for no path at all, and the other is never written to."""
    path = tmp_path / os.fsdecode(b"\xff.tflite")
    path.write_bytes(SOUND.read_bytes())
    with pytest.raises(ValueError, match=r"paths of UTF-8 only: rename the file, or load its byt"):
        open_tflite(path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="is no regular file, but a pipe, a socket or a device"):
        open_tflite(pipe)


def test_other_kinds_of_source() -> None:
    """A model is not a file."""
    with pytest.raises(TypeError, match=r"path or the bytes of a \.tflite file, got int"):
        open_tflite(3)  # type: ignore[arg-type]


def _zip(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, b"content")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (_zip("model/data.pkl", "model/data/0"), "it is a zip archive, a torch checkpoint"),
        (_zip("a.bin", "b\x1b[2J.bin"), r"it is a zip archive with a.bin, b\\x1b\[2J.bin"),
        (
            _zip("a.tflite")[:60],
            r"damaged bundle or archive: its list of sections cannot be read \(File is not",
        ),
        (b"\x08\x08\x12\x07pytorch", "protocol buffers, such as ONNX"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid",
            "a Git LFS pointer: run `git lfs pull`",
        ),
        (b"\x89HDF\r\n\x1a\n" + bytes(8), "HDF5, such as a Keras model"),
        (b"<!DOCTYPE html><html>", "an HTML page, such as a failed download"),
        (b"\x1c\x00\x00\x00TFL2" + bytes(64), r"file identifier b'TFL2', expected b'TFL3'"),
        (bytes(64), r"file identifier b'\\x00\\x00\\x00\\x00'"),
    ],
    # The contents hold the time at which they were made, which each worker has another one of.
    ids=[
        *("torch_checkpoint", "zip", "cut_zip", "onnx"),
        *("git_lfs", "hdf5", "html", "older_schema", "zeros"),
    ],
)
@pytest.mark.parametrize("as_path", [True, False])
def test_other_formats_are_recognized(
    tmp_path: Path, content: bytes, hint: str, as_path: bool
) -> None:
    """The text says what it looks like, for what is met in practice."""
    path = tmp_path / "model.tflite"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=hint) as caught:
        open_tflite(path if as_path else content)
    assert str(caught.value).startswith(str(path) if as_path else f"{len(content)} bytes")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.99, 1.0])
@pytest.mark.parametrize("as_path", [True, False])
def test_a_truncated_file_is_refused(tmp_path: Path, share: float, as_path: bool) -> None:
    """Cut after the header, in the tables, in the data, and by its last byte."""
    content = SOUND.read_bytes()
    cut = content[: min(len(content) - 1, 8 + int(share * len(content)))]
    path = tmp_path / "cut.tflite"
    path.write_bytes(cut)
    with pytest.raises(ValueError, match=r"not a whole flatbuffer\. It was truncated"):
        open_tflite(path if as_path else cut)


def test_a_file_without_a_subgraph_is_refused() -> None:
    """There is nothing in it that could be wrong, so every check would pass."""
    with pytest.raises(ValueError, match=r"No subgraph|no subgraph"):
        OpGraph.read(FileWriter().content())


def test_a_file_of_another_schema_version_is_refused() -> None:
    """The interpreter's own words are kept."""
    model = unpack(SOUND.read_bytes())
    model.version = 2
    with pytest.raises(ValueError, match="schema version 2 not equal"):
        OpGraph.read(pack(model))


def test_a_file_for_other_kernels_is_read_all_the_same() -> None:
    """A custom op or one of a later release: the graph can be told, only running it fails."""
    for op in ("CUSTOM:Mine", "9999"):
        edge = EdgeFile(one_op(op, [{"dtype": "float32"}], [{"dtype": "float32"}]))
        assert len(edge.op_dtypes) == 1
        with pytest.raises(RuntimeError, match=r"cannot load the \.tflite file"):
            edge.runner("builtin")


def _with_escape_sequences() -> bytes:
    tensors = {each: {"name": f"{each}\x1b[2J\nPASSED"} for each in "xy"}
    model = unpack(chain(("NEG", "x", "y"), inputs="x", outputs="y", key="main\x9b", **tensors))
    [signature] = model.signatureDefs
    signature.inputs[0].name, signature.outputs[0].name = "x\x1b]0;", "y\u202e"
    return pack(model)


@pytest.mark.parametrize("runtime", ["xnnpack", "builtin", "reference", "compiled"])
def test_escape_sequences_in_names_are_shown_as_text(runtime: str) -> None:
    """A terminal would obey them, and a line break would forge a line. The file runs."""
    edge = EdgeFile(_with_escape_sequences())
    assert [tensor.name for tensor in edge.graph.subgraphs[0].tensors] == [
        "x\\x1b[2J\\nPASSED",
        "y\\x1b[2J\\nPASSED",
    ]
    (signature,) = edge.graph.signatures
    assert signature.key == "main\\x9b"
    assert signature.inputs[0].name == "x\\x1b]0;"
    assert signature.outputs[0].name == "y\\u202e"

    (given,) = edge.run(["x\\x1b]0;"], [np.ones((1, 4), np.float32)], runtime)
    assert (given == -1).all()


def test_escape_sequences_in_what_kernels_say_are_shown_as_text() -> None:
    """They quote the file: here the name of a custom op."""
    edge = EdgeFile(one_op("CUSTOM:a\x1b[2J", [{"dtype": "float32"}], [{"dtype": "float32"}]))
    assert [entry.op for entry in edge.op_dtypes] == ["CUSTOM:a\\x1b[2J"]
    with pytest.raises(RuntimeError) as refused:
        edge.runner("builtin")
    assert r"unresolved custom op: a\x1b[2J" in str(refused.value)
    assert "\x1b" not in str(refused.value)
