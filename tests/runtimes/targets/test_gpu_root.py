"""The root with a GPU in software: whose packages it has, how it is refused, and runs files."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from pytest_edgeq.runtimes.workers.gpu_root import is_new_enough, make_gpu_root, try_gpu
from pytest_edgeq.runtimes.workers.private_root import PrivateRootError
from tests.roots import unheard
from tests.runtimes.targets.conftest import Program, finished, target

pytestmark = [
    pytest.mark.skipif(
        platform.machine() not in ("x86_64", "aarch64"), reason="there is no GPU engine for it"
    ),
    pytest.mark.timeout(900),  # for a root that is downloaded
]

OF_DEBIAN = "http://mirror.local/debian/"
DEBIAN = f"Debian Debian-Security http://security.local/debian/\nDebian Debian {OF_DEBIAN}"
UBUNTU = "Ubuntu Ubuntu http://mirror.local/ubuntu/"


def test_a_folder_of_something_else_is_left_alone(parent: Path) -> None:
    """So is a file, and a finished root of the other kind."""
    release = metadata.version("ai-edge-litert")
    arm64 = finished(parent / "arm64", release)
    gpu = finished(parent / "gpu", release, adapter="llvmpipe")
    text = parent / "thesis.txt"
    text.write_text("years of work", "utf-8")
    before = sorted(parent.rglob("*"))

    kinds = {"gpu": arm64} | ({"arm64": gpu} if platform.machine() == "x86_64" else {})
    for kind, other in kinds.items():
        for path in (parent, other, text):
            done = target(kind, path)
            assert done.exit_code == 2
            refused = "exists and is no root that edgeq made: name a new folder"
            assert done.stderr == f"Error: {path} {refused}\n"
    assert sorted(parent.rglob("*")) == before
    assert text.read_text("utf-8") == "years of work"


@pytest.mark.usefixtures("_no_programs")
def test_another_distribution_is_told_what_is_needed(parent: Path) -> None:
    """It has no apt-get; a root that was made elsewhere serves there."""
    done = target("gpu", parent / "new")

    assert done.exit_code == 2
    assert done.stderr.startswith(
        "Error: this machine has no apt-get and dpkg, and a root consists"
    )
    assert "Mesa 23.2 or later" in done.stderr
    assert max(map(len, done.stderr.splitlines())) <= 160
    assert not list(parent.iterdir())

    root = finished(parent / "gpu", metadata.version("ai-edge-litert"), adapter="llvmpipe")
    assert make_gpu_root(root, say=unheard) == [f"{root}/python3"]


@pytest.mark.usefixtures("_no_programs")
def test_the_gpu_engine_is_for_two_cpus(
    program: Program, parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wheels for others have none."""
    for name in ("apt-get", "dpkg"):
        program(name, "exit 1")
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")

    with pytest.raises(PrivateRootError, match="x86-64 and 64-bit ARM, and none for riscv64"):
        make_gpu_root(parent / "gpu", say=unheard)


class DownloadStart(BaseException):
    """Ends a call before it downloads."""


@pytest.mark.parametrize(
    ("mesa", "mirrors", "said"),
    [
        pytest.param(
            "23.2.1-1ubuntu3.1~22.04.4",
            UBUNTU,
            "Mesa 23.2.1 of this machine is new enough for its own runtime `gpu`: "
            "sudo apt-get install mesa-vulkan-drivers",
            id="ubuntu 22.04",
        ),
        pytest.param(
            "22.3.6-1+deb12u2",
            DEBIAN,
            f"Mesa 22.3.6 of this machine is too old: Debian 13 has the packages, at {OF_DEBIAN}",
            id="debian 12",
        ),
    ],
)
@pytest.mark.usefixtures("_no_programs")
def test_the_packages_are_of_a_mesa_that_is_new_enough(
    mesa: str, mirrors: str, said: str, program: Program, parent: Path
) -> None:
    """The sources of the distribution if its Mesa is new enough, else those of Debian 13."""
    program("apt-get", f"case $3 in indextargets) echo '{mirrors}';; esac")
    program("apt-cache", f"echo '  Candidate: {mesa}'")
    program("dpkg", "exit 1")
    lines: list[str] = []

    def stop(line: str) -> None:
        lines.append(line)
        if line.startswith("downloading"):
            lines.extend(path.read_text("utf-8") for path in parent.glob(".gpu-*/newer/*.list"))
            raise DownloadStart

    with pytest.raises(DownloadStart):
        make_gpu_root(parent / "gpu", say=stop)

    release = mesa.partition("-")[0]
    keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
    assert lines == [
        "reading the distribution's package lists",
        said,
        f"downloading Mesa {release}, Python and the packages that they depend on",
        *([f"deb [signed-by={keys}] {OF_DEBIAN} trixie main\n"] if mirrors == DEBIAN else []),
    ]
    assert not list(parent.iterdir())


@pytest.mark.usefixtures("_no_programs")
def test_a_mesa_that_is_too_old(program: Program, parent: Path) -> None:
    """Ubuntu's mirrors have no Debian 13; the sentence names what has a newer one."""
    program("apt-get", f"case $3 in indextargets) echo '{UBUNTU}';; esac")
    program("apt-cache", "echo '  Candidate: 21.2.6-0ubuntu0.1~20.04.2'")
    program("dpkg", "exit 1")

    with pytest.raises(PrivateRootError) as caught:
        make_gpu_root(parent / "gpu", say=unheard)

    text = "Mesa 21.2.6 of this machine's apt sources is too old: "
    assert str(caught.value) == f"{text}use Debian 12, Ubuntu 22.04 with its updates, or later"


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo '[-3.0]'", "the root's GPU does not run a model: "),
        ("echo 'no libm.so' >&2; exit 1", "| no libm.so"),
        ("kill -SEGV $$", "got SIGSEGV"),
    ],
    ids=["no answer", "refused", "crash"],
)
def test_a_gpu_that_runs_nothing(script: str, told: str) -> None:
    """The last lines that it printed say why."""
    with pytest.raises(PrivateRootError) as caught:
        try_gpu(["sh", "-c", script])

    assert told in str(caught.value)


@pytest.mark.slow
def test_a_finished_root_is_told_and_left_as_it_is(gpu_root: Path) -> None:
    """The lines to copy come last; it has the release that is installed here."""
    before = gpu_root.stat()

    done = target("gpu", gpu_root)

    assert done.exit_code == 0
    release = metadata.version("ai-edge-litert")
    assert done.stdout.splitlines() == [
        f"{gpu_root} is finished and has ai-edge-litert {release}: nothing to do",
        "",
        "[tool.pytest.ini_options]",
        f'edgeq_targets = ["mesa = {gpu_root}/python3"]',
    ]
    assert gpu_root.stat() == before


@pytest.mark.slow
def test_a_root_that_was_moved_runs_on_its_own_mesa(gpu_root: Path, tmp_path: Path) -> None:
    """With none of the machine's libraries, and the adapter of the record."""
    moved = tmp_path / "moved by hand"
    shutil.copytree(gpu_root, moved, symlinks=True)
    releases = json.loads((moved / "edgeq-root.json").read_text("utf-8"))
    assert is_new_enough(releases["mesa"])
    assert releases["adapter"].startswith("llvmpipe (LLVM ")

    assert try_gpu([str(moved / "python3")]) == releases["adapter"]

    code = (
        "import ai_edge_litert.interpreter, importlib.metadata as m, json, numpy, platform; "
        "maps = [line.split(None, 5) for line in open('/proc/self/maps')]; "
        "print(json.dumps({'python': platform.python_version(), "
        "'code': [words[5].strip() for words in maps if 'x' in words[1] and '/' in words[-1]], "
        "**{name: m.version(name) for name in ('numpy', 'ai-edge-litert')}}))"
    )
    run = [str(moved / "python3"), "-u", "-c", code]
    told = json.loads(subprocess.run(run, capture_output=True, check=True, timeout=300).stdout)
    code_of = told.pop("code")
    assert code_of
    assert all(Path(file).is_relative_to(moved) for file in code_of)
    assert told == {name: releases[name] for name in ("python", "numpy", "ai-edge-litert")}
