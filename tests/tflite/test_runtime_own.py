"""A runtime of one's own: what it is given, what it must give, and when it is closed."""

from __future__ import annotations

import copy
import gc
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from ai_edge_litert.interpreter import Interpreter

from fixtures.tflite import make, stacks
from fixtures.tflite.writer import chain, one_op, pack, unpack
from pytest_edgeq import Edgeq, assert_runtimes_agree
from pytest_edgeq.names import RUNTIMES
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.runtimes.engines import Opening
from pytest_edgeq.runtimes.registry import Runtimes
from pytest_edgeq.runtimes.runner import Runner
from pytest_edgeq.tflite.runtimes import Runtime, RuntimeSession

Inputs = dict[str, npt.NDArray[Any]]
PATH = make.CONVERTED / "nested.int8.tflite"
SAMPLE = stacks.MODELS["nested"][1][0]


class Bench:
    """An interpreter that takes notes."""

    sessions: list[Bench]

    def __init__(self, path: Path, signature: str | None) -> None:
        type(self).sessions.append(self)
        self.path, self.signature = path, signature
        self.n_runs = self.n_closed = 0
        self.threads = {threading.get_ident()}
        interpreter = Interpreter(str(path))
        self._run = interpreter.get_signature_runner(signature)

    def __call__(self, inputs: Inputs) -> Inputs:
        """Give the outputs as the interpreter does: by name, alphabetically."""
        self.n_runs += 1
        self.threads.add(threading.get_ident())
        outputs: Inputs = self._run(**inputs)
        return outputs

    def close(self) -> None:
        """Take note."""
        self.n_closed += 1


@pytest.fixture
def bench() -> Iterator[type[Bench]]:
    """A runner that starts with no sessions."""

    class Fresh(Bench):
        sessions: list[Bench] = []  # noqa: RUF012 # read through the base class

    yield Fresh
    Fresh.sessions.clear()


def _edge(runner: Runtime, source: Path | bytes = PATH) -> EdgeFile:
    return EdgeFile(source, runtimes=Runtimes({"bench": runner}))


def _codes(edge: EdgeFile) -> dict[str, npt.NDArray[Any]]:
    return edge.encode(["args_0"], [SAMPLE.numpy()])


def test_it_gives_what_the_file_gives(bench: type[Bench]) -> None:
    """Opened once for all samples, with the path of the file and the key of its signature."""
    edge = _edge(bench)
    for _ in range(3):
        expected = edge.runner("xnnpack").run(_codes(edge))
        got = edge.runner("bench").run(_codes(edge))
        assert [a.tobytes() for a in got] == [a.tobytes() for a in expected]
    (session,) = bench.sessions
    assert (session.path, session.signature, session.n_runs) == (PATH, "serving_default", 3)


def test_it_is_used_wherever_a_runtime_is_named(bench: type[Bench], tmp_path: Path) -> None:
    """Run, compare, assertion, and the session's own choice; outside pytest."""
    maker = Edgeq(directory=tmp_path, runtimes={"bench": bench}, runtime="bench")
    model = maker.load(PATH, reference=stacks.build("nested"))
    values = model.run(SAMPLE)
    assert list(values) == ["output_0", "output_1"]
    assert maker.compare(model, [SAMPLE]).runtime == "bench"
    other = maker.compare(model, [SAMPLE], runtime="xnnpack")
    assert maker.compare(model, [SAMPLE], runtime="bench").total == other.total
    runs = bench.sessions[0].n_runs
    assert_runtimes_agree(model, [SAMPLE], 0, runtimes=("xnnpack", "bench"))
    assert bench.sessions[0].n_runs == runs + 1
    assert len(bench.sessions) == 1
    # Also for another file against the same references.
    again = model.with_tflite(PATH.read_bytes())
    assert_runtimes_agree(again, [SAMPLE], 0, runtimes=("bench", "reference"))
    assert len(bench.sessions) == 2
    maker.close()
    assert [session.n_closed for session in bench.sessions] == [1, 1]
    with pytest.raises(RuntimeError, match="its session was closed"):
        model.run(SAMPLE)


@pytest.mark.parametrize("others", [["xnnpack"], ["pi"], ["builtin", "pi"]])
def test_runtimes_that_agree_are_opened_once(
    bench: type[Bench], others: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All samples run in one session a runtime, in the caller's thread; targets have a pool."""
    opened: list[str] = []

    class Noting(Runner):
        def __init__(self, opening: Opening, *rest: Any) -> None:
            opened.append(opening.runtime)
            super().__init__(opening, *rest)

    monkeypatch.setattr("pytest_edgeq.runtimes.edge.Runner", Noting)
    maker = Edgeq(runtimes={"bench": bench}, targets={"pi": [sys.executable]}, target_timeout=60)
    assert_runtimes_agree(maker.load(PATH), [SAMPLE] * 20, 0, runtimes=(*others, "bench"))
    maker.close()
    assert sorted(opened) == sorted([*others, "bench"])
    (session,) = bench.sessions
    assert (session.n_runs, session.n_closed) == (20, 1)
    assert session.threads == {threading.get_ident()}


def test_nan_on_one_runtime_is_no_agreement() -> None:
    """A dequantized output that is NaN differs; NaN at the same place on both runtimes agrees."""

    def broken(path: Path, signature: str | None) -> RuntimeSession:
        return lambda inputs: {"t1": np.full((2, 4), np.nan, np.float32)}

    codes = {"dtype": "int8", "shape": (2, 4), "scales": [0.5], "zero_points": [0]}
    file = one_op("DEQUANTIZE", [codes], [{"dtype": "float32", "shape": (2, 4)}])
    model = Edgeq(runtimes={"broken": broken, "alike": broken}).load(file)
    sample = [np.ones((2, 4), np.float32)]
    with pytest.raises(AssertionError, match="got inf") as caught:
        assert_runtimes_agree(model, sample, 1e9, runtimes=("xnnpack", "broken"))
    assert "no bound accepts other shapes, NaN or infinity" in str(caught.value)
    assert_runtimes_agree(model, sample, 0, runtimes=("alike", "broken"))


def test_a_file_in_memory_has_a_path(bench: type[Bench], tmp_path: Path) -> None:
    """A file in memory is written down for it, and taken away with the session."""
    maker = Edgeq(directory=tmp_path, runtimes={"bench": bench})
    model = maker.load(PATH.read_bytes())
    one, two = (model.run(SAMPLE, runtime=each)["output_0"] for each in ("bench", "xnnpack"))
    assert np.array_equal(one, two)
    (session,) = bench.sessions
    assert session.path.read_bytes() == PATH.read_bytes()
    maker.close()
    assert not session.path.exists()


def test_a_bare_file_knows_none(bench: type[Bench]) -> None:
    """Where no session has opened it, and the text says what to give instead."""
    Edgeq(runtimes={"bench": bench})
    for model in (PATH, str(PATH), PATH.read_bytes()):
        with pytest.raises(ValueError, match="unknown runtime 'bench'; valid: xnnp") as caught:
            assert_runtimes_agree(model, [SAMPLE], 0, runtimes=("xnnpack", "bench"))
        assert "instead of a path or bytes, give edgeq.load(path)" in str(caught.value)


def test_an_unknown_name_lists_all_and_says_where_to_register(bench: type[Bench]) -> None:
    """The built-in ones and the registered ones."""
    for wrong in ("bensh", "", "Bench"):
        with pytest.raises(ValueError, match=re.escape(f"unknown runtime {wrong!r}")) as caught:
            Edgeq(runtimes={"bench": bench}).load(PATH).edge.runner(wrong)
        assert f"valid: {', '.join(RUNTIMES)}, bench\n" in str(caught.value)
        assert "pytest_edgeq_runtimes(config)" in str(caught.value)
    with pytest.raises(ValueError, match=r"unknown runtime 'bensh' \(did you mean bench"):
        Edgeq(runtimes={"bench": bench}, runtime="bensh")


@pytest.mark.parametrize(
    ("runtimes", "said"),
    [
        ({"xnnpack": Bench}, "'xnnpack' is the name of a built-in runtime"),
        ({"tensorflow": Bench}, "'tensorflow' is the name of a built-in runtime"),
        ({"my phone": Bench}, "'my phone' is no name for a runtime"),
        ({"a,b": Bench}, "'a,b' is no name for a runtime"),
        ({"": Bench}, "'' is no name for a runtime"),
        ({3: Bench}, "expected a name, got 3"),
        ({"phone": "adb"}, "runtime 'phone': expected a runner"),
        ([Bench], "expected a dict of name → runner, got list"),
    ],
)
def test_bad_registrations_are_refused(runtimes: Any, said: str) -> None:
    """When they are made, not when the first test runs."""
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        Edgeq(runtimes=runtimes)


# --- nothing that it gives is trusted ---------------------------------------------------------


def _spoiled(spoil: Callable[[Inputs], Any]) -> Runtime:
    def runner(path: Path, signature: str | None) -> RuntimeSession:
        run = Interpreter(str(path)).get_signature_runner(signature)
        return lambda inputs: spoil(run(**inputs))

    return runner


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda o: list(o.values()), "returned list, expected a dict of arrays"),
        (lambda o: {"output_0": o["output_0"]}, "the outputs ['output_0'], the file has ['output"),
        (lambda o: o | {"output_2": o["output_0"]}, "'output_2'], the file has ['output_0', 'outp"),
        # The same number of elements, and one that broadcasts.
        (
            lambda o: o | {"output_1": o["output_1"].T},
            "expected int8 [2, 3], the runner returned int8",
        ),
        (lambda o: o | {"output_1": o["output_1"][:1]}, "the runner returned int8 [1, 3]"),
        # Swapped, decoded, widened, and of another sign.
        (lambda o: {"output_0": o["output_1"], "output_1": o["output_0"]}, "'output_0': expected"),
        (
            lambda o: o | {"output_0": o["output_0"] * np.float32(0.1)},
            "the runner returned float32 ",
        ),
        (
            lambda o: o | {"output_0": o["output_0"].astype(np.int32)},
            "the runner returned int32 [2, 2",
        ),
        (
            lambda o: o | {"output_0": o["output_0"].view(np.uint8)},
            "the runner returned uint8 [2, 2]",
        ),
        # No arrays.
        (lambda o: o | {"output_0": torch.from_numpy(o["output_0"])}, "returned Tensor, no numpy"),
        (
            lambda o: o | {"output_0": np.ma.masked_array(o["output_0"])},
            "returned MaskedArray, no num",
        ),
        (lambda o: o["output_7"], "the runner raised KeyError: 'output_7'"),
    ],
)
def test_what_it_gives_is_checked(spoil: Callable[[Inputs], Any], said: str) -> None:
    """Names, dtypes and shapes are the file's, or it is an error that names the runtime."""
    edge = _edge(_spoiled(spoil))
    with pytest.raises(RuntimeError) as caught:
        edge.runner("bench").run(_codes(edge))
    assert str(caught.value).startswith("the bench runtime cannot run the .tflite file: ")
    assert said in str(caught.value)
    # The error of the runner itself is there with its traceback.
    assert (caught.value.__cause__ is None) == ("raised" not in said)


def test_a_dynamic_dimension_takes_any_length_and_a_fixed_one_none() -> None:
    """As the file says it."""
    shape: dict[str, Any] = {"dtype": "float32", "shape": (1, 4), "signature": (-1, 4)}
    content = one_op("NEG", [shape], [shape])
    given = np.ones((3, 4), np.float32)
    for result, passes in ((-given, True), (-given[:, :3], False), (-given[0], False)):
        edge = _edge(lambda path, key, r=result: lambda inputs: {"t1": r}, content)
        if passes:
            assert edge.runner("bench").run({"t0": given})[0].shape == (3, 4)
        else:
            with pytest.raises(
                RuntimeError, match=r"expected float32 \[-1, 4\], the runner returned"
            ):
                edge.runner("bench").run({"t0": given})


def test_it_cannot_change_samples_or_results() -> None:
    """It is given copies, and what it gives is copied: it may reuse its memory."""
    memory = np.zeros((1, 4), np.float32)

    def session(inputs: Inputs) -> Inputs:
        memory[:] = -inputs["t0"]
        inputs["t0"][:] = np.nan
        return {"t1": memory}

    content = one_op("NEG", [{"dtype": "float32"}], [{"dtype": "float32"}])
    edge = _edge(lambda path, key: session, content)
    given = np.ones((1, 4), np.float32)
    first = edge.runner("bench").run({"t0": given})[0]
    edge.runner("bench").run({"t0": 2 * given})
    assert first.tolist() == [[-1.0] * 4]
    assert given.tolist() == [[1.0] * 4]


def test_opening_may_fail() -> None:
    """The runner's own error, something that is no session, or no device: a skip is a skip."""

    def opening(error: BaseException) -> Runtime:
        def raising(path: Path, signature: str | None) -> RuntimeSession:
            raise error

        return raising

    with pytest.raises(RuntimeError, match=r"load the \.tflite file: the runner raised Conn") as no:
        _edge(opening(ConnectionError("no device"))).runner("bench")
    assert isinstance(no.value.__cause__, ConnectionError)
    nothing: Any = lambda path, signature: None  # noqa: E731 # the mistake at issue
    with pytest.raises(RuntimeError, match="the runner returned NoneType, expected a session"):
        _edge(nothing).runner("bench")
    skip = pytest.skip.Exception("no phone is attached")
    with pytest.raises(pytest.skip.Exception):
        _edge(opening(skip)).runner("bench")


# --- when it is closed ------------------------------------------------------------------------


@pytest.mark.slow
def test_it_is_closed_when_the_model_goes(bench: type[Bench]) -> None:
    """Once; and the session that ends later has nothing left to close."""
    maker = Edgeq(runtimes={"bench": bench})
    model = maker.load(PATH)
    model.run(SAMPLE, runtime="bench")
    assert [session.n_closed for session in bench.sessions] == [0]
    del model
    gc.collect()
    assert [session.n_closed for session in bench.sessions] == [1]
    maker.close()
    assert [session.n_closed for session in bench.sessions] == [1]


def test_every_session_is_closed_though_one_cannot_be(bench: type[Bench]) -> None:
    """And the error is told."""

    class Stuck(bench):  # type: ignore[misc, valid-type]
        def close(self) -> None:
            super().close()
            if self is bench.sessions[0]:
                raise OSError("the cable is gone")

    Stuck.sessions = bench.sessions
    maker = Edgeq(runtimes={"bench": Stuck})
    models = [maker.load(PATH) for _ in range(3)]
    for model in models:
        model.run(SAMPLE, runtime="bench")
    with pytest.raises(RuntimeError, match="could not be closed: OSError: the cable is gone"):
        maker.close()
    assert [session.n_closed for session in bench.sessions] == [1, 1, 1]
    maker.close()


def test_a_file_with_state_is_opened_anew(bench: type[Bench]) -> None:
    """With each `run` and `compare`: the old session is closed first."""
    raw = unpack(chain(("NEG", "x", "y"), inputs="x", outputs="y", key="main"))
    state = copy.copy(raw.subgraphs[0].tensors[0])
    state.isVariable, state.name = True, "state"
    raw.subgraphs[0].tensors.append(state)
    model = Edgeq(runtimes={"bench": bench}).load(pack(raw))
    for _ in range(3):
        model.run(np.ones((1, 4), np.float32), runtime="bench")
    assert [session.n_closed for session in bench.sessions] == [1, 1, 0]
