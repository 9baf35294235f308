"""Names of executors, as options spell them; cheap to import."""

from __future__ import annotations

import importlib.util
import os
import re

NEEDS_DASK = (
    "dask:ADDRESS needs dask.distributed, which is not installed: pip install 'pytest-edgeq[dask]'"
)

SPEC = re.compile(r"(?:processes:(?P<count>[1-9]\d*)|dask:(?P<address>\S+))")


def check_spec(text: str) -> str:
    """
    Return the name of a session's executor if it is valid; dask is looked for, not imported.

    Raises:
        ValueError: Neither `processes:N` nor `dask:ADDRESS`, or the former on Windows.
        ModuleNotFoundError: dask.distributed is not installed.
    """
    match = SPEC.fullmatch(text)
    if match is None:
        raise ValueError(
            f"executor: expected processes:N with N from 1, or dask:ADDRESS as in "
            f"dask:tcp://127.0.0.1:8786, got {text!r}"
        )
    if match["count"] and os.name != "posix":
        raise ValueError("executor: processes:N needs Linux or macOS; dask:ADDRESS does not")
    if match["address"] and importlib.util.find_spec("distributed") is None:
        raise ModuleNotFoundError(NEEDS_DASK)
    return text
