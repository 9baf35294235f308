"""
Make a folder with Python, numpy and LiteRT for 64-bit ARM, which QEMU runs on other CPUs.

The packages are those of the Debian or Ubuntu that it is made on, the wheels those of PyPI, and
ai-edge-litert is of the installed release: figures differ by the CPU, not by the release. Nothing
but the folder is written, except that QEMU is installed where root asks for it and it is missing.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from pytest_edgeq.numerics.target_machine import TargetMachine
from pytest_edgeq.runtimes.workers.private_apt import PrivateApt, candidate, ubuntu_sources
from pytest_edgeq.runtimes.workers.programs import EmulatedRootError, run, start
from pytest_edgeq.runtimes.workers.target import Target
from pytest_edgeq.versions import version_of

__all__ = ["EmulatedRootError", "is_finished", "make_root"]

_EMULATORS = {"qemu-user-static": "qemu-aarch64-static", "qemu-user": "qemu-aarch64"}
"""The program of each package; Debian 13 has both, Ubuntu 26.04 the second alone."""

_CPU = "cortex-a76"
"""Has the dot product instructions that today's phones run quantized models with."""

_RELEASES = "edgeq-root.json"
"""The file in a finished root with the releases in it."""

_NO_APT = (
    "this machine has no apt-get and dpkg, and a root for 64-bit ARM is made of the packages of "
    "Debian or Ubuntu:\n"
    "  make it there, or in a container of one, by `edgeq target arm64 DIR`, and copy DIR here, "
    "where only QEMU is needed;\n"
    "  or use another folder with a 64-bit ARM Linux that has Python, numpy and ai-edge-litert, "
    "such as an unpacked container image"
)

# Without this file ai-edge-litert 2.2 and 2.3 end with SIGSEGV under qemu 7.2 as they look for the
# cores (2.1.6 does not): that QEMU shows the file of the machine, in which no core is of ARM (10.0
# makes one up). Below the root it is found first.
_CPUINFO = """\
processor\t: {core}
Features\t: {features}
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x4
CPU part\t: 0xd0b
CPU revision\t: 0

"""

_FEATURES = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop "
    "asimddp ssbs"
)
"""Features of a Cortex-A76, as Linux names them."""

_SECONDS = 60
"""In which the emulated Python must answer; it takes 3."""


def make_root(
    folder: Path,
    *,
    say: Callable[[str], None],
    machine: str | None = None,
    os_release: Path = Path("/etc/os-release"),
) -> list[str]:
    """
    Make a root for 64-bit ARM, unless the folder is one with the installed ai-edge-litert.

    One with another release of ai-edge-litert is replaced. A call that is interrupted leaves the
    folder as it was.

    Returns:
        The command that starts the root's Python; on 64-bit ARM this Python, and no root is made.

    Raises:
        EmulatedRootError: The folder is something else, a program or the network is missing, or
            the root's Python does not run a model.
    """
    if (machine or platform.machine()) in ("aarch64", "arm64"):
        say("this machine is a 64-bit ARM itself: no emulation is needed, its own Python serves")
        return [sys.executable]
    folder = folder.absolute()
    if folder.exists() and not (folder / _RELEASES).is_file() and not _is_empty(folder):
        raise EmulatedRootError(
            f"{folder} exists and is no root that edgeq made: name a new folder"
        )
    litert = version_of("ai-edge-litert")
    if litert is None:
        raise EmulatedRootError("ai-edge-litert is not installed: pip install ai-edge-litert")
    emulator = _emulator() or _installed_emulator(say)
    _check_cpu(emulator)
    if is_finished(folder):
        say(f"{folder} is finished and has ai-edge-litert {litert}: nothing to do")
        return _command(emulator, folder)
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise EmulatedRootError(_NO_APT)
    if importlib.util.find_spec("pip") is None:
        raise EmulatedRootError(
            f"{sys.executable} has no pip, which downloads wheels: {sys.executable} -m ensurepip"
        )
    sources = ubuntu_sources(os_release)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder, so that the finished root is moved at once.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as made:
        root = Path(made, "root")
        python = _unpack_packages(root, Path(made, "apt"), sources, say)
        _unpack_wheels(root, Path(made, "wheels"), python, litert, say)
        _describe_cores(root)
        say("running a model of one op under QEMU")
        found = _tried(_command(emulator, root))
        releases = {found.package: found.release, "numpy": found.numpy, "python": found.python}
        (root / _RELEASES).write_text(f"{json.dumps(releases, indent=2)}\n", "utf-8")
        if folder.exists():
            folder.rename(Path(made, "replaced"))
        root.rename(folder)
    say(
        f"{folder}: Python {found.python}, numpy {found.numpy} and {found.package} "
        f"{found.release} on {found.machine}, {_megabytes(folder):.0f} MB"
    )
    return _command(emulator, folder)


def is_finished(folder: Path) -> bool:
    """Whether a folder is a root with the installed release of ai-edge-litert."""
    try:
        releases = json.loads((folder / _RELEASES).read_text("utf-8"))
    except FileNotFoundError:
        return False
    return bool(releases["ai-edge-litert"] == version_of("ai-edge-litert"))


def _command(emulator: str, root: Path) -> list[str]:
    # Isolated: the packages of the user's own Python, which may be of this release, are of x86.
    python = str(root / "usr" / "bin" / "python3")
    return [emulator, "-cpu", _CPU, "-L", str(root), python, "-I"]


def _tried(command: list[str]) -> TargetMachine:
    """Run a model: an import alone does not start the kernels, which look for the cores first."""
    from pytest_edgeq.runtimes.workers.trial import try_target

    target = Target("arm64", command, _SECONDS)
    try:
        return try_target(target).machine
    except RuntimeError as error:
        raise EmulatedRootError(f"the root's Python does not run a model: {error}") from None
    finally:
        target.close()


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and next(folder.iterdir(), None) is None


def _megabytes(folder: Path) -> float:
    files = (path.lstat().st_size for path in folder.rglob("*"))
    return sum(files) / 1e6


def _emulator() -> str | None:
    """Return the name of the QEMU that is installed."""
    return next(filter(shutil.which, _EMULATORS.values()), None)


def _installed_emulator(say: Callable[[str], None]) -> str:
    """
    Install QEMU, for root, and return its name.

    Raises:
        EmulatedRootError: There is no apt-get, it fails, or the user is not root.
    """
    if shutil.which("apt-get") is None:
        raise EmulatedRootError(f"there is no {_EMULATORS['qemu-user-static']}; {_NO_APT}")
    is_root = os.geteuid() == 0
    if is_root:
        say("installing QEMU by apt-get")
        run(["apt-get", "-qq", "update"], "QEMU cannot be installed")
    package = next(filter(candidate, _EMULATORS), "qemu-user-static")
    if not is_root:
        raise EmulatedRootError(
            f"there is no {_EMULATORS[package]}, which runs programs of 64-bit ARM: "
            f"sudo apt-get install {package}"
        )
    command = ["apt-get", "-qq", "-y", "--no-install-recommends", "install", package]
    run(command, f"{package} cannot be installed")
    return _EMULATORS[package]


def _check_cpu(emulator: str) -> None:
    """
    Check that the emulator knows the CPU.

    Raises:
        EmulatedRootError: It is too old for it.
    """
    # Ends with 1 after the list.
    listed = start([emulator, "-cpu", "help"])
    if _CPU not in listed.stdout.split():
        raise EmulatedRootError(
            f"this {emulator} does not know the CPU {_CPU}: install QEMU 7.1 or later"
        )


def _unpack_packages(
    root: Path, downloads: Path, sources: str | None, say: Callable[[str], None]
) -> str:
    """Unpack the distribution's Python with all that it depends on, and return its version."""
    downloads.mkdir()
    say("reading the distribution's package lists for arm64")
    apt = PrivateApt(downloads, sources)
    python = apt.python_version()
    say(f"downloading Python {python} and the packages that it depends on")
    packages = (f"python{python}-minimal", f"libpython{python}-stdlib", "libstdc++6")
    root.mkdir()
    for package in apt.download(packages):
        run(["dpkg-deb", "-x", str(package), str(root)], f"{package.name} cannot be unpacked")
    (root / "usr" / "bin" / "python3").symlink_to(f"python{python}")
    # Where packages have all files below /usr, the links to it come with the installation.
    if not (root / "lib").exists():
        (root / "lib").symlink_to("usr/lib")
    return python


def _unpack_wheels(
    root: Path, downloads: Path, python: str, litert: str, say: Callable[[str], None]
) -> None:
    """Unpack ai-edge-litert and numpy with what they depend on."""
    say(f"downloading the wheels of ai-edge-litert {litert} and numpy")
    # pip looks for exactly these tags; 2.28 is older than the C library of any Python 3.10.
    platforms = [f"manylinux_2_{minor}_aarch64" for minor in range(28, 16, -1)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    command += [f"--platform={each}" for each in (*platforms, "manylinux2014_aarch64")]
    command += ["--dest", str(downloads), f"ai-edge-litert=={litert}", "numpy"]
    run(command, f"the wheels for Python {python} on 64-bit ARM cannot be downloaded")
    for wheel in downloads.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            # Debian's Python reads this folder of all that are below `sys.prefix`.
            archive.extractall(root / "usr" / "lib" / "python3" / "dist-packages")


def _describe_cores(root: Path) -> None:
    """Write the file that tells the emulated cores."""
    path = root / "proc" / "cpuinfo"
    path.parent.mkdir(exist_ok=True)
    cores = range(os.cpu_count() or 1)
    path.write_text(
        "".join(_CPUINFO.format(core=core, features=_FEATURES) for core in cores), "utf-8"
    )
