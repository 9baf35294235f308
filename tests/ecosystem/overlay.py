"""Virtual environments on top of this one, for other versions and more packages than it has."""

from __future__ import annotations

import site
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

import pytest_edgeq
from tests.projects import environment

ROOT = Path(__file__).parents[2]
PYPROJECT = ROOT / "pyproject.toml"

_UNREACHABLE = ("connection broken by", "Failed to establish a new connection", "Failed to fetch")
"""How pip and uv say that the package index is not reachable."""


@dataclass(frozen=True)
class Overlay:
    """
    A virtual environment whose own packages hide those of the environments below it.

    torch and the converter are not installed again: only what differs is.
    """

    path: Path

    @classmethod
    def make(cls, path: Path, *below: Overlay) -> Overlay:
        """Make one on top of others, the first one first, and of the running environment."""
        venv.EnvBuilder(with_pip=False, symlinks=True).create(path)
        overlay = cls(path)
        folders = [*(str(each.site_packages) for each in below), *site.getsitepackages()]
        # addsitedir reads the .pth files in them, too.
        lines = [f"import site; site.addsitedir({folder!r})\n" for folder in folders]
        (overlay.site_packages / "below.pth").write_text("".join(lines), "utf-8")
        return overlay

    @property
    def python(self) -> Path:
        """The interpreter."""
        return self.path / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """The folder of its own packages."""
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.path / "lib" / version / "site-packages"

    def install(self, *arguments: str) -> None:
        """
        Install packages with the running environment's pip.

        Skips the test where the package index is not reachable.
        """
        pip = (sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet")
        fetch(*pip, "--retries", "1", "--no-warn-conflicts", *arguments)

    def run(
        self, *arguments: str | Path, cwd: Path, imports: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """
        Run Python in a folder.

        Args:
            arguments: Of the interpreter.
            cwd: The folder.
            imports: Stands in front of all packages. By default the folder from which the tests
                import pytest_edgeq, which may be another one than the installed.
        """
        package = Path(pytest_edgeq.__file__).parents[1]
        paths = str(package if imports is None else imports)
        return subprocess.run(
            [self.python, *arguments],
            cwd=cwd,
            # On a CI nothing would be written.
            env=environment() | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
            timeout=1200,
        )


def fetch(*command: str) -> str:
    """Run a command that downloads; return what it prints, skip where the index is unreachable."""
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1200
    )
    if run.returncode:
        if any(symptom in run.stderr for symptom in _UNREACHABLE):
            pytest.skip(f"the package index is not reachable: {run.stderr.splitlines()[-1]}")
        raise RuntimeError(f"{' '.join(command)}\n{run.stdout}{run.stderr}")
    return run.stdout
