"""
Every option of the plugin, each declared once.

One stem has three spellings: the flag `--edgeq-x-y`, the ini name `edgeq_x_y` and the dest
`edgeq_x_y`.
A missing flag is None, which differs from the explicit default; the default is in the ini.

The command line overrides the marker, the marker overrides the ini; but the quantizers of a marker
are a part of the test's assertion, and nothing overrides them.

- `declared`: every option. `values`: parsers of their texts. `settings`: the resolved values.
- `on_ci`: whether this is CI.
"""

from __future__ import annotations

from pytest_edgeq.plugin.options.declared import OPTIONS, Option
from pytest_edgeq.plugin.options.on_ci import CI_VARIABLES, ci_variable
from pytest_edgeq.plugin.options.settings import Settings, add_options, resolve, target_options
from pytest_edgeq.plugin.options.values import Place, quantizer_of, runtime_of

__all__ = [
    "CI_VARIABLES",
    "OPTIONS",
    "Option",
    "Place",
    "Settings",
    "add_options",
    "ci_variable",
    "quantizer_of",
    "resolve",
    "runtime_of",
    "target_options",
]
