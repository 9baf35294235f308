"""`edgeq docs`: the documentation pages that are packed with the package."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import click

from pytest_edgeq.cli.files import PATH
from pytest_edgeq.cli.trouble import TroubleError, exit_codes, in_sentences
from pytest_edgeq.numerics.findings import aligned

_NEEDED = ("sphinx", "myst_parser", "furo")


@click.command(epilog=exit_codes("shown or rendered", None, "wrong usage, or no such page"))
@click.argument("page", required=False)
@click.option(
    "--html",
    type=PATH,
    metavar="DIR",
    help="Render all pages into this folder; needs pytest-edgeq[docs].",
)
@click.option("--open/--no-open", "opens", default=True, help="Open the rendered pages.")
def command(page: str | None, html: Path | None, opens: bool) -> None:
    """
    List the documentation pages, show one in a pager, or render all of them.

    PAGE is a name of the list, or a part of one that no other has, such as choose-a-budget or ci.
    """
    from pytest_edgeq.cli.pages import find_page, pages, shown_text

    if html is not None:
        if page is not None:
            raise click.UsageError("--html renders all pages; leave PAGE out")
        _render(html)
        if opens:
            click.launch(str(html / "index.html"))
        return
    if page is not None:
        with in_sentences():
            text = shown_text(find_page(page))
        click.echo_via_pager(text)
        return
    click.echo("\n".join(aligned([(each.name, each.title) for each in pages()])))


def _render(folder: Path) -> None:
    from pytest_edgeq.cli.pages import FOLDER

    if any(importlib.util.find_spec(name) is None for name in _NEEDED):
        raise TroubleError("rendering needs Sphinx: pip install 'pytest-edgeq[docs]'")
    arguments = ["-q", "-b", "html", str(FOLDER), str(folder)]
    done = subprocess.run([sys.executable, "-m", "sphinx", *arguments], check=False)
    if done.returncode:
        raise TroubleError(f"Sphinx ended with exit code {done.returncode}")
    click.echo(f"{folder / 'index.html'}: written")
