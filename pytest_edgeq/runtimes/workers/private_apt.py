"""Download Debian packages for 64-bit ARM without a change to the system."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pytest_edgeq.runtimes.workers.programs import EmulatedRootError, last_lines, run, start

# `Dir::Etc` stays the system's: its mirrors, proxies and keys. The hooks do not: they clear the
# system's cache (in container images) or index what was downloaded for the desktop. With an empty
# status file nothing is installed, so that apt-get downloads all that a package depends on.
_CONFIGURATION = """\
#clear APT::Architectures;
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Pre-Invoke;
#clear DPkg::Post-Invoke;
APT::Architecture "arm64";
APT::Architectures {{ "arm64"; }};
APT::Install-Recommends "false";
APT::Sandbox::User "root";
Acquire::Languages "none";
Dir::State "{folder}";
Dir::State::lists "lists";
Dir::State::status "{folder}/status";
Dir::Cache "{folder}";
Dir::Cache::archives "archives";
Dir::Log "{folder}";
"""

_OTHER_SOURCES = """\
Dir::Etc::sourcelist "{folder}/sources.list";
Dir::Etc::sourceparts "/dev/null";
"""

_UBUNTU_KEYS = "/usr/share/keyrings/ubuntu-archive-keyring.gpg"

# The first has arm64 up to 25.10, the second from 26.04 on; what one lacks is no error.
_UBUNTU_MIRRORS = ("http://ports.ubuntu.com/ubuntu-ports", "http://archive.ubuntu.com/ubuntu")


class PrivateApt:
    """APT with state, cache and architecture of its own, which any user can run."""

    def __init__(self, folder: Path, sources: str | None) -> None:
        self._archives = folder / "archives"
        for each in (folder / "lists", self._archives):
            (each / "partial").mkdir(parents=True)
        (folder / "status").touch()
        text = _CONFIGURATION
        if sources is not None:
            (folder / "sources.list").write_text(sources, "utf-8")
            text += _OTHER_SOURCES
        self._configuration = folder / "apt.conf"
        self._configuration.write_text(text.format(folder=folder), "utf-8")

    def python_version(self) -> str:
        """
        Read the package lists, and return the version of the distribution's Python 3 as `3.11`.

        Raises:
            EmulatedRootError: The lists cannot be downloaded, or they have no Python.
        """
        # Its exit code tells little: 0 without a network, and 100 where one list of many, which
        # need not be the distribution's, cannot be read.
        updated = start(["apt-get", "-c", str(self._configuration), "-qq", "update"])
        version = candidate("python3", "-c", str(self._configuration))
        found = re.match(r"3\.\d+", version or "")
        if found is None:
            told = last_lines(updated.stderr) or " it has no message"
            raise EmulatedRootError(
                f"the apt sources give no package python3 for arm64; apt-get update:{told}"
            )
        return found[0]

    def download(self, packages: Sequence[str]) -> list[Path]:
        """
        Return the `.deb` files of packages and of all that they depend on.

        Raises:
            EmulatedRootError: They cannot be downloaded.
        """
        command = ["apt-get", "-c", str(self._configuration), "-qq", "-y", "--download-only"]
        run([*command, "install", *packages], "the packages for arm64 cannot be downloaded")
        return sorted(self._archives.glob("*.deb"))


def candidate(package: str, *options: str) -> str | None:
    """
    Return the version of a package that apt-get would install; None if it knows no such package.

    Raises:
        EmulatedRootError: apt-cache fails.
    """
    command = ["apt-cache", *options, "policy", package]
    shown = run(command, "the package lists cannot be read").stdout
    found = re.search(r"^ *Candidate: (\d\S*)", shown, re.M)
    return None if found is None else found[1]


def ubuntu_sources(os_release: Path) -> str | None:
    """Return the apt sources of Ubuntu for 64-bit ARM, which its mirrors for x86 need not have."""
    pairs = (line.partition("=") for line in os_release.read_text("utf-8").splitlines())
    fields = {name: value.strip("'\"") for name, _, value in pairs}
    if "ubuntu" not in (fields.get("ID", ""), *fields.get("ID_LIKE", "").split()):
        return None
    # Distributions made of Ubuntu have a codename of their own beside it.
    codename = fields.get("UBUNTU_CODENAME") or fields["VERSION_CODENAME"]
    suites = (codename, f"{codename}-updates", f"{codename}-security")
    return "".join(
        f"deb [arch=arm64 signed-by={_UBUNTU_KEYS}] {mirror} {suite} main\n"
        for mirror in _UBUNTU_MIRRORS
        for suite in suites
    )
