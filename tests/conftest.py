"""Shared by all tests; pytest allows `pytest_plugins` at the top only."""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import os
import sys
import zlib
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from _pytest import pytester

from pytest_edgeq.runtimes.workers.settings import available_cores
from pytest_edgeq.versions import loaded_torch
from tests.shared_cache import VARIABLE

pytest_plugins = ["pytester", "tests.roots", "tests.warm"]

# The examples run without the libraries that only tests need.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    # The same examples in every run; and no verdict on a machine that is busy with something else.
    settings.register_profile(
        "edgeq",
        derandomize=True,
        max_examples=50,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("edgeq")


PLACES = [sys.prefix, sys.base_prefix, str(Path(__file__).parents[1]), *filter(None, sys.path)]
"""Where modules stand that are of no project inside of a test."""

# torch, jax and TensorFlow hold millions of objects, and by default the garbage collector scans all
# of them every few seconds, a tenth of the time of the tests.
gc.set_threshold(100_000, 20, 20)

# Up to a minute a test: the last of them would run on one core alone.
LONGEST = (
    *("test_plugin_cache.py", "test_plugin_other_cpu.py", "test_docs_pages.py"),
    *("test_lowest.py", "test_packages.py", "test_runtime_tensorflow.py"),
    *("test_damaged_files.py", "test_kills.py", "test_detection.py", "test_hits.py"),
    *("test_local_pool.py", "test_plugin_library_output.py", "test_beyond.py", "test_consumers.py"),
    *("test_stacks.py", "test_efficientnet_gpu.py", "test_arm_install.py"),
)


stderr_key = pytest.StashKey[int]()


class _Modules:
    """
    What a run of pytest inside of a test drops behind it: the modules of its own project.

    pytester drops all that such a run imports. A library with code in C cannot be imported a
    second time, and of a module of ours there would be two, the first of which pickle refuses.
    """

    def __init__(self, preserve: object = None) -> None:
        self._before = dict(sys.modules)

    def restore(self) -> None:
        """Drop what has come and is the project's, and put back what it has replaced."""
        for name in sys.modules.keys() - self._before.keys():
            if _is_of_a_project(name):
                del sys.modules[name]
        sys.modules.update(self._before)


def _is_of_a_project(name: str) -> bool:
    module: ModuleType | None = sys.modules[name]
    if module is None:
        return True  # it keeps a library from being imported
    if getattr(module, "__spec__", None) is None:
        # Nothing has imported it: a library has made it, or a project in place of one of ours.
        return name.startswith("pytest_edgeq")
    file = getattr(module, "__file__", None)
    places = [file] if file is not None else getattr(module, "__path__", ())
    return not all(any(Path(place).is_relative_to(each) for each in PLACES) for place in places)


def pytest_configure(config: pytest.Config) -> None:
    """
    Share the cores among the workers.

    By default torch takes every core in each worker and in each process that a test starts. Where
    there are more threads than cores, each operator waits for a thread that does not run: 4 ms a
    call in place of 0.05 for what the observers of PT2E run on each sample.
    """
    if (worker := getattr(config, "workerinput", None)) is not None:
        threads = max(1, available_cores() // worker["workercount"])
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # --dist=loadfile takes files in our order
    config.stash[stderr_key] = os.dup(2)  # pytest captures what is written to the descriptor itself
    # mypy: a class cannot be assigned to.
    setattr(pytester, "SysModulesSnapshot", _Modules)  # noqa: B010


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """
    End a test that hangs, with the stacks of all threads on stderr.

    pytest-timeout's own thread writes them to the terminal, which a worker of pytest-xdist has not,
    and does not run while native code holds the interpreter's lock.
    """
    file = item.config.stash[stderr_key]
    faulthandler.dump_traceback_later(settings.timeout, exit=True, file=file)
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_cancel_timer() -> bool:
    """Let the test go on as long as it likes."""
    faulthandler.cancel_dump_traceback_later()
    return True


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """
    Mark what is slow of a sweep; run the longest tests first, then the files with many tests.

    Whatever `-m` has left, and in whatever order a plugin has brought it.
    """
    _mark_sweeps(items)
    yield
    sizes = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.name not in LONGEST, -sizes[item.path]))


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Quantize and compare outside of the fixture `edgeq`; writes into a folder of the module."""
    from pytest_edgeq import Edgeq

    return Edgeq(directory=tmp_path_factory.mktemp("maker"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed torch by the name of the test, before its fixtures: in any order it draws the same."""
    torch = loaded_torch()
    if torch is not None:
        torch.manual_seed(zlib.crc32(item.nodeid.encode()))


def _mark_sweeps(items: list[pytest.Item]) -> None:
    """
    Leave n cases to every run, spread over all of them; the others are slow.

    With `slow=m` the pipeline runs m of all cases, and the others are marked `full`, too.
    """
    sweeps: dict[tuple[Any, str, int, int | None], list[pytest.Function]] = {}
    for item in items:
        mark = item.get_closest_marker("sweep")
        if mark is not None and isinstance(item, pytest.Function):
            key = (item.parent, item.originalname, *mark.args, mark.kwargs.get("slow"))
            sweeps.setdefault(key, []).append(item)
    for (_, _, count, slow), cases in sweeps.items():
        # Whatever shuffles them, in the order of their definition.
        cases.sort(key=lambda case: tuple(case.callspec.indices.values()))
        counts = count, len(cases) if slow is None else slow
        always, pipeline = ({i * len(cases) // n for i in range(n)} for n in counts)
        for i, case in enumerate(cases):
            if i not in always:
                case.add_marker("slow")
            if i not in always | pipeline:
                case.add_marker("full")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """
    Let nobody scan the objects of the libraries any more.

    pytest collects garbage before its cleanups and after them, and Python does at exit: 2 s each.
    """
    gc.freeze()


def pytest_sessionstart(session: pytest.Session) -> None:
    """
    Let every `Edgeq()` of the tests share the run's conversion cache.

    So the tests, the workers of pytest-xdist and the processes that tests start convert each model
    once. Tests of the cache, and tests that change the libraries, turn it off.
    """
    from pytest_edgeq import Edgeq
    from pytest_edgeq.plugin.state import state_key

    directory = session.config.stash[state_key].cache_dir
    defaults = Edgeq.__init__.__kwdefaults__
    assert defaults is not None, "unreachable because it has keyword arguments"
    defaults["cache_dir"] = directory
    if directory is not None:
        os.environ[VARIABLE] = str(directory)
