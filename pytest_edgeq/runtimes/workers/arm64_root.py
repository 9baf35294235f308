"""
Make the private root for 64-bit ARM, which QEMU runs on a machine with another CPU.

Where QEMU is missing, it is installed for root; nothing else of the system is changed.
"""

from __future__ import annotations

import itertools
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from pytest_edgeq.runtimes.workers.private_root import (
    NO_APT,
    Apt,
    PrivateRootError,
    candidate,
    has_apt,
    is_finished,
    new_root,
    run,
)
from pytest_edgeq.versions import version_of

# The program of each package; Debian 13 has both, Ubuntu 26.04 the second alone.
_EMULATORS = {"qemu-user-static": "qemu-aarch64-static", "qemu-user": "qemu-aarch64"}
_CPU = "cortex-a76"  # has the dot product instructions that today's phones run models with

_NO_APT = NO_APT.format(
    name="arm64",
    use=": QEMU runs it",
    other="another folder with a 64-bit ARM Linux that has Python, numpy and ai-edge-litert",
)

# Without this file ai-edge-litert 2.2 and 2.3 end with SIGSEGV under qemu 7.2 as they look for the
# cores: that QEMU shows the file of the machine. Below the root it is found first.
_CPUINFO = (
    "processor\t: {core}\nFeatures\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp "
    "asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs\nCPU implementer\t: 0x41\n"
    "CPU architecture: 8\nCPU variant\t: 0x4\nCPU part\t: 0xd0b\nCPU revision\t: 0\n\n"
)

# The first has arm64 up to 25.10, the second from 26.04 on; what one lacks is no error.
_UBUNTU_MIRRORS = ("http://ports.ubuntu.com/ubuntu-ports", "http://archive.ubuntu.com/ubuntu")
_UBUNTU_KEYS = "/usr/share/keyrings/ubuntu-archive-keyring.gpg"


def make_arm64_root(folder: Path, *, say: Callable[[str], None]) -> list[str]:
    """Make a root for 64-bit ARM if needed, and return the command that starts its Python."""
    if platform.machine() in ("aarch64", "arm64"):
        say("this machine is a 64-bit ARM itself: no emulation is needed, its own Python serves")
        return [sys.executable]
    folder = folder.absolute()
    is_made = is_finished(folder)
    emulator = next(filter(shutil.which, _EMULATORS.values()), None) or _install_emulator(say)
    if _CPU not in run([emulator, "-cpu", "help"]).stdout.split():
        text = f"this {emulator} does not know the CPU {_CPU}: install QEMU 7.1 or later"
        raise PrivateRootError(text)
    # Isolated: the packages of the user's own Python, which may be of this release, are of x86.
    command = [emulator, "-cpu", _CPU, "-L", str(folder), f"{folder}/usr/bin/python3", "-I"]
    if is_made:
        litert = version_of("ai-edge-litert")
        say(f"{folder} is finished and has ai-edge-litert {litert}: nothing to do")
        return command
    if not has_apt():
        raise PrivateRootError(_NO_APT)
    with new_root(folder, say) as root:
        say("downloading the distribution's Python and the packages that it depends on")
        sources = ubuntu_sources(platform.freedesktop_os_release())
        apt = Apt(root.downloads / "apt", "arm64", sources)
        root.unpack_wheels("aarch64", apt.unpack(root.path, ["libstdc++6"]))
        (root.path / "proc").mkdir(exist_ok=True)
        cores = (_CPUINFO.format(core=core) for core in range(os.cpu_count() or 1))
        (root.path / "proc" / "cpuinfo").write_text("".join(cores), "utf-8")
        say("running a model of one op under QEMU")
        root.try_python("arm64", [word.replace(str(folder), str(root.path)) for word in command])
    return command


def ubuntu_sources(fields: Mapping[str, str]) -> str | None:
    """Return the apt sources of Ubuntu for 64-bit ARM, which its mirrors for x86 need not have."""
    if "ubuntu" not in f"{fields.get('ID')} {fields.get('ID_LIKE')}".split():
        return None
    # Distributions made of Ubuntu have a codename of their own besides it.
    codename = fields.get("UBUNTU_CODENAME") or fields["VERSION_CODENAME"]
    suites = (codename, f"{codename}-updates", f"{codename}-security")
    pairs = itertools.product(_UBUNTU_MIRRORS, suites)
    return "".join(f"deb [arch=arm64 signed-by={_UBUNTU_KEYS}] {m} {s} main\n" for m, s in pairs)


def _install_emulator(say: Callable[[str], None]) -> str:
    """Install QEMU, for root, and return its name."""
    if shutil.which("apt-get") is None:
        raise PrivateRootError(f"there is no {_EMULATORS['qemu-user-static']}; {_NO_APT}")
    if is_root := os.geteuid() == 0:
        say("installing QEMU by apt-get")
        run(["apt-get", "-qq", "update"], "QEMU cannot be installed")
    package = next(filter(candidate, _EMULATORS), "qemu-user-static")
    if not is_root:
        lacking = f"there is no {_EMULATORS[package]}, which runs programs of 64-bit ARM"
        raise PrivateRootError(f"{lacking}: sudo apt-get install {package}")
    install = ["apt-get", "-qq", "-y", "--no-install-recommends", "install"]
    run([*install, package], f"{package} cannot be installed")
    return _EMULATORS[package]
