"""
Native steps of a conversion in another process, from bytes to bytes.

The converter's passes begin with MLIR, whose bytecode contains all their input: weights, signatures
and the locations by which tensors are named. So torch and the export stay here.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from pytest_edgeq.litert.configs import replaced
from pytest_edgeq.litert.libraries import converter_module, quiet

if TYPE_CHECKING:
    from pytest_edgeq.runtimes.workers.policy import IsolatedConversion

    Native: TypeAlias = IsolatedConversion

_LIBRARY = "litert_converter.mlir"

_EXTENSION = f"{_LIBRARY}._mlir_libs.converter_api_ext"


@contextlib.contextmanager
def lowered_by(native: Native | None) -> Iterator[None]:
    """
    Run the converter's passes, and write the file, in another process.

    litert-torch 0.10.0 calls both through its module `_convert.litert_converter`. For some graphs
    they end the process, as compilers do at a failed check.
    """
    if native is None:
        yield
        return
    module = converter_module("_convert.litert_converter")
    with replaced(module, converter_api_ext=_RemoteSteps(module.converter_api_ext, native)):
        yield


class _RemoteSteps:
    """Replacement for the converter's native module, with two steps in one remote call."""

    def __init__(self, original: Any, native: Native) -> None:
        self._original = original
        self._native = native
        self._content = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def run_convert_to_tfl_passes(self, module: Any, passes: Any, config: Any) -> None:
        bytecode = io.BytesIO()
        module.operation.write_bytecode(file=bytecode)
        settings = {name: getattr(config, name) for name in dir(config) if name[0] != "_"}
        self._content = self._native.call("convert", lower, bytecode.getvalue(), settings)

    def export_flatbuffer_to_bytes(self, module: Any) -> bytes:
        return self._content


def lower(bytecode: bytes, settings: Mapping[str, Any]) -> bytes:
    """Lower a module to a `.tflite` file."""
    with quiet():
        ir = importlib.import_module(f"{_LIBRARY}.ir")
        passes = importlib.import_module(f"{_LIBRARY}.passmanager")
        extension = importlib.import_module(_EXTENSION)
        config = extension.ConvertToTFLConfig()
        for name, value in settings.items():
            setattr(config, name, value)
        context = ir.Context()
        extension.prepare_mlir_context(context)
        with context:
            module = ir.Module.parse(bytecode)
            extension.run_convert_to_tfl_passes(module, passes.PassManager(), config)
            return bytes(extension.export_flatbuffer_to_bytes(module.operation))
