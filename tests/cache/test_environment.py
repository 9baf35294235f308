"""Patched libraries and changed settings give another key, or none."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_edgeq import litert
from pytest_edgeq.cache import environment
from pytest_edgeq.cache.digest import UnknownError, digest_of
from pytest_edgeq.litert.extensions import _Latest
from pytest_edgeq.litert.source_constants import constants_of_source

ROOT = Path(__file__).parent.parent.parent
MKLDNN: Any = torch.backends.mkldnn


def _key() -> str:
    return digest_of(environment.libraries(), environment.settings())


def _module(name: str) -> Any:
    return litert.converter_module(name)


def _mine(*_: Any, **__: Any) -> Any:
    """Stand for code of a test suite."""


def _annotator(patch: pytest.MonkeyPatch) -> None:
    utils = _module("quantize.pt2e_quantizer_utils")
    patch.setitem(utils.OP_TO_ANNOTATOR, "add", utils.OP_TO_ANNOTATOR["add"])
    utils.register_annotator("add")(_mine)


def _wrapped_lowering(patch: pytest.MonkeyPatch) -> None:
    lowerings = _module("backend.lowerings.registry").global_registry.registered_ops
    original = lowerings[torch.ops.aten.relu.default]
    patch.setitem(lowerings, torch.ops.aten.relu.default, functools.wraps(original)(_copy()))


def _copy() -> Callable[..., Any]:
    """A function that `functools.wraps` may rename."""

    def mine(*_: Any, **__: Any) -> Any:
        return None

    return mine


def _recipe_algorithm(patch: pytest.MonkeyPatch) -> None:
    manager: Any = litert.libraries.recipe_module("algorithm_manager")
    common: Any = litert.libraries.recipe_module("algorithms.uniform_quantize.common_quantize")
    op, algorithm = manager._TFLOpName.TANH, manager.AlgorithmName.MIN_MAX_UNIFORM_QUANT
    ops = manager._alg_manager_instance._algorithm_registry[algorithm].quantized_ops
    patch.setitem(ops, op, ops[op])
    manager.register_quantized_op(
        algorithm,
        op,
        ops[op].init_qsv_func,
        calibration_func=ops[op].calibration_func,
        materialize_func=functools.partial(common.materialize_tanh, _mine),
    )


def _observer(patch: pytest.MonkeyPatch) -> None:
    observers = litert.libraries.pt2e_module("observer")
    patch.setattr(observers.HistogramObserver, "calculate_qparams", _mine)


def _static_method(patch: pytest.MonkeyPatch) -> None:
    observers = litert.libraries.pt2e_module("observer")
    patch.setattr(observers.MinMaxObserver, "forward", staticmethod(_mine))


def _module_function(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_module("quantize.pt2e_quantizer_utils"), "get_bias_qspec", _mine)


def _instance(patch: pytest.MonkeyPatch) -> None:
    registry = _module("backend.lowerings.registry").global_registry
    patch.setattr(registry, "lookup", _mine, raising=False)


class _Callable:
    def __call__(self) -> None:
        """Stand for code of a test suite."""


def _callable_object(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_module("quantize.pt2e_quantizer_utils"), "get_bias_qspec", _Callable())


def _generated(patch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"__name__": "conftest"}
    exec("def mine(): pass", names)
    patch.setattr(_module("quantize.pt2e_quantizer_utils"), "get_bias_qspec", names["mine"])


def _decorated_by_torch(patch: pytest.MonkeyPatch) -> None:
    made = torch.no_grad()(_copy())
    patch.setattr(_module("quantize.pt2e_quantizer_utils"), "get_bias_qspec", made)


@pytest.mark.parametrize(
    "extend",
    [
        _annotator,
        _wrapped_lowering,
        _recipe_algorithm,
        _observer,
        _static_method,
        _module_function,
        _instance,
        _callable_object,
        _generated,
        _decorated_by_torch,
    ],
)
def test_code_that_others_put_into_a_library_makes_the_key_unknown(
    extend: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """Their code is in no version; once it is gone, the key is what it was."""
    for name in ("quantize.pt2e_quantizer", "backend.lowerings"):
        _module(name)
    litert.libraries.recipe_module("quantizer")
    key = _key()
    with pytest.MonkeyPatch.context() as patch:
        extend(patch)
        with pytest.raises(UnknownError, match="which other code has put into the libraries"):
            _key()
    assert _key() == key


@pytest.mark.parametrize("change", ["assign", "remove"])
def test_a_constant_of_a_library_counts(change: str) -> None:
    """Which operators PT2E annotates, by assignment and in place."""
    quantizer = _module("quantize.pt2e_quantizer").PT2EQuantizer
    before = list(quantizer.STATIC_OPS)
    key = _key()
    with pytest.MonkeyPatch.context() as patch:
        if change == "assign":
            patch.setattr(quantizer, "STATIC_OPS", before[1:])
        else:
            quantizer.STATIC_OPS.remove("add")
        changed = _key()
        quantizer.STATIC_OPS[:] = before
    assert changed != key
    assert _key() == key


@pytest.mark.parametrize("change", ["remove", "replace"])
def test_the_annotators_of_a_library_count(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """One that is taken out leaves its op in float; one of another op annotates otherwise."""
    key, table = _key(), _module("quantize.pt2e_quantizer_utils").OP_TO_ANNOTATOR
    assert _key() == key
    with monkeypatch.context() as patch:
        if change == "remove":
            patch.delitem(table, "add")
        else:
            patch.setitem(table, "add", table["mul"])
        assert _key() != key
    assert _key() == key


def test_constants_are_read_from_source(tmp_path: Path) -> None:
    """Not what code sets twice, fills, computes, or makes a member of."""
    source = tmp_path / "module.py"
    source.write_text(
        "A = 1\nB = [1, 2]\nC = []\nD = 1\nD = 2\nE = f()\nF = -1.5\nG = None\nH: int = 3\n"
        "J = {'a': (1, 2)}\nJ['b'] = 2\n"
        "class One:\n    A = 'a'\n    B = {'a': (1, 2)}\n"
        "class Two(enum.Enum):\n    A = 'a'\n"
        "def use():\n    global G\n    A = 2\n"
    )
    assert constants_of_source(source) == {
        ("", "A"): 1,
        ("", "B"): [1, 2],
        ("", "F"): -1.5,
        ("", "H"): 3,
        ("One", "A"): "a",
        ("One", "B"): {"a": (1, 2)},
    }


@pytest.mark.filterwarnings("ignore:Warning only once for all operators:UserWarning")
@pytest.mark.parametrize("by", ["library", "function"])
def test_a_kernel_of_the_users_own_makes_the_key_unknown(by: str) -> None:
    """Samples run by it; once it is gone, the key is what it was."""
    key = _key()
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call] # torch's own gap
    try:
        if by == "library":
            library.impl("alpha_dropout", _mine, "CPU")
        else:
            torch.library.impl("aten::alpha_dropout", "CPU", lib=library)(_mine)
        with pytest.raises(UnknownError, match="the kernel aten/alpha_dropout/CPU"):
            _key()
    finally:
        library._destroy()
    assert _key() == key


def test_an_unchanged_process_is_looked_at_once() -> None:
    """A key costs a comparison; a look takes some 65 ms."""
    _module("quantize.pt2e_quantizer")
    _key()
    look = _Latest.look
    for _ in range(3):
        _key()
    assert _Latest.look is look


def _with_variable(name: str, value: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setenv(name, value)


@pytest.mark.parametrize(
    "name",
    [
        "ENABLE_GROUP_NORM_COMPOSITE",
        "LAYOUT_OPTIMIZE_PARTITIONER",
        "RESOURCE_CONSTANT_NUMEL_THRESHOLD",
        "JAX_ENABLE_X64",
        "XLA_FLAGS",
        "TF_XLA_FLAGS",
        "NPY_DISABLE_CPU_FEATURES",
    ],
)
def test_variables_of_the_converter_count(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """And those of the libraries below it."""
    key = _key()
    monkeypatch.setenv(name, "y")
    assert _key() != key


@pytest.mark.parametrize("name", ["TF_VAR_run", "TF_CPP_MIN_LOG_LEVEL"])
def test_variables_of_other_programs_do_not_count(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Terraform's begin as TensorFlow's do."""
    key = _key()
    monkeypatch.setenv(name, "1")
    assert _key() == key


def test_every_setting_of_the_converter_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config is made of variables alone, each of them known here."""
    config = _module("_config")
    named = set(re.findall(r'"([A-Z]+_[A-Z_]+)"', inspect.getsource(config)))
    assert {"ENABLE_GROUP_NORM_COMPOSITE", "LITERT_TORCH_SHOW_PROGRESS"} <= named
    assert all(name.startswith(environment._VARIABLES) for name in named)
    assert vars(config.config) == {}
    key = _key()
    monkeypatch.setenv("ENABLE_GROUP_NORM_COMPOSITE", "n")
    config.config.enable_group_norm_composite = True
    assert _key() != key


@pytest.mark.slow
def test_the_libraries_leave_the_settings_as_they_are() -> None:
    """Some set variables when they are imported, which the next process does not have yet."""
    script = """
from fixtures.models import ConvBnRelu, samples, seeded
from pytest_edgeq import Edgeq
from pytest_edgeq.cache import environment
before = environment.libraries(), environment.settings()
data = list(samples(ConvBnRelu, 2))
for flow in ("pt2e_static_int8", "recipe_static_wi8_ai8", None):
    Edgeq().quantize(
        seeded(ConvBnRelu), ConvBnRelu.sample_inputs(), quantizer=flow, calibration=data
    )
import litert_torch, tensorflow
assert (environment.libraries(), environment.settings()) == before
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=100)


@pytest.fixture
def restored() -> Iterator[None]:
    """Settings of torch that no context manager keeps."""
    yield
    torch.set_flush_denormal(False)
    setattr(torch.backends, "fp32_precision", "none")  # noqa: B010  which mypy does not know
    for kind in ("matmul", "conv", "rnn"):
        getattr(MKLDNN, kind).fp32_precision = "none"


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.set_flush_denormal(True),
        lambda: setattr(torch.backends, "fp32_precision", "bf16"),
        lambda: setattr(MKLDNN.matmul, "fp32_precision", "bf16"),
        lambda: setattr(MKLDNN.conv, "fp32_precision", "bf16"),
        lambda: setattr(MKLDNN.rnn, "fp32_precision", "bf16"),
    ],
    ids=["denormals", "all", "matmul", "conv", "rnn"],
)
def test_settings_of_arithmetic_count(change: Callable[[], Any]) -> None:
    """None of them raises, though torch's older functions do beside the newer ones."""
    key = _key()
    change()
    assert _key() != key


def test_the_model_of_cpu_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock does not, nor which of its cores is told of."""
    told = "processor\t: {0}\nmodel name\t: {1}\ncpu MHz\t\t: {0}00.0\nflags\t\t: fpu {2}\n"
    made = []
    for number, values in enumerate([(0, "A", ""), (1, "A", ""), (0, "B", ""), (0, "A", "amx")]):
        file = tmp_path / str(number)
        file.write_text(told.format(*values))
        monkeypatch.setattr(environment, "_CPU_INFO", file)
        environment._cpu_model.cache_clear()
        made.append(_key())
    environment._cpu_model.cache_clear()
    assert made[0] == made[1]
    assert len(set(made)) == 3


@pytest.mark.parametrize("name", ["litert_torch", "torchao", "absl"])
def test_a_library_from_elsewhere_makes_the_key_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its version is of the one that it hides."""
    _key()
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for loaded in [each for each in sys.modules if each.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, loaded)
    with pytest.raises(UnknownError, match="whose code is imported from elsewhere"):
        _key()
    assert name not in sys.modules


def test_a_loaded_library_from_elsewhere_makes_the_key_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one that is no package at all."""
    monkeypatch.setitem(sys.modules, "immutabledict", types.ModuleType("immutabledict"))
    environment._installed.cache_clear()
    with pytest.raises(UnknownError, match="immutabledict, whose code is imported from elsewhere"):
        _key()


def test_a_library_without_a_version_makes_the_key_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It can be imported, and nothing says what it is."""
    original = importlib.metadata.distribution

    def distribution(name: str) -> importlib.metadata.Distribution:
        if name == "xdsl":
            raise importlib.metadata.PackageNotFoundError(name)
        return original(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    environment._installed.cache_clear()
    with pytest.raises(UnknownError, match=r"xdsl, which is imported from .* and has no version"):
        _key()


def test_the_place_of_a_virtual_environment_does_not_count() -> None:
    """A script's first line has the path of its interpreter; a changed module counts."""

    class Installed(importlib.metadata.Distribution):
        def __init__(self, module: str, script: str) -> None:
            self.record = f"net/__init__.py,sha256={module},1\n../../../bin/net,sha256={script},2"

        def read_text(self, filename: str) -> str | None:
            return self.record if filename == "RECORD" else None

        def locate_file(self, path: Any) -> Any:
            return path

    one, moved, changed = (
        environment._files_digest(Installed(*hashes)) for hashes in ("ab", "ac", "db")
    )
    assert one == moved != changed


def _install(folder: Path) -> importlib.metadata.Distribution:
    """Install a package of one file, as installers do: the list of files comes last."""
    (folder / "net").mkdir()
    (folder / "net-1.dist-info").mkdir()
    source = folder / "net" / "__init__.py"
    source.write_text("SCALE = 0.5\n")
    told = base64.urlsafe_b64encode(hashlib.sha256(source.read_bytes()).digest()).decode()
    record = folder / "net-1.dist-info" / "RECORD"
    record.write_text(
        f"net/__init__.py,sha256={told.rstrip('=')},{source.stat().st_size}\n"
        "net-1.dist-info/RECORD,,\n"
    )
    os.utime(source, (1_000_000_000,) * 2)
    os.utime(record, (1_000_000_001,) * 2)
    return importlib.metadata.Distribution.at(folder / "net-1.dist-info")


@pytest.mark.parametrize("text", ["SCALE = 0.7\n", "SCALE = 0.55\n", None])
def test_a_library_that_is_edited_where_it_is_installed_counts(
    tmp_path: Path, text: str | None
) -> None:
    """Its version and the list of its files stay the same."""
    distribution = _install(tmp_path)
    before = environment._files_digest(distribution)
    source = tmp_path / "net" / "__init__.py"
    if text is None:
        source.unlink()
    else:
        source.write_text(text)
    assert environment._files_digest(distribution) != before


def test_the_time_of_an_installed_file_does_not_count(tmp_path: Path) -> None:
    """In a copied environment files may be newer than the list of files."""
    distribution = _install(tmp_path)
    before = environment._files_digest(distribution)
    (tmp_path / "net" / "__init__.py").touch()
    assert environment._files_digest(distribution) == before
