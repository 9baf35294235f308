"""Runtimes that agree up to rounding pass, and one that gives anything else does not."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from ai_edge_litert.interpreter import Interpreter

from fixtures.models import ResidualNet, SelfAttention, SmallModel, samples
from fixtures.tflite.writer import chain, constant, one_op
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.check.agreement import SAMPLES, Agreement, AgreementResult, compared_runtimes
from pytest_edgeq.check.runtime_results import RuntimeDistance
from pytest_edgeq.compare.reference import call_reference
from pytest_edgeq.compare.samples import read_samples
from pytest_edgeq.errors import UnrunnableError
from pytest_edgeq.numerics.findings import text_of
from pytest_edgeq.runtimes.edge import EdgeFile
from tests.bench.detection.defects_runtime import SPOILT
from tests.quantize import making
from tests.runtimes.isolate.runners import equal_scores

Arrays = dict[str, npt.NDArray[Any]]
Spoil = Callable[[Arrays, Sequence[Arrays]], Arrays]


class Bridge:
    """A runtime of one's own: LiteRT's kernels, and something that spoils what they give."""

    def __init__(self, path: Path, signature: str | None, spoil: Spoil) -> None:
        self._run = Interpreter(str(path)).get_signature_runner(signature)
        self._spoil = spoil
        self._past: list[Arrays] = []
        self.is_closed = False

    def __call__(self, inputs: Arrays) -> Arrays:
        """Run one sample."""
        outputs = {name: np.array(value) for name, value in self._run(**inputs).items()}
        spoilt = self._spoil({name: value.copy() for name, value in outputs.items()}, self._past)
        self._past.append(outputs)
        return spoilt

    def close(self) -> None:
        """Take note."""
        self.is_closed = True


def _sound(outputs: Arrays, _: Sequence[Arrays]) -> Arrays:
    return outputs


def _stale(outputs: Arrays, past: Sequence[Arrays]) -> Arrays:
    """What the sample before gave."""
    return past[-1] if past else outputs


def _stuck(outputs: Arrays, past: Sequence[Arrays]) -> Arrays:
    """What the first sample gave."""
    return past[0] if past else outputs


_zero: Any = SPOILT["zero"]
_nan: Any = SPOILT["nan"]
_higher: Any = SPOILT["off-by-one"]


def _shuffled(outputs: Arrays, _: Sequence[Arrays]) -> Arrays:
    return {name: np.roll(value, 1, axis=-1) for name, value in outputs.items()}


def _stuck_elsewhere(outputs: Arrays, past: Sequence[Arrays]) -> Arrays:
    return _shuffled(_stuck(outputs, past), past)


def _lower(outputs: Arrays, _: Sequence[Arrays]) -> Arrays:
    for value in outputs.values():
        if np.issubdtype(value.dtype, np.integer):
            value[...] = np.maximum(value, np.iinfo(value.dtype).min + 1) - 1
    return outputs


def _wears_out(outputs: Arrays, past: Sequence[Arrays]) -> Arrays:
    """One code changes for good after three runs."""
    if len(past) > 2:
        for value in outputs.values():
            value.reshape(-1)[0] ^= 1
    return outputs


made = functools.cache(making.quantize)


def _on_bridge(quantized: QuantizedModel, spoil: Spoil) -> tuple[QuantizedModel, list[Bridge]]:
    """Open the file where a runtime of one's own is known, beside the built-in ones."""
    opened: list[Bridge] = []

    def bridge(path: Path, signature: str | None) -> Bridge:
        opened.append(Bridge(path, signature, spoil))
        return opened[-1]

    edgeq = Edgeq(runtimes={"bridge": bridge})
    return edgeq.load(quantized.tflite, reference=quantized.float_model), opened


def _agreement(quantized: QuantizedModel, inputs: Iterable[Any]) -> AgreementResult:
    agreement = Agreement(quantized)
    assert quantized.float_model is not None
    for sample in read_samples(inputs, quantized.spec, "evaluation"):
        reference = [value for _, value in call_reference(quantized.float_model, sample)]
        agreement.update(sample, reference)
    return agreement.result()


MODELS = [
    ("pt2e_static_int8", ResidualNet),
    ("recipe_static_wi8_ai16", ResidualNet),
    ("recipe_dynamic_wi8_afp32", ResidualNet),
    ("pt2e_static_int8", SelfAttention),
]


@pytest.mark.parametrize(("quantizer", "cls"), MODELS)
def test_sound_runtimes_agree(quantizer: str, cls: type[SmallModel]) -> None:
    """Every built-in one that is installed, and one of one's own that runs the same kernels."""
    quantized, _ = _on_bridge(made(quantizer, cls), _sound)

    assert {"xnnpack", "builtin", "bridge"} <= set(compared_runtimes(quantized))
    found = _agreement(quantized, samples(cls, 6, seed=3))
    assert (found.unable, found.differences, found.notes) == ((), (), ())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "spoil", "n_samples"),
    [
        (MODELS[0], _stale, 1),
        (MODELS[0], _higher, 6),
        (MODELS[1], _zero, 6),
        (MODELS[2], _higher, 1),
        (MODELS[2], _stuck, 6),
        (MODELS[3], _stuck, 1),
    ],
)
def test_a_spoilt_runtime_is_found(
    case: tuple[str, type[SmallModel]], spoil: Spoil, n_samples: int
) -> None:
    """Whatever it does to the outputs, and be it one step; also where there is but one sample."""
    quantized, _ = _on_bridge(made(*case), spoil)

    found = _agreement(quantized, samples(case[1], n_samples, seed=3))

    assert (found.unable, found.notes) == ((), ())
    assert found.differences
    assert all("'bridge'" in each.title for each in found.differences)


@pytest.mark.parametrize(
    ("quantizer", "spoil", "text"),
    [
        # Half of the codes are at the lower end, and cannot go lower.
        (
            "pt2e_static_int8",
            _lower,
            r"expected at most \d+% of the codes to differ, as .*, got \d+ of \d+, all lower",
        ),
        # One of many floats.
        ("recipe_dynamic_wi8_afp32", _nan, r", got nan \("),
        # One code after three runs, which is within rounding.
        (
            "pt2e_static_int8",
            _wears_out,
            "^runtime 'bridge': output 'output_0': expected sample 0 to give the same when it is "
            "run again, got 1 of 10 values that differ$",
        ),
    ],
)
def test_how_a_runtime_differs_is_said(quantizer: str, spoil: Spoil, text: str) -> None:
    """With the numbers."""
    quantized, _ = _on_bridge(made(quantizer), spoil)

    found = _agreement(quantized, samples(ResidualNet, 4, seed=3))

    assert re.search(text, text_of(found.differences), re.MULTILINE)


@pytest.mark.parametrize(
    ("first", "op"), [("LOG", "FULLY_CONNECTED"), ("LOG", "QUANTIZE"), ("DIV", "QUANTIZE")]
)
def test_kernels_that_quantize_nan_are_not_compared(first: str, op: str) -> None:
    """Each makes codes of its own of it, or of infinity, which a kernel may have clamped."""
    generator = np.random.default_rng(0)
    codes = generator.integers(-127, 128, (16, 16)).astype(np.int8)
    row, is_dense = {"shape": (1, 16)}, op == "FULLY_CONNECTED"
    last = (op, "made weights -", "y", "FullyConnectedOptions") if is_dense else (op, "made", "y")
    content = chain(
        ("LOG", "x", "made") if first == "LOG" else ("DIV", "x zero", "made", "DivOptions"),
        last,
        inputs="x",
        outputs="y",
        x=row,
        zero=constant(np.zeros((1, 16), np.float32)),
        made=row,
        weights=constant(codes, "int8", scales=[1 / 128]),
        y=row if is_dense else row | {"dtype": "int8", "scales": [1 / 32]},
    )

    def reference(x: Any) -> Any:
        with np.errstate(divide="ignore", invalid="ignore"):
            made = np.log(x) if first == "LOG" else x / np.float32(0)
            return made @ (codes.T * np.float32(1 / 128)) if is_dense else made

    quantized = Edgeq().load(content, reference=reference)
    inputs = generator.normal(size=(4, 1, 16)).astype(np.float32)

    found = _agreement(quantized, list(inputs))

    assert found.differences == ()
    assert any(
        re.match(
            rf"runtimes 'xnnpack' and 'builtin' were not compared from {op} .* on: "
            "the two kernels quantize NaN or infinity to different codes",
            note,
        )
        for note in found.notes
    )


def test_scalars_that_a_reshape_makes_are_compared() -> None:
    """Its shape is a constant without elements, which interpreters have no memory for."""
    content = chain(
        ("RESHAPE", "share empty", "scalar", "ReshapeOptions", {"newShape": []}),
        ("MUL", "x scalar", "y", "MulOptions"),
        inputs="x",
        outputs="y",
        key="halve",
        x={"dtype": "int8", "shape": (64, 6), "scales": [1 / 32]},
        y={"dtype": "int8", "shape": (64, 6), "scales": [1 / 64]},
        share=constant([64], "int8", scales=[1 / 128]),
        scalar={"dtype": "int8", "shape": (), "scales": [1 / 128]},
        empty=constant([], "int32"),
    )
    model = Edgeq().load(content, reference=lambda x: x * np.float32(0.5))
    inputs = list(np.random.default_rng(0).normal(size=(4, 64, 6)).astype(np.float32))

    assert _agreement(model, inputs).differences == ()
    found = _agreement(_on_bridge(model, _higher)[0], inputs)

    assert found.notes == ()
    assert [each.place.name for each in found.differences] == ["bridge"]


def test_exponentials_of_large_values_agree() -> None:
    """XNNPACK's is off by a unit in the last place for each unit of the exponent."""
    side = [{"dtype": "float32", "shape": (1, 256)}]
    quantized = Edgeq().load(one_op("EXP", side, side), reference=np.exp)
    inputs = [70 * np.sin(np.arange(256, dtype=np.float32) + i)[None] for i in range(3)]

    assert _agreement(quantized, inputs).differences == ()


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [_shuffled, _stuck_elsewhere])
def test_what_no_op_explains_is_found(spoil: Spoil) -> None:
    """Ops alone are right, the whole file gives another sample's results each time."""
    original = made("pt2e_static_int8")

    def mixes_up(path: Path, signature: str | None) -> Bridge:
        is_whole = path.read_bytes() == original.tflite
        return Bridge(path, signature, spoil if is_whole else _sound)

    edgeq = Edgeq(runtimes={"bridge": mixes_up})
    quantized = edgeq.load(original.tflite, reference=original.float_model)

    found = _agreement(quantized, samples(ResidualNet, 4, seed=3))

    why = "no single op explains it, so the runtime moves data wrongly between the ops"
    assert sum(each.causes[0].startswith(why) for each in found.differences) == 1
    same = "expected other outputs of sample 3 than of sample 0, got the same"
    assert any(same in each.title for each in found.differences) == (spoil is _stuck_elsewhere)


def test_it_looks_at_few_samples_and_closes_what_it_opened() -> None:
    """The file itself stays open for the next call; that in which ops stand alone does not."""
    quantized, opened = _on_bridge(made("pt2e_static_int8"), _higher)

    _agreement(quantized, samples(ResidualNet, SAMPLES + 5, seed=3))

    whole, alone = opened
    assert len(whole._past) == SAMPLES + 1
    assert (whole.is_closed, alone.is_closed) == (False, True)


def test_a_runtime_that_lacks_an_op_is_told_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that the device does not run need not have it."""
    side = [{"dtype": "float32", "shape": (1, 4)}]
    quantized = Edgeq().load(one_op("ABS", side, side), reference=np.abs)
    open_runner = EdgeFile.runner

    def lacks(edge: EdgeFile, name: str) -> Any:
        if name == "builtin":
            raise UnrunnableError(name, "cannot load the .tflite file: ABS #0", is_lacking=True)
        return open_runner(edge, name)

    monkeypatch.setattr(EdgeFile, "runner", lacks)
    found = _agreement(quantized, [np.array([[1, -2, 3, -4]], np.float32)])

    assert (found.unable, found.differences) == ((), ())
    [note] = found.notes
    assert note.startswith("not compared, as kernels lack an op: the builtin runtime cannot load")


def test_infinity_is_where_float32_ends(tmp_path: Path) -> None:
    """A mask of -inf: XNNPACK adds it, the builtin kernels clamp to the least float."""
    mask = np.array([[0, -np.inf, 0, -np.inf]], np.float32)
    add = ("ADD", "x mask", "y", "AddOptions")
    content = chain(add, inputs="x", outputs="y", mask=constant(mask))
    quantized = Edgeq(directory=tmp_path).load(content, reference=lambda x: x + mask)
    inputs = [np.array([[1, -2, 3, -4]], np.float32)]

    infinite = [
        np.isinf(next(iter(quantized.run(inputs[0], runtime=name).values()))).any()
        for name in ("xnnpack", "builtin")
    ]
    assert infinite == [True, False], "nothing is left to tell apart"
    found = _agreement(quantized, inputs)
    assert (found.unable, found.differences, found.notes) == ((), (), ())


def test_a_kernel_that_is_known_to_be_wrong_is_no_defect_of_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference kernels read what SUM takes as uint8; they run where the session does."""
    content = one_op(
        "SUM",
        [
            {"dtype": "int8", "shape": (1, 64), "scales": [0.1]},
            {"dtype": "int32", "shape": (1,), "data": np.array([1], np.int32)},
        ],
        [{"dtype": "int8", "shape": (1,), "scales": [0.7]}],
        "ReducerOptions",
    )
    quantized = Edgeq(runtime="reference").load(content, reference=lambda x: x.sum(1))
    inputs = [np.linspace(-1, 0, 64, dtype=np.float32)[None] * k for k in (1, 0.5)]

    found = _agreement(quantized, inputs)
    assert (found.unable, found.differences, found.notes) == ((), (), ())

    monkeypatch.setattr("pytest_edgeq.check.runtime_results.KNOWN_WRONG", frozenset())
    [difference] = _agreement(quantized, inputs).differences
    assert difference.title.startswith("runtimes 'reference' and 'builtin': SUM #0: expected ")


def test_a_runtime_of_ones_own_that_cannot_run_the_file_is_blamed() -> None:
    """It is there to run it."""

    def broken(path: Path, signature: str | None) -> Bridge:
        raise OSError("no device")

    original = made("pt2e_static_int8")
    edgeq = Edgeq(runtimes={"board": broken})
    quantized = edgeq.load(original.tflite, reference=original.float_model)

    found = _agreement(quantized, samples(ResidualNet, 2, seed=3))

    assert len(found.unable) == 1
    assert "the board runtime cannot load the .tflite file" in str(found.unable[0])


@pytest.mark.parametrize(("width", "runs"), [(511, True), (512, False)])
def test_kernels_that_would_end_the_process_are_not_run(width: int, runs: bool) -> None:
    """SOFTMAX of the reference kernels over 512 equal scores or more aborts."""
    quantized = Edgeq(runtime="reference").load(
        equal_scores(width), reference=lambda x: np.full_like(x, 1 / width)
    )

    found = _agreement(quantized, [np.zeros((1, width), np.float32)])

    assert (found.unable, found.differences) == ((), ())
    assert bool(found.notes) != runs


@pytest.mark.parametrize("count", [3, 100])
def test_a_bound_that_rests_on_few_values_leaves_room_for_chance(count: int) -> None:
    """Runtimes that are as far off torch as each other are told apart in 1 of 1000 at most."""
    rng = np.random.default_rng(0)
    alarms = found = 0
    for _ in range(3000):
        one, other = rng.normal(size=(2, count))
        for factor in (1, 1000):
            distance = RuntimeDistance()
            distance.update(one, factor * other, np.zeros(count))
            beyond = distance.difference > 4 * distance.likely_error
            alarms, found = alarms + (beyond and factor == 1), found + (beyond and factor > 1)

    assert alarms <= 3
    assert found > 0.95 * 3000
