"""A GPU engine of recorded words, by which delegation is tested without a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pytest_edgeq.runtimes import delegation
from pytest_edgeq.runtimes.engines import Opening

VERSION = "TRANSPOSE_CONV: Max version supported: 3. Requested version 4."


def printed(words: str, *counts: str) -> str:
    """Return what ai-edge-litert 2.3.0 prints of each subgraph that it splits."""
    blocks = (
        f"ERROR: Following operations are not supported by GPU delegate:\n{words}\n{count}\n"
        "I0000 00:00:1.2   3 delegate_kernel.cc:984] Initializing WebGPU-based API from graph.\n"
        for count in counts
    )
    return "INFO: [delegate_webgpu.cc:363] Created a WebGPU environment.\n" + "".join(blocks)


def split(on_gpu: int, on_cpu: int) -> str:
    """Return the engine's count of ops."""
    cpu = f"{on_cpu} operations will run on the CPU."
    if not on_gpu:
        return f"No operations will run on the GPU, and all {cpu}"
    return f"{on_gpu} operations will run on the GPU, and the remaining {cpu}"


def use_words(
    monkeypatch: pytest.MonkeyPatch, whole: str, alone: Mapping[str, str]
) -> list[list[str]]:
    """
    Answer for a file with `whole`, and for an isolated op with its words.

    Returns:
        The names of the ops of each file that was compiled.
    """
    compiled: list[list[str]] = []

    def answer(opening: Opening) -> tuple[str, bool]:
        names = [op.name for op in opening.graph.ops]
        compiled.append(names)
        if opening.signature.key != "cut":
            return whole, "No operations" not in whole
        words = "\n".join(
            f"{name}: {alone[name]}" for name in dict.fromkeys(names) if name in alone
        )
        n_on_cpu = sum(name in alone for name in names)
        if not words:
            return printed(""), True
        return printed(words, split(len(names) - n_on_cpu, n_on_cpu)), n_on_cpu < len(names)

    monkeypatch.setattr(delegation, "_compile", answer)
    return compiled


def transposed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Answer as the engine does for `transposed.int8`."""
    words = VERSION.partition(": ")[2]
    return use_words(monkeypatch, printed(VERSION, split(6, 2)), {"TRANSPOSE_CONV": words})
