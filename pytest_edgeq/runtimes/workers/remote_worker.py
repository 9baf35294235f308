"""
The worker: a process that opens `.tflite` files, runs them, and answers over stdin and stdout.

The host sends the source of this module as text, to targets and to processes of its own machine
alike. A target needs Python 3.9, numpy, and ai_edge_litert or tflite_runtime; nothing else of
pytest-edgeq is imported. The host imports this module for the frames.

A frame is the magic, the length of its payload, the SHA-256 of its payload, and the payload: the
length of a head, the head as JSON, and arrays as `.npy` without pickle, or bytes. The head's
`parts` has their kinds and lengths. Between a host and a process that it has started from its own
Python there is no hash, and a pickle of any object stands for an array.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import importlib
import io
import json
import os
import pickle
import platform
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

Head = dict[str, Any]
"""The head of a frame: plain data that JSON can hold."""

MAGIC = b"EDGQ"
_FRAME = struct.Struct(">4sQ32s")
_LENGTH = struct.Struct(">Q")
_MOST_BYTES = 1 << 40
_NO_HASH = bytes(32)

_ALIGNED = 16
"""Bytes that each piece of a payload begins at a multiple of, for arrays in its memory."""


class FrameError(Exception):
    """The stream holds something else than a frame, or a damaged frame."""

    def __init__(self, text: str, received: bytes) -> None:
        super().__init__(text)
        self.received = received


def pack(head: Head, parts: Iterable[Any] = (), *, is_local: bool = False) -> list[Any]:
    """Make a frame, as a list of bytes to write one after the other."""
    kinds, blobs = [], []
    for part in parts:
        is_object = not isinstance(part, bytes)
        pieces = [part] if not is_object else _pickled(part) if is_local else [_npy(part)]
        kinds.append([is_object, list(map(len, pieces))])
        for piece in pieces:
            blobs += [piece, bytes(-len(piece) % _ALIGNED)]
    text = json.dumps({**head, "parts": kinds}).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNED)
    payload = [_LENGTH.pack(len(text)), text, *blobs]
    digest = _NO_HASH if is_local else _hash(payload)
    return [_FRAME.pack(MAGIC, sum(map(len, payload)), digest), *payload]


def _pickled(part: Any) -> list[Any]:
    """Return a pickle, and the memory of the arrays in it, which is not copied."""
    buffers: list[Any] = []
    content = pickle.dumps(part, 5, buffer_callback=lambda each: buffers.append(each.raw()))
    return [content, *buffers]


def _hash(pieces: Iterable[Any]) -> bytes:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def read_payload(
    read_into: Callable[[memoryview], int | None], *, is_local: bool = False
) -> memoryview | None:
    """Read a frame's payload, or raise a FrameError; None where the stream ends within it."""

    def read(count: int) -> memoryview:
        view, at = memoryview(bytearray(count)), 0
        while at < count and (size := read_into(view[at:])):
            at += size
        return view[:at]

    start = bytes(read(_FRAME.size))
    while is_local and len(start) == _FRAME.size and not start.startswith(MAGIC):
        start = start[1:] + read(1)  # printed while Python started, by a sitecustomize
    if not start.startswith(MAGIC[: len(start)]):
        raise FrameError("no frame", start)
    if len(start) < _FRAME.size:
        return None
    _, length, digest = _FRAME.unpack(start)
    if length > _MOST_BYTES:
        raise FrameError(f"a frame of {length} bytes", start)
    payload = read(length)
    if len(payload) < length:
        return None
    if not is_local and _hash([payload]) != digest:
        raise FrameError("a frame whose hash is another", bytes(payload[:64]))
    return payload


def unpack_head(payload: memoryview) -> tuple[Head, memoryview]:
    """Return the head of a frame, and the input of `unpack_parts`."""
    (size,) = _LENGTH.unpack(payload[: _LENGTH.size])
    at = _LENGTH.size + size
    return json.loads(bytes(payload[_LENGTH.size : at])), payload[at:]


def unpack_parts(head: Head, rest: memoryview, *, is_local: bool = False) -> list[Any]:
    """Return the objects and bytes of a frame, which may share its memory."""
    parts: list[Any] = []
    for is_object, sizes in head.pop("parts"):
        pieces = []
        for size in sizes:
            pieces.append(rest[:size])
            rest = rest[size + -size % _ALIGNED :]
        if not is_object:
            parts.append(bytes(pieces[0]))
        elif is_local:
            parts.append(pickle.loads(pieces[0], buffers=pieces[1:]))
        else:
            parts.append(_array(pieces[0]))
    return parts


def _npy(array: Any) -> bytes:
    import numpy as np

    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array, order="C"), allow_pickle=False)
    return file.getvalue()


def _array(blob: memoryview) -> Any:
    import numpy as np

    return np.lib.format.read_array(io.BytesIO(blob), allow_pickle=False)


# --- in the worker ------------------------------------------------------------------------------

RESOLVERS = {
    "xnnpack": "BUILTIN",
    "builtin": "BUILTIN_WITHOUT_DEFAULT_DELEGATES",
    "reference": "BUILTIN_REF",
}


def _litert() -> tuple[Any, str, str]:
    """Return the module that has the interpreter, and the name and release of its package."""
    errors = []
    for module, package in (("ai_edge_litert", "ai-edge-litert"), ("tflite_runtime",) * 2):
        try:
            found = importlib.import_module(module + ".interpreter")
        except ImportError as error:
            errors.append(f"{module}: {type(error).__name__}: {error}")
            continue
        try:
            release = metadata.version(package)
        except metadata.PackageNotFoundError:
            release = getattr(sys.modules[module], "__version__", "of an unknown release")
        return found, package, release
    raise ImportError("; ".join(errors))


def facts() -> dict[str, Any]:
    """Return machine, CPU and versions of this process."""
    import numpy as np

    _, package, release = _litert()
    return {
        "machine": platform.machine(),
        "cpu": _cpu(),
        "features": _features(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "package": package,
        "release": release,
    }


def _cpu() -> str:
    known: dict[str, str] = {}
    # There is no such file on macOS and Windows.
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as file:
        for line in file:
            name, _, text = line.partition(":")
            known.setdefault(name.strip(), text.strip())
    if "model name" in known and platform.machine() in ("x86_64", "AMD64"):
        return known["model name"]
    if "CPU part" in known:
        return f"implementer {known.get('CPU implementer')} part {known['CPU part']}"
    return platform.processor()


def _features() -> list[str]:
    """Instruction sets that numpy finds: under an emulator /proc/cpuinfo is that of the host."""
    try:
        module = importlib.import_module("numpy._core._multiarray_umath")
    except ImportError:  # numpy 1
        module = importlib.import_module("numpy.core._multiarray_umath")
    found = module.__cpu_features__
    return sorted(name for name, is_there in found.items() if is_there)


def _opened(content: bytes, head: Head) -> OpenInterpreter | OpenCompiled:
    if head["kernels"] not in RESOLVERS:
        return OpenCompiled(_compiled_for_gpu(content, head), head)
    module = _litert()[0]
    options: dict[str, Any] = {"num_threads": head["threads"]}
    if head["kernels"] != "xnnpack":
        resolvers = module.OpResolverType
        options["experimental_op_resolver_type"] = resolvers[RESOLVERS[head["kernels"]]]
    if head["keep"]:
        options["experimental_preserve_all_tensors"] = True
    return OpenInterpreter(module.Interpreter(model_content=content, **options), head)


class OpenInterpreter:
    """An interpreter that runs the signature which a head describes; it is allocated once."""

    def __init__(self, interpreter: Any, head: Head, *, is_shared: bool = False) -> None:
        self._inputs, self._outputs = head["inputs"], head["outputs"]
        self._subgraph = head["subgraph"]
        self._interpreter = interpreter
        self._shapes: Any = [tuple(shape) for shape in head["shapes"]]
        try:
            if not is_shared:
                interpreter.allocate_tensors()
        except (RuntimeError, ValueError):
            if not head["has_free_shapes"]:
                raise
            self._shapes = None
        # The interpreter's own runner allocates anew at each call: for other subgraphs alone, and
        # where other signatures have runners, as the interpreter then refuses all else.
        self._runner = None
        if head["signature"] is not None and (self._subgraph or is_shared):
            self._runner = interpreter.get_signature_runner(head["signature"])

    def run(self, arrays: list[Any]) -> list[Any]:
        """Run one sample; arrays and outputs have the order of the head that opened the file."""
        if self._runner is not None:
            outputs = self._runner(
                **{name: array for (name, _), array in zip(self._inputs, arrays)}
            )
            return [outputs[name] for name, _ in self._outputs]
        interpreter = self._interpreter
        shapes = [array.shape for array in arrays]
        if shapes != self._shapes:
            self._shapes = None  # should the kernels refuse them
            for (_, index), shape in zip(self._inputs, shapes):
                interpreter.resize_tensor_input(index, shape)
            interpreter.allocate_tensors()
            self._shapes = shapes
        for (_, index), array in zip(self._inputs, arrays):
            interpreter.set_tensor(index, array)
        interpreter.invoke()
        return [interpreter.get_tensor(index) for _, index in self._outputs]

    def tensor(self, index: int) -> Any:
        """Return a tensor as the last run left it."""
        return self._interpreter.get_tensor(index, self._subgraph)


class OpenCompiled:
    """A CompiledModel that runs the signature which a head describes, with its own buffers."""

    def __init__(self, model: Any, head: Head) -> None:
        self._model, self._signature = model, head["position"]
        self._dtypes, self._free = head["dtypes"], head["free"]
        info = model.get_signature_by_index(self._signature)
        # For a file without signatures it makes one up.
        self._key, self._names = info["key"], info["outputs"]
        self._shapes: Any = [tuple(shape) for shape in head["shapes"]]
        try:
            self._allocate()
        except RuntimeError:
            if not head["has_free_shapes"]:
                raise
            self._shapes = None

    def fit(self, arrays: list[Any]) -> bool:
        """Allocate buffers for the shapes of a sample; return whether they are new."""
        shapes = [array.shape for array in arrays]
        if shapes == self._shapes:
            return False
        self._shapes = None  # should it refuse them
        for position, shape in enumerate(shapes):
            if self._free[position]:
                self._model.resize_input_tensor(position, shape, self._signature)
        self._allocate()
        self._shapes = shapes
        return True

    def run(self, arrays: list[Any]) -> list[Any]:
        """Run one sample; arrays and outputs have the order of the head that opened the file."""
        import numpy as np

        self.fit(arrays)
        for buffer, array in zip(self._ins, arrays):
            # As bytes, because it knows few dtypes by name, and not int16 or int64.
            buffer.write(np.asarray(array, order="C").reshape(-1).view(np.int8))
        self._model.run_by_index(self._signature, self._ins, self._outs)
        return [
            buffer.read(n_bytes, np.int8).view(dtype).reshape(shape)
            for buffer, n_bytes, dtype, shape in self._reads
        ]

    def _allocate(self) -> None:
        import numpy as np

        # First, because reading shapes allocates the tensors, which refuses files that cannot run.
        self.output_shapes()
        self._ins = self._model.create_input_buffers(self._signature)
        self._outs = self._model.create_output_buffers(self._signature)
        self.sizes = [tuple(buffer.get_tensor_details()["shape"]) for buffer in self._outs]
        self._reads = [
            (buffer, int(np.prod(shape)) * np.dtype(dtype).itemsize, dtype, shape)
            for buffer, shape, dtype in zip(self._outs, self.sizes, self._dtypes)
        ]

    def output_shapes(self) -> list[Any]:
        """Return the shapes of the outputs as the model has them now."""
        details = self._model.get_output_tensor_details(self._key)
        return [tuple(details[name]["shape"]) for name in self._names]


def _compiled_for_gpu(content: bytes, head: Head) -> Any:
    from ai_edge_litert import compiled_model
    from ai_edge_litert.hardware_accelerator import HardwareAccelerator
    from ai_edge_litert.options import CpuOptions, GpuOptions, Options

    gpu = HardwareAccelerator.GPU
    options = Options(
        hardware_accelerators=gpu | HardwareAccelerator.CPU if head["is_partly"] else gpu,
        gpu_options=GpuOptions(enforce_f32=head["kernels"] == "gpu_f32"),
        cpu_options=CpuOptions(num_threads=head["threads"]),
    )
    return compiled_model.CompiledModel.from_buffer(content, options=options)


MARK = b"\0edgeq %d\0"
"""Written to stderr where text begins that the host asks for, with 0, and where it ends."""


def _mark(number: int) -> None:
    sys.stderr.flush()
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(2, MARK % number)


_DUMPED_AT = 0.95
"""Share of the time limit after which a worker of the host's machine writes its Python stack."""

_LATER = 5
"""Seconds behind the time limit after which a target ends, whose host may be gone."""

_MOST_KEPT = 1 << 28
"""Bytes of files that are kept to be opened again: boards have little memory for more."""


class _Server:
    def __init__(self, stdin: io.FileIO, stdout: BinaryIO, *, is_local: bool) -> None:
        self._stdin, self._stdout, self._is_local = stdin, stdout, is_local
        self._files: dict[str, bytes] = {}  # by hash, the oldest first
        self._open: dict[int, Any] = {}
        self._pid = os.getpid()

    def serve(self) -> None:
        """Answer requests until the host closes stdin."""
        while payload := read_payload(self._stdin.readinto, is_local=self._is_local):
            head, rest = unpack_head(payload)
            number, parts = {"id": head["id"]}, []
            del payload
            try:
                parts = unpack_parts(head, rest, is_local=self._is_local)
                pieces = pack(number, self._step(head, parts), is_local=self._is_local)
            except BaseException as error:
                self._end_fork()
                failure, parts = self._failure(error)
                pieces = pack({**number, "error": failure}, parts, is_local=self._is_local)
            del parts, rest  # no memory is held while the next request is waited for
            self.write(pieces)
            del pieces
        self._forget(list(self._open))

    def _end_fork(self) -> None:
        """End a fork that user code has made and that left it: the pipes are its parent's."""
        if os.getpid() != self._pid:
            os._exit(1)

    def write(self, pieces: Iterable[bytes]) -> None:
        """Send a frame."""
        for piece in pieces:
            self._stdout.write(piece)
        self._stdout.flush()

    def _step(self, head: Head, parts: list[Any]) -> list[Any]:
        """Answer a request within its bound on time."""
        if (seconds := head["seconds"]) is not None:
            # A local host ends this process when the time is up.
            late = seconds * _DUMPED_AT if self._is_local else seconds + _LATER
            faulthandler.dump_traceback_later(late, exit=not self._is_local, file=2)
        try:
            self._forget(head["forget"])
            if "printed" not in head:
                return self._answer(head, parts)
            _mark(0)
            try:
                return self._answer(head, parts)
            finally:
                _mark(head["id"])
        finally:
            self._end_fork()
            faulthandler.cancel_dump_traceback_later()

    def _answer(self, head: Head, parts: list[Any]) -> list[Any]:
        what, key = head["what"], head.get("key", -1)
        if what == "forget":
            return []
        if what == "open":
            self._open[key] = _opened(self._content(head["digest"], parts), head)
            return []
        if what == "call":
            assert self._is_local, "a pickle runs code: only the process that started this one may"
            function, args, kwargs = parts.pop()
            result = function(*args, **kwargs)
            if "key" not in head:
                return [result]
            self._open[key] = result
            return []
        if what == "close":
            self._open.pop(key).close()
            return []
        if what == "run":
            return list(self._open[key].run(parts))
        assert what == "tensor", what
        return [self._open[key].tensor(head["index"])]

    def _content(self, digest: str, parts: list[bytes]) -> bytes:
        """Return a file that is sent, or was sent before, or raise a KeyError."""
        if parts:
            while self._files and sum(map(len, (*parts, *self._files.values()))) > _MOST_KEPT:
                del self._files[next(iter(self._files))]
            self._files[digest] = parts[0]
        return self._files[digest]

    def _forget(self, keys: Iterable[int]) -> None:
        """Close unused files, and print exceptions of a user's own runtime."""
        for key in keys:
            try:
                file = self._open.pop(key, None)
                if self._is_local and file is not None:  # those of a target are memory alone
                    file.close()
            except Exception:  # of the user's own code: the others are closed all the same
                traceback.print_exc()

    def _failure(self, error: BaseException) -> tuple[Any, list[Any]]:
        """Serialize an exception for the host, which lacks the classes of a target."""
        if self._is_local:
            return traceback.format_exc(), [_sendable(error)]
        if not isinstance(error, (RuntimeError, ValueError, KeyError, MemoryError)):
            traceback.print_exc()
        return [type(error).__name__, str(error)], []


def _sendable(error: BaseException) -> Exception:
    """Return a picklable error: itself, its cause MemoryError, or its text."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError):
            return MemoryError(str(cause))
        cause = cause.__cause__
    if isinstance(error, Exception):
        with contextlib.suppress(Exception):  # of whatever its class does when it is copied
            if str(pickle.loads(pickle.dumps(error))) == str(error):
                return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def _prepare(parent: int, memory: int | None) -> None:
    """Bound a process of the host's own machine."""
    if sys.platform != "linux":  # where the kernel ends it with its parent
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    faulthandler.enable(2, all_threads=False)
    import resource  # not on Windows, which may be a target

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory is not None:
        # Not RLIMIT_AS: kernels and allocators reserve address space that they never use.
        with contextlib.suppress(ValueError):  # above the limit of this user
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main(local: dict[str, Any] | None = None) -> None:
    """Serve requests, framed on stdin and stdout."""
    stdin, stdout = io.FileIO(os.dup(0)), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)  # what libraries print
    sys.stdout = sys.stderr
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the host decides
    if local is not None:
        _prepare(**local)
        hello: Head = {}
    else:
        try:
            hello = {"facts": facts()}
        except Exception as error:
            lacking = f"{type(error).__name__}: {error}"
            hello = {"missing": lacking, "python": platform.python_version()}
    server = _Server(stdin, stdout, is_local=local is not None)
    server.write(pack({**hello, "id": 0}, is_local=local is not None))
    if "missing" not in hello:
        server.serve()
    if local is not None and "multiprocessing.util" in sys.modules:
        # Ends what a user's own runtime has started.
        sys.modules["multiprocessing.util"]._exit_function()
    sys.stderr.flush()
    os._exit(0)
