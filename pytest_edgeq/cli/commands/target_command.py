"""`edgeq target`: other machines and CPUs that files are run on."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import click

from pytest_edgeq.cli.files import PATH
from pytest_edgeq.cli.text import json_option, print_json
from pytest_edgeq.cli.trouble import exit_codes, in_sentences

_ROOT_CODES = exit_codes("the root is there", None, "it cannot be made: one sentence")


@click.group(
    epilog=exit_codes("done", None, "wrong usage, or the target cannot be made or does not start")
)
def command() -> None:
    """Make targets: commands that start Python with LiteRT on another machine or CPU."""


@command.command(epilog=_ROOT_CODES)
@click.argument("directory", metavar="DIR", type=PATH)
def arm64(directory: Path) -> None:
    """
    Make a root for 64-bit ARM in DIR, which QEMU runs on this machine.

    It has Python, numpy and the installed release of ai-edge-litert. Works on Debian and Ubuntu,
    for any user, where QEMU is installed; as root it is installed, too. Downloads packages from
    the distribution's mirror and wheels from PyPI.
    """
    from pytest_edgeq.runtimes.workers.arm64_root import make_arm64_root

    _make("arm64", make_arm64_root, directory)


@command.command(epilog=_ROOT_CODES)
@click.argument("directory", metavar="DIR", type=PATH)
def gpu(directory: Path) -> None:
    """
    Make a root in DIR with a GPU that the CPU computes: Mesa's lavapipe.

    LiteRT's GPU engine, which is that of phones, runs on it. It has Python, numpy and the installed
    release of ai-edge-litert, for x86-64 or 64-bit ARM. Works on Debian 12, Ubuntu 22.04 and later,
    for any user, and changes nothing of the system. Downloads packages from the distribution's
    mirror, on Debian 12 those of Debian 13, and wheels from PyPI.
    """
    from pytest_edgeq.runtimes.workers.gpu_root import make_gpu_root

    _make("mesa", make_gpu_root, directory)


def _make(name: str, make_root: Callable[..., list[str]], directory: Path) -> None:
    """Make a root, and print the lines that name it as a target."""
    with in_sentences():
        started_by = make_root(directory, say=click.echo)
    target = json.dumps(f"{name} = {shlex.join(started_by)}", ensure_ascii=False)
    click.echo(f"\n[tool.pytest.ini_options]\nedgeq_targets = [{target}]")


@command.command(
    epilog=exit_codes("it runs files", None, "no such target, it does not start, or runs no files")
)
@click.argument("name")
@json_option
def check(name: str, as_json: bool) -> None:
    """
    Start the target NAME of this project, and run a file of one op on it.

    Prints the machine, its releases, and milliseconds. Targets are those of edgeq_targets in the
    ini file that pytest reads here.
    """
    with in_sentences():
        from pytest_edgeq.names import nearest
        from pytest_edgeq.plugin.project_targets import project_targets
        from pytest_edgeq.runtimes.workers.target import Target

        commands, seconds = project_targets()
        if name not in commands:
            raise ValueError(
                f"no target {name!r}{nearest(name, commands)}; edgeq_targets of this project has "
                f"{', '.join(commands) or 'none'}"
            )
        target = Target(name, commands[name], seconds)
        try:
            trial = target.try_out()
        finally:
            target.close()
    if as_json:
        print_json(
            {
                "command": list(target.command),
                "machine": trial.machine.to_dict(),
                "start_ms": round(trial.start, 1),
                "run_ms": {kernels: round(each, 2) for kernels, each in trial.runs.items()},
            }
        )
        return
    runs = ", ".join(f"{each:.2f} ms on {kernels}" for kernels, each in trial.runs.items())
    click.echo(f"command: {shlex.join(target.command)}")
    click.echo(f"machine: {trial.machine}")
    click.echo(f"started in {trial.start:.0f} ms; a run of one op, to and fro: {runs}")
