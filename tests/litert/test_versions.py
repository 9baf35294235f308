"""Which libraries are used where several are, or none is, or one of an older name."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pytest_edgeq
from fixtures.models import ResidualNet, seeded
from pytest_edgeq import Edgeq
from pytest_edgeq.litert import libraries

ROOT = Path(pytest_edgeq.__file__).parent
# Word for word what ai-edge-torch 0.7.2 holds, with the class of the warning as a string.
SHIM = """
import warnings

warnings.warn(
    "'ai-edge-torch' is deprecated and has been renamed to 'litert-torch'.",
    DeprecationWarning,
    stacklevel=2,
)
"""
# How ai-edge-torch 0.7.1 begins to fail beside a newer torch.
TOO_OLD = "from torch.ao.quantization.pt2e.graph_utils import find_sequential_partitions\n"


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


@pytest.fixture
def without_litert_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The installed converter is not found; what stands in the test's folder is."""
    # So Python writes down that a module is not there.
    monkeypatch.setitem(sys.modules, "litert_torch", None)
    monkeypatch.syspath_prepend(tmp_path)
    libraries.converter_name.cache_clear()
    yield
    libraries.converter_name.cache_clear()
    sys.modules.pop("ai_edge_torch", None)


def _import_error(statement: str, path: Path) -> str:
    """What an interpreter without the libraries, and with a folder, says to a statement."""
    script = (
        f"import sys; sys.path.insert(0, {str(path)!r})\n"
        "gone = ['litert_torch', 'ai_edge_quantizer', 'litert_quantizer']\n"
        "sys.modules.update(dict.fromkeys(gone))\n"
        "from pytest_edgeq.litert import libraries\n"
        f"try:\n    {statement}\nexcept ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT.parent,
        timeout=100,
    )
    return done.stdout.strip()


def test_no_converter_is_installed(tmp_path: Path) -> None:
    """Both names, and which torch the older one is for."""
    told = _import_error("libraries.converter_module()", tmp_path)

    assert told == (
        "no converter from torch to .tflite is installed: pip install litert-torch, or, where "
        "torch is older than 2.10, ai-edge-torch==0.7.1"
    )


def test_the_package_that_only_points_to_its_new_name(
    tmp_path: Path, installed: Callable[[str, str, str], None]
) -> None:
    """ai-edge-torch 0.7.2 can be imported and has no API: its version and the way out are told."""
    installed("ai-edge-torch", "0.7.2", SHIM)
    told = _import_error("libraries.converter_module()", tmp_path)

    assert told == (
        "ai-edge-torch 0.7.2 is an empty package that points to its new name: it converts "
        "nothing. pip install litert-torch, or, where torch is older than 2.10, "
        "ai-edge-torch==0.7.1"
    )


@pytest.mark.parametrize("quantizer", [None, "pt2e_static_int8", "recipe_dynamic_wi8_afp32"])
@pytest.mark.usefixtures("without_litert_torch")
def test_a_user_is_told_whatever_the_flow(
    maker: Edgeq, installed: Callable[[str, str, str], None], quantizer: str | None
) -> None:
    """The error is ours, not one of a model that the converter refuses."""
    installed("ai-edge-torch", "0.7.2", SHIM)
    with pytest.raises(ImportError, match=r"^ai-edge-torch 0\.7\.2 is an empty package"):
        maker.quantize(seeded(ResidualNet), ResidualNet.sample_inputs(), quantizer=quantizer)


@pytest.mark.usefixtures("without_litert_torch")
def test_the_older_converter_beside_a_newer_torch(
    maker: Edgeq, installed: Callable[[str, str, str], None]
) -> None:
    """ai-edge-torch 0.7.1 fails in its own imports: both versions are told."""
    installed("ai-edge-torch", "0.7.1", TOO_OLD)
    with pytest.raises(
        ImportError, match=r"ai-edge-torch 0\.7\.1 cannot be imported beside torch 2\..*older than"
    ):
        maker.quantize(seeded(ResidualNet), ResidualNet.sample_inputs(), quantizer=None)


@pytest.mark.usefixtures("without_litert_torch")
def test_the_older_converter_is_used_where_it_is_the_one(
    installed: Callable[[str, str, str], None],
) -> None:
    """With an API it is the converter, and its backend has another name."""
    installed("ai-edge-torch", "0.7.1", "def convert(): ...\n")

    assert libraries.converter_module().__name__ == "ai_edge_torch"
    with pytest.raises(ModuleNotFoundError, match=r"ai_edge_torch\.odml_torch"):
        libraries.converter_module("backend.optimization_barrier")


def test_the_newer_converter_comes_first(
    tmp_path: Path,
    installed: Callable[[str, str, str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside litert-torch the older name is never imported: 0.7.2 depends on it, and warns."""
    installed("ai-edge-torch", "0.7.2", SHIM)
    monkeypatch.syspath_prepend(tmp_path)
    libraries.converter_name.cache_clear()

    assert libraries.converter_module().__name__ == "litert_torch"
    assert "ai_edge_torch" not in sys.modules


@pytest.mark.parametrize("name", ["observer", "quantizer", "quantize_pt2e", "utils"])
def test_pt2e_is_taken_from_where_the_converter_has_it(name: str) -> None:
    """The observers of another copy would not be known to the converter's quantizer."""
    quantizer = libraries.converter_module("quantize.pt2e_quantizer").PT2EQuantizer
    module = libraries.pt2e_module(name)

    assert module.__name__ == f"torchao.quantization.pt2e.{name}"
    assert issubclass(quantizer, libraries.pt2e_module("quantizer").Quantizer)


def test_no_recipe_library_is_installed(tmp_path: Path) -> None:
    """Both names are told."""
    told = _import_error("libraries.recipe_module('recipe')", tmp_path)

    assert told.startswith("recipes need ai-edge-quantizer (litert-quantizer from 0.11 on), and")


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
