"""
What runs on a target: opens `.tflite` files there, runs them, and answers over stdin and stdout.

The source of this module is sent to the target as text. It needs Python 3.9, numpy, and
ai_edge_litert or tflite_runtime, and imports nothing else of pytest-edgeq. The near side imports it
for the frames alone.

A frame is the magic, the length of its payload, the SHA-256 of its payload, and the payload: the
length of a head, the head as JSON, and arrays as `.npy` without pickle, or bytes. The head's
`parts` says what they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import os
import platform
import signal
import struct
import sys
import traceback
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

Head = dict[str, Any]
"""The head of a frame: plain data that JSON can hold."""

MAGIC = b"EDGQ"
_FRAME = struct.Struct(">4sQ32s")
_LENGTH = struct.Struct(">Q")
_MOST_BYTES = 1 << 40


class FrameError(Exception):
    """The stream holds something else than a frame, or a damaged frame."""

    def __init__(self, text: str, received: bytes = b"") -> None:
        super().__init__(text)
        self.received = received


def pack(head: Head, parts: Iterable[Any] = ()) -> list[bytes]:
    """Make a frame, as a list of bytes to write one after the other."""
    blobs, kinds = [], []
    for part in parts:
        is_array = not isinstance(part, (bytes, bytearray, memoryview))
        blobs.append(_npy(part) if is_array else bytes(part))
        kinds.append([is_array, len(blobs[-1])])
    text = json.dumps({**head, "parts": kinds}).encode()
    pieces = [_LENGTH.pack(len(text)), text, *blobs]
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return [_FRAME.pack(MAGIC, sum(map(len, pieces)), digest.digest()), *pieces]


def unpack(stream: BinaryIO) -> tuple[Head, list[Any]] | None:
    """
    Read a frame.

    Returns:
        Its head, and its arrays and bytes; None at the end of the stream.

    Raises:
        FrameError: Something else stands there.
    """
    start = _read(stream, _FRAME.size)
    if not start:
        return None
    if not start.startswith(MAGIC[: len(start)]) or len(start) < _FRAME.size:
        raise FrameError("no frame", start)
    _, length, digest = _FRAME.unpack(start)
    if length > _MOST_BYTES:
        raise FrameError(f"a frame of {length} bytes", start)
    payload = _read(stream, length)
    if len(payload) < length:
        raise FrameError(f"a frame that ends after {len(payload)} of {length} bytes")
    if hashlib.sha256(payload).digest() != digest:
        raise FrameError("a frame whose hash is another", payload[:64])
    view = memoryview(payload)
    (size,) = _LENGTH.unpack(view[: _LENGTH.size])
    at = _LENGTH.size + size
    head = json.loads(bytes(view[_LENGTH.size : at]))
    parts = []
    for is_array, count in head.pop("parts"):
        blob = view[at : at + count]
        parts.append(_array(blob) if is_array else bytes(blob))
        at += count
    return head, parts


def _read(stream: BinaryIO, count: int) -> bytes:
    """Read so many bytes; fewer only where the stream ends."""
    pieces = []
    while count > 0:
        piece = stream.read(min(count, 1 << 24))
        if not piece:
            break
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def _npy(array: Any) -> bytes:
    import numpy as np

    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(array, order="C"), allow_pickle=False)
    return file.getvalue()


def _array(blob: memoryview) -> Any:
    import numpy as np

    return np.lib.format.read_array(io.BytesIO(blob), allow_pickle=False)


# --- on the target ------------------------------------------------------------------------------

_RESOLVERS = {
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
    """
    Say what computes here.

    Raises:
        ImportError: There is no numpy or no interpreter.
    """
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
    told: dict[str, str] = {}
    # There is no such file on macOS and Windows.
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as file:
        for line in file:
            name, _, text = line.partition(":")
            told.setdefault(name.strip(), text.strip())
    if "model name" in told and platform.machine() in ("x86_64", "AMD64"):
        return told["model name"]
    if "CPU part" in told:
        return f"implementer {told.get('CPU implementer')} part {told['CPU part']}"
    return platform.processor()


def _features() -> list[str]:
    """Instruction sets that numpy finds: under an emulator /proc/cpuinfo is that of the host."""
    try:
        module = importlib.import_module("numpy._core._multiarray_umath")
    except ImportError:  # numpy 1
        module = importlib.import_module("numpy.core._multiarray_umath")
    found = module.__cpu_features__
    return sorted(name for name, is_there in found.items() if is_there)


class _Engine:
    """A file that is open."""

    def __init__(self, content: bytes, head: Head) -> None:
        module = _litert()[0]
        options: dict[str, Any] = {"num_threads": head["threads"]}
        if head["kernels"] != "xnnpack":
            resolvers = module.OpResolverType
            options["experimental_op_resolver_type"] = resolvers[_RESOLVERS[head["kernels"]]]
        if head["keep"]:
            options["experimental_preserve_all_tensors"] = True
        self._inputs, self._outputs = head["inputs"], head["outputs"]
        self._subgraph = head["subgraph"]
        self._interpreter = module.Interpreter(model_content=content, **options)
        self._shapes: Any = [tuple(shape) for shape in head["shapes"]]
        try:
            self._interpreter.allocate_tensors()
        except (RuntimeError, ValueError):
            if not head["has_free_shapes"]:
                raise
            self._shapes = None
        # The interpreter's own runner allocates anew at each call: for other subgraphs alone.
        self._runner = None
        if head["signature"] is not None and self._subgraph:
            self._runner = self._interpreter.get_signature_runner(head["signature"])

    def run(self, arrays: list[Any]) -> list[Any]:
        """Run one sample; arrays and outputs stand in the order that the head told."""
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

    def tensors(self, indices: list[int]) -> list[Any]:
        """Return tensors as the last run left them; None for one that has no memory."""
        found = []
        for index in indices:
            try:
                found.append(self._interpreter.get_tensor(index, self._subgraph))
            except (TypeError, ValueError):
                found.append(None)
        return found


class _Server:
    def __init__(self, stdin: BinaryIO, stdout: BinaryIO) -> None:
        self._stdin, self._stdout = stdin, stdout
        self._files: dict[str, bytes] = {}
        self._engines: dict[int, _Engine] = {}

    def serve(self) -> None:
        """Answer requests until the near side goes."""
        while True:
            request = unpack(self._stdin)
            if request is None:
                return
            head, parts = request
            answer: Head = {}
            made: list[Any] = []
            # The near side may be gone, and native code may hang: no process outlives its bound.
            _alarm(head["seconds"])
            try:
                answer, made = self._answer(head, parts)
            except Exception as error:
                answer = {"error": type(error).__name__, "text": str(error)}
                if not isinstance(error, (RuntimeError, ValueError, KeyError, MemoryError)):
                    traceback.print_exc()
            _alarm(0)
            self.send({**answer, "id": head["id"]}, made)

    def send(self, head: Head, parts: Iterable[Any] = ()) -> None:
        """Write a frame."""
        for piece in pack(head, parts):
            self._stdout.write(piece)
        self._stdout.flush()

    def _answer(self, head: Head, parts: list[Any]) -> tuple[Head, list[Any]]:
        for key in head.get("forget", ()):
            self._engines.pop(key, None)
        for digest in head.get("drop", ()):
            self._files.pop(digest, None)
        what = head["what"]
        if what == "file":
            digest = hashlib.sha256(parts[0]).hexdigest()
            self._files[digest] = parts[0]
            return {"digest": digest}, []
        if what == "open":
            self._engines[head["key"]] = _Engine(self._files[head["digest"]], head)
            return {}, []
        engine = self._engines[head["key"]]
        if what == "run":
            return {}, engine.run(parts)
        assert what == "tensors", what
        found = engine.tensors(head["indices"])
        there = [index for index, each in zip(head["indices"], found) if each is not None]
        return {"indices": there}, [each for each in found if each is not None]


def _alarm(seconds: float) -> None:
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def main() -> None:
    """Take stdin and stdout for frames, say what is here, and serve."""
    stdin = sys.stdin.buffer
    stdout = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print
    sys.stdout = sys.stderr
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the near side decides
    server = _Server(stdin, stdout)
    try:
        hello: Head = {"facts": facts()}
    except Exception as error:
        hello = {"missing": f"{type(error).__name__}: {error}", "python": platform.python_version()}
    server.send({**hello, "id": 0})
    if "facts" in hello:
        server.serve()


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)
