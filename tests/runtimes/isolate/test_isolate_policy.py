"""What runs in the child process, what is remembered, and that figures are the same."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fixtures.models import ConvBnRelu, samples, seeded
from fixtures.tflite import make, stacks
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.localize.single_ops import SingleOps
from pytest_edgeq.names import RUNTIMES
from pytest_edgeq.quantize.cache.directory import CacheLog
from pytest_edgeq.runtimes.workers import policy
from pytest_edgeq.runtimes.workers.settings import default_memory, parse_memory
from tests.runtimes.isolate import runners

Arrays = Mapping[str, npt.NDArray[Any]]

SAMPLE = np.array([[1, 2, 3, 4]], np.float32)
NESTED = make.CONVERTED / "nested.int8.tflite"


class Noting:
    """A runtime that notes in a file which process opened and ran what."""

    def __init__(self, notes: Path) -> None:
        self._notes, self._tested = notes, os.getpid()

    def __call__(self, path: Path, signature: str | None) -> Callable[[Arrays], Arrays]:
        """Open a file of `negation`."""
        self._note("open")

        def run(inputs: Arrays) -> Arrays:
            self._note("run")
            return {"y": -inputs["x"]}

        return run

    def _note(self, what: str) -> None:
        where = "here" if os.getpid() == self._tested else "child"
        with self._notes.open("a", encoding="utf-8") as file:
            file.write(f"{what} {where}\n")


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Where `Noting` writes."""
    path = tmp_path / "notes"
    path.touch()
    return path


def _taken(notes: Path) -> list[str]:
    lines = notes.read_text("utf-8").splitlines()
    notes.write_text("", "utf-8")
    return lines


def _load(notes: Path, **options: Any) -> QuantizedModel:
    options = {"cache_dir": None, **options}
    return Edgeq(runtimes={"mine": Noting(notes)}, **options).load(runners.negation())


@pytest.mark.parametrize(
    ("mode", "first", "then"),
    [
        ("auto", ["open child", "open here", "run child", "run here"], ["run here"]),
        ("on", ["open child", "run child"], ["run child"]),
        ("off", ["open here", "run here"], ["run here"]),
    ],
)
def test_where_a_file_runs(notes: Path, mode: str, first: list[str], then: list[str]) -> None:
    """With auto the first run is made in the child, and none of another model with the file."""
    model = _load(notes, isolate=mode)
    for expected in (first, then):
        assert (model.run(SAMPLE, runtime="mine")["y"] == -SAMPLE).all()
        assert _taken(notes) == expected
    if mode == "auto":
        _load(notes).run(SAMPLE, runtime="mine")
        assert _taken(notes) == ["open here", "run here"]


def test_what_survived_is_remembered_in_the_cache_directory(
    notes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the content of the file and the runtime; `refresh` tries again."""
    told: list[bool] = []
    for mode in ("on", "on", "refresh"):
        monkeypatch.setattr(policy, "_survived", set())  # as in another process
        _load(notes, cache_dir=tmp_path / "cache", cache=mode).run(SAMPLE, runtime="mine")
        told.append("run child" in _taken(notes))
    assert told == [True, False, True]


def test_what_did_not_run_is_not_remembered() -> None:
    """That an interpreter of it was built is; a runner of it that was not used is not."""
    model = Edgeq(cache_dir=None).load(runners.negation())
    model.edge.runner("xnnpack")
    assert len(policy._survived) == 1
    model.run(SAMPLE)
    assert len(policy._survived) == 2


def test_a_file_that_the_flow_made_runs_here_on_the_default_runtime(
    makers: dict[str, tuple[Edgeq, QuantizedModel]],
) -> None:
    """Else its first run is made in the child; a file in its place is opened there, too."""
    _, model = makers["auto"]
    (sample,) = samples(ConvBnRelu, 1)
    model.run(*sample)
    assert not policy._survived
    model.run(*sample, runtime="builtin")
    assert len(policy._survived) == 1
    model.with_tflite(model.tflite).run(*sample)
    assert len(policy._survived) == 3


def test_ops_alone_are_not_tried_after_the_whole_file(
    makers: dict[str, tuple[Edgeq, QuantizedModel]],
) -> None:
    """They have run in it, on the same kernels."""
    _, model = makers["auto"]
    (sample,) = samples(ConvBnRelu, 1)
    ops = SingleOps(model.edge)
    arrays = [each.numpy() for each in sample]
    for group in ops.groups(model.edge.encode(model.input_names, arrays)):
        assert group.run("builtin")
    ops.close()
    assert len(policy._survived) == 1


@pytest.mark.parametrize("runtime", RUNTIMES[:4])
def test_outputs_are_the_same_to_the_last_bit(runtime: str) -> None:
    """Of all modes."""
    sample = stacks.MODELS["nested"][1][0]
    models = [Edgeq(isolate=mode, cache_dir=None).load(NESTED) for mode in ("off", "auto", "on")]
    told = [each.run(sample, runtime=runtime).values() for each in models]
    here, *others = [[value.tobytes() for value in outputs] for outputs in told]
    assert others == [here, here]


@pytest.fixture(scope="module")
def makers() -> dict[str, tuple[Edgeq, QuantizedModel]]:
    """A session of each mode, and a model that it has converted."""
    found = {}
    for mode in ("off", "auto", "on"):
        maker = Edgeq(isolate=mode, threads=2)
        example, calibration = ConvBnRelu.sample_inputs(), samples(ConvBnRelu, 8)
        found[mode] = maker, maker.quantize(seeded(ConvBnRelu), example, calibration=calibration)
    return found


@pytest.mark.timeout(300)
def test_figures_are_the_same_to_the_last_bit(
    makers: dict[str, tuple[Edgeq, QuantizedModel]],
) -> None:
    """With several samples at a time; localizing reads the tensors between."""
    data = list(samples(ConvBnRelu, 8, seed=2))
    told = {
        mode: (model.tflite, maker.compare(model, data), maker.localize(model, data[:2]).to_dict())
        for mode, (maker, model) in makers.items()
        if mode != "auto"
    }
    assert told["on"][0] == told["off"][0]
    assert told["on"][1].to_dict() == told["off"][1].to_dict()
    assert told["on"][2] == told["off"][2]


@pytest.mark.slow
@pytest.mark.parametrize("quantizer", ["pt2e_static_int8", "recipe_static_wi8_ai8", None])
def test_files_converted_in_the_child_are_the_same_byte_by_byte(quantizer: str | None) -> None:
    """By the converter's passes, and by ai-edge-quantizer."""
    here, there = (
        Edgeq(isolate=mode, cache="off").quantize(
            seeded(ConvBnRelu),
            ConvBnRelu.sample_inputs(),
            quantizer=quantizer,
            calibration=samples(ConvBnRelu, 4),
        )
        for mode in ("off", "on")
    )
    assert here.tflite == there.tflite


def test_a_runner_that_cannot_be_sent() -> None:
    """Runs here with a note, or is an error where all is to run in the child."""
    notes: list[str] = []
    file = Path(__file__).open("rb")  # noqa: SIM115 # closed below

    def runner(path: Path, signature: str | None) -> Callable[[Arrays], Arrays]:
        assert not file.closed
        return lambda inputs: {"y": -inputs["x"]}

    def model(mode: str) -> QuantizedModel:
        log = CacheLog(note=notes.append)
        maker = Edgeq(runtimes={"mine": runner}, isolate=mode, cache_dir=None, cache_log=log)
        return maker.load(runners.negation())

    with file:
        assert (model("auto").run(SAMPLE, runtime="mine")["y"] == -SAMPLE).all()
        assert notes == [
            "runtime 'mine' was not tried in a child process first: "
            f"TypeError: an open file, {__file__!r}"
        ]
        with pytest.raises(RuntimeError, match="cannot run in a child process") as caught:
            model("on").run(SAMPLE, runtime="mine")
    assert "fix: make the runner a function or a class of an importable module" in str(caught.value)


def _without_pytest(path: Path, signature: str | None, sign: int) -> Callable[[Arrays], Arrays]:
    if "pytest" in sys.modules:  # not by `assert`, which pytest rewrites to functions of its own
        raise OSError("this module was imported")
    return lambda inputs: {"y": sign * inputs["x"]}


def test_a_partial_of_a_function_of_a_test_module_is_sent_by_value() -> None:
    """The child cannot import a module that pytest imported from a file, as `conftest.py` is."""
    runner = functools.partial(_without_pytest, sign=-1)
    maker = Edgeq(runtimes={"mine": runner}, isolate="on", cache_dir=None)
    assert (maker.load(runners.negation()).run(SAMPLE, runtime="mine")["y"] == -SAMPLE).all()


def test_an_error_of_a_runner_is_that_of_this_process() -> None:
    """It may need what only this process has, and so it is run here, too."""
    here = os.getpid()

    def runner(path: Path, signature: str | None) -> Callable[[Arrays], Arrays]:
        if os.getpid() != here:
            raise OSError("no device")
        return lambda inputs: {"y": -inputs["x"]}

    maker = Edgeq(runtimes={"mine": runner}, cache_dir=None)
    assert (maker.load(runners.negation()).run(SAMPLE, runtime="mine")["y"] == -SAMPLE).all()


def test_what_the_child_prints_is_printed_here(capfd: pytest.CaptureFixture[str]) -> None:
    """As it is without a child."""
    maker = Edgeq(runtimes={"mine": runners.Ending("nothing")}, isolate="on", cache_dir=None)
    maker.load(runners.negation()).run(SAMPLE, runtime="mine")
    assert "negating 1 input\n" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"isolate": "yes"}, ValueError, "isolate: expected one of auto, on, off, got 'yes'"),
        ({"isolate_timeout": 0}, ValueError, "isolate_timeout: expected at least 1, got 0"),
        ({"isolate_timeout": 1.5}, TypeError, "isolate_timeout: expected a whole number, got 1.5"),
        ({"isolate_memory": "4X"}, ValueError, "expected a size such as 4G, 512M or 2048"),
        ({"isolate_memory": 2**20}, ValueError, "expected a size of at least 256M, got 1048576"),
        ({"isolate_memory": 0.5}, TypeError, "isolate_memory: expected bytes, or a text"),
    ],
)
def test_a_wrong_option_is_told(options: dict[str, Any], error: type[Exception], said: str) -> None:
    """Of `Edgeq`; those of pytest are tested with the others."""
    with pytest.raises(error, match=said):
        Edgeq(**options)


def test_sizes() -> None:
    """A number alone is MiB."""
    sizes = ("1G", "2 GiB", "512m", "300MB", "640")
    assert [parse_memory(size) >> 20 for size in sizes] == [1024, 2048, 512, 300, 640]
    with pytest.raises(ValueError, match="at least 256M, got '255'"):
        parse_memory("255")
    assert default_memory(2) <= default_memory(1)
    assert default_memory(1000) == min(default_memory(1), 4 << 30)
