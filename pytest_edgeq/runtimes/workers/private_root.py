"""
Private roots: folders with Python, numpy and LiteRT, made without a change of the system.

Packages come from mirrors of Debian or Ubuntu, wheels from PyPI, and ai-edge-litert is of the
installed release. `arm64_root` makes one that QEMU runs, `gpu_root` one with a GPU in software.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from pytest_edgeq.runtimes.workers.target import Target
from pytest_edgeq.versions import version_of

_Result = TypeVar("_Result")

NO_APT = """\
this machine has no apt-get and dpkg, and a root consists of packages of Debian or Ubuntu:
  make it there, or in a container of one, by `edgeq target {name} DIR`, and copy DIR{use};
  or use {other}"""

_RELEASES = "edgeq-root.json"  # in a finished root: the releases in it
_GPU = "adapter"  # in the releases of a root with a GPU

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


class PrivateRootError(RuntimeError):
    """A root cannot be made; the text has cause and fix."""


def is_finished(folder: Path, *, has_gpu: bool = False) -> bool:
    """
    Whether a folder is a root of this kind with the installed release of ai-edge-litert.

    Raises:
        PrivateRootError: It is something else, which must not be replaced.
    """
    if (folder / _RELEASES).is_file():
        releases = json.loads((folder / _RELEASES).read_text("utf-8"))
        if (_GPU in releases) == has_gpu:
            return bool(releases["ai-edge-litert"] == version_of("ai-edge-litert"))
    elif not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    raise PrivateRootError(f"{folder} exists and is no root that edgeq made: name a new folder")


class NewRoot:
    """A root that is being made: the folder that it will be, and the folder of its downloads."""

    def __init__(self, path: Path, downloads: Path, say: Callable[[str], None]) -> None:
        self.path, self.downloads, self._say = path, downloads, say
        self.releases: dict[str, str] = {}

    def unpack_wheels(self, machine: str, python: str) -> None:
        """Unpack ai-edge-litert and numpy for a Python and a machine, with their dependencies."""
        litert = version_of("ai-edge-litert")
        self._say(f"downloading the wheels of ai-edge-litert {litert} and numpy")
        # pip looks for exactly these tags; 2.28 is older than the C library of any Python 3.10.
        platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(28, 16, -1)]
        download = [sys.executable, "-m", "pip", "download", "--quiet"]
        download += ["--disable-pip-version-check", "--only-binary=:all:", "--implementation=cp"]
        download += [f"--python-version={python}"]
        download += [f"--platform={each}" for each in (*platforms, f"manylinux2014_{machine}")]
        wheels = self.downloads / "wheels"
        download += ["--dest", str(wheels), f"ai-edge-litert=={litert}", "numpy"]
        run(download, f"the wheels for Python {python} on {machine} cannot be downloaded")
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                # Debian's Python reads this folder of all that are below `sys.prefix`.
                archive.extractall(self.path / "usr" / "lib" / "python3" / "dist-packages")

    def try_python(self, name: str, command: Sequence[str]) -> None:
        """Run a model on the kernels of a target, as an import alone starts none."""
        found = run_on(name, command, "Python", Target.try_out).machine
        releases = {found.package: found.release, "numpy": found.numpy, "python": found.python}
        self.releases.update(releases)


@contextlib.contextmanager
def new_root(folder: Path, say: Callable[[str], None]) -> Iterator[NewRoot]:
    """Yield a root to fill, which then replaces the folder; a failure leaves nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder, so that the finished root is moved at once.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as made:
        root = NewRoot(Path(made, "root"), Path(made), say)
        yield root
        text = f"{json.dumps(root.releases, indent=2)}\n"
        (root.path / _RELEASES).write_text(text, "utf-8")
        if folder.exists():
            folder.rename(Path(made, "replaced"))
        root.path.rename(folder)
    size = sum(path.lstat().st_size for path in folder.rglob("*"))
    say(f"{folder}: {', '.join(map(' '.join, root.releases.items()))}, {size / 1e6:.0f} MB")


def run_on(
    name: str, command: Sequence[str], part: str, use: Callable[[Target], _Result]
) -> _Result:
    """Use the target of a root once; `part` names it in the error."""
    target = Target(name, command, 60)  # it takes 3 s
    try:
        return use(target)
    except RuntimeError as error:
        raise PrivateRootError(f"the root's {part} does not run a model: {error}") from None
    finally:
        target.close()


class Apt:
    """An APT with its own package lists, of the system's sources or of others, for any user."""

    def __init__(self, folder: Path, architecture: str, sources: str | None = None) -> None:
        self._folder, self._architecture = folder, architecture
        for each in ("lists", "archives"):
            (folder / each / "partial").mkdir(parents=True)
        (folder / "status").touch()
        (folder / "sources.list").write_text(sources or "", "utf-8")
        text = _APT if sources is None else _APT + _OTHER_SOURCES
        text = text.replace("ARCH", architecture).replace("DIR", str(folder))
        (folder / "apt.conf").write_text(text, "utf-8")
        self._options = ("-c", str(folder / "apt.conf"))
        # Its exit code says little: 0 without a network, and 100 where one list of many is lacking.
        self._updated = run(["apt-get", *self._options, "-qq", "update"])

    def version(self, package: str) -> str:
        """Return the version of a package, or raise a `PrivateRootError` where there is none."""
        found = candidate(package, *self._options)
        if found is None:
            raise PrivateRootError(
                f"the apt sources give no package {package} for {self._architecture}; apt-get "
                f"update:{_last_lines(self._updated.stderr) or ' it has no message'}"
            )
        return found

    def mirror(self, origin: str) -> str | None:
        """Return the address of the mirror of a distribution that the sources name, if any."""
        form = "--format=$(ORIGIN) $(LABEL) $(REPO_URI)"
        targets = run(["apt-get", *self._options, "indextargets", form], "apt-get has no sources")
        found = re.search(rf"^{origin} {origin} (\S+)$", targets.stdout, re.M)
        return None if found is None else found[1]

    def unpack(self, root: Path, packages: Sequence[str]) -> str:
        """Unpack Python and packages into a new root, with all that they depend on."""
        python = ".".join(self.version("python3").split(".")[:2])
        install = ["apt-get", *self._options, "-qq", "-y", "--download-only", "install", *packages]
        install += [f"python{python}-minimal", f"libpython{python}-stdlib"]
        run(install, f"the packages for {self._architecture} cannot be downloaded")
        root.mkdir()
        for package in sorted((self._folder / "archives").glob("*.deb")):
            run(["dpkg-deb", "-x", str(package), str(root)], f"{package.name} cannot be unpacked")
        if not (link := root / "usr" / "bin" / "python3").is_symlink():
            link.symlink_to(f"python{python}")
        if not (root / "lib").exists():  # a link that comes with an installation
            (root / "lib").symlink_to("usr/lib")
        return python


def candidate(package: str, *options: str) -> str | None:
    """Return the version of a package that apt-get would install; None if it knows none."""
    shown = run(["apt-cache", *options, "policy", package], "the package lists cannot be read")
    found = re.search(r"^ *Candidate: (\d\S*)", shown.stdout, re.M)
    return None if found is None else found[1]


def has_apt() -> bool:
    """Whether this machine can unpack packages of Debian."""
    return None not in (shutil.which("apt-get"), shutil.which("dpkg"))


def run(command: Sequence[str], failure: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program, whose messages are in English; raise its last lines if it must not fail."""
    english = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=english)
    if failure and done.returncode:
        raise PrivateRootError(
            f"{failure}: {shlex.join(command[:2])} ended with exit code {done.returncode}"
            f"{_last_lines(done.stderr or done.stdout)}"
        )
    return done


def _last_lines(output: str) -> str:
    """Return the last lines of an output, each below a line break: apt-get needs some for one."""
    return "".join(f"\n  {line.strip()}" for line in output.splitlines()[-6:])
