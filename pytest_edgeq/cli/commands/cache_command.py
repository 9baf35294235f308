"""`edgeq cache`: the conversion cache."""

from __future__ import annotations

from pathlib import Path

import click

from pytest_edgeq.cli.files import PATH
from pytest_edgeq.cli.text import json_option, print_json
from pytest_edgeq.cli.trouble import TroubleError, exit_codes, in_sentences

_BELOW = Path(".pytest_cache", "d", "edgeq")  # by default, below pytest's rootdir


@click.command(
    epilog=exit_codes(
        "shown or cleared", "the deletion was not confirmed", "wrong usage, or no cache to clear"
    )
)
@click.argument("action", type=click.Choice(["clear"]), required=False)
@click.option(
    "--dir",
    "directory",
    type=PATH,
    help="The cache's directory, where --edgeq-cache-dir or pytest's cache_dir is set.",
)
@click.option("--yes", is_flag=True, help="Clear without asking.")
@json_option
def command(action: str | None, directory: Path | None, yes: bool, as_json: bool) -> None:
    """
    Show where the conversion cache is and how large, or clear it.

    It is .pytest_cache/d/edgeq in this folder, or in the nearest one above that has it. Tests make
    it again when they convert the models the next time; clearing it costs time only.
    """
    if yes and action is None:
        raise click.UsageError("--yes confirms `edgeq cache clear`; nothing is cleared without it")
    where = _default() if directory is None else directory
    if action == "clear":
        _clear(where, yes, as_json)
    else:
        _show(where, as_json)


def _default() -> Path:
    """Return the directory in the working directory, or in the nearest folder above that has it."""
    above = (folder / _BELOW for folder in Path.cwd().parents)
    return _BELOW if _BELOW.is_dir() else next(filter(Path.is_dir, above), _BELOW)


def _show(where: Path, as_json: bool) -> None:
    from pytest_edgeq.quantize.cache.directory import DEFAULT_LIMIT, size_of

    number, size = size_of(where)
    if as_json:
        facts = {"bytes": size, "entries": number, "limit_bytes": DEFAULT_LIMIT}
        print_json(facts | {"directory": str(where.absolute()), "exists": where.is_dir()})
    elif where.is_dir():
        click.echo(f"{where}: {_size_text(number, size)}, at most {_megabytes(DEFAULT_LIMIT)}")
    else:
        click.echo(f"{where}: no cache yet")


def _clear(where: Path, yes: bool, as_json: bool) -> None:
    from pytest_edgeq.quantize.cache.directory import clear, is_cache, size_of

    if not is_cache(where):
        raise TroubleError(f"{where} is no conversion cache of pytest-edgeq: nothing was deleted")
    number, size = size_of(where)
    if number and not yes:
        click.confirm(f"Delete {_size_text(number, size)} in {where}?", abort=True, err=True)
    with in_sentences():
        number, size = clear(where)
    if as_json:
        print_json({"deleted_bytes": size, "deleted_entries": number, "directory": str(where)})
    else:
        click.echo(f"{where}: deleted {_size_text(number, size)}")


def _size_text(number: int, size: int) -> str:
    entries = "1 entry" if number == 1 else f"{number:,} entries"
    return f"{entries}, {_megabytes(size)}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
