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

from pytest_edgeq.runtimes.workers.arm64_root import make_arm64_root, ubuntu_sources
from pytest_edgeq.runtimes.workers.private_root import PrivateRootError, is_finished
from tests.roots import unheard
from tests.runtimes.targets.conftest import Program, finished, target

# An emulated CPU, and a root that is downloaded for it.
pytestmark = [
    pytest.mark.skipif(
        platform.machine() in ("aarch64", "arm64"), reason="a 64-bit ARM emulates none"
    ),
    pytest.mark.timeout(900),
]

QEMU = "echo '  cortex-a76'; exit 1"
"""A stand-in for QEMU, for what ends before it runs anything."""


@pytest.fixture
def _emulator(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program("qemu-aarch64-static", QEMU)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)


@pytest.mark.usefixtures("_no_programs")
def test_another_distribution_is_told_what_is_needed(program: Program, parent: Path) -> None:
    """It has no apt-get; one with QEMU runs a root that was made elsewhere, and makes none."""
    done = target("arm64", parent / "arm64")

    assert done.exit_code == 2
    assert done.stderr.startswith("Error: there is no qemu-aarch64-static; this machine has no apt")
    assert "64-bit ARM Linux that has Python, numpy and ai-edge-litert" in done.stderr
    assert max(map(len, done.stderr.splitlines())) <= 160
    program("qemu-aarch64-static", QEMU)
    with pytest.raises(PrivateRootError, match="this machine has no apt-get and dpkg"):
        make_arm64_root(parent / "arm64", say=unheard)
    assert not list(parent.iterdir())


@pytest.mark.parametrize(
    ("known", "package", "name"),
    [
        ("qemu-user-static|qemu-user", "qemu-user-static", "qemu-aarch64-static"),
        ("qemu-user", "qemu-user", "qemu-aarch64"),
        ("nothing", "qemu-user-static", "qemu-aarch64-static"),
    ],
    ids=["debian", "ubuntu 26.04", "no package lists"],
)
@pytest.mark.usefixtures("_no_programs")
def test_without_the_emulator(
    known: str, package: str, name: str, program: Program, parent: Path
) -> None:
    """A user is told the command; root installs it, and is told why that fails."""
    policy = f"case $2 in {known}) echo '  Candidate: 1:7.2';; *) echo '  Candidate: (none)';; esac"
    program("apt-cache", policy)
    program("apt-get", "[ $2 = update ] || { echo 'E: dpkg was interrupted' >&2; exit 100; }")

    with pytest.raises(PrivateRootError) as caught:
        make_arm64_root(parent / "arm64", say=unheard)

    told = f"there is no {name}, which runs programs of 64-bit ARM: sudo apt-get install {package}"
    if os.geteuid() == 0:
        told = f"{package} cannot be installed: apt-get -qq ended with exit code 100\n"
        told += "  E: dpkg was interrupted"
    assert str(caught.value) == told
    assert not list(parent.iterdir())


@pytest.mark.usefixtures("_no_programs")
def test_the_emulator_of_the_machine(program: Program, parent: Path) -> None:
    """Ubuntu 26.04 has no qemu-aarch64-static; QEMU 6.2 of Ubuntu 22.04 lacks the CPU."""
    program("qemu-aarch64", QEMU)
    root = finished(parent / "arm64", metadata.version("ai-edge-litert"))
    assert make_arm64_root(root, say=unheard)[:2] == ["qemu-aarch64", "-cpu"]

    program("qemu-aarch64-static", "echo '  cortex-a72'; exit 1")
    with pytest.raises(PrivateRootError, match=r"the CPU cortex-a76: install QEMU 7\.1 or later"):
        make_arm64_root(parent / "other", say=unheard)


def test_on_64_bit_arm_nothing_is_made(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own Python is the command."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    told: list[str] = []

    assert make_arm64_root(parent / "arm64", say=told.append) == [sys.executable]

    assert "no emulation is needed" in told[-1]
    assert not list(parent.iterdir())


@pytest.mark.parametrize(
    ("fields", "codename"),
    [
        ("ID=ubuntu VERSION_CODENAME=noble", "noble"),
        ("ID=linuxmint ID_LIKE=ubuntu VERSION_CODENAME=xia UBUNTU_CODENAME=noble", "noble"),
        ("ID=debian VERSION_CODENAME=bookworm", None),
        ("ID=fedora VERSION_ID=43", None),
    ],
)
def test_ubuntu_has_mirrors_of_its_own_for_arm64(fields: str, codename: str | None) -> None:
    """The sources of an x86 machine do not have it; on Debian they do."""
    sources = ubuntu_sources(dict(word.split("=") for word in fields.split()))

    if codename is None:
        assert sources is None
    else:
        assert sources is not None
        assert f"] http://ports.ubuntu.com/ubuntu-ports {codename}-updates main\n" in sources
        assert f"] http://archive.ubuntu.com/ubuntu {codename} main\n" in sources


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt-get")
@pytest.mark.usefixtures("_emulator", "_no_network")
def test_without_a_network_an_older_root_stays(parent: Path) -> None:
    """The last lines of apt-get say why; nothing half made is left beside it."""
    folder = finished(parent / "arm64", "2.1.0")

    with pytest.raises(PrivateRootError) as caught:
        make_arm64_root(folder, say=unheard)

    first, *lines = str(caught.value).splitlines()
    assert first == "the apt sources give no package python3 for arm64; apt-get update:"
    assert any("127.0.0.1:9" in line for line in lines)
    assert list(parent.iterdir()) == [folder]
    assert not is_finished(folder)


@pytest.mark.slow
def test_a_finished_root_is_told_and_left_as_it_is(
    arm64_root: Path, arm64_command: list[str]
) -> None:
    """The lines to copy come last; it has the release that is installed here."""
    before = arm64_root.stat()

    done = target("arm64", arm64_root)

    assert done.exit_code == 0
    release, root = metadata.version("ai-edge-litert"), str(arm64_root)
    assert done.stdout.splitlines() == [
        f"{root} is finished and has ai-edge-litert {release}: nothing to do",
        "",
        "[tool.pytest.ini_options]",
        f'edgeq_targets = ["arm64 = {arm64_command[0]} -cpu cortex-a76 '
        f'-L {root} {root}/usr/bin/python3 -I"]',
    ]
    assert arm64_root.stat() == before
    code = (
        "import importlib.metadata as m, json, platform; print(json.dumps({'machine': "
        "platform.machine(), 'python': platform.python_version(), "
        "**{name: m.version(name) for name in ('numpy', 'ai-edge-litert')}}))"
    )
    run = [*arm64_command, "-c", code]
    told = json.loads(subprocess.run(run, capture_output=True, check=True, timeout=300).stdout)
    assert told.pop("machine") == "aarch64"
    assert told == json.loads((arm64_root / "edgeq-root.json").read_text("utf-8"))
