"""
Every option of the plugin, each declared once.

One stem gives three spellings: the flag `--edgeq-x-y`, the ini name `edgeq_x_y` and the dest
`edgeq_x_y`.
A flag that was not given is None, so that it can be told from one that repeats the default;
the default stands in the ini.
The command line beats the marker, the marker beats the ini; but the quantizers that a marker names
belong to what the test asserts, and nothing overrides them.

- `declared`: every option. `values`: what its text means. `settings`: what all came to.
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
