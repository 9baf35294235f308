"""
What stands beside the file: inputs and outputs are paired by name, and nobody is disturbed.

Each case is one that passed, or accused the wrong stage, before it was looked for.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fixtures.models import net, normal, seeded
from fixtures.tflite.writer import one_op, pack, unpack
from pytest_edgeq import Edgeq
from pytest_edgeq.numerics.findings import STATEFUL_REFERENCE


class Weighted(nn.Module):
    """Two inputs of one shape that may not change places."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(8, 4)
        self.right = nn.Linear(8, 4)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Weigh b twice."""
        result: torch.Tensor = self.left(a) + 2 * self.right(b)
        return result


class Swapped(Weighted):
    """The defect: its inputs are exchanged."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Take one for the other."""
        return super().forward(b, a)


def keyword_only() -> nn.Module:
    """One input by position, one by keyword only."""

    def forward(self: Any, a: torch.Tensor, *, b: torch.Tensor) -> Any:
        return self.weighted(a, b)

    return net(forward, weighted=Weighted())


def pair() -> Any:
    """Two outputs of one shape."""
    forward = lambda self, x: (self.left(x), self.right(x))  # noqa: E731
    return net(forward, left=nn.Linear(8, 4), right=nn.Linear(8, 4))


@pytest.fixture(scope="module")
def named() -> bytes:
    """`Weighted` in float, with the inputs `b` and `a`, in this order."""
    sample = _samples()[0]
    backwards = {"b": sample["b"], "a": sample["a"]}
    return Edgeq().quantize(seeded(Weighted), sample_kwargs=backwards, quantizer=None).tflite


@pytest.fixture(scope="module")
def mixed() -> bytes:
    """`keyword_only` in float."""
    a, b = _samples()[0].values()
    model = seeded(keyword_only)
    return Edgeq().quantize(model, (a,), sample_kwargs={"b": b}, quantizer=None).tflite


@pytest.fixture(scope="module")
def linear() -> bytes:
    """A layer of 8 inputs and 4 outputs in float."""
    return Edgeq().quantize(_layer(), (normal(1, 8, seed=0),), quantizer=None).tflite


def _layer() -> nn.Module:
    return seeded(lambda: nn.Linear(8, 4))


def _samples(n: int = 4, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    return [
        {"a": normal(1, 8, seed=seed + 2 * i), "b": normal(1, 8, seed=seed + 2 * i + 1)}
        for i in range(n)
    ]


def test_inputs_of_a_loaded_file_are_paired_by_name(maker: Edgeq, named: bytes) -> None:
    """A file whose inputs stand in another order is sound; another model is not."""
    sound = maker.load(named, reference=seeded(Weighted))
    wrong = maker.load(named, reference=seeded(Swapped))
    assert [border.name for border in sound.inputs] == ["b", "a"]
    tuples = [(s["a"], s["b"]) for s in _samples(seed=50)]
    for data in (_samples(seed=50), tuples):
        assert maker.compare(sound, data).total.sqnr_db > 100
        assert maker.compare(wrong, data).total.sqnr_db < 10

    def other(b: Any, c: Any) -> Any:
        return b + c

    with pytest.raises(ValueError, match="names that agree in part only"):
        maker.load(named, reference=other)


def test_a_loaded_file_with_keyword_only_inputs(maker: Edgeq, mixed: bytes) -> None:
    """Numbered inputs go by position, the others by name."""
    loaded = maker.load(mixed, reference=seeded(keyword_only))
    pairs = [((s["a"],), {"b": s["b"]}) for s in _samples(seed=50)]

    assert maker.compare(loaded, pairs).total.sqnr_db > 100
    assert maker.compare(loaded, _samples(seed=50)).total.sqnr_db > 100


def test_a_parameter_that_the_file_does_not_have(maker: Edgeq, named: bytes) -> None:
    """What comes behind it does not slip into its place."""

    class Optional(Weighted):
        def forward(  # type: ignore[override] # one more in between
            self, a: torch.Tensor, scale: torch.Tensor | None = None, b: torch.Tensor | None = None
        ) -> torch.Tensor:
            assert b is not None
            result = super().forward(a, b)
            return result if scale is None else result * scale

    loaded = maker.load(named, reference=seeded(Optional))

    assert maker.compare(loaded, _samples(seed=50)).total.sqnr_db > 100
    pairs = [((s["a"],), {"b": s["b"]}) for s in _samples(seed=50)]
    assert maker.compare(loaded, pairs).total.sqnr_db > 100
    with pytest.raises(ValueError, match=r"expected 1 positional input, got 2; the model also has"):
        maker.compare(loaded, [(s["a"], s["b"]) for s in _samples(seed=50)])


def test_without_parameters_the_names_are_the_files(
    maker: Edgeq, named: bytes, mixed: bytes
) -> None:
    """Of a file without a reference, and of a callable that takes anything."""
    sample, *others = _samples()
    alone = maker.load(named)
    expected = seeded(Weighted)(**sample).detach().numpy()
    a, b = sample["a"], sample["b"]
    for outputs in (alone.run(a=a, b=b), alone.run(b, a), alone.run(b, a=a)):
        np.testing.assert_allclose(outputs["output_0"], expected, rtol=1e-4, atol=1e-5)

    pairs = {mixed: [((s["a"],), {"b": s["b"]}) for s in others]}
    pairs[named] = [((s["b"],), {"a": s["a"]}) for s in others]
    for made, data in pairs.items():
        loaded = maker.load(made, reference=maker.load(made).run)
        assert maker.compare(loaded, data).total.max_abs_error == 0.0
    dicts = maker.load(named, reference=lambda *args: alone.run(*args))
    assert maker.compare(dicts, others).total.max_abs_error == 0.0


def test_a_callable_from_numpy_to_numpy(maker: Edgeq) -> None:
    """It may give arrays or tensors, and nest them."""
    model = seeded(pair)
    data = [normal(1, 8, seed=i) for i in range(4)]
    made = maker.quantize(model, (data[0],), quantizer=None)
    (weights, biases) = (
        [getattr(layer, name).detach().numpy() for layer in (model.left, model.right)]
        for name in ("weight", "bias")
    )

    def reference(x: np.ndarray[Any, Any]) -> Any:
        left, right = (x.astype("f4") @ w.T + b for w, b in zip(weights, biases, strict=True))
        x[:] = 0.0  # its own copy
        return {"output_1": right, "output_0": torch.from_numpy(left)}

    loaded = maker.load(made.tflite, reference=reference)
    assert maker.compare(loaded, data).total.sqnr_db > 100
    assert all(sample.any() for sample in data)
    weights.reverse()
    assert maker.compare(loaded, data).total.sqnr_db < 10


def test_a_callable_that_works_on_arrays_is_given_nothing_else(maker: Edgeq) -> None:
    """Also where it would work on tensors; one of torch's functions is given tensors."""
    tensor = {"dtype": "float32", "shape": (1, 8)}
    file, data = one_op("ABS", [tensor], [tensor]), [normal(1, 8, seed=i) for i in range(4)]
    given: list[type] = []

    def reference(x: Any) -> Any:
        given.append(type(x))
        return abs(x)

    for samples in (data, [x.numpy() for x in data]):
        assert maker.compare(maker.load(file, reference=reference), samples).total.sqnr_db > 100
    assert given == [np.ndarray] * 8
    torch_code = maker.load(file, reference=lambda x: torch.mul(x.abs(), 1.0))
    assert maker.compare(torch_code, [x.numpy() for x in data]).total.sqnr_db > 100


def test_a_callable_that_fails_either_way(maker: Edgeq, linear: bytes) -> None:
    """Both errors are told; one of its own is left as it is."""
    data = [normal(1, 8, seed=0)]

    def neither(x: Any) -> Any:
        return x.no_such_method()

    def broken(x: Any) -> Any:
        raise OSError("the weights are gone")

    text = "the reference neither accepts neither numpy arrays .*'numpy.* nor tensors .*'Tensor'"
    for reference, error, match in (
        (neither, TypeError, text),
        (broken, OSError, "the weights are gone"),
        (lambda x: float(x.sum()), TypeError, "the reference returned a float among its outputs"),
    ):
        with pytest.raises(error, match=match):
            maker.compare(maker.load(linear, reference=reference), data)


def test_a_number_is_an_output(maker: Edgeq) -> None:
    """As a sum over everything gives numpy's own scalar."""
    tensor = {"dtype": "float32", "shape": ()}
    loaded = maker.load(one_op("ABS", [tensor], [tensor]), reference=lambda x: np.sum(abs(x)))
    assert maker.compare(loaded, [np.array(-3.0, np.float32)]).total.max_abs_error == 0


def test_methods_and_partials_of_a_module_are_torch(maker: Edgeq, linear: bytes) -> None:
    """They are given tensors, numpy samples too, and must be in eval mode."""

    class Scaling(nn.Linear):
        def forward(self, x: torch.Tensor, by: float = 0.5) -> torch.Tensor:
            result: torch.Tensor = super().forward(x) * by
            return result

        def doubled(self, x: torch.Tensor) -> torch.Tensor:
            return torch.mul(self(x), 2.0)

    model, data = seeded(lambda: Scaling(8, 4)), [normal(1, 8, seed=i).numpy() for i in range(4)]
    for reference in (model.doubled, functools.partial(model, by=1.0)):
        loaded = maker.load(linear, reference=reference)
        assert maker.compare(loaded, data).total.sqnr_db > 100
        model.train()
        with pytest.raises(ValueError, match=r"in train mode, switched after.*model\.eval\(\)"):
            maker.compare(loaded, data)
        with pytest.raises(ValueError, match="in train mode"):
            maker.load(linear, reference=reference)
        model.eval()
    assert maker.compare(maker.load(linear, reference=model), data).total.sqnr_db < 10


def _edit(tflite: bytes, change: Callable[[Any], None]) -> bytes:
    model = unpack(tflite)
    change(model)
    return pack(model)


def _exchange_output_names(model: Any) -> None:
    first, second = model.signatureDefs[0].outputs
    first.tensorIndex, second.tensorIndex = second.tensorIndex, first.tensorIndex


def _exchange_outputs(model: Any) -> None:
    outputs = list(model.subgraphs[0].outputs)
    model.subgraphs[0].outputs = np.array(outputs[::-1], np.int32)


def test_outputs_are_paired_by_their_names(maker: Edgeq) -> None:
    """Exchanged names are a defect; another order under the right names is none, in any stage."""
    data = [normal(1, 8, seed=i) for i in range(40)]
    made = maker.quantize(seeded(pair), (data[0],), calibration=data)
    wrong = made.with_tflite(_edit(made.tflite, _exchange_output_names))
    sound = made.with_tflite(_edit(made.tflite, _exchange_outputs))
    new = [normal(1, 8, seed=i) for i in range(100, 108)]
    expected = maker.compare(made, new)
    reordered = maker.compare(sound, new)

    assert maker.compare(wrong, new).total.sqnr_db < 5
    assert list(reordered.total.outputs) == ["output_1", "output_0"]
    for name, stage in expected.stages.items():
        other = reordered.stages[name]
        for output, errors in stage.outputs.items():
            assert other.outputs[output].sqnr_db == errors.sqnr_db, (name, output)


@pytest.mark.slow
def test_a_forward_that_works_in_place_disturbs_nobody(maker: Edgeq) -> None:
    """Neither the user's samples nor the other sides; every stage is as without it."""
    data = [normal(1, 8, seed=i) for i in range(20)]
    before = [sample.clone() for sample in data]
    figures = []
    for normalized in (
        lambda self, x: self.linear(x.sub_(1.0).div_(2.0)),
        lambda self, x: self.linear(x.sub(1.0).div(2.0)),
    ):
        torch.manual_seed(0)
        model = net(normalized, linear=nn.Linear(8, 4)).eval()
        made = maker.quantize(model, (data[0],), calibration=data[:10])
        figures.append(maker.compare(made, data[10:]).to_dict()["stages"])

    assert figures[0] == figures[1]
    assert all(torch.equal(a, b) for a, b in zip(data, before, strict=True))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_an_exported_graph(maker: Edgeq) -> None:
    """
    Its training flag is always set, and it has no eval(): what counts is how it was exported.

    Frozen TorchScript has no such flag at all.
    """
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)))
    sample = normal(2, 8, seed=0)
    tflite = maker.quantize(model, (sample,), quantizer=None).tflite

    exported = torch.export.export(model, (sample,)).module()
    wrapped = nn.Sequential(exported)
    wrapped.training = False
    frozen = torch.jit.freeze(torch.jit.trace(model, sample))  # type: ignore[no-untyped-call]
    for reference in (exported, wrapped, frozen):
        comparison = maker.compare(maker.load(tflite, reference=reference), [sample])
        # The same float operations in another order: 24 bits are 144 dB.
        assert comparison.total.sqnr_db > 120
    with pytest.raises(ValueError, match="the reference is in train mode"):
        maker.load(tflite, reference=torch.export.export(model.train(), (sample,)).module())


def test_buffers_that_forward_changes_or_replaces_are_put_back(maker: Edgeq, linear: bytes) -> None:
    """And the comparison says that outputs depend on the order of the samples."""

    class Stateful(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 4)
            self.n = nn.Buffer(torch.zeros(1))
            self.table: torch.Tensor = nn.Buffer(torch.zeros(1), persistent=False)
            self.unset = nn.Buffer(torch.full((2,), torch.nan))  # which is no change
            self.first = nn.Buffer(torch.full((2,), torch.nan))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.first.nan_to_num_()
            if len(self.table) != 4:  # as a table that is made for the first size
                self.table = torch.arange(4.0)
            return super().forward(x) + self.n.add_(1) + self.table

    model = seeded(Stateful)
    first = model.table
    data = [normal(1, 8, seed=i) for i in range(6)]
    loaded = maker.load(linear, reference=model)
    comparison = maker.compare(loaded, data)

    assert float(model.n) == 0.0
    assert model.table is first
    (stateful,) = (each for each in comparison.health if each.kind == STATEFUL_REFERENCE)
    assert "changes the buffer 'n' (3 in all)" in stateful.message
    assert maker.compare(loaded, data).total.sqnr_db == comparison.total.sqnr_db


def test_a_reference_that_draws_random_numbers(maker: Edgeq, linear: bytes) -> None:
    """It is named before any op; numbers that no output depends on are no finding."""
    data = [normal(1, 8, seed=i) for i in range(4)]
    for share, found in ((0.5, [STATEFUL_REFERENCE]), (0.0, [])):
        forward = lambda self, x, p=share: self.layer(x) + p * torch.rand(1)  # noqa: E731
        loaded = maker.load(linear, reference=net(forward, layer=_layer()).eval())
        assert [each.kind for each in maker.compare(loaded, data).health] == found
    with pytest.raises(
        AssertionError, match=r"health: stateful_reference: .* random numbers: a sec"
    ):
        maker.check(maker.load(linear, reference=lambda x: x[:, :4] + torch.rand(1)), data)


def test_integer_samples_of_the_model_fit_a_loaded_file(maker: Edgeq) -> None:
    """The converter stores int64 as int32; the model's own samples go through all the same."""
    model = seeded(lambda: nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 3)))
    ids = torch.tensor([[1, 2, 3]])
    made = maker.quantize(model, (ids,), quantizer=None)
    loaded = maker.load(made.tflite, reference=model)

    assert maker.compare(loaded, [ids]).total.sqnr_db > 100
    with pytest.raises(ValueError, match=r"sample 0: .*cannot hold the values"):
        maker.compare(loaded, [ids + 2**40])


def test_a_file_that_was_written_anew(maker: Edgeq, linear: bytes, tmp_path: Path) -> None:
    """It is refused, never run under another file's map; a cut file does not kill the process."""
    sample, path = normal(1, 8, seed=0), tmp_path / "model.tflite"
    path.write_bytes(linear)
    loaded = maker.load(path, reference=_layer())
    assert maker.compare(loaded, [sample]).total.sqnr_db > 100
    path.write_bytes(linear[: len(linear) // 2])
    os.utime(path, (1, 1))

    for use in (
        lambda: loaded.tflite,
        lambda: loaded.run(sample),
        lambda: loaded.run(sample, runtime="builtin"),
        lambda: maker.compare(loaded, [sample]),
    ):
        with pytest.raises(ValueError, match="was written anew since it was loaded: load it again"):
            use()
    path.unlink()
    with pytest.raises(FileNotFoundError, match="is gone since it was loaded"):
        loaded.run(sample)


def test_a_reference_of_inference_mode(linear: bytes) -> None:
    """Its tensors do not count their changes."""
    with torch.inference_mode():
        model = _layer()
    edgeq, data = Edgeq(threads=2), [normal(1, 8, seed=i) for i in range(4)]
    assert edgeq.compare(edgeq.load(linear, reference=model), data).total.sqnr_db > 100


def test_a_relative_path_outlives_the_working_directory(
    maker: Edgeq, linear: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another test may change it before the first run."""
    (tmp_path / "model.tflite").write_bytes(linear)
    monkeypatch.chdir(tmp_path)
    loaded = maker.load("model.tflite")
    monkeypatch.chdir("/")
    assert loaded.run(normal(1, 8, seed=0))["output_0"].shape == (1, 4)


def test_arrays_calibrate_as_tensors_do(maker: Edgeq) -> None:
    """To the same file."""
    data = [normal(1, 8, seed=i) for i in range(20)]
    arrays = [sample.numpy() for sample in data]
    made = [maker.quantize(_layer(), (data[0],), calibration=each) for each in (data, arrays)]
    assert made[0].tflite == made[1].tflite


@pytest.mark.parametrize("method", ["compare", "localize", "check"])
def test_swapped_arguments(maker: Edgeq, method: str) -> None:
    """The text has the call in the right order, and the shape of an array."""
    tensor = {"dtype": "float32", "shape": (1, 8)}
    made = maker.load(one_op("ABS", [tensor], [tensor]), reference=np.abs)
    call = getattr(maker, method)
    with pytest.raises(TypeError, match=rf"got ndarray of shape \[8, 3\]; .* edgeq\.{method}\(q"):
        call(np.zeros((8, 3)), made)
    with pytest.raises(TypeError, match=r"got Linear; quantize the model first: edgeq\.quantize"):
        call(nn.Linear(1, 1), [])
    with pytest.raises(TypeError, match=r"got str; load the file first: edgeq\.load"):
        call("model.tflite", [])
    with pytest.raises(TypeError, match="got NoneType"):
        call(None, [])
    with pytest.raises(TypeError, match=r"got one ndarray of shape \[8, 3\].*numpy\.split"):
        call(made, np.zeros((8, 3)))


def test_a_calibration_sample_that_the_model_cannot_take(maker: Edgeq) -> None:
    """The library's own error is kept, with the sample's number before it."""
    model = seeded(lambda: nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 3)))
    with pytest.raises(RuntimeError, match=r"calibration sample 1 stops.*\n.*out of range"):
        maker.quantize(
            model,
            (torch.tensor([[1, 2]]),),
            calibration=[torch.tensor([[1, 2]]), torch.tensor([[1, 99]])],
        )


@pytest.fixture(scope="module")
def numbered() -> bytes:
    """`Weighted` in float, with the inputs `args_0` and `args_1`."""
    sample = tuple(_samples()[0].values())
    return Edgeq().quantize(seeded(Weighted), sample, quantizer=None).tflite


def test_a_callable_of_any_names_is_called_by_name(
    maker: Edgeq, named: bytes, numbered: bytes
) -> None:
    """Not by position, which pairs the wrong inputs of a file that has them in another order."""
    model, others = seeded(Weighted), _samples()

    def both(a: Any, b: Any) -> Any:
        return model(*(torch.from_numpy(each) for each in (a, b)))

    def by_name(**inputs: Any) -> Any:
        return both(inputs["a"], inputs["b"])

    def anything(*args: Any, **inputs: Any) -> Any:
        return both(*args, **inputs)

    def first(a: Any, **inputs: Any) -> Any:
        return both(a, **inputs)

    def optional(a: Any, cache: Any = None, **inputs: Any) -> Any:
        return both(a, **inputs)

    for reference in (by_name, anything, first, optional):
        comparison = maker.compare(maker.load(named, reference=reference), others)
        assert comparison.total.sqnr_db > 100, reference
    tuples = [(each["a"], each["b"]) for each in others]
    assert maker.compare(maker.load(named, reference=first), [(t[0], {"b": t[1]}) for t in tuples])
    loaded = maker.load(numbered, reference=lambda **x: both(x["args_0"], x["args_1"]))
    keyed = [{"args_0": a, "args_1": b} for a, b in tuples]
    assert maker.compare(loaded, keyed).total.sqnr_db > 100


@pytest.mark.slow
def test_files_as_references_of_signatures_and_of_other_names(
    maker: Edgeq, named: bytes, numbered: bytes
) -> None:
    """By their names where both files have the same ones, else by position."""
    sample, *others = _samples()
    forwards = maker.quantize(seeded(Weighted), sample_kwargs=sample, quantizer=None).tflite
    for reference in (forwards, named):
        assert maker.compare(maker.load(forwards, reference=reference), others).total.sqnr_db > 100
    by_position = maker.load(numbered, reference=forwards)
    tuples = [(each["a"], each["b"]) for each in others]
    assert maker.compare(by_position, tuples).total.sqnr_db > 100
    sizes = {"small": (normal(1, 8, seed=1),), "large": (normal(3, 8, seed=1),)}
    several = maker.quantize(_layer(), sizes, quantizer=None).tflite
    loaded = maker.load(several, reference=several)
    for name, (given,) in sizes.items():
        assert maker.compare(loaded.signature(name), [given]).total.max_abs_error == 0

    def renamed(model: Any) -> None:
        model.signatureDefs[1].signatureKey += b"r"

    missing = maker.load(several).signatures[1]
    with pytest.raises(ValueError, match=f"the file has no signature '{missing}'"):
        maker.load(several, reference=_edit(several, renamed))
