"""
The warm process: it imports the libraries, then forks for each command. It imports nothing of ours.

Its argument is the folder of its socket; its stdin is a pipe from the tests, and ends with them.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

# What a run that quantizes imports, in a few names.
LIBRARIES = (
    *("numpy", "scipy.cluster", "networkx", "pytest", "execnet"),
    *("torch._dynamo.testing", "torch.export._trace", "functorch.compile"),
    *("torchao.quantization.pt2e.quantize_pt2e", "litert_torch", "ai_edge_quantizer.quantizer"),
)

_READ_ONCE = ("PYTHON", "LD_", "OMP_", "MKL_", "ATEN_")
"""Variables that Python reads when it starts, and libraries when they are imported."""

_VARIABLES = dict(os.environ)
"""Before libraries add to them."""


def main(folder: str) -> None:
    """Wait for commands; each fork runs one, and another fork watches over it."""
    for name in LIBRARIES:
        importlib.import_module(name)
    (_,) = Path("/proc/self/task").iterdir()  # a fork would lack the threads of a library
    # The command by which pytest-xdist starts its workers.
    sys.modules["execnet"].XSpec.python = f"{folder}/python"
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who watch
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{folder}/socket")
        listener.listen()
        print("ready", flush=True)
        while listener in select.select([sys.stdin, listener], [], [])[0]:
            client, _ = listener.accept()
            if not os.fork():
                break
            client.close()
        else:
            return
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with client:
        content, files, _, _ = socket.recv_fds(client, 1 << 20, 3)
        if process := os.fork():
            watch(process, client)
    run(files, *json.loads(content))


def watch(process: int, client: socket.socket) -> NoReturn:
    """Send the exit code to the client; kill the group where the client or the tests end first."""
    end = os.pidfd_open(process)
    if end not in select.select([end, client, sys.stdin], [], [])[0]:
        os.killpg(0, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    client.send(str(code if code >= 0 else 128 - code).encode())  # as a shell has it
    os._exit(0)


def run(files: Sequence[int], words: list[str], folder: str, variables: dict[str, str]) -> None:
    """Do what the words start: a script, a worker of pytest-xdist, or anything else by itself."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    script, *rest = words[Path(words[0]).name == "python" :] or ["-"]
    is_worker = [script, *rest[:1]] == ["-u", "-c"]
    other = {name for name, _ in variables.items() ^ _VARIABLES.items()} - {"PYTHONPATH"}
    if any(name.startswith(_READ_ONCE) for name in other) or (script[0] == "-" and not is_worker):
        os.execve(words[0], words, variables)
    for name in _VARIABLES.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    path = Path(script).absolute()
    paths = variables.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [str(path.parent), *filter(None, paths)]
    random.seed()
    if is_worker:
        sys.argv[:] = ["-c"]
        exec(rest[1], {"__name__": "__main__"})
    else:
        sys.argv[1:] = rest
        runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
