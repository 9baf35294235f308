"""The root for 64-bit ARM: how it is refused, made once, and runs files."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pytest_edgeq.cli import edgeq
from pytest_edgeq.runtimes.workers.emulated_root import (
    EmulatedRootError,
    is_finished,
    make_root,
    ubuntu_sources,
)

CONVERTED = Path(__file__).parents[2] / "fixtures" / "tflite" / "converted"

# An emulated CPU, and a root that is downloaded for it.
pytestmark = [
    pytest.mark.skipif(
        platform.machine() in ("aarch64", "arm64"), reason="a 64-bit ARM emulates none"
    ),
    pytest.mark.timeout(900),
]

RUN_ALL = """
import json, sys
import numpy as np
from ai_edge_litert.interpreter import Interpreter

shapes = []
for path in sys.argv[1:]:
    interpreter = Interpreter(model_path=path, num_threads=1)
    interpreter.allocate_tensors()
    for each in interpreter.get_input_details():
        interpreter.set_tensor(each["index"], np.ones(each["shape"], each["dtype"]))
    interpreter.invoke()
    outputs = [interpreter.get_tensor(each["index"]) for each in interpreter.get_output_details()]
    assert all(np.isfinite(output).all() for output in outputs), path
    shapes.append([[str(output.dtype), *output.shape] for output in outputs])
print(json.dumps(shapes))
"""


def unheard(_: str) -> None:
    """Take a line of progress."""


def target(*arguments: object) -> Result:
    """Run `edgeq target`."""
    return CliRunner().invoke(edgeq, ["target", *map(str, arguments)], prog_name="edgeq")


def program(folder: Path, name: str, script: str) -> None:
    """Write a program for PATH."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n", "utf-8")
    path.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of PATH, which is empty."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.fixture
def emulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for QEMU, in front of all others, for what ends before it runs anything."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program(folder, "qemu-aarch64-static", "echo '  cortex-a76'; exit 1")
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """An empty folder."""
    folder = tmp_path / "roots"
    folder.mkdir()
    return folder


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    """It is refused before anything is installed or downloaded."""
    (tmp_path / "thesis.txt").write_text("years of work", "utf-8")

    done = target("arm64", tmp_path)

    assert done.exit_code == 2
    assert done.stderr == (
        f"Error: {tmp_path} exists and is no root that edgeq made: name a new folder\n"
    )
    assert (tmp_path / "thesis.txt").read_text("utf-8") == "years of work"


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    """As a folder of something else is."""
    (tmp_path / "arm64").touch()

    with pytest.raises(EmulatedRootError, match="is no root that edgeq made"):
        make_root(tmp_path / "arm64", say=unheard)


def test_another_distribution_is_told_what_is_needed(programs: Path, parent: Path) -> None:
    """It has neither QEMU nor apt-get; a command line is told without a traceback."""
    done = target("arm64", parent / "arm64")

    assert done.exit_code == 2
    assert done.stderr.startswith("Error: there is no qemu-aarch64-static; this machine has no apt")
    assert "64-bit ARM Linux that has Python, numpy and ai-edge-litert" in done.stderr
    assert "Traceback" not in done.output
    assert max(map(len, done.stderr.splitlines())) <= 160
    assert not list(parent.iterdir())


def test_another_distribution_with_the_emulator(programs: Path, parent: Path) -> None:
    """It runs a root that was made elsewhere, and makes none."""
    program(programs, "qemu-aarch64-static", "echo '  cortex-a76'; exit 1")

    with pytest.raises(EmulatedRootError, match=r"^this machine has no apt-get and dpkg"):
        make_root(parent / "arm64", say=unheard)


@pytest.mark.parametrize(
    ("known", "package", "name"),
    [
        ("qemu-user-static|qemu-user", "qemu-user-static", "qemu-aarch64-static"),
        ("qemu-user", "qemu-user", "qemu-aarch64"),
        ("nothing", "qemu-user-static", "qemu-aarch64-static"),
    ],
    ids=["debian", "ubuntu 26.04", "no package lists"],
)
def test_without_the_emulator(
    known: str, package: str, name: str, programs: Path, parent: Path
) -> None:
    """A user is told the command; root installs it, and is told why that fails."""
    policy = f"case $2 in {known}) echo '  Candidate: 1:7.2';; *) echo '  Candidate: (none)';; esac"
    program(programs, "apt-cache", policy)
    failing = "[ $2 = update ] || { echo 'E: dpkg was interrupted' >&2; exit 100; }"
    program(programs, "apt-get", failing)

    with pytest.raises(EmulatedRootError) as caught:
        make_root(parent / "arm64", say=unheard)

    if os.geteuid() == 0:
        assert str(caught.value) == (
            f"{package} cannot be installed: apt-get -qq ended with exit code 100\n"
            "  E: dpkg was interrupted"
        )
    else:
        assert str(caught.value) == (
            f"there is no {name}, which runs programs of 64-bit ARM: sudo apt-get install {package}"
        )
    assert not list(parent.iterdir())


def test_the_other_name_of_the_emulator(programs: Path, parent: Path) -> None:
    """Ubuntu 26.04 has no qemu-aarch64-static."""
    program(programs, "qemu-aarch64", "echo '  cortex-a76'; exit 1")
    root = parent / "arm64"
    root.mkdir()
    releases = {"ai-edge-litert": metadata.version("ai-edge-litert")}
    (root / "edgeq-root.json").write_text(json.dumps(releases), "utf-8")

    assert make_root(root, say=unheard)[:2] == ["qemu-aarch64", "-cpu"]


def test_an_emulator_without_the_cpu(programs: Path, parent: Path) -> None:
    """QEMU 6.2 of Ubuntu 22.04 ends after minutes of downloads otherwise."""
    program(programs, "qemu-aarch64-static", "echo '  cortex-a72'; exit 1")

    with pytest.raises(EmulatedRootError, match=r"the CPU cortex-a76: install QEMU 7\.1 or later"):
        make_root(parent / "arm64", say=unheard)


def test_on_64_bit_arm_nothing_is_made(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own Python is the command."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    told: list[str] = []

    command = make_root(parent / "arm64", say=told.append)

    assert command == [sys.executable]
    assert "no emulation is needed" in told[-1]
    assert not list(parent.iterdir())


@pytest.mark.parametrize(
    ("fields", "codename"),
    [
        ({"ID": "ubuntu", "VERSION_CODENAME": "noble"}, "noble"),
        (
            {
                "ID": "linuxmint",
                "ID_LIKE": "ubuntu debian",
                "VERSION_CODENAME": "xia",
                "UBUNTU_CODENAME": "noble",
            },
            "noble",
        ),
        ({"ID": "debian", "VERSION_CODENAME": "bookworm"}, None),
        ({"ID": "fedora", "VERSION_ID": "43"}, None),
    ],
    ids=["ubuntu", "made of ubuntu", "debian", "fedora"],
)
def test_ubuntu_has_mirrors_of_its_own_for_arm64(
    fields: dict[str, str], codename: str | None
) -> None:
    """The sources of an x86 machine do not have it; on Debian they do."""
    sources = ubuntu_sources(fields)

    if codename is None:
        assert sources is None
    else:
        assert sources is not None
        assert f"] http://ports.ubuntu.com/ubuntu-ports {codename}-updates main\n" in sources
        assert f"] http://archive.ubuntu.com/ubuntu {codename} main\n" in sources


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt-get")
def test_without_a_network_an_older_root_stays(
    emulator: None, parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last lines of apt-get say why; nothing half made is left beside it."""
    (tmp_path / "apt.conf").write_text('Acquire::Retries "0";', "utf-8")
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    for each in ("http_proxy", "https_proxy"):
        # Nobody listens there.
        monkeypatch.setenv(each, "http://127.0.0.1:9")
    folder = parent / "arm64"
    folder.mkdir()
    (folder / "edgeq-root.json").write_text('{"ai-edge-litert": "2.1.0"}', "utf-8")

    with pytest.raises(EmulatedRootError) as caught:
        make_root(folder, say=unheard)

    first, *lines = str(caught.value).splitlines()
    assert first == "the apt sources give no package python3 for arm64; apt-get update:"
    assert any("127.0.0.1:9" in line for line in lines)
    assert list(parent.iterdir()) == [folder]
    assert not is_finished(folder)


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt-get")
def test_an_interrupted_call_leaves_nothing(emulator: None, parent: Path) -> None:
    """A folder that looks finished would be taken for one."""

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_root(parent / "arm64", say=interrupt)

    assert not list(parent.iterdir())


@pytest.mark.slow
def test_a_finished_root_is_told_and_left_as_it_is(
    arm64_root: Path, arm64_command: list[str]
) -> None:
    """The lines to copy come last."""
    before = arm64_root.stat()

    done = target("arm64", arm64_root)

    assert done.exit_code == 0
    release = metadata.version("ai-edge-litert")
    root = str(arm64_root)
    assert done.stdout.splitlines() == [
        f"{root} is finished and has ai-edge-litert {release}: nothing to do",
        "",
        "[tool.pytest.ini_options]",
        f'edgeq_targets = ["arm64 = {arm64_command[0]} -cpu cortex-a76 '
        f'-L {root} {root}/usr/bin/python3 -I"]',
    ]
    assert arm64_root.stat() == before


@pytest.mark.slow
def test_it_has_the_release_that_is_installed_here(
    arm64_root: Path, arm64_command: list[str]
) -> None:
    """So that figures differ by the CPU alone; its file of releases says what is in it."""
    code = (
        "import importlib.metadata as m, json, platform; print(json.dumps([platform.machine(), "
        "platform.python_version(), m.version('numpy'), m.version('ai-edge-litert')]))"
    )
    done = subprocess.run(
        [*arm64_command, "-c", code], capture_output=True, check=True, timeout=300
    )
    machine, python, numpy, litert = json.loads(done.stdout)

    assert machine == "aarch64"
    assert litert == metadata.version("ai-edge-litert")
    assert json.loads((arm64_root / "edgeq-root.json").read_text("utf-8")) == {
        "ai-edge-litert": litert,
        "numpy": numpy,
        "python": python,
    }


@pytest.mark.slow
def test_it_runs_the_files_of_the_fixtures(arm64_command: list[str]) -> None:
    """With XNNPACK's kernels for ARM; the outputs have the shapes and dtypes of this machine."""
    files = sorted(map(str, CONVERTED.glob("*.tflite")))
    assert files

    command = ["-c", RUN_ALL, *files]
    there, here = (
        subprocess.run([*python, *command], capture_output=True, check=True, timeout=300)
        for python in (arm64_command, [sys.executable])
    )

    assert json.loads(there.stdout) == json.loads(here.stdout)
