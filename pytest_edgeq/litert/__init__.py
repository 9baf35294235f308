"""
A common interface to the converter and the quantizer libraries.

Nothing outside this folder imports litert_torch, torchao or ai_edge_quantizer, so that their
releases affect one place. Each shim names the versions and the symptom, and has a test in
`tests/litert/` that fails when it is no longer needed.

- `libraries` imports them, and finds rules that others have registered; `converter` converts, with
  native steps in another process (`native`); `exported` rewrites exported graphs before.
- PT2E quantizers: `pt2e_graphs`, `configs`, `annotations`, `histograms`, `simulated`, `mixed`.
  Training: `qat`. FX mode: `fx`. `quantize_`: `ao`, `weights`. Recipes: `recipes`, `rules`.
- `graphs` stores torch graphs without pickles, `digest` hashes them.

The package has the public names of these modules.
"""

# ruff: noqa: F403

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_edgeq.litert.ao import *
    from pytest_edgeq.litert.configs import *
    from pytest_edgeq.litert.converter import *
    from pytest_edgeq.litert.exported import *
    from pytest_edgeq.litert.fx import *
    from pytest_edgeq.litert.libraries import *
    from pytest_edgeq.litert.mixed import *
    from pytest_edgeq.litert.native import *
    from pytest_edgeq.litert.pt2e_graphs import *
    from pytest_edgeq.litert.qat import *
    from pytest_edgeq.litert.recipes import *
    from pytest_edgeq.litert.rules import *
    from pytest_edgeq.litert.simulated import *
    from pytest_edgeq.litert.weights import *

# Steps in other processes run without torch, which the modules of the second row import.
_MODULES = (
    *("configs", "libraries", "recipes", "rules", "weights"),
    *("ao", "converter", "exported", "fx", "mixed", "pt2e_graphs", "qat", "simulated"),
)


def __getattr__(name: str) -> Any:
    """Import a module with the first use of one of its names."""
    for each in _MODULES if name[0] != "_" else ():
        module = importlib.import_module(f"{__name__}.{each}")
        if name == each or name in vars(module):
            return vars(module).get(name, module)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
