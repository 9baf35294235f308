"""Which libraries are used where several are, or none is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fixtures.models import ResidualNet, seeded
from pytest_edgeq import Edgeq
from pytest_edgeq.litert import libraries


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
