"""A hit is the very model that the steps would have made: file, graph, figures and warnings."""

from __future__ import annotations

import gc
import importlib
import shutil
import sys
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fixtures.models
from fixtures.models import (
    CausalMask,
    ConvBnRelu,
    DynamicBatch,
    NonStrictOnly,
    ResidualNet,
    SelfAttention,
    SmallModel,
    normal,
    samples,
    seeded,
)
from pytest_edgeq import Edgeq, QuantizedModel, litert
from pytest_edgeq.litert.graphs import decode_graph, encode_graph
from pytest_edgeq.quantize.cache.directory import Store

PT2E, STATIC, DYNAMIC = "pt2e_static_int8", "recipe_static_wi8_ai8", "recipe_dynamic_wi8_afp32"
OTHER_FLOWS = ("pt2e_dynamic_int8", DYNAMIC, None)
ALL = [
    name
    for name in fixtures.models.__all__
    if isinstance(getattr(fixtures.models, name), type)
    and issubclass(getattr(fixtures.models, name), SmallModel)
    and name != "SmallModel"
]


def _built(maker: Edgeq, kind: type[SmallModel], flow: Any) -> QuantizedModel:
    return maker.quantize(
        seeded(kind),
        kind.sample_inputs(),
        sample_kwargs=kind.sample_kwargs() or None,
        quantizer=flow,
        calibration=samples(kind, 8),
        dynamic_shapes=kind.dynamic_shapes(),
    )


def _told(
    maker: Edgeq, kind: type[SmallModel], flow: Any, *, localizes: bool = True
) -> dict[str, Any]:
    """All that a user can see of a build, or why there is none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            quantized = _built(maker, kind, flow)
        except (RuntimeError, ValueError) as error:
            return {"refused": f"{type(error).__name__}: {error}"}
    comparison = maker.compare(quantized, samples(kind, 4, seed=3))
    return {
        "file": quantized.tflite,
        "float file": quantized.float_tflite,
        "comparison": comparison.to_dict(),
        "build": comparison.build(),
        "layers": maker.localize(quantized, samples(kind, 2, seed=3)).to_dict()
        if localizes
        else None,
        "strictly": quantized.exported_strictly,
        "warnings": sorted((str(each.message), each.filename, each.lineno) for each in caught),
    }


def _told_twice(
    tmp_path: Path, kind: type[SmallModel], flow: Any, *, localizes: bool = True
) -> dict[str, Any]:
    """Build with an empty cache, and in a session of its own from what that holds: it is equal."""
    made = _told(Edgeq(cache_dir=tmp_path), kind, flow, localizes=localizes)
    with pytest.MonkeyPatch.context() as patch:
        if "refused" not in made:
            for step in ("convert", "finish_pt2e", "quantize_recipe"):
                patch.setattr(litert, step, _forbidden)
            if flow != DYNAMIC:  # which asks the library whether it calibrates
                patch.setattr(litert, "calibrate_recipe", _forbidden)
        assert _told(Edgeq(cache_dir=tmp_path), kind, flow, localizes=localizes) == made
    return made


def _forbidden(*_: Any, **__: Any) -> Any:
    pytest.fail("a step ran again")


@pytest.mark.parametrize(
    ("kind", "flow"),
    [
        (ConvBnRelu, PT2E),
        *(
            pytest.param(SelfAttention, flow, marks=pytest.mark.slow)
            for flow in (PT2E, STATIC, *OTHER_FLOWS)
        ),
        # What is open stands in the graph of PT2E alone; recipes begin with a file.
        pytest.param(DynamicBatch, PT2E, marks=pytest.mark.slow),
    ],
)
def test_a_hit_equals_a_build(tmp_path: Path, kind: type[SmallModel], flow: str | None) -> None:
    """Bit by bit, no step runs, and without a cache it is the same."""
    assert _told_twice(tmp_path, kind, flow) == _told(Edgeq(), kind, flow)


# Samples by name, several signatures and branches have tests of their own.
PLAIN = [
    name
    for name in ALL
    for kind in (getattr(fixtures.models, name),)
    if not (kind.sample_kwargs() or hasattr(kind, "signatures") or name == "CondBranch")
]


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN[::8])
def test_a_hit_equals_a_build_for_small_models(tmp_path: Path, name: str) -> None:
    """
    Where PT2E refuses a model, it does so again, in the same words.

    A recipe's files and ranges are the same for any.
    """
    _told_twice(tmp_path, getattr(fixtures.models, name), PT2E, localizes=False)


def _counted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, calls: list[str]) -> None:
    original = getattr(module, name)

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, count)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the steps that ran."""
    calls: list[str] = []
    for name in ("convert", "finish_pt2e", "calibrate_recipe", "quantize_recipe", "prepare_pt2e"):
        _counted(monkeypatch, litert, name, calls)
    original = torch.export.export

    def export(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("strict"):
            calls.append("strict export")
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", export)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True], ids=["one session", "sessions"])
def test_one_float_conversion_serves_all_recipes_and_none(
    tmp_path: Path, ran: list[str], *, apart: bool
) -> None:
    """Within a session and across sessions."""
    maker = Edgeq(cache_dir=tmp_path)
    for flow in (None, STATIC, DYNAMIC, "recipe_weight_only_wi8_afp32"):
        _built(Edgeq(cache_dir=tmp_path) if apart else maker, ResidualNet, flow)

    assert ran.count("convert") == 1
    assert ran.count("quantize_recipe") == 3


HELPER = "import torch\n\n\ndef add(x, y):\n    return x + y\n"


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of the project, which is imported."""
    path = tmp_path / "edgeq_helper.py"
    path.write_text(HELPER)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("edgeq_helper")
    yield path
    del sys.modules["edgeq_helper"]


class _Helped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = sys.modules["edgeq_helper"].add(self.linear(x), x)
        return made


def _helped(folder: Path | None, **options: Any) -> QuantizedModel:
    sample = normal(1, 4, seed=0)
    options = {"calibration": [sample, -sample], **options}
    return Edgeq(cache_dir=folder).quantize(_Helped().eval(), (sample,), **options)


def test_a_change_of_a_project_file_costs_an_export_and_no_conversion(
    tmp_path: Path, ran: list[str], helper: Path
) -> None:
    """Whatever the change is; the run after it costs neither."""
    folder = tmp_path / "cache"
    made = _helped(folder)
    assert ran == ["strict export", "prepare_pt2e", "finish_pt2e", "convert"]
    for text in (f"{HELPER}# a comment\n", HELPER.replace("\n\n\n", "\n\n\n\n")):
        helper.write_text(text)
        importlib.reload(sys.modules["edgeq_helper"])
        ran.clear()
        assert _helped(folder).tflite == made.tflite
        assert ran == ["strict export", "prepare_pt2e"]
        assert _helped(folder).tflite == made.tflite
        assert ran == ["strict export", "prepare_pt2e"]
    helper.write_text(HELPER.replace("x + y", "x * y"))
    importlib.reload(sys.modules["edgeq_helper"])
    ran.clear()
    assert _helped(folder).tflite == _helped(None).tflite != made.tflite
    assert ran.count("convert") == 2


@pytest.mark.usefixtures("helper")
def test_strict_and_other_exports_are_two_builds(tmp_path: Path, ran: list[str]) -> None:
    """Of which each is read in the next run."""
    folder = tmp_path / "cache"
    strict, other = (_helped(folder, strict_export=strict).tflite for strict in (True, False))
    assert strict != other
    assert ran.count("convert") == 2
    ran.clear()
    assert [_helped(folder, strict_export=each).tflite for each in (True, False)] == [strict, other]
    assert ran == ["prepare_pt2e"]


@pytest.mark.usefixtures("helper")
def test_new_calibration_data_are_a_new_conversion(tmp_path: Path, ran: list[str]) -> None:
    """Also where the key of the graph is known without an export."""
    folder, data = tmp_path / "cache", [normal(1, 4, seed=seed) * 2**seed for seed in range(3)]
    made = [_helped(folder, calibration=given).tflite for given in (data, data[:2], data)]
    assert made[0] == made[2] != made[1] == _helped(None, calibration=data[:2]).tflite
    assert ran.count("finish_pt2e") == 3


@pytest.mark.slow
def test_a_model_that_changes_in_place_is_exported_anew(tmp_path: Path) -> None:
    """Also where it changes back: what is kept in memory shares the model's own weights."""
    maker, model = Edgeq(cache_dir=tmp_path), seeded(ConvBnRelu)
    files: list[bytes] = []
    for factor in (1.0, 2.0, 0.5):
        with torch.no_grad():
            next(model.parameters()).mul_(factor)
        data = samples(ConvBnRelu, 4, seed=len(files))
        files.append(maker.quantize(model, ConvBnRelu.sample_inputs(), calibration=data).tflite)
    for seed, factor in enumerate((1.0, 2.0, 1.0)):
        again = seeded(ConvBnRelu)
        with torch.no_grad():
            next(again.parameters()).mul_(factor)
        data = samples(ConvBnRelu, 4, seed=seed)
        made = Edgeq().quantize(again, ConvBnRelu.sample_inputs(), calibration=data)
        assert made.tflite == files[seed]


@pytest.mark.slow
def test_parameters_that_are_replaced_are_seen(tmp_path: Path) -> None:
    """A program that is kept in memory holds the old ones."""
    maker, model = Edgeq(cache_dir=tmp_path), seeded(ConvBnRelu)
    inputs = ConvBnRelu.sample_inputs()
    maker.quantize(model, inputs, calibration=samples(ConvBnRelu, 4))
    old = next(model.parameters()).data
    next(model.parameters()).data = old.clone()
    old.zero_()
    made = maker.quantize(model, inputs, calibration=samples(ConvBnRelu, 4, seed=1))
    plain = Edgeq().quantize(seeded(ConvBnRelu), inputs, calibration=samples(ConvBnRelu, 4, seed=1))
    assert made.tflite == plain.tflite


@pytest.mark.slow
def test_a_model_goes_with_its_last_user(tmp_path: Path) -> None:
    """The session holds no strong reference to the model."""
    maker, model = Edgeq(cache_dir=tmp_path), seeded(ConvBnRelu)
    maker.quantize(model, ConvBnRelu.sample_inputs(), calibration=samples(ConvBnRelu, 2))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_training_is_never_kept(tmp_path: Path, ran: list[str]) -> None:
    """It may do something else each time; the reason is told."""
    notes: list[str] = []
    maker = Edgeq(cache_dir=tmp_path)
    maker._session.cache._note = notes.append
    sample = (normal(1, 4, seed=0),)
    for _ in range(2):
        maker.quantize(
            torch.nn.Linear(4, 4).eval(),
            sample,
            quantizer="pt2e_qat_int8",
            train=lambda prepared: prepared(*sample),
        )
    assert ran.count("convert") == 2
    told = "Linear: not kept in the conversion cache: train= may do something else each time"
    assert notes == [told] * 2
    assert not list(tmp_path.rglob("*.entry"))


@pytest.mark.slow
def test_a_generator_is_read_once_and_run_where_it_differs(tmp_path: Path, ran: list[str]) -> None:
    """Samples are copied until it is known whether they are a stored run's."""
    maker, taken = Edgeq(cache_dir=tmp_path), []

    def stream(last: int) -> Iterator[tuple[torch.Tensor, ...]]:
        buffer = ConvBnRelu.sample_inputs()[0].clone()
        for seed in (0, 1, 2, last):
            taken.append(seed)
            buffer.copy_(normal(*buffer.shape, seed=seed))  # one buffer, as some loaders have
            yield (buffer,)

    model = seeded(ConvBnRelu)
    made = [
        maker.quantize(model, ConvBnRelu.sample_inputs(), calibration=stream(last)).tflite
        for last in (3, 9, 3)
    ]
    assert taken == [0, 1, 2, 3, 0, 1, 2, 9, 0, 1, 2, 3]
    assert ran.count("finish_pt2e") == 2
    assert made[0] == made[2] != made[1]
    plain = Edgeq().quantize(model, ConvBnRelu.sample_inputs(), calibration=stream(9)).tflite
    assert plain == made[1]


@pytest.mark.slow
@pytest.mark.parametrize("flow", [PT2E, STATIC])
def test_calibration_data_is_judged_on_a_hit_as_on_a_miss(tmp_path: Path, flow: str) -> None:
    """Missing, empty and wrong data are errors, and overlaps are seen."""
    maker, model = Edgeq(cache_dir=tmp_path), seeded(ConvBnRelu)
    inputs, data = ConvBnRelu.sample_inputs(), list(samples(ConvBnRelu, 3))
    bad: list[Any] = [None, [], [*data, (torch.full_like(data[0][0], float("nan")),)]]
    for _ in range(2):
        for each in bad:
            with pytest.raises(ValueError, match=r"calibration|no sample"):
                maker.quantize(model, inputs, quantizer=flow, calibration=each)
        made = maker.quantize(model, inputs, quantizer=flow, calibration=data)
        assert any(f.kind == "calibration_overlap" for f in maker.compare(made, data).health)


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    ["flip", *(pytest.param(each, marks=pytest.mark.slow) for each in ("remove", "swap"))],
)
def test_damaged_entries_are_made_anew(tmp_path: Path, damage: str) -> None:
    """The model is the same; each entry but a removed one gives a warning."""
    plain = _built(Edgeq(), ConvBnRelu, PT2E)
    for flow in (PT2E, STATIC):
        _built(Edgeq(cache_dir=tmp_path), ConvBnRelu, flow)
    entries = sorted(tmp_path.rglob("*.entry"))
    contents = [path.read_bytes() for path in entries]
    for number, (path, content) in enumerate(zip(entries, contents, strict=True)):
        if damage == "flip":
            place = len(content) * 3 // 4
            path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        elif damage == "swap":
            path.write_bytes(contents[number - 1])
        else:
            path.unlink()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = _built(Edgeq(cache_dir=tmp_path), ConvBnRelu, PT2E)
    assert made.tflite == plain.tflite
    told = [str(each.message) for each in caught if "conversion cache" in str(each.message)]
    assert bool(told) == (damage != "remove")
    for path, content in zip(entries, contents, strict=True):
        if path.parent.name == "calibrate":
            assert path.read_bytes() == content


@pytest.mark.slow
def test_each_part_alone_may_be_gone(tmp_path: Path) -> None:
    """Eviction may remove the entry of one step and leave those of the others."""
    flows = (PT2E, STATIC)
    made = {flow: _built(Edgeq(cache_dir=tmp_path), SelfAttention, flow) for flow in flows}
    for kind in ("export", "calibrate", "convert", "ranges", "quantize"):
        shutil.rmtree(tmp_path / kind)
        for flow, quantized in made.items():
            again = _built(Edgeq(cache_dir=tmp_path), SelfAttention, flow)
            assert again.tflite == quantized.tflite, kind
            assert again.float_tflite == quantized.float_tflite


@pytest.mark.slow
def test_ops_left_in_float_stay_so_where_the_file_alone_is_gone(tmp_path: Path) -> None:
    """The marks of nodes with a config of None are stored with the quantized graph."""
    quantizer = litert.pt2e_preset(PT2E)
    quantizer.set_operator_type(torch.ops.aten.add.Tensor, None)

    def made() -> QuantizedModel:
        return Edgeq(cache_dir=tmp_path).quantize(
            seeded(ResidualNet),
            ResidualNet.sample_inputs(),
            quantizer=quantizer,
            calibration=samples(ResidualNet, 4),
        )

    first = made()
    assert {op.scheme for op in first.op_dtypes.ops("ADD")} == {"float"}
    shutil.rmtree(tmp_path / "convert")
    again = made()

    assert again.tflite == first.tflite
    assert again.left_in_float == first.left_in_float != frozenset()


@pytest.mark.slow
def test_refresh_replaces_what_was_stored_once_a_session(tmp_path: Path, ran: list[str]) -> None:
    """And reads what it has written itself."""
    _built(Edgeq(cache_dir=tmp_path), ConvBnRelu, PT2E)
    _built(Edgeq(cache_dir=tmp_path, cache="off"), ConvBnRelu, PT2E)
    assert ran.count("convert") == 2
    maker = Edgeq(cache_dir=tmp_path, cache="refresh")
    for _ in range(2):
        _built(maker, ConvBnRelu, PT2E)
    assert ran.count("convert") == 3
    _built(Edgeq(cache_dir=tmp_path), ConvBnRelu, PT2E)
    assert ran.count("convert") == ran.count("finish_pt2e") == 3


def test_outside_of_pytest_nothing_is_kept_unless_asked_for(tmp_path: Path) -> None:
    """`Edgeq()` writes nowhere; an unknown mode is refused."""
    assert not Edgeq()._session.cache.is_on
    assert Edgeq(cache_dir=tmp_path)._session.cache.is_on
    with pytest.raises(ValueError, match="cache: expected one of on, off, refresh, got 'of'"):
        Edgeq(cache="of")


@pytest.mark.slow
def test_nothing_that_is_stored_is_a_pickle(tmp_path: Path) -> None:
    """Every part is JSON, raw tensors or a `.tflite`."""
    for flow in (PT2E, STATIC):
        _built(Edgeq(cache_dir=tmp_path), ConvBnRelu, flow)
    store, found = Store(tmp_path, pytest.fail), set()
    for path in tmp_path.rglob("*.entry"):
        parts = store.read(path.parent.name, path.stem)
        assert parts is not None
        found |= set(parts)
        for name, content in parts.items():
            if name in ("graph", "facts", "ranges"):
                assert content[:1] in b"{[n"
            elif name == "tflite":
                assert content[4:8] == b"TFL3"
            assert b"\x80\x04\x95" not in content[:8]
    assert found == {"graph", "facts", "key", "ranges", "tensors", "tflite"}


def test_code_of_a_stored_graph_is_never_run(tmp_path: Path) -> None:
    """An operator of another namespace, and a function that is none, are refused."""
    graph = _built(Edgeq(), ConvBnRelu, PT2E).simulated
    assert isinstance(graph, torch.fx.GraphModule)
    parts = encode_graph(graph)
    for target in ("os.system.default", "operator:__import__", "torch:load", "builtins:eval"):
        changed = parts["graph"].replace(b"aten.relu.default", target.encode())
        assert changed != parts["graph"]
        with pytest.raises(ValueError, match=r"no known library|not installed"):
            decode_graph({**parts, "graph": changed})


@pytest.mark.slow
def test_a_refusal_of_strict_export_is_warned_of_on_every_hit(
    tmp_path: Path, ran: list[str]
) -> None:
    """As on the miss."""
    told = []
    for _ in range(2):
        with pytest.warns(UserWarning, match="refuses the model") as caught:
            Edgeq(cache_dir=tmp_path).quantize(
                seeded(NonStrictOnly),
                NonStrictOnly.sample_inputs(),
                calibration=samples(NonStrictOnly, 2),
            )
        told.append([str(each.message) for each in caught])
    assert told[0] == told[1]
    assert ran.count("finish_pt2e") == 1


@pytest.mark.slow
def test_several_signatures_are_kept(tmp_path: Path, ran: list[str]) -> None:
    """PT2E stores the quantized graph of each signature, and one file."""
    sizes = {"small": 8, "large": 16}
    files: list[bytes] = []
    for _ in range(2):
        made = Edgeq(cache_dir=tmp_path).quantize(
            seeded(ConvBnRelu),
            {name: (normal(1, 3, side, side, seed=0),) for name, side in sizes.items()},
            calibration={
                name: [normal(1, 3, side, side, seed=s) for s in range(2)]
                for name, side in sizes.items()
            },
        )
        files.append(made.tflite)
    assert files[0] == files[1]
    assert ran.count("convert") == 1


@pytest.mark.slow
def test_ranges_of_several_signatures_are_kept(tmp_path: Path, ran: list[str]) -> None:
    """Samples count with the signature that they are for."""

    def build(maker: Edgeq, data: dict[str, Any]) -> bytes:
        inputs = {name: DynamicBatch.sample_inputs() for name in data}
        model = seeded(DynamicBatch)
        return maker.quantize(model, inputs, quantizer=STATIC, calibration=data).tflite

    given = {name: list(samples(DynamicBatch, 2, seed=len(name))) for name in ("a", "ab")}
    other = dict(zip(given, reversed(given.values()), strict=True))
    plain = [build(Edgeq(), data) for data in (given, other)]
    assert [build(Edgeq(cache_dir=tmp_path), data) for data in (given, other)] == plain
    ran.clear()
    assert [build(Edgeq(cache_dir=tmp_path), data) for data in (given, other)] == plain
    assert ran == []


@pytest.mark.slow
def test_a_hit_of_a_masked_model_refuses_as_a_build_does(tmp_path: Path) -> None:
    """A file that no kernel loads is refused on each hit."""
    plain = _told(Edgeq(), CausalMask, STATIC)
    assert "refused" in plain
    for _ in range(2):
        assert _told(Edgeq(cache_dir=tmp_path), CausalMask, STATIC) == plain


class _Averaging(torch.nn.Module):
    """Has a tensor without dimensions, whose ranges are numpy's scalars."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale by the average of all elements."""
        y: torch.Tensor = self.linear(x)
        return y * y.mean()


def test_ranges_of_a_tensor_without_dimensions_are_kept(tmp_path: Path, ran: list[str]) -> None:
    """Read as they were calculated."""
    sample, quantizer = normal(1, 4, seed=0), "recipe_static_wi8_ai8"

    def build(folder: Path | None) -> bytes:
        made = Edgeq(cache_dir=folder).quantize(
            _Averaging().eval(), (sample,), quantizer=quantizer, calibration=[sample]
        )
        return made.tflite

    plain = build(None)
    assert build(tmp_path) == plain
    ran.clear()
    assert build(tmp_path) == plain
    assert not ran
