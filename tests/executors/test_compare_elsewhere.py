"""A comparison by an executor: the same figures, errors and texts as in this process."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fixtures.models import ResidualNet, seeded
from fixtures.tflite import make, stacks
from pytest_edgeq import Comparison, Edgeq, QuantizedModel
from pytest_edgeq.compare import compare
from pytest_edgeq.executors import chunks, stream, worker
from pytest_edgeq.executors.carriers import Engine
from pytest_edgeq.progress import Progress, Step
from pytest_edgeq.report.journal import Journal
from tests.executors.conftest import AtOnce, told

Threads = Callable[[int], Executor]


def _with_points(model: QuantizedModel, inputs: Any, executor: Executor | None) -> Comparison:
    session = Edgeq(journal=Journal(details=True))
    return session.compare(model, inputs, executor=executor)


@pytest.mark.parametrize("flow", ["quantized", "recipe"])
@pytest.mark.parametrize("seconds", [0.0, 0.02])
def test_figures_do_not_depend_on_workers_or_chunks(
    flow: str,
    seconds: float,
    given: list[Any],
    threads: Threads,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All fields of a comparison, to the last bit: chunks of one sample and of several."""
    model = request.getfixturevalue(flow)
    alone = told(_with_points(model, given, None))
    monkeypatch.setattr(chunks, "_SECONDS", seconds)
    for workers in (1, 2, 5):
        assert told(_with_points(model, iter(given), threads(workers))) == alone


class _Shuffled(ThreadPoolExecutor):
    """Gives later tasks precedence over earlier ones."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def late() -> Any:
            time.sleep(0.02 if args[0].start % 3 == 0 else 0)
            return fn(*args, **kwargs)

        return super().submit(late)


def test_figures_do_not_depend_on_the_order_of_arrival(
    quantized: QuantizedModel, given: list[Any]
) -> None:
    """Every third chunk comes late."""
    alone = told(_with_points(quantized, given, None))
    with _Shuffled(4) as executor:
        assert told(_with_points(quantized, given, executor)) == alone
    worker.forget()


def test_the_first_sample_that_fails_is_told(
    quantized: QuantizedModel, given: list[Any], threads: Threads
) -> None:
    """A sample of another shape, read by the client, and one that the factory gives."""
    wrong = [*given[:5], torch.zeros(1, 3, 8, 8), *given[5:9], torch.zeros(2)]
    with pytest.raises(ValueError, match="evaluation sample 5") as alone:
        Edgeq().compare(quantized, wrong)
    for inputs in (wrong, Edgeq.samples(lambda indices: (wrong[i] for i in indices), len(wrong))):
        with pytest.raises(ValueError, match="evaluation sample 5") as elsewhere:
            Edgeq().compare(quantized, inputs, executor=threads(2))
        assert str(elsewhere.value) == str(alone.value)


def test_no_sample_is_an_error(quantized: QuantizedModel, threads: Threads) -> None:
    """As in this process."""
    empty: list[Any] = [[], Edgeq.samples(lambda indices: indices, 0)]
    for inputs in empty:
        with pytest.raises(ValueError, match="there is no sample"):
            Edgeq().compare(quantized, inputs, executor=threads(1))


def test_samples_are_read_where_they_are_used(
    quantized: QuantizedModel, tmp_path: Path, given: list[Any], threads: Threads
) -> None:
    """The same figures by files as by the list, but for the fingerprint, which has a mark."""
    for index, sample in enumerate(given):
        np.save(tmp_path / f"{index}.npy", sample[0].numpy())

    def factory(indices: range) -> Iterator[torch.Tensor]:
        with (tmp_path / "readers").open("a") as log:
            log.write(f"{threading.current_thread() is threading.main_thread()}\n")
        for index in indices:
            yield torch.from_numpy(np.load(tmp_path / f"{index}.npy"))

    source = Edgeq.samples(factory, len(given))
    alone = Edgeq().compare(quantized, source)
    assert set((tmp_path / "readers").read_text().split()) == {"True"}
    (tmp_path / "readers").unlink()
    elsewhere = Edgeq().compare(quantized, source, executor=threads(3))
    assert set((tmp_path / "readers").read_text().split()) == {"False"}
    assert told(elsewhere) == told(alone)
    listed = told(Edgeq().compare(quantized, given))
    assert elsewhere.fingerprint.startswith("by sample ")
    assert [each for each in told(elsewhere) if each != elsewhere.fingerprint] == [
        each for each in listed if not isinstance(each, str) or len(each) != 64
    ]


@pytest.mark.parametrize(("n", "given_n"), [(3, 2), (3, 4)])
def test_a_factory_gives_one_sample_for_each_index(n: int, given_n: int) -> None:
    """Fewer and more are errors."""
    source = Edgeq.samples(lambda indices: [0] * given_n, n)
    with pytest.raises(ValueError, match=r"expected 3 samples of the factory for range\(0, 3\)"):
        list(source)


def test_what_makes_no_source_is_refused() -> None:
    """A list in place of a factory, and numbers that are none."""
    with pytest.raises(TypeError, match="expected a factory"):
        Edgeq.samples([1, 2], 2)  # type: ignore[arg-type] # wrong on purpose
    with pytest.raises(TypeError, match="number of samples"):
        Edgeq.samples(list, 2.0)  # type: ignore[arg-type] # wrong on purpose
    with pytest.raises(ValueError, match="0 samples or more"):
        Edgeq.samples(list, -1)


@pytest.mark.parametrize("held", ["file", "lock"])
def test_a_reference_that_cannot_travel_is_refused_before_anything_runs(
    held: str, quantized: QuantizedModel, tmp_path: Path
) -> None:
    """A lambda over an open file, whose content pickling would copy, and one over a lock."""
    path = tmp_path / "weights"
    path.write_text("1")
    with path.open() as file:
        handle: Any = file if held == "file" else threading.Lock()
        calls: list[Any] = []

        def reference(x: Any) -> Any:
            calls.append(handle)
            return x

        loaded = Edgeq().load(quantized.tflite, reference=lambda x: reference(x))
        executor = AtOnce(1)
        with pytest.raises(TypeError, match=r"the reference .*lambda.* cannot travel") as error:
            Edgeq().compare(loaded, iter([]), executor=executor)
    assert not executor.count
    assert not calls
    assert "fix: " in str(error.value)
    assert max(map(len, str(error.value).splitlines())) <= 160


def test_a_factory_or_runtime_that_cannot_travel_is_refused(
    quantized: QuantizedModel, given: list[Any]
) -> None:
    """A generator in a factory; a runtime of the user's own that holds a lock."""
    executor, lock = AtOnce(1), threading.Lock()
    Edgeq().compare(quantized, given[:1], executor=executor)
    count = executor.count
    generator = (each for each in given)
    source = Edgeq.samples(lambda indices: [next(generator) for _ in indices], len(given))
    with pytest.raises(TypeError, match="the factory of the samples cannot travel"):
        Edgeq().compare(quantized, source, executor=executor)
    runner: Any = lambda path, signature: lock  # noqa: E731 # a lambda is what users write
    own = Edgeq(runtimes={"mine": runner})
    loaded = own.load(quantized.tflite, reference=quantized.float_model)
    with pytest.raises(TypeError, match="the runtime 'mine' cannot travel"):
        own.compare(loaded, given, runtime="mine", executor=executor)
    assert executor.count == count
    worker.forget()


def test_a_file_that_was_looked_at_here_travels(threads: Threads) -> None:
    """What this process has read of a mapped file stays here."""
    path, model = make.CONVERTED / "nested.int8.tflite", stacks.build("nested")
    inputs = [stacks.MODELS["nested"][1]] * 3
    loaded = Edgeq().load(path, reference=model)
    assert any(entry.module for entry in loaded.op_dtypes)
    alone = told(Edgeq().compare(loaded, inputs))
    assert told(Edgeq().compare(loaded, inputs, executor=threads(2))) == alone


def test_a_runtime_of_the_users_own_travels(
    quantized: QuantizedModel, given: list[Any], threads: Threads
) -> None:
    """It is opened on the workers; figures are the same."""

    def runner(path: Path, signature: str | None) -> Callable[..., Any]:
        from ai_edge_litert.interpreter import Interpreter

        run = Interpreter(str(path)).get_signature_runner(signature)
        return lambda inputs: run(**inputs)

    session = Edgeq(runtimes={"mine": runner})
    loaded = session.load(quantized.tflite, reference=quantized.float_model)
    alone = session.compare(loaded, given, runtime="mine")
    elsewhere = session.compare(loaded, given, runtime="mine", executor=threads(2))
    assert told(elsewhere) == told(alone)
    session.close()


class _Counting(nn.Module):
    """A forward that depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.net = seeded(ResidualNet)
        self.seen = nn.Buffer(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> Any:
        """Add the number of calls."""
        self.seen.add_(1)
        return self.net(x) + self.seen


class _Remembering:
    """A callable with an attribute that counts its calls."""

    def __init__(self) -> None:
        self.net, self.count = seeded(ResidualNet), 0

    def __call__(self, x: Any) -> Any:
        """Add the number of calls."""
        self.count += 1
        return self.net(torch.as_tensor(x)).detach().numpy() + self.count


@pytest.mark.parametrize("kind", [_Counting, _Remembering])
def test_samples_that_depend_on_each_other_are_measured_in_order(
    kind: type[Any], quantized: QuantizedModel, given: list[Any]
) -> None:
    """In this process, which a warning tells."""
    reference = kind().eval() if kind is _Counting else kind()
    loaded = Edgeq().load(quantized.tflite, reference=reference)
    alone = told(Edgeq().compare(loaded, given)) if kind is _Counting else None
    executor = AtOnce(2)
    with pytest.warns(UserWarning, match=r"in this process, in order: the reference changes"):
        found = Edgeq().compare(loaded, given, executor=executor)
    assert not executor.count
    assert alone is None or told(found) == alone


def test_a_reference_that_changes_later_is_an_error(
    quantized: QuantizedModel, given: list[Any], threads: Threads
) -> None:
    """It keeps something from a sample on that no probe shows."""
    net, kept = seeded(ResidualNet), []

    def reference(x: Any) -> Any:
        if float(x[0, 0, 0, 0]) == float(given[7][0][0, 0, 0, 0]):
            kept.append(1)
        return net(torch.as_tensor(x)).detach().numpy() + len(kept)

    loaded = Edgeq().load(quantized.tflite, reference=reference)
    with pytest.raises(RuntimeError, match=r"the reference changed on the worker"):
        Edgeq().compare(loaded, given, executor=threads(2))


@pytest.mark.parametrize("kind", ["function", "module"])
def test_references_of_a_test_module_travel(
    kind: str, quantized: QuantizedModel, given: list[Any], threads: Threads
) -> None:
    """A function of arrays, and a module that torch cannot export."""
    net = seeded(ResidualNet)

    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return net(x) if x.sum() > 0 else net(x) * 1.0

    def function(x: Any) -> Any:
        return net(torch.as_tensor(x)).detach().numpy()

    reference = function if kind == "function" else Branching().eval()
    loaded = Edgeq().load(quantized.tflite, reference=reference)
    alone = told(Edgeq().compare(loaded, given))
    assert told(Edgeq().compare(loaded, given, executor=threads(3))) == alone


class _Elsewhere(AtOnce):
    """Workers that share no directory with the client."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a task whose labels have no path."""
        task = args[0]
        labels = {
            name: dataclasses.replace(getattr(task, name), path="") for name in ("model", "job")
        }
        return super().submit(fn, dataclasses.replace(task, **labels), **kwargs)


def test_parcels_are_sent_once_to_a_worker_that_cannot_read_them(
    quantized: QuantizedModel, given: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once a chunk."""
    worker.forget()
    streams: list[stream.Stream] = []
    run = stream.Stream.run

    def noted(self: stream.Stream, *args: Any) -> None:
        streams.append(self)
        run(self, *args)

    monkeypatch.setattr(stream.Stream, "run", noted)
    alone = told(Edgeq().compare(quantized, given))
    assert told(Edgeq().compare(quantized, given, executor=_Elsewhere(2))) == alone
    assert [each.sent for each in streams] == [2]  # the model and the job
    worker.forget()


class _Watching(Progress):
    """Keeps the step."""

    def begin(self, step: Step) -> None:
        """Keep the step."""
        self.step_seen = step


def test_chunks_in_flight_are_bounded_and_told(
    quantized: QuantizedModel,
    given: list[Any],
    threads: Threads,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two a worker; the samples are read no further ahead."""
    monkeypatch.setattr(chunks, "_SECONDS", 0.0)
    progress, ahead = _Watching(), list[int]()

    def generator() -> Iterator[Any]:
        for number, sample in enumerate(given, 1):
            ahead.append(number - progress.step_seen.done)
            yield sample

    engine = Engine(threads(3))
    compare(quantized, generator(), runtime="xnnpack", progress=progress, engine=engine)
    assert progress.step_seen.done == len(given)
    assert progress.step_seen.in_flight == 0
    assert max(ahead) == 2 * 3


@pytest.mark.parametrize("workers", [1, 4])
def test_a_chunk_takes_half_a_second(workers: int) -> None:
    """Of unknown cost one sample; towards the end a share of what is left."""
    size = chunks.chunk_size
    assert size(None, None, workers) == 1
    assert size(0.05, None, workers) == 10
    assert size(3.0, None, workers) == 1
    assert size(0.0, None, workers) == size(1e-9, 10**9, workers) == 512
    assert size(0.05, 8, workers) == -(-8 // (2 * workers))
    assert size(0.05, 1, workers) == 1


def test_machines_are_named(quantized: QuantizedModel, given: list[Any], threads: Threads) -> None:
    """Kernels and CPU features; a mixture is told."""
    alone, elsewhere = (
        Edgeq().compare(quantized, given, executor=executor) for executor in (None, threads(1))
    )
    assert alone.machines == ()
    (machine,) = elsewhere.machines
    assert machine.kernels == torch.backends.cpu.get_cpu_capability()
    assert machine.processes == 1
    assert machine.to_dict()["versions"]["torch"] == torch.__version__


def test_a_mixture_of_machines_is_told(
    quantized: QuantizedModel, given: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each second answer comes from a worker with other kernels."""
    count = [0]

    class Mixed(AtOnce):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            answer = super().submit(fn, *args, **kwargs).result()
            count[0] += 1
            if count[0] % 2:
                other = dataclasses.replace(
                    answer.machine, hosts=("old",), kernels="AVX2", features=("avx2",)
                )
                answer = dataclasses.replace(answer, machine=other, worker="old, process 1")
            future: Future[Any] = Future()
            future.set_result(answer)
            return future

    with pytest.warns(UserWarning, match="measured on 2 kinds of machine") as told_of:
        found = Edgeq().compare(quantized, given, executor=Mixed(2))
    assert len(found.machines) == 2
    assert "CPU features that not all have" in str(told_of[0].message)
    worker.forget()


def test_what_is_no_executor_is_refused(quantized: QuantizedModel, given: list[Any]) -> None:
    """Names are for sessions."""
    with pytest.raises(TypeError, match=r"Edgeq\(executor='processes:2'\)"):
        Edgeq().compare(quantized, given, executor="processes:2")  # type: ignore[arg-type] # wrong on purpose
    for wrong in ("processes", "processes:0", "dask:", "threads:2"):
        with pytest.raises(ValueError, match="expected processes:N"):
            Edgeq(executor=wrong)


def test_a_view_travels_without_what_it_is_a_part_of(
    quantized: QuantizedModel, given: list[Any]
) -> None:
    """Samples that are cut from one tensor."""
    sizes: list[int] = []

    class Weighing(AtOnce):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            sizes.extend(map(len, args[0].samples))
            return super().submit(fn, *args, **kwargs)

    parts = torch.split(torch.cat([sample[0] for sample in given]), 1)
    alone = told(Edgeq().compare(quantized, parts))
    assert told(Edgeq().compare(quantized, parts, executor=Weighing(1))) == alone
    assert max(sizes) < 2 * parts[0].nbytes
    worker.forget()


def test_settings_of_torch_travel(quantized: QuantizedModel, given: list[Any]) -> None:
    """A worker whose kernels are set otherwise uses the client's, and gets its own back."""
    mkldnn: Any = torch.backends.mkldnn

    class Otherwise(AtOnce):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            mkldnn.set_flags(False)
            torch.set_default_dtype(torch.float64)
            future = super().submit(fn, *args, **kwargs)
            assert not mkldnn.enabled
            assert torch.get_default_dtype() == torch.float64
            mkldnn.set_flags(True)
            torch.set_default_dtype(torch.float32)
            return future

    alone = told(Edgeq().compare(quantized, given))
    assert told(Edgeq().compare(quantized, given, executor=Otherwise(1))) == alone
    worker.forget()


def test_a_worker_of_another_release_is_refused(
    quantized: QuantizedModel, given: list[Any]
) -> None:
    """Says which it has."""

    class Old(AtOnce):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            return super().submit(fn, dataclasses.replace(args[0], version="pytest-edgeq 0.0"))

    with pytest.raises(RuntimeError, match=r"expected pytest-edgeq 0.0 as on the client"):
        Edgeq().compare(quantized, given, executor=Old(1))


def test_the_parcel_of_a_model_is_made_once(quantized: QuantizedModel, given: list[Any]) -> None:
    """And anew once a weight has changed, were it by what leaves no trace in torch's versions."""
    reference = seeded(ResidualNet)
    loaded = Edgeq().load(quantized.tflite, reference=reference)
    session, keys = Edgeq(), list[str]()

    class Noting(AtOnce):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            keys.append(args[0].model.key)
            return super().submit(fn, *args, **kwargs)

    executor = Noting(1)
    for _ in range(2):
        session.compare(loaded, given[:2], executor=executor)
    assert len(set(keys)) == 1
    next(reference.parameters()).data.mul_(1.5)
    found = session.compare(loaded, given[:2], executor=executor)
    assert len(set(keys)) == 2
    assert told(found) == told(Edgeq().compare(loaded, given[:2]))
    worker.forget()


def test_an_executor_that_is_shut_down_is_told(
    quantized: QuantizedModel, given: list[Any], threads: Threads
) -> None:
    """In place of the bare error that it raises."""
    executor = threads(1)
    executor.shutdown()
    with pytest.raises(RuntimeError, match=r"executor: sample 0: .*\nfix: pass one that has not"):
        Edgeq().compare(quantized, given, executor=executor)


class _Dying(AtOnce):
    """Raises what an engine raises whose worker died, the first few times that it is asked."""

    def __init__(self, errors: list[BaseException]) -> None:
        super().__init__(1)
        self.errors = errors

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Fail, or run a task now."""
        if not self.errors:
            return super().submit(fn, *args, **kwargs)
        future: Future[Any] = Future()
        future.set_exception(self.errors.pop(0))
        return future


def test_a_pool_that_breaks_is_told(quantized: QuantizedModel, given: list[Any]) -> None:
    """One of the standard library does not go on: the error names the samples and the way out."""
    executor = _Dying([BrokenProcessPool("a child process terminated abruptly")])
    with pytest.raises(RuntimeError, match=r"executor: sample 0: .* the pool broke") as error:
        Edgeq().compare(quantized, given, executor=executor)
    assert "--edgeq-executor=processes:N" in str(error.value)


def test_a_worker_that_lacks_a_package_is_told(quantized: QuantizedModel, given: list[Any]) -> None:
    """Not as one that died: loky says that its pool broke, with the worker's traceback."""
    broken = BrokenProcessPool("A task has failed to un-serialize.")
    said = "ModuleNotFoundError: No module named 'pytest_edgeq'"
    broken.__cause__ = Exception(f'"""\nTraceback (most recent call last):\n{said}\n"""')
    for error in (broken, ModuleNotFoundError("No module named 'pytest_edgeq'")):
        with pytest.raises(RuntimeError, match=rf"reads its task, got {said}\nfix: install there"):
            Edgeq().compare(quantized, given, executor=_Dying([error]))


def test_what_was_lost_with_other_workers_is_sent_again(
    quantized: QuantizedModel, given: list[Any]
) -> None:
    """As dask cancels tasks whose data died; it is no fault of the chunk, but not for ever."""

    class Lossy(_Dying):
        def renew(self) -> None:
            """As the session's own pool has it."""

    alone = told(Edgeq().compare(quantized, given))
    some = Lossy([CancelledError() for _ in range(5)])
    assert told(Edgeq().compare(quantized, given, executor=some)) == alone
    with pytest.raises(RuntimeError, match="each worker that ran them died"):
        Edgeq().compare(quantized, given, executor=Lossy([CancelledError() for _ in range(99)]))
    worker.forget()


def test_a_slow_worker_does_not_hold_the_others_up(
    quantized: QuantizedModel, given: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    What it has not answered in time is run by another one, and its own answer counts no more.

    The engine may give the slow one the second run, too.
    """
    monkeypatch.setattr(stream, "_LATE_SECONDS", 0.05)
    alone = told(Edgeq().compare(quantized, given))
    stuck, over = list[int](), threading.Event()

    class Slow(ThreadPoolExecutor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            is_stuck = args[0].start == 1 and len(stuck) < 2
            if is_stuck:
                stuck.append(args[0].start)

            def run() -> Any:
                if is_stuck:
                    assert over.wait(20), "its answer was waited for"
                return fn(*args, **kwargs)

            return super().submit(run)

    with Slow(4) as executor:
        assert told(Edgeq().compare(quantized, given, executor=executor)) == alone
        assert not over.is_set()
        over.set()
    assert stuck == [1, 1]
    worker.forget()
