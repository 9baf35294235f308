"""`edgeq target`: other machines and CPUs that files are run on."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click

from pytest_edgeq.cli.files import PATH
from pytest_edgeq.cli.trouble import exit_codes, in_sentences

__all__ = ["command"]


@click.group(
    epilog=exit_codes("done", None, "wrong usage, or the target cannot be made or does not start")
)
def command() -> None:
    """Make targets: commands that start Python with LiteRT on another machine or CPU."""


@command.command(epilog=exit_codes("the root is there", None, "it cannot be made: one sentence"))
@click.argument("directory", metavar="DIR", type=PATH)
def arm64(directory: Path) -> None:
    """
    Make a root for 64-bit ARM in DIR, which QEMU runs on this machine.

    It has Python, numpy and the installed release of ai-edge-litert. Works on Debian and Ubuntu,
    for any user, where QEMU is installed; as root it is installed, too. Downloads packages from
    the distribution's mirror and wheels from PyPI.
    """
    from pytest_edgeq.targets.emulated_root import make_root

    with in_sentences():
        started_by = make_root(directory, say=click.echo)
    target = json.dumps(f"arm64 = {shlex.join(started_by)}", ensure_ascii=False)
    click.echo(f"\n[tool.pytest.ini_options]\nedgeq_targets = [{target}]")
