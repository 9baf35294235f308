"""A hit is the very model that the steps would have made: file, graph, figures and warnings."""

from __future__ import annotations

import importlib
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.models import (
    CausalMask,
    ConvBnRelu,
    DynamicBatch,
    ResidualNet,
    SelfAttention,
    SmallModel,
    net,
    normal,
    samples,
    seeded,
)
from pytest_edgeq import Edgeq, QuantizedModel, litert
from pytest_edgeq.litert.graphs import decode_graph, encode_graph
from pytest_edgeq.quantize.cache.directory import Store

PT2E, STATIC, DYNAMIC = "pt2e_static_int8", "recipe_static_wi8_ai8", "recipe_dynamic_wi8_afp32"
BOTH = (PT2E, STATIC)


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
    maker: Edgeq, kind: type[SmallModel], flow: Any, *, localizes: bool = False
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
        "layers": localizes and maker.localize(quantized, samples(kind, 2, seed=3)).to_dict(),
        "strictly": quantized.exported_strictly,
        "warnings": sorted((str(each.message), each.filename, each.lineno) for each in caught),
    }


def _told_twice(
    tmp_path: Path, kind: type[SmallModel], flow: Any, *, localizes: bool = False
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


@pytest.mark.sweep(0, slow=4)
@pytest.mark.parametrize(
    ("kind", "flow"),
    [
        (ConvBnRelu, PT2E),
        (SelfAttention, PT2E),
        (SelfAttention, STATIC),
        (ConvBnRelu, DYNAMIC),
        # What is open stands in the graph of PT2E alone; recipes begin with a file.
        (DynamicBatch, PT2E),
        (ConvBnRelu, None),
        (CausalMask, STATIC),  # refused, as no kernel loads the file
        (ConvBnRelu, "pt2e_dynamic_int8"),
    ],
)
def test_a_hit_equals_a_build(tmp_path: Path, kind: type[SmallModel], flow: str | None) -> None:
    """Bit by bit, no step runs, and without a cache it is the same."""
    localizes = kind is SelfAttention
    made = _told_twice(tmp_path, kind, flow, localizes=localizes)
    assert made == _told(Edgeq(), kind, flow, localizes=localizes)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the steps that ran."""
    calls: list[str] = []

    def count(step: Any, name: str, args: Any, kwargs: Any) -> Any:
        if step is not export or kwargs.get("strict"):
            calls.append(name)
        return step(*args, **kwargs)

    def watch(module: Any, name: str, step: Any, shown: str) -> None:
        monkeypatch.setattr(module, name, lambda *args, **kwargs: count(step, shown, args, kwargs))

    export = torch.export.export
    watch(torch.export, "export", export, "strict export")
    for name in ("convert", "finish_pt2e", "calibrate_recipe", "quantize_recipe", "prepare_pt2e"):
        watch(litert, name, getattr(litert, name), name)
    return calls


@pytest.mark.slow
def test_one_float_conversion_serves_all_recipes_and_none(tmp_path: Path, ran: list[str]) -> None:
    """Within a session and across sessions."""
    maker = Edgeq(cache_dir=tmp_path)
    for session, flow in ((maker, None), (maker, STATIC), (Edgeq(cache_dir=tmp_path), DYNAMIC)):
        _built(session, ConvBnRelu, flow)
    assert ran.count("convert") == 1
    assert ran.count("quantize_recipe") == 2


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


def _helped_model() -> torch.nn.Module:
    return net(
        lambda self, x: sys.modules["edgeq_helper"].add(self.linear(x), x),
        linear=torch.nn.Linear(4, 4),
    )


def _helped(folder: Path | None, **options: Any) -> QuantizedModel:
    sample = normal(1, 4, seed=0)
    options = {"calibration": [sample, -sample], **options}
    return Edgeq(cache_dir=folder).quantize(seeded(_helped_model), (sample,), **options)


@pytest.mark.slow
def test_each_change_costs_the_steps_that_it_concerns(
    tmp_path: Path, ran: list[str], helper: Path
) -> None:
    """A comment of a project file one export, new data a calibration; the run after it nothing."""
    folder, data = tmp_path / "cache", [normal(1, 4, seed=seed) * 2**seed for seed in range(3)]

    def build(**options: Any) -> tuple[bytes, list[str]]:
        ran.clear()
        return _helped(folder, **{"calibration": data, **options}).tflite, list(ran)

    def changed(text: str) -> None:
        helper.write_text(text)
        importlib.reload(sys.modules["edgeq_helper"])

    whole = ["strict export", "prepare_pt2e", "finish_pt2e", "convert"]
    made, steps = build()
    assert steps == whole
    changed(f"{HELPER}# a comment\n")
    assert build() == (made, whole[:2])
    assert build() == (made, [])
    other, steps = build(strict_export=False)
    assert (other != made, steps) == (True, whole[1:])
    assert build(strict_export=False) == (other, whole[1:2])
    fewer, steps = build(calibration=data[:2])
    assert (fewer != made, steps[-2:]) == (True, whole[2:])
    assert build() == (made, [])
    changed(HELPER.replace("x + y", "x * y"))
    product, steps = build()
    assert steps == whole
    assert product == _helped(None, calibration=data).tflite != made


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
def test_calibration_data_is_judged_on_a_hit_as_on_a_miss(tmp_path: Path) -> None:
    """Missing, empty and wrong data are errors, and overlaps are seen."""
    maker, model = Edgeq(cache_dir=tmp_path), seeded(ConvBnRelu)
    inputs, data = ConvBnRelu.sample_inputs(), list(samples(ConvBnRelu, 3))
    bad: list[Any] = [None, [], [*data, (torch.full_like(data[0][0], float("nan")),)]]
    for _ in range(2):
        for each in bad:
            with pytest.raises(ValueError, match=r"calibration|no sample"):
                maker.quantize(model, inputs, calibration=each)
        made = maker.quantize(model, inputs, calibration=data)
        assert any(f.kind == "calibration_overlap" for f in maker.compare(made, data).health)


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, QuantizedModel]]:
    """A cache with two builds, which tests copy."""
    folder = tmp_path_factory.mktemp("filled")
    return folder, {flow: _built(Edgeq(cache_dir=folder), ConvBnRelu, flow) for flow in BOTH}


def test_damaged_entries_are_made_anew(
    tmp_path: Path, filled: tuple[Path, dict[str, QuantizedModel]]
) -> None:
    """The model is the same; each entry gives a warning, and is as it was before."""
    source, made = filled
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    entries = sorted(tmp_path.rglob("*.entry"))
    contents = [path.read_bytes() for path in entries]
    for number, (path, content) in enumerate(zip(entries, contents, strict=True)):
        place = len(content) * 3 // 4
        flipped = content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]
        path.write_bytes(flipped if number % 2 else contents[number - 1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = _built(Edgeq(cache_dir=tmp_path), ConvBnRelu, PT2E)
    assert again.tflite == made[PT2E].tflite
    assert any("conversion cache" in str(each.message) for each in caught)
    for path, content in zip(entries, contents, strict=True):
        if path.parent.name == "calibrate":
            assert path.read_bytes() == content


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["export", "calibrate", "convert", "ranges", "quantize"])
def test_each_part_alone_may_be_gone(
    tmp_path: Path, filled: tuple[Path, dict[str, QuantizedModel]], kind: str
) -> None:
    """Eviction may remove the entry of one step and leave those of the others."""
    source, made = filled
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / kind)
    flow = STATIC if kind in ("ranges", "quantize") else PT2E
    again = _built(Edgeq(cache_dir=tmp_path), ConvBnRelu, flow)
    assert again.tflite == made[flow].tflite
    assert again.float_tflite == made[flow].float_tflite


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
def test_nothing_that_is_stored_is_a_pickle(filled: tuple[Path, dict[str, QuantizedModel]]) -> None:
    """Every part is JSON, raw tensors or a `.tflite`; code that it names is not run."""
    (source, made), found = filled, set()
    store = Store(source, pytest.fail)
    for path in source.rglob("*.entry"):
        parts = store.read(path.parent.name, path.stem)
        assert parts is not None
        found |= set(parts)
        for name, content in parts.items():
            if name in ("graph", "facts", "ranges"):
                assert content[:1] in b"{[n"
            elif name == "tflite":
                assert content[4:8] == b"TFL3"
            assert b"\x80\x04\x95" not in content[:8]
    assert found == {"arrays", "graph", "facts", "key", "ranges", "tensors", "tflite"}
    graph = made[PT2E].simulated
    assert isinstance(graph, torch.fx.GraphModule)
    encoded = encode_graph(graph)
    for target in ("os.system.default", "operator:__import__", "torch:load", "builtins:eval"):
        changed = encoded["graph"].replace(b"aten.relu.default", target.encode())
        assert changed != encoded["graph"]
        with pytest.raises(ValueError, match=r"no known library|not installed"):
            decode_graph({**encoded, "graph": changed})


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


def _averaging() -> torch.nn.Module:
    """Build a model with a tensor without dimensions, whose ranges are numpy's scalars."""
    return net(lambda self, x: self.linear(x) * x.mean(), linear=torch.nn.Linear(4, 4))


def test_ranges_of_a_tensor_without_dimensions_are_kept(tmp_path: Path, ran: list[str]) -> None:
    """Read as they were calculated."""
    sample, quantizer = normal(1, 4, seed=0), "recipe_static_wi8_ai8"

    def build(folder: Path | None) -> bytes:
        made = Edgeq(cache_dir=folder).quantize(
            seeded(_averaging), (sample,), quantizer=quantizer, calibration=[sample]
        )
        return made.tflite

    plain = build(None)
    assert build(tmp_path) == plain
    ran.clear()
    assert build(tmp_path) == plain
    assert not ran
