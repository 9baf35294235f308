"""Errors of the command line: a sentence on stderr and an exit code, never a traceback."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

import click

from pytest_edgeq.versions import naming_missing_libraries

FOUND = 1  # exit code of a command that ran, and found what it looks for


def exit_codes(done: str, found: str | None, trouble: str) -> str:
    """Return the epilog of a command's help, which lists its exit codes."""
    meanings = (done, found, trouble)
    lines = [f"  {code}  {text}" for code, text in enumerate(meanings) if text is not None]
    return "\n".join(["\b", "Exit codes:", *lines])


class TroubleError(click.ClickException):
    """A command cannot do its work; the text says why."""

    exit_code = 2


@contextlib.contextmanager
def in_sentences() -> Iterator[None]:
    """Show errors on files, samples and settings as their text, without a traceback."""
    try:
        with naming_missing_libraries():
            yield
    except (OSError, ValueError, TypeError, RuntimeError, ModuleNotFoundError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
            text = f"{error.filename}: {error.strerror}"  # str has the number of the error, too
        raise TroubleError(text) from error


def output_lost(error: OSError) -> NoReturn:
    """
    Exit because standard output cannot be written, on a full disk for instance.

    A traceback would end with exit code 1, which says that the command found something.
    """
    # Python writes what is left when it exits, and would fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    click.echo(f"Error: {error.filename or 'standard output'}: {error.strerror}", err=True)
    sys.exit(TroubleError.exit_code)
