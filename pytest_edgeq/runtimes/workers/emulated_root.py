"""
Make private Debian roots: folders with Python, numpy and LiteRT for a CPU that QEMU runs.

Packages come of the Debian or Ubuntu that a root is made on, wheels of PyPI, and ai-edge-litert is
of the installed release. Where QEMU is missing, it is installed for root; nothing else is changed.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pytest_edgeq.runtimes.workers.target import Target
from pytest_edgeq.versions import version_of

# The program of each package; Debian 13 has both, Ubuntu 26.04 the second alone.
_EMULATORS = {"qemu-user-static": "qemu-aarch64-static", "qemu-user": "qemu-aarch64"}
_CPU = "cortex-a76"  # has the dot product instructions that today's phones run models with
_RELEASES = "edgeq-root.json"  # in a finished root: the releases in it

_NO_APT = """\
this machine has no apt-get and dpkg, and a root is made of packages of Debian or Ubuntu:
  make it there, or in a container of one, by `edgeq target arm64 DIR`, and copy DIR: QEMU runs it;
  or use another folder with a 64-bit ARM Linux that has Python, numpy and ai-edge-litert"""

# Without this file ai-edge-litert 2.2 and 2.3 end with SIGSEGV under qemu 7.2 as they look for the
# cores: that QEMU shows the file of the machine. Below the root it is found first.
_CPUINFO = (
    "processor\t: {core}\nFeatures\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp "
    "asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs\nCPU implementer\t: 0x41\n"
    "CPU architecture: 8\nCPU variant\t: 0x4\nCPU part\t: 0xd0b\nCPU revision\t: 0\n\n"
)

# `Dir::Etc` stays the system's: its mirrors, proxies and keys. The hooks do not: they clear the
# system's cache (in container images) or index what was downloaded for the desktop. With an empty
# status file nothing is installed, so that apt-get downloads all that a package depends on.
_APT = """\
#clear APT::Architectures;
#clear APT::Update;
#clear DPkg;
APT { Architecture "ARCH"; Architectures { "ARCH"; }; Install-Recommends "false"; };
APT::Sandbox::User "root";
Acquire::Languages "none";
Dir::State "DIR"; Dir::State::lists "lists"; Dir::State::status "DIR/status";
Dir::Cache "DIR"; Dir::Cache::archives "archives";
Dir::Log "DIR";
"""
_OTHER_SOURCES = 'Dir::Etc::sourcelist "DIR/sources.list"; Dir::Etc::sourceparts "/dev/null";\n'

# The first has arm64 up to 25.10, the second from 26.04 on; what one lacks is no error.
_UBUNTU_MIRRORS = ("http://ports.ubuntu.com/ubuntu-ports", "http://archive.ubuntu.com/ubuntu")
_UBUNTU_KEYS = "/usr/share/keyrings/ubuntu-archive-keyring.gpg"


class EmulatedRootError(RuntimeError):
    """A root cannot be made; the text has cause and fix."""


def make_root(folder: Path, *, say: Callable[[str], None]) -> list[str]:
    """Make a root for 64-bit ARM if needed, and return the command that starts its Python."""
    if platform.machine() in ("aarch64", "arm64"):
        say("this machine is a 64-bit ARM itself: no emulation is needed, its own Python serves")
        return [sys.executable]
    folder = folder.absolute()
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_free and not (folder / _RELEASES).is_file():
        raise EmulatedRootError(
            f"{folder} exists and is no root that edgeq made: name a new folder"
        )
    litert = version_of("ai-edge-litert")
    emulator = next(filter(shutil.which, _EMULATORS.values()), None) or _install_emulator(say)
    if _CPU not in _run([emulator, "-cpu", "help"]).stdout.split():
        text = f"this {emulator} does not know the CPU {_CPU}: install QEMU 7.1 or later"
        raise EmulatedRootError(text)
    # Isolated: the packages of the user's own Python, which may be of this release, are of x86.
    command = [emulator, "-cpu", _CPU, "-L", str(folder), f"{folder}/usr/bin/python3", "-I"]
    if is_finished(folder):
        say(f"{folder} is finished and has ai-edge-litert {litert}: nothing to do")
        return command
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise EmulatedRootError(_NO_APT)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder, so that the finished root is moved at once.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as made:
        root = Path(made, "root")
        sources = ubuntu_sources(platform.freedesktop_os_release())
        say("downloading the distribution's Python and the packages that it depends on")
        version = unpack_packages(root, Path(made, "apt"), "arm64", ["libstdc++6"], sources)
        say(f"downloading the wheels of ai-edge-litert {litert} and numpy")
        names = [f"ai-edge-litert=={litert}", "numpy"]
        unpack_wheels(root, Path(made, "wheels"), "aarch64", version, names)
        (root / "proc").mkdir(exist_ok=True)
        cores = (_CPUINFO.format(core=core) for core in range(os.cpu_count() or 1))
        (root / "proc" / "cpuinfo").write_text("".join(cores), "utf-8")
        say("running a model of one op under QEMU")
        releases = _releases([word.replace(str(folder), str(root)) for word in command])
        (root / _RELEASES).write_text(f"{json.dumps(releases, indent=2)}\n", "utf-8")
        if folder.exists():
            folder.rename(Path(made, "replaced"))
        root.rename(folder)
    size = sum(path.lstat().st_size for path in folder.rglob("*"))
    say(f"{folder}: {', '.join(map(' '.join, releases.items()))}, {size / 1e6:.0f} MB")
    return command


def is_finished(folder: Path) -> bool:
    """Whether a folder is a root with the installed release of ai-edge-litert."""
    if not (folder / _RELEASES).exists():
        return False
    releases = json.loads((folder / _RELEASES).read_text("utf-8"))
    return bool(releases["ai-edge-litert"] == version_of("ai-edge-litert"))


def unpack_packages(
    root: Path, downloads: Path, architecture: str, packages: Sequence[str], sources: str | None
) -> str:
    """
    Unpack Python and packages into a new root, with all that they depend on; return its version.

    An APT of its own, which any user can run, reads the given sources, or those of the system.
    """
    for each in ("lists", "archives"):
        (downloads / each / "partial").mkdir(parents=True)
    (downloads / "status").touch()
    (downloads / "sources.list").write_text(sources or "", "utf-8")
    text = _APT if sources is None else _APT + _OTHER_SOURCES
    text = text.replace("ARCH", architecture).replace("DIR", str(downloads))
    (downloads / "apt.conf").write_text(text, "utf-8")
    options = ("-c", str(downloads / "apt.conf"))
    # Its exit code says little: 0 without a network, and 100 where one list of many is lacking.
    updated = _run(["apt-get", *options, "-qq", "update"])
    found = re.match(r"3\.\d+", _candidate("python3", *options) or "")
    if found is None:
        raise EmulatedRootError(
            f"the apt sources give no package python3 for {architecture}; apt-get update:"
            f"{_last_lines(updated.stderr) or ' it has no message'}"
        )
    python = found[0]
    install = ["apt-get", *options, "-qq", "-y", "--download-only", "install", *packages]
    install += [f"python{python}-minimal", f"libpython{python}-stdlib"]
    _run(install, f"the packages for {architecture} cannot be downloaded")
    root.mkdir()
    for package in sorted((downloads / "archives").glob("*.deb")):
        _run(["dpkg-deb", "-x", str(package), str(root)], f"{package.name} cannot be unpacked")
    (root / "usr" / "bin" / "python3").symlink_to(f"python{python}")
    if not (root / "lib").exists():  # a link that comes with an installation
        (root / "lib").symlink_to("usr/lib")
    return python


def unpack_wheels(
    root: Path, downloads: Path, machine: str, python: str, wheels: Sequence[str]
) -> None:
    """Unpack wheels with all that they depend on, or raise an `EmulatedRootError`."""
    # pip looks for exactly these tags; 2.28 is older than the C library of any Python 3.10.
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(28, 16, -1)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    command += [f"--platform={each}" for each in (*platforms, f"manylinux2014_{machine}")]
    command += ["--dest", str(downloads), *wheels]
    _run(command, f"the wheels for Python {python} on {machine} cannot be downloaded")
    for wheel in downloads.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            # Debian's Python reads this folder of all that are below `sys.prefix`.
            archive.extractall(root / "usr" / "lib" / "python3" / "dist-packages")


def ubuntu_sources(fields: Mapping[str, str]) -> str | None:
    """Return the apt sources of Ubuntu for 64-bit ARM, which its mirrors for x86 need not have."""
    if "ubuntu" not in f"{fields.get('ID')} {fields.get('ID_LIKE')}".split():
        return None
    # Distributions made of Ubuntu have a codename of their own besides it.
    codename = fields.get("UBUNTU_CODENAME") or fields["VERSION_CODENAME"]
    suites = (codename, f"{codename}-updates", f"{codename}-security")
    pairs = itertools.product(_UBUNTU_MIRRORS, suites)
    return "".join(f"deb [arch=arm64 signed-by={_UBUNTU_KEYS}] {m} {s} main\n" for m, s in pairs)


def _releases(command: list[str]) -> dict[str, str]:
    """Run a model, as an import alone starts no kernels; return the releases."""
    from pytest_edgeq.runtimes.workers.trial import try_target

    target = Target("arm64", command, 60)  # it takes 3 s
    try:
        found = try_target(target).machine
    except RuntimeError as error:
        raise EmulatedRootError(f"the root's Python does not run a model: {error}") from None
    finally:
        target.close()
    return {found.package: found.release, "numpy": found.numpy, "python": found.python}


def _install_emulator(say: Callable[[str], None]) -> str:
    """Install QEMU, for root, and return its name."""
    if shutil.which("apt-get") is None:
        raise EmulatedRootError(f"there is no {_EMULATORS['qemu-user-static']}; {_NO_APT}")
    if is_root := os.geteuid() == 0:
        say("installing QEMU by apt-get")
        _run(["apt-get", "-qq", "update"], "QEMU cannot be installed")
    package = next(filter(_candidate, _EMULATORS), "qemu-user-static")
    if not is_root:
        lacking = f"there is no {_EMULATORS[package]}, which runs programs of 64-bit ARM"
        raise EmulatedRootError(f"{lacking}: sudo apt-get install {package}")
    install = ["apt-get", "-qq", "-y", "--no-install-recommends", "install"]
    _run([*install, package], f"{package} cannot be installed")
    return _EMULATORS[package]


def _candidate(package: str, *options: str) -> str | None:
    """Return the version of a package that apt-get would install; None if it knows none."""
    shown = _run(["apt-cache", *options, "policy", package], "the package lists cannot be read")
    found = re.search(r"^ *Candidate: (\d\S*)", shown.stdout, re.M)
    return None if found is None else found[1]


def _run(command: Sequence[str], failure: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program, whose messages are in English; raise its last lines if it must not fail."""
    english = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=english)
    if failure and done.returncode:
        raise EmulatedRootError(
            f"{failure}: {shlex.join(command[:2])} ended with exit code {done.returncode}"
            f"{_last_lines(done.stderr or done.stdout)}"
        )
    return done


def _last_lines(output: str) -> str:
    """Return the last lines of an output, each below a line break: apt-get needs some for one."""
    return "".join(f"\n  {line.strip()}" for line in output.splitlines()[-6:])
