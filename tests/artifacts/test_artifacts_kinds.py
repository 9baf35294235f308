"""Files of kinds that other tools write: the sound one passes, its damaged sibling does not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from ai_edge_litert.interpreter import Interpreter

from fixtures.shipped import FACES, WAKE_WORDS, shipped
from fixtures.tflite.kinds import KINDS, Kind, detector, reordered
from fixtures.tflite.writer import one_op, pack, unpack
from pytest_edgeq import Budget, Edgeq, assert_runtimes_agree, assert_within_budget
from pytest_edgeq.errors import CopyError, UnreadableError, UnrunnableError
from pytest_edgeq.tflite.graph import OpGraph
from pytest_edgeq.tflite.writing import packed, unpacked

Array = npt.NDArray[Any]


@pytest.fixture
def loader(tmp_path: Path) -> Edgeq:
    """Loads files, and runs them in this process."""
    return Edgeq(directory=tmp_path, isolate="off")


COMPARED = [name for name in KINDS if name != "custom_op"]
"""Kinds whose ops are all compared with the reference."""


def _notes(loader: Edgeq, kind: Kind) -> list[str]:
    """Check a sound file; return what could not be judged."""
    model = loader.load(kind.content, reference=kind.reference)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loader.check(model, kind.inputs)
    return [str(each.message) for each in warned]


@pytest.mark.parametrize("name", COMPARED)
def test_a_sound_file_passes_and_its_damaged_sibling_fails(loader: Edgeq, name: str) -> None:
    """Every op is compared, as no note says otherwise; one weight of another sign is found."""
    notes = _notes(loader, KINDS[name]())
    assert not [each for each in notes if "one by one" in each or "op by op" in each]
    kind = KINDS[name](damaged=True)
    model = loader.load(kind.content, reference=kind.reference)
    with pytest.raises(AssertionError, match="the file in float does not compute"):
        loader.check(model, kind.inputs)


@pytest.mark.parametrize("shapes", [(32, 32), (32, 24)], ids=["by value", "by shape"])
def test_outputs_in_another_order_are_told(loader: Edgeq, shapes: tuple[int, int]) -> None:
    """A reference that returns them in the interpreter's order, as a tuple."""
    kind = reordered(shapes=shapes)
    model = loader.load(kind.content, reference=lambda x: [*kind.reference(x).values()][::-1])

    for call in (loader.check, loader.compare):
        with pytest.raises((AssertionError, ValueError)) as caught:
            call(model, kind.inputs)
        assert (
            "outputs are in another order: the file's 'output_1' is the reference's 'output_0', "
            "the file's 'output_0' is the reference's 'output_1'"
        ) in str(caught.value)
        assert "does not compute" not in str(caught.value)


def test_another_output_is_no_other_order(loader: Edgeq) -> None:
    """Values that are near none of the reference's are wrong, and not exchanged."""
    kind = reordered()
    model = loader.load(kind.content, reference=lambda x: [*kind.reference(x + 3).values()])

    with pytest.raises(AssertionError) as caught:
        loader.check(model, kind.inputs)

    assert "another order" not in str(caught.value)


def test_float_ends_have_the_steps_of_their_codes(loader: Edgeq) -> None:
    """The LSB of the output is that of the DEQUANTIZE, and a range that cuts it is found."""
    kind = KINDS["float_ends"]()
    model = loader.load(kind.content, reference=kind.reference)

    comparison = loader.compare(model, kind.inputs)
    assert_within_budget(comparison, Budget(max_lsb_error=3))
    with pytest.raises(AssertionError, match="max_lsb_error: expected at most 0"):
        assert_within_budget(comparison, Budget(max_lsb_error=0.4))
    assert comparison.total.outputs["y"].scale == pytest.approx(0.03, rel=0.5)
    assert_runtimes_agree(model, kind.inputs, max_lsb_error=1)
    far = loader.compare(model, [(8 * x,) for (x,) in kind.inputs])
    assert {"clipped_input", "clipped_output"} <= {each.kind for each in far.health}


def test_whole_codes_given_as_fractions_are_found(loader: Edgeq) -> None:
    """The same file, of samples that were to be multiplied by 64: nobody has calibrated it."""
    kind = KINDS["whole_codes"]()
    model = loader.load(kind.content, reference=kind.reference)

    with pytest.raises(AssertionError, match="uncalibrated_activation: input 'x'"):
        loader.check(model, [(x / 64,) for (x,) in kind.inputs])


def test_a_custom_op_that_only_xnnpack_has(loader: Edgeq) -> None:
    """Kernels that keep intermediate tensors lack it: a note, and the outputs are compared."""
    kind = KINDS["custom_op"]()

    told = "\n".join(_notes(loader, kind))

    assert "as the builtin runtime, which keeps intermediate tensors, lacks an op" in told
    assert "has a kernel in xnnpack, and none in builtin and reference" in told
    with pytest.raises(UnrunnableError, match="Convolution2DTransposeBias"):
        loader.localize(loader.load(kind.content, reference=kind.reference), kind.inputs)
    damaged = KINDS["custom_op"](damaged=True)
    model = loader.load(damaged.content, reference=damaged.reference)
    with pytest.raises(AssertionError, match="expected 60 dB SQNR or more, as the file quantizes"):
        loader.check(model, damaged.inputs)


def test_a_custom_op_of_nobody_fails(loader: Edgeq) -> None:
    """The session's own kernels lack it: no note is enough."""
    tensor = {"dtype": "float32", "shape": (1, 4)}
    model = loader.load(one_op("CUSTOM:Nope", [tensor], [tensor]), reference=np.abs)

    with pytest.raises(AssertionError, match=r"no kernel of LiteRT .* computes the custom op Nope"):
        loader.check(model, [(np.ones((1, 4), np.float32),)])


def _with_scalars_as_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the files in which ops stand alone be refused: PACK takes no operands of two shapes."""
    monkeypatch.setattr("pytest_edgeq.localize.execution.contiguous", np.ascontiguousarray)


def test_an_op_that_is_refused_alone_is_no_defect_of_the_file(
    loader: Edgeq, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left out by its number in the user's file, and the others are compared, and found."""
    _with_scalars_as_lists(monkeypatch)
    kind = KINDS["computed_shape"]()

    [note] = [each for each in _notes(loader, kind) if "not compared with" in each]
    errors = loader.localize(loader.load(kind.content, reference=kind.reference), kind.inputs)

    assert "PACK #3 was not compared with the reference: the builtin runtime cannot run" in note
    assert "a copy of the file in which its ops are isolated: PACK #3" in note
    assert "Node number" not in note
    assert [row.index for row in errors.rows if not row.matched] == [3]
    damaged = KINDS["computed_shape"](damaged=True)
    with pytest.raises(AssertionError, match="the file in float does not compute") as caught:
        loader.check(loader.load(damaged.content, reference=damaged.reference), damaged.inputs)
    assert "PACK #3 was not compared with the reference" in str(caught.value)


def test_a_float_form_that_is_refused_is_no_defect_of_the_file(
    loader: Edgeq, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No op is compared, which is a note."""

    def truncated(graph: OpGraph, *_: object) -> bytes:
        model = unpacked(graph)
        model.operatorCodes[0].version = 99
        return packed(model)

    monkeypatch.setattr("pytest_edgeq.localize.float_forms.write_in_float", truncated)
    kind = KINDS["computed_shape"]()

    told = "\n".join(_notes(loader, kind))

    assert "one by one: the builtin runtime cannot load a copy of the file in float" in told
    assert ": FULLY_CONNECTED #0" in told
    with pytest.raises(CopyError, match="a copy of the file in float"):
        loader.localize(loader.load(kind.content, reference=kind.reference), kind.inputs)


@pytest.mark.slow
def test_a_real_sparse_file(loader: Edgeq) -> None:
    """MediaPipe's: all 388 ops are compared, and a weight with another sign is found."""
    path = shipped(FACES, "face_detection_full_range_sparse")
    reference = loader.load(path).run
    x = np.random.default_rng(0).uniform(-1, 1, (1, 192, 192, 3)).astype(np.float32)
    model = unpack(path.read_bytes())
    held = next(op for op in OpGraph.read(path).ops if op.name == "DENSIFY").inputs[0]
    buffer = model.buffers[model.subgraphs[0].tensors[held].buffer]
    buffer.data = buffer.data.copy()
    stored = buffer.data.view(np.float16)
    stored[np.abs(stored).argmax()] *= -1

    errors = loader.localize(loader.load(path, reference=reference), [(x,)])
    wrong = loader.localize(loader.load(pack(model), reference=reference), [(x,)])

    assert (errors.coverage, errors.culprit) == (1, None)
    assert wrong.culprit is not None


def test_handles_of_variables_are_not_read(loader: Edgeq) -> None:
    """A wake word keeps its state in variables; interpreters take their handles for numbers."""
    path = shipped(WAKE_WORDS, "alexa")
    x = np.random.default_rng(0).uniform(0, 20, (1, 3, 40)).astype(np.float32)
    model = loader.load(path, reference=loader.load(path).run)

    errors = loader.localize(model, [(x,)])

    rows = [row for row in errors.rows if row.op in ("CONV_2D", "FULLY_CONNECTED")]
    assert all(row.matched for row in rows)
    runner = model.edge.runner("builtin", keep=True)
    handle = next(op for op in model.graph.ops if op.name == "VAR_HANDLE").outputs[0]
    with pytest.raises(UnreadableError, match="is resource: it is not read"):
        runner.tensor(handle)


def _by_interpreter(content: bytes) -> Callable[[Array], Array]:
    """Run a stream by an interpreter of one's own: codes come out, as floats."""
    interpreter = Interpreter(model_content=content)
    interpreter.allocate_tensors()
    given, made = interpreter.get_input_details()[0], interpreter.get_output_details()[0]

    def run(x: Array) -> Array:
        scale, zero_point = given["quantization"]
        codes = np.clip(np.rint(x / scale) + zero_point, -128, 127).astype(np.int8)
        interpreter.set_tensor(given["index"], codes)
        interpreter.invoke()
        scale, zero_point = made["quantization"]
        values = interpreter.get_tensor(made["index"]).astype(np.float32) - zero_point
        return np.asarray(values * np.float32(scale), np.float32)

    return run


@pytest.mark.parametrize(
    ("reference", "threshold"), [("float", 2.0), ("run", 20.0), ("interpreter", 2.0)]
)
def test_a_detector_with_a_state_passes(loader: Edgeq, reference: str, threshold: float) -> None:
    """By float, by itself, and by an interpreter, whose rounding no file in float has."""
    kind = detector(threshold=threshold)
    references: dict[str, Callable[..., Any]] = {
        "float": kind.reference,
        "run": loader.load(kind.content).run,
        "interpreter": _by_interpreter(kind.content),
    }

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loader.check(loader.load(kind.content, reference=references[reference]), kind.inputs)

    if reference == "run":  # starts once, and not at each call
        model = loader.load(kind.content, reference=references["run"])
        assert loader.compare(model, kind.inputs).total.max_abs_error == 0.0
    notes = [str(each.message) for each in warned]
    silent = threshold > 16 and reference != "float"
    assert any("zero in the reference and in the file" in each for each in notes) is silent


def test_a_damaged_detector_fails(loader: Edgeq) -> None:
    """A reference that rounds may be as far from the file in float as the file, and no further."""
    sound, damaged = detector(), detector(damaged=True)
    by = _by_interpreter(sound.content)

    with pytest.raises(AssertionError, match="the file in float does not compute what the ref"):
        loader.check(loader.load(damaged.content, reference=by), sound.inputs)


REAL = (
    *(shipped(FACES, name) for name in ("face_detection_front", "face_landmark", "iris_landmark")),
    shipped(FACES, "face_detection_full_range_sparse"),
    *(shipped(WAKE_WORDS, name) for name in ("alexa", "okay_nabu")),
)


@pytest.mark.slow
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_real_files_pass_against_themselves(loader: Edgeq, path: Path) -> None:
    """Float16, sparse, PRELU and variables, by TensorFlow's converters of several years."""
    rng = np.random.default_rng(0)
    model = loader.load(path, reference=loader.load(path).run)
    low, high = (0, 20) if "wakeword" in str(path) else (-1, 1)
    shape = model.inputs[0].shape
    samples = [(rng.uniform(low, high, shape).astype(np.float32),) for _ in range(5)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # notes
        loader.check(model, samples)
