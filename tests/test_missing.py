"""A library that is missing is named, with the command that installs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fixtures.tflite
import pytest_edgeq
from pytest_edgeq.quantize import conversion_refusals
from pytest_edgeq.quantize.conversion_refusals import refusal
from pytest_edgeq.versions import STACKS, naming_missing_libraries, requirement, untried, version_of

_STACK = {"litert-torch": "0.10.0", "torch": "2.13.0", "ai-edge-quantizer": "0.10.0"}
_FILE = next(Path(fixtures.tflite.__path__[0]).rglob("*.tflite"))
_INSTALLS = {"torch": "pytest-edgeq[convert]'"}
_USES = {"torch": "Edgeq().quantize(None, ())", "ai_edge_litert": f"Edgeq().load({str(_FILE)!r})"}


@pytest.mark.parametrize("package", _USES)
def test_the_distribution_and_the_command_are_named(package: str) -> None:
    """In place of Python's own error, in a process that cannot import the package."""
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        f"from pytest_edgeq import Edgeq\n{_USES[package]}"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100
    )

    distribution = package.replace("_", "-")
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith(
        f"ModuleNotFoundError: pytest-edgeq needs {distribution}, and the package {package} cannot "
        f"be imported: pip install '{_INSTALLS.get(package, distribution)}"
    )


def test_a_module_of_the_users_own_is_left_as_it_is() -> None:
    """The plugin has nothing to say about it."""
    with (
        pytest.raises(ModuleNotFoundError, match=r"^No module named 'not_there'$"),
        naming_missing_libraries(),
    ):
        import not_there  # type: ignore[import-not-found] # noqa: F401


def test_the_command_has_the_range_that_works() -> None:
    """As the metadata of pytest-edgeq say; of what another library brings the name alone."""
    assert requirement("click") == "click>=8.1"
    assert requirement("flatbuffers") == "flatbuffers"


def test_releases_that_were_not_tried_are_named() -> None:
    """By the nearest stack: a patch is no other release; a library alone was tried with others."""
    assert untried({"torch": "2.13.9+cpu", "torchao": None, "numpy": "9.9"}) == []
    assert list(map(str, untried({"torchao": "0.17.0"}))) == ["torchao 0.17.0 (tried: 0.18)"]
    assert untried({**_STACK, "torch": "2.14.1"}) == []
    (other,) = untried({**_STACK, "torch": "2.14.1", "litert-quantizer": "0.11.0"})
    assert str(other) == "litert-quantizer 0.11.0 (tried: without it)"
    assert other.requirement == ""


def test_a_nightly_names_the_files_that_it_has_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If both are installed, the later installation counts."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "litert_torch", raising=False)
    (tmp_path / "litert_torch").mkdir()
    (tmp_path / "litert_torch" / "__init__.py").touch()
    for age, name in enumerate(("litert_torch-0.10.0", "litert_torch_nightly-0.11.0.dev1")):
        folder = tmp_path / f"{name}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Version: {name.rpartition('-')[2]}\n")
        os.utime(folder, (age, age))
    version_of.cache_clear()
    try:
        assert version_of("litert-torch") == "0.11.0.dev1"
        version_of.cache_clear()
        os.utime(tmp_path / "litert_torch-0.10.0.dist-info", (9, 9))
        assert version_of("litert-torch") == "0.10.0"
    finally:
        version_of.cache_clear()


def _chained() -> Exception:
    error = RuntimeError("An error occurred when running the pass")
    error.__cause__ = AttributeError("no overload name 'Dimname'")
    return error


def test_a_refusal_of_a_release_that_was_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchao 0.17 fails on an ADD: the release and the innermost error are told."""
    monkeypatch.setattr(conversion_refusals, "producer", lambda: {"torchao": "0.17.0"})

    assert refusal("Net", "the quantizer", _chained(), is_annotated=True).splitlines() == [
        "the quantizer refuses Net: pytest-edgeq was not tried with torchao 0.17.0 (tried: 0.18)",
        "RuntimeError: An error occurred when running the pass",
        "cause: AttributeError: no overload name 'Dimname'",
        "fix: pip install 'torchao==0.18.*'",
    ]


def test_a_refusal_of_a_release_that_was_tried() -> None:
    """The hint, and the innermost error."""
    first, *_, last = refusal("Net", "the quantizer", _chained(), is_annotated=True).splitlines()

    assert first.startswith("the quantizer refuses Net: its annotations do not fit")
    assert last == "cause: AttributeError: no overload name 'Dimname'"


def test_the_page_of_versions_has_the_stacks() -> None:
    """One row each."""
    names = list(dict.fromkeys(name for row in STACKS for name in row))
    lines = [names, *([row.get(name, "–") for name in names] for row in STACKS)]
    table = [f"| {' | '.join(line)} |" for line in lines]
    table.insert(1, "|" + " --- |" * len(names))
    page = Path(pytest_edgeq.__file__).parent / "docs" / "reference" / "versions.md"
    assert "\n".join(table) in page.read_text("utf-8")
