"""A CompiledModel whose GPU is the CPU's engine, and which prints what the GPU's prints."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert import compiled_model, schema_py_generated
from ai_edge_litert.hardware_accelerator import HardwareAccelerator

ADAPTER = "llvmpipe (LLVM 19.1.7, 256 bits), arch=software, vendor=mesa, backend=Vulkan"

_WHERE = "ERROR: [./litert/cc/litert_compiled_model.h:1961]\n└ "

_NO_ADAPTER = """\
Warning: vkCreateInstance: Found no drivers!
Warning: vkCreateInstance failed with VK_ERROR_INCOMPATIBLE_DRIVER
    at CheckVkSuccessImpl (third_party/dawn/src/dawn/native/vulkan/VulkanError.cpp:106)
ERROR: [delegate_webgpu.cc:359] Failed to initialize WebGPU environment: INTERNAL: No adapters found
"""

_NO_PLUGIN = """\
WARNING: [compiler_plugin.cc:312] Failed to load plugin at: /ai_edge_litert/vendors/plugin.so
└ Could not load shared library /ai_edge_litert/vendors/plugin.so: libopenvino.so.2631: cannot open
"""

_NO_ENGINE = "WARNING: [gpu_registry.cc:160] GPU accelerator could not be loaded and registered.\n"

_REFUSED = """\
E0000 00:00:1795775328.990183   30734 delegate_webgpu.cc:478] Failed to create \
litert::ml_drift::DelegateKernelLiteRt: INVALID_ARGUMENT: Shape mismatch: \
{bhwc, {5, 1, 1, 4}} vs {bhwc, {1, 1, 5, 4}}
=== Source Location Trace: ===
third_party/ml_drift/common/gpu_model_util.cc:247
ERROR: Failed to initialize kernel.
ERROR: Restored original execution plan after delegate application failure.
"""

_CONSTANT = """\
E0000 00:00:1795950663.836345   32481 model_builder.cc:2678] {
  type: FLOAT32
  data: {...}
  dims: [1,1,1,2,4]
} isn't ::ml_drift::BHWC-convertible.
"""

_NO_SHADER = """\
E0000 00:00:1795775330.540705   30759 environment.cc:105] Validation error: Error while parsing \
WGSL: :43:22 error: cannot assign 'vec4<f16>' to 'vec4<i32>'
  interm_value_link3 = src + second_value;}
                     ^
 - While calling [Device].CreateShaderModule([ShaderModuleDescriptor]).
"""

_SELECTED = "I0000 00:00:1795775325.799163   30673 environment.cc:532] Selected adapter: "


def _say(text: str) -> None:
    os.write(2, text.encode())


def _op_names(content: bytes) -> list[list[str]]:
    """Return the names of the ops of each subgraph."""
    model = schema_py_generated.ModelT.InitFromPackedBuf(content, 0)
    codes = schema_py_generated.BuiltinOperator
    names = {value: name for name, value in vars(codes).items() if not name.startswith("_")}
    return [
        [names[model.operatorCodes[op.opcodeIndex].builtinCode] for op in each.operators or ()]
        for each in model.subgraphs
    ]


class FakeModel(compiled_model.CompiledModel):  # type: ignore[misc] # LiteRT ships no types
    """
    Compiles for the CPU whatever is asked for.

    `faults` has the op that each fault is of, or a true value for one of all files: `no_engine`,
    `no_adapter`, `float32`, `left` (to the CPU), `constant` (of five axes), `refused`, `shader`,
    `crash`, `hang`. `adapter` is the name of another one, and `pids` a folder for the numbers of
    processes that hang.
    """

    faults: Mapping[str, Any] = {}
    rounds = False

    @classmethod
    def from_buffer(cls, content: bytes, *, options: Any, **more: Any) -> Any:
        """Compile, print and fail as the GPU's engine does."""
        wanted = options.hardware_accelerators
        options.hardware_accelerators = HardwareAccelerator.CPU
        if HardwareAccelerator.GPU not in wanted:
            return super().from_buffer(content, options=options, **more)
        subgraphs, has_cpu = _op_names(content), HardwareAccelerator.CPU in wanted
        ops = {name for each in subgraphs for name in each}
        _say("INFO: [environment.cc:36] Creating LiteRT environment with options\n")
        if cls.faults.get("no_adapter"):
            _say(_NO_ADAPTER)
            raise RuntimeError(f"{_WHERE}ERROR: [litert/runtime/compiled_model.cc:1036]")
        has_engine = cls.faults.get("no_engine") not in (True, *ops)
        if not has_engine:
            _say(_NO_ENGINE)
        else:
            _say(f"{_SELECTED}{cls.faults.get('adapter', ADAPTER)}\n")
        if cls.faults.get("crash") in ops:
            _say(_NO_PLUGIN)
            _say("LLVM ERROR: Cannot select: intrinsic %llvm.x86.sse41.round.ps\n")
            os.kill(os.getpid(), signal.SIGSEGV)
        if cls.faults.get("hang") in ops:
            if "pids" in cls.faults:
                Path(cls.faults["pids"], str(os.getpid())).touch()
            time.sleep(600)
        if cls.faults.get("refused") in ops:
            _say(_REFUSED)
            raise RuntimeError(f"{_WHERE}Failed to modify graph with delegate")
        if cls.faults.get("constant") in ops:
            _say(_CONSTANT)
        is_left = [_say_what_is_left(names, cls.faults.get("left")) for names in subgraphs]
        if cls.faults.get("shader") in ops:
            _say(_NO_SHADER)
        if not has_cpu and (any(is_left) or not has_engine):
            raise RuntimeError(f"{_WHERE}Some ops are not accelerated. Add kLiteRtHwAcceleratorCpu")
        made = super().from_buffer(content, options=options, **more)
        made.rounds = not (options.gpu_options.enforce_f32 or cls.faults.get("float32"))
        return made

    def run_by_index(self, index: int, inputs: Any, outputs: Any) -> None:
        """Run, and round float outputs to float16 if float32 is not enforced."""
        super().run_by_index(index, inputs, outputs)
        for buffer in outputs if self.rounds else ():
            details = buffer.get_tensor_details()
            if details["dtype"] == "float32":
                values = buffer.read(int(np.prod(details["shape"])), np.float32)
                with np.errstate(over="ignore"):
                    buffer.write(values.astype(np.float16).astype(np.float32))


def _say_what_is_left(names: list[str], left: object) -> bool:
    """Print how many ops of a subgraph run where; return whether the GPU does not take all."""
    n_left = names.count(left)  # type: ignore[arg-type]
    if n_left:
        on_gpu = len(names) - n_left
        shared = f"{on_gpu} operations will run on the GPU, and the remaining {n_left}"
        if not on_gpu:
            shared = f"No operations will run on the GPU, and all {n_left}"
        _say(
            "ERROR: Following operations are not supported by GPU delegate:\n"
            f"{left}: Max version supported: 3. Requested version 4.\n"
            f"{shared} operations will run on the CPU.\n"
        )
    return n_left > 0


def install(faults: Mapping[str, Any]) -> None:
    """Have ai_edge_litert compile by a FakeModel with these faults."""
    FakeModel.faults = faults
    compiled_model.CompiledModel = FakeModel
