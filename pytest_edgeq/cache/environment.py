"""Libraries, our own code and process settings: the part of a key that all models share."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import torch

from pytest_edgeq import litert
from pytest_edgeq.cache.digest import UnknownError, digest_of

_DISTRIBUTIONS: Final = (
    "absl-py",
    "flatbuffers",
    "immutabledict",
    "mpmath",
    "networkx",
    "opt-einsum",
    "scipy",
    "sympy",
    "torch",
    "torchao",
    "litert-torch",
    "ai-edge-torch",
    "litert-converter",
    "ai-edge-litert",
    "ai-edge-quantizer",
    "litert-quantizer",
    "jax",
    "jaxlib",
    "xdsl",
    "ml-dtypes",
    "numpy",
)

_SECOND_PIPELINE: Final = ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu")
"""Packages that litert-torch 0.10.0 imports in its second pipeline only."""

_MODULES: Final = {"absl-py": "absl", **dict.fromkeys(_SECOND_PIPELINE, "tensorflow")}
"""Packages by distribution, where the two names differ in more than hyphens."""

_VARIABLES: Final = (
    "TORCH",
    "LITERT",
    "ODML",
    "PYTORCH",
    "ATEN",
    "ONEDNN",
    "DNNL",
    "MKL",
    "XNNPACK",
    "JAX_",
    "XLA_",
    "TF_AUTO_MIXED_PRECISION_",
    "TF_DETERMINISTIC_",
    "TF_DISABLE_",
    "TF_ENABLE_",
    "TF_ONEDNN_",
    "TF_USE_",
    "TF_XLA_",
    "NPY_",
    "OPENBLAS",
    "ENABLE_GROUP_NORM_COMPOSITE",
    "LAYOUT_OPTIMIZE_PARTITIONER",
    "RESOURCE_CONSTANT_NUMEL_THRESHOLD",
)
"""
Beginnings of the names of environment variables that the libraries read.

TF_ alone would take Terraform's variables in, which differ with each run in CI. litert-torch 0.10.0
keeps its `config` in variables alone; the last three are its own.
"""

_SILENT: Final = frozenset(
    {
        "LITERT_TORCH_SHOW_PROGRESS",
        "LITERT_TORCH_SILENCE_TORCH_LOGS",
        "TORCHINDUCTOR_CACHE_DIR",
    }
)
"""Variables that change no result; the last one torch 2.13 sets itself, when it is imported."""

_CPU_INFO: Final = Path("/proc/cpuinfo")

_CPU: Final = (
    "vendor_id",
    "cpu family",
    "model",
    "model name",
    "cache size",
    "flags",
    "cpu",
    "isa",
    "CPU implementer",
    "CPU architecture",
    "CPU variant",
    "CPU part",
    "Features",
)
"""Lines of that file that kernels are chosen by."""

_FP32: Final = ("", "matmul", "conv", "rnn")
"""Kinds of operators whose precision oneDNN has a setting for; the first is of all others."""

_LATER: Final = frozenset(
    {"agree", "assertions", "executors", "kernels", "localize", "numerics", "snapshots"}
)
"""Packages of ours that look at what was converted; all others take part in a conversion."""


_CODE: Final = (".py", ".so", ".pyd", ".dll", ".dylib")


@functools.cache
def _installed(names: tuple[str, ...], path: tuple[str, ...]) -> dict[str, str]:
    """
    Return, by distribution, its version and a hash of its files.

    Raises:
        UnknownError: One of them is installed from a working tree, which may change at any time,
            or its code is imported from elsewhere.
    """
    found = {"python": sys.version}
    missing = set()
    for name in names:
        module = _module_of(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            missing.add(module)
            continue
        origin = distribution.read_text("direct_url.json")
        if origin is not None and json.loads(origin).get("dir_info", {}).get("editable"):
            raise UnknownError(f"{name}, which is installed from a working tree that may change")
        own = os.path.realpath(str(distribution.locate_file(module)))
        for place in _places(module):
            if os.path.realpath(place) != own:
                raise UnknownError(f"{name}, whose code is imported from elsewhere: {place}")
        found[name] = f"{distribution.version} {_files_digest(distribution)}"
    for module in missing - {_module_of(name) for name in found}:
        for place in _places(module):
            raise UnknownError(f"{module}, which is imported from {place} and has no version")
    return found


def _module_of(distribution: str) -> str:
    """Return the name of the package that a distribution installs."""
    return _MODULES.get(distribution, distribution.replace("-", "_"))


def _places(module: str) -> Sequence[str]:
    """Return the directories that a package is imported from, without importing it."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        return list(getattr(loaded, "__path__", ["memory"]))
    spec = importlib.util.find_spec(module)
    return [] if spec is None else list(spec.submodule_search_locations or [str(spec.origin)])


def _files_digest(distribution: importlib.metadata.Distribution) -> str:
    """
    Return a hash of the list of a distribution's files, and of code edited since the installation.

    Scripts, which lie outside of the packages, begin with the path of their interpreter: with them
    the cache of one virtual environment would not serve another one.
    """
    record = (distribution.read_text("RECORD") or "").splitlines()
    files = [line for line in record if not line.startswith("../")]
    edited = _edited(distribution, files)
    return hashlib.sha256("\n".join([*files, *edited]).encode()).hexdigest()


def _edited(distribution: importlib.metadata.Distribution, files: Sequence[str]) -> Iterator[str]:
    """
    Return the name and the hash of each file of code that was edited where it is installed.

    Only files are read whose size is not the one of the list, or that are newer than the list,
    which installers write last.
    """
    root = str(distribution.locate_file(""))
    rows = [line.rsplit(",", 2) for line in files if line.count(",") >= 2]
    lists = [Path(root, row[0]) for row in rows if row[0].endswith(".dist-info/RECORD")]
    if not lists or not lists[0].exists():
        return
    installed = lists[0].stat().st_mtime_ns
    for name, hashed, size in rows:
        if not hashed or not name.endswith(_CODE):
            continue
        path = Path(root, name)
        try:
            status = path.stat()
        except FileNotFoundError:
            yield f"{name} is gone"
            continue
        if str(status.st_size) == size and status.st_mtime_ns <= installed:
            continue
        digest = hashlib.sha256(path.read_bytes()).digest()
        told = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        if hashed != f"sha256={told}":
            yield f"{name} {told}"


@functools.cache
def own_code(package: Path) -> str:
    """Return a hash of the source of our package, as far as it takes part in a conversion."""
    hasher = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        if place.parts[0] not in _LATER:
            hasher.update(f"{place.as_posix()}\n".encode())
            hasher.update(hashlib.sha256(path.read_bytes()).digest())
    return hasher.hexdigest()


def libraries() -> dict[str, str]:
    """
    Return what identifies the code of every library in the chain, and ours.

    Raises:
        UnknownError: It cannot be identified: a working tree, or code that others put into it.
    """
    installed = _installed(_DISTRIBUTIONS, tuple(sys.path))
    found = litert.find_extensions()
    if found.foreign:
        raise UnknownError(f"{found.foreign[0]}, which other code has put into the libraries")
    return {
        **installed,
        **{name: digest_of(value) for name, value in found.constants.items()},
        "pytest-edgeq": own_code(Path(__file__).parent.parent),
    }


def second_pipeline() -> dict[str, str]:
    """
    Return what identifies the libraries that the converter's second pipeline adds.

    Raises:
        UnknownError: As `libraries` does.
    """
    return _installed(_SECOND_PIPELINE, tuple(sys.path))


def settings() -> dict[str, str]:
    """
    Return the settings of this process and machine that floating-point results depend on.

    The number of torch's threads counts where samples run, not where a graph is converted. The CPU
    counts for both, since the converter computes constants: entries of one model of CPU are not
    read on another.
    """
    chosen = {
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpu model": _cpu_model(),
        "fp32": _fp32_precision(),
        "denormal": str(sys.float_info.min / 2),  # 0.0 after `torch.set_flush_denormal(True)`
        "dtype": str(torch.get_default_dtype()),
        "mkldnn": str(torch.backends.mkldnn.enabled),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "autocast": str(torch.is_autocast_enabled("cpu")),
    }
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES) and name not in _SILENT
    }
    return chosen | variables


@functools.cache
def _cpu_model() -> str:
    """
    Return what oneDNN, MKL, XNNPACK and OpenBLAS choose their kernels by.

    torch's capability, AVX512 for instance, stands for many models, whose results differ.
    """
    if not _CPU_INFO.exists():
        return platform.processor()
    lines = {
        line for line in _CPU_INFO.read_text().splitlines() if line.split("\t")[0].strip() in _CPU
    }
    return digest_of(sorted(lines))


def _fp32_precision() -> str:
    """
    Return the precision of float32 arithmetic, by kind of operator.

    torch 2.9 added a setting for each kind; once one is used, `get_float32_matmul_precision` raises
    RuntimeError (torch 2.13).
    """
    mkldnn = torch.backends.mkldnn
    if not hasattr(mkldnn, "matmul"):
        return torch.get_float32_matmul_precision()
    kinds = [getattr(mkldnn, kind) if kind else mkldnn for kind in _FP32]
    # "none" is what was never set; `set_float32_matmul_precision("highest")` sets "ieee".
    return " ".join(kind.fp32_precision.replace("none", "ieee") for kind in kinds)
