"""A package of ai-edge-litert for a local target, with code of a test behind its interpreter."""

from __future__ import annotations

import sys
from pathlib import Path

import ai_edge_litert

__all__ = ["patched_litert"]


def patched_litert(folder: Path, code: str) -> list[str]:
    """
    Return the command of a local target whose interpreter module ends with this code.

    Args:
        folder: Takes the package; new.
        code: Changes `Interpreter`.
    """
    package, real = folder / "ai_edge_litert", Path(ai_edge_litert.__file__).parent
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"__path__.append({str(real)!r})\n")
    (package / "interpreter.py").write_text(f"{(real / 'interpreter.py').read_text()}\n{code}\n")
    return ["env", f"PYTHONPATH={folder}", sys.executable]
