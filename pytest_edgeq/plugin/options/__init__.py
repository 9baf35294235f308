"""
Every option of the plugin, each declared once.

One stem gives three spellings: the flag `--edgeq-x-y`, the ini name `edgeq_x_y` and the dest
`edgeq_x_y`.
A flag that was not given is None, so that it can be told from one that repeats the default;
the default stands in the ini.
The command line beats the marker, the marker beats the ini; but the quantizers that a marker names
belong to what the test asserts, and nothing overrides them.

- `declared`: every option, and what all came to. `values`: what its text means.
"""

from __future__ import annotations

from pytest_edgeq.plugin.options.declared import (
    OPTIONS,
    Option,
    Settings,
    add_options,
    resolve,
    target_options,
)
from pytest_edgeq.plugin.options.values import (
    CI_VARIABLES,
    Place,
    ci_variable,
    quantizer_of,
    runtime_of,
)

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
