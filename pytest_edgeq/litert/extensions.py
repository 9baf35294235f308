"""Find registrations, patches and changed constants of other code in the loaded libraries."""

from __future__ import annotations

import dataclasses
import enum
import functools
import gc
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import is_
from pathlib import Path
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, Final

from pytest_edgeq.litert.source_constants import constants_of_source

_CHAIN: Final = (
    "litert_torch.",
    "ai_edge_torch.",
    "ai_edge_quantizer.",
    "litert_quantizer.",
    "ai_edge_litert.",
    "torchao.",
    "torch.ao.quantization.",
)
"""Beginnings of the names of modules that are looked into, each followed by a dot."""

_DECOMPOSITIONS: Final = ("torch._decomp", "torch._decomp.decompositions")
"""Looked into by themselves: other modules beside them hold state that each export changes."""

_NOT_THEIRS: Final = frozenset(
    {"__annotations__", "__dataclass_fields__", "__loader__", "__spec__", "__warningregistry__"}
)
"""Attributes that Python itself sets on modules and classes, and updates at run time."""

_WITH_CONSTANTS: Final = ("litert_torch.quantize.",)
"""
PT2E's quantizer, whose source is read, too: 2,000 lines in 12 ms.

The 18,000 lines of ai-edge-quantizer take 0.1 s, which a conversion must not cost.
"""

_PACKAGES: Final = frozenset(
    {
        *(name.partition(".")[0] for name in _CHAIN),
        "PIL",
        "absl",
        "backports",
        "flatbuffers",
        "functorch",
        "google",
        "huggingface_hub",
        "immutabledict",
        "jax",
        "jaxlib",
        "litert_converter",
        "litert_lm_builder",
        "ml_dtypes",
        "nanobind",
        "numpy",
        "packaging",
        "pytest_edgeq",
        "rich",
        "safetensors",
        "scipy",
        "sympy",
        "tensorflow",
        "torchgen",
        "tqdm",
        "transformers",
        "triton",
        "typing_extensions",
        "xdsl",
    }
)
"""Packages that those modules import names from, and ours, whose source is in every key."""

_STANDARD: Final = frozenset(sys.stdlib_module_names) - {"unittest"}
"""Without `unittest.mock`, whose objects stand for a function of anybody's."""

_STANDARD_FILES: Final = sysconfig.get_path("stdlib") + os.sep

_PLAIN: Final = frozenset({str, int, float, bool, complex, bytes, type(None)})

_KERNELS: Final = ("aten/", "quantized_decomposed/")
"""Namespaces of the operators of graphs that torch itself defines."""

_REGISTRATION: Final = re.compile(r'^@register_annotator\("(\w+)"\)\s+def (\w+)', re.MULTILINE)
"""How PT2E's quantizer adds an annotator to its table: the op, and the function."""


class _Look:
    """
    One look at everything in the loaded modules of the chain.

    What is compared between two looks is the identity of each value: some 33,000, in 1.3 ms.

    Attributes:
        foreign: Names of functions and classes that are not the libraries' own, and where they are.
        constants: What the source sets to another value, by name.
    """

    def __init__(self, modules: Mapping[str, ModuleType]) -> None:
        self.foreign: set[str] = set()
        self._modules = list(modules.values())
        self._views: list[Callable[[], Iterable[Any]]] = []
        self._collections: list[list[Any] | set[Any]] = []
        self._seen: dict[int, Any] = {}
        self._own_files = tuple(_own_files())
        pending: list[tuple[str, Any]] = []
        for name, module in modules.items():
            pending.extend(self._inside(name, vars(module)))
        while pending:
            place, value = pending.pop()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                pending.extend(self._parts(place, value))
        self.constants = {**dict(_changed(modules)), **dict(_changed_annotators(modules))}
        self._values = self._watched()

    def is_current(self, modules: Mapping[str, ModuleType]) -> bool:
        """Whether a new look would see the same."""
        return _are_same(list(modules.values()), self._modules) and _are_same(
            self._watched(), self._values
        )

    def _watched(self) -> list[Any]:
        found: list[Any] = []
        # Each is copied at once: another thread may import a module meanwhile.
        for values in self._views:
            found.extend(values())
        for collection in self._collections:
            found.extend(collection)
        return found

    def _inside(self, place: str, mapping: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
        # torch 2.13's `CustomDecompTable` lists all operators when its own `items` are asked for.
        if isinstance(mapping, dict):
            self._views.append(functools.partial(dict.values, mapping))
        else:
            self._views.append(mapping.values)
        return self._worth_a_look(place, mapping)

    def _worth_a_look(self, place: str, mapping: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
        items = dict.items(mapping) if isinstance(mapping, dict) else mapping.items()
        for name, value in list(items):
            if type(value) not in _PLAIN and name not in _NOT_THEIRS:
                yield (f"{place}.{name}" if isinstance(name, str) else place), value

    def _parts(self, place: str, value: Any) -> Iterable[tuple[str, Any]]:
        """Return what a value consists of, as far as functions may be there; judge the value."""
        kind = type(value)
        if kind is FunctionType:
            if not self._is_own(value):
                self.foreign.add(f"{_name(value)} as {place}")
            return [(place, each) for each in gc.get_referents(*(value.__closure__ or ()))]
        if isinstance(value, (MethodType, classmethod, staticmethod)):
            return [(place, value.__func__), (place, getattr(value, "__self__", None))]
        if isinstance(value, property):
            return [(place, each) for each in (value.fget, value.fset, value.fdel)]
        if isinstance(value, functools.partial):
            return [(place, e) for e in (value.func, *value.args, *value.keywords.values())]
        if isinstance(value, functools.cached_property):
            return [(place, value.func)]
        if kind is _CACHED:
            return [(place, value.__wrapped__)]
        if isinstance(value, ModuleType):
            return ()
        owner = value if isinstance(value, type) else kind
        if not _is_known(owner):
            self.foreign.add(f"{owner.__module__}.{owner.__qualname__} as {place}")
            return ()
        is_of_chain = _is_looked_into(owner.__module__)
        if isinstance(value, type):
            return self._inside(place, vars(value)) if is_of_chain else ()
        parts: list[tuple[str, Any]] = []
        if isinstance(value, dict):
            parts.extend(self._inside(place, value))
        elif isinstance(value, (list, set)):
            self._collections.append(value)
            parts.extend((place, each) for each in list(value) if type(each) not in _PLAIN)
        elif isinstance(value, (tuple, frozenset)):
            parts.extend((place, each) for each in value if type(each) not in _PLAIN)
        elif isinstance(value, Mapping):
            parts.extend(self._worth_a_look(place, value))
        # torch 2.13's `CustomDecompTable`, a dict, keeps its functions in an attribute.
        if (is_of_chain or isinstance(value, dict)) and not isinstance(value, enum.Enum):
            state = getattr(value, "__dict__", {})
            frozen = getattr(getattr(kind, "__dataclass_params__", None), "frozen", False)
            parts.extend((self._worth_a_look if frozen else self._inside)(place, state))
        return parts

    def _is_own(self, function: Any) -> bool:
        """
        Whether a function's code is of one of the packages, or of the standard library.

        `functools.wraps` gives a function another's name and module, and cannot move its code.
        """
        file: str = function.__code__.co_filename
        if file.startswith("<"):  # generated, by a dataclass for instance
            module = function.__globals__.get("__name__", "")
            return module.startswith("namedtuple_") or _is_known_name(module)
        if file.startswith(self._own_files):
            return True
        return file.startswith(_STANDARD_FILES) and "-packages" not in file


@functools.lru_cache(maxsize=1)
def _cached() -> None:
    """Be of the type that functions have which `functools.lru_cache` wraps."""


_CACHED: Final = type(_cached)


class _Latest:
    """Holds the latest look of this process."""

    look: _Look | None = None


def _look() -> _Look:
    modules = {
        name: module
        for name, module in list(sys.modules.items())
        if _is_looked_into(name) and isinstance(module, ModuleType)
    }
    if _Latest.look is None or not _Latest.look.is_current(modules):
        _Latest.look = _Look(modules)
    return _Latest.look


@dataclasses.dataclass(frozen=True, slots=True)
class Extensions:
    """
    What other code has put into the loaded libraries.

    Attributes:
        foreign: Names of functions, classes and kernels, and where they were put.
        constants: Constants that are not what the libraries' source says, by name.
    """

    foreign: list[str]
    constants: Mapping[str, Any]


def find_extensions() -> Extensions:
    """
    Return what other code has put into the loaded libraries, whichever way it came there.

    A function of a library's own in another's place is not found, nor is one that was removed,
    but for the annotators of PT2E.
    """
    look = _look()
    return Extensions(sorted([*look.foreign, *_foreign_kernels()]), look.constants)


def _foreign_kernels() -> list[str]:
    """Return kernels of torch's operators that are written in Python, and not torch's own."""
    import torch.library

    names = [name for name in list(torch.library._impls) if name.startswith(_KERNELS)]
    # torch's own 1,300 kernels for shapes alone show in the graphs that are made by them.
    return [f"the kernel {n}" for n in names if not n.endswith("/Meta") and not _is_torchs(n)]


def _is_torchs(kernel: str) -> bool:
    """
    Whether a file of torch registered a kernel.

    Code that calls `torch.library.impl` is not named there, but `torch/library.py` is; torch 2.13
    itself has no such kernel.
    """
    import torch

    namespace, name, key = kernel.split("/")
    dump = torch._C._dispatch_dump(f"{namespace}::{name}")
    found = re.search(rf"^{key}(?:\[alias\])?: registered at (.*):\d+ ::", dump, re.MULTILINE)
    file = "" if found is None else found[1]
    folder = str(Path(torch.__file__).parent) + os.sep
    return file.startswith(folder) and file != f"{folder}library.py"


@functools.cache
def _is_looked_into(module: str) -> bool:
    return f"{module}.".startswith(_CHAIN) or module in _DECOMPOSITIONS


def _are_same(values: list[Any], before: list[Any]) -> bool:
    return len(values) == len(before) and all(map(is_, values, before))


def _own_files() -> Iterator[str]:
    """Beginnings of the names of the packages' files."""
    for name in _PACKAGES:
        module = sys.modules.get(name)
        places = getattr(module, "__path__", None)
        if places is not None:
            yield from (place + os.sep for place in places)
        elif module is not None and module.__file__:
            yield module.__file__


def _is_known(kind: type) -> bool:
    return _is_known_name(kind.__module__)


def _is_known_name(module: str) -> bool:
    root = module.partition(".")[0]
    return root in _PACKAGES or root in _STANDARD


def _name(function: Any) -> str:
    code = function.__code__
    qualified = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has only the latter
    return f"{function.__globals__.get('__name__')}.{qualified}"


def _changed(modules: Mapping[str, ModuleType]) -> Iterator[tuple[str, Any]]:
    for name, module in modules.items():
        file = getattr(module, "__file__", None)
        if not f"{name}.".startswith(_WITH_CONSTANTS) or not file or not file.endswith(".py"):
            continue
        for (kind, constant), value in constants_of_source(Path(file)).items():
            holder = vars(module).get(kind) if kind else module
            if kind and not (isinstance(holder, type) and holder.__module__ == name):
                continue
            now = vars(holder).get(constant, value)
            if isinstance(now, MemberDescriptorType):  # of a dataclass with slots
                continue
            if type(now) is not type(value) or now != value:
                yield ".".join(filter(None, (name, kind, constant))), now


def _changed_annotators(modules: Mapping[str, ModuleType]) -> Iterator[tuple[str, Any]]:
    """Return the names of PT2E's annotators by op, where the source registers others."""
    for name, module in modules.items():
        table = getattr(module, "OP_TO_ANNOTATOR", None)
        if not f"{name}.".startswith(_WITH_CONSTANTS) or not isinstance(table, dict):
            continue
        if not name.endswith("_utils") or not module.__file__:  # others import it
            continue
        registered = dict(_REGISTRATION.findall(Path(module.__file__).read_text(encoding="utf-8")))
        now = {op: getattr(each, "__name__", "") for op, each in table.items()}
        if registered and now != registered:
            yield f"{name}.OP_TO_ANNOTATOR", now
