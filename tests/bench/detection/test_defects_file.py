"""Each defect of the bench changes exactly what it says, and the file still loads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fixtures.models import EmbeddingMean
from fixtures.tflite.writer import one_op, pack, unpack
from pytest_edgeq import Edgeq
from tests.bench.detection.defects_file import KINDS, Defect, defect, runs
from tests.bench.detection.flatfile import FlatFile
from tests.bench.detection.sound import NETS, small, sound

# Networks are built. What the bench itself does is looked at before its page is written anew.
pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(400)]

# What may differ, as paths into the file; and how many values at most, where that is the point.
_SCALE = r"graph\.tensors\[\d+\]\.quantization\.scale\[\d+\]"
_POINT = r"graph\.tensors\[\d+\]\.quantization\.zeroPoint\[0\]"
_DATA = r"buffers\[\d+\]\.data\[\d+\]"
_BUFFER = r"graph\.tensors\[\d+\]\.buffer"
_OPERAND = r"graph\.operators\[\d+\]\.inputs\[\d+\]"
_OPTION = r"graph\.operators\[\d+\]\.builtinOptions\."
_ORDER = r"graph\.outputs\[\d+\]"
_NAMED = r"signatureDefs\[0\]\.outputs\[\d+\]\.tensorIndex"

CHANGES: dict[str, tuple[str, int | None]] = {
    "activation scale × 1.02": (_SCALE, 1),
    "activation scale × 1.1": (_SCALE, 1),
    "activation scale × 2": (_SCALE, 1),
    "weight scale × 1.02, one channel": (_SCALE, 1),
    "weight scale × 1.1, one channel": (_SCALE, 1),
    "weight scale × 2, one channel": (_SCALE, 1),
    "weight scale × 1.02, all channels": (_SCALE, None),
    "weight scale × 1.1, all channels": (_SCALE, None),
    "weight scale × 2, all channels": (_SCALE, None),
    "zero point ± 1": (_POINT, 1),
    "zero point ± 8": (_POINT, 1),
    "weight: one bit": (_DATA, 1),
    "weight: sign of the largest": (_DATA, 1),
    "weight: largest zeroed": (_DATA, 1),
    "channel zeroed": (_DATA, None),
    "channel negated": (_DATA, None),
    "channel rolled by one": (_DATA, None),
    "channels swapped": (_DATA, None),
    "weights zeroed": (_DATA, None),
    "weights negated": (_DATA, None),
    "weights permuted": (_DATA, None),
    "weights transposed": (_DATA, None),
    "weights swapped with same-shaped": (_BUFFER, 2),
    # Little-endian: 1 and 16 may carry into all four bytes.
    "bias ± 1": (_DATA, 4),
    "bias ± 16": (_DATA, 4),
    "bias to INT32 limit": (_DATA, 4),
    "fused activation dropped": (_OPTION + "fusedActivationFunction", 1),
    "fused activation swapped": (_OPTION + "fusedActivationFunction", 1),
    "stride changed": (_OPTION + "stride[WH]", 2),
    "padding changed": (_OPTION + "padding", 1),
    "outputs swapped": (f"{_ORDER}|{_NAMED}", 4),
    "outputs' names swapped": (_NAMED, 2),
    "buffers aliased": (_BUFFER, 1),
    "softmax sharper": (_OPTION + "beta", 1),
    "operands exchanged": (_OPERAND, 2),
    "operand replaced": (_OPERAND, 1),
    "transpose permuted": (_DATA, None),
    "constant: largest zeroed": (_DATA, 4),
    "constant rolled by one": (_DATA, None),
}

# What these change has other ops and tensors, so it is looked at below.
GROWING = {"QUANTIZE/DEQUANTIZE inserted", "op made float", "I/O dtype changed"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Networks with batch norms and strides, with two outputs, and with attention."""
    maker = Edgeq(directory=tmp_path_factory.mktemp("sound"))
    return {
        net.name: sound(maker, net, "pt2e_static_int8").quantized.tflite
        for net in (
            *(NETS[name] for name in ("ResidualNet", "DsCnn", "Mlp", "EncoderBlock", "ConcatSkip")),
            small(EmbeddingMean),
        )
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_defect_changes_what_it_says(files: dict[str, bytes], kind: str) -> None:
    """Nothing else differs, in every file that has a place for it; and some file has one."""
    found = [
        (content, made)
        for content in files.values()
        for seed in range(2)
        if (made := defect(content, kind, seed)) is not None
    ]

    assert found
    for content, made in found:
        assert made.kind == kind
        assert runs(made.tflite)
        if kind not in GROWING:
            _assert_changes(content, made, *CHANGES[kind])


def _assert_changes(content: bytes, made: Defect, pattern: str, limit: int | None) -> None:
    changed = list(_differences(unpack(content), unpack(made.tflite), ""))
    # Where a buffer is shared, the changed tensor gets one of its own: that is the same change.
    others = [path for path in changed if not re.fullmatch(pattern, path)]
    assert changed
    assert not others
    assert limit is None or len(changed) <= limit


def _differences(one: Any, other: Any, path: str) -> Iterator[str]:
    """Paths of all that differs between two object trees."""
    if isinstance(one, (list, tuple, np.ndarray)) and isinstance(other, (list, tuple, np.ndarray)):
        if len(one) != len(other):
            yield f"{path} (length)"
            return
        if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
            yield from (f"{path}[{i}]" for i in np.flatnonzero(one != other))
            return
        for position, pair in enumerate(zip(one, other, strict=True)):
            where = "graph" if path == "subgraphs" else f"{path}[{position}]"
            yield from _differences(*pair, where)
    elif hasattr(one, "__dict__") and type(one) is type(other):
        for name, value in vars(one).items():
            yield from _differences(value, vars(other)[name], f"{path}.{name}" if path else name)
    elif one != other:
        yield path


def test_buffers_behind_the_flatbuffer_are_taken_in() -> None:
    """As ai-edge-quantizer writes a large file's, which no defect could be written into before."""
    table = np.arange(64, dtype=np.float32).reshape(1, 64)
    x = {"dtype": "float32", "shape": (1, 64)}
    content = one_op("ADD", [x, {**x, "data": table}], [x], "AddOptions")
    model = unpack(content)
    (held,) = (each for each in model.buffers if each.data is not None and len(each.data) == 256)
    held.data, held.offset, held.size = None, 2, 256
    held.offset = -(-len(pack(model)) // 16) * 16
    apart = pack(model).ljust(held.offset, b"\0") + table.tobytes()
    assert runs(apart)

    assert runs(FlatFile(apart).content())
    assert table.tobytes() in FlatFile(apart).content()
