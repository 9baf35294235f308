"""A local Python as the target: what it gives is what this process gives, to the last bit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from fixtures.tflite import make, stacks
from fixtures.tflite.kinds import free_shapes
from fixtures.tflite.stateful import counter
from fixtures.tflite.writer import chain, one_op, pack, unpack
from pytest_edgeq import Edgeq, assert_accuracy_drop, assert_runtimes_agree
from pytest_edgeq.runtimes.edge import EdgeFile
from pytest_edgeq.runtimes.registry import Runtimes
from pytest_edgeq.runtimes.workers.remote_worker import RESOLVERS, facts
from pytest_edgeq.runtimes.workers.target import Target
from pytest_edgeq.tflite.graph import OpGraph
from tests.bench.speed.kernels_of_arm import drawn as inputs_of
from tests.processes import left_after, target_workers
from tests.runtimes.targets.conftest import drawn

Array = npt.NDArray[Any]

THROUGH_A_SHELL = ["sh", "-c", 'eval "exec $0 $*"', sys.executable]
"""As ssh does: the words are joined by blanks, and a shell takes them apart."""


@pytest.fixture(scope="module")
def targets() -> Iterator[Runtimes]:
    """Two targets; none of their processes is left behind."""
    commands = {"local": [sys.executable], "shell": THROUGH_A_SHELL}
    made = Runtimes(targets={name: Target(name, words, 60) for name, words in commands.items()})
    yield made
    processes = target_workers()
    assert processes
    made.close()
    assert not left_after(processes)


def _bits(outputs: list[Array]) -> list[object]:
    return [(each.dtype, each.shape, each.tobytes()) for each in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("kernels", RESOLVERS)
def test_a_target_gives_what_this_process_gives(targets: Runtimes, kernels: str) -> None:
    """All files of the fixtures, on the same kernels, in two samples."""
    for path in sorted(make.CONVERTED.glob("*.tflite")):
        edge = EdgeFile(path, runtimes=targets)
        for seed in range(2):
            inputs = inputs_of(edge, seed)
            expected = edge.runner(kernels).run(inputs)
            got = edge.runner(f"local:{kernels}").run(inputs)
            assert _bits(got) == _bits(expected), path.name


def test_a_shell_between_changes_nothing(targets: Runtimes) -> None:
    """The word that starts the worker reads the same with and without its quotes."""
    edge = EdgeFile(make.CONVERTED / "nested.int8.tflite", runtimes=targets)
    inputs = inputs_of(edge, 0)
    for runtime in ("shell", "shell:xnnpack"):
        assert _bits(edge.runner(runtime).run(inputs)) == _bits(edge.runner("xnnpack").run(inputs))


def test_inputs_change_their_shape_from_sample_to_sample(targets: Runtimes) -> None:
    """The worker allocates anew, as this one does; also a stored shape that no kernel takes."""
    edge = EdgeFile(_any_batch(), runtimes=targets)
    for batch in (1, 3, 1):
        inputs = {"x": np.arange(batch * 4, dtype=np.float32).reshape(batch, 4)}
        got = edge.runner("local").run(inputs)
        assert _bits(got) == _bits(edge.runner("xnnpack").run(inputs))
        assert got[0].shape == (batch, 4)

    kind = free_shapes()  # [1, 1] of a layer of 16 inputs
    edge = EdgeFile(kind.content, runtimes=targets)
    expected, got = (edge.run(["x"], kind.inputs[0], name) for name in ("xnnpack", "local"))
    assert _bits(got) == _bits(expected)


def _any_batch() -> bytes:
    free = {"signature": (-1, 4)}
    return chain(("RELU", "x", "y"), inputs="x", outputs="y", key="main", x=free, y=free)


def test_every_tensor_comes_back(targets: Runtimes) -> None:
    """Of the kernels that keep them: computed ones of the last run, and constants."""
    edge = EdgeFile(make.CONVERTED / "nested.int8.tflite", runtimes=targets)
    here, there = (edge.runner(name, keep=True) for name in ("builtin", "local:builtin"))
    for seed in range(2):
        inputs = inputs_of(edge, seed)
        here.run(inputs)
        there.run(inputs)
        for tensor in edge.graph.subgraphs[0].tensors:
            assert here.tensor(tensor.index).tobytes() == there.tensor(tensor.index).tobytes()


def test_a_delegate_keeps_no_tensors(targets: Runtimes) -> None:
    """The text lists the runtimes that do, those of targets too."""
    edge = EdgeFile(make.CONVERTED / "nested.int8.tflite", runtimes=targets)
    with pytest.raises(ValueError, match="these do: builtin, reference, local:builtin,"):
        edge.runner("local", keep=True)


def test_a_file_keeps_its_state_there(targets: Runtimes) -> None:
    """From run to run, until a restart."""
    edge = EdgeFile(counter(), runtimes=targets)
    one = {"x": np.ones((1, 4), np.float32)}
    for _ in range(2):
        totals = [edge.runner("local").run(one)[0] for _ in range(3)]
        assert [total.tolist() for total in totals] == [[[n] * 4] for n in (1, 2, 3)]
        edge.restart()


@pytest.mark.parametrize(("op", "kernels"), [("LOGISTIC", "builtin"), ("FULLY_CONN", "xnnpack")])
def test_a_refusal_names_the_op(targets: Runtimes, op: str, kernels: str) -> None:
    """As in this process; where the delegate does not name the op, cut files are loaded there."""
    codes = {"dtype": "int8", "scales": (0.1,), "zero_points": (0,)}
    broken = one_op("LOGISTIC", [codes], [codes]) if op == "LOGISTIC" else _refused_by_xnnpack()
    edge = EdgeFile(broken, runtimes=targets)
    with pytest.raises(RuntimeError) as here:
        edge.runner(kernels).run(inputs_of(edge, 0))
    with pytest.raises(RuntimeError) as there:
        edge.runner(f"local:{kernels}").run(inputs_of(edge, 0))
    assert str(there.value) == str(here.value).replace(
        f"{kernels} runtime", f"local:{kernels} runtime"
    )
    assert op in str(there.value).splitlines()[0]


def test_texts_are_not_sent(targets: Runtimes) -> None:
    """They run on this machine."""
    text = {"dtype": "string", "shape": (1,)}
    edge = EdgeFile(one_op("RESHAPE", [text], [text]), runtimes=targets)
    with pytest.raises(RuntimeError, match="is string, which cannot be sent"):
        edge.runner("local")


def _refused_by_xnnpack() -> bytes:
    model = unpack((make.CONVERTED / "nested.int8.tflite").read_bytes())
    graph = OpGraph.read(make.CONVERTED / "nested.int8.tflite")
    layer = next(op for op in graph.ops if op.name == "FULLY_CONNECTED")
    model.subgraphs[0].tensors[layer.outputs[0]].quantization.scale = [3.9e-12]
    return pack(model)


@pytest.mark.slow
def test_a_session_compares_and_localizes_on_a_target() -> None:
    """Figures are those of this process, and the worker says of itself what this one would."""
    others = target_workers()
    edgeq = Edgeq(targets={"local": [sys.executable]}, threads=2)
    model, inputs = stacks.build("nested"), [stacks.MODELS["nested"][1] for _ in range(3)]
    quantized = edgeq.load(make.CONVERTED / "nested.int8.tflite", reference=model)
    here = edgeq.compare(quantized, inputs)
    there = edgeq.compare(quantized, inputs, runtime="local")
    assert there.total == here.total
    assert there.runtime == "local"
    assert there.target is not None
    assert there.target.to_dict() == {"target": "local", **facts()}
    assert there.target.features
    rows = edgeq.localize(quantized, inputs, runtime="local:builtin")
    assert rows == edgeq.localize(quantized, inputs, runtime="builtin")
    assert_runtimes_agree(
        quantized, inputs, max_lsb_error=0, runtimes=("xnnpack", "local", "local:xnnpack")
    )
    started = [each for each in target_workers() if each not in others]
    assert len(started) == 1
    edgeq.close()
    assert not left_after(started)


@pytest.mark.parametrize("call", ["compare", "assert_accuracy_drop"])
def test_samples_are_sent_ahead(call: str) -> None:
    """A target that rests from one sample to a later one stops nothing: the link may be slow."""
    edgeq = Edgeq(targets={"pi": [sys.executable]}, threads=1, target_timeout=60, runtime="pi")
    quantized = edgeq.load(make.CONVERTED / "nested.int8.tflite", reference=stacks.build("nested"))
    others = target_workers()
    sample = stacks.MODELS["nested"][1]
    quantized.run(*sample)
    [process] = [each for each in target_workers() if each not in others]

    def samples() -> Iterator[Any]:
        for index in range(12):
            if index == 2:
                process.suspend()
            if index == 6:
                process.resume()
            yield (sample, 0) if call == "assert_accuracy_drop" else sample

    if call == "compare":
        edgeq.compare(quantized, samples())
    else:
        assert_accuracy_drop(quantized, samples(), metric=lambda outputs, label: True, max_drop=0.5)
    edgeq.close()


@pytest.mark.slow
def test_an_executors_workers_start_it_by_themselves() -> None:
    """Each has its own; figures are those of this process, and none is left."""
    edgeq = Edgeq(targets={"pi": [sys.executable]}, executor="processes:2")
    quantized = edgeq.load(make.CONVERTED / "nested.int8.tflite", reference=stacks.build("nested"))
    others, inputs = target_workers(), drawn("nested", 40)
    here = Edgeq().compare(quantized, inputs)
    there = edgeq.compare(quantized, inputs, runtime="pi")
    assert there.total == here.total
    assert there.target is not None
    started = [each for each in target_workers() if each not in others]
    assert len(started) >= 2
    edgeq.close()
    assert not left_after(started)
