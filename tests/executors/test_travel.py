"""Pickles sent to workers: references, runtimes, factories, samples."""

from __future__ import annotations

import importlib
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fixtures.models import ResidualNet, seeded
from fixtures.tflite import make, stacks
from pytest_edgeq import Edgeq, QuantizedModel
from pytest_edgeq.compare.executors.pickled import _installations, pickled
from tests.executors.conftest import AtOnce, Near, Threads, figures


@pytest.mark.parametrize("folder", ["site-packages", "src"])
def test_what_another_environment_installs_travels_by_name(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the packages below an environment of `uv run --with`; those of a working tree do not."""
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "below_this.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path / folder)
    _installations.cache_clear()
    double = importlib.import_module("below_this").double
    received = pickle.loads(pickled(double, "it", "none"))
    assert received(2) == 4
    assert (received is double) is (folder == "site-packages")
    sys.modules.pop("below_this")
    _installations.cache_clear()


def test_a_reference_that_cannot_travel_is_refused_before_anything_runs(
    quantized: QuantizedModel, tmp_path: Path
) -> None:
    """A lambda over an open file, whose content pickling would copy."""
    (tmp_path / "weights").touch()
    executor = AtOnce(1)
    with (tmp_path / "weights").open() as file:
        loaded = Edgeq().load(quantized.tflite, reference=lambda x: (file, x)[1])
        with pytest.raises(TypeError, match=r"the reference .*lambda.* cannot be sent") as error:
            Edgeq().compare(loaded, iter([]), executor=executor)
    assert not executor.count
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
    with pytest.raises(TypeError, match="the factory of the samples cannot be sent"):
        Edgeq().compare(quantized, source, executor=executor)
    runner: Any = lambda path, signature: lock  # noqa: E731 # a lambda is what users write
    own = Edgeq(runtimes={"mine": runner})
    loaded = own.load(quantized.tflite, reference=quantized.float_model)
    with pytest.raises(TypeError, match="the runtime 'mine' cannot be sent"):
        own.compare(loaded, given, runtime="mine", executor=executor)
    assert executor.count == count


def test_a_file_that_was_looked_at_here_travels(threads: Threads) -> None:
    """The op dtypes that were read from the mapped file are not pickled with it."""
    path, model = make.CONVERTED / "nested.int8.tflite", stacks.build("nested")
    inputs = [stacks.MODELS["nested"][1]] * 3
    loaded = Edgeq().load(path, reference=model)
    assert any(entry.module for entry in loaded.op_dtypes)
    alone = Near(figures(Edgeq().compare(loaded, inputs)))
    assert figures(Edgeq().compare(loaded, inputs, executor=threads(2))) == alone


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
    assert figures(elsewhere) == Near(figures(alone))
    session.close()


def test_type_variables_of_another_module_travel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a process without the module, of which nothing else is sent: not its lock."""
    (tmp_path / "its_kinds.py").write_text(
        "import threading, typing\nLOCK = threading.Lock()\n"
        "T, P = typing.TypeVar('T'), typing.ParamSpec('P')\n"
    )
    (tmp_path / "its_model.py").write_text(
        "from typing import Generic\nfrom its_kinds import P, T\n"
        "class Model(Generic[P, T]):\n"
        "    def __call__(self, x: T, *args: P.args, **kwargs: P.kwargs) -> T:\n"
        "        return x + 1\n"
    )
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        content = pickled(importlib.import_module("its_model").Model(), "the model", "none")
    for name in ("its_kinds", "its_model"):
        monkeypatch.delitem(sys.modules, name)
    assert pickle.loads(content)(1) == 2


def _parametrized() -> nn.Module:
    """Return a module that refuses to be pickled."""
    net = seeded(ResidualNet)
    layer = next(each for each in net.modules() if isinstance(each, nn.Conv2d))
    nn.utils.parametrizations.weight_norm(layer)
    return net


@pytest.mark.parametrize("kind", ["function", "parametrized"])
def test_references_of_a_test_module_travel(
    kind: str, quantized: QuantizedModel, given: list[Any], threads: Threads
) -> None:
    """A function of arrays; a module that cannot be pickled goes as an exported program."""
    net = seeded(ResidualNet)

    def function(x: Any) -> Any:
        return net(torch.as_tensor(x)).detach().numpy()

    reference: Any = function if kind == "function" else _parametrized().eval()
    loaded = Edgeq().load(quantized.tflite, reference=reference)
    alone = Near(figures(Edgeq().compare(loaded, given)))
    assert figures(Edgeq().compare(loaded, given, executor=threads(3))) == alone


def test_workers_of_another_machine_are_sent_the_model_once(
    quantized: QuantizedModel, given: list[Any]
) -> None:
    """With the first chunk for which they say that they cannot read the client's file."""
    sent: list[int] = []

    def elsewhere(task: Any, *shared: Any) -> tuple[Any, ...]:
        sent.append(sum(isinstance(each, bytes) for each in shared))
        return task, *(each if isinstance(each, bytes) else "/nowhere" for each in shared)

    alone = Near(figures(Edgeq().compare(quantized, given)))
    assert figures(Edgeq().compare(quantized, given, executor=AtOnce(1, elsewhere))) == alone
    assert sum(sent) == 2 * 2  # two chunks were on their way


def test_a_view_travels_without_what_it_is_a_part_of(
    quantized: QuantizedModel, given: list[Any]
) -> None:
    """Samples that are cut from one tensor."""
    sizes: list[int] = []

    def weighed(task: Any, *shared: Any) -> tuple[Any, ...]:
        sizes.extend(map(len, task.samples))
        return task, *shared

    parts = torch.split(torch.cat([sample[0] for sample in given]), 1)
    alone = Near(figures(Edgeq().compare(quantized, parts)))
    assert figures(Edgeq().compare(quantized, parts, executor=AtOnce(1, weighed))) == alone
    assert max(sizes) < 2 * parts[0].nbytes


def test_a_model_is_opened_once(quantized: QuantizedModel, given: list[Any]) -> None:
    """And anew once a weight has changed."""
    reference = seeded(ResidualNet)
    loaded = Edgeq().load(quantized.tflite, reference=reference)
    session, keys = Edgeq(), list[str]()

    def noted(task: Any, *shared: Any) -> tuple[Any, ...]:
        keys.append(task.model)
        return task, *shared

    executor = AtOnce(1, noted)
    # In this process the first unpickling interns names of the class, which changes its pickle.
    session.compare(loaded, given[:2], executor=executor)
    keys.clear()
    for _ in range(2):
        session.compare(loaded, given[:2], executor=executor)
    assert len(set(keys)) == 1
    next(reference.parameters()).data.mul_(1.5)
    found = session.compare(loaded, given[:2], executor=executor)
    assert len(set(keys)) == 2
    assert figures(found) == Near(figures(Edgeq().compare(loaded, given[:2])))
