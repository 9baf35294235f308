"""Bundles: which sections are found, what is opened, and what damaged ones are answered with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pytest_edgeq import Edgeq, assert_size
from pytest_edgeq.runtimes.workers.crash_report import file_fact
from pytest_edgeq.tflite.bundles import LmMetadata, open_bundle
from pytest_edgeq.tflite.source import open_tflite
from tests.tflite.bundle_files import FLOAT, INT8, OTHER, litertlm, task

TWO = {"prefill_decode": INT8, "embedder": OTHER}


def test_the_sections_of_a_litertlm_file(tmp_path: Path) -> None:
    """Models by type, with their content; all others by the type of the section."""
    path = litertlm(tmp_path / "m.litertlm", TWO, tokenizer="{}", metadata={"max_num_tokens": 96})
    bundle = open_bundle(path)

    assert bundle is not None
    assert bundle.path == path
    assert [(each.name, each.is_model) for each in bundle.sections] == [
        ("LlmMetadataProto", False),
        ("HF_Tokenizer_Zlib", False),
        ("prefill_decode", True),
        ("embedder", True),
    ]
    assert {name: bundle.model(name).read_bytes() for name in bundle.names} == {
        name: each.read_bytes() for name, each in TWO.items()
    }
    assert open_bundle(path) is bundle
    assert open_bundle(INT8) is None


def test_models_of_one_type_are_numbered(tmp_path: Path) -> None:
    """A bundle may have one for each accelerator."""
    members = {"a.tflite": INT8, "b.tflite": OTHER}
    path = task(tmp_path / "m.task", members)
    path.write_bytes(path.read_bytes().replace(b"b.tflite", b"a.tflite"))
    bundle = open_bundle(path)
    assert bundle is not None
    assert {name: bundle.model(name).read_bytes() for name in bundle.names} == {
        "a.tflite": INT8.read_bytes(),
        "a.tflite_2": OTHER.read_bytes(),
    }


def test_the_tokens_of_a_language_model(tmp_path: Path) -> None:
    """As ids or text, as the file has them; with the tokenizer's file."""
    metadata = {
        "start_token": {"token_ids": {"ids": [2]}},
        "stop_tokens": [{"token_str": "<eos>"}, {"token_ids": {"ids": [1, 106]}}],
    }
    tokenizer = '{"model": {}}'
    path = litertlm(tmp_path / "m.litertlm", TWO, tokenizer=tokenizer, metadata=metadata)
    bundle = open_bundle(path)
    assert bundle is not None
    assert bundle.metadata == LmMetadata((2,), ("<eos>", (1, 106)))
    assert bundle.tokenizer is not None
    assert bundle.tokenizer.kind == "huggingface"
    assert bundle.tokenizer.content == tokenizer.encode()

    bare = open_bundle(litertlm(tmp_path / "bare.litertlm", TWO, metadata={}))
    assert bare is not None
    assert (bare.metadata, bare.tokenizer) == (LmMetadata(None, ()), None)
    without = open_bundle(task(tmp_path / "m.task", {"a.tflite": INT8}))
    assert without is not None
    assert (without.metadata, without.tokenizer) == (None, None)


def test_the_members_of_a_task_file(tmp_path: Path) -> None:
    """The models of a nested `.task`, too, as in MediaPipe's gesture recognizer."""
    inner = task(tmp_path / "inner.task", {"detector.tflite": INT8, "labels.txt": b"hand"})
    members: dict[str, Path | bytes] = {
        "hand.task": inner,
        "TF_LITE_EMBEDDER": OTHER,
        "METADATA": b"text",
    }
    bundle = open_bundle(task(tmp_path / "m.task", members))
    assert bundle is not None
    assert [(each.name, each.kind) for each in bundle.sections] == [
        ("hand.task/detector.tflite", "TFLiteModel"),
        ("hand.task/labels.txt", "file"),
        ("TF_LITE_EMBEDDER", "TFLiteModel"),
        ("METADATA", "file"),
    ]
    assert bundle.model("hand.task/detector.tflite").read_bytes() == INT8.read_bytes()


@pytest.mark.parametrize("as_path", [True, False])
@pytest.mark.parametrize("suffix", ["litertlm", "task"])
def test_a_bundle_of_one_model_is_opened_as_that(
    suffix: str, as_path: bool, tmp_path: Path
) -> None:
    """By path and by content, in `load` and in assertions."""
    if suffix == "task":
        path = task(tmp_path / "m.task", {"model.tflite": INT8, "labels.txt": b"cat"})
    else:
        path = litertlm(tmp_path / "m.litertlm", {"prefill_decode": INT8}, tokenizer="{}")
    source = path if as_path else path.read_bytes()

    loaded = Edgeq().load(source)

    assert loaded.tflite == INT8.read_bytes()
    assert loaded.path.read_bytes() == loaded.tflite
    assert_size(source, max_bytes=loaded.size_bytes)
    with pytest.raises(AssertionError):
        assert_size(source, max_bytes=loaded.size_bytes - 1)


def test_one_of_several_models_is_chosen_by_section(tmp_path: Path) -> None:
    """The name says which; without it, or with another one, all are named."""
    path = litertlm(tmp_path / "model.litertlm", TWO)
    loaded = Edgeq().load(path, section="embedder")
    assert loaded.tflite == OTHER.read_bytes()
    assert (loaded.name, loaded.edge.label) == ("model.litertlm:embedder", f"{path}:embedder")

    choose = (
        r"model\.litertlm is a bundle; its models: prefill_decode, embedder\. Choose one: "
        r"edgeq\.load\(path, section='prefill_decode'\), or --section prefill_decode on the comm"
    )
    for use in (Edgeq().load, lambda path: assert_size(path, max_bytes=1), open_tflite):
        with pytest.raises(ValueError, match=choose):
            use(path)
    unknown = r"has no model 'embeder' \(did you mean embedder\?\); its models: prefill_decode, emb"
    with pytest.raises(ValueError, match=unknown):
        Edgeq().load(path, section="embeder")
    with pytest.raises(ValueError, match="section: expected a bundle, got a single"):
        Edgeq().load(INT8, section="embedder")


def test_other_files_are_opened_at_the_same_section(tmp_path: Path) -> None:
    """The float file and the reference, be they bundles or not, and the file that ships."""
    floats = litertlm(tmp_path / "float.litertlm", {"embedder": OTHER, "prefill_decode": FLOAT})
    path = litertlm(tmp_path / "model.litertlm", TWO)
    for other in (floats, FLOAT):
        loaded = Edgeq().load(path, section="prefill_decode", reference=other)
        assert loaded.float_tflite == FLOAT.read_bytes()
        loaded = Edgeq().load(path, section="prefill_decode", float_tflite=other)
        assert loaded.float_tflite == FLOAT.read_bytes()
    inputs = [(np.ones(each.shape, np.float32),) for each in loaded.inputs[:1]]
    assert Edgeq().compare(loaded, inputs).total.outputs
    assert loaded.with_tflite(path).tflite == INT8.read_bytes()
    single = Edgeq().load(INT8, float_tflite=FLOAT)
    assert single.with_tflite(path, section="prefill_decode").tflite == INT8.read_bytes()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda content: content[: 3 * len(content) // 4], r" \(embedder ends at"),
        (lambda content: content[:40], r" \(it ends at byte [\d,]+ of 40\)"),
        (lambda content: content[:32] + bytes(200) + content[232:], ""),
        (lambda content: content[:20], ""),
    ],
    ids=["cut", "cut in the header", "zeros in the header", "cut before it"],
)
def test_a_damaged_litertlm_file(
    damage: Callable[[bytes], bytes], text: str, tmp_path: Path
) -> None:
    """It is refused with the section, before anything is copied."""
    path = litertlm(tmp_path / "m.litertlm", TWO, tokenizer="{}")
    path.write_bytes(damage(path.read_bytes()))
    text = f"damaged bundle or archive: its list of sections cannot be read{text}"
    with pytest.raises(ValueError, match=text) as caught:
        Edgeq().load(path, section="prefill_decode")
    assert str(caught.value).startswith(str(path))
    assert "It was truncated or overwritten" in str(caught.value)


def test_a_section_that_is_no_tflite(tmp_path: Path) -> None:
    """The text names the section, not the copy; the others are opened."""
    none, empty = tmp_path / "none", tmp_path / "empty"
    none.write_bytes(b"no flatbuffer at all")
    empty.touch()
    models = {"prefill_decode": none, "aux": empty, "embedder": INT8}
    path = litertlm(tmp_path / "m.litertlm", models)
    with pytest.raises(
        ValueError, match=r"m\.litertlm:prefill_decode: not a \.tflite file: file i"
    ):
        Edgeq().load(path, section="prefill_decode")
    with pytest.raises(ValueError, match=r"m\.litertlm:aux is empty"):
        Edgeq().load(path, section="aux")
    assert Edgeq().load(path, section="embedder").tflite == INT8.read_bytes()


@pytest.mark.parametrize(
    ("place", "text"),
    # The head of the second member, and the middle of it, of which the archive has a checksum.
    [(-30, "cannot be read"), (1000, r"cannot be read \(Bad CRC-32")],
    ids=["missing", "changed"],
)
def test_a_damaged_member_is_named_and_others_are_opened(
    place: int, text: str, tmp_path: Path
) -> None:
    """The archive still lists it."""
    path = task(tmp_path / "m.task", {"a.tflite": INT8, "b.tflite": OTHER})
    content = path.read_bytes()
    at = content.index(b"b.tflite") + place
    path.write_bytes(content[:at] + bytes(4) + content[at + 4 :])
    with pytest.raises(ValueError, match=rf"damaged bundle or archive: b\.tflite {text}"):
        Edgeq().load(path, section="b.tflite")
    assert Edgeq().load(path, section="a.tflite").tflite == INT8.read_bytes()


def test_a_damaged_tokenizer_and_metadata(tmp_path: Path) -> None:
    """They are read when asked for, so the models of the bundle are opened."""
    path = litertlm(tmp_path / "m.litertlm", TWO, tokenizer="{}", metadata={"max_num_tokens": 7})
    whole = open_bundle(path)
    assert whole is not None
    content = bytearray(path.read_bytes())
    for each in whole.sections[:2]:
        assert isinstance(each.place, int)
        content[each.place : each.place + each.size] = b"\xff" * each.size
    path.write_bytes(content)
    bundle = open_bundle(path)
    assert bundle is not None
    with pytest.raises(ValueError, match="LlmMetadataProto cannot be read"):
        _ = bundle.metadata
    with pytest.raises(ValueError, match="HF_Tokenizer_Zlib cannot be read"):
        _ = bundle.tokenizer
    assert bundle.model("embedder").read_bytes() == OTHER.read_bytes()


def test_a_bundle_that_was_written_anew(tmp_path: Path) -> None:
    """An opened model stays as it was; the next one is read from the new file."""
    path = litertlm(tmp_path / "m.litertlm", TWO)
    loaded, bundle = Edgeq().load(path, section="embedder"), open_bundle(path)
    assert bundle is not None
    litertlm(path, {"prefill_decode": OTHER, "embedder": FLOAT})
    assert loaded.tflite == OTHER.read_bytes()
    with pytest.raises(ValueError, match="was written anew since it was opened"):
        bundle.model("prefill_decode")
    assert Edgeq().load(path, section="embedder").tflite == FLOAT.read_bytes()


def test_the_report_of_a_crash_names_the_section(tmp_path: Path) -> None:
    """And not the copy, which is gone when the report is read."""
    path = litertlm(tmp_path / "m.litertlm", TWO)
    fact = file_fact(open_tflite(path, section="embedder"), "digest")
    assert fact == f"file: {path}:embedder ({OTHER.stat().st_size:,} bytes, sha256 digest)"


def test_a_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`.litertlm` names it; `.task` needs none."""
    path = litertlm(tmp_path / "m.litertlm", {"embedder": INT8})
    for name in [name for name in sys.modules if name.startswith("litert_lm_builder")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "litert_lm_builder", None)
    text = r"m\.litertlm is a LiteRT-LM bundle, .*: pip install litert-lm-builder$"
    with pytest.raises(ModuleNotFoundError, match=text):
        Edgeq().load(path)
    assert Edgeq().load(task(tmp_path / "m.task", {"a.tflite": INT8})).tflite == INT8.read_bytes()


_PROCESS = """
import os, sys
from pytest_edgeq.runtimes.workers.crash_report import file_fact
from pytest_edgeq.tflite.bundles import open_bundle
folder = open_bundle(sys.argv[1]).model("a.tflite")
if os.fork() == 0:
    sys.exit()
os.wait()
assert folder.exists()
print(folder)
sys.exit(sys.argv[2])
"""


@pytest.mark.parametrize("end", ["0", "an error"])
def test_copies_are_removed_at_exit(end: str, tmp_path: Path) -> None:
    """At the end of the process; its forks remove nothing."""
    path = task(tmp_path / "m.task", {"a.tflite": INT8})
    folder = tmp_path / "temporary"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _PROCESS, str(path), end],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={"TMPDIR": str(folder), "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert Path(done.stdout.strip()).is_relative_to(folder), done.stderr
    assert list(folder.iterdir()) == []
