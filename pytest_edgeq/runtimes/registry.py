"""
The runtimes of a session.

This module is cheap to import: the plugin checks the names of runtimes before any test runs.
"""

from __future__ import annotations

import copy
import functools
import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from pytest_edgeq.names import GPU_KERNELS, RUNTIMES, nearest
from pytest_edgeq.runtimes.workers.settings import DEFAULT_SECONDS
from pytest_edgeq.runtimes.workers.target_spec import KERNELS, split_runtime

if TYPE_CHECKING:
    from pytest_edgeq.numerics.target_machine import TargetMachine
    from pytest_edgeq.runtimes.engines import Engine
    from pytest_edgeq.runtimes.workers.policy import Isolation
    from pytest_edgeq.runtimes.workers.target import Target
    from pytest_edgeq.tflite.mapped import Buffer
    from pytest_edgeq.tflite.runtimes import Runtime


# Names that are valid in `--edgeq-runtime`, an ini file and a header line.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

_WHERE_TO_REGISTER = (
    "a runtime of your own comes from the pytest hook pytest_edgeq_runtimes(config), which must "
    "be in a plugin, or in a conftest.py that pytest reads before it collects: in the rootdir "
    "or the testpaths, or next to what the command line names; a target, such as a board, from "
    "edgeq_targets. Outside pytest: Edgeq(runtimes={name: runner}, targets={name: command})"
)
_NOT_FOR_BARE_FILES = (
    "a runtime of your own, or a target, is known to models from edgeq.quantize and edgeq.load "
    "only: instead of a path or bytes, give edgeq.load(path)"
)


class Runtimes:
    """The runtimes of a session: built-in ones, the user's own, and targets."""

    def __init__(
        self,
        own: Mapping[str, Runtime] = MappingProxyType({}),
        *,
        targets: Mapping[str, Target] = MappingProxyType({}),
        check_targets: Sequence[str] = (),
        seconds: float = DEFAULT_SECONDS,
        hint: str = _WHERE_TO_REGISTER,
    ) -> None:
        if not isinstance(own, Mapping):
            raise TypeError(f"runtimes: expected a dict of name → runner, got {type(own).__name__}")
        for name, runner in own.items():
            _check_name(name, "runtime")
            if not callable(runner):
                raise TypeError(
                    f"runtime {name!r}: expected a runner, called with the path of a .tflite file "
                    f"and a signature's key, got {type(runner).__name__}"
                )
        self.own = dict(own)
        for name in targets:
            _check_name(name, "target")
            if name in self.own:
                raise ValueError(f"runtimes: {name!r} is a runtime and a target")
        self.targets = dict(targets)
        self._seconds = seconds  # of the GPU of this machine
        self._here: list[Target] = []  # that GPU, once it was asked for
        self.isolation: Isolation | None = None
        self._hint = hint
        self._opened: weakref.WeakSet[Engine] = weakref.WeakSet()
        for name in check_targets:
            if split_runtime(name, self.targets) is None:
                known = (*GPU_KERNELS, *self._target_names)
                raise ValueError(
                    f"{name!r} names no target{nearest(name, known)}; targets: {', '.join(known)}"
                )
        self.check_targets = tuple(check_targets)

    def isolated(self, isolation: Isolation) -> Runtimes:
        """Return the same runtimes, whose files another opener opens."""
        other = copy.copy(self)
        other.isolation, other._opened = isolation, weakref.WeakSet()
        return other

    def builder(self, *, foreign: bool) -> Callable[[Buffer], None] | None:
        """Return the function that builds a file's interpreter; None for this process."""
        isolation = self.isolation
        return None if isolation is None else functools.partial(isolation.build, foreign=foreign)

    @property
    def names(self) -> tuple[str, ...]:
        """All valid names, the built-in ones first."""
        return (*RUNTIMES, *self.own, *self._target_names)

    @property
    def _target_names(self) -> list[str]:
        ends = ("", *(f":{kernels}" for kernels in KERNELS))
        return [f"{name}{end}" for name in self.targets for end in ends]

    def target_of(self, runtime: str) -> Target | None:
        """Return the target of a runtime; None for a runtime of this machine."""
        found = split_runtime(runtime, self.targets)
        if found is None or found[0] in self.targets:
            return None if found is None else self.targets[found[0]]
        if not self._here:
            # Only now, as it imports what this module is too cheap for.
            from pytest_edgeq.runtimes.workers.target import Target

            self._here.append(Target(found[0], [sys.executable], self._seconds, path=sys.path))
        return self._here[0]

    def machine_of(self, runtime: str) -> TargetMachine | None:
        """Return the machine of a target's runtime, starting it if necessary; else None."""
        target = self.target_of(runtime)
        return None if target is None else target.machine_for(self.kernels_of(runtime))

    @property
    def machines(self) -> tuple[TargetMachine, ...]:
        """The machines of the targets that were started."""
        used = (each.used for each in (*self.targets.values(), *self._here))
        return tuple(each for each in used if each is not None)

    def kernels_of(self, runtime: str) -> str:
        """Return the built-in runtime of a target's kernels, else the name itself."""
        found = split_runtime(runtime, self.targets)
        return runtime if found is None else found[1]

    def check(self, name: str) -> str:
        """Return the name of a runtime if it is valid."""
        if not isinstance(name, str) or name not in self.names:
            raise ValueError(
                f"unknown runtime {name!r}{nearest(str(name), self.names)}; "
                f"valid: {', '.join(self.names)}\n  {self._hint}"
            )
        return name

    def opened(self, runner: Engine) -> None:
        """Register a runner to be closed at the end of the session."""
        self._opened.add(runner)

    def close(self) -> None:
        """Close all open sessions of a user's own runtimes, and end the targets."""
        errors = []
        for target in (*self.targets.values(), *self._here):
            target.close()
        for runner in list(self._opened):
            try:
                runner.close()
            except Exception as error:  # the others are still closed
                errors.append(error)
        self._opened.clear()
        if errors:
            messages = "; ".join(f"{type(error).__name__}: {error}" for error in errors)
            raise RuntimeError(f"a runtime of yours could not be closed: {messages}") from errors[0]


def _check_name(name: object, kind: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"runtimes: expected a name, got {name!r}")
    if name in RUNTIMES:
        raise ValueError(
            f"runtimes: {name!r} is the name of a built-in runtime ({', '.join(RUNTIMES)}); give "
            "yours another"
        )
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"runtimes: {name!r} is no name for a {kind}: letters, digits, '_', '.' and '-'"
        )


BUILT_IN = Runtimes(hint=_NOT_FOR_BARE_FILES)
"""The runtimes of a file that no session opened."""
