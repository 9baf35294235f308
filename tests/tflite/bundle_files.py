"""Small bundles, as LiteRT-LM's builder and MediaPipe's zip archives are."""

from __future__ import annotations

import contextlib
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from litert_lm_builder import litertlm_builder
from litert_lm_builder.runtime.proto import llm_metadata_pb2

from fixtures.tflite import make

FLOAT = make.CONVERTED / "local.float.tflite"
INT8 = make.CONVERTED / "local.int8.tflite"
OTHER = make.CONVERTED / "batched.int8.tflite"


def litertlm(
    path: Path,
    models: Mapping[str, Path],
    *,
    tokenizer: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write a `.litertlm` file with models by type, such as `prefill_decode`."""
    builder = litertlm_builder.LitertLmFileBuilder()
    if metadata is not None:
        described = path.with_suffix(".pb")
        described.write_bytes(llm_metadata_pb2.LlmMetadata(**metadata).SerializeToString())
        builder.add_llm_metadata(str(described))
    if tokenizer is not None:
        text = path.with_name("tokenizer.json")
        text.write_text(tokenizer)
        builder.add_hf_tokenizer(str(text))
    for name, model in models.items():
        kind = litertlm_builder.TfLiteModelType(f"tf_lite_{name}")
        builder.add_tflite_model(str(model), kind)
    with path.open("wb") as file, contextlib.redirect_stdout(io.StringIO()):
        builder.build(file)
    return path


def task(path: Path, members: Mapping[str, Path | bytes]) -> Path:
    """Write a `.task` file with these members, stored as MediaPipe stores them."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content if isinstance(content, bytes) else content.read_bytes())
    return path
