"""Which libraries are used where several are, or none is."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fixtures.models import ResidualNet, samples, seeded
from pytest_edgeq import Edgeq
from pytest_edgeq.litert import libraries
from pytest_edgeq.versions import StackError


@pytest.fixture(autouse=True)
def _imported() -> None:
    """Import the libraries whole: an import that stops half-way would break later tests."""
    libraries.load_exporter()
    for name in ("backend.inline_consts", "quantize.pt2e_quantizer"):
        libraries.converter_module(name)


@pytest.mark.parametrize("quantizer", [None, "pt2e_static_int8", "recipe_dynamic_wi8_afp32"])
def test_no_converter_is_installed(
    maker: Edgeq, monkeypatch: pytest.MonkeyPatch, quantizer: str | None
) -> None:
    """The error is ours, not one of a model that the converter refuses."""
    # So Python writes down that a module is not there.
    monkeypatch.setitem(sys.modules, "litert_torch", None)
    with pytest.raises(ModuleNotFoundError, match=r"^pytest-edgeq needs litert-torch, and the pac"):
        maker.quantize(seeded(ResidualNet), ResidualNet.sample_inputs(), quantizer=quantizer)


def test_the_newer_recipe_library_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """litert-torch brings the older one along; who installs the newer one means it."""
    package = tmp_path / "litert_quantizer"
    package.mkdir()
    for name in ("__init__.py", "recipe.py"):
        (package / name).touch()
    monkeypatch.syspath_prepend(tmp_path)

    try:
        assert libraries.recipe_module("recipe").__name__ == "litert_quantizer.recipe"
    finally:
        for name in ("litert_quantizer", "litert_quantizer.recipe"):
            sys.modules.pop(name, None)


PRIVATE = [
    ("litert_torch.backend.inline_consts", "_ConstantFingerprint", None),
    ("litert_torch.quantize.pt2e_quantizer_utils", "get_source_partitions", "pt2e_static_int8"),
    ("torch.fx.config", "do_not_emit_stack_traces", None),
    ("torchao.quantization.pt2e.quantizer", "QuantizationSpec", "pt2e_static_int8"),
]


@pytest.mark.parametrize(("module", "name", "quantizer"), PRIVATE)
def test_a_release_that_renames_a_name(
    maker: Edgeq, monkeypatch: pytest.MonkeyPatch, module: str, name: str, quantizer: str | None
) -> None:
    """One sentence names it, the stack and where the tried stacks stand."""
    monkeypatch.delattr(importlib.import_module(module), name)
    with pytest.raises(StackError) as caught:
        maker.quantize(
            seeded(ResidualNet),
            ResidualNet.sample_inputs(),
            quantizer=quantizer,
            calibration=samples(ResidualNet, 2),
        )
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"pytest-edgeq needs {module}.{name}, which this stack does not have: ")
    assert f"torch {torch.__version__}" in line
    assert line.endswith("tried stacks: edgeq docs reference/versions")


def test_a_module_that_is_gone(maker: Edgeq, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not "install litert-torch", which is there."""
    monkeypatch.setitem(sys.modules, "litert_torch.backend.inline_consts", None)
    with pytest.raises(StackError, match=r"needs litert_torch\.backend\.inline_consts, which"):
        maker.quantize(seeded(ResidualNet), ResidualNet.sample_inputs(), quantizer=None)


def test_names_that_a_model_looks_up_are_its_own(maker: Edgeq) -> None:
    """A user's mistake is no matter of releases."""

    class Mistaken(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = torch.no_such_function(x)  # type: ignore[attr-defined]
            return made

    with pytest.raises(RuntimeError, match="no_such_function") as caught:
        maker.quantize(Mistaken().eval(), (torch.ones(1, 2),), quantizer=None)
    assert not isinstance(caught.value, StackError)


LOAD = """
import sys
import torch
import torch._ops, torch._subclasses.fake_tensor, torch.fx.graph, torch.utils._pytree
from fixtures.models import ResidualNet, samples, seeded
from pytest_edgeq import Edgeq

edgeq = Edgeq()
model = seeded(ResidualNet)
for holder, names in {
    torch._ops: ["OpOverload", "OpOverloadPacket", "HigherOrderOperator"],
    torch._subclasses.fake_tensor: ["FakeTensor"],
    torch.fx.graph: ["_PyTreeCodeGen", "_PyTreeInfo"],
}.items():
    for name in names:
        delattr(holder, name)
loaded = edgeq.load(sys.argv[1], reference=model)
import pytest_edgeq.litert as litert
for name in litert._MODULES:
    getattr(litert, name)
print("loaded", bool(loaded.op_dtypes.to_dict()))
"""


@pytest.mark.slow
def test_a_file_is_loaded_whatever_torch_renames(maker: Edgeq) -> None:
    """No private name of torch is looked up when this package is imported."""
    path = maker.quantize(seeded(ResidualNet), ResidualNet.sample_inputs(), quantizer=None).path
    run = subprocess.run(
        [sys.executable, "-c", LOAD, str(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        timeout=100,
    )
    assert run.stdout == "loaded True\n", run.stderr
