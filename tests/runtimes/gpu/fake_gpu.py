"""An ai_edge_litert whose GPU is a fake, for a target or for the GPU of this machine."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import ai_edge_litert
import pytest

ENGINE = Path(__file__).with_name("fake_engine.py")


def fake_litert(folder: Path, **faults: Any) -> Path:
    """Make a folder from which ai_edge_litert is imported with a fake GPU that has these faults."""
    if importlib.util.find_spec("ai_edge_litert.options") is None:
        pytest.skip("ai-edge-litert here is from before its GPU engine had options")
    package = folder / "ai_edge_litert"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import runpy\n"
        f"__path__.append({str(Path(ai_edge_litert.__file__).parent)!r})\n"
        f"runpy.run_path({str(ENGINE)!r})['install']({faults!r})\n"
    )
    return folder


def fake_target(folder: Path, **faults: Any) -> list[str]:
    """Return the command of a target with a fake GPU."""
    return ["env", f"PYTHONPATH={fake_litert(folder, **faults)}", sys.executable]


def fake_here(monkeypatch: pytest.MonkeyPatch, folder: Path, **faults: Any) -> None:
    """Give this machine a fake GPU: its process imports what this one would."""
    monkeypatch.syspath_prepend(fake_litert(folder, **faults))
