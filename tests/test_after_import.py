"""A function runs once a module has been imported, whoever imports it and when."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from pytest_edgeq import _after_import as after_import


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that modules are imported from."""
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    yield tmp_path
    sys.meta_path[:] = before
    for name in ("edgeq_one", "edgeq_other", "edgeq_broken"):
        sys.modules.pop(name, None)


def test_a_module_that_comes_later(folder: Path) -> None:
    """It is whole when the function sees it, and has its own loader afterwards."""
    (folder / "edgeq_one.py").write_text("def f():\n    return 1\n")
    (folder / "edgeq_other.py").write_text("")
    seen: list[tuple[ModuleType, bool]] = []
    after_import(["edgeq_one"], lambda module: seen.append((module, hasattr(module, "f"))))

    importlib.import_module("edgeq_other")
    assert not seen
    module = importlib.import_module("edgeq_one")
    importlib.import_module("edgeq_one")

    assert seen == [(module, True)]
    assert inspect.getsource(module.f) == "def f():\n    return 1\n"
    importlib.reload(module)
    assert len(seen) == 2


def test_a_module_that_was_imported_before(folder: Path) -> None:
    """The function is called at once."""
    (folder / "edgeq_one.py").write_text("")
    module = importlib.import_module("edgeq_one")
    seen: list[ModuleType] = []

    after_import(["edgeq_one"], seen.append)

    assert seen == [module]


def test_a_module_that_is_not_there_or_fails(folder: Path) -> None:
    """Whoever imports it gets the error that there would be anyway."""
    (folder / "edgeq_broken.py").write_text("1 / 0\n")
    seen: list[ModuleType] = []
    after_import(["edgeq_one", "edgeq_broken"], seen.append)

    with pytest.raises(ModuleNotFoundError, match="edgeq_one"):
        importlib.import_module("edgeq_one")
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("edgeq_broken")
    assert not seen
