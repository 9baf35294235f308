"""Which libraries are used where several are, or none is."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pytest_edgeq
from fixtures.models import ResidualNet, seeded
from pytest_edgeq import Edgeq
from pytest_edgeq.litert import libraries

ROOT = Path(pytest_edgeq.__file__).parent


@pytest.fixture
def installed(tmp_path: Path) -> Callable[[str, str, str], None]:
    """Put a package with its metadata where only the test finds it."""

    def install(distribution: str, version: str, source: str) -> None:
        package = tmp_path / distribution.replace("-", "_")
        package.mkdir()
        (package / "__init__.py").write_text(source, encoding="utf-8")
        metadata = tmp_path / f"{package.name}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n", encoding="utf-8"
        )

    return install


@pytest.mark.parametrize("quantizer", [None, "pt2e_static_int8", "recipe_dynamic_wi8_afp32"])
def test_no_converter_is_installed(
    maker: Edgeq, monkeypatch: pytest.MonkeyPatch, quantizer: str | None
) -> None:
    """The error is ours, not one of a model that the converter refuses."""
    # So Python writes down that a module is not there.
    monkeypatch.setitem(sys.modules, "litert_torch", None)
    with pytest.raises(ModuleNotFoundError, match=r"^pytest-edgeq needs litert-torch, and the pac"):
        maker.quantize(seeded(ResidualNet), ResidualNet.sample_inputs(), quantizer=quantizer)


@pytest.mark.parametrize("name", ["observer", "quantizer", "quantize_pt2e", "utils"])
def test_pt2e_is_taken_from_where_the_converter_has_it(name: str) -> None:
    """The observers of another copy would not be known to the converter's quantizer."""
    quantizer = libraries.converter_module("quantize.pt2e_quantizer").PT2EQuantizer
    module = libraries.pt2e_module(name)

    assert module.__name__ == f"torchao.quantization.pt2e.{name}"
    assert issubclass(quantizer, libraries.pt2e_module("quantizer").Quantizer)


def test_the_newer_recipe_library_comes_first(
    tmp_path: Path,
    installed: Callable[[str, str, str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """litert-torch brings the older one along; who installs the newer one means it."""
    installed("litert-quantizer", "0.11.0", "")
    (tmp_path / "litert_quantizer" / "recipe.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    try:
        assert libraries.recipe_module("recipe").__name__ == "litert_quantizer.recipe"
    finally:
        for name in ("litert_quantizer", "litert_quantizer.recipe"):
            sys.modules.pop(name, None)


# What has two names, or stands in two places.
BOTH_NAMES = (
    "litert_torch.",
    "ai_edge_torch.",
    "ai_edge_quantizer.",
    "litert_quantizer.",
    "torchao.quantization.pt2e.",
    "torch.ao.quantization.pt2e.",
)


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize(
    "path", sorted(ROOT.joinpath("litert").glob("*.py")), ids=lambda path: path.name
)
def test_one_place_knows_the_names(path: Path) -> None:
    """No module imports by one name what may be installed under another."""
    names = _imported(ast.parse(path.read_text(encoding="utf-8")))

    assert [name for name in names if f"{name}.".startswith(BOTH_NAMES)] == []
