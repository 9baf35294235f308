"""`edgeq report`: the views of a run, made from its record."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click

from pytest_edgeq.cli.files import PATH
from pytest_edgeq.cli.trouble import FOUND, exit_codes, in_sentences
from pytest_edgeq.names import NEEDS_REPORT
from pytest_edgeq.numerics.findings import counted


@click.command(
    epilog=exit_codes(
        "no test failed", "a test failed in that run", "wrong usage, or no record of a run"
    )
)
@click.argument("record", type=PATH, required=False)
@click.option("--markdown", type=PATH, metavar="FILE", help="Write it here for a pull request.")
@click.option(
    "--html",
    type=PATH,
    metavar="FILE",
    help="Write a page with charts; needs pytest-edgeq[report].",
)
@click.option(
    "--history",
    type=PATH,
    metavar="DIR",
    help="Draw SQNR, size and top-1 of each model over the records DIR/*.json, into --html FILE or "
    "DIR/history.html.",
)
@click.pass_context
def command(
    ctx: click.Context,
    record: Path | None,
    markdown: Path | None,
    html: Path | None,
    history: Path | None,
) -> None:
    """
    Show a run by the record that --edgeq-json has written, or several by --history.

    Prints the table of its models and the first line of each failure.
    """
    from pytest_edgeq.report.model_rows import table_lines
    from pytest_edgeq.report.run import showing
    from pytest_edgeq.report.whole_files import check_folder, write_whole

    if (html or history) is not None and find_spec("bokeh") is None:
        raise click.UsageError(f"{'--html' if html else '--history'}: {NEEDS_REPORT}")
    if (record is None) == (history is None) or (history and markdown):
        raise click.UsageError("expected RECORD, or --history DIR without RECORD and --markdown")
    with in_sentences():
        for path in filter(None, (markdown, html)):
            check_folder(path)
    if record is None:
        _draw_history(Path(str(history)), html)
        return
    with in_sentences(), showing(record) as run:
        for text, failed in table_lines(run):
            click.secho(text, fg="red" if failed else None)
        failures = [test for test in run.tests if test["failure"] is not None]
        click.echo(f"{counted(len(run.tests), 'test')}, {len(failures)} failed")
        for test in failures:
            first = test["failure"]["message"].partition("\n")[0]
            click.secho(f"{test['test']}: {first}", fg="red")
        if markdown is not None:
            from pytest_edgeq.report.markdown import markdown_page

            write_whole(markdown, markdown_page(run))
        if html is not None:
            from pytest_edgeq.report.html.page import html_page

            write_whole(html, html_page(run))
    ctx.exit(FOUND if failures else 0)


def _draw_history(folder: Path, html: Path | None) -> None:
    from pytest_edgeq.report.html.history import history_page, read_runs
    from pytest_edgeq.report.whole_files import write_whole

    path = folder / "history.html" if html is None else html
    with in_sentences():
        runs = read_runs(folder)
        write_whole(path, history_page(runs))
    click.echo(f"{path}: {counted(len(runs), 'run')}")
