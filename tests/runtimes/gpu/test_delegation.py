"""Which ops run on the GPU, from what the engine prints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fixtures.tflite import writer
from fixtures.tflite.make import CONVERTED
from fixtures.tflite.writer import FileWriter
from pytest_edgeq import Edgeq
from pytest_edgeq.baselines.kinds import KINDS
from pytest_edgeq.errors import UnrunnableError
from pytest_edgeq.runtimes import delegation
from pytest_edgeq.runtimes.delegation import delegation_of, supported_groups, unsupported
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.runtimes.engines import Opening
from pytest_edgeq.runtimes.runner import Runner
from pytest_edgeq.runtimes.workers.gpu_engine import shared_ops
from pytest_edgeq.tflite.graph import OpGraph
from tests.runtimes.gpu.delegation_texts import VERSION, printed, split, transposed, use_words

NONE = "RELU_0_TO_1"
"""An op that the engine does not support."""

REASON = f"Not supported op {NONE}"


def chain(names: str) -> bytes:
    """Write a chain of ops of one operand."""
    ops = [(name, f"t{at}", f"t{at + 1}") for at, name in enumerate(names.split())]
    return writer.chain(*ops, inputs="t0", outputs=f"t{len(ops)}", key="main")


def states(content: bytes) -> list[str]:
    """Return where each op runs."""
    return [each.runs_on for each in delegation_of(EdgeFile(content), "gpu").ops]


def test_words_are_those_of_an_op_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Supported ops behind an unsupported op run on the CPU, and are not compiled alone."""
    compiled = transposed(monkeypatch)
    found = delegation_of(EdgeFile(CONVERTED / "transposed.int8.tflite"), "gpu")
    assert compiled[1:] == [["TRANSPOSE_CONV"]]
    assert (found.n_on_gpu, found.refusal) == (6, None)
    first, second, *others = found.ops
    assert str(second) == "on the CPU: Max version supported: 3. Requested version 4."
    assert str(first) == (
        "on the CPU: supported, but unsupported ops split the graph, and only the largest part "
        "runs on the GPU"
    )
    assert {str(each) for each in others} == {"on the GPU"}
    assert [each.place.number for each in found.not_on_gpu] == ["#0", "#1"]


def test_the_table_names_each_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its module, if it is known."""
    transposed(monkeypatch)
    text = str(Edgeq().delegation(Edgeq().load(CONVERTED / "transposed.int8.tflite")))
    assert text.splitlines()[:5] == [
        "gpu: 6 of 8 ops run on the GPU",
        "  op                    module  runs",
        "  TRANSPOSE #0          -       on the CPU: supported, but unsupported ops split the "
        "graph, and only the largest part runs on the GPU",
        "  TRANSPOSE_CONV #1     -       on the CPU: Max version supported: 3. "
        "Requested version 4.",
        "  QUANTIZE #2           -       on the GPU",
    ]


def test_a_file_that_the_engine_takes_is_compiled_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its ops run on the GPU."""
    compiled = use_words(monkeypatch, printed(""), {})
    assert states(chain("NEG ABS")) == ["GPU", "GPU"]
    assert compiled == [["NEG", "ABS"]]


def test_a_file_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a runtime, though several calls ask; of another one the result may be another."""
    compiled = use_words(monkeypatch, printed(f"{NONE}: {REASON}", split(1, 1)), {NONE: REASON})
    quantized = Edgeq().load(chain(f"NEG {NONE}"))
    for runtime in ("gpu", "gpu_f32", "gpu"):
        found = Edgeq().delegation(quantized, runtime)
        assert found.runtime == runtime
        assert [each.runs_on for each in found.ops] == ["GPU", "CPU"]
    assert compiled == [["NEG", NONE], [NONE]] * 2


@pytest.mark.parametrize(
    ("names", "on_gpu", "expected"),
    [
        (f"NEG ABS {NONE} NEG ABS NEG {NONE} NEG", 3, "CPU CPU CPU GPU GPU GPU CPU CPU"),
        (f"NEG {NONE} NEG", 1, "unknown CPU unknown"),
        (f"NEG {NONE} NEG {NONE} ABS NEG", 2, "CPU CPU CPU CPU GPU GPU"),
        (f"{NONE} {NONE}", 0, "CPU CPU"),
    ],
)
def test_one_group_runs_on_the_gpu(
    names: str, on_gpu: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest one; of two that are as large, it is not known which."""
    count = split(on_gpu, len(names.split()) - on_gpu)
    use_words(monkeypatch, printed(f"{NONE}: {REASON}", count), {NONE: REASON})
    assert states(chain(names)) == expected.split()


def test_groups_are_not_stated_if_the_count_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's unsupported ops stay known."""
    whole = printed(f"{NONE}: {REASON}", split(2, 2))
    use_words(monkeypatch, whole, {NONE: REASON})
    found = delegation_of(EdgeFile(chain(f"NEG ABS NEG {NONE}")), "gpu")
    assert [each.runs_on for each in found.ops] == ["unknown", "unknown", "unknown", "CPU"]
    assert str(found.ops[0]) == (
        "not known: supported, but the engine does not say which of the supported ops it runs"
    )


def test_each_subgraph_is_split_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine prints a count for each that has an unsupported op."""
    file = FileWriter()
    file.graph("a").fill(("NEG", "x", "y"), inputs="x", outputs="y", key="a")
    ops = [("NEG", "x", "a"), (NONE, "a", "b"), ("ABS", "b", "c"), ("NEG", "c", "y")]
    file.graph("b").fill(*ops, inputs="x", outputs="y", key="b")
    file.graph("c").fill((NONE, "x", "a"), ("NEG", "a", "y"), inputs="x", outputs="y", key="c")
    whole = printed(f"{NONE}: {REASON}", split(2, 2), split(1, 1))
    use_words(monkeypatch, whole, {NONE: REASON})
    assert states(file.content()) == ["GPU", "CPU", "CPU", "GPU", "GPU", "CPU", "GPU"]


def test_ops_that_cannot_be_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether an op of constants is meant is not known, so no group is."""
    half = {"dtype": "float16", "data": np.ones((1, 4), np.float16)}
    ops = [("DEQUANTIZE", "h", "hf"), ("ADD", "hf x", "a", "AddOptions"), ("NEG", "a", "y")]
    content = writer.chain(*ops, inputs="x", outputs="y", key="main", h=half)
    use_words(monkeypatch, printed("DEQUANTIZE: ", split(2, 1)), {})
    assert states(content) == ["unknown"] * 3


def test_two_branches_are_one_group() -> None:
    """TFLite groups ops that need nothing of the other kind between, connected or not."""
    content = writer.chain(
        ("NEG", "x", "a"),
        (NONE, "a", "b"),
        ("ABS", "a", "c"),
        ("NEG", "c", "d"),
        ("ADD", "b d", "y", "AddOptions"),
        inputs="x",
        outputs="y",
    )
    [subgraph] = OpGraph.read(content).subgraphs
    refused = [op for op in subgraph.ops if op.name == NONE]
    groups = [sorted(op.index for op in each) for each in supported_groups(subgraph, refused)]
    assert groups == [[0, 2, 3], [4]]


def test_what_the_engine_prints_is_read() -> None:
    """Messages of all subgraphs are read, without the tensor names of cut files."""
    words = (
        f"{VERSION}\nFULLY_CONNECTED: Tensor type(INT16) is not supported. in_1_17\n"
        "FULLY_CONNECTED: Tensor type(INT16) is not supported. args_0"
    )
    assert unsupported(printed(words, split(0, 3), split(4, 5))) == {
        "TRANSPOSE_CONV": "Max version supported: 3. Requested version 4.",
        "FULLY_CONNECTED": "Tensor type(INT16) is not supported.; "
        "Tensor type(INT16) is not supported. args_0",
    }
    assert shared_ops(printed(words, split(0, 3), split(4, 5))) == [(0, 3), (4, 5)]
    assert unsupported(printed("")) == {}
    reason = "the engine does not support it and names no reason"
    assert unsupported(printed("DEQUANTIZE: ", split(1, 1))) == {"DEQUANTIZE": reason}


def refuse(monkeypatch: pytest.MonkeyPatch, text: str) -> UnrunnableError:
    """Have the engine refuse each file as a whole."""
    refusal = UnrunnableError("gpu", text)

    def raises(self: Runner, opening: Opening, *others: Any) -> None:
        raise refusal

    monkeypatch.setattr(Runner, "__init__", raises)
    monkeypatch.setattr(delegation, "_compile", lambda opening: ("a shader does not", False))
    return refusal


def test_a_file_that_is_refused_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of its ops runs."""
    refusal = refuse(monkeypatch, "cannot load the .tflite file: ABS #1\ncause: none")
    found = delegation_of(EdgeFile(chain("NEG ABS")), "gpu")
    assert found.refusal is refusal
    assert {str(each) for each in found.ops} == {"the engine rejects the whole file"}
    assert str(found).startswith("the gpu runtime cannot load the .tflite file: ABS #1\n")
    assert found.to_dict()["refusal"] == str(refusal)


def test_runtimes_on_the_cpu_are_refused() -> None:
    """And unknown names."""
    edge = EdgeFile(chain("NEG"))
    with pytest.raises(
        ValueError, match=r"^the xnnpack runtime does not use a GPU; these do: gpu, gpu_"
    ):
        delegation_of(edge, "xnnpack")
    with pytest.raises(ValueError, match=r"^unknown runtime 'gpus' \(did you mean gpu"):
        delegation_of(edge, "gpus")
    with pytest.raises(TypeError, match=r"^delegation: expected a result of edgeq\.quantize"):
        Edgeq().delegation(chain("NEG"))  # type: ignore[arg-type]


def test_the_baseline_has_it_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a field of each op, by the runtime `gpu` or another one."""
    transposed(monkeypatch)
    stored: list[dict[str, Any]] = []

    class Memory:
        def check(self, kind: str, name: str, data: dict[str, Any], **options: Any) -> None:
            assert not KINDS[kind].problem(data)
            stored.append(data)

    maker = Edgeq(memory=Memory())  # type: ignore[arg-type]
    quantized = maker.load(CONVERTED / "transposed.int8.tflite")
    maker.check_op_dtypes(quantized)
    maker.check_op_dtypes(quantized, delegation=True)
    maker.check_op_dtypes(quantized, delegation="gpu_f32")
    plain, first, second = ([row.get("delegation") for row in each["ops"]] for each in stored)
    assert set(plain) == {None}
    assert [each.get("delegation") for each in stored] == [None, "gpu", "gpu_f32"]
    assert first == second
    assert first[1] == "on the CPU: Max version supported: 3. Requested version 4."
    with pytest.raises(ValueError, match="the xnnpack runtime does not use a GPU"):
        maker.check_op_dtypes(quantized, delegation="xnnpack")
