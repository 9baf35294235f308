"""
Run files on LiteRT's GPU engine, in a Python of its own.

    python engine.py JOBS ANSWERS

Both are pickles: a list of (content, samples, kernels, output shapes and dtypes); for each job a
dict of outputs and seconds of compilation, or an exception's text, and the lines that were logged.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert.compiled_model import (
    CompiledModel,
    GpuOptions,
    HardwareAccelerator,
    Options,
)


def _run(content: bytes, samples: Any, kernels: str, outputs: Any) -> dict[str, Any]:
    started = time.perf_counter()
    gpu = GpuOptions(enforce_f32=kernels == "gpu_f32")
    options = Options(hardware_accelerators=HardwareAccelerator.GPU, gpu_options=gpu)
    model = CompiledModel.from_buffer(content, options=options)
    seconds = time.perf_counter() - started
    taken, made = model.create_input_buffers(0), model.create_output_buffers(0)
    answers = []
    for sample in samples:
        for buffer, values in zip(taken, sample, strict=True):
            buffer.write(np.ascontiguousarray(values))
        model.run_by_index(0, taken, made)
        answers.append(
            [
                buffer.read(int(np.prod(shape)), np.dtype(dtype)).reshape(shape)
                for buffer, (shape, dtype) in zip(made, outputs, strict=True)
            ]
        )
    return {"answers": answers, "seconds": seconds}


def _logged(job: Any) -> dict[str, Any]:
    """Run a job with both standard streams, where the engine logs, sent to a file."""
    streams = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            result = _run(*job)
        except RuntimeError as error:
            result = {"error": str(error)}
        finally:
            for number, stream in enumerate(streams, 1):
                os.dup2(stream, number)
                os.close(stream)
        log.seek(0)
        return {**result, "log": log.read().decode(errors="replace").splitlines()}


if __name__ == "__main__":
    jobs = pickle.loads(Path(sys.argv[1]).read_bytes())
    Path(sys.argv[2]).write_bytes(pickle.dumps([_logged(job) for job in jobs]))
