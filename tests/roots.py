"""Folders that are made once a run, the private roots among them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from pytest_edgeq.runtimes.workers.arm64_root import make_arm64_root
from pytest_edgeq.runtimes.workers.gpu_root import make_gpu_root
from pytest_edgeq.runtimes.workers.private_root import PrivateRootError, is_finished


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The temporary folder of the run, of all workers of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


Provide = Callable[[str, Callable[[Path], None]], Path]


@pytest.fixture(scope="session")
def once_a_run(run_folder: Path) -> Provide:
    """Make a folder once in a run, whichever worker of pytest-xdist asks first."""

    def provide(name: str, make: Callable[[Path], None]) -> Path:
        folder, done = run_folder / name, run_folder / f"{name}.done"
        with FileLock(run_folder / f"{name}.lock"):
            if not done.exists():
                make(folder)
                done.touch()
        return folder

    return provide


@pytest.fixture(scope="session")
def arm64_root(run_folder: Path) -> Path:
    """A root for 64-bit ARM, by `edgeq target arm64`."""
    return _root("arm64", make_arm64_root, run_folder)


@pytest.fixture(scope="session")
def arm64_command(arm64_root: Path) -> list[str]:
    """The command that starts the root's Python."""
    return make_arm64_root(arm64_root, say=unheard)


@pytest.fixture(scope="session")
def gpu_root(run_folder: Path) -> Path:
    """A root with a GPU in software, by `edgeq target gpu`."""
    return _root("gpu", make_gpu_root, run_folder)


@pytest.fixture(scope="session")
def gpu_command(gpu_root: Path) -> list[str]:
    """The command that starts a Python with LiteRT's GPU engine, in float16 and float32."""
    return make_gpu_root(gpu_root, say=unheard)


def _root(name: str, make_root: Callable[..., list[str]], run_folder: Path) -> Path:
    """
    Make a root where the variable says, else one of this run.

    It needs apt and a network, which no other test does: the tests that use it skip without them.
    """
    variable = f"EDGEQ_TEST_{name.upper()}"
    folder = Path(os.environ.get(variable, run_folder / name))
    try:
        if not is_finished(folder, has_gpu=name == "gpu"):
            # The first worker of pytest-xdist makes it for all.
            with FileLock(f"{folder}.lock"):
                make_root(folder, say=unheard)
    except PrivateRootError as error:
        pytest.skip(f"no {variable}=DIR of `edgeq target {name} DIR`, nor can it be made: {error}")
    return folder


def unheard(_: str) -> None:
    """Discard a line of progress."""
