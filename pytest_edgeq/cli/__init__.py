"""
The command line `edgeq`: inspect and compare `.tflite` files outside of a test.

Each command is a module of `commands`, imported when it is used.
- `trouble` turns errors into sentences, `text` prints, `files` opens files and runtimes.
- `file_diff` and `file_compare` compare two files, by parameters and by outputs; `pages` finds the
  documentation.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

import click

from pytest_edgeq.cli import commands
from pytest_edgeq.cli.trouble import output_lost
from pytest_edgeq.names import nearest
from pytest_edgeq.versions import version_of

_EPILOG = """
\b
Exit codes of every command:
  0  done, and nothing was found
  1  a finding, a difference, or a budget that is not met
  2  wrong usage, or a file that cannot be read or run

\b
Shell completion:
  bash  eval "$(_EDGEQ_COMPLETE=bash_source edgeq)"
  zsh   eval "$(_EDGEQ_COMPLETE=zsh_source edgeq)"
  fish  _EDGEQ_COMPLETE=fish_source edgeq | source
"""

_SUFFIX = "_command"  # of the module of each command


class CommandGroup(click.Group):
    """The modules `NAME_command` of the package `commands`, each with its command in `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, sorted."""
        names = (module.name for module in pkgutil.iter_modules(commands.__path__))
        return sorted(name.removesuffix(_SUFFIX) for name in names)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None where there is none of this name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"{commands.__name__}.{cmd_name}{_SUFFIX}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments name; an unknown one is refused with the nearest."""
        known = self.list_commands(ctx)
        if args[0] not in known and not args[0].startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"no command {args[0]!r}{nearest(args[0], known)}")
        return super().resolve_command(ctx, args)


@click.group(
    cls=CommandGroup,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(version_of("pytest-edgeq") or "unknown", prog_name="edgeq")
def edgeq() -> None:
    """Inspect and compare quantized .tflite files, and start a test of them."""


def main() -> None:
    """Run the command that `sys.argv` names, and exit with its code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # on Windows a file need not take every character
            stream.reconfigure(errors="backslashreplace")
    try:
        # The same usage and the same completion variable for `edgeq` and `python -m pytest_edgeq`.
        edgeq.main(prog_name="edgeq", complete_var="_EDGEQ_COMPLETE")
    except OSError as error:
        # Commands report errors of the files that they read and write themselves.
        output_lost(error)
