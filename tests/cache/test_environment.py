"""Other libraries and settings give another key, or none."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
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
from pytest_edgeq.litert.digest import UnhashableError, digest_of
from pytest_edgeq.quantize.cache import environment
from pytest_edgeq.runtimes import process_state
from pytest_edgeq.versions import owner_of

ROOT = Path(__file__).parent.parent.parent
MKLDNN: Any = torch.backends.mkldnn


def _key() -> str:
    return digest_of(environment.libraries(), environment.settings())


def _module(name: str) -> Any:
    return litert.converter_module(name)


def _mine(*_: Any, **__: Any) -> Any:
    """Stand for code of a test suite."""


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


def _newer_recipe_algorithm(patch: pytest.MonkeyPatch) -> None:
    """Register it with the library by its name from 0.11 on."""
    _recipe_algorithm(patch)
    known = sys.modules["ai_edge_quantizer.algorithm_manager"]
    patch.delitem(sys.modules, "ai_edge_quantizer.algorithm_manager")
    patch.setitem(sys.modules, "litert_quantizer.algorithm_manager", known)


@pytest.mark.parametrize("extend", [_wrapped_lowering, _recipe_algorithm, _newer_recipe_algorithm])
def test_what_others_register_with_a_library_makes_the_key_unknown(
    extend: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """Their code is in no version; once it is gone, the key is what it was."""
    for name in ("quantize.pt2e_quantizer", "backend.lowerings"):
        _module(name)
    litert.libraries.recipe_module("quantizer")
    key = _key()
    with pytest.MonkeyPatch.context() as patch:
        extend(patch)
        with pytest.raises(UnhashableError, match="which other code has registered with"):
            _key()
    assert _key() == key


def test_every_library_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of one of them."""
    before, key = environment.libraries(), _key()
    assert {"torch", "torchao", "litert-torch", "litert-converter", "ai-edge-litert"} <= set(before)
    assert {"ai-edge-quantizer", "numpy", "jax", "python", "pytest-edgeq"} <= set(before)
    for name in before:
        monkeypatch.setattr(environment, "libraries", lambda n=name: before | {n: "another"})
        assert _key() != key, name


def test_every_setting_of_the_converter_counts() -> None:
    """Its config is read only from variables, each of which has a known prefix."""
    config = _module("_config")
    named = set(re.findall(r'"([A-Z]+_[A-Z_]+)"', inspect.getsource(config)))
    assert {"ENABLE_GROUP_NORM_COMPOSITE", "LITERT_TORCH_SHOW_PROGRESS"} <= named
    assert all(name.startswith(environment._VARIABLES) for name in named)
    assert vars(config.config) == {}


def test_variables_of_the_libraries_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of Terraform, whose prefix TensorFlow shares, and of progress bars change none."""
    key = _key()
    for name in ("TF_VAR_run", "TF_CPP_MIN_LOG_LEVEL", "LITERT_TORCH_SHOW_PROGRESS"):
        monkeypatch.setenv(name, "1")
        assert _key() == key, name
    for name in ("ENABLE_GROUP_NORM_COMPOSITE", "JAX_ENABLE_X64", "TF_XLA_FLAGS", "TORCH_ANY"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "y")
            assert _key() != key, name


@pytest.mark.slow
def test_the_libraries_leave_the_settings_as_they_are() -> None:
    """Some set variables when they are imported, which the next process does not have yet."""
    script = """
import sys
from fixtures.models import ConvBnRelu, samples, seeded
from pytest_edgeq import Edgeq
from pytest_edgeq.quantize.cache import environment
before = environment.libraries(), environment.settings()
data = list(samples(ConvBnRelu, 2))
for flow in ("pt2e_static_int8", "recipe_static_wi8_ai8", None):
    Edgeq().quantize(
        seeded(ConvBnRelu), ConvBnRelu.sample_inputs(), quantizer=flow, calibration=data
    )
assert "litert_torch" in sys.modules
assert "tensorflow" not in sys.modules  # it may be installed beside a cache filled without it
import tensorflow
assert (environment.libraries(), environment.settings()) == before
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=300)


@pytest.fixture
def restored() -> Iterator[None]:
    """Settings of torch that no context manager keeps."""
    yield
    torch.set_flush_denormal(False)
    setattr(torch.backends, "fp32_precision", "none")  # noqa: B010  which mypy does not know
    for kind in ("matmul", "conv", "rnn"):
        getattr(MKLDNN, kind).fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(mode=False)
    MKLDNN.enabled = True


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(
    "change",
    [
        lambda: torch.set_flush_denormal(True),
        lambda: setattr(torch.backends, "fp32_precision", "bf16"),
        lambda: setattr(MKLDNN.matmul, "fp32_precision", "bf16"),
        lambda: setattr(MKLDNN.conv, "fp32_precision", "bf16"),
        lambda: setattr(MKLDNN.rnn, "fp32_precision", "bf16"),
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.use_deterministic_algorithms(mode=True),
        lambda: setattr(MKLDNN, "enabled", False),
    ],
    ids=["denormals", "all", "matmul", "conv", "rnn", "medium", "deterministic", "mkldnn"],
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
        monkeypatch.setattr(process_state, "CPU_INFO", file)
        process_state.cpu_model.cache_clear()
        made.append(_key())
    process_state.cpu_model.cache_clear()
    assert made[0] == made[1]
    assert len(set(made)) == 3


@pytest.mark.parametrize("name", ["litert_torch", "absl"])
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
    with pytest.raises(UnhashableError, match="which is imported from elsewhere"):
        _key()
    assert name not in sys.modules


def test_a_library_without_metadata_makes_the_key_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version is in no key."""
    known = owner_of

    def none_of_the_quantizer(name: str, folder: Path) -> importlib.metadata.Distribution | None:
        return None if name == "ai-edge-quantizer" else known(name, folder)

    environment._installed.cache_clear()
    monkeypatch.setattr(environment, "owner_of", none_of_the_quantizer)
    with pytest.raises(UnhashableError, match="ai_edge_quantizer, whose distribution is not known"):
        environment.libraries()
    environment._installed.cache_clear()


def test_a_loaded_library_from_elsewhere_makes_the_key_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one that is no package at all."""
    monkeypatch.setitem(sys.modules, "immutabledict", types.ModuleType("immutabledict"))
    environment._installed.cache_clear()
    with pytest.raises(UnhashableError, match="immutabledict, which was made in memory"):
        _key()


def test_the_place_of_a_virtual_environment_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script's first line has the path of its interpreter; a changed list of files counts."""

    class Installed(importlib.metadata.Distribution):
        def __init__(self, module: str, script: str) -> None:
            self.record = f"net/__init__.py,sha256={module},1\n../../../bin/net,sha256={script},2"

        def read_text(self, filename: str) -> str | None:
            return self.record if filename == "RECORD" else "Version: 1\n"

        def locate_file(self, path: Any) -> Any:
            return path

    found = []
    for hashes in ("ab", "ac", "db"):
        monkeypatch.setattr(
            environment, "owner_of", lambda name, folder, given=hashes: Installed(*given)
        )
        found.append(environment._installed.__wrapped__(("numpy",), ()))
    assert found[0] == found[1] != found[2]
