"""What a crash fails with, and that the session goes on."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from fixtures.tflite.writer import pack, unpack
from pytest_edgeq import Edgeq, QuantizedModel, assert_runtimes_agree
from pytest_edgeq.errors import CrashedConversionError, CrashedError
from pytest_edgeq.runtimes.workers.policy import Isolation
from pytest_edgeq.runtimes.workers.settings import default_memory
from tests.processes import left_after
from tests.runtimes.isolate import runners
from tests.runtimes.isolate.conftest import GOLDEN, Golden
from tests.waiting import rounds

SAMPLE = np.array([[1, 2, 3, 4]], np.float32)


def _own(way: str, step: str = "run", **bounds: object) -> QuantizedModel:
    maker = Edgeq(
        runtimes={"mine": runners.Ending(way, step)},
        cache_dir=None,
        **bounds,  # type: ignore[arg-type] # of several types
    )
    return maker.load(runners.negation())


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "way", ["segfault", *(pytest.param(e, marks=SLOW) for e in ("abort", "killed", "leave"))]
)
def test_a_runtime_of_ones_own_that_ends_its_process(golden: Golden, way: str) -> None:
    """The step, the file, the signal, what it printed and the line; the next run is made."""
    model = _own(way)
    golden(way, CrashedError, lambda: model.run(SAMPLE, runtime="mine"))
    assert (model.run(SAMPLE, runtime="builtin")["y"] == -SAMPLE).all()


def test_a_runtime_of_ones_own_that_crashes_where_it_opens_the_file(golden: Golden) -> None:
    """The step is another one."""
    model = _own("abort", "load")
    golden("abort_load", CrashedError, lambda: model.run(SAMPLE, runtime="mine"))


def test_a_runtime_of_ones_own_that_crashes_where_it_closes_the_file() -> None:
    """Told where the file is closed."""
    ending = {"mine": runners.Ending("abort", "close")}
    maker = Edgeq(runtimes=ending, cache_dir=None, isolate="on")
    assert (maker.load(runners.negation()).run(SAMPLE, runtime="mine")["y"] == -SAMPLE).all()
    model = maker.load(runners.negation())
    model.run(SAMPLE, runtime="mine")
    with pytest.raises(RuntimeError, match=r"mine runtime crashed in the step close: .* SIGABRT"):
        maker.close()
    assert (model.run(SAMPLE, runtime="builtin")["y"] == -SAMPLE).all()


@pytest.mark.parametrize("way", ["hang", pytest.param("loop", marks=pytest.mark.slow)])
def test_a_runtime_of_ones_own_that_does_not_return(golden: Golden, way: str) -> None:
    """In Python, and in native code that holds the interpreter's lock."""
    model = _own(way, isolate_timeout=1)
    golden(way, CrashedError, lambda: model.run(SAMPLE, runtime="mine"))


def test_a_runtime_of_ones_own_that_allocates_for_ever(golden: Golden) -> None:
    """It meets the bound, and not the machine's."""
    model = _own("allocate", isolate_memory="600M")
    golden("allocate", CrashedError, lambda: model.run(SAMPLE, runtime="mine"))


def test_kernels_that_crash_on_a_whole_file(golden: Golden, tmp_path: Path) -> None:
    """The op is found."""
    path = tmp_path / "model.tflite"
    path.write_bytes(runners.segfault_at_run())
    model = Edgeq(cache_dir=None).load(path)
    sample = np.ones((1, 4, 4, 4), np.float32)
    golden("kernel", CrashedError, lambda: model.run(sample))


def test_kernels_that_abort_on_another_runtime_than_the_default(tmp_path: Path) -> None:
    """The same file runs where they do not; a bare path, outside of any session, is isolated."""
    path = tmp_path / "model.tflite"
    path.write_bytes(runners.equal_scores())
    sample, told = np.zeros((1, 512), np.float32), r"^the reference runtime crashed .* SIGABRT"
    model = Edgeq(cache_dir=None).load(path)
    (scores,) = model.run(sample).values()
    assert (scores == scores[0, 0]).all()
    with pytest.raises(CrashedError, match=told):
        model.run(sample, runtime="reference")
    with pytest.raises(CrashedError, match=told):
        assert_runtimes_agree(path, [sample], 0, runtimes=("builtin", "reference"))


@pytest.mark.slow
def test_a_crash_fails_the_check_of_a_model() -> None:
    """As one of its findings, with the op."""
    model = Edgeq(cache_dir=None, localize_timeout=0).load(
        runners.segfault_at_run(), reference=lambda x: -np.asarray(x)
    )
    samples = [np.full((1, 4, 4, 4), n, np.float32) for n in range(1, 3)]
    with pytest.raises(AssertionError, match="got SIGSEGV") as caught:
        Edgeq(cache_dir=None).check(model, samples)
    assert "LOCAL_RESPONSE_NORMALIZATION #1" in str(caught.value)


@pytest.mark.slow
def test_kills_at_random_moments_are_told_or_not_noticed() -> None:
    """Also between two steps, and in the middle of a message; none makes a run wait for ever."""
    model = Edgeq(isolate="on", cache_dir=None).load(runners.negation(2_000_000))
    sample = np.ones((1, 2_000_000), np.float32)
    isolation = model.edge.runtimes.isolation
    assert isolation is not None
    left, chance = 6, random.Random(0)

    def kill() -> None:
        nonlocal left
        for _ in rounds():
            if not left:
                break
            time.sleep(chance.random() / 2)
            pid = isolation.child.pid
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    left -= 1

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    # On a busy machine the child may be killed each time that it is started for a run.
    told = re.compile("got SIGKILL from outside|the process that held it has ended")
    for _ in rounds(100):
        if not killer.is_alive():
            break
        try:
            assert (model.run(sample)["y"] == -1).all()
        except CrashedError as error:
            assert told.search(str(error))  # noqa: PT017 # it need not be raised
    assert not left
    assert (model.run(sample)["y"] == -1).all()


def test_a_child_that_is_killed_between_two_runs_is_started_again() -> None:
    """Whatever runs next goes on."""
    model = Edgeq(isolate="on", cache_dir=None).load(runners.negation())
    isolation = model.edge.runtimes.isolation
    assert isolation is not None
    for _ in range(2):
        assert (model.run(SAMPLE)["y"] == -SAMPLE).all()
        process = psutil.Process(isolation.child.pid)
        process.kill()
        assert not left_after([process])


@pytest.mark.slow
def test_a_child_that_is_stopped_between_two_steps() -> None:
    """It reads no request; the next run has another child."""
    model = Edgeq(isolate="on", isolate_timeout=1, cache_dir=None).load(runners.negation())
    isolation = model.edge.runtimes.isolation
    assert isolation is not None
    model.run(SAMPLE)
    pid = isolation.child.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)

    with pytest.raises(CrashedError, match="got no result in 1 s"):
        model.run(SAMPLE)

    assert (model.run(SAMPLE)["y"] == -SAMPLE).all()


@pytest.mark.slow
def test_kernels_that_never_return(golden: Golden) -> None:
    """An op that cannot be cut out is named as such."""
    model = Edgeq(cache_dir=None, isolate_timeout=1).load(runners.endless())
    golden("endless", CrashedError, lambda: model.run(np.zeros(1, np.int32)))


def test_kernels_that_meet_the_bound_on_memory(golden: Golden) -> None:
    """They refuse without a reason; and the run is not tried again where there is no bound."""
    model = Edgeq(cache_dir=None, isolate_memory="600M").load(runners.unbounded())
    sample = np.array([100_000, 100_000], np.int32)
    golden("unbounded", RuntimeError, lambda: model.run(sample))


def test_an_interpreter_that_crashes_while_it_is_built(golden: Golden) -> None:
    """Of a file without its list of subgraphs, which the interpreter reads all the same."""
    model = unpack(runners.negation())
    model.subgraphs = None
    damaged, maker = pack(model), Edgeq(cache_dir=None)
    golden("open", CrashedError, lambda: maker.load(damaged))
    assert (maker.load(runners.negation()).run(SAMPLE)["y"] == -SAMPLE).all()


def test_a_step_of_a_conversion_that_crashes(golden: Golden) -> None:
    """The model and the step."""
    isolation = Isolation("on", seconds=60, memory=default_memory())
    native = isolation.native("small net")
    assert native is not None
    golden(
        "conversion", CrashedConversionError, lambda: native.call("convert", runners.WAYS["abort"])
    )


def test_every_golden_text_has_its_case() -> None:
    """A golden file that no test reads would never be looked at again."""
    source = Path(__file__).read_text("utf-8")
    assert [path.stem for path in GOLDEN.iterdir() if f'"{path.stem}"' not in source] == []
