"""What CONTRIBUTING promises of files from strangers, as far as it can be seen in code or a run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import pytest_edgeq
from fixtures.tflite import make
from pytest_edgeq.runtimes.workers.remote_worker import pack, unpack_head, unpack_parts
from tests.projects import Project

ROOT = Path(pytest_edgeq.__file__).parent

RUNS_CODE = {
    *(f"{module}.{name}" for module in ("pickle", "cPickle", "dill", "cloudpickle", "marshal")
      for name in ("load", "loads", "Unpickler")),
    *("joblib.load", "shelve.open", "pandas.read_pickle", "yaml.load", "torch.jit.load"),
}  # fmt: skip
"""Functions that run what a file asks for."""

BETWEEN_OWN_PROCESSES = (
    ROOT / "compare" / "executors",
    ROOT / "runtimes" / "workers" / "isolated_file.py",
    ROOT / "runtimes" / "workers" / "remote_worker.py",
)
"""What reads pickles that another process of the same session has sent through a pipe."""

OWN_FILE = ROOT / "quantize" / "cache" / "sample_replay.py"
"""Reads samples back from a temporary file that it wrote itself and that has no name."""

NETWORK = {"ftplib", "http", "requests", "smtplib", "socket", "urllib", "urllib3", "xmlrpc"}


def _calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def _problems(source: str, *, reads_messages: bool = False) -> list[str]:
    tree = ast.parse(source)
    found = []
    for name, call in _calls(tree):
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        if name in RUNS_CODE and not (reads_messages and name.endswith("pickle.loads")):
            found.append(name)
        if name == "torch.load" and given.get("weights_only") != "True":
            found.append("torch.load without weights_only=True")
        if name in ("np.load", "numpy.load") and given.get("allow_pickle", "False") != "False":
            found.append("np.load with pickles")
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
            found += [
                f"{node.module}.{alias.name}"
                for alias in node.names
                if f"{node.module}.{alias.name}" in RUNS_CODE
            ]
        found += [name for name in names if name.partition(".")[0] in NETWORK]
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_module_reads_pickles_or_knows_a_network(path: Path) -> None:
    """Neither a file nor an entry of the cache can run code, and nothing is sent anywhere."""
    reads_messages = any(path.is_relative_to(each) for each in BETWEEN_OWN_PROCESSES)
    problems = _problems(path.read_text(encoding="utf-8"), reads_messages=reads_messages)
    assert problems == (["pickle.load"] if path == OWN_FILE else [])


def test_no_pickle_is_read_from_a_target() -> None:
    """A worker of this machine sends pickles, a target arrays alone."""
    frame = pack({}, [{"a": 1}], is_local=True)
    head, rest = unpack_head(memoryview(b"".join(frame[1:])))
    with pytest.raises(ValueError, match="magic string"):
        unpack_parts(head, rest)


def test_messages_are_no_files() -> None:
    """Modules that read messages of other processes may not read files of pickles either."""
    source = "pickle.loads(message)\npickle.load(file)"
    assert _problems(source, reads_messages=True) == ["pickle.load"]


_ALONE = """
import socket
import sys
import pytest

tried = []


def refuse(*arguments, **_):
    tried.append(arguments)
    raise OSError("no network in this test")


for name in ("connect", "connect_ex", "sendto", "bind"):
    setattr(socket.socket, name, refuse)
socket.getaddrinfo = socket.create_connection = refuse


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    print(f"connections tried: {tried}")
"""

_SUITE = """
import torch
from pytest_edgeq import assert_op_counts


PATH = {path!r}


def test_file(edgeq):
    model = edgeq.load(PATH, reference=lambda x: x)
    model.run(torch.zeros(model.inputs[0].shape), runtime="builtin")


def test_conversion(edgeq):
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
    model = edgeq.quantize(net, (torch.zeros(1, 4),), calibration=[torch.randn(1, 4)])
    assert_op_counts(model, {{"FULLY_CONNECTED": 1}})
"""


@pytest.mark.slow
def test_a_run_opens_no_connection(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A suite that converts a model, loads a file and stores in the cache, with sockets barred."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    suite = _SUITE.format(path=str(make.CONVERTED / "folded_linear.float.tflite"))
    project = Project(pytester, monkeypatch)
    files = {"conftest": _ALONE, "test_alone": suite}
    project.run("-s", files=files, process=True, passed=2, shows="*connections tried: []*")
