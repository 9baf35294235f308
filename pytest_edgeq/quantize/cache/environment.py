"""Libraries, own code and process settings: the common part of all keys."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import sys
import sysconfig
from pathlib import Path
from typing import Any, Final

import torch

from pytest_edgeq import litert
from pytest_edgeq.litert.digest import UnhashableError, digest_of
from pytest_edgeq.runtimes.process_state import cpu_model
from pytest_edgeq.versions import owner_of

_DISTRIBUTIONS: Final = (
    *("absl-py", "flatbuffers", "immutabledict", "mpmath", "networkx", "opt-einsum", "scipy"),
    *("sympy", "torch", "torchao", "litert-torch", "litert-converter"),
    *("ai-edge-litert", "ai-edge-quantizer", "litert-quantizer", "jax", "jaxlib", "xdsl"),
    *("ml-dtypes", "numpy"),
)

_MODULES: Final = {"absl-py": "absl"}
"""Packages by distribution, where the two names differ in more than hyphens."""

_VARIABLES: Final = (
    *("TORCH", "LITERT", "ODML", "PYTORCH", "ATEN", "ONEDNN", "DNNL", "MKL", "XNNPACK", "JAX_"),
    *("XLA_", "TF_AUTO_MIXED_PRECISION_", "TF_DETERMINISTIC_", "TF_DISABLE_", "TF_ENABLE_"),
    *("TF_ONEDNN_", "TF_USE_", "TF_XLA_", "NPY_", "OPENBLAS", "ENABLE_GROUP_NORM_COMPOSITE"),
    *("LAYOUT_OPTIMIZE_PARTITIONER", "RESOURCE_CONSTANT_NUMEL_THRESHOLD"),
)
"""
Beginnings of the names of environment variables that the libraries read.

TF_ alone would include Terraform's variables, which differ with each run in CI. litert-torch 0.10.0
reads its `config` only from variables; the last three are its own.
"""

_SILENT: Final = frozenset(
    {"LITERT_TORCH_SHOW_PROGRESS", "LITERT_TORCH_SILENCE_TORCH_LOGS", "TORCHINDUCTOR_CACHE_DIR"}
)
"""Variables that change no result; the last one torch 2.13 sets itself, when it is imported."""

_FP32: Final = ("", "matmul", "conv", "rnn")
"""Kinds of operators with a precision setting in oneDNN; the first is for all others."""


@functools.cache
def _installed(names: tuple[str, ...], path: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of distributions, each with a hash of its file list."""
    found = {"python": sys.version}
    for name in names:
        module = _MODULES.get(name, name.replace("-", "_"))
        try:
            spec = importlib.util.find_spec(module)
        except ValueError as error:
            raise UnhashableError(f"{module}, which was made in memory") from error
        if spec is None:
            continue
        places = spec.submodule_search_locations or [spec.origin or "memory"]
        for place in places:
            if not is_installed(place):
                raise UnhashableError(f"{module}, which is imported from elsewhere: {place}")
        distribution = owner_of(name, Path(places[0]))
        if distribution is None:
            raise UnhashableError(f"{module}, whose distribution is not known by name")
        # Scripts, which lie outside the packages, contain the path of their interpreter.
        record = (distribution.read_text("RECORD") or "").splitlines()
        files = [line for line in record if not line.startswith("../")]
        found[name] = f"{distribution.version} {digest_of(files)}"
    return found


def is_installed(file: str) -> bool:
    """Return whether a file belongs to an installed package or the standard library."""
    return file.startswith(_STANDARD) or _SITE in file or _DIST in file


_SITE, _DIST = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"

_STANDARD: Final = str(Path(os.__file__).parent) + os.sep


@functools.cache
def _own_code() -> str:
    """Return a hash of the source of our package."""
    package = Path(__file__).parents[2]
    hashes = {
        path.relative_to(package).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(package.rglob("*.py"))
    }
    return digest_of(hashes)


def libraries() -> dict[str, str]:
    """Return the versions of every library in the chain, and ours, or raise an UnhashableError."""
    found = litert.registered_by_others()
    if found:
        raise UnhashableError(f"{found[0]}, which other code has registered with the libraries")
    installed = _installed(_DISTRIBUTIONS, tuple(sys.path))
    return {**installed, "pytest-edgeq": _own_code()}


def sources() -> dict[str, Any]:
    """Return the versions of installed packages and hashes of the other loaded modules."""
    scripts = sysconfig.get_path("scripts") + os.sep
    loaded = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or is_installed(file) or file.startswith(scripts):
            continue
        # torch's modules of operators have relative names, of no files.
        if name.partition(".")[0] != "pytest_edgeq" and Path(file).is_absolute():
            try:
                status = Path(file).stat()
                loaded[name] = _source(file, status.st_mtime_ns, status.st_size)
            except OSError as error:
                raise UnhashableError(f"the module {name}: {error}") from error
    return {"installed": _packages(tuple(sys.path)), "loaded": loaded}


@functools.lru_cache(None)
def _source(file: str, time: int, size: int) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


@functools.cache
def _packages(path: tuple[str, ...]) -> list[str]:
    """Return the sorted metadata folders of installed packages, which name versions."""
    return sorted({each.name for folder in path for each in Path(folder).glob("*.*-info")})


def settings() -> dict[str, str]:
    """
    Return the settings of process and machine that affect floating-point results.

    The CPU counts for conversions, too: the converter computes constants.
    """
    chosen = {
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpu model": cpu_model(),
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


def _fp32_precision() -> str:
    """Return the precision of float32 arithmetic, by kind of operator."""
    mkldnn = torch.backends.mkldnn
    kinds = [getattr(mkldnn, kind) if kind else mkldnn for kind in _FP32]
    # "none" means unset; `set_float32_matmul_precision("highest")` sets "ieee".
    return " ".join(kind.fp32_precision.replace("none", "ieee") for kind in kinds)
