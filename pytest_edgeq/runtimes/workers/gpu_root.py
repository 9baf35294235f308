"""
Make the private root with a GPU in software: Mesa's lavapipe, which is Vulkan on the CPU.

The wheel of ai-edge-litert has the GPU engine of phones, which runs on any Vulkan.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

from pytest_edgeq.runtimes.workers.private_root import (
    NO_APT,
    Apt,
    PrivateRootError,
    has_apt,
    is_finished,
    new_root,
    run_on,
)
from pytest_edgeq.versions import version_of

# Debian's names of the CPUs that wheels of ai-edge-litert have the GPU engine for.
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}

_MESA = "mesa-vulkan-drivers"
_LAVAPIPE = "libvulkan_lvp.so"
# The engine finds no adapter in 22.3 of Debian 12; 23.2, 24.0, 25.0 and 25.2 were tried.
_OLDEST = (23, 2)

# Its releases are signed by keys of Debian 12 as well.
_DEBIAN_13 = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {} trixie main\n"

_NO_APT = NO_APT.format(
    name="gpu",
    use="",
    other="this distribution's own package of Mesa 23.2 or later, if it has lavapipe",
)

# Of the root alone are the C library, which may be newer than the machine's, and the drivers: no
# layer of the machine's Vulkan is loaded. Vulkan before 1.3.207 reads the second variable.
_LAUNCHER = """\
#!/bin/sh
# Starts the Python of this folder, which may be moved, with the folder's own libraries.
root=$(dirname "$(readlink -f "$0")")
unset LD_PRELOAD
export VK_DRIVER_FILES="$root/lavapipe.json" VK_ICD_FILENAMES="$root/lavapipe.json"
export VK_LOADER_LAYERS_DISABLE='~all~'
exec "$root/{loader}" --library-path "$root/usr/lib/{triplet}:$root/lib/{triplet}" \\
  "$root/usr/bin/python3" -I "$@"
"""


def make_gpu_root(folder: Path, *, say: Callable[[str], None]) -> list[str]:
    """Make a root with a GPU in software if needed, and return the command of its Python."""
    folder = folder.absolute()
    command = [f"{folder}/python3"]
    if is_finished(folder, has_gpu=True):
        litert = version_of("ai-edge-litert")
        say(f"{folder} is finished and has ai-edge-litert {litert}: nothing to do")
        return command
    if not has_apt():
        raise PrivateRootError(_NO_APT)
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise PrivateRootError(
            f"ai-edge-litert has a GPU engine for x86-64 and 64-bit ARM, and none for {machine}"
        )
    with new_root(folder, say) as root:
        say("reading the distribution's package lists")
        apt = _apt_with_mesa(root.downloads, _ARCHITECTURES[machine], say)
        mesa = _release(apt.version(_MESA))
        say(f"downloading Mesa {mesa}, Python and the packages that they depend on")
        python = apt.unpack(root.path, [_MESA, "libvulkan1", "libstdc++6"])
        root.unpack_wheels(machine, python)
        _add_launcher(root.path)
        say("running a model of one op on lavapipe")
        started_by = [str(root.path / "python3")]
        root.try_python("mesa", started_by)
        root.releases |= {"mesa": mesa, "adapter": try_gpu(started_by)}
    return command


def _apt_with_mesa(downloads: Path, architecture: str, say: Callable[[str], None]) -> Apt:
    """Return an APT of the system's sources, or of Debian 13 where their Mesa is too old."""
    apt = Apt(downloads / "apt", architecture)
    mesa = _release(apt.version(_MESA))
    if is_new_enough(mesa):
        install = f"sudo apt-get install {_MESA}"
        say(f"Mesa {mesa} of this machine is new enough for its own runtime `gpu`: {install}")
        return apt
    mirror = apt.mirror("Debian")
    if mirror is None:
        text = "use Debian 12, Ubuntu 22.04 with its updates, or later"
        raise PrivateRootError(f"Mesa {mesa} of this machine's apt sources is too old: {text}")
    say(f"Mesa {mesa} of this machine is too old: Debian 13 has the packages, at {mirror}")
    return Apt(downloads / "newer", architecture, _DEBIAN_13.format(mirror))


def is_new_enough(mesa: str) -> bool:
    """Whether LiteRT's GPU engine runs on the lavapipe of a release of Mesa."""
    major, minor = mesa.split(".")[:2]
    return (int(major), int(minor)) >= _OLDEST


def _release(version: str) -> str:
    """Return the upstream release of a package's version."""
    return version.partition("-")[0]


def _add_launcher(root: Path) -> None:
    """Remove the drivers of real GPUs, and add the command that starts Python on lavapipe."""
    # The folder of libraries is that of the C library before Ubuntu 23.10 alone.
    (loader,) = (root / "lib").glob("*-linux-gnu/ld-linux-*")
    triplet = loader.parent.name
    for driver in (root / "usr" / "lib" / triplet).glob("libvulkan_*.so"):
        if driver.name != _LAVAPIPE:
            driver.unlink()
    (packaged,) = (root / "usr" / "share" / "vulkan" / "icd.d").glob("lvp_icd*.json")
    manifest = json.loads(packaged.read_text("utf-8"))
    manifest["ICD"]["library_path"] = _LAVAPIPE  # found in the launcher's path of libraries
    (root / "lavapipe.json").write_text(json.dumps(manifest), "utf-8")
    script = _LAUNCHER.format(loader=loader.relative_to(root), triplet=triplet)
    (root / "python3").write_text(script, "utf-8")
    (root / "python3").chmod(0o755)


def try_gpu(command: Sequence[str]) -> str:
    """Run a product of float16 on the GPU, and return the adapter's name."""
    return run_on("mesa", command, "GPU", lambda target: target.machine_for("gpu").adapter)
