"""
Targets as users write them: `arm64 = qemu-aarch64-static -L /opt/arm64 /opt/arm64/usr/bin/python3`.

This module is cheap to import: the plugin reads targets before any test runs.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence

from pytest_edgeq.names import DEFAULT_RUNTIME, GPU_KERNELS

KERNELS: tuple[str, ...] = ("xnnpack", "builtin", "reference", *GPU_KERNELS)
"""What a target can run a file on."""

_LINE = re.compile(r"\s*([^\s=]+)\s*=\s*(\S.*)", re.DOTALL)


def parse_targets(lines: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Read targets, one a line: the words of each command by name."""
    found: dict[str, tuple[str, ...]] = {}
    for line in lines:
        if not line.strip():
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            raise ValueError(
                f"expected NAME = COMMAND, got {line!r}\n"
                '  for example "pi = ssh -T pi@board.local python3"'
            )
        name, text = match.groups()
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ValueError(f"{name}: the command cannot be read: {error}: {text}") from None
        if name in found:
            raise ValueError(f"{name!r} is given twice")
        expanded = [os.path.expandvars(os.path.expanduser(word)) for word in words]  # noqa: PTH111
        found[name] = checked_command(name, expanded)
    return found


def checked_command(name: str, command: object) -> tuple[str, ...]:
    """Return a command as a tuple of words."""
    if os.name != "posix":
        raise ValueError(f"target {name!r}: targets need Linux or macOS")
    if isinstance(command, str) or not isinstance(command, Sequence):
        raise TypeError(f"target {name!r}: expected a list of words, got {command!r}")
    words = [os.fspath(word) if isinstance(word, os.PathLike) else word for word in command]
    if not all(isinstance(word, str) for word in words):
        raise TypeError(f"target {name!r}: expected a list of words, got {command!r}")
    if not words:
        raise ValueError(f"target {name!r}: the command is empty")
    return tuple(words)


def split_runtime(runtime: str, targets: Mapping[str, object]) -> tuple[str, str] | None:
    """
    Return the target and the kernels of a runtime; None for one of the session's own process.

    The GPU of this machine is the target `gpu`: its driver may crash, and runs in a process.
    """
    if runtime in GPU_KERNELS:
        return GPU_KERNELS[0], runtime
    name, colon, kernels = runtime.partition(":")
    if name not in targets or (colon and kernels not in KERNELS):
        return None
    return name, kernels or DEFAULT_RUNTIME
